"""Products of rows with one of several weights each: what runs where, and that all forms of it give the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxpar.models import grouped_product
from jaxpar.models.grouped_product import TILE, form_of
from tests.support.oracle import assert_same

WIDTHS = 48, 32
GROUPS = (TILE, 0, 2 * TILE)  # of five tiles of rows: the last two belong to none
EACH = lambda kernel, *args: kernel(*args)


def arrays(widths, dtype):
    rng = np.random.default_rng(0)
    shapes = (1, 5 * TILE, widths[0]), (1, len(GROUPS), *widths), (1, 5 * TILE, widths[1])
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes], jnp.array(
        [GROUPS], jnp.int32
    )


def with_grads(product):
    @jax.jit
    def run(rows, weights, ct):
        out, backward = jax.vjp(product, rows, weights)
        return out, *backward(ct)

    return run


def expected(given, sizes):
    ragged = lambda rows, weights: jax.lax.ragged_dot(rows[0], weights[0], sizes[0])[None]
    return with_grads(ragged)(*given)


@pytest.mark.parametrize("form", ["plain", "triton"])
def test_each_row_is_multiplied_by_the_weight_of_its_group(form, monkeypatch):
    monkeypatch.setattr(grouped_product, "form_of", lambda *_: form)
    given, sizes = arrays(WIDTHS, jnp.float32)
    product = partial(grouped_product.grouped_product, EACH)
    got = with_grads(lambda *args: product(*args, sizes))(*given)
    assert_same(got, expected(given, sizes), within=1e-5)
    assert not np.any(got[0][:, sum(GROUPS) :]), "rows of no group are zeros"


def test_sums_of_16_bit_floats_are_in_float32():
    given, sizes = arrays((256, 128), jnp.bfloat16)
    got = with_grads(lambda *args: grouped_product.grouped_product(EACH, *args, sizes))(*given)
    wide = expected([each.astype(jnp.float32) for each in given], sizes)
    assert {each.dtype for each in got} == {jnp.dtype(jnp.bfloat16)}
    assert_same([each.astype(jnp.float32) for each in got], list(wide), within=4e-3)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="no interpreter, or none that transposes tiles"
)
@pytest.mark.parametrize("widths", [(128, 256), (384, 128)], ids=["wide tiles", "narrow tiles"])
def test_the_kernels_for_hopper_have_the_same_numbers_and_no_races(widths):
    from jax.experimental.pallas import mosaic_gpu

    from jaxpar.models import grouped_mosaic

    how = {"blocks": 2, "interpret": mosaic_gpu.InterpretGPUParams(detect_races=True)}
    (rows, weights, ct), sizes = arrays(widths, jnp.bfloat16)
    owner = jnp.array([0, 2, 2, 3, 3], jnp.int32)
    got = [
        grouped_mosaic.multiply(rows[0], weights[0], owner, transposed=False, **how),
        grouped_mosaic.multiply(ct[0], weights[0], owner, transposed=True, **how),
        grouped_mosaic.contract(rows[0], ct[0], sizes[0], **how),
    ]
    wide = expected([each.astype(jnp.float32) for each in (rows, weights, ct)], sizes)
    assert_same([each.astype(jnp.float32) for each in got], [each[0] for each in wide], within=4e-3)


def traced_for(kind, cores=132):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=device))


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("kind", "dtype", "widths", "form"),
    [
        (H100, "bfloat16", (4096, 14336), "mosaic"),
        ("NVIDIA GH200 480GB", "float16", (2048, 1408), "mosaic"),
        (H100, "float32", (4096, 14336), "triton"),
        (H100, "bfloat16", (2048, 96), "triton"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", (4096, 14336), "triton"),
        ("NVIDIA B200", "bfloat16", (4096, 14336), "triton"),
    ],
)
def test_the_gpu_the_dtype_and_the_widths_say_which_kernel_it_is(kind, dtype, widths, form):
    with traced_for(kind):
        assert form_of(dtype, *widths) == form
    assert form_of(dtype, *widths) == "plain"


def test_a_program_for_an_h100_calls_the_kernels_for_hopper():
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    given = (
        shape(1, 4 * TILE, 256),
        shape(1, 3, 256, 128),
        shape(1, 4 * TILE, 128),
        shape(1, 3, dtype=jnp.int32),
    )

    def run(rows, weights, ct, sizes):
        with traced_for(H100):
            return with_grads(lambda *args: grouped_product.grouped_product(EACH, *args, sizes))(
                rows, weights, ct
            )

    text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3
    assert "dot_general" not in text
