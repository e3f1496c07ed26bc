"""A check of the files that a LoRA run writes: its adapters and the merged weights hold the same model."""

import numpy as np

from tests.support.oracle import assert_same, assert_same_bits


def check_merged(merged, base, adapters, *, scale):
    """Fails unless merged weights are base + ``scale`` * B A where there are adapters, and elsewhere those of the base."""
    assert set(merged) == set(base)
    left = dict(adapters)
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in left:
            a, b = (left.pop(f"{module}.lora_{x}.weight") for x in "AB")
            assert np.any(b), "B was trained"
            assert_same(merged[name], weight + scale * (b @ a), within=1e-5)
        else:
            assert_same_bits(merged[name], weight)
    assert not left, "every adapter is of a weight"
