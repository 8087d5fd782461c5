"""The chat template of a run: the tokenizer's own or the run's, its arguments, and system turns that it refuses."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxdist.coordinator.encode.messages import Message, Messages, last_assistant
from mlxdist.coordinator.encode.row_errors import RowError, TemplateLimitError
from mlxdist.protocol.errors import DataError

NO_TEMPLATE = (
    'this model\'s tokenizer has no chat template, and rows of messages and data.plain_text = "chat" need one: '
    "set data.chat_template to the template's text or file, or use a chat model"
)
PROBE = "QZQ"  # stands for an assistant's words; no template writes it
USUAL_SWITCHES = ("enable_thinking",)
# Names that a template reads and that are no switches of its own.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"})


@dataclass
class ChatTemplate:
    """Messages to text, a `Renderer`. A system turn that the template refuses goes into the first user turn."""

    apply: Any  # mlx-lm's apply_chat_template, None where there is no template
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # the run's own, below a row's
    switches: Sequence[str] = USUAL_SWITCHES  # names of chat_template_kwargs that may change a render
    folded: bool = False  # whether a system turn had to be moved
    cures: dict[str, str] = field(default_factory=dict)  # by what a template changes: the argument that prevents it
    _takes_system: bool | None = None
    _closes: bool | None = None
    _form: Callable[[Message], Message] | None = None

    def render(self, messages: Messages, add_generation_prompt: bool, **kwargs: Any) -> str:
        """The conversation as the model reads it. Raises RowError with the template's words, DataError without one."""
        if self.apply is None:
            raise DataError(NO_TEMPLATE)
        if messages and messages[0]["role"] == "system" and not self._system_fits():
            messages = self._fold(messages)
        if any("tool_calls" in message for message in messages):
            messages = [self._call_form()(dict(message)) for message in messages]
        return self._call(messages, add_generation_prompt, {**self.kwargs, **kwargs})

    def closes(self, messages: Messages) -> bool:
        """Returns True if the template writes something behind the assistant turn that ends a conversation.

        Asked once and then true of every row, whatever its last turn holds. `messages` is asked with where the
        template refuses a question and its answer.
        """
        if self._closes is None:
            answer = {"role": "assistant", "content": PROBE}
            before = messages[: max(last_assistant(messages), 0)]
            for opening in ([{"role": "user", "content": "a"}], before):
                try:
                    text = self._call([*opening, answer], False, self.kwargs)
                except RowError:
                    continue
                self._closes = bool(text.rpartition(PROBE)[2].strip())
                break
        return self._closes is not False

    def _call_form(self) -> Callable[[Message], Message]:
        """The way in which the template wants calls: asked once, with a call.

        Most take arguments as an object and "" as the content of a turn that only calls. Some show such a turn only
        where its content is null, and some join the arguments as text.
        """
        if self._form is None:
            call = {"id": "abcdefghi", "type": "function", "function": {"name": PROBE, "arguments": {PROBE: 1}}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            self._form = next((form for form in CALL_FORMS if self._shows_call(form(turn))), CALL_FORMS[0])
        return self._form

    def _shows_call(self, turn: Message) -> bool:
        try:
            text = self._call([{"role": "user", "content": "a"}, turn], False, self.kwargs)
        except RowError:
            return False
        return text.count(PROBE) > 1 and f"'{PROBE}'" not in text  # with these quotes it is Python's form, not JSON

    def _call(self, messages: Messages, add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        try:
            text = self.apply(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs)
        except Exception as error:  # a template is a program of its own and raises what it likes
            if isinstance(error, TemplateLimitError):  # and the next row would take as long
                raise DataError(f"the chat template is stopped: {error}; set data.chat_template to another") from error
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RowError(f"the chat template refuses this conversation: {reason}") from error
        return str(text)

    def _system_fits(self) -> bool:
        """True where the template takes a system turn: asked once, with a conversation that is refused only for it."""
        if self._takes_system is None:
            user = {"role": "user", "content": "a"}
            try:
                self._call([user], True, self.kwargs)
                self._call([{"role": "system", "content": "b"}, user], True, self.kwargs)
                self._takes_system = True
            except RowError:
                self._takes_system = False
        return self._takes_system

    def _fold(self, messages: Messages) -> Messages:
        """The system turn in front of the first user turn, as a paragraph of its own."""
        system, *rest = messages
        first = next((place for place, message in enumerate(rest) if message["role"] == "user"), None)
        if first is None:
            raise RowError("the chat template takes no system turn, and there is no user turn to put it into")
        rest[first] = {**rest[first], "content": f"{system['content']}\n\n{rest[first]['content']}"}
        self.folded = True
        return rest


def _formed(message: Message, *, null: bool, text: bool) -> Message:
    """A message whose calls have no content beside them but null, and arguments as JSON text, where these are asked."""
    if "tool_calls" not in message:
        return message
    content = None if null and not message["content"].strip() else message["content"]
    if not text:
        return {**message, "content": content}
    functions = [call["function"] for call in message["tool_calls"]]
    written = [{**each, "arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions]
    calls = [{**call, "function": each} for call, each in zip(message["tool_calls"], written, strict=True)]
    return {**message, "content": content, "tool_calls": calls}


CALL_FORMS: Sequence[Callable[[Message], Message]] = tuple(
    partial(_formed, null=null, text=text) for text in (False, True) for null in (False, True)
)


def _not_computed(*values: object) -> None:
    raise ValueError("the value is not constant")


def switches_of(source: object) -> tuple[str, ...]:
    """The names that a Jinja template reads besides the conversation: what chat_template_kwargs can set.

    `source` is the template's text; for anything else, or text that cannot be parsed, the usual names.
    """
    from jinja2 import TemplateSyntaxError, meta, nodes
    from jinja2.sandbox import SandboxedEnvironment

    if not isinstance(source, str):
        return USUAL_SWITCHES
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)  # a tag that transformers adds
    environment = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    # Looking for names computes constants, and "x" * 4000000000 is one: no operator or filter is computed here.
    environment.intercepted_binops = frozenset(environment.binop_table)
    environment.filters = dict.fromkeys(environment.filters, _not_computed)
    try:
        tree = environment.parse(plain)
    except TemplateSyntaxError:
        return USUAL_SWITCHES
    names = meta.find_undeclared_variables(tree) - GIVEN - environment.globals.keys()
    # a name that the template sets itself is a switch only where it asks whether it was given
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    given = r"(\s+is\s+(not\s+)?(un)?defined|\s*\|\s*default)"
    asked = {name for name in names if re.search(rf"(?<![\w.]){name}{given}", plain)}
    return tuple(sorted(name for name in names - (own - asked) if not name.endswith("_token")))
