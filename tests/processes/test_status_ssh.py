"""A run on another host, looked at through a real sshd and every login shell, and on a terminal at its other end."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from mlxdist.coordinator.launch.ssh import Target
from mlxdist.coordinator.status.remote import RemoteRun
from mlxdist.coordinator.status.show import facts_of
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import NodeError, UserError
from tests.coordinator.overview.told_runs import make_run
from tests.coordinator.status.terminals import ROOT, command, environment, terminal
from tests.coordinator.status.test_looks import add, print_of, step_line, steps_in
from tests.processes.ssh_server import found, ssh_server, why_not
from tests.processes.test_ssh import RC_FILES, TALK

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

HOSTS = """
run = "run.toml"
[coordinator]
host = "mini-1"
[[nodes]]
host = "mini-1"
ssh_options = ["-F", "{config}"]
"""


@pytest.mark.parametrize("shell", ["bash", "fish", "tcsh"])
def test_a_run_is_looked_at_through_any_login_shell_and_not_touched(shell: str, tmp_path: Path) -> None:
    path = found(shell)
    if path is None:
        pytest.skip(f"there is no {shell}")
    with ssh_server(tmp_path, shell=path) as server:
        for name in RC_FILES:
            (server.home / name).parent.mkdir(parents=True, exist_ok=True)
            (server.home / name).write_text(TALK)
        run = make_run(server.home / "runs" / "it's mine!", ending=None)
        before = print_of(run)
        with RemoteRun(server.target(), "runs/it's mine!", repeat=False) as remote:
            facts = facts_of(remote)
        assert (facts["run"], facts["state"], facts["step"]) == ("mini-1:it's mine!", "training", 4)
        assert print_of(run) == before
        with RemoteRun(server.target(), "~/runs", repeat=False) as remote, pytest.raises(UserError, match="no run in"):
            remote.look()


def look_on(run: RemoteRun) -> None:
    """Looks until that fails."""
    while True:
        steps_in(run.look())


def test_a_watched_run_goes_on_over_one_connection_and_a_lost_host_is_named(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        run = make_run(server.home / "mine", ending=None)
        with RemoteRun(server.target(), "mine") as remote:
            assert steps_in(remote.look()) == [1, 2, 3, 4]
            add(run, step_line(5) + "\n")
            while not (steps := steps_in(remote.look())):
                continue
            assert steps == [5]
            for process in server.sessions():
                process.kill()
            with pytest.raises(NodeError, match=r"^mini-1: "):
                look_on(remote)
    with RemoteRun(Target("mini-1", options=("-F", str(server.config))), "mine") as remote, pytest.raises(NodeError):
        remote.look()


def test_the_run_of_a_coordinator_elsewhere_is_found_by_the_hosts_file(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        make_run(server.home / "mlxdist" / "runs" / "pairs" / "out")
        (tmp_path / "hosts.toml").write_text(HOSTS.format(config=server.config))
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
        (tmp_path / "run.toml").write_text('model = "org/tiny"\ndata = "rows.jsonl"\noutput = "runs/pairs"\n')
        for name in (["pairs"], []):
            words = command("status", *name, "--hosts", str(tmp_path / "hosts.toml"), "--json")
            done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
            assert (json.loads(done.stdout)["state"], json.loads(done.stdout)["step"]) == ("done", 4)


def test_a_terminal_at_the_other_end_of_ssh_is_drawn_on_and_follows_its_size(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        run = make_run(server.home / "mine", ending=None)
        there = " ".join(f"'{word}'" for word in command("status", str(run), "--watch"))
        far = f"cd {ROOT} && LC_ALL=C.UTF-8 PYTHONPATH={ROOT} exec {there}"
        ssh = ["ssh", "-F", str(server.config), "-tt", "mini-1", far]
        with terminal(ssh, environment(TERM="xterm-256color")) as shown:
            shown.until("step 4 of 8")
            shown.resize(50, 12)
            narrow = shown.until(r"\x1b\[2J.*working on step 5")
            bar = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", narrow).replace("\r", "").split("\n")[-2]
            assert (len(bar), bar.endswith("step 4 of 8")) == (50, True)
            add(run, json.dumps({"event": "done", "status": "done", "message": "all is done"}) + "\n")
            assert "all is done" in shown.rest()
            assert shown.process.returncode == 0
    assert RunFolder(run).metrics_jsonl.exists()
