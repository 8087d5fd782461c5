"""Checks that a node has the packages, model files and adapter tensors of the first one; refusals name both values."""

from collections.abc import Mapping

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError
from mlxdist.protocol.untrusted import quoted


def check_versions(name: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises MismatchError for a package that is not of the coordinator's version."""
    for package, version in mine.items():
        if (other := theirs.get(package, "absent")) != version:
            pins = [f"{each}=={wanted}" for each, wanted in mine.items()]
            raise MismatchError(
                f"{name} has {package} {quoted(other, 40)}, the coordinator {version}: install the same version there, "
                f"with: pip install {' '.join(pins)}, or start it with: uvx {' '.join(f'--with {pin}' for pin in pins)}"
                " --from …, and the rest of its command as before"
            )


def check_model(name: str, first: m.Loaded, theirs: m.Loaded) -> None:
    """Raises MismatchError for other model files or adapter tensors than those of the first node."""
    if theirs.model_hash != first.model_hash:
        raise MismatchError(
            f"{name} has another model: hash {quoted(theirs.model_hash, 12)}, the run's is {first.model_hash[:12]}; "
            "copy the same files to it"
        )
    if theirs.manifest != first.manifest:
        what = "; ".join(list(manifests.differences(first.manifest, theirs.manifest))[:3])
        raise MismatchError(f"{name} has another adapter manifest: {quoted(what, 600)}")
