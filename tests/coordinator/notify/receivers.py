"""Receivers of notifications on loopback: one that answers as it is told, one that never does, one with TLS."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

SELF_SIGNED = Path(__file__).with_name("self_signed.pem")  # a key that only these tests know, and no one trusts


@dataclass
class Receiver:
    """A server and all that it was sent."""

    url: str
    requests: list[tuple[str, str, dict[str, str], str]] = field(default_factory=list)  # method, path, headers, body


@contextmanager
def receiver(status: int = 200, headers: dict[str, str] | None = None, *, tls: bool = False) -> Iterator[Receiver]:
    """A server that answers every request with `status` and `headers`."""
    made = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            made.requests.append((self.command, self.path, dict(self.headers), body))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:  # a redirect that is followed comes as this
            self.do_POST()

        def log_message(self, *args: object) -> None:
            """Prints nothing."""

    class Server(HTTPServer):
        def handle_error(self, *args: object) -> None:
            """Passes over a handshake that the client ended."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(SELF_SIGNED)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    made.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent_receiver() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
