"""The commands about keys: `mlxdist key` at a node, `mlxdist nodes` at the Mac that launches."""

import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

import typer

from mlxdist.keys.pair import public_key
from mlxdist.keys.store import KeyStore, Known, Sighting
from mlxdist.protocol.errors import UserError
from mlxdist.protocol.untrusted import quoted

known_nodes = typer.Typer(invoke_without_command=True, help="The Macs that may take part in runs of this one.")


def this_mac() -> str:
    """Returns the name of this Mac as a node, unless another is given."""
    return socket.gethostname().removesuffix(".local")


def key() -> None:
    """Print the public key of this Mac, and what to do with it. The key is made when there is none."""
    public = KeyStore.of_user().own_pair().public
    print(f"{public}\n\nOn the Mac that launches, type:\n  mlxdist nodes admit {this_mac()} {public}")


@known_nodes.callback()
def nodes(context: typer.Context) -> None:
    """List the Macs that may take part in runs that this Mac launches, and the public key of this Mac.

    Macs with the same bits have given the same ones for the same model.
    """
    if context.invoked_subcommand is not None:
        return
    store = KeyStore.of_user()
    found, faults = store.known_nodes()
    for line in node_lines({name: (known, store.sighting(name)) for name, known in found.items()}):
        print(line)
    print(f"{len(found)} known; the key of this Mac as a coordinator is {store.coordinator_pair().public}")
    for fault in faults:
        print(f"mlxdist: {fault}", file=sys.stderr)


def node_lines(nodes: Mapping[str, tuple[Known, Sighting | None]]) -> list[str]:
    """Returns the table of nodes, titles first; nothing where there are none. Times are UTC, keys begin as shown."""
    rows = [("node", "since", "last seen", "chip", "bits", "tokens/s", "key")]
    for name, (known, seen) in nodes.items():
        seen = seen or Sighting("never")
        speed = f"{seen.tokens_per_second:,.0f}" if seen.tokens_per_second else ""
        last = seen.last[:16].replace("T", " ")
        rows.append(
            (
                name,
                known.since[:10],
                last,
                quoted(seen.chip, 40),
                quoted(seen.bits, 8),
                speed,
                known.public[:8],
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines if nodes else []


@known_nodes.command()
def admit(
    name: Annotated[str, typer.Argument(help="The name of that Mac in reports.")],
    key: Annotated[str, typer.Argument(help="Its public key, as `mlxdist key` prints it there.")],
) -> None:
    """Let a Mac take part in the runs that this Mac launches, now and later."""
    store = KeyStore.of_user()
    store.admit(name, public_key(key), now=datetime.now(UTC))
    print(
        f"{name} may take part. On {name}, type, with the HOST:PORT that `mlxdist launch` prints:\n"
        f"  mlxdist node --name {name} --connect HOST:PORT --coordinator {store.coordinator_pair().public}"
    )


@known_nodes.command()
def forget(name: Annotated[str, typer.Argument(help="The name of that Mac, as `mlxdist nodes` lists it.")]) -> None:
    """Take a Mac off the list, in a running run as well: nothing that it sends is heard any more."""
    if not KeyStore.of_user().forget(name):
        raise UserError(f"no node named {name} is known: `mlxdist nodes` lists them")
    print(f"{name} is forgotten")
