"""Compares segments and packed rows with plain autograd for every architecture of mlx-lm, and writes the table.

    python -m scripts.check_architectures              all, a process each; writes docs/architectures.md (10 minutes)
    python -m scripts.check_architectures llama phi3   these, printed

Each is a tiny random float32 model with LoRA on every linear module of its layers, trained on two rows of different
lengths with segments of one layer and of three. Then rows and pairs are packed as at the start of a run, and their
gradient is compared with that of each row alone.
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

from mlxdist.protocol.packing import APART, BY_PIECE, PACKED

TABLE = Path(__file__).parent.parent / "docs" / "architectures.md"
EQUAL = 1e-5  # relative, float32
PACKED_TOKENS = 150  # of the largest packed leaf
SECONDS, MEMORY = 300, 8 << 30  # limits of one architecture
KINDS = ("matches", "falls back", "cannot be trained", "not tried")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table."""

    architecture: str
    kind: str  # of KINDS
    difference: float = 0.0  # the largest of a parameter's gradient, relative
    why: str = ""
    chunked: float = 0.0  # the same of gated-delta layers in chunks, against mlx-lm's form; 0: it has none
    packing: str = ""  # of protocol/packing.py, with the mixers by name
    packed: float = 0.0  # the difference of the packed rows' gradient, relative


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
    packing, packed = packing_of(model, path)
    if not path.segment_size:
        return Finding(architecture, "falls back", 0.0, path.reason, chunked, packing, packed)
    differences = [
        furthest(gathered(backward(model, [rows], _loss, head_chunk=8, path=path))[1], expected)
        for path in (GradientPath(segment_size=1), GradientPath(segment_size=3))
    ]
    worst = max(differences)
    if worst <= EQUAL:
        return Finding(architecture, "matches", worst, "", chunked, packing, packed)
    return Finding(architecture, "falls back", worst, "the difference is too large", chunked, packing, packed)


def _loss(sums: list[Any]) -> Any:
    return -sums[0].sum()


def packing_of(model: Any, path: Any) -> tuple[str, float]:
    """Returns the mode in which the model's rows are packed, with its mixers, and how far its gradient is off."""
    import mlx.core as mx

    from mlxdist.node.backward.backward import backward
    from mlxdist.node.backward.choose_packing import choose_packing, tiny_items
    from mlxdist.node.backward.events import gathered
    from mlxdist.node.backward.layout import alone, pack
    from scripts.plain_gradient import furthest
    from scripts.tiny_architectures import VOCABULARY

    choice = choose_packing(model, path, tokens=PACKED_TOKENS)
    if choice.mode == APART:
        return APART, 0.0
    items = tiny_items(2 * PACKED_TOKENS // 3, VOCABULARY)
    together, rows = [pack(items, choice.mixers)], [alone(row) for item in items for row in item]
    found, expected = (
        gathered(backward(model, some, lambda sums: -mx.concatenate(sums).sum(), head_chunk=32, path=path))[1]
        for some in (together, rows)
    )
    names = ", ".join(kind.__name__ for kind in choice.mixers)
    return choice.mode + (f": {names}" if names else ""), furthest(found, expected)


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
        f"Of those that are trained, {_packed(findings, PACKED)} are packed with two replaced functions of mlx alone, "
        f"{_packed(findings, BY_PIECE)} with some modules called for each row, and {_packed(findings, APART)} are "
        "refused: their rows are computed one by one. The last difference is that of the packed gradient from the "
        "gradient of the rows alone.",
        "",
        "No list of names is in the code: at the start of a run every model is checked like this, on a tiny batch (the "
        "packing also at the size of the run's largest leaf), and one that does not match is trained in the next best "
        "way, which the run says in one sentence.",
        "",
        "| architecture | segments | difference | packing | difference | why |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    lines = [
        f"| {finding.architecture} | {finding.kind} | {_number(finding)} "
        f"| {finding.packing.replace('apart', 'refused')} | {f'{finding.packed:.1e}' if finding.packed else ''} "
        f"| {finding.why.replace('|', '/')} |"
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


def _packed(findings: list[Finding], mode: str) -> int:
    return sum(finding.packing.partition(":")[0] == mode for finding in findings)


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
        packing = f"{finding.packing:30} {finding.packed:.1e}"
        print(f"{architecture:24} {finding.kind:18} {_number(finding):8} {packing} {finding.why}", flush=True)
    if not asked.architectures:
        TABLE.write_text(table(findings), encoding="utf-8")
        print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
