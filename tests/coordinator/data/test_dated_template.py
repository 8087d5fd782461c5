"""A template that writes the date: said, and the same for every reading of one run, on any day, in any time zone."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxdist.coordinator.config.schema import BatchConfig, DataConfig, RunConfig
from mlxdist.coordinator.data.dated_template import clock_macro
from mlxdist.coordinator.data.load import read
from mlxdist.coordinator.storage.first_reading import FILE, first_reading
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import UserError
from tests.coordinator.data.data_toys import write_rows
from tests.laws.model_folder import llama_folder

DATED = (
    "{% for m in messages %}<{{ m.role }}> {{ strftime_now('w%d') }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {{ strftime_now('w%d') }} {% endif %}"
)
OPTIONAL = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('w%d') %}{% endif %}"
    "{{ date_string }} {% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
LATE = datetime(2026, 1, 31, 23, 30)
FORMS = ("%Y-%m-%d", "%d %b %Y", "%A, %-d %B %y", "100 %% at %H:%M:%S", "%j%%d", "no date")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama_folder(tmp_path_factory.mktemp("model")))


def run_of(folder: Path, model: str, template: str, **kwargs: object) -> RunConfig:
    row = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}
    path = str(write_rows(folder / "train.jsonl", [row]))
    data = DataConfig(path=path, chat_template=template, chat_template_kwargs=kwargs)
    return RunConfig(model=model, output=folder / "run", data=data, batch=BatchConfig(size=1))


def kept_in(folder: Path) -> RunFolder:
    run = RunFolder(folder / "run")
    run.state.mkdir(parents=True, exist_ok=True)
    return run


@pytest.mark.parametrize("template", [DATED, OPTIONAL])
def test_a_resumed_run_reads_the_tokens_of_its_first_reading_whatever_the_clock_says_then(
    tmp_path: Path, model: str, template: str
) -> None:
    config, run = run_of(tmp_path, model, template), kept_in(tmp_path)
    first = read(config, progress=lambda *_: None, moment=first_reading(run, LATE))
    later = LATE + timedelta(days=40)
    again = read(config, progress=lambda *_: None, moment=first_reading(run, later))
    assert again.digest == first.digest
    assert read(config, progress=lambda *_: None, moment=later).digest != first.digest
    assert any(
        "writes the date into the rows: 2026-01-31, the day of the run's first reading" in note for note in again.notes
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("moment", [LATE, datetime(2027, 12, 3, 1, 2, 3)])
def test_the_macro_writes_what_the_clock_would_in_every_form(form: str, moment: datetime) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    text = "\n{% set now = strftime_now('" + form + "') %}\n  {% if strftime_now is defined %}{{ now }}{% endif %}"
    plain = environment.from_string(text).render(strftime_now=moment.strftime)
    assert environment.from_string(clock_macro(moment) + text).render() == plain


def test_a_template_that_is_given_its_date_or_writes_none_is_left_alone(tmp_path: Path, model: str) -> None:
    for config in (run_of(tmp_path, model, OPTIONAL, date_string="w5"), run_of(tmp_path, model, "")):
        notes = read(config, progress=lambda *_: None, moment=LATE).notes
        assert not [note for note in notes if "date" in note]


def test_a_template_that_writes_the_date_for_some_rows_alone_is_found_at_the_first_of_them(
    tmp_path: Path, model: str
) -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ strftime_now('%d %B') }} {% endif %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )
    config = run_of(tmp_path, model, template)
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    rows = [{"messages": turns}] * 3 + [{"messages": [{"role": "system", "content": "w3"}, *turns]}]
    write_rows(tmp_path / "train.jsonl", rows)
    assert any("writes the date" in note for note in read(config, progress=lambda *_: None, moment=LATE).notes)


def test_a_kept_moment_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path) -> None:
    run = kept_in(tmp_path)
    for content in ("{", "{}", '{"moment": "soon"}', "[]"):
        (run.state / FILE).write_text(content)
        with pytest.raises(UserError, match=FILE):
            first_reading(run, LATE)


def test_a_token_without_an_embedding_is_refused_by_its_text_and_row(tmp_path: Path, model: str) -> None:
    from transformers import AutoTokenizer

    other = llama_folder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    config = run_of(tmp_path, str(other), "")
    read(config, progress=lambda *_: None)  # no row has the token
    rows = [{"text": "w1"}, {"text": "w1 <think> w2"}]
    write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(Exception, match=r"train\.jsonl:2: its token 96 \('<think>'\) is beyond the 96 that the model"):
        read(config, progress=lambda *_: None)
