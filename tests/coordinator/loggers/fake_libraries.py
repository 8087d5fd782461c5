"""Libraries of loggers that misbehave, as modules that the process of a logger finds in front of the real ones."""

import textwrap
from pathlib import Path

# Each writes what it is given to `heard.jsonl` of the run, which is the folder above its own.
TENSORBOARD = """
import json, os, sys, time
from pathlib import Path

class SummaryWriter:
    def __init__(self, folder):
        self.file_writer = self
        self.heard = Path(folder).with_name("heard.jsonl").open("a", buffering=1)
        self.at("open", folder)
    def at(self, where, *values):
        self.heard.write(json.dumps([where, *values]) + "\\n")
        {deed}
    def add_text(self, name, text):
        pass
    def add_summary(self, summary):
        pass
    def add_scalar(self, name, value, step, walltime=None):
        self.at("log", name, value, step)
    def flush(self):
        pass
    def close(self):
        self.at("close")
"""


def misbehaving(folder: Path, deed: str = "pass") -> Path:
    """Writes a tensorboardX that does `deed` at each call, where `where` is open, log or close. Returns its folder."""
    package = folder / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(TENSORBOARD).format(deed=deed), encoding="utf-8")
    (package / "summary.py").write_text("def hparams(*values):\n    return values\n", encoding="utf-8")
    return folder
