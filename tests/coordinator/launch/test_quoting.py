"""A command survives every login shell, and so does its answer."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.launch.quoting import MOST_CHARS, path_word, quote, remote_command, words
from mlxdist.coordinator.launch.ssh import answer_of, new_marker

SHELLS = ("sh", "bash", "zsh", "fish", "csh", "tcsh")
AWKWARD = r"""it's "a" \ \\ \' '' !! !x $HOME `id` $(id) ~ * ? [a] {b,c} # %1 ^a^b & | ; < > é 日 \n \t"""
LINES = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=40)


def through(shell: str, command: str) -> bytes:
    """Returns the output of a command in a login shell, as sshd calls it."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"there is no {shell}")
    return subprocess.run([path, "-c", command], capture_output=True, check=True).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_reaches_sh_unchanged_through_every_login_shell(shell: str) -> None:
    marker = new_marker()
    printed = through(shell, remote_command(f"printf %s {words(AWKWARD, '')}", marker))
    assert answer_of(0, printed, b"", marker).out == AWKWARD


@pytest.mark.parametrize("shell", SHELLS)
def test_the_longest_script_passes_every_login_shell(shell: str) -> None:
    marker = new_marker()
    script = "echo " + "x" * (MOST_CHARS - len(remote_command("echo ", marker)))
    assert answer_of(0, through(shell, remote_command(script, marker)), b"", marker).out == script[5:] + "\n"


@given(LINES, LINES)
def test_any_two_words_stay_two_words_in_sh(first: str, second: str) -> None:
    assert through("sh", f"printf '%s\\n' {words(first, second)}").decode() == f"{first}\n{second}\n"


@given(LINES.map(lambda text: text.replace("\0", "")))
def test_any_line_passes_two_shells(text: str) -> None:
    assert through("sh", f"exec /bin/sh -c {quote(f'printf %s {quote(text)}')}").decode() == text


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "\n"])
def test_what_csh_cannot_quote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be quoted"):
        quote(text)


def test_a_script_that_is_too_long_for_csh_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        remote_command("x" * MOST_CHARS, new_marker())


@pytest.mark.parametrize(
    ("path", "there"),
    [("/opt/a b/c", "/opt/a b/c"), ("~/x y", "/home of/x y"), ("x/it's", "/home of/x/it's"), ("~", "/home of")],
)
def test_a_path_is_absolute_or_below_the_home_folder_of_the_host(path: str, there: str) -> None:
    assert through("sh", f"HOME='/home of'; printf %s {path_word(path)}").decode() == there


def test_an_answer_is_what_follows_the_marker_alone_in_a_line() -> None:
    marker = new_marker()
    echoed = f"+ exec /bin/sh -c 'echo; echo {marker}; ls'\n"  # by a shell with -x or -v
    answer = answer_of(
        0, f"hello{echoed}>\n{marker}\nanswer\n".encode(), f"{echoed}\n{marker}\nerror\n".encode(), marker
    )
    assert (answer.reached, answer.out, answer.err) == (True, "answer\n", "error\n")
    assert "hello" in answer.talk
    assert not answer_of(255, echoed.encode(), echoed.encode(), marker).reached
