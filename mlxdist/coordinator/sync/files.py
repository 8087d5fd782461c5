"""Files on their way to a host: only those whose SHA-256 differs there, by rsync or through ssh, checked afterwards."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from mlxdist.coordinator.launch.quoting import path_word, quote, words
from mlxdist.coordinator.launch.ssh import Answer, Target, run, ssh_words
from mlxdist.protocol.errors import NodeError

SLOWEST_SUM, SLOWEST_COPY = 50e6, 0.5e6  # bytes per second, for the time that a host is given
LOOK_SECONDS = 0.3  # between two looks at a copy's progress
SUM = "{ shasum -a 256 || sha256sum; }"  # macOS has the first, Linux the second
PROGRESS = re.compile(r"\s*([\d,.]+)\s+\d+%")


@dataclass(frozen=True)
class File:
    """A file here, and its name below the work folder of a host. Both end in the same name."""

    name: str
    path: Path
    size: int  # bytes
    sha256: str

    @classmethod
    def of(cls, name: str, path: Path) -> "File":
        """Returns the file with its size and hash, which are read now."""
        with path.open("rb") as stream:
            return cls(name, path, path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())

    @property
    def folder(self) -> str:
        """The folder on the host, below the work folder."""
        return str(Path(self.name).parent)


def aside(path: Path) -> Path:
    """Returns the name under which a file or folder is written until it is complete."""
    return path.with_name(f"{path.name}.part")


def differing(target: Target, workdir: str, files: Sequence[File]) -> list[File]:
    """Returns the files that the host does not have with the same bytes. Raises NodeError."""
    if not files:
        return []
    script = (
        f"[ -d {path_word(workdir)} ] || exit 0; cd {path_word(workdir)} || exit 3; "
        f'while IFS= read -r F; do [ -f "$F" ] && echo "$({SUM} 2>/dev/null < "$F" | cut -c1-64) $F"; done; true'
    )
    names = "".join(f"{file.name}\n" for file in files)
    timeout = 60 + sum(file.size for file in files) / SLOWEST_SUM
    answer = checked(target, run(target, script, stdin=names.encode(), timeout=timeout), "its files cannot be compared")
    there = {name: digest for digest, _, name in (line.partition(" ") for line in answer.out.splitlines())}
    return [file for file in files if there.get(file.name) != file.sha256]


def copied(target: Target, workdir: str, files: Sequence[File], rsync: str) -> Iterator[int]:
    """Copies files to a host, and yields the bytes that are there so far, of these files. Raises NodeError.

    With `rsync`, its absolute path on the host, a file that is there in part or in an older version costs only what
    differs; "" copies through ssh.
    """
    folders = sorted({file.folder for file in files})
    script = f"mkdir -p {path_word(workdir)} && cd {path_word(workdir)} && mkdir -p {words(*folders)}"
    checked(target, run(target, script), "its work folder cannot be made")
    done = 0
    here = shutil.which("rsync") if rsync else None
    for folder, group in groupby(sorted(files, key=lambda file: file.folder), lambda file: file.folder):
        some = list(group)
        for bytes_of in (
            [_by_rsync(here, target, workdir, folder, some, rsync)]
            if here
            else (_through_ssh(target, workdir, file) for file in some)
        ):
            at = 0
            for at in bytes_of:
                yield done + at
            done += at
    if wrong := differing(target, workdir, files):
        raise NodeError(
            f"{target.host}: {wrong[0].name} has other bytes there after the copy than here: run sync again, and check "
            "the disks of both when it happens twice"
        )


def _by_rsync(here: str, target: Target, workdir: str, folder: str, files: Sequence[File], there: str) -> Iterator[int]:
    """Copies files into one folder; flags that rsync 2.6.9, 3 and openrsync have."""
    # The host's rsync starts in the work folder, so that no path with spaces passes a login shell.
    start = f'cd {path_word(workdir)} && exec {quote(there)} "$@"'
    host = f"[{target.host}]" if ":" in target.host else target.host
    to = f"{target.user}@{host}" if target.user else host
    shell = " ".join(_rsh_word(word) for word in ssh_words(target))
    command = [here, "-rLt", "--partial", "--progress", "-e", shell, f"--rsync-path=exec /bin/sh -c {quote(start)} sh"]
    command += [*(str(file.path) for file in files), f"{to}:{folder}/"]
    sizes, done, current = {file.path.name: file.size for file in files}, 0, ""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout or ():
                if (name := line.strip()) in sizes:
                    done, current = done + sizes.get(current, 0), name
                elif found := PROGRESS.match(line):
                    yield done + int(re.sub(r"\D", "", found[1]))
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code:
            errors.seek(0)
            raise NodeError(_failed(target, errors.read().decode(errors="replace")))
    yield sum(sizes.values())


def _rsh_word(word: str) -> str:
    """Returns a word of ssh as rsync reads it back from -e."""
    return f"'{word}'" if " " in word else word


def _through_ssh(target: Target, workdir: str, file: File) -> Iterator[int]:
    """Copies one file as the standard input of a command."""
    part = f"{file.name}.part"
    script = f"cd {path_word(workdir)} && cat > {quote(part)} && mv {words(part, file.name)}"
    answers: list[Answer] = []
    with file.path.open("rb") as stream:
        seconds = 60 + file.size / SLOWEST_COPY
        thread = threading.Thread(
            target=lambda: answers.append(run(target, script, stdin=stream, timeout=seconds)), daemon=True
        )
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            yield os.lseek(stream.fileno(), 0, os.SEEK_CUR)  # ssh reads from the same place
    if not answers or not answers[0].ok:
        raise NodeError(_failed(target, answers[0].err or answers[0].ssh if answers else ""))


def checked(target: Target, answer: Answer, what: str) -> Answer:
    """Returns the answer of a command that did its work. Raises NodeError with `what` and the reason."""
    if answer.ok:
        return answer
    said = (answer.err or answer.ssh).strip().splitlines()
    reason = said[-1] if said else "it did not answer in time" if answer.code is None else f"exit code {answer.code}"
    raise NodeError(f"{target.host}: {what}: {reason}")


def _failed(target: Target, errors: str) -> str:
    lines = [line for line in errors.strip().splitlines() if line.strip()]
    full = next((line for line in lines if "No space left" in line), None)
    if full:
        return f"{target.host}: the disk is full: free some space there, or set workdir to another volume ({full})"
    return f"{target.host}: the copy stopped: {lines[-1] if lines else 'the connection ended'}; run sync again"
