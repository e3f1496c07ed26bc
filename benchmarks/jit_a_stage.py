"""1F1B written by hand in plain JAX, and as JaxPP runs it: one jitted function for each stage, dispatched by Python.

Each stage's params are on its own device; ``jax.vjp`` is called inside its jitted forward pass, whose residuals stay on the
device as the leaves of the vjp, and activations are copied from device to device. Dispatch is asynchronous, so a stage waits
only for its inputs.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import small_gpt


def cut_params(params: dict, devices: list) -> list:
    """Returns the params of each stage, on its device: equal numbers of layers, the ends of the model on first and last."""
    layers = [
        jax.tree.map(lambda leaf, n=n: leaf[n], params["layers"])
        for n in range(len(params["layers"]["w_up"]))
    ]
    own = len(layers) // len(devices)
    stages = [{"layers": layers[n * own : (n + 1) * own]} for n in range(len(devices))]
    stages[0] |= {name: params["outer"][name] for name in ("tokens", "positions")}
    stages[-1] |= {name: params["outer"][name] for name in ("w_head", "scale", "shift")}
    return [jax.device_put(stage, device) for stage, device in zip(stages, devices, strict=True)]


def value_and_grad(
    num_stages: int, num_microbatches: int
) -> Callable[[list, dict], tuple[jax.Array, list]]:
    """Returns ``(params of the stages, batch) -> (loss, gradients of the stages)``, with the batch on the host."""
    forward = jax.jit(partial(jax.vjp, _middle))
    first = jax.jit(
        lambda params, tokens: jax.vjp(
            lambda params: _middle(params, _embed(params, tokens)), params
        )
    )
    last = jax.jit(
        lambda params, x, targets: jax.vjp(lambda params, x: _loss(params, x, targets), params, x)
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def backward(sums: dict, vjp: Callable, ct: jax.Array) -> tuple:
        grads, *dx = vjp(ct)
        return jax.tree.map(jnp.add, sums, grads), *dx

    zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params))
    mean = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf / num_microbatches, tree), donate_argnums=0
    )

    def run(params: list, batch: dict) -> tuple[jax.Array, list]:
        devices = [jax.tree.leaves(stage)[0].device for stage in params]
        cut = lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:])
        tokens, targets = (cut(batch[name]) for name in ("tokens", "targets"))
        sums, losses = [zeros(stage) for stage in params], []
        x, ct, vjps = {}, {}, {}
        for stage, op, m in _order(num_stages, num_microbatches):
            if op == "B":
                sums[stage], *dx = backward(sums[stage], vjps.pop((stage, m)), ct.pop((stage, m)))
                if stage > 0:
                    ct[stage - 1, m] = jax.device_put(dx[0], devices[stage - 1])
            elif stage == num_stages - 1:
                loss, vjps[stage, m] = last(
                    params[stage], x.pop((stage, m)), jax.device_put(targets[m], devices[stage])
                )
                losses.append(loss)
                ct[stage, m] = jax.device_put(jnp.float32(1), devices[stage])
            else:
                given = (
                    (jax.device_put(tokens[m], devices[0]),) if stage == 0 else (x.pop((stage, m)),)
                )
                y, vjps[stage, m] = (first if stage == 0 else forward)(params[stage], *given)
                x[stage + 1, m] = jax.device_put(y, devices[stage + 1])
        return sum(losses) / num_microbatches, [mean(own) for own in sums]

    return run


def _embed(params: dict, tokens: jax.Array) -> jax.Array:
    return small_gpt.embed(params, {"tokens": tokens})


def _middle(params: dict, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = small_gpt.layer(layer, x)
    return x


def _loss(params: dict, x: jax.Array, targets: jax.Array) -> jax.Array:
    total, weight = small_gpt.loss(small_gpt.head(params, _middle(params, x)), {"targets": targets})
    return total / weight


def _order(num_stages: int, num_microbatches: int) -> list[tuple[int, str, int]]:
    """Returns the ops of 1F1B: a stage runs one forward pass for itself and each later stage, then alternates B and F."""
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        ops = [("F", m) for m in range(ahead)]
        for m in range(num_microbatches):
            ops += [("B", m)] + ([("F", m + ahead)] if m + ahead < num_microbatches else [])
        orders.append(ops)
    made, walked = set(), []
    while any(orders):
        for stage, ops in enumerate(orders):
            op, m = ops[0] if ops else (None, None)
            ready = op == "F" and (stage == 0 or (stage - 1, "F", m) in made)
            ready |= op == "B" and (stage == num_stages - 1 or (stage + 1, "B", m) in made)
            if ready:
                ops.pop(0)
                made.add((stage, op, m))
                walked.append((stage, op, m))
    return walked
