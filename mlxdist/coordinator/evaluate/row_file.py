"""The file of --rows: one JSON line for each row under each adapter, and for each row that was left out."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.encode.row_errors import RowFault
from mlxdist.coordinator.evaluate.judge import Judged
from mlxdist.coordinator.methods.method import Scored
from mlxdist.coordinator.storage.run_folder import finite, json_bytes, write_aside
from mlxdist.protocol.methods import LABELS, LOSS, MethodSpec


def write_rows(path: Path, judged: Sequence[Judged], rows: Rows, spec: MethodSpec, faults: Sequence[RowFault]) -> None:
    """Writes the rows in file order, one adapter after another, those that were left out last. Raises SaveError."""

    def lines(stream: BinaryIO) -> None:
        for each in judged:
            for record in records(each.scored, rows, spec):
                stream.write(_line({"model": each.name, **record}))
        for fault in faults:
            stream.write(_line({"where": fault.where, "left_out": fault.reason}))

    write_aside(path, lines)


def records(scored: Scored, rows: Rows, spec: MethodSpec) -> Iterator[dict[str, object]]:
    """Yields, in file order, the facts of each scored row.

    `tokens`: targets. `logp`: the sum of their log-probs in nats, as the loss sees it. `loss`: in nats, of sft for each
    token. Of a pair there are `tokens`, `logp` and `ref_logp` for chosen and for rejected.
    """
    beta, columns, targets = scored.scalars.get("beta", 0.0), scored.columns, scored.targets
    for place in sorted(range(len(scored.order)), key=lambda at: scored.order[at]):
        row = scored.order[place]
        record: dict[str, object] = {"row": row, "where": rows.where(row)}
        rewards = []
        for branch, policy in enumerate(spec.policy):
            side = policy.removeprefix("policy")
            tokens, logp = int(targets[place, branch]), float(columns[policy][place])
            record |= {f"tokens{side}": tokens, f"logp{side}": logp}
            if spec.reference:
                reference = float(columns[spec.reference[branch]][place])
                rewards.append(beta * (logp - reference))
                record |= {f"ref_logp{side}": reference, f"reward{side}": rewards[-1]}
        if len(rewards) == 2:
            record["margin"] = rewards[0] - rewards[1]
        if spec.labels:
            record["label"] = bool(columns[LABELS][place])
        loss = float(columns[LOSS][place])
        record["loss"] = loss / int(targets[place].sum()) if spec.weight == "token" else loss
        yield record


def _line(record: dict[str, object]) -> bytes:
    return json_bytes(json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n")
