"""Chat templates with a limit on what they may make and on their time: a template is a program of the model's author.

transformers renders in jinja2's sandbox, which keeps a template away from files and Python, and lets it run for ever or
fill the memory. Here the same environment is used, in which every operator, filter, call, loop and output is counted.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlxdist.coordinator.encode.row_errors import TemplateLimitError

MOST_CHARS = 8 << 20  # of one text or list that a template makes, and of a rendered conversation
MOST_MADE = 1 << 28  # characters that all operations of one rendering make together
MOST_BITS = 4096  # of an integer
MOST_SECONDS = 5.0  # of this thread's own time, for one conversation
WIDTH = re.compile(r"\d{5,}|\*")  # of a field of a format
# Filters and methods whose result can be longer than what they are given, beside a factor of a few.
GROWING = frozenset(
    {"batch", "center", "expandtabs", "format", "indent", "ljust", "pprint", "rjust", "slice", "tojson", "wordwrap"}
    | {"zfill", "truncate", "translate"}
)


class _Meter:
    """The amount that one rendering has made, and its time."""

    def __init__(self) -> None:
        self.made, self.until = 0, time.thread_time() + MOST_SECONDS

    def made_more(self, amount: int) -> None:
        """Counts so many more characters. Raises TemplateLimitError past a limit."""
        self.made += amount + 1
        if amount > MOST_CHARS or self.made > MOST_MADE:
            raise TemplateLimitError(f"it makes more than {MOST_CHARS >> 20} million characters")
        if time.thread_time() > self.until:
            raise TemplateLimitError(f"it takes more than {MOST_SECONDS:.0f} s for one conversation")


def _size(value: Any) -> int:
    """The characters or items of a value; of an integer, a number that is past the limit when it is too long."""
    if isinstance(value, int):
        return MOST_CHARS + 1 if value.bit_length() > MOST_BITS else 0
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _deep_size(value: Any, depth: int = 8) -> int:
    """The characters of a value and of all that it holds, counted until they are past the limit."""
    total = _size(value)
    if depth and isinstance(value, list | tuple | dict):
        parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        for part in parts:
            total += _deep_size(part, depth - 1)
            if total > MOST_CHARS:
                break
    return total


def _format_size(text: str, values: Any) -> int:
    """At most so many characters come out of a format; past the limit where a field names a large width."""
    if WIDTH.search(text):
        return MOST_CHARS + 1
    fields = text.count("%") + text.count("{")
    return len(text) + fields * (_deep_size(values) + 10_000 * bool(re.search(r"\d{3,}", text)))


def _grown(name: str, values: Sequence[Any], options: Mapping[str, Any]) -> int:
    """At most so many characters come out of a filter or method, where it can make much of little."""
    if not values:
        return 0
    first, rest = values[0], [*values[1:], *options.values()]
    if name == "replace" and len(rest) > 1 and all(isinstance(one, str) for one in (first, *rest[:2])):
        return len(first) + int(first.count(rest[0])) * len(rest[1])
    if name == "join":
        items, between = (rest[0], first) if isinstance(first, str) and rest else (first, rest[0] if rest else "")
        return _deep_size(items) + _size(items) * _size(between)
    if name in ("format", "format_map") and isinstance(first, str):
        return _format_size(first, rest)
    if name in GROWING:
        lines = _deep_size(first) if name in ("indent", "tojson", "pprint", "wordwrap", "expandtabs") else 1
        wide = max((abs(one) if isinstance(one, int) else _size(one) for one in rest), default=0)
        return _deep_size(first) + (lines * wide if wide > 64 else 0)
    return _deep_size(first) if name in ("string", "list", "xmlattr", "urlencode") else 0


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts. One rendering at a time: `meter` is its own."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    meter: _Meter

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, whose result is bounded before it is made."""
        self.meter.made_more(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, D102
        of = getattr(__obj, "__self__", None)
        values = (of, *args) if isinstance(of, str | list | tuple | dict) else args
        __self.meter.made_more(_grown(getattr(__obj, "__name__", ""), values, kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        __self.meter.made_more(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a text, bounded."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self.meter.made_more(_format_size(value.__self__, (args, kwargs)))
            return wrapped(*args, **kwargs)

        return bounded

    def counted(self, items: Any, literal: int) -> Iterator[Any]:
        """The items of a loop, whose body holds so many characters of text."""
        for item in items:
            self.meter.made_more(literal)
            yield item

    def joined(self, parts: Iterable[Any]) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        self.meter.made_more(sum(map(len, texts)))
        return "".join(texts)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **kwargs)


def _result_size(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int | float) and isinstance(right, int | float):
        bits = [one.bit_length() if isinstance(one, int) else 0 for one in (left, right)]
        large = bits[0] * abs(right) if operator == "**" else sum(bits)
        return MOST_CHARS + 1 if large > MOST_BITS else 0
    if operator == "*":
        times, of = (left, right) if isinstance(left, int) else (right, left)
        return _size(of) * times if isinstance(times, int) else 0
    if operator == "%" and isinstance(left, str):
        return _format_size(left, right)
    return _size(left) + _size(right)


class _Counting(NodeTransformer):
    """Puts the counting into a template that was parsed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """A loop counts its rounds, and the text in them."""
        literal = sum(len(each.data) for part in node.body for each in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _own("counted", [node.iter, nodes.Const(literal)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The operator `~` is counted as the others are."""
        self.generic_visit(node)
        return _own("joined", [nodes.List(node.nodes)])


def _own(name: str, values: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)


def _limited_filter(environment: LimitedEnvironment, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(function, "jinja_pass_arg", None) is not None  # its first argument is not the template's

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        environment.meter.made_more(_grown(name, args[1:] if passes else args, kwargs))
        result = function(*args, **kwargs)
        environment.meter.made_more(_size(result))
        return result

    return limited


def limited_environment() -> LimitedEnvironment:
    """The environment in which transformers renders chat templates, with limits."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    theirs = _compile_jinja_template("").environment
    extensions = [type(each) for each in theirs.extensions.values()]
    ours = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
    ours.meter = _Meter()
    ours.filters = {name: _limited_filter(ours, name, each) for name, each in theirs.filters.items()}
    ours.globals = {name: each for name, each in theirs.globals.items() if name != "lipsum"}

    def counted(value: Any) -> Any:
        ours.meter.made_more(_deep_size(value))
        return value

    ours.finalize = counted
    return ours


def limited_apply(wrapper: Any) -> Callable[..., str]:
    """Does what `apply_chat_template` of mlx-lm's tokenizer does with `tokenize=False`, with limits.

    Raises TemplateLimitError for a template that makes too much or takes too long, and what templates raise.
    """
    from transformers.utils import chat_template_utils as theirs

    if wrapper._chat_template is not None:  # Python of mlx-lm, and no template of the model
        return functools.partial(wrapper.apply_chat_template, tokenize=False)
    environment, tokenizer = limited_environment(), wrapper._tokenizer
    compiled = functools.cache(environment.from_string)

    def apply(
        messages: Any,
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Any = None,
        documents: Any = None,
        **kwargs: Any,
    ) -> str:
        assert not tokenize
        if wrapper._thinking_kwarg != "enable_thinking" and "enable_thinking" in kwargs:
            kwargs[wrapper._thinking_kwarg] = kwargs.pop("enable_thinking")
        kwargs.setdefault(wrapper._thinking_kwarg, wrapper.has_thinking)
        environment.meter = _Meter()
        chat = theirs._alias_reasoning_fields(theirs._plain_template_data(theirs._normalize_chat_messages(messages)))
        pieces = compiled(tokenizer.get_chat_template(None, tools)).generate(
            messages=chat,
            tools=theirs._plain_template_data(tools),
            documents=theirs._plain_template_data(documents),
            add_generation_prompt=add_generation_prompt,
            **theirs._plain_template_data({**tokenizer.special_tokens_map, **kwargs}),
        )
        rendered: list[str] = []
        size = 0
        for piece in pieces:
            rendered.append(piece)
            size += len(piece)
            environment.meter.made_more(size if size > MOST_CHARS else 0)
        return "".join(rendered)

    return apply
