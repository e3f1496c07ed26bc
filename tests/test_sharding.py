"""Rules to shardings, and moving arrays to the mesh and back."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.params import ParamSpec, abstract_params, stack_layers
from jaxpar.sharding import path_matches
from tests.support.oracle import assert_same_bits


def shape(*extents):
    return jax.ShapeDtypeStruct(extents, np.float32)


PLAIN = {"dense": {"kernel": shape(4, 8), "bias": shape(8)}, "out": {"kernel": shape(8, 2)}}
LAYERED = {"outer": {"w": shape(4, 8)}, "layers": {"w_up": shape(2, 8, 6), "scale": shape(2, 8)}}
COLUMN, ALL = jaxpar.column_parallel(), {"**": jaxpar.replicated()}


@pytest.fixture(scope="module")
def mesh():
    return jaxpar.make_mesh(data=2, stage=2, tensor=2)


def specs(params, mesh, rules, **options):
    return jax.tree.map(
        lambda s: s.spec, jaxpar.shardings_from_paths(params, mesh, rules, **options)
    )


def test_the_first_rule_that_matches_a_path_decides(mesh):
    got = specs(PLAIN, mesh, {"dense/kernel": COLUMN, "*/kernel": jaxpar.row_parallel(), **ALL})
    assert got["dense"] == {"kernel": COLUMN, "bias": PartitionSpec()}
    assert got["out"]["kernel"] == jaxpar.row_parallel()


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("layers/w_up", "layers/w_up", True),
        ("layers/w_up", "layers/w_*", True),
        ("layers/w_up", "*/w_up", True),
        ("layers/attention/w_up", "*/w_up", False),
        ("layers/attention/w_up", "**/w_up", True),
        ("layers/attention/w_up", "layers/**", True),
        ("w_up", "**/w_up", True),
        ("layers/w_up", "layers", False),
        ("layers/w_up", "w_up", False),
        ("layers/w_up/bias", "layers/w_up", False),
        ("layers/W_up", "layers/w_up", False),
        ("a/b/c/d", "a/**/d", True),
    ],
)
def test_one_star_is_within_a_step_of_the_path_and_two_are_any_number_of_steps(
    path, pattern, matches
):
    assert path_matches(path, pattern) is matches


def test_layers_lie_on_the_stage_axis_and_a_rule_speaks_of_one_layer(mesh):
    got = specs(LAYERED, mesh, {"layers/w_up": COLUMN, **ALL})
    assert got["layers"] == {
        "w_up": PartitionSpec("stage", None, "tensor"),
        "scale": PartitionSpec("stage"),
    }


def test_layers_that_are_one_array_lie_on_the_stage_axis(mesh):
    assert specs({"outer": {}, "layers": shape(4, 2, 6)}, mesh, ALL)["layers"] == PartitionSpec(
        "stage"
    )


@pytest.mark.parametrize(
    ("extents", "rule", "want"),
    [
        ((4, 8), jaxpar.replicated(), PartitionSpec("stage", None)),
        ((8, 4), jaxpar.vocab_parallel(), PartitionSpec("tensor", "stage")),
        ((8, 4), jaxpar.vocab_parallel(vocab_dim=1), PartitionSpec(None, "tensor")),
        ((8,), jaxpar.replicated(), PartitionSpec()),
        ((3, 5), jaxpar.replicated(), PartitionSpec()),
    ],
    ids=["smallest dim", "beside tensor", "taken", "vector", "odd"],
)
def test_a_matrix_under_outer_lies_over_stage_where_its_smallest_dim_is_free(
    mesh, extents, rule, want
):
    params = {"outer": {"w": shape(*extents)}, "layers": {"scale": shape(2, 8)}}
    assert specs(params, mesh, {"outer/w": rule, **ALL})["outer"]["w"] == want


def test_without_a_pipeline_a_matrix_under_outer_stays_as_its_rule_says():
    got = specs(LAYERED, jaxpar.make_mesh(data=2, tensor=2), ALL)
    assert got["outer"]["w"] == PartitionSpec()


def test_a_rule_may_also_spell_out_the_stage_axis(mesh):
    assert specs(
        LAYERED, mesh, {"layers/w_up": PartitionSpec("stage", None, "tensor"), **ALL}
    ) == specs(LAYERED, mesh, {"layers/w_up": COLUMN, **ALL})


def test_a_dim_can_be_split_over_two_axes(mesh):
    got = jaxpar.shardings_from_paths(
        PLAIN, mesh, {"dense/bias": PartitionSpec(("data", "tensor")), **ALL}
    )
    assert got["dense"]["bias"].shard_shape((8,)) == (2,)


def test_without_strict_what_no_rule_matches_is_replicated(mesh):
    got = specs(PLAIN, mesh, {"dense/kernel": COLUMN}, strict=False)
    assert got["out"]["kernel"] == got["dense"]["bias"] == PartitionSpec()


def test_the_sizes_that_an_axis_may_have_are_as_many_as_there_are_devices():
    rule = {"w": PartitionSpec("data")}
    with pytest.raises(ValueError, match=r"data=3. Choose data from 1, 2, 4, 8\.$"):
        jaxpar.shardings_from_paths({"w": shape(8)}, jaxpar.make_mesh(data=3), rule)


@pytest.mark.parametrize(
    ("params", "rules", "message"),
    [
        (
            PLAIN,
            {"dense/*": PartitionSpec()},
            r"every parameter must match a sharding rule; got no match for \['out/kernel'\] in \['dense/\*'\]. Add a rule",
        ),
        (
            PLAIN,
            {"dense/kernl": COLUMN, **ALL},
            r"must apply to a parameter; got 'dense/kernl', which applies to none: no path matches, of \['dense/bias', 'dense",
        ),
        (
            PLAIN,
            {**ALL, "dense/kernel": COLUMN},
            r"got 'dense/kernel', which applies to none: \['dense/kernel'\] are taken by earlier rules. .* move it up",
        ),
        (
            PLAIN,
            {"dense/kernel": PartitionSpec(None, "model"), **ALL},
            r"must name axes of the mesh, \('data', 'stage', 'tensor'\); got 'model' in .* for dense/kernel",
        ),
        (
            PLAIN,
            {"dense/kernel": PartitionSpec("tensor", "tensor"), **ALL},
            r"a spec can use an axis once; got 'tensor' twice in .* for dense/kernel",
        ),
        (
            PLAIN,
            {"dense/bias": COLUMN, **ALL},
            r"at most as many entries as its array has dims; got .*\(None, 'tensor'\) for dense/bias of shape \(8,\)",
        ),
        (
            LAYERED,
            {"layers/scale": COLUMN, **ALL},
            r"must describe one layer, without its leading dim; got .* for layers/scale, which has 1 dims a layer",
        ),
        *(
            (
                LAYERED,
                {path: spec, **ALL},
                rf"a rule that names the stage axis must give it a dim of its own, .*; got .* for {path} of .* Leave stage out",
            )
            for path, spec in (
                ("outer/w", PartitionSpec(("stage", "tensor"))),
                ("layers/w_up", PartitionSpec(None, "stage")),
            )
        ),
        (
            {"w": shape(4, 7)},
            {"w": COLUMN},
            r"dim 1 of w must be divisible by the tensor axis; got 7 of shape \(4, 7\), tensor=2. Choose tensor from 1, 7.",
        ),
        (
            {"w": shape(6)},
            {"w": PartitionSpec(("data", "tensor"))},
            r"dim 0 of w must be divisible by the data times tensor axis; got 6 of shape \(6,\), data times tensor=4",
        ),
        (
            {"outer": {}, "layers": {"w": shape(3, 4)}},
            ALL,
            r"must be divisible by the stage axis; got 3 layers in layers/w of shape \(3, 4\), stage=2. Pack them.* from 1, 3",
        ),
        (
            {"outer": {}, "layers": {"w": shape(4, 8, 8), "b": shape(3, 8)}},
            ALL,
            r"must have the same leading dim num_layers; got \{'b': \(3,\), 'w': \(4,\)\}",
        ),
        (
            {"outer": {}, "layers": [{"w": shape(4, 4)}, {"w": shape(4, 4)}]},
            {"layers/w": COLUMN},
            r"no path matches, of .*\. 2 equal layers are stacked by jax.tree.map\(lambda \*a: jnp.stack\(a\), \*layers\)\.",
        ),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(mesh, params, rules, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.shardings_from_paths(params, mesh, rules)


@pytest.mark.parametrize("is_layer", [False, True])
def test_the_remedy_for_queries_keys_and_values_in_one_weight_works(mesh, is_layer):
    params = (
        {"outer": {}, "layers": {"w": shape(2, 64, 3, 8, 16)}}
        if is_layer
        else {"w": shape(64, 3, 8, 16)}
    )
    rule = "layers/w" if is_layer else "w"
    with pytest.raises(ValueError, match=r"axis; got 3 of shape") as refused:
        jaxpar.shardings_from_paths(params, mesh, {rule: COLUMN})
    told = re.search(
        r"To split dim (\d), of 8, write (jax.sharding.PartitionSpec.*) as the rule",
        str(refused.value),
    )
    assert told
    spec = eval(told[2], {"jax": jax})
    found = jax.tree.leaves(jaxpar.shardings_from_paths(params, mesh, {rule: spec}))[0]
    assert found.spec[int(told[1])] == "tensor"


def test_a_sharded_array_has_only_its_part_on_each_device(mesh):
    w = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    got = jaxpar.shard({"w": w}, {"w": NamedSharding(mesh, COLUMN)})["w"]
    for piece in got.addressable_shards:
        np.testing.assert_array_equal(piece.data, w[piece.index])
        assert piece.data.shape == (4, 4)


def test_one_sharding_serves_a_whole_tree(mesh):
    got = jaxpar.shard(
        {"a": np.ones(4), "b": np.ones((2, 3))}, NamedSharding(mesh, PartitionSpec("data"))
    )
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(got)} == {PartitionSpec("data")}


def test_fetch_gives_back_what_shard_was_given(mesh):
    tree = {"w": np.random.default_rng(0).normal(size=(4, 8)), "step": np.int32(3)}
    tree["w"] = tree["w"].astype(np.float32)
    back = jaxpar.fetch(
        jaxpar.shard(
            tree, {"w": NamedSharding(mesh, COLUMN), "step": NamedSharding(mesh, PartitionSpec())}
        )
    )
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(back))
    assert_same_bits(back, tree)


def test_fetch_gives_prng_keys_as_their_data():
    keys = jax.random.split(jax.random.key(7), 2)
    np.testing.assert_array_equal(jaxpar.fetch(keys), jax.random.key_data(keys))


# By the dims of a table.


SPEC_LAYER = {"w_up": ParamSpec((4, 6), ("embed", "mlp")), "scale": ParamSpec((4,), ("embed",))}
TABLE = {
    "outer": {"tokens": ParamSpec((8, 4), ("vocab", "embed"))},
    "layers": stack_layers(SPEC_LAYER, 4),
}
BY_DIM = {"vocab": "tensor", "mlp": "tensor", "embed": None}


def test_rules_by_dims_give_the_shardings_of_rules_by_paths(mesh):
    by_paths = {
        "layers/w_up": COLUMN,
        "layers/scale": jaxpar.replicated(),
        "outer/tokens": jaxpar.vocab_parallel(),
    }
    want = jaxpar.shardings_from_paths(abstract_params(TABLE), mesh, by_paths)
    got = jaxpar.shardings_from_dims(TABLE, mesh, BY_DIM)
    same = jax.tree.map(
        lambda g, w, s: g.is_equivalent_to(w, s.ndim), got, want, abstract_params(TABLE)
    )
    assert all(jax.tree.leaves(same))


def test_layers_of_a_table_lie_on_the_stage_axis_and_the_embedding_over_it_too(mesh):
    got = jaxpar.shardings_from_dims(TABLE, mesh, BY_DIM)
    assert got["layers"]["w_up"].spec == PartitionSpec("stage", None, "tensor")
    assert got["outer"]["tokens"].spec == PartitionSpec("tensor", "stage")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"vocab": "tensor", "embed": None}, r"no rule for \['mlp'\]"),
        (BY_DIM | {"mlp": "tenser"}, "must name axes of the mesh.*got 'tenser'"),
        (BY_DIM | {"embed": "tensor"}, "can use an axis once; got 'tensor' twice"),
    ],
)
def test_rules_by_dims_that_do_not_fit_are_refused(mesh, rules, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.shardings_from_dims(TABLE, mesh, rules)


def test_two_params_of_one_path_are_refused():
    params = {"a/w": np.ones(2), "a": {"w": np.ones(2)}}
    with pytest.raises(
        ValueError,
        match=r"each array must have a path of its own, .*; got a/w for two, such as .*Rename one",
    ):
        jaxpar.shardings_from_paths(params, jaxpar.make_mesh(), {"**": jaxpar.replicated()})


def test_params_with_a_leaf_that_is_no_array_are_told_its_path():
    params = {"w": np.ones(2), "activation": jax.nn.relu, "rate": 0.5}
    with pytest.raises(TypeError, match=r"must be arrays; got \w+ at activation\. Take the arrays"):
        jaxpar.shardings_from_paths(params, jaxpar.make_mesh(), {"**": jaxpar.replicated()})
