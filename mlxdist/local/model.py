"""A base model with an adapter, loaded by mlx-lm, whose adapter can be switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxdist.protocol.errors import UserError


def load_model(model: str, adapter: Path | None = None) -> tuple[Any, dict[str, Any], Path]:
    """Returns a model in evaluation mode, its configuration and its folder; with `adapter` its LoRA layers too.

    A model that brings code of its own must have been refused before, as `encoding_of` does. Raises UserError for files
    that mlx-lm cannot load.
    """
    from mlx_lm.utils import _download, load_adapters
    from mlx_lm.utils import load_model as load

    try:
        folder = _download(model)
        loaded, config = load(folder)
        if adapter is not None:
            loaded = load_adapters(loaded, str(adapter))
    except Exception as error:  # a model's own code raises what it likes
        what = model if adapter is None else f"{model} with the adapter in {adapter}"
        raise UserError(f"{what} cannot be loaded: {error}") from error
    loaded.eval()
    return loaded, config, Path(folder)


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Lets a model with LoRA layers compute as its base model while the block lasts: their factor is 0."""
    scales = {id(module): (module, module.scale) for _, module in model.named_modules() if "lora_b" in module}
    try:
        for module, _ in scales.values():
            module.scale = 0.0
        yield
    finally:
        for module, scale in scales.values():
            module.scale = scale
