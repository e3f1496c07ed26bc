"""The comparison that all tests share notices each kind of difference, and names the leaf."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.oracle import assert_same, assert_same_bits, cast, distance


def make_tree():
    """Loss and gradients as a step returns them: a scalar, matrices of one shape, zeros, integers, a key, one number."""
    rng = np.random.default_rng(0)
    layers = {
        "w_in": rng.normal(size=(3, 4)),
        "w_out": rng.normal(size=(3, 4)),
        "unread": np.zeros(4),
    }
    outer = (
        rng.normal(size=(1, 5)),
        {"count": np.arange(3), "key": jax.random.key(0), "step": 7, "nothing": None},
    )
    return np.float64(2.5), {"layers": layers, "outer": outer}


def with_layers(**changes):
    value, grads = make_tree()
    return value, grads | {"layers": grads["layers"] | changes}


def with_outer(weights=None, **changes):
    value, grads = make_tree()
    old, rest = grads["outer"]
    return value, grads | {"outer": (old if weights is None else weights, rest | changes)}


def changed(leaf, value):
    """The leaf of layers with another number in its middle."""
    array = make_tree()[1]["layers"][leaf]
    array.flat[array.size // 2] = value
    return with_layers(**{leaf: array})


LAYERS, OUTER = make_tree()[1]["layers"], make_tree()[1]["outer"]
WITHOUT_A_LEAF = (
    make_tree()[0],
    make_tree()[1] | {"layers": {n: LAYERS[n] for n in ("w_in", "w_out")}},
)
SWAPPED = with_layers(w_in=LAYERS["w_out"], w_out=LAYERS["w_in"])
NAN, SQUARE_VANISHES = changed("w_in", np.nan), changed("unread", 1e-200)

# What got is, and what the failure says.
MUTANTS = {
    "a missing leaf": (
        WITHOUT_A_LEAF,
        r"same tree structure\n  \[1\]\['layers'\]\['unread'\]: missing in got",
    ),
    "a leaf too many": (with_layers(w_more=np.ones(3)), r"\['layers'\]\['w_more'\]: in got alone"),
    "a tuple for a list": (
        list(make_tree()),
        r"same tree structure\n  got PyTreeDef\(\[\*.*\n  want PyTreeDef\(\(\*",
    ),
    "None for zeros": (
        with_layers(unread=None),
        r"same tree structure\n  .*\['unread'\]: missing in got",
    ),
    "a broadcast shape": (
        with_outer(OUTER[0][0]),
        r"same shapes\n  \[1\]\['outer'\]\[0\]: got \(5,\), want \(1, 5\)",
    ),
    "a vector for a scalar": (
        (np.full(1, 2.5), make_tree()[1]),
        r"same shapes\n  \[0\]: got \(1,\), want \(\)",
    ),
    "a transposed leaf": (
        with_layers(w_in=LAYERS["w_in"].T),
        r"\['w_in'\]: got \(4, 3\), want \(3, 4\)",
    ),
    "float32 for float64": (
        with_layers(unread=np.zeros(4, np.float32)),
        r"same dtypes\n  \[1\]\['layers'\]\['unread'\]: got float32, want float64",
    ),
    "integers for floats": (
        with_layers(unread=np.zeros(4, int)),
        r"\['unread'\]: got int64, want float64",
    ),
    "a key's data for the key": (
        with_outer(key=np.asarray(jax.random.key_data(OUTER[1]["key"]))),
        r"same shapes\n  .*\['key'\]: got \(2,\), want \(\)",
    ),
    "another kind of key": (
        with_outer(key=jax.random.key(0, impl="rbg")),
        r"got key<rbg>, want key<fry>",
    ),
    "a NaN": (NAN, r"finite\n  \[1\]\['layers'\]\['w_in'\]: 1 of 12 numbers of got are not$"),
    "an infinity": (
        changed("w_out", np.inf),
        r"finite\n  .*\['w_out'\]: 1 of 12 numbers of got are not",
    ),
    "NaN for zeros": (
        with_layers(unread=np.full(4, np.nan)),
        r"\['unread'\]: 4 of 4 numbers of got are not",
    ),
    "a NaN loss": (
        (np.float64("nan"), make_tree()[1]),
        r"finite\n  \[0\]: 1 of 1 numbers of got are not",
    ),
    "zeros for a leaf": (
        with_layers(w_in=np.zeros((3, 4))),
        r"same within 1e-12\n  \[1\]\['layers'\]\['w_in'\]: relative L2 distance 1, most at \(\d, \d\): got 0.0, want",
    ),
    "a number in a leaf of zeros": (
        changed("unread", 1e-9),
        r"\['unread'\]: relative L2 distance inf",
    ),
    "a number whose square vanishes": (SQUARE_VANISHES, r"at \(2,\): got 1e-200, want 0.0"),
    "a number whose square overflows": (
        changed("w_in", 1e300),
        r"at \(1, 2\): got 1e\+300, want 1\.3",
    ),
    "two leaves swapped": (SWAPPED, r"\['w_in'\]: relative L2 .*\n  .*\['w_out'\]: relative L2"),
    "an integer off by one": (
        with_outer(count=np.arange(3) + np.eye(3, dtype=int)[1]),
        r"\['count'\]: relative L2 distance inf, most at \(1,\): got 2, want 1",
    ),
    "a number off by one": (
        with_outer(step=8),
        r"\['step'\]: relative L2 distance inf, most at \(\): got 8, want 7",
    ),
    "another key": (with_outer(key=jax.random.key(1)), r"\['key'\]: relative L2 distance inf"),
    "a gradient of the other sign": (
        with_layers(w_in=-LAYERS["w_in"]),
        r"\['w_in'\]: relative L2 distance 2",
    ),
    "a loss off by a little": (
        (np.float64(2.5 + 1e-11), make_tree()[1]),
        r"\[0\]: relative L2 distance 4e-12",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_difference_is_noticed_and_its_leaf_is_named(mutant):
    got, told = MUTANTS[mutant]
    with pytest.raises(AssertionError, match=told):
        assert_same(got, make_tree())
    with pytest.raises(
        AssertionError, match=told.split(r"\n")[0] if "structure" in told else "got and want must"
    ):
        assert_same_bits(got, make_tree())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_difference_is_noticed_from_the_other_side(mutant):
    with pytest.raises(AssertionError, match="got and want must"):
        assert_same(make_tree(), MUTANTS[mutant][0])


@pytest.mark.parametrize("compare", [assert_same, assert_same_bits, distance])
def test_a_nan_on_both_sides_is_no_equality(compare):
    told = r"finite\n  \[1\]\['layers'\]\['w_in'\]: 1 of 12 numbers of got are not, 1 of 12 numbers of want are not$"
    with pytest.raises(AssertionError, match=told):
        compare(NAN, NAN)


@pytest.mark.parametrize("compare", [assert_same, assert_same_bits, distance])
def test_trees_without_leaves_are_refused_since_they_compare_nothing(compare):
    with pytest.raises(AssertionError, match="must have leaves, or nothing is compared"):
        compare({"outer": {}}, {"outer": {}})


def test_equal_trees_pass():
    assert_same(make_tree(), make_tree(), within=0)
    assert_same_bits(make_tree(), make_tree())
    assert distance(make_tree(), make_tree()) == 0


def test_a_tree_on_devices_equals_the_same_on_the_host(x64):
    assert_same_bits(jax.tree.map(jnp.asarray, make_tree()), make_tree())


def test_a_difference_below_the_bound_passes_and_its_bits_differ():
    near = with_layers(w_in=LAYERS["w_in"] * (1 + 1e-14))
    assert_same(near, make_tree())
    assert 0 < distance(near, make_tree()) < 1e-13
    with pytest.raises(
        AssertionError, match=r"to the last bit\n  \[1\]\['layers'\]\['w_in'\]: most at"
    ):
        assert_same_bits(near, make_tree())


def test_zeros_of_another_sign_have_other_bits():
    assert_same(changed("unread", -0.0), make_tree())
    with pytest.raises(AssertionError, match=r"\['unread'\]: in the signs of zeros"):
        assert_same_bits(changed("unread", -0.0), make_tree())


def test_a_message_comes_first():
    with pytest.raises(AssertionError, match=r"^seed 3: got and want must be finite"):
        assert_same(NAN, make_tree(), message="seed 3")


def test_noise_below_the_floor_passes_and_more_does_not():
    noise = changed("unread", 1e-17)
    assert_same(noise, make_tree(), floor=1e-3)
    with pytest.raises(AssertionError, match=re.escape("['unread']: relative L2 distance 1e-05")):
        assert_same(changed("unread", 1e-8), make_tree(), floor=1e-3)
    assert_same(make_tree(), noise, floor=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.complex64])
def test_leaves_of_other_floats_are_measured_as_floats(dtype):
    want = np.asarray([3, 4], dtype)
    assert distance([want * dtype(2)], [want]) == 1
    with pytest.raises(AssertionError, match="must be finite"):
        assert_same([want * dtype(np.nan)], [want])


def test_floats_are_cast_and_all_else_is_kept():
    key = jax.random.key(0)
    tree = cast((np.float64(1), np.arange(2), 0.5, key), np.float32)
    assert_same_bits(tree, (np.float32(1), np.arange(2), np.float32(0.5), key))


def test_what_is_no_array_is_refused():
    with pytest.raises(
        TypeError, match=r"a leaf must be an array or a number; got object. Compare it by itself"
    ):
        assert_same([object()], [object()])


def test_no_test_compares_trees_in_its_own_way():
    own = re.compile(
        r"tree\.map\(\s*(?:partial\()?(?:lambda [^:]*: )?(?:np|jnp)\.(?:testing|array_equal|allclose)"
    )
    found = [
        path.name
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        if own.search(path.read_text())
    ]
    assert found == [], (
        "NaN, other dtypes and broadcast shapes pass there: use assert_same or assert_same_bits"
    )
