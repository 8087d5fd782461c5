"""The page's server on loopback, asked by a plain HTTP client that can send any path and header."""

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from mlxdist.coordinator.view.app import PAGE, page_app
from mlxdist.coordinator.view.serve import HOST, listening
from mlxdist.coordinator.view.watched_run import watched
from tests.coordinator.view.written_runs import WrittenRun

TOKEN = "t0ken-of-the-test"


class Client:
    """Asks one server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Sends a request as it is given; returns status, body and headers."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), {key.lower(): value for key, value in answer.getheaders()}
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """The answer below the token."""
        status, body, _ = self.ask(f"/{TOKEN}/{path}")
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> WrittenRun:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text("secret")
    return WrittenRun(folder / "run").take(6).evaluate().take(lost="mini-2").take(2)


@pytest.fixture(scope="module")
def client(written: WrittenRun) -> Iterator[Client]:
    other = WrittenRun(written.path.parent / "other", rate=2e-3).take(3)
    app = page_app([watched(written.path), watched(other.path)], TOKEN)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    with listening(0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Client(listener.getsockname()[1])
        server.should_exit = True
        thread.join()


def test_the_page_and_its_files_are_served_below_the_token(client: Client) -> None:
    status, body, headers = client.ask(f"/{TOKEN}/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"http://" not in body.replace(b"http://www.w3.org", b"")
    assert b"https://" not in body
    for path in PAGE.iterdir():
        assert client.ask(f"/{TOKEN}/page/{path.name}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/facts", "/wrong/", "/wrong/facts", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", "//", ""])
def test_without_the_token_there_is_nothing(client: Client, path: str) -> None:
    status, body, _ = client.ask(path or "/")
    assert (status, json.loads(body)) == (404, {"error": "not found"})


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "0.0.0.0"])
def test_another_host_name_is_refused_also_with_the_token(client: Client, host: str) -> None:
    assert client.ask(f"/{TOKEN}/facts", headers={"Host": host})[0] == 400


def test_loopback_by_either_name_is_served(client: Client) -> None:
    for host in (f"127.0.0.1:{client.port}", f"localhost:{client.port}"):
        assert client.ask(f"/{TOKEN}/runs", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["", "facts", "curves", "timeline", "news", "runs", "page/app.js"])
def test_nothing_can_be_written(client: Client, method: str, path: str) -> None:
    assert client.ask(f"/{TOKEN}/{path}", method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "page/../app.py",
        "page/..%2fapp.py",
        "page/%2e%2e/%2e%2e/secret.txt",
        "page//etc/passwd",
        "page/..\\app.py",
        "../secret.txt",
        "page/%00",
        "page/",
    ],
)
def test_no_file_beside_those_of_the_page_is_reached(client: Client, path: str) -> None:
    status, body, _ = client.ask(f"/{TOKEN}/{path}")
    assert status in (400, 404)
    assert b"secret" not in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "path",
    ["facts?run=2", "facts?run=-1", "facts?run=x", "facts?run=%C2%B2", "curves?pixels=0", "curves?pixels=99999",
     "curves?from=1e3", "timeline?step=99999999999999999999", "timeline?step="],
)  # fmt: skip
def test_a_number_that_is_none_is_refused(client: Client, path: str) -> None:
    assert client.ask(f"/{TOKEN}/{path}")[0] == 400


def test_every_answer_forbids_other_origins_frames_and_a_referrer(client: Client) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/facts", "/wrong/", f"/{TOKEN}/page/app.js"):
        headers = client.ask(path)[2]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


def test_facts_curves_and_timelines_are_those_of_the_run_that_is_asked_for(client: Client, written: WrittenRun) -> None:
    assert client.json("runs") == {"runs": ["run", "other"]}
    assert (client.json("facts")["step"], client.json("facts?run=1")["step"]) == (written.step, 3)
    curves = client.json("curves?name=loss&name=val/loss&name=none")
    assert set(curves) == {"loss", "val/loss"}
    assert curves["loss"][0] == list(range(1, written.step + 1))
    assert client.json("curves?name=loss&from=4&to=5")["loss"][0] == [3, 4, 5, 6]
    assert client.json("timeline?step=7")["troubles"][0]["node"] == "mini-2"


def test_news_come_as_events_at_first_and_with_each_change(client: Client, written: WrittenRun) -> None:
    connection = http.client.HTTPConnection(HOST, client.port, timeout=60)
    connection.request("GET", f"/{TOKEN}/news")
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def data() -> Any:
        while not (line := answer.readline()).startswith(b"data:"):
            assert line
        return json.loads(line[5:])

    before = data()
    written.take()
    after = data()
    assert after[0][0] > before[0][0]
    assert after[1] == before[1]
    connection.close()
