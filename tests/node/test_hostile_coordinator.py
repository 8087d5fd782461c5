"""A coordinator chooses little of what a node does: two environment names with checked values, and a model to read."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mlxdist.coordinator.fleet.sockets import RouterHub
from mlxdist.node.supervisor import Supervisor
from mlxdist.node.work.model import load_with_lora
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, MismatchError
from mlxdist.protocol.numerics import WORKER_ENVIRONMENT
from mlxdist.protocol.transport import CONTROL, Parcel
from mlxdist.protocol.untrusted import model_name, worker_environment
from mlxdist.protocol.wire import decode, encode
from tests.memory_nodes import Wire
from tests.protocol.example_messages import example

SESSION = m.SessionId("run", 1, "1")
HOSTILE: tuple[Mapping[str, str], ...] = (
    {"PYTHONWARNINGS": "error::evil.Warning"},
    {"PYTHONPATH": "/tmp/evil"},
    {"BROWSER": "touch /tmp/owned #%s"},
    {"PYTHONSTARTUP": "/tmp/evil.py"},
    {"LD_PRELOAD": "/tmp/evil.so"},
    {"DYLD_INSERT_LIBRARIES": "/tmp/evil.dylib"},
    {"PATH": "/tmp"},
    {"HF_ENDPOINT": "http://evil.example"},
    {"mlx_enable_tf32": "0"},
    {"MLX_ENABLE_TF32": "0\nPATH=/tmp"},
    {"MLX_ENABLE_TF32": "0\n"},
    {"MLX_ENABLE_TF32": ""},
    {"OPENBLAS_NUM_THREADS": "1000"},
    {"OPENBLAS_NUM_THREADS": "\u0661"},
    {**WORKER_ENVIRONMENT, "PYTHONINSPECT": "1"},
)


@pytest.fixture
def hub() -> Iterator[RouterHub]:
    hub = RouterHub(["127.0.0.1"], 0)
    yield hub
    hub.close()


def test_what_is_sent_today_is_allowed() -> None:
    assert worker_environment(WORKER_ENVIRONMENT) == WORKER_ENVIRONMENT


@pytest.mark.parametrize("environment", HOSTILE, ids=lambda each: repr(dict(each)))
def test_a_supervisor_starts_nothing_in_an_environment_that_is_not_allowed(environment: dict[str, str]) -> None:
    with pytest.raises(MismatchError):
        worker_environment(environment)
    link = Wire(CONTROL, b"a")
    started = threading.Event()
    supervisor = Supervisor(
        "a", "127.0.0.1", link, launched=False, wait_seconds=60, start_worker=lambda _: started.set()
    )  # type: ignore[arg-type,return-value]
    supervisor._handle(m.Accept(SESSION, 7001, 2.0, environment, 1.0))
    assert not started.is_set()
    assert supervisor.exit_code == 1
    assert "nothing was started: the coordinator asks for" in supervisor.reason
    assert supervisor.reason.isprintable()


def test_a_node_process_runs_no_code_that_a_coordinator_names(hub: RouterHub, tmp_path: Path) -> None:
    """The real command, against a coordinator that puts a folder of its own in front of Python's."""
    owned = tmp_path / "owned"
    (tmp_path / "sitecustomize.py").write_text(f"open({str(owned)!r}, 'w').close()")
    command = [sys.executable, "-m", "mlxdist", "node", "--connect", f"127.0.0.1:{hub.ports[CONTROL]}", "--name", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as node:
        while node.poll() is None:
            for parcel in hub.receive(0.2):
                if isinstance(decode(parcel.frames)[0], m.Register):
                    accept = m.Accept(SESSION, 7001, 2.0, {**WORKER_ENVIRONMENT, "PYTHONPATH": str(tmp_path)}, 1.0)
                    hub.send(Parcel(CONTROL, parcel.peer, encode(accept)))
        assert node.stdout is not None
        words = node.stdout.read()
    assert node.returncode == 1
    assert "asks for PYTHONPATH=" in words
    assert not owned.exists()


@pytest.mark.parametrize(
    "text", ["/models/a", "/models/örtlich b", "mlx-community/SmolLM2-135M-Instruct", "gpt2", "a/_b"]
)
def test_a_hub_id_or_the_absolute_path_of_a_folder_is_a_model(text: str) -> None:
    assert model_name(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/models/a\0b",
        "/models/\x1b[2Ja",
        "/models/../etc",
        "../secret",
        "..",
        "a/..",
        "a/b/c",
        "./a",
        "~/models",
        "http://evil.example/model",
        "file:///etc",
        "/http://evil",
        "-rf",
        "a\nb",
        "/" + "a" * 2000,
        "\\\\server\\share",
        "x" * 200,
    ],
)
def test_anything_else_is_refused_before_a_file_is_opened(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model ") as caught:
        load_with_lora(m.RunSpec(**{**_fields(), "model": text}), lambda sentence: None)  # type: ignore[arg-type]
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def _fields() -> dict[str, object]:
    return {name: getattr(example(m.RunSpec), name) for name in m.RunSpec.__struct_fields__}


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("key", ["auto_map", "model_file"])
def test_a_worker_loads_no_model_with_code_of_its_own(model: Path, tmp_path: Path, name: str, key: str) -> None:
    for each in model.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    owned = tmp_path / "owned"
    (tmp_path / "evil.py").write_text(f"open({str(owned)!r}, 'w').close()")
    (tmp_path / name).write_text(json.dumps({**json.loads((model / name).read_text()), key: "evil.py"}))
    with pytest.raises(ConfigError, match=f"brings code of its own \\({key} in its {name}\\)"):
        load_with_lora(m.RunSpec(**{**_fields(), "model": str(tmp_path)}), lambda sentence: None)  # type: ignore[arg-type]
    assert not owned.exists()
