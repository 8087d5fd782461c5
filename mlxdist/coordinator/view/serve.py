"""`mlxdist view`: serves the page of some runs on this machine, until it is interrupted."""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.paths import absolute
from mlxdist.coordinator.storage.open_run import read_manifest
from mlxdist.coordinator.storage.run_folder import RunFolder
from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    import uvicorn

HOST = "127.0.0.1"
TOKEN_BYTES = 16
LAST_SECONDS = 2.0  # in which an open page fetches the end of a run
EXTRA = ("starlette", "uvicorn", "sse_starlette")


def serve(paths: Sequence[Path], port: int, *, launched: bool = False) -> None:
    """Prints the page's address and serves it until Ctrl-C. `port` 0: any free one.

    `launched`: for `launch --view`, whose run may not have begun; the server then ends with its standard input.

    Raises UserError for a folder that is no run, for a port that is taken, and without the extra `view`.
    """
    require_extra()
    folders = [folder_at(path, must_be_run=not launched) for path in paths]
    listener = listening(port)

    import uvicorn

    from mlxdist.coordinator.view.app import page_app
    from mlxdist.coordinator.view.watched_run import watched

    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = page_app([watched(folder) for folder in folders], token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    with listener:
        print(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", flush=True)
        if launched:
            threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
        else:
            print("Only this Mac can open it. Ctrl-C ends the page, not the run.", flush=True)
        server.run(sockets=[listener])


def require_extra(packages: Sequence[str] = EXTRA) -> None:
    """Raises UserError where packages of the extra `view` are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(f"the page needs {', '.join(missing)}: pip install 'mlxdist[view]'")


def folder_at(path: Path, *, must_be_run: bool = True) -> Path:
    """Returns the run folder `path`, or the output folder of the run file `path`. Raises UserError for no run."""
    folder = load_config(path).output if path.is_file() else absolute(str(path), Path.cwd())
    if must_be_run and read_manifest(RunFolder(folder)) is None:
        what = "there is no such folder" if not folder.exists() else "it has no manifest.json of mlxdist"
        raise UserError(f"{folder} is not a run: {what}. mlxdist runs FOLDER lists the runs below a folder.")
    return folder


def listening(port: int) -> socket.socket:
    """Returns a socket that listens on loopback. Raises UserError for a port that is taken."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} cannot be opened ({error.strerror}): give another --port, or leave it out for a free one"
        ) from None
    return listener


def _end_with_input(server: "uvicorn.Server") -> None:
    """Ends the server when standard input is closed: the command that started it has ended, however it did."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    if server.server_state.connections:
        time.sleep(LAST_SECONDS)
    server.should_exit = True
