"""The addresses behind the host of an endpoint, of both families, with the zone of link-local ones."""

import socket


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns host and port of tcp://host:port; an IPv6 address stands in brackets there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    """Returns tcp://host:port, with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def addresses(host: str) -> list[str]:
    """Returns the numeric addresses of a host, in the system's order; the host itself where none is found yet."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [host]
    return list(dict.fromkeys(_with_zone(family, end) for family, _, _, _, end in found)) or [host]


def _with_zone(family: int, end: tuple[object, ...]) -> str:
    address = str(end[0])
    zone = end[3] if family == socket.AF_INET6 and len(end) > 3 else 0
    return f"{address}%{zone}" if zone and "%" not in address else address
