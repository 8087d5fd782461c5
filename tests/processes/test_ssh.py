"""The system's ssh against a real sshd, through every login shell."""

import threading
from pathlib import Path

import pytest

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
