import zipfile
from pathlib import Path

from mlxdist.coordinator.sync.files import File
from mlxdist.coordinator.sync.wheel import write_wheel
from mlxdist.protocol.versions import package_files


def test_equal_code_gives_an_equal_wheel(tmp_path: Path) -> None:
    first = File.of("wheel", write_wheel(tmp_path))
    assert File.of("wheel", write_wheel(tmp_path)) == first


def test_the_wheel_holds_the_code_that_runs_here(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path)) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {name: path.read_bytes() for name, path in package_files()}


def test_the_wheel_names_what_it_needs_and_its_command(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path)) as wheel:
        info = {
            name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name
        }
    assert "Requires-Dist: mlx-lm" in info["METADATA"]
    assert "mlxdist = mlxdist.__main__:main" in info["entry_points.txt"]
    assert all(len(line.split(",")) == 3 for line in info["RECORD"].splitlines())
