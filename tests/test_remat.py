"""What is computed again in the backward pass, by name."""

from types import SimpleNamespace

import jax
import pytest

from jaxpar.backward.remat import REMAT, keep_products
from jaxpar.models import transformer
from tests.support.tiny_transformer import FAMILIES, make_batch, make_params


def count_products(remat):
    """Products with weights, and those of attention, in the gradient of a layer."""
    config = FAMILIES["llama"]
    layer = transformer.make_model(config).layer
    params = jax.tree.map(lambda leaf: leaf[0], make_params(config)["layers"])
    h = jax.numpy.zeros((*make_batch()["tokens"].shape, config.embed_dim))
    if remat is not False:
        layer = jax.checkpoint(layer, policy=None if remat is True else remat)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda params: layer(params, h).sum()))(params))
    return jaxpr.count("dot_general")


def test_dots_computes_attention_again_but_no_product_with_weights_and_full_all():
    none, dots, full = (count_products(REMAT[name]) for name in ("none", "dots", "full"))
    assert dots == none + 2, "scores, and their mean of the values"
    assert full == none + 5, "and w_qkv, w_out and w_up; what w_down gives is not needed again"


@pytest.mark.parametrize("name", ["dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"])
def test_what_a_fused_kernel_gives_is_kept(name):
    assert keep_products(SimpleNamespace(name=name))
    assert not keep_products(SimpleNamespace(name="exp"))
