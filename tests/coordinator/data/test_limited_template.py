"""Chat templates are programs of strangers: they render as transformers does, and stop at a limit of size and time."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxdist.coordinator.config.schema import DataConfig, RunConfig
from mlxdist.coordinator.data.load import encoding_of
from mlxdist.coordinator.encode import limited_template
from mlxdist.coordinator.encode.limited_template import limited_apply
from mlxdist.coordinator.encode.tokenizer import load
from mlxdist.protocol.errors import ConfigError, DataError
from tests.coordinator.data import chat_templates

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " hi <there> \n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo é", "reasoning_content": None},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "x"]}}}]},
]
TEMPLATES = {name: text for name, text in vars(chat_templates).items() if name.isupper() and isinstance(text, str)}
BUSY = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ n }}{% endif %}{% endmacro %}{% set ns = namespace(l=[], s='') %}"
    "{% for m in messages recursive %}{% set ns.l = ns.l + [m.role] %}{% set ns.s = ns.s ~ loop.index ~ loop.last %}"
    "{% set said %}{{ m.content | trim | replace('h', 'H') }}{% endset %}{{ said }}{{ loop.length }}{{ loop.revindex }}"
    "{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}{% if loop.first %}{% continue %}{% endif %}"
    "{% else %}none{% endfor %}{{ ns.l | join(', ') }}{{ ns.s }}{{ f(3) }}{{ '%s-%d' % ('a', 3) }}{{ 'x' * 3 + 'y' }}"
    "{{ '{} {a}'.format(1, a=2) }}{{ eos_token }}{{ messages[1:] | tojson(indent=2) }}{{ tools | tojson }}{{ 2 ** 5 }}"
    "{% generation %}{{ ','.join(['a', 'b']) | center(9) | indent(2) }}{% endgeneration %}{{ enable_thinking }}"
    "{% for key, value in dict(a=1).items() %}{{ key }}{{ value }}{% endfor %}{{ range(3) | list }}"
)
BOMBS = {
    "a text times a number": '{{ "x" * 4000000000 }}',
    "a list times a number": "{{ [messages] * 4000000000 }}",
    "a power": "{% set n = 9 ** 9 %}{{ n ** n }}",
    "a filter": '{{ "x" | center(4000000000) }}',
    "a method": '{{ "x".ljust(4000000000) }}',
    "a format": '{{ "%4000000000d" % 1 }}',
    "a method for formats": '{{ "{:4000000000d}".format(1) }}',
    "doubling": '{% set n = namespace(s="xx") %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}',
    "doubling in blocks": (
        '{% set n = namespace(s="xx") %}{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}'
    ),
    "joining": '{{ ",".join(["x" * 8000000] * 100000) }}',
    "replacing": '{{ ("a" * 8000000) | replace("a", "b" * 8000000) }}',
    "indents": '{{ ("a\n" * 4000000) | indent(8000000) }}',
    "JSON with indents": "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "output in a loop": '{% set s = "x" * 8000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}',
    "text in a loop": "{% for i in range(100000) %}" + "y" * 100_000 + "{% endfor %}",
    "a list in a list": '{% set s = ["x" * 8000000] * 1000 %}{{ s }}',
}
ENDLESS = {
    "loops": "{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3,
    "calls": "{% macro d(n) %}{% if n %}{{ d(n-1) }}{{ d(n-1) }}{% endif %}{% endmacro %}{{ d(60) }}",
}


def run_with(model: Path, template: str) -> Any:
    return encoding_of(RunConfig(model=str(model), output=model, data=DataConfig(path="none", chat_template=template)))


@pytest.mark.parametrize("template", [*TEMPLATES.values(), BUSY], ids=[*TEMPLATES, "BUSY"])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]], ids=["", "tools"])
def test_a_template_renders_as_transformers_renders_it(model: Path, template: str, tools: Any) -> None:
    wrapper = load(str(model), template)
    apply = limited_apply(wrapper)
    for talk in (TALK, TALK[1:3], TALK[1:2]):
        for asks in (False, True):
            options = {"tokenize": False, "add_generation_prompt": asks, "tools": tools, "enable_thinking": asks}
            texts = []
            for each in (wrapper.apply_chat_template, apply):
                try:
                    texts.append(each(talk, **options))
                except Exception as error:  # a template that refuses does so for both
                    texts.append(f"{type(error).__name__}: {error}")
            assert texts[0] == texts[1]


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_a_template_that_makes_too_much_is_stopped_before_it_is_made(model: Path, template: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="the chat template is stopped: it makes more than 8 million characters"):
        run_with(model, template).template.render(TALK[1:2], False)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 600 << 20


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_takes_too_long_is_stopped(model: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_template, "MOST_SECONDS", 0.2)
    with pytest.raises(DataError, match="the chat template is stopped: it takes more than"):
        run_with(model, template).template.render(TALK[1:2], False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("key", ["auto_map", "model_file"])
def test_a_model_with_code_of_its_own_is_refused_by_name_and_nothing_is_asked(
    model: Path, tmp_path: Path, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in model.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the model ran')")
    value = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"} if key == "auto_map" else "evil.py"
    (tmp_path / name).write_text(json.dumps({**json.loads((model / name).read_text()), key: value}))
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("the terminal was asked"))
    with pytest.raises(ConfigError, match=f"brings code of its own \\({key} in its {name}\\)"):
        load(str(tmp_path))
