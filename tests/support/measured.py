"""Steps that were measured on one H100, and the planner's. The rows: data/measured.json.

python tests/support/measured.py       renews their table in docs/published.md
"""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jaxpar import fp8
from jaxpar.backward.graph import trace
from jaxpar.models.lora import Lora
from jaxpar.models.transformer import LAYER_WEIGHTS
from jaxpar.planner import Choice, cluster, price, transformer_shape
from jaxpar.planner.kernel_seconds import seconds_of
from jaxpar.planner.kernels import kernels_of

_DATA = json.loads((Path(__file__).parents[1] / "data" / "measured.json").read_text())
ROWS, LINEAR = _DATA["rows"], _DATA["linear"]
PAGE = Path(__file__).parents[2] / "docs" / "published.md"
SECTION = re.compile(
    r"(?<=<!-- by tests/support/measured.py -->\n).*?(?=<!-- until here, measured -->)", re.DOTALL
)


@functools.cache
def planned(index):
    row = ROWS[index]
    given = {"seq": row["seq"], "vocab_multiple": 1} | row.get("changes", {})
    if "lora_rank" in row:  # whose frozen weights are in bfloat16
        given |= {"lora": Lora(row["lora_rank"], LAYER_WEIGHTS), "param_dtype": jnp.bfloat16}
    shape = transformer_shape(row["model"], **given)
    return price(
        shape, cluster("h100", 1, 1), Choice(), batch_size=row["rows"], optimizer=optax.adamw(1e-4)
    )


def error(index):
    """The planned seconds over the measured ones, less 1."""
    return 1e3 * planned(index).step_seconds / ROWS[index]["milliseconds"] - 1


def linear_seconds(rows, ins, outs, products):
    """The planned seconds of forward and backward of one weight, in 16 bits ("compute") or in FP8."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    def both(x, w, ct):
        y, backward = jax.vjp(fp8.dot if products == "fp8" else jnp.matmul, x, w)
        return y, *backward(ct)

    graph = trace(both, shape(rows, ins), shape(ins, outs), shape(rows, outs))
    kernels = kernels_of(graph, graph.needed(graph.outputs, graph.inputs), graph.outputs, ())
    return seconds_of(kernels, cluster("h100", 1, 1))


def line(index):
    """A row of the table."""
    row, plan = ROWS[index], planned(index)
    cells = [
        row["job"],
        f"{row['milliseconds']:g} ms",
        f"{1e3 * plan.step_seconds:.4g} ms",
        f"{error(index):+.0%}",
        f"{row['gib']:.1f} GiB",
        f"{row['compiled_gib']:.1f} GiB",
        f"{plan.memory_bytes / 2**30:.1f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


def render():
    """The table."""
    head = [
        "| job | measured | planned | difference | peak memory | as compiled now | planned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *map(line, range(len(ROWS)))]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda _: render(), PAGE.read_text()))
