"""A multilayer perceptron for classification, as a LayeredModel whose layer is a pair of hidden layers.

    features [b, i] --w_in--> [b, d] --(w_up, relu)--> [b, f] --(w_down, relu)--> [b, d] ... --w_out--> logits [b, classes]
                                      one layer of the model: two hidden layers

Hidden layers come in pairs, so that the first can be split by column and the second by row. The dims ``mlp`` and ``embed``
both have size ``width``: eight hidden layers are four equal pairs.
"""

import jax
from jaxtyping import Array, Float, PyTree

from jaxpar.data.batches import round_up
from jaxpar.fields import arg
from jaxpar.layered_model import LayeredModel
from jaxpar.params import ParamSpec, he_normal, lecun_normal, stack_layers, zeros


def param_table(num_features: int, num_classes: int, *, width: int, num_hidden: int) -> PyTree:
    """Returns the table of an MLP with ``num_hidden`` hidden layers (an even number) of ``width`` units."""
    _check_pairs(arg("num_hidden"), num_hidden)
    layer = {
        "w_up": ParamSpec((width, width), ("embed", "mlp"), he_normal),
        "b_up": ParamSpec((width,), ("mlp",), zeros),
        "w_down": ParamSpec((width, width), ("mlp", "embed"), he_normal),
        "b_down": ParamSpec((width,), ("embed",), zeros),
    }
    outer = {
        "w_in": ParamSpec((num_features, width), ("features", "embed"), lecun_normal),
        "w_out": ParamSpec((width, num_classes), ("embed", "classes"), lecun_normal),
        "b_out": ParamSpec((num_classes,), ("classes",), zeros),
    }
    return {"outer": outer, "layers": stack_layers(layer, num_hidden // 2)}


def embed(outer: PyTree, batch: PyTree) -> Float[Array, "batch embed"]:
    """Returns ``batch["features"]`` [batch, features] projected to ``embed``."""
    return batch["features"] @ outer["w_in"]


def layer(params: PyTree, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    """Returns the output of a pair of hidden layers."""
    hidden = jax.nn.relu(x @ params["w_up"] + params["b_up"][None])
    return jax.nn.relu(hidden @ params["w_down"] + params["b_down"][None])


def head(outer: PyTree, x: Float[Array, "batch embed"]) -> Float[Array, "batch classes"]:
    """Returns a logit for each class."""
    return x @ outer["w_out"] + outer["b_out"][None]


MODEL = LayeredModel(embed, layer, head)


def check_sizes(num_hidden: int, width: int, *, stage: int, tensor: int) -> None:
    """Raises ValueError where the sizes, the flags --hidden-layers and --width, make no model or do not fit a mesh.

    Args:
        num_hidden: Hidden layers.
        width: Units of a hidden layer.
        stage: Stages of a pipeline, which share out the pairs of layers.
        tensor: Shards of each weight.
    """
    _check_pairs("--hidden-layers", num_hidden)
    pairs = num_hidden // 2
    if pairs % stage:
        raise ValueError(
            f"the pairs of hidden layers must be divisible by the stage axis; got --hidden-layers {num_hidden}, "
            f"which are {pairs} pairs, --mesh.stage {stage}. Choose --hidden-layers {2 * round_up(pairs, stage)}."
        )
    if width < 1:
        raise ValueError(f"--width must be at least 1; got {width}. Choose such as 64.")
    if width % tensor:
        raise ValueError(
            f"--width must be divisible by the tensor axis; got --width {width}, --mesh.tensor {tensor}. "
            f"Choose --width {round_up(width, tensor)}."
        )


def _check_pairs(name: str, num_hidden: int) -> None:
    if num_hidden < 2 or num_hidden % 2:
        raise ValueError(
            f"{name} must be even, since hidden layers come in pairs; got {num_hidden}. Choose 2, 4, 6 or 8."
        )
