"""The command `mlxdist view`: what it refuses in a sentence, and the extra that it needs."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from mlxdist.coordinator.view.serve import HOST, folder_at, listening, require_extra, serve
from mlxdist.protocol.errors import UserError
from tests.coordinator.view.written_runs import WrittenRun


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run: there is no such folder"):
        serve([tmp_path / "none"], 0)
    with pytest.raises(UserError, match=r"is not a run: it has no manifest\.json of mlxdist"):
        serve([tmp_path], 0)


def test_a_run_is_named_by_its_folder_or_by_its_run_file(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "out").path
    (tmp_path / "run.toml").write_text('model = "m"\noutput = "out"\n[data]\npath = "rows"\n')
    assert folder_at(run) == folder_at(tmp_path / "run.toml") == run
    assert folder_at(tmp_path / "coming", must_be_run=False) == tmp_path / "coming"


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(UserError, match=r"the page needs no_such_package: pip install 'mlxdist\[view\]'"):
        require_extra(["uvicorn", "no_such_package"])


def test_a_port_that_is_taken_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} cannot be opened .*another --port"):
            listening(port)


def test_the_page_listens_on_loopback_alone() -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.slow
def test_the_page_of_a_launch_ends_with_it_also_when_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mlxdist.commands.page import page_beside\n"
        "with page_beside(Path(sys.argv[1])): time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "coming")], stdout=subprocess.PIPE) as launch:
        assert launch.stdout is not None
        url = launch.stdout.readline().decode().split()[-1]
        (page,) = psutil.Process(launch.pid).children()
        with urlopen(url + "facts", timeout=60) as answer:
            assert json.load(answer)["state"] == "waiting"
        launch.kill()
        page.wait(60)
