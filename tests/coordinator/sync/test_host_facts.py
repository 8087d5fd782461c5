import pytest

from mlxdist.coordinator.launch.quoting import remote_command
from mlxdist.coordinator.launch.ssh import Answer
from mlxdist.coordinator.sync.host_facts import HostFacts, Platform, facts_script, read_facts

MAC = """\
workdir /Users/mini/My Work/mlxdist
free 112233445
system Darwin
machine arm64
release 15.3.1
rsync /usr/bin/rsync
python 3.11 arm64 /opt/homebrew/bin/python3.11
python 3.12 arm64 /opt/homebrew/bin/python3.12
python 3.12 x86_64 /usr/local/bin/python3.12
python 3.9 arm64 /usr/bin/python3
python 3.12 arm64 /opt/homebrew/bin/python3.12
"""
LINUX = "workdir /w\nfree 10\nsystem Linux\nmachine x86_64\nrelease glibc 2.36\n"


def answer(out: str, talk: str = "") -> Answer:
    return Answer(0, out, "", reached=True, talk=talk)


def test_a_mac_is_read_with_its_native_interpreters_best_first() -> None:
    assert read_facts(answer(MAC)) == HostFacts(
        Platform("Darwin", "aarch64", 15),
        "/Users/mini/My Work/mlxdist",
        112233445 * 1024,
        "/usr/bin/rsync",
        (("3.12", "/opt/homebrew/bin/python3.12"), ("3.11", "/opt/homebrew/bin/python3.11")),
    )


def test_a_shell_that_talks_gets_no_rsync() -> None:
    facts = read_facts(answer(MAC, talk="Welcome back!"))
    assert isinstance(facts, HostFacts)
    assert facts.rsync == ""


@pytest.mark.parametrize(
    "change",
    [
        ("Darwin", "FreeBSD"),
        ("machine arm64", "machine x86_64"),
        ("release 15.3.1", "release new"),
        ("free 1", "free x"),
    ],
)
def test_a_host_that_cannot_be_used_or_understood_is_a_sentence(change: tuple[str, str]) -> None:
    facts = read_facts(answer(MAC.replace(*change)))
    assert isinstance(facts, str)
    assert " " in facts


@pytest.mark.parametrize("out", ["", "\n", "free", "workdir\nfree\nsystem Linux", "system Linux\nmachine x86_64"])
def test_an_answer_that_is_cut_is_a_sentence(out: str) -> None:
    assert isinstance(read_facts(answer(out)), str)


def test_a_platform_has_the_names_that_uv_and_pip_know() -> None:
    mac = read_facts(answer(MAC))
    linux = read_facts(answer(LINUX))
    assert isinstance(mac, HostFacts)
    assert isinstance(linux, HostFacts)
    assert (mac.platform.uv, mac.platform.tags) == ("aarch64-apple-darwin", ["macosx_15_0_arm64"])
    assert linux.platform.uv == "x86_64-manylinux_2_36"
    assert linux.platform.tags[0] == "manylinux_2_36_x86_64"
    assert linux.platform.tags[-1] == "manylinux2014_x86_64"


@pytest.mark.parametrize("workdir", ["~/mlxdist", "/Volumes/Big Disk/it's here!", "work", "~"])
def test_all_facts_are_asked_in_one_command_that_csh_takes(workdir: str) -> None:
    assert remote_command(facts_script(workdir), "m" * 32)
