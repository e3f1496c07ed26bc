"""Published step times, and the planner's, under one set of assumptions. The rows and their sources: data/published.json.

python tests/support/published.py       renews the table of docs/published.md
"""

import functools
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import optax

from jaxpar.mesh import AXES
from jaxpar.models.transformer import TransformerConfig, preset
from jaxpar.models.transformer.params import num_active_params
from jaxpar.planner import Assumptions, Choice, Plan, Software, cluster, transformer_shape
from jaxpar.planner.fused import planned_attention
from jaxpar.planner.search import Estimator
from jaxpar.schedule import Op, Schedule
from jaxpar.schedule.simulate import structure_of

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published.json").read_text())
ROWS, SOURCES = PUBLISHED["rows"], PUBLISHED["sources"]
PAGE = Path(__file__).parents[2] / "docs" / "published.md"
SECTION = re.compile(
    r"(?<=<!-- by tests/support/published.py -->\n).*?(?=<!-- until here -->)", re.DOTALL
)


def config_of(model):
    given = PUBLISHED["models"][model]
    config = (
        preset(given, vocab_multiple=128) if isinstance(given, str) else TransformerConfig(**given)
    )
    return replace(config, compute_dtype=jnp.bfloat16)


def shape_of(row):
    return _shape_of(
        row["model"], row.get("attention", "xla"), row.get("seq"), row.get("experts", "tensor")
    )


@functools.cache
def _shape_of(model, attention, seq, experts):
    config = replace(
        config_of(model), attention=planned_attention if attention == "flash" else "xla"
    )
    if experts == "data":  # routing is forced to be even
        config = config.with_experts(buffer=1.0)
    return transformer_shape(config, seq=seq, experts=experts)


class TwiceTheMicrobatches(Choice):
    """zb-h2 (Qi et al. 2023, section 2.2): zb-h1 with twice as many microbatches in flight, so that no stage ever waits."""

    @property
    def num_simulated(self):
        return min(self.num_microbatches, 4 * self.stage)

    def structure(self, num_microbatches, form=None, *, by_tick=False):
        del form, by_tick
        return structure_of_zb_h2(self.stage, num_microbatches)


@functools.cache
def structure_of_zb_h2(num_stages, num_microbatches):
    orders = [_zb_h2(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    return structure_of(Schedule.from_orders(orders, name="zb-h2"))


def _zb_h2(stage, num_stages, num_microbatches):
    first, later = min(2 * (num_stages - 1 - stage), num_microbatches), 2 * stage
    order = [(Op("F", i),) for i in range(first)]
    for i in range(num_microbatches + later):
        order += [(Op("F", i + first),)] * (i + first < num_microbatches)
        order += [(Op("B", i),)] * (i < num_microbatches)
        order += [(Op("W", i - later),)] * (i >= later)
    return order


def microbatches_of(row):
    return row["batch"] // row.get("replica", 1) // row["data"] // row["microbatch"]


def choice_of(row):
    kind = TwiceTheMicrobatches if row.get("schedule") == "zb-h2" else Choice
    schedule = row.get("schedule", "1f1b")
    return kind(
        replica=row.get("replica", 1),
        data=row["data"],
        context=row.get("context", 1),
        stage=row["stage"],
        tensor=row["tensor"],
        schedule="zb-h1" if schedule == "zb-h2" else schedule,
        num_chunks=row.get("num_chunks", 1),
        num_microbatches=microbatches_of(row),
        zero=row.get("zero", 0),
        remat=row.get("remat", False),
        layers_per_virtual_stage=tuple(row["layers"]) if "layers" in row else None,
    )


def seconds_of(row):
    """The published seconds of a step, from the figure in the unit in which it was published."""
    shape, config, value = shape_of(row), config_of(row["model"]), row["value"]
    layers, width, seq = config.num_layers, config.embed_dim, shape.tokens_per_row
    tokens = row["batch"] * seq
    # arXiv 2104.04473, section 5.1
    recomputing = (
        96
        * tokens
        * layers
        * width**2
        * (1 + seq / (6 * width) + config.vocab_size / (16 * layers * width))
    )
    of = lambda params: (6 * params + 12 * layers * width * seq) * tokens
    return {
        "seconds": value,
        "tokens/s/GPU": tokens / value / row["gpus"],
        "samples/s/GPU": row["batch"] / value / row["gpus"],
        "TFLOP/s with recompute": recomputing / (value * 1e12 * row["gpus"]),
        "TFLOP/s of 6N and attention": of(shape.num_params) / (value * 1e12 * row["gpus"]),
        # Without the lookup of embeddings.
        "TFLOP/s of active 6N and attention": of(
            num_active_params(config) - config.vocab_rows * width
        )
        / (value * 1e12 * row["gpus"]),
    }[row["unit"]]


def planned(row, machines=None) -> Plan:
    """The plan of a row, for machines with other figures if they are given."""
    machines = machines or machines_of(row)
    software = PUBLISHED["software"][row["software"]]
    given = software | {"overlaps": tuple(software.get("overlaps", ()))}
    software = Software(**given, measured_kernels=False)
    if row.get("precision") == "fp8":
        software = replace(software, product_rate=machines.fp8_rate)
    unlimited = replace(machines, memory_bytes=float("inf"))
    estimator = Estimator(
        shape_of(row), unlimited, row["batch"], optax.adam(1e-4), "mpmd", Assumptions(), software
    )
    plan = estimator.price(
        choice_of(row), quick=True
    )  # without the traffic of messages, for which schedules are compiled
    assert plan is not None
    return plan


def machines_of(row):
    return cluster(row["gpu"], max(1, row["gpus"] // 8), min(8, row["gpus"]))


@functools.cache
def planned_seconds(index):
    return planned(ROWS[index]).step_seconds


def error(index):
    """The planned seconds of a row over the published ones, less 1."""
    return planned_seconds(index) / seconds_of(ROWS[index]) - 1


def errors(source=None):
    return [error(index) for index, row in enumerate(ROWS) if source in (None, row["source"])]


def summary(found):
    """The median, the ninth decile and the largest of the errors' sizes."""
    sizes = sorted(map(abs, found))
    return statistics.median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1], sizes[-1]


def line(index):
    """A row of the table of docs/published.md."""
    row = ROWS[index]
    recompute = {False: "no", True: "yes", "dots": "scores"}[row.get("remat", False)]
    if "half of each layer" in row["software"]:
        recompute = "half"
    chunks = f" x{row['num_chunks']}" if row.get("num_chunks", 1) > 1 else ""
    schedule = f"{row.get('schedule', '1f1b')}{chunks}" if row["stage"] > 1 else "-"
    found, seconds = planned_seconds(index), seconds_of(row)
    cells = [
        row["model"] + (f", {row['seq']:,} tokens" if "seq" in row else ""),
        f"{row['gpus']} {row['gpu'].removesuffix('-jeanzay')}"
        + (" FP8" if row.get("precision") == "fp8" else ""),
        ", ".join(str(row.get(axis, 1)) for axis in AXES),
        schedule,
        f"{microbatches_of(row)} x {row['microbatch']}",
        recompute,
        f"{row['value']:g} {row['unit']}",
        f"{seconds:.3g} s",
        f"{found:.3g} s",
        f"{found / seconds - 1:+.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def render():
    """The summary and the table of docs/published.md."""
    named = (
        "| source | rows | median | 9 in 10 within | largest |\n| --- | --- | --- | --- | --- |\n"
    )
    sizes = lambda found: " | ".join(f"{size:.1%}" for size in summary(found))
    lines = [
        f"| {name} | {len(errors(source))} | {sizes(errors(source))} |"
        for source, name in SOURCES.items()
    ]
    text = named + "\n".join([*lines, f"| all | {len(ROWS)} | {sizes(errors())} |"]) + "\n"
    for source, name in SOURCES.items():
        text += f"\n{name[0].upper()}{name[1:]}:\n\n"
        text += (
            "| model | GPUs | replica, data, context, stage, tensor | schedule | microbatches x rows | recomputed | "
            "published | as seconds | planned | difference |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        )
        text += (
            "\n".join(line(index) for index, row in enumerate(ROWS) if row["source"] == source)
            + "\n"
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda _: render(), PAGE.read_text()))
