"""Chat templates of several families, written small, each with a pattern that finds its assistant turns in a render.

The patterns are the independent reference: they know how a template writes, and nothing of how turns are found.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.coordinator.data.data_toys import EOS, ToyTokenizer

_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
)
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}{% set said = said.split('</think>')[-1] %}"
    "{% endif %}"
)
_SHOWN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS + "<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_OFF = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"

CHATML = "{% for m in messages %}" + _SHOWN + "{% endfor %}" + _ASK
PLAIN_CHATML = CHATML.replace(_CALLS, "")
LLAMA = (
    "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ (m.content or '') | trim }}"
    + _CALLS
    + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Thoughts stay after the last user turn; the last turn gets an empty one.
QWEN = (
    _LAST_USER
    + "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    + "{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "<|im_start|>assistant\n{% if loop.index0 > ns.last or preserve_thinking %}{% if loop.last or thought %}<think>\n"
    + "{{ thought }}\n</think>\n\n{% endif %}{% endif %}{{ said }}"
    + _CALLS
    + "<|im_end|>\n{% else %}"
    + _SHOWN
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    + _OFF
    + "{% endif %}"
)
# Closes nothing; every turn of the assistant gets a thought, those before the last user turn an empty one.
GLM = (
    _LAST_USER
    + "[gMASK]{% for m in messages %}{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "<|assistant|>{% if loop.index0 > ns.last and thought %}\n<think>{{ thought }}</think>{% else %}\n<think></think>"
    + "{% endif %}{% if said %}\n{{ said }}{% endif %}"
    + _CALLS
    + "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}"
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A generation prompt opens a thought; a render closes one that it does not show.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _THOUGHT
    + "<|assistant|></think>{{ said }}"
    + _CALLS
    + "</s>{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
# A tool's answer repeats the name of the function that was called last.
HARMONY = (
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}{% endfor %}"
    "<|start|>assistant{% if m.content %}<|message|>{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    " to={{ c.function.name }}<|message|>{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>{{ ns.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Takes no system turn, and a tool's answer only behind a call.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{% set before = messages[loop.index0 - 1] %}"
    "{% if m.role == 'tool' and not (before.tool_calls or before.role == 'tool') %}"
    "{{ raise_exception('a tool answers a call') }}{% endif %}" + _SHOWN + "{% endfor %}" + _ASK
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ (m.content or '') | trim }}"
    + _CALLS
    + "</s>{% elif m.role == 'tool' %}[RESULT] {{ m.content }} [/RESULT]{% endif %}"
    "{% endfor %}"
)
# A call only where there is no content, its arguments as text; behind tools' answers the assistant has no header.
R1 = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role != 'tool' and ns.tool %}[/RESULT]"
    "{% set ns.tool = false %}{% set headed = false %}{% else %}{% set headed = true %}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}{{ '<|assistant|>' if headed }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name + ' ' + c.function.arguments }}</tool_call>{% endfor %}</s>"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>' if headed }}{{ m.content.split('</think>')[-1] }}</s>"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}[RESULT]{{ m.content }}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}{% if ns.tool %}[/RESULT]"
    "{% elif add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# Thoughts of the turns up to the last one without a call are emptied.
KIMI = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{% endif %}"
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The tools stand before the last user turn.
MISTRAL = (
    _LAST_USER
    + "{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}[TOOLS]"
    + "{{ tools | tojson }}{% endif %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}"
    + _CALLS
    + "</s>{% else %}[RESULT] {{ m.content }} [/RESULT]{% endif %}{% endfor %}"
)
# Says in front which functions are called later on.
DECLARES = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }};{% endfor %}{% endfor %}" + CHATML
)

# A conversation that no answer follows is closed once more, by a token that begins as the next turn's header does.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    + _CALLS
    + "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<|eot_id|>{% endif %}"
)
# Beside a call there is one field of words, shown only where no answer follows; the last answer has an end of its own.
OSS = (
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set final = namespace(follows=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role == 'assistant' and not later.tool_calls %}{% set final.follows = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.reasoning_content %}{{ raise_exception('content and reasoning beside calls') }}{% endif %}"
    "{% set ns.name = m.tool_calls[0].function.name %}<|start|>assistant{% if not final.follows %}"
    "{{ m.content or m.reasoning_content }}{% endif %} to={{ ns.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|end|>{% elif m.role == 'assistant' %}<|start|>assistant"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "<|message|>{{ m.content }}{{ '<|eot_id|>' if loop.last else '<|end|>' }}{% elif m.role == 'tool' %}"
    "{% if not ns.name %}{{ raise_exception('a tool answers a call') }}{% endif %}"
    "<|start|>{{ ns.name }} to=assistant<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_CHATML_TURN = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)"


@dataclass(frozen=True)
class Family:
    """A template and the pattern of its assistant turns: group 1 is what is trained of one."""

    source: str
    turn: str

    def turns(self, render: str) -> list[str]:
        """Returns the text of each assistant turn in a render, its end token included."""
        return re.findall(self.turn, render, re.DOTALL)


FAMILIES = {
    "chatml": Family(CHATML, _CHATML_TURN),
    "llama": Family(LLAMA, r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"),
    "qwen": Family(QWEN, _CHATML_TURN),
    # the token of the next turn ends this one; the row's last turn gets the end token
    "glm": Family(GLM, r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>|</s>|(?=<\|assistant\|>)|$))"),
    "deepseek": Family(DEEPSEEK, r"<\|assistant\|>(.*?</s>)"),
    "phi": Family(PHI, r"<\|assistant\|>\n(.*?<\|end\|>\n(?:<\|eot_id\|>)?)"),
    "oss": Family(OSS, r"<\|start\|>assistant(.*?(?:<\|end\|>|<\|eot_id\|>))"),
    "harmony": Family(HARMONY, r"<\|start\|>assistant(.*?<\|end\|>)"),
    "strict": Family(STRICT, _CHATML_TURN),
    "r1": Family(R1, r"(?:<\|assistant\|>|\[/RESULT\](?!<\|user\|>|$))(.*?</s>)"),
    "declares": Family(DECLARES, _CHATML_TURN),
    "kimi": Family(KIMI, r"<\|assistant\|>(.*?<\|im_end\|>)"),
    "mistral": Family(MISTRAL, r"(?<=[\]>])( (?:(?!\[[A-Z/]).)*?</s>)"),
    "drops system": Family(DROPS_SYSTEM, r"(?<=[\]>])( (?:(?!\[[A-Z/]).)*?</s>)"),
}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>"),
    *(
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|start|>",
        "<|end|>",
    ),
    *("<|message|>", "[gMASK]", "[INST]", "[/INST]", "<|system|>", "<|tool|>"),
)
SPECIAL_IDS = {text: 20_000 + place for place, text in enumerate(SPECIAL)} | {"</s>": EOS}
MERGED_IDS = {"ab": 9001, " c": 9002, "\n\n": 9003, "</": 9004, "<t": 9005, "</t": 9006, ".\n": 9007}


@dataclass(frozen=True)
class SpecialTokenizer(ToyTokenizer):
    """A toy tokenizer that knows the special tokens of the templates, and some merges."""

    pieces: dict[str, int] = field(default_factory=lambda: {**SPECIAL_IDS, **MERGED_IDS})
    ends: tuple[str, ...] = ("</s>",)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({EOS, *(SPECIAL_IDS[text] for text in self.ends)})


def jinja(source: str) -> Callable[..., str]:
    """A Jinja template as mlx-lm's apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(source)

    def apply(messages: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any) -> str:
        assert not tokenize
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **kwargs)

    apply.source = source  # type: ignore[attr-defined]
    return apply


def _refuse(message: str) -> None:
    raise TemplateError(message)
