"""A chat template that writes the date: every render of a run gets the same moment.

transformers gives a template its clock, `strftime_now`, and takes no other. So a macro of that name is put in front of
the template's text; it writes the moment in whatever form the template asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

CLOCK = "strftime_now"
_LETTERS = "aAbBcCdDeFGgHIjklmMnpPrRsStTuUVwWxXyYzZ"  # what follows a % in a form of strftime
_ANOTHER = timedelta(days=1234, hours=7, minutes=7, seconds=7)  # to a moment that no form writes alike


@dataclass
class DatedTemplate:
    """`apply`, which renders the template of `tokenizer` that asks for the date, at `moment`."""

    tokenizer: Any  # mlx-lm's wrapper, whose template is replaced
    apply: Callable[..., str]
    moment: datetime
    writes: bool = False  # True where a conversation showed the moment

    def __post_init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()
        self._template = self.tokenizer.chat_template
        self._set(self.moment)

    def __call__(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The conversation as the model reads it."""
        text = str(self.apply(messages, **kwargs))
        if not self.writes and self._is_new(messages, kwargs):
            self._set(self.moment + _ANOTHER)
            self.writes = str(self.apply(messages, **kwargs)) != text
            self._set(self.moment)
        return text

    def _is_new(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> bool:
        """True for the first conversation of its kind: a template may write the date only beside tools or a system."""
        roles = frozenset(str(message.get("role")) for message in messages)
        given = tuple(sorted((name, repr(value)) for name, value in kwargs.items() if not isinstance(value, list)))
        lists = tuple(sorted(name for name, value in kwargs.items() if isinstance(value, list)))
        kind = (messages[0].get("role") if messages else None, roles, given, lists)
        new = kind not in self._seen
        self._seen.add(kind)
        return new

    def _set(self, moment: datetime) -> None:
        front, found = clock_macro(moment), self._template
        several = isinstance(found, Mapping)
        self.tokenizer.chat_template = (
            {name: front + text for name, text in found.items()} if several else front + found
        )


def asks_for_the_date(template: object) -> bool:
    """True for the text of a template, or a table of several, that asks for the date."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    return any(isinstance(text, str) and CLOCK in text for text in texts)


def clock_macro(moment: datetime) -> str:
    """A Jinja macro `strftime_now` that writes `moment` in the form it is given. It adds nothing to a render."""
    forms = [f"%{flag}{letter}" for letter in _LETTERS for flag in ("", "-")]
    table = [["%%", "\0"], *([form, moment.strftime(form)] for form in forms), ["\0", "%"]]
    return (
        f"{{%- macro {CLOCK}(form) -%}}{{%- set now = namespace(text=form) -%}}"
        f"{{%- for part, text in {table!r} -%}}{{%- set now.text = now.text.replace(part, text) -%}}{{%- endfor -%}}"
        "{{- now.text -}}{%- endmacro +%}"
    )
