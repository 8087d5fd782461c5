"""The manifest: one order for the flat vector, whatever the order in which a model names its tensors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.protocol import manifest as manifests
from mlxdist.protocol.messages import TensorSpec

SHAPES = {
    "model.layers.10.self_attn.q_proj.lora_a": (8, 2),
    "model.layers.10.self_attn.q_proj.lora_b": (2, 8),
    "model.layers.9.mlp.up_proj.lora_a": (8, 3),
    "model.layers.0.mlp.experts.11.up_proj.lora_a": (4, 2, 8),
    "model.layers.0.mlp.experts.2.up_proj.lora_a": (4, 2, 8),
    "lm_head.lora_a": (8, 2),
}
ORDER = [
    "lm_head.lora_a",
    "model.layers.10.self_attn.q_proj.lora_a",
    "model.layers.10.self_attn.q_proj.lora_b",
    "model.layers.9.mlp.up_proj.lora_a",
    "model.layers.0.mlp.experts.11.up_proj.lora_a",
    "model.layers.0.mlp.experts.2.up_proj.lora_a",
]
MANIFEST = manifests.make(SHAPES)


def numbered() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(manifests.size(MANIFEST), dtype=np.float32)


def test_tensors_stand_in_the_order_of_the_backward_top_layer_first() -> None:
    assert [tensor.name for tensor in MANIFEST] == ORDER
    assert [tensor.shape for tensor in MANIFEST] == [SHAPES[name] for name in ORDER]


@given(st.permutations(sorted(SHAPES)))
def test_the_order_in_which_a_model_names_its_tensors_does_not_matter(names: list[str]) -> None:
    assert manifests.make({name: SHAPES[name] for name in names}) == MANIFEST


def test_the_flat_vector_has_the_elements_of_all_tensors() -> None:
    assert manifests.size(MANIFEST) == 16 + 16 + 24 + 64 + 64 + 16


def test_split_gives_views_in_order_and_join_is_its_inverse() -> None:
    vector = numbered()
    parts = manifests.split(MANIFEST, vector)
    assert list(parts) == ORDER
    assert {name: part.shape for name, part in parts.items()} == SHAPES
    assert np.concatenate([part.ravel() for part in parts.values()]).tobytes() == vector.tobytes()
    joined = manifests.join(MANIFEST, dict(reversed(parts.items())))
    assert joined.tobytes() == vector.tobytes()
    parts[ORDER[0]][0, 0] = 99
    assert vector[0] == 99
    assert joined[0] == 0


def test_tensors_that_are_not_contiguous_are_joined_in_row_order() -> None:
    parts = {name: np.asfortranarray(part) for name, part in manifests.split(MANIFEST, numbered()).items()}
    assert manifests.join(MANIFEST, parts).tobytes() == numbered().tobytes()


def test_a_missing_tensor_or_one_of_another_shape_is_not_joined() -> None:
    parts = manifests.split(MANIFEST, numbered())
    with pytest.raises(KeyError, match=r"lm_head\.lora_a"):
        manifests.join(MANIFEST, {name: part for name, part in parts.items() if name != "lm_head.lora_a"})
    with pytest.raises(ValueError, match=r"lm_head\.lora_a has shape \(2, 8\), the manifest says \(8, 2\)"):
        manifests.join(MANIFEST, {**parts, "lm_head.lora_a": parts["lm_head.lora_a"].T})


@pytest.mark.parametrize("elements", [0, 1, manifests.size(MANIFEST) - 1])
def test_a_vector_that_is_too_short_is_not_split(elements: int) -> None:
    with pytest.raises(ValueError, match="reshape"):
        manifests.split(MANIFEST, np.zeros(elements, np.float32))


def test_the_identity_changes_with_names_shapes_and_order() -> None:
    first, second, *rest = MANIFEST
    others = [
        MANIFEST[1:],
        (second, first, *rest),
        (TensorSpec("other", first.shape), second, *rest),
        (TensorSpec(first.name, first.shape[::-1]), second, *rest),
        (),
    ]
    assert len({manifests.identity(one) for one in [MANIFEST, *others]}) == len(others) + 1
    assert manifests.identity(manifests.make(SHAPES)) == manifests.identity(MANIFEST)


def test_differences_name_each_tensor_with_both_shapes() -> None:
    theirs = manifests.make({**{name: SHAPES[name] for name in ORDER[1:]}, ORDER[3]: (8, 4), "more.lora_a": (1, 1)})
    assert list(manifests.differences(MANIFEST, theirs)) == [
        "lm_head.lora_a: (8, 2) here, absent there",
        "model.layers.9.mlp.up_proj.lora_a: (8, 3) here, (8, 4) there",
        "more.lora_a: absent here, (1, 1) there",
    ]
    assert list(manifests.differences(MANIFEST, MANIFEST)) == []
