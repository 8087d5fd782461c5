"""One layer of quoting that every login shell reads alike: sh, bash, zsh, fish, csh and tcsh."""

MOST_CHARS = 3500  # of a script: the csh of BSD takes words of 4,096 bytes; longer ones go through standard input
SPECIAL = "'\\!"  # within quotes ' ends them, fish reads \ and csh reads !; outside, \ takes away each one's meaning


def quote(text: str) -> str:
    """Returns `text` as one word of a command line, in any login shell.

    Raises ValueError for a line break or a NUL, which csh cannot quote.
    """
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError(f"a line break cannot be quoted for every shell: {text!r}")
    return "'" + "".join(f"'\\{one}'" if one in SPECIAL else one for one in text) + "'"


def words(*values: str) -> str:
    """Returns `values` as the words of a command for /bin/sh."""
    return " ".join(quote(value) for value in values)


def path_word(path: str) -> str:
    """Returns a path as one word for /bin/sh on a host: absolute, or below the home folder there (~/ may lead)."""
    if path.startswith("/"):
        return quote(path)
    below = path.removeprefix("~").lstrip("/")
    return f'"$HOME"/{quote(below)}' if below else '"$HOME"'


def remote_command(script: str, marker: str) -> str:
    """Returns the command line for a login shell that runs `script`, one line for /bin/sh.

    The marker stands alone in a line of both streams before anything that the script prints. What comes before it is
    the login shell's. Raises ValueError for a script that is too long, or has a line break.
    """
    whole = f"echo; echo {marker}; echo >&2; echo {marker} >&2; {script}"
    if len(whole.encode()) > MOST_CHARS:
        raise ValueError(f"a script of {len(script)} characters is too long for csh: send it through standard input")
    return f"exec /bin/sh -c {quote(whole)}"
