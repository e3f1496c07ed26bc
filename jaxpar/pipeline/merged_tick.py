"""A tick in which a stage runs F of one microbatch and the complete backward pass of another in one loop over its layers.

    trip      0            1            ...    L-1
    F         layer 0      layer 1             layer L-1
    B         layer L-1    layer L-2           layer 0

Neither reads what the other writes, so XLA can run the collectives over ``tensor`` of one beside the products of the other. In
loops of their own nothing could run beside them: the next product of a layer needs the result of the collective.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.dtypes import unwrap_key

Row = dict[str, Any]
State = dict[str, Any]


def forward_and_backward(stage: Any, state: State, rows: Mapping[str, Row]) -> tuple[State, dict[str, list]]:
    """Runs F and B of a tick; returns what they send, by op. An op that is off runs on what its slots hold.

    Positions that do not hold a layer in every chunk have loops of their own: those of B before, those of F after.

    Args:
        stage: The Stage.
        state: Its buffers and sums.
        rows: The rows of F and B, of different microbatches.
    """
    forward, backward = rows["F"], rows["B"]
    layer, layers, num_everywhere = stage.layer, stage.layers, stage.layout.min_layers
    stores = not stage.program.schedule.recomputes

    def one_forward(carry: tuple, position: Any, params: list) -> tuple:
        x, *rings = carry
        if not stores:
            return [unwrap_key(a) for a in layer.forward(params, stage.with_keys(x))], *rings
        y, *values = layer.forward_and_store(params, stage.with_keys(x))
        names = ("residuals_b", "residuals_w")
        stored = [stage.store(*each, forward, name, position) for *each, name in zip(rings, values, names, strict=True)]
        return [unwrap_key(a) for a in y], *stored

    def one_backward(carry: tuple, position: Any, params: list) -> tuple[tuple, list]:
        ct, x, *rings = carry
        now = state | dict(zip(("residuals_b", "residuals_w"), rings, strict=True))
        dx, grads = layer.backward(params, *stage.residuals(now, backward, position), ct)
        return (dx, x, *rings), grads

    def both(carry: tuple, position: Any, params: list) -> tuple[tuple, list]:
        ct, x, *rings = carry
        now = state | dict(zip(("residuals_b", "residuals_w"), rings, strict=True))
        # All of B's reads come before F's writes, or XLA keeps the rings as they were for the reads: it copies them.
        rings, values = jax.lax.optimization_barrier((rings, stage.residuals(now, backward, position)))
        ahead = num_everywhere - 1 - position
        x, *rings = one_forward((x, *rings), ahead, layers.params_at(forward["chunk"], ahead))
        dx, grads = layer.backward(params, *values, ct)
        return (dx, x, *rings), grads

    carry = (stage.cotangent(state, backward), stage.input_of(state, forward, stage.ends.embed))
    carry = (*carry, state["residuals_b"], state["residuals_w"])
    with jax.named_scope("FB"):
        (dx, *carry), grads = stage.layer_grads.add_over_layers(
            one_backward, backward, carry, state["layer_grads"], back=True, everywhere=both
        )
        of_some = (num_everywhere, layers.num_layers(forward["chunk"]))
        y, residuals_b, residuals_w = layers.over_positions(
            *of_some, one_forward, forward["chunk"], tuple(carry), back=False
        )
    state = state | {"layer_grads": grads, "residuals_b": residuals_b, "residuals_w": residuals_w}
    state, y = stage.after_layers(state, forward, y)
    state, dx = stage.before_layers(state, backward, dx)
    return state, {"F": y, "B": dx}
