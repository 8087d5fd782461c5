"""This project as a wheel: the package that runs here, packed again.

It needs no source folder, no build tool and no network, and a host gets the very code of the coordinator. Equal files
give an equal wheel, so its hash says when a host needs another.
"""

import base64
import hashlib
import re
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from mlxdist.coordinator.sync.files import aside
from mlxdist.protocol.version import VERSION
from mlxdist.protocol.versions import package_files

DATE = (1980, 1, 1, 0, 0, 0)
TAG = "py3-none-any"
WHEEL = f"Wheel-Version: 1.0\nGenerator: mlxdist\nRoot-Is-Purelib: true\nTag: {TAG}\n"
SCRIPTS = "[console_scripts]\nmlxdist = mlxdist.__main__:main\n"


def wheel_name() -> str:
    """Returns the file name of this version's wheel."""
    return f"mlxdist-{VERSION}-{TAG}.whl"


def write_wheel(folder: Path) -> Path:
    """Writes the wheel of the running package into `folder` and returns its path."""
    path, info = folder / wheel_name(), f"mlxdist-{VERSION}.dist-info"
    files = {name: path.read_bytes() for name, path in package_files()}
    here = distribution("mlxdist")  # of an editable installation it may be an older one's, or lie in the source folder
    said = here.read_text("METADATA") or here.read_text("PKG-INFO") or ""
    said = re.sub(r"(?m)^Version: .*", f"Version: {VERSION}", said, count=1)
    files |= {f"{info}/METADATA": said.encode(), f"{info}/WHEEL": WHEEL.encode()}
    files[f"{info}/entry_points.txt"] = SCRIPTS.encode()
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(aside(path), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, DATE), data, zipfile.ZIP_DEFLATED)
    return aside(path).replace(path)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
