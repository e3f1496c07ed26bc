"""Products of rows with the weights of their experts, and their gradients, beside one product with as many operations.

Rows are sent to experts at random, and each expert's rows fill whole tiles with zeros. PyTorch's own grouped product, where it
is installed, has experts with equally many rows.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

from gpu_day_parts.common import Candidates, Context, in_words

TORCH = Path(__file__).parents[1] / "grouped_torch.py"
TURN = 10
COLUMNS = {
    "experts": "",
    "product": "",
    "ms a call": ".3f",
    "TFLOP/s": ".0f",
    "of dense": ".3f",
    "spread": ".1%",
}
TITLE = "Products of rows with the weights of their experts, in bfloat16"
NOTE = "The operations are those of the rows without padding. Dense: a batch of products, experts with equally many rows."


@dataclass(frozen=True)
class Case:
    """Experts of a published model: tokens, experts, those of a token, and the widths of their first weight."""

    tokens: int
    experts: int
    used: int
    depth: int
    width: int

    @property
    def rows(self) -> int:
        return self.tokens * self.used

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.depth * self.width


CASES = {
    "Mixtral 8x7B: 8 of 4096 x 14336": Case(4096, 8, 2, 4096, 14336),
    "Qwen3 30B-A3B: 128 of 2048 x 768": Case(16384, 128, 8, 2048, 768),
    "OLMoE 7B: 64 of 2048 x 1024": Case(16384, 64, 8, 2048, 1024),
}
TINY = {"4 of 32 x 64": Case(64, 4, 2, 32, 64)}


def measure(context: Context) -> Iterator[report.Table]:
    """Times the passes of each case in turn; PyTorch first, while JAX holds no memory."""
    cases = TINY if context.smoke else CASES
    by_torch = {} if context.smoke or not context.torch_python else torch_seconds(context, cases)
    rows: list[dict[str, Any]] = []
    notes = NOTE
    for name, case in cases.items():
        candidates = Candidates(context, turn=1 if context.smoke else TURN)
        for product, (run, args) in passes(case).items():
            candidates.add(product, run, *args)
        timings = candidates.timed("dense")
        seconds = {each: timed.wall_seconds / candidates.turn for each, timed in timings.items()}
        spreads = {each: timed.wall_spread for each, timed in timings.items()}
        if name in by_torch:
            seconds["torch._grouped_mm, forward"] = by_torch[name]
        rows += [row_of(name, case, each, seconds, spreads) for each in seconds]
        notes = " ".join(filter(None, (notes, candidates.note())))
        yield report.Table(TITLE, COLUMNS, rows, "one device", notes)


def row_of(
    name: str, case: Case, product: str, seconds: dict[str, float], spreads: dict[str, float]
) -> dict[str, Any]:
    taken, dense = seconds[product], seconds.get("dense")
    share = None if dense is None else dense / taken
    cells = (name, product, taken * 1e3, case.flops / taken / 1e12, share, spreads.get(product))
    return dict(zip(COLUMNS, cells, strict=True))


def passes(case: Case) -> dict[str, tuple[Callable, tuple]]:
    """Returns each pass by name, as a function and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpar.models.grouped_product import TILE, grouped_product

    chosen = np.random.default_rng(0).integers(0, case.experts, case.rows)
    padded = -(-np.bincount(chosen, minlength=case.experts) // TILE) * TILE
    count, sizes = int(padded.sum()), jnp.asarray(padded, jnp.int32)[None]
    keys = jax.random.split(jax.random.key(0), 4)
    random = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    rows, ct = random(keys[0], 1, count, case.depth), random(keys[1], 1, count, case.width)
    weights = random(keys[2], 1, case.experts, case.depth, case.width)
    even = random(keys[3], case.experts, case.rows // case.experts, case.depth)
    here = lambda kernel, *arrays: kernel(*arrays)
    product = lambda rows, weights: grouped_product(here, rows, weights, sizes)
    of_rows = lambda rows, weights, ct: jax.vjp(lambda rows: product(rows, weights), rows)[1](ct)
    of_weights = lambda rows, weights, ct: jax.vjp(lambda weights: product(rows, weights), weights)[
        1
    ](ct)
    dense = lambda rows, weights: jnp.einsum("eti,eio->eto", rows, weights)
    return {
        "dense": (dense, (even, weights[0])),
        "forward": (product, (rows, weights)),
        "gradient of rows": (of_rows, (rows, weights, ct)),
        "gradient of weights": (of_weights, (rows, weights, ct)),
    }


def torch_seconds(context: Context, cases: dict[str, Case]) -> dict[str, float]:
    """Returns the seconds of PyTorch's forward pass for each case, nothing if it fails or takes too long."""
    asked = {}
    for name, case in cases.items():
        asked[name] = [case.rows, case.experts, case.depth, case.width]
    command = [context.torch_python, str(TORCH), json.dumps(asked)]
    limit = max(1.0, context.left / 2)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
    except (subprocess.SubprocessError, OSError) as error:
        context.say(f"PyTorch's products: left out: {in_words(error)}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])
