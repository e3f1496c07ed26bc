"""Rings give back what was put in them, whatever it is, and touch no other slot."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.pipeline import buffers
from tests.support.oracle import assert_same_bits


def shape_of(value):
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def ring_of(shapes, *dims, clear=True):
    return buffers.make_rings({"ring": (shapes, dims)}, clear=clear)["ring"]


VALUES = {
    "float": jnp.arange(6.0).reshape(2, 3),
    "bfloat16": jnp.ones((3,), jnp.bfloat16),
    "integer": jnp.arange(4, dtype=jnp.int32),
    "mask": jnp.array([True, False, True]),
    "scalar": jnp.float32(3),
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(7), 3),
    "other keys": jax.random.split(jax.random.key(7, impl="rbg"), 3),
}


def raw(value):
    return np.asarray(buffers.unwrap_key(value))


@pytest.mark.parametrize("name", VALUES)
def test_a_ring_gives_back_what_was_put_and_keeps_the_rest(name):
    value = VALUES[name]
    shapes = [shape_of(value)]
    ring = buffers.put(ring_of(shapes, 3, 2), [value], 1, jnp.int32(0))
    (back,) = buffers.get(ring, shapes, jnp.int32(1), 0)
    assert_same_bits(back, value)
    others = [
        buffers.get(ring, shapes, slot, layer)[0]
        for slot in range(3)
        for layer in range(2)
        if (slot, layer) != (1, 0)
    ]
    assert not any(raw(other).any() for other in others), "idle slots hold zeros"


def test_a_slot_is_written_whole_or_not_at_all():
    shapes = [shape_of(VALUES["float"]), shape_of(VALUES["integer"])]
    with pytest.raises(ValueError, match="shorter"):
        buffers.put(ring_of(shapes, 2), [VALUES["float"]], 1)


def test_take_and_add_at_reach_one_place_and_add_in_the_type_of_the_total():
    total = [jnp.zeros((3, 2), jnp.float32)]
    added = buffers.add_at(
        buffers.add_at(total, [jnp.ones(2, jnp.bfloat16)], 1), [jnp.full(2, 2.0)], jnp.int32(1)
    )
    assert added[0].dtype == jnp.float32
    np.testing.assert_array_equal(added[0], [[0, 0], [3, 3], [0, 0]])
    np.testing.assert_array_equal(buffers.take(added, 1)[0], [3, 3])


def fill(ring):
    return jax.lax.fori_loop(0, 8, lambda i, ring: buffers.put(ring, [ring[0][i] + 1.0], i), ring)


def test_a_ring_is_written_in_place_inside_a_loop():
    shapes = [jax.ShapeDtypeStruct((128,), jnp.float32)]

    compiled = jax.jit(fill, donate_argnums=0).lower(ring_of(shapes, 8)).compile()
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(r"f32\[8,128\]\S* copy\(", line)
    ]
    assert not copies, f"the ring is copied: {copies}"
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 128 * 4


@pytest.mark.parametrize("name", ["bfloat16", "mask", "keys"])
def test_rings_without_initial_values_give_back_what_was_put(name):
    value = VALUES[name]
    shapes = [shape_of(value)] * 2

    @jax.jit
    def both(value):
        rings = buffers.put(ring_of(shapes, 3, 2, clear=False), [value, value], 2, 1)
        return buffers.get(rings, shapes, 2, 1)

    for back in both(value):
        assert_same_bits(back, value)


def test_without_initial_values_nothing_is_written_to_rings_before_a_loop():
    shapes = [jax.ShapeDtypeStruct((128,), jnp.float32)] * 2

    def arrays(clear):
        """The opcodes of the whole rings in a compiled program: two in a loop that writes them."""

        def filled():
            a, b = ring_of(shapes, 8, clear=clear)
            return fill([a]), fill([b])

        return re.findall(
            r"= f32\[8,128\]\S* ([\w-]+)\(", jax.jit(filled).lower().compile().as_text()
        )

    assert "custom-call" not in arrays(True)
    assert "broadcast" in arrays(True)
    assert arrays(False).count("custom-call") == 2, "each ring is an array of its own"
    assert not {"broadcast", "copy"} & set(arrays(False)), arrays(False)
