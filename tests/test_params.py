"""Tables of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxpar.params import (
    ParamSpec,
    abstract_params,
    count_params,
    init_params,
    lecun_normal,
    ones,
    specs_from_dims,
    stack_layers,
)
from tests.support.oracle import assert_same_bits

LAYER = {"w": ParamSpec((4, 6), ("embed", "mlp"), lecun_normal), "b": ParamSpec((6,), ("mlp",))}
TABLE = {"outer": {"scale": ParamSpec((4,), ("embed",), ones)}, "layers": stack_layers(LAYER, 3)}
KEY = jax.random.key(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_first_values_have_the_shapes_and_dtype_that_the_table_describes(dtype):
    abstract = abstract_params(TABLE, dtype)
    assert abstract["layers"]["w"].shape == (3, 4, 6)
    assert jax.eval_shape(lambda key: init_params(TABLE, key, dtype), KEY) == abstract


def test_a_parameter_is_drawn_from_its_path_alone():
    whole = init_params(TABLE, KEY)
    fewer = init_params({"layers": {"w": TABLE["layers"]["w"]}}, KEY)
    assert_same_bits({"layers": {"w": whole["layers"]["w"]}}, fewer)


def test_each_layer_of_a_stack_is_drawn_on_its_own():
    w = init_params(TABLE, KEY)["layers"]["w"]
    assert len(np.unique(np.asarray(w[:, 0, 0]))) == 3, "layers should start from different values"


def test_another_key_gives_other_values():
    w, other = (init_params(LAYER, jax.random.key(seed))["w"] for seed in (0, 1))
    assert not np.array_equal(w, other)


def test_a_stacked_weight_is_scaled_by_the_fan_in_of_one_layer():
    wide = stack_layers({"w": ParamSpec((256, 64), ("embed", "mlp"), lecun_normal)}, 4)
    np.testing.assert_allclose(init_params(wide, KEY)["w"].std(), 256**-0.5, rtol=0.05)


def test_counts_are_those_of_the_arrays():
    assert count_params(TABLE) == count_params(abstract_params(TABLE)) == 4 + 3 * (24 + 6)


def test_rules_map_the_dims_of_one_layer_to_axes():
    specs = specs_from_dims(TABLE, {"embed": None, "mlp": "tensor"})
    assert specs["layers"] == {"w": PartitionSpec(None, "tensor"), "b": PartitionSpec("tensor")}
    assert specs["outer"]["scale"] == PartitionSpec(None)


def test_rules_may_name_dims_of_other_models():
    assert specs_from_dims(TABLE, {"embed": None, "mlp": "tensor", "heads": "tensor"})


def test_a_dim_without_a_rule_is_refused():
    message = r"rules must name each dim.*no rule for \['mlp'\] in \['embed', 'heads'\]. Map a dim that is not split to None"
    with pytest.raises(ValueError, match=message):
        specs_from_dims(TABLE, {"embed": None, "heads": "tensor"})


def test_a_spec_that_does_not_name_each_dim_is_refused():
    with pytest.raises(
        ValueError, match=r"must name each dim; got shape \(4, 6\) and dims \('embed',\)"
    ):
        ParamSpec((4, 6), ("embed",))


def test_a_stack_of_no_layers_is_refused():
    with pytest.raises(ValueError, match="num_layers must be positive; got 0"):
        stack_layers(LAYER, 0)
