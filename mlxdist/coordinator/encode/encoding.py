"""Between a row's fields and its compact sequences: texts are drawn up first, encoded many at once, then finished."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.coordinator.batch.row_store import Words
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.encode.chat_template import ChatTemplate
from mlxdist.coordinator.encode.messages import kwargs_of, tools_of
from mlxdist.coordinator.encode.remarks import Remark
from mlxdist.coordinator.encode.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoding:
    """The tokenizer, template and settings by which rows of a run become tokens."""

    config: RunConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    vocabulary: int | None = None  # rows of the model's embedding; None: not known

    @property
    def wraps(self) -> bool:
        """Prompts and responses of plain text become turns of the chat template (data.plain_text)."""
        way = self.config.data.plain_text
        return way == "chat" or (way == "auto" and self.template.apply is not None)

    @property
    def bos(self) -> list[int]:
        """The tokens in front of every row: the BOS, or none."""
        return [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]

    @property
    def room(self) -> int:
        """Tokens of a row behind its BOS."""
        return self.config.batch.max_length - len(self.bos)

    def without_bos(self, ids: Sequence[int]) -> int:
        """Returns the number of BOS that the ids begin with: a template or a text may bring its own."""
        if self.tokenizer.bos_id is None:
            return 0
        return next((place for place, token in enumerate(ids) if token != self.tokenizer.bos_id), len(ids))

    def ended(self, ids: list[int]) -> list[int]:
        """A response with its EOS, appended unless it is there, or the run or the tokenizer has none."""
        tokenizer = self.tokenizer
        if not self.config.data.append_eos or tokenizer.eos_id is None or not tokenizer.eos_ids.isdisjoint(ids[-1:]):
            return ids
        return [*ids, tokenizer.eos_id]

    def render_kwargs(self, fields: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
        """The template's arguments for a row: its tools and its own arguments, above `defaults` and the run's."""
        run = {key: value for key, value in defaults.items() if key not in self.template.kwargs}
        own = kwargs_of(fields.get("chat_template_kwargs"))
        tools = tools_of(fields.get("tools"))
        return {**run, **({"tools": tools} if tools else {}), **own}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row as the store takes it."""

    parts: tuple[Words, ...]  # one sequence, or two
    length: int  # tokens before any cut, of a pair's longer branch
    label: bool = False
    side: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A row whose texts wait to be encoded."""

    texts: tuple[str, ...]
    finish: Callable[[Sequence[list[int]]], list[Encoded]]  # the texts' ids to rows; raises RowError
    remarks: tuple[Remark, ...] = ()  # what is to be said of the row


def plain_text_note(encoding: Encoding) -> str:
    """The sentence on prompts and responses of plain text: which way they are read, and why."""
    way, has_template = encoding.config.data.plain_text, encoding.template.apply is not None
    if encoding.wraps:
        return (
            "Prompts and responses are plain texts: they become user and assistant turns of the chat template, as chat "
            f'programs will ask the model (data.plain_text = "{way}"; "raw" joins them as they stand).'
        )
    if has_template:
        return (
            "Prompts and responses are plain texts, joined as they stand: the model's chat template is not used "
            '(data.plain_text = "raw"), and a program that uses it will ask the model in another form.'
        )
    return (
        "Prompts and responses are plain texts, joined as they stand: this tokenizer has no template for conversations "
        f'(data.plain_text = "{way}").'
    )
