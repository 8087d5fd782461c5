"""The libraries of the loggers, and their check before a run starts."""

from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType

from mlxdist.protocol.errors import UserError

LIBRARIES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
)  # by the name in train.report_to; the module, the package and (as the key) the extra of mlxdist


def check_libraries(names: Sequence[str], find: Callable[[str], ModuleSpec | None] = find_spec) -> None:
    """Raises UserError with the command to type where the library of a logger is not installed. Imports nothing."""
    missing = [name for name in names if not _is_installed(find(LIBRARIES[name]))]
    if missing:
        packages = " ".join(LIBRARIES[name] for name in missing)
        raise UserError(
            f"train.report_to has {' and '.join(missing)}, whose library is not installed here: "
            f"pip install {packages} (the same as mlxdist[{','.join(missing)}]), or take the name out of the list"
        )


def _is_installed(spec: ModuleSpec | None) -> bool:
    """Returns false also for a plain folder of that name in the current one, as W&B makes it for its files."""
    return spec is not None and spec.origin is not None
