"""A check of the files that a LoRA run writes: its adapters and the merged weights hold the same model."""

import jax
import numpy as np

from jaxpar.models import transformer
from jaxpar.models.lora import Lora
from tests.support import tiny_transformer as tiny
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


RANK = 2
LORA = Lora(RANK, transformer.LAYER_WEIGHTS, alpha=3.0)


def make_params(config, how=LORA, *, seed=0):
    """Params with factors on the host, of which B is not zero."""
    params = how.init(jax.random.key(seed), tiny.make_params(config, seed=seed))
    rng = np.random.default_rng(seed)
    draw = lambda path, leaf: (
        0.3 * rng.normal(size=leaf.shape) if path[-1].key == "lora_b" else np.asarray(leaf)
    )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.asarray(draw(path, leaf), leaf.dtype), params
    )
