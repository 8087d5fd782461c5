"""An interrupt while hosts are looked at ends the commands in work at once, and leaves none."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

LOOKING = """
import sys
from mlxdist.coordinator.launch.ssh import Target, everywhere, run
try:
    script = "echo $$ > {0}.new && mv {0}.new {0}; exec sleep 600"
    everywhere(lambda place: run(Target("localhost"), script.format(place), timeout=3600), sys.argv[1:])
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_every_command_that_is_in_work(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b", "c")]
    with subprocess.Popen([sys.executable, "-c", LOOKING, *map(str, places)]) as process:
        while not all(place.exists() for place in places):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    sleeping = [pid for place in places if psutil.pid_exists(pid := int(place.read_text()))]
    assert sleeping == []
