"""Attributes that are not there: the error names the one that is meant, and where it is."""

import pytest

import jaxpar
from jaxpar import _near_names, losses


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cross_entropy", "jaxpar.losses.softmax_cross_entropy"),
        ("mse", "jaxpar.losses.squared_error"),
        ("makemesh", "jaxpar.make_mesh"),
        ("Mesh", "jaxpar.make_mesh"),
        ("valueandgrad", "jaxpar.value_and_grad"),
        ("grad", "jaxpar.value_and_grad"),
        ("make_schedule", "jaxpar.schedule.make_schedule"),
        ("all_reduce", "jaxpar.collectives.all_reduce"),
        ("read_params", "jaxpar.huggingface.read_params"),
        ("CheckPointManager", "jaxpar.CheckpointManager"),
    ],
)
def test_a_name_that_is_nearly_right_is_corrected(name, meant):
    with pytest.raises(AttributeError) as refused:
        getattr(jaxpar, name)
    assert str(refused.value) == f"module 'jaxpar' has no attribute {name!r}. Did you mean {meant}?"


@pytest.mark.parametrize("name", ["cross_entropy", "crossentropy", "softmax_crossentropy"])
def test_a_loss_by_another_name_is_corrected(name):
    message = rf"module 'jaxpar.losses' has no attribute '{name}'. Did you mean jaxpar.losses.softmax_cross_entropy\?"
    with pytest.raises(AttributeError, match=message):
        getattr(losses, name)


@pytest.mark.parametrize("name", ["xyz", "__wrapped__", "_make_mesh"])
def test_a_name_that_is_like_no_other_or_private_has_no_suggestion(name):
    with pytest.raises(AttributeError) as refused:
        getattr(jaxpar, name)
    assert str(refused.value) == f"module 'jaxpar' has no attribute {name!r}"


def test_the_names_of_other_libraries_are_of_names_that_are_here():
    assert set(_near_names.OTHER_NAMES) <= {
        *_near_names.public_names(jaxpar),
        *_near_names.public_names(losses),
    }
