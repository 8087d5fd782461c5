"""The limit of open files, which a coordinator and mlx-lm need higher than macOS starts programs with."""

import resource

from mlxdist.protocol.errors import UserError

OPEN_FILES = 4096


def more_open_files(wanted: int = OPEN_FILES) -> None:
    """Raises the soft limit of open files as far as the hard one lets it, for this process and those that it starts.

    macOS starts programs with 256; a coordinator needs a few per node, and its connections come and go.

    Raises UserError where the hard limit is below what mlx-lm sets when it is imported, and may not be raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if resource.RLIM_INFINITY != hard < OPEN_FILES:
        _raise_hard_limit(wanted, hard)


def _raise_hard_limit(soft: int, hard: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, OPEN_FILES))
    except (ValueError, OSError):
        raise UserError(
            f"this shell lets a program open {hard} files at most, and mlx-lm asks for {OPEN_FILES}: raise the hard "
            f"limit (ulimit -Hn {OPEN_FILES}, as an administrator), or start mlxdist from a shell without it"
        ) from None
