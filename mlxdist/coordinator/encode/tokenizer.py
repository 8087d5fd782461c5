"""The model's tokenizer, read without its parameters, and what the row level must know of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlxdist.coordinator.config.paths import no_folder
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.untrusted import CODE_FILES, refuse_own_code


class Encoder(Protocol):
    """Text to ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added."""
        ...


class Tokenizer(Encoder, Protocol):
    """Text to ids and back. Nothing is ever added: BOS and EOS are the row level's."""

    @property
    def bos_id(self) -> int | None:
        """The BOS that this tokenizer puts in front of a text when asked for special tokens; None: it puts none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that ends a response."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a response, `eos_id` among them."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that fills a padded row."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, faster than one by one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown."""
        ...


@dataclass(frozen=True)
class HubTokenizer:
    """A Hugging Face tokenizer as `Tokenizer`."""

    hf: Any
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts; a fast tokenizer uses every core."""
        if not texts:
            return []
        if self.hf.is_fast:  # past the wrapper, which makes lists of masks that nothing reads
            encoded = self.hf.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [each.ids for each in encoded]
        return [self.hf.encode(text, add_special_tokens=False) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens shown, broken bytes as the replacement character."""
        return str(self.hf.decode(list(ids), skip_special_tokens=False))


def hub_tokenizer(hf: Any, eos_ids: Sequence[int] = ()) -> HubTokenizer:
    """A Hugging Face tokenizer as `Tokenizer`; `eos_ids` are the model's own besides the tokenizer's."""
    if hf.is_fast:  # a file may ask for both, and rows would be cut and padded without a word
        hf.backend_tokenizer.no_truncation()
        hf.backend_tokenizer.no_padding()
    bos, eos = hf.bos_token_id, hf.eos_token_id
    with_special = hf.encode("a", add_special_tokens=True)
    puts_bos = bos is not None and with_special[:1] == [bos] and hf.encode("a", add_special_tokens=False)[:1] != [bos]
    ends = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
    pad = next((token for token in (hf.pad_token_id, eos) if token is not None), 0)
    return HubTokenizer(hf, bos if puts_bos else None, eos, ends, pad)


def read_json(path: Path) -> Any:
    """Returns what a JSON file of a model holds; None where there is no such file. Raises ValueError for no JSON."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def load(model: str, chat_template: str = "") -> Any:
    """mlx-lm's tokenizer wrapper of a model folder or hub id, with the end tokens that mlx-lm generates by.

    Of a hub id only the tokenizer's and configuration's files are fetched. `chat_template`: the text of a Jinja
    template instead of the tokenizer's own. Takes about 2 s. Raises ConfigError naming a model without a tokenizer, or
    one that brings code of its own: that is never run.
    """
    from mlx_lm.utils import _download, load_config, load_tokenizer

    extra: dict[str, Any] = {"trust_remote_code": False, **({"chat_template": chat_template} if chat_template else {})}
    try:
        folder = _download(model, allow_patterns=["*.json"])
        refuse_own_code(model, {name: read_json(folder / name) for name in CODE_FILES})
        wrapper = load_tokenizer(model, extra)
        ends = load_config(Path(wrapper.name_or_path)).get("eos_token_id")  # where the files of a hub id lie, too
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers and the hub raise: the reader needs the model's name
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if not Path(model).is_dir():
            raise ConfigError(f"model = {model!r}: {no_folder(model)}, and the hub did not give it: {first}") from error
        raise ConfigError(
            f"model = {model!r} has no tokenizer that can be read ({first}): give a folder that has one, or a hub id"
        ) from error
    wrapper.eos_token_ids = {*wrapper.eos_token_ids, *([ends] if isinstance(ends, int) else ends or [])}
    return wrapper
