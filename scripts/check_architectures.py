"""Compares the segmented backward with plain autograd for every architecture of mlx-lm, and writes the table.

    python -m scripts.check_architectures              all, a process each; writes docs/architectures.md (4 minutes)
    python -m scripts.check_architectures llama phi3   these, printed

Each is a tiny random float32 model with LoRA on every linear module of its layers, trained on two rows of different
lengths with segments of one layer and of three.
"""

import argparse
import dataclasses
import json
import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
EQUAL = 1e-5  # relative, float32
SECONDS, MEMORY = 180, 8 << 30  # limits of one architecture
KINDS = ("matches", "falls back", "cannot be trained", "not tried")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table."""

    architecture: str
    kind: str  # of KINDS
    difference: float = 0.0  # the largest of a parameter's gradient, relative
    why: str = ""
    chunked: float = 0.0  # the same of gated-delta layers in chunks, against mlx-lm's form; 0: it has none


def find(architecture: str) -> Finding:
    """Tries `architecture` in this process."""
    from mlxdist.node.work.blas import use_openblas

    use_openblas()
    from mlxdist.node.backward.backward import GradientPath, backward
    from mlxdist.node.backward.choose_path import choose_path
    from mlxdist.node.backward.chunked_layers import has_gated_delta
    from mlxdist.node.backward.events import gathered
    from scripts.plain_gradient import furthest, padded_rows, plain_gradient
    from scripts.tiny_architectures import VOCABULARY, add_lora, tiny_model

    rows = padded_rows(1, (37, 12), (25, 3), VOCABULARY)
    try:
        model = tiny_model(architecture)
        add_lora(model)
    except (Exception, SystemExit) as error:
        return Finding(architecture, "not tried", why=_short(error))
    try:
        _, expected = plain_gradient(model, [rows], _loss)
    except Exception as error:
        kind = "not tried" if "No Metal" in str(error) else "cannot be trained"
        return Finding(architecture, kind, why=_short(error))
    chunked = 0.0
    if has_gated_delta(model):
        longer = padded_rows(1, (97, 12), (85, 3), VOCABULARY)  # than a chunk of tokens
        _, own = plain_gradient(model, [longer], _loss)
        events = backward(model, [longer], _loss, head_chunk=8, path=GradientPath(supervised_head=False, chunked=True))
        chunked = furthest(gathered(events)[1], own)
    path = choose_path(model, segment_size=1)
    if not path.segment_size:
        return Finding(architecture, "falls back", why=path.reason, chunked=chunked)
    differences = [
        furthest(gathered(backward(model, [rows], _loss, head_chunk=8, path=path))[1], expected)
        for path in (GradientPath(segment_size=1), GradientPath(segment_size=3))
    ]
    worst = max(differences)
    if worst <= EQUAL:
        return Finding(architecture, "matches", worst, chunked=chunked)
    return Finding(architecture, "falls back", worst, "the difference is too large", chunked)


def _loss(sums: list[Any]) -> Any:
    return -sums[0].sum()


def find_apart(architecture: str) -> Finding:
    """Tries `architecture` in a process of its own, which may crash, hang or want too much memory."""
    command = [sys.executable, "-m", "scripts.check_architectures", "--here", architecture]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding(architecture, "cannot be trained", why=f"takes more than {SECONDS} s")
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return Finding(architecture, "cannot be trained", why=f"plain autograd ends the process ({how})")
    return Finding(**json.loads(done.stdout.splitlines()[-1]))


def table(findings: list[Finding]) -> str:
    """Returns the page docs/architectures.md."""
    counts = {kind: sum(finding.kind == kind for finding in findings) for kind in KINDS}
    head = [
        "# Architectures",
        "",
        f"The segmented backward against plain autograd, for the {len(findings)} architectures of mlx-lm "
        f"{version('mlx-lm')} (mlx {version('mlx')}, {platform.system()} {platform.machine()}, float32, tiny random "
        "models with LoRA on every linear module). Written by `python -m scripts.check_architectures`.",
        "",
        f"**{counts['matches']} match** (largest relative difference of a parameter's gradient at most {EQUAL:.0e}), "
        f"{counts['falls back']} fall back, {counts['cannot be trained']} cannot be trained with plain autograd "
        f"either, {counts['not tried']} were not tried.",
        "",
        "No list of names is in the code: at the start of a run every model is checked like this, on a tiny batch, and "
        "one that does not match is trained on the next best path, which the run says in one sentence.",
        "",
        "| architecture | segments | difference | why |",
        "| --- | --- | ---: | --- |",
    ]
    lines = [
        f"| {finding.architecture} | {finding.kind} | {_number(finding)} | {finding.why.replace('|', '/')} |"
        for finding in sorted(findings, key=lambda finding: finding.architecture.lower())
    ]
    return "\n".join([*head, *lines, "", *_with_states(findings)]) + "\n"


def _with_states(findings: list[Finding]) -> list[str]:
    """Returns the section on layers that hand a state from token to token."""
    from mlxdist.coordinator.memory.model_tree import TOKEN_BY_TOKEN

    chunked = ", ".join(f"{each.architecture} ({each.chunked:.0e})" for each in findings if each.chunked)
    slow = ", ".join(sorted(module for module, _ in TOKEN_BY_TOKEN))
    return [
        "## Layers with a state",
        "",
        "**In chunks of 64 tokens** train the gated-delta layers of these, with the largest relative difference of a "
        f"parameter's gradient from that of mlx-lm's form, token by token: {chunked}. Both are float32; alone, the "
        "operation in chunks is within 1e-6 of float64, and within 1e-5 where a token is repeated. A node compares "
        "both forms at the start, and takes mlx-lm's where they differ.",
        "",
        f"**Token by token** train the layers in these modules of mlx-lm, and models made of them: {slow}. "
        "`mlxdist plan` and the start of a run say so. The state spaces of mamba2, falcon_h1, granitemoehybrid, "
        "nemotron_h and plamo2 are computed in parallel by mlx-lm itself.",
    ]


def _number(finding: Finding) -> str:
    if finding.kind != "matches":
        return ""
    return f"{finding.difference:.1e}" if finding.difference else "0"


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="names of modules of mlx_lm.models; without, all")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    asked = parser.parse_args()
    if asked.here:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        print(json.dumps(dataclasses.asdict(find(asked.architectures[0]))))
        return

    from scripts.tiny_architectures import architectures

    findings = []
    for architecture in asked.architectures or list(architectures()):
        finding = find_apart(architecture)
        findings.append(finding)
        print(f"{architecture:24} {finding.kind:18} {_number(finding):8} {finding.why}", flush=True)
    if not asked.architectures:
        TABLE.write_text(table(findings), encoding="utf-8")
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
