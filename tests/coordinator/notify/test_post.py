"""Each receiver gets the form that it takes; one that fails is named by its host alone, and holds nothing."""

import base64
import json
import threading
from email.header import decode_header, make_header

import pytest

from mlxdist.coordinator.notify.address import Address, address_of
from mlxdist.coordinator.notify.notices import Notice
from mlxdist.coordinator.notify.notifier import Notifier
from mlxdist.coordinator.notify.post import post, request_of
from mlxdist.protocol.errors import ConfigError
from tests.coordinator.notify.receivers import receiver, silent_receiver

LOST = {"event": "node", "name": "mini-1", "state": "dead", "message": "not heard for 15 s"}
DONE = {"event": "done", "status": "done", "message": "…", "wall_seconds": 2.0}


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def address(text: str, **environ: str) -> Address:
    found = address_of(text, environ)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "form", "host"),
    [
        ("https://ntfy.sh/topic", "ntfy", "ntfy.sh"),
        ("https://ntfy.example.org/topic", "ntfy", "ntfy.example.org"),
        ("ntfy+http://mac.local:8080/topic", "ntfy", "mac.local"),
        ("https://hooks.slack.com/services/T/B/x", "slack", "hooks.slack.com"),
        ("https://discord.com/api/webhooks/1/x", "discord", "discord.com"),
        ("https://notslack.com/x", "json", "notslack.com"),
        ("http://192.168.1.2:8123/api/webhook/x", "json", "192.168.1.2"),
        ("${ALL}", "ntfy", "ntfy.sh"),
        ("https://ntfy.sh/${TOPIC}", "ntfy", "ntfy.sh"),
    ],
)
def test_the_form_follows_from_the_address(text: str, form: str, host: str) -> None:
    found = address(text, ALL="https://ntfy.sh/all-secret", TOPIC="topic-secret")
    assert (found.form, found.host) == (form, host)
    assert "secret" not in repr(found)


def test_no_address_means_no_notification() -> None:
    assert address_of("", {}) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "s3cret",
            "ntfy.sh/s3cret",
            "ftp://host/s3cret",
            "file:///etc/s3cret",
            "https:///s3cret",
            "https://h:x/s3cret",
        ),
        *("https://host/se cret", "https://host/s3cret\nX: y", "https://höst/s3cret", "https://[s3cret"),
    ],
)
def test_what_is_no_address_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.notify must be an address that begins with https://") as caught:
        address_of(text, {})
    assert "s3cret" not in str(caught.value)


def test_a_variable_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"train\.notify reads TOPIC from the environment"):
        address_of("https://ntfy.sh/${TOPIC}", {})


def test_ntfy_gets_a_text_with_headers_and_a_name_in_any_language() -> None:
    with receiver() as server:
        found = address(f"ntfy+{server.url}/topic".replace("//", "//user:p%40ss@"))
        assert post(found, "größe\nX-Evil: 1", Notice("node lost", "mini-1 — gone", "mini-1")) == ""
    ((method, path, headers, body),) = server.requests
    assert (method, path, body) == ("POST", "/topic", "mini-1 — gone")
    assert str(make_header(decode_header(headers["Title"]))) == "größe X-Evil: 1: node lost"
    assert (headers["Priority"], headers["Tags"]) == ("default", "warning")
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"user:p@ss"
    assert "X-Evil" not in headers


def test_a_webhook_gets_json_that_any_receiver_finds_its_text_in() -> None:
    with receiver(204) as server:
        assert post(address(f"{server.url}/hook?key=1"), "night", Notice("failed", "no node is left")) == ""
    ((_, path, headers, body),) = server.requests
    assert (path, headers["Content-Type"]) == ("/hook?key=1", "application/json")
    assert json.loads(body) == {
        "text": "night: failed\nno node is left",
        "content": "night: failed\nno node is left",
        "title": "night: failed",
        "message": "no node is left",
        "run": "night",
        "event": "failed",
        "priority": "high",
    }


def test_slack_and_discord_get_their_own_field_and_no_one_is_called_by_a_message() -> None:
    notice = Notice("failed", "<!channel> & @everyone")
    slack = request_of(address("https://hooks.slack.com/services/x"), "night", notice)
    assert json.loads(slack.data or b"") == {"text": "night: failed\n&lt;!channel&gt; &amp; @everyone"}  # type: ignore[arg-type]
    discord = request_of(address("https://discord.com/api/webhooks/x"), "night", notice)
    assert json.loads(discord.data or b"") == {  # type: ignore[arg-type]
        "content": "**night: failed**\n<!channel> & @everyone",
        "allowed_mentions": {"parse": []},
    }


def test_a_redirect_is_not_followed_and_its_place_is_named_without_a_path() -> None:
    with receiver() as other, receiver(302, {"Location": f"{other.url}/secret"}) as server:
        reason = post(address(server.url), "night", Notice("done", "…"))
    assert reason == "it redirects to 127.0.0.1, and redirects are not followed: name that address"
    assert other.requests == []


def test_a_certificate_that_is_not_trusted_is_refused_before_anything_is_sent() -> None:
    with receiver(tls=True) as server:
        reason = post(address(f"{server.url}/secret"), "night", Notice("done", "…"))
    assert reason.startswith("its certificate is not trusted (")
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "it answered 404 Not Found"), (429, "it answered 429 Too Many Requests"), (500, "it ")]
)
def test_a_refusal_is_told_by_its_number(status: int, reason: str) -> None:
    with receiver(status) as server:
        assert post(address(server.url), "night", Notice("done", "…")).startswith(reason)


def test_a_receiver_that_is_not_there_or_never_answers_is_given_up() -> None:
    with silent_receiver() as url:
        assert post(address(url), "night", Notice("done", "…"), timeout=0.05) == "it did not answer within 0.05 s"
    assert post(address(url), "night", Notice("done", "…")) == "Connection refused"


def test_a_notifier_posts_what_matters_and_says_nothing_when_all_is_well() -> None:
    with receiver() as server:
        notifier = Notifier(address(server.url), "night")
        assert [*notifier.take({"event": "train", "step": 1}), *notifier.take(LOST), *notifier.take(DONE)] == []
        assert notifier.end() == []
    assert [json.loads(body)["event"] for *_, body in server.requests] == ["node lost", "done"]


def test_a_run_that_broke_off_without_an_event_is_told_too() -> None:
    with receiver() as server:
        notifier = Notifier(address(server.url), "night")
        assert notifier.end("too few nodes are ready") == []
    ((*_, body),) = server.requests
    assert json.loads(body)["message"] == "before the first step: too few nodes are ready"


def test_a_receiver_that_blocks_holds_neither_an_event_nor_the_end_and_the_loss_is_counted() -> None:
    held, called = threading.Event(), threading.Event()

    def never(*args: object) -> str:
        called.set()
        held.wait()
        return ""

    notifier = Notifier(address("https://ntfy.sh/secret"), "night", send=never, end_seconds=0.05)
    for number in range(11):
        assert notifier.take({**LOST, "name": f"mini-{number}"}) == []
        called.wait()
    assert notifier.take(DONE) == []
    assert notifier.end() == ["notify: 12 of 12 messages were not sent"]
    held.set()


def test_a_failure_is_told_once_while_it_lasts_with_the_host_alone() -> None:
    answers = iter(["it answered 500", "it answered 500", "", "it answered 500"])
    notifier = Notifier(address("https://ntfy.sh/secret"), "night", send=lambda *args: next(answers))
    for number in range(4):
        notifier.take({**LOST, "name": f"mini-{number}"})
    said = notifier.end()
    told = "notify: a message to ntfy.sh was not sent: it answered 500. The run goes on"
    assert said == [told, told, "notify: 3 of 4 messages were not sent"]
