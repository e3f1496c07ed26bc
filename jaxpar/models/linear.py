"""Linear regression: one weight per feature and a bias. The simplest model, and a good first example."""

from jaxtyping import Array, Float, PyTree

from jaxpar.params import ParamSpec, zeros


def param_table(num_features: int) -> PyTree:
    """Returns the table ``{"weights": [features], "bias": []}``."""
    return {
        "weights": ParamSpec((num_features,), ("features",), zeros),
        "bias": ParamSpec((), (), zeros),
    }


def apply(params: PyTree, batch: PyTree) -> Float[Array, " batch"]:
    """Returns ``features . weights + bias`` for ``batch["features"]`` [batch, features]."""
    return batch["features"] @ params["weights"] + params["bias"]
