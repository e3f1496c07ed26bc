"""The old names of the fields of Experts and Rope, which work for a release, and say what to write."""

import dataclasses
import re

import pytest

from jaxpar.models import transformer
from jaxpar.models.transformer import Experts, Rope, RopeScaling, TransformerConfig, old_names

SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "biases": False}
SCALING = RopeScaling(kind="linear", factor=2.0)
OLD = {
    "experts": ({"num_experts": 8}, {"experts": Experts(count=8)}),
    "settings of experts": (
        {"num_experts": 4, "expert_dim": 32, "router_score": "sigmoid", "expert_buffer": 2.0},
        {"experts": Experts(count=4, mlp_dim=32, router_score="sigmoid", buffer=2.0)},
    ),
    "no experts": ({"num_experts": None, "experts_per_token": 2}, {}),
    "rope": (
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope": Rope(theta=5e5, scaling=SCALING)},
    ),
    "both": (
        {"num_experts": 8, "rope_theta": 5e5},
        {"experts": Experts(count=8), "rope": Rope(theta=5e5)},
    ),
}


def warned(function):
    """What a function returns, and the message of its one warning, which names a line of this file."""
    with pytest.warns(DeprecationWarning, match="has its experts as Experts") as found:
        result = function()
    (warning,) = found
    assert warning.filename == __file__
    return result, str(warning.message)


def test_each_field_has_an_old_name():
    assert set(old_names.EXPERTS.values()) == {each.name for each in dataclasses.fields(Experts)}
    assert set(old_names.ROPE.values()) == {each.name for each in dataclasses.fields(Rope)}


@pytest.mark.parametrize("name", OLD)
def test_old_keywords_make_the_same_config_and_their_warning_can_be_followed(name):
    old, new = OLD[name]
    config, message = warned(lambda: TransformerConfig(**SIZES, **old))
    assert config == TransformerConfig(**SIZES, **new)
    assert all(f"{each}={value!r}" in message for each, value in old.items())
    remedy = re.search(r"Write (.*)\. The next release drops the old names\.$", message)[1]
    written = eval(f"dict({remedy})", vars(transformer))
    assert TransformerConfig(**SIZES, **written) == config


def test_old_keywords_change_a_config():
    config = TransformerConfig(**SIZES, experts=Experts(count=8, mlp_dim=4), rope=Rope(theta=5e5))
    changed, _ = warned(
        lambda: dataclasses.replace(config, expert_buffer=2.0, rope_scaling=SCALING)
    )
    assert changed.experts == Experts(count=8, mlp_dim=4, buffer=2.0)
    assert changed.rope == Rope(theta=5e5, scaling=SCALING)
    without, _ = warned(lambda: dataclasses.replace(config, num_experts=None))
    assert without.experts is None
    preset, message = warned(lambda: transformer.preset("moe-bytes", router_bias=True))
    assert preset == transformer.preset("moe-bytes").with_experts(router_bias=True)
    assert "Write experts=Experts(count=8, router_bias=True, balance_coefficient=0.01)." in message


def test_old_attributes_are_read():
    config = TransformerConfig(**SIZES, experts=Experts(count=8, mlp_dim=4), rope=Rope(theta=5e5))
    for old, (group, new) in old_names.MOVED.items():
        value, message = warned(lambda old=old: getattr(config, old))
        assert value == getattr(getattr(config, group), new)
        assert f"got a read of {old}. Read {group}.{new}." in message


def test_without_experts_old_attributes_have_the_defaults_that_they_had():
    config = TransformerConfig(**SIZES)
    read = lambda name: warned(lambda: getattr(config, name))[0]
    assert (read("num_experts"), read("experts_per_token"), read("expert_split")) == (
        None,
        2,
        "experts",
    )


def test_an_old_keyword_of_experts_needs_some():
    message = "expert_dim=4 and no experts. Give experts=Experts(count=8, mlp_dim=4), say, or leave it out."
    with pytest.raises(ValueError, match=re.escape(message)):
        TransformerConfig(**SIZES, expert_dim=4)


def test_what_never_was_there_is_not_there():
    config = TransformerConfig(**SIZES)
    with pytest.raises(
        AttributeError, match="'TransformerConfig' object has no attribute 'num_expert'"
    ):
        _ = config.num_expert
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_expert'"):
        TransformerConfig(**SIZES, num_expert=8)
