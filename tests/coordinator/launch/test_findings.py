"""Every failure of a host has a sentence and a command, from what ssh and the host have printed."""

import pytest

from mlxdist.coordinator.launch.findings import Finding, finding, talk_finding, version_finding
from mlxdist.coordinator.launch.ssh import Answer, Target
from mlxdist.protocol.versions import CODE
from tests.coordinator.launch.recorded_ssh import BANNER, COMMAND_FAILED, SSH_FAILED

MINI = Target("mini-1", "ada")


def of_ssh(printed: str, code: int | None = 255) -> Finding | None:
    return finding(MINI, Answer(code, "", "", False, ssh=printed))


def of_command(code: int | None, err: str) -> Finding | None:
    return finding(MINI, Answer(code, "", err, True), "/opt/python")


@pytest.mark.parametrize(("kind", "printed"), SSH_FAILED)
@pytest.mark.parametrize("before", ["", BANNER])
def test_what_ssh_prints_is_one_finding_with_or_without_a_banner(kind: str, printed: str, before: str) -> None:
    found = of_ssh(before + printed)
    assert found is not None
    assert found.kind == kind
    assert found.what
    assert found.cure
    assert "{" not in str(found)


@pytest.mark.parametrize(("kind", "code", "err"), COMMAND_FAILED)
def test_what_a_command_prints_is_one_finding(kind: str, code: int, err: str) -> None:
    found = of_command(code, f"a warning\n{err}\n")
    assert found is not None
    assert found.kind == kind
    assert found.what
    assert found.cure
    assert "{" not in str(found)


def test_every_failure_that_a_host_can_have_is_among_those_that_were_recorded() -> None:
    talks = talk_finding(Answer(0, "", "", True, talk="hello"))
    differs = version_finding({"mlx": "1"}, {"mlxdist": "1", "mlx": "2"})
    assert talks is not None
    assert differs is not None
    assert {kind for kind, *_ in (*SSH_FAILED, *COMMAND_FAILED)} | {talks.kind, differs.kind} >= {
        "unreachable",
        "host key unknown",
        "host key changed",
        "permission denied",
        "filevault",
        "shell talks",
        "interpreter missing",
        "mlxdist missing",
        "other version",
        "model missing",
        "model differs",
        "privacy",
        "port blocked",
        "local network",
        "no metal",
        "disk full",
    }


def test_a_command_that_works_has_no_finding_whatever_it_prints() -> None:
    for _, _, err in COMMAND_FAILED:
        assert of_command(0, err) is None


def test_an_unknown_failure_of_a_command_has_no_finding() -> None:
    assert of_command(3, "something else") is None
    assert of_command(255, "the exit code is the command's own") is None


@pytest.mark.parametrize(
    "printed", ["Connection to mini-1 closed by remote host.", "Timeout, server mini-1 not responding."]
)
def test_a_connection_that_is_lost_in_the_middle_may_come_back(printed: str) -> None:
    found = of_command(255, printed)
    assert found is not None
    assert (found.kind, found.transient) == ("unreachable", True)


def test_a_host_that_does_not_answer_in_time_may_do_so_later() -> None:
    for answer in (Answer(None, "", "", False), Answer(None, "", "", True)):
        found = finding(MINI, answer)
        assert found is not None
        assert (found.kind, found.transient) == ("timeout", True)


def test_a_host_is_tried_again_only_where_no_person_is_needed() -> None:
    passing = {kind for kind, printed in SSH_FAILED if (found := of_ssh(printed)) is not None and found.transient}
    assert passing == {"filevault", "unknown name", "refused", "local network", "unreachable"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("host key unknown", "Type ssh -p 22 ada@mini-1 once"),
        ("host key changed", 'ssh-keygen -f "/Users/ada/.ssh/known_hosts" -R "mini-1"'),
        ("permission denied", "ssh-copy-id -p 22 ada@mini-1"),
        ("filevault", "type ssh -p 22 ada@mini-1 and the password"),
        ("refused", "Remote Login"),
    ],
)
def test_the_command_to_type_is_whole(kind: str, words: str) -> None:
    printed = next(printed for each, printed in SSH_FAILED if each == kind)
    found = finding(Target("mini-1", "ada", ("-p", "22")), Answer(255, "", "", False, ssh=printed))
    assert found is not None
    assert words in found.cure


def test_a_login_shell_that_runs_nothing_is_named_with_its_words() -> None:
    found = finding(MINI, Answer(1, "", "", False, talk="This account is currently not available."))
    assert found is not None
    assert found.kind == "no shell"
    assert "currently not available" in found.what


def test_a_shell_that_talks_is_told_and_hides_no_control_characters() -> None:
    talk = talk_finding(Answer(0, "", "", True, talk="\x1b[31mhello\nmore"))
    assert talk is not None
    assert "hello" in talk.what
    assert "\x1b" not in str(talk)
    assert talk_finding(Answer(0, "", "", True, talk="\n")) is None


def test_other_versions_are_named_on_both_sides() -> None:
    here = {"mlxdist": "0.2.0", "mlx": "0.32.4"}
    assert version_finding(here, here) is None
    found = version_finding(here, {"mlxdist": "0.2.0", "mlx": "0.31.0"})
    assert found is not None
    assert "mlx 0.31.0" in found.what
    assert "mlx 0.32.4" in found.what
    assert "mlxdist" not in found.what.replace("mlxdist sync", "")
    code = version_finding({**here, CODE: "0a1b"}, {**here, CODE: "2c3d"})
    assert code is not None
    assert code.what == "it has mlxdist with code 2c3d, and the coordinator mlxdist with code 0a1b"
    missing = version_finding(here, {})
    assert missing is not None
    assert missing.kind == "mlxdist missing"
