"""One POST: the request that a receiver takes, and the reason when it does not."""

import json
import re
import urllib.error
import urllib.request
from base64 import b64encode
from http.client import HTTPException
from ssl import SSLCertVerificationError
from urllib.parse import urlsplit

from mlxdist.coordinator.notify.address import Address
from mlxdist.coordinator.notify.notices import Notice
from mlxdist.protocol.version import VERSION

TIMEOUT_SECONDS = 5.0  # for each wait of a request


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a POST would arrive as a GET, and the message somewhere else."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def request_of(address: Address, run: str, notice: Notice) -> urllib.request.Request:
    """Returns the request for a notice of the run with this name, in the form of the receiver."""
    title = " ".join(f"{run}: {notice.kind}".split())
    headers = {"User-Agent": f"mlxdist/{VERSION}", "Content-Type": "application/json"}
    if address.authorization:
        headers["Authorization"] = address.authorization
    match address.form:
        case "ntfy":
            headers |= {"Title": _header(title), "Priority": notice.priority, "Tags": notice.tag}
            headers["Content-Type"] = "text/plain; charset=utf-8"
            return urllib.request.Request(address.url, notice.text.encode(), headers, method="POST")
        case "slack":
            content: dict[str, object] = {"text": _slack(f"{title}\n{notice.text}")}
        case "discord":  # no mention in a message calls people
            content = {"content": f"**{title}**\n{notice.text}", "allowed_mentions": {"parse": []}}
        case "json":
            text = f"{title}\n{notice.text}"
            content = {"text": text, "content": text, "title": title, "message": notice.text}
            content |= {"run": run, "event": notice.kind, "priority": notice.priority}
    return urllib.request.Request(address.url, json.dumps(content).encode(), headers, method="POST")


def post(address: Address, run: str, notice: Notice, timeout: float = TIMEOUT_SECONDS) -> str:
    """Sends a notice. Returns the reason where that failed, else "". No part of the address but its host is named."""
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request_of(address, run, notice), timeout=timeout):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            place = urlsplit(error.headers.get("Location") or "").hostname
        if 300 <= error.code < 400:
            return f"it redirects to {place or 'another address'}, and redirects are not followed: name that address"
        return f"it answered {error.code} {error.reason}"
    except TimeoutError:
        return f"it did not answer within {timeout:g} s"
    except (OSError, HTTPException, ValueError) as error:
        return _reason(error.reason if isinstance(error, urllib.error.URLError) else error, timeout)


def _reason(error: object, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer within {timeout:g} s"
    if isinstance(error, SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _header(text: str) -> str:
    """Returns a text as a header holds it: other than ASCII encoded as RFC 2047 says, which ntfy reads."""
    return text if re.fullmatch(r"[\x20-\x7e]*", text) else f"=?UTF-8?B?{b64encode(text.encode()).decode()}?="


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
