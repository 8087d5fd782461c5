"""The address of `train.notify`: read, with variables of the environment in it, and never shown whole.

    https://ntfy.sh/my-topic                  ntfy: a text with headers
    ntfy+https://mac.local/my-topic           the same on a server of one's own
    https://hooks.slack.com/services/…        Slack; also Discord, and any receiver of JSON
    https://${USER_AND_TOKEN}@host/path       with user and password, and from the environment

Such an address is a secret by itself: who has it can write to the topic or the channel.
"""

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

from mlxdist.protocol.errors import ConfigError

Form = Literal["ntfy", "slack", "discord", "json"]
NTFY = "ntfy+"
VARIABLE = re.compile(r"\$\{(\w+)\}")
FORMS: tuple[tuple[str, Form], ...] = (  # by the host, or the end of it
    ("ntfy.sh", "ntfy"),
    ("slack.com", "slack"),
    ("discord.com", "discord"),
    ("discordapp.com", "discord"),
)


@dataclass(frozen=True)
class Address:
    """One receiver. Only `host` may be shown."""

    form: Form
    host: str
    url: str = field(repr=False)  # without user and password
    authorization: str = field(default="", repr=False)  # the header's value


def address_of(text: str, environ: Mapping[str, str]) -> Address | None:
    """Returns the address that train.notify means, None for "". Raises ConfigError, without a part of the address."""
    if not text:
        return None
    missing = [name for name in VARIABLE.findall(text) if name not in environ]
    if missing:
        raise ConfigError(
            f"train.notify reads {' and '.join(missing)} from the environment, and there is no such variable"
        )
    whole = VARIABLE.sub(lambda match: environ[match[1]], text).strip()
    parts = _split(whole.removeprefix(NTFY))
    if parts is None:
        raise ConfigError(
            "train.notify must be an address that begins with https:// or http:// (for a server of ntfy of your own "
            "ntfy+https://), without spaces; it is not shown here, as it may hold a secret"
        )
    host = parts.hostname or ""
    ends = (form for end, form in FORMS if host == end or host.endswith(f".{end}"))
    form: Form = "ntfy" if whole.startswith(NTFY) or host.startswith("ntfy.") else next(ends, "json")
    user, at, place = parts.netloc.rpartition("@")
    authorization = f"Basic {b64encode(unquote(user).encode()).decode()}" if at else ""
    return Address(form, host, parts._replace(netloc=place, fragment="").geturl(), authorization)


def _split(url: str) -> SplitResult | None:
    """Returns the parts of an address that a request can be sent to; None for any other text."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    return parts if usable and url.isascii() and not re.search(r"[\s\x00-\x1f\x7f]", url) else None
