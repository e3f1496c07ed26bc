"""What does the backward pass store, and what does it compute again? Bytes and operations, by model and policy.

    python benchmarks/remat.py
    python benchmarks/remat.py --models llama convolutions

One training gradient on one device, compiled and not run: temporary memory and operations of matrix products and convolutions,
by `jax.grad` alone, with `jax.checkpoint` around each layer, with its policy `dots_saveable`, and with `jaxpar.min_cut_remat`.
Ratios are to `jax.grad`. The figures are those of compiled programs and do not depend on the machine. In float32, where XLA for
CPUs does not widen anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import report
import tyro

MIB = 2**20
MODELS = ("gpt2", "llama", "convolutions", "recurrent", "experts")


@dataclass(frozen=True)
class Config(report.Options):
    """What to compile."""

    models: tuple[str, ...] = MODELS
    """gpt2 and llama: 4 layers, 512 wide, 512 tokens; convolutions: 6 residual blocks; recurrent: a GRU over 256 steps;
    experts: 4 layers of 8 experts, of which each token is sent to 2."""


def main(config: Config) -> None:
    record = report.Record.start("remat", config)
    columns = {
        "policy": "",
        "temporary MiB": ".1f",
        "bytes, ratio": ".3f",
        "GFLOP": ".2f",
        "FLOP, ratio": ".3f",
    }
    for name in config.models:
        figures = {
            policy: compiled(name, wrap, smoke=config.smoke) for policy, wrap in policies().items()
        }
        first = figures["jax.grad"]
        rows = [
            dict(
                zip(
                    columns,
                    (policy, size / MIB, size / first[0], flops / 1e9, flops / first[1]),
                    strict=True,
                )
            )
            for policy, (size, flops) in figures.items()
        ]
        record.tables.append(report.Table(f"A gradient of {name}", columns, rows, "one device"))
    record.finish(config.out)


def policies() -> dict[str, Callable[[Callable], Callable]]:
    """How each layer is wrapped."""
    import jax

    import jaxpar

    return {
        "jax.grad": lambda layer: layer,
        "jax.checkpoint": jax.checkpoint,
        "jax.checkpoint, dots_saveable": lambda layer: jax.checkpoint(
            layer, policy=jax.checkpoint_policies.dots_saveable
        ),
        "jaxpar.min_cut_remat": jaxpar.min_cut_remat,
    }


def compiled(name: str, wrap: Callable[[Callable], Callable], *, smoke: bool) -> tuple[int, float]:
    """Returns the temporary bytes and the operations of a gradient whose layers are wrapped."""
    import jax

    import jaxpar

    loss, params, inputs = {
        "gpt2": transformer,
        "llama": transformer,
        "convolutions": convolutions,
        "recurrent": recurrent,
        "experts": experts,
    }[name](name, wrap, smoke)
    found = jaxpar.inspect_step(jax.jit(jax.grad(loss)), params, inputs)
    return found.memory.temp_bytes, found.flops


def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def over_layers(layer: Callable, params: Any, x: Any) -> Any:
    """The output of layers whose params are stacked."""
    import jax

    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def transformer(name: str, wrap: Callable, smoke: bool) -> tuple[Callable, Any, Any]:
    import dataclasses

    import jax
    import jax.numpy as jnp

    import jaxpar
    from jaxpar.models import transformer as models
    from jaxpar.params import abstract_params

    width, length = (32, 16) if smoke else (512, 512)
    shape = models.preset({"gpt2": "gpt2", "llama": "llama-7b"}[name], vocab_multiple=128)
    sizes = {
        "num_layers": 4,
        "embed_dim": width,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_dim": 4 * width,
    }
    sizes |= {"vocab_size": 1024, "max_positions": length}
    shape = dataclasses.replace(shape, **sizes)
    apply = models.make_model(shape).wrap_layers(wrap).apply
    tokens = jax.ShapeDtypeStruct((4, length), jnp.int32)

    def loss(params: Any, tokens: Any) -> Any:
        total, weight = jaxpar.losses.softmax_cross_entropy(
            apply(params, {"tokens": tokens}), tokens
        )
        return total / weight

    return loss, abstract_params(models.param_table(shape)), tokens


def convolutions(name: str, wrap: Callable, smoke: bool) -> tuple[Callable, Any, Any]:
    """Residual blocks of two 3 x 3 convolutions, each after a norm over channels and a GELU."""
    import jax
    import jax.numpy as jnp

    size, channels = (8, 8) if smoke else (64, 64)

    def normed(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return jax.nn.gelu(centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5))

    def block(params: Any, x: Any) -> Any:
        convolve = lambda x, kernel: jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return x + convolve(normed(convolve(normed(x), params["first"])), params["second"])

    loss = lambda params, x: jnp.mean(over_layers(wrap(block), params, x) ** 2)
    kernel = (6, 3, 3, channels, channels)
    return loss, arrays(first=kernel, second=kernel), arrays(x=(8, size, size, channels))["x"]


def recurrent(name: str, wrap: Callable, smoke: bool) -> tuple[Callable, Any, Any]:
    """A gated recurrent unit over time (Cho et al. 2014, arXiv 1406.1078)."""
    import jax
    import jax.numpy as jnp

    steps, width = (8, 16) if smoke else (256, 256)

    def cell(params: Any, h: Any, x: Any) -> Any:
        update, reset = jnp.split(
            jax.nn.sigmoid(x @ params["gates_x"] + h @ params["gates_h"]), 2, axis=-1
        )
        new = jnp.tanh(x @ params["new_x"] + (reset * h) @ params["new_h"])
        return update * h + (1 - update) * new

    def loss(params: Any, x: Any) -> Any:
        wrapped = wrap(cell)
        start = jnp.zeros(x.shape[1:])
        return jnp.mean(jax.lax.scan(lambda h, x: (wrapped(params, h, x), None), start, x)[0] ** 2)

    square, gates = (width, width), (width, 2 * width)
    params = arrays(gates_x=gates, gates_h=gates, new_x=square, new_h=square)
    return loss, params, arrays(x=(steps, 32, width))["x"]


def experts(name: str, wrap: Callable, smoke: bool) -> tuple[Callable, Any, Any]:
    """Layers of a mixture of experts, each of which computes all tokens; those that are not sent to it have the weight 0."""
    import jax
    import jax.numpy as jnp

    tokens, width, count = (16, 16, 4) if smoke else (2048, 256, 8)

    def layer(params: Any, x: Any) -> Any:
        scores = jax.nn.softmax(x @ params["router"])
        chosen = scores >= jax.lax.top_k(scores, 2)[0][:, -1:]
        weights = jnp.where(chosen, scores, 0)
        hidden = jax.nn.gelu(jnp.einsum("td,edh->teh", x, params["up"]))
        return x + jnp.einsum("teh,ehd,te->td", hidden, params["down"], weights)

    loss = lambda params, x: jnp.mean(over_layers(wrap(layer), params, x) ** 2)
    params = arrays(
        router=(4, width, count), up=(4, count, width, 2 * width), down=(4, count, 2 * width, width)
    )
    return loss, params, arrays(x=(tokens, width))["x"]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
