"""Greedy decoding of the 1.1B Llama in bfloat16: tokens/s of one row and of sixteen, beside the time to read the weights."""

import time
from collections.abc import Iterator
from typing import Any

import report
from gpt_training import Model, make_shape

from gpu_day_parts.common import Context, gpu_of

ROWS, PROMPT, NEW = (1, 16), 64, 256
COLUMNS = {
    "job": "",
    "rows": "d",
    "tokens/s": ",.0f",
    "ms a token": ".2f",
    "ms to read the weights": ".2f",
}
NOTE = (
    f"{NEW} tokens after a prompt of {PROMPT}, the likeliest ones, the prompt's pass included. To read the weights: once, at "
    "the datasheet's bandwidth, which no step can beat."
)


def measure(context: Context) -> Iterator[report.Table]:
    """Times the second call of ``generate``, for each number of rows."""
    import jax
    import jax.numpy as jnp

    import jaxpar

    work = context.work("llama")
    shape, device = make_shape(work), jax.devices()[0]
    model = Model(shape, jaxpar.make_mesh(devices=[device]))
    narrow = lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    params = jax.jit(lambda key: narrow(model.init(key)))(jax.random.key(0))
    least = read_seconds(params, device)
    rows: list[dict[str, Any]] = []
    for count in ROWS:
        tokens = 8 if context.smoke else NEW
        seconds = decode_seconds(shape, params, count, tokens)
        context.say(f"{count} rows: {seconds / tokens * 1e3:.2f} ms a token")
        cells = (work.title, count, count * tokens / seconds, seconds / tokens * 1e3, least)
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
        yield report.Table("Greedy decoding in bfloat16", COLUMNS, rows, "one device", NOTE)


def decode_seconds(shape: Any, params: Any, rows: int, tokens: int) -> float:
    """Returns how long a call takes whose program is compiled."""
    import numpy as np

    from jaxpar.models import transformer

    prompt = np.random.default_rng(0).integers(
        0, 256, (rows, min(PROMPT, 16 if tokens < NEW else PROMPT))
    )
    prompt = prompt.astype(np.int32)
    np.asarray(transformer.generate(shape, params, prompt, tokens))
    began = time.perf_counter()
    np.asarray(transformer.generate(shape, params, prompt, tokens))
    return time.perf_counter() - began


def read_seconds(params: Any, device: Any) -> float | None:
    """Returns the milliseconds in which the device can read the params once; None for a device that the planner lacks."""
    import jax

    from jaxpar.planner import cluster

    if (gpu := gpu_of(device)) is None:
        return None
    return (
        1e3 * sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / cluster(gpu).memory_bandwidth
    )
