"""The system's ssh against a real sshd, through every login shell."""

import sys
import threading
from pathlib import Path

import pytest

from mlxdist.coordinator.launch.findings import finding
from mlxdist.coordinator.launch.ssh import Target, everywhere, run
from tests.processes.ssh_server import found, ssh_server, why_not

SHELLS = ("sh", "bash", "zsh", "fish", "csh", "tcsh")
RC_FILES = (".bashrc", ".cshrc", ".tcshrc", ".zshenv", ".config/fish/config.fish")
TALK = 'echo "hello from the shell"; sh -c "echo an error >&2; printf unfinished"\n'

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.parametrize("shell", SHELLS)
def test_an_answer_is_the_same_through_a_talkative_shell_a_banner_and_a_home_with_a_space(
    shell: str, tmp_path: Path
) -> None:
    path = found(shell)
    if path is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "banner").write_text("ssh: Permission denied (publickey).\n")
    with ssh_server(tmp_path, shell=path, settings=f"Banner {tmp_path}/banner") as server:
        for name in RC_FILES:
            (server.home / name).parent.mkdir(parents=True, exist_ok=True)
            (server.home / name).write_text(TALK)
        answer = run(server.target(), "echo \"it's $HOME\" '!'; cat; echo oh >&2; exit 3", stdin=b"a\nb")
    assert (answer.reached, answer.code, answer.err) == (True, 3, "oh\n")
    assert answer.out == f"it's {server.home} !\na\nb"
    assert shell == "sh" or "hello from the shell" in answer.talk
    assert "Permission denied" in answer.ssh


def test_a_command_that_takes_too_long_is_ended_and_hosts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        began = threading.Barrier(3)

        def ask(seconds: float) -> int | None:
            began.wait()
            return run(server.target(), f"exec sleep {seconds}", timeout=3).code

        assert everywhere(ask, [60, 0, 0]) == [None, 0, 0]


def test_a_host_that_is_this_machine_needs_no_ssh() -> None:
    answer = run(Target("localhost"), "cat; echo oh >&2; exit 4", stdin=b"given")
    assert (answer.reached, answer.code, answer.out, answer.err) == (True, 4, "given", "oh\n")


def kind_of(target: Target, script: str = "true") -> str | None:
    found = finding(target, run(target, script, timeout=20))
    return found.kind if found is not None else None


def test_the_failures_of_a_real_ssh_are_told_apart(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        target, known, keys = server.target(), tmp_path / "known_hosts", tmp_path / "authorized_keys"
        found = {"ok": kind_of(target), "the command's own": kind_of(target, "exit 255")}
        trusted = known.read_text()
        known.write_text("")
        found["unknown"] = kind_of(target)
        known.write_text(f"{trusted.split()[0]} {(tmp_path / 'user_key.pub').read_text()}")
        found["changed"] = kind_of(target)
        known.write_text(trusted)
        found["interpreter"] = kind_of(target, "exec /no/such/python -m mlxdist")
        found["module"] = kind_of(target, f"exec {sys.executable} -m mlxdist.no_such_module")
        keys.write_text("")
        found["denied"] = kind_of(target)
    found["off"] = kind_of(target)
    found["name"] = kind_of(Target("no-such-host.invalid"))
    found["option"] = kind_of(Target("mini-1", options=("-F", "/no/such/file")))
    assert found == {
        "ok": None,
        "the command's own": None,
        "unknown": "host key unknown",
        "changed": "host key changed",
        "interpreter": "interpreter missing",
        "module": "mlxdist missing",
        "denied": "permission denied",
        "off": "refused",
        "name": "unknown name",
        "option": "ssh configuration",
    }


def test_a_mac_that_filevault_has_locked_is_known_by_its_banner_and_its_password(tmp_path: Path) -> None:
    (tmp_path / "banner").write_text("This system is locked. To unlock it, use a local\naccount name and password.\n")
    settings = f"PubkeyAuthentication no\nPasswordAuthentication yes\nBanner {tmp_path}/banner"
    with ssh_server(tmp_path, settings=settings) as server:
        assert kind_of(server.target()) == "filevault"


def test_a_user_without_a_login_shell_is_told_so(tmp_path: Path) -> None:
    with ssh_server(tmp_path, shell="/usr/sbin/nologin") as server:
        assert kind_of(server.target()) == "no shell"
