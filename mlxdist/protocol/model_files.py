"""The files of a model as they travel to a node: which names they may have, in which blocks, named by which hash.

No file is opened here. What a coordinator says about files is checked before a name of it reaches a path.
"""

import hashlib
import re
from collections.abc import Sequence

from mlxdist.protocol.errors import WireError
from mlxdist.protocol.messages import ModelFile
from mlxdist.protocol.untrusted import quoted
from mlxdist.protocol.vectors import BLOCK_BYTES

# No *.py: a model's own code is never run.
SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".txt", ".jsonl")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
HASH = re.compile(r"[0-9a-f]{64}")
WINDOW = 4  # blocks that one node may have asked for and not read
WORK_FOLDER = "mlxdist"  # in the home folder: all that mlxdist writes on a host that is no run, and no key


def is_model_file(name: str) -> bool:
    """Returns True for the name of a file that training may need, without any folder in it.

    Of the parameters, mlx-lm reads model*.safetensors alone; copies in another form stay where they are.
    """
    parameters = name.endswith(".safetensors")
    return bool(NAME.fullmatch(name)) and name.endswith(SUFFIXES) and (not parameters or name.startswith("model"))


def block_count(size: int) -> int:
    """Returns the number of blocks of a file of so many bytes."""
    return -(-size // BLOCK_BYTES)


def size_phrase(size: int) -> str:
    """Returns a number of bytes as a person reads it, in GB of 10^9 bytes or in MB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def model_digest(files: Sequence[ModelFile]) -> str:
    """Returns the SHA-256 in hex over the names, sizes and hashes of all files, in any order."""
    lines = sorted(f"{file.name} {file.size} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def checked_files(files: Sequence[ModelFile]) -> tuple[ModelFile, ...]:
    """Returns the files that a coordinator names, once it is sure that each can be written and compared.

    Raises WireError for a name that is none of a model's file, one that stands twice (as a Mac's disk compares names),
    a size below 0, and a hash that is none.
    """
    seen = set[str]()
    for file in files:
        if not is_model_file(file.name) or file.name.casefold() in seen:
            raise WireError(f"the coordinator offers a file named {quoted(file.name, 140)!r}, which no model has")
        if file.size < 0 or not HASH.fullmatch(file.sha256):
            raise WireError(f"the coordinator offers {file.name} without its size and SHA-256")
        seen.add(file.name.casefold())
    return tuple(files)
