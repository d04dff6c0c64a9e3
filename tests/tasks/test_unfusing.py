"""Recovery of a checkpoint's tensors from fused ones."""

from __future__ import annotations

import numpy as np

from staleflow.tasks.engines.unfusing import unfused

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
SHAPES = {
    "a.q_proj.weight": (4, 3),
    "a.k_proj.weight": (2, 3),
    "a.v_proj.weight": (2, 3),
    "embed.weight": (5, 3),
    "norm": (3,),
}


def test_parts_are_cut_out_in_their_order_and_padding_is_cut_off() -> None:
    whole = np.arange(24).reshape(8, 3)
    embed, norm = np.arange(24).reshape(8, 3), np.ones(3)
    held = {"a.qkv_proj.weight": whole, "embed.weight": embed, "norm": norm, "more": norm}
    found = unfused(held, SHAPES, PACKED)
    assert found is not None
    assert set(found) == set(SHAPES)
    np.testing.assert_array_equal(found["a.q_proj.weight"], whole[:4])
    np.testing.assert_array_equal(found["a.k_proj.weight"], whole[4:6])
    np.testing.assert_array_equal(found["a.v_proj.weight"], whole[6:])
    np.testing.assert_array_equal(found["embed.weight"], embed[:5])


def test_what_cannot_be_undone_is_not_guessed() -> None:
    whole, embed, norm = np.zeros((8, 3)), np.zeros((5, 3)), np.ones(3)
    complete = {"a.qkv_proj.weight": whole, "embed.weight": embed, "norm": norm}
    for wrong in (
        {"a.qkv_proj.weight": whole[:4]},  # a shard
        {"a.qkv_proj.weight": whole.reshape(24)},  # of another rank
        {"embed.weight": embed[:, :2]},
    ):
        assert unfused({**complete, **wrong}, SHAPES, PACKED) is None
    assert unfused({"embed.weight": embed, "norm": norm}, SHAPES, PACKED) is None
    assert unfused(complete, {k: v for k, v in SHAPES.items() if k != "a.q_proj.weight"}, PACKED) is None
