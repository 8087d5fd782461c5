"""mlxdist: fine-tune one language model on several Macs, with the result of one machine.

The map (imports only go down):

    mlxdist.cli           the commands
    mlxdist.api           the same from Python: train, load_run, evaluate, export
    mlxdist.coordinator   configuration, data, order, leaves, summing, stepping, saving
    mlxdist.node          supervisor, worker, model, backward
    mlxdist.protocol      messages, the sum tree, objectives, hashes; no sockets, no files
"""

from typing import TYPE_CHECKING, Any

from mlxdist.protocol import version

__version__ = version.VERSION
__all__ = ["RunResult", "Stop", "__version__", "evaluate", "export", "load_run", "train"]

if TYPE_CHECKING:
    from mlxdist.api import RunResult, Stop, evaluate, export, load_run, train


def __getattr__(name: str) -> Any:
    """Returns a function of `mlxdist.api`, which is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'mlxdist' has no attribute {name!r}")
    from mlxdist import api

    return getattr(api, name)
