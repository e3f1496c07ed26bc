"""Draws the guide's pictures, each by the code that its page describes: `python docs/pictures.py [name ...]`.

A picture that needs a trained model trains it. tests/test_docs.py draws them again and holds docs/pictures/ to that.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "docs")]

import pictures_zh  # noqa: E402
from diagrams import (  # noqa: E402
    INK,
    SHARD_COLOURS,
    context,
    experts,
    four_bits,
    fp8,
    houses,
    neuron,
    plot,
    replicas,
    server_and_ring,
    weights,
    write,
)
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.commands import recipe  # noqa: E402
from jaxpar.plot import plot_placement  # noqa: E402
from jaxpar.schedule import lockstep_form, make_schedule, plot_timeline, simulate  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
NUM_COLOURS = 255  # of a file, which is a third as large then


def descent(path: Path) -> None:
    """The loss surface, and the path of a run of house_prices.py on it."""
    import house_prices
    import house_prices_report
    from house_prices_least_squares import Standard

    table, best = houses()
    with tempfile.TemporaryDirectory() as folder:
        recipe.run(house_prices.main, house_prices.Config, ["--out-dir", folder])
        lines = house_prices_report.read_path(Path(folder), Standard.of(table), table)
    house_prices_report.plot_surface(path, lines, best, table)


def learning_rates(path: Path) -> None:
    """The error of house_prices.py under three learning rates."""
    import house_prices
    import house_prices_report

    table, best = houses()
    mesh = jaxpar.make_mesh()
    rates = house_prices.compare_learning_rates(table, mesh)
    figure, panel = plot(6.5, 4.0)
    for (name, (rate, course)), colour in zip(
        rates.items(), ("#808080", "#1b9e77", "#d95f02"), strict=True
    ):
        panel.plot(course, color=colour, linewidth=2, label=f"{name}: {rate:.2g}")
    panel.axhline(
        best.error(table), color="black", linestyle="--", label="least squares: the best there is"
    )
    panel.set(yscale="log", xlim=(0, 50), ylim=(5e4, 5e6), xlabel="steps of gradient descent")
    panel.set(ylabel=f"{house_prices_report.error_label(table)}, log scale")
    panel.legend(loc="best", title="learning rate")
    figure.savefig(path, dpi=130)


def fitting(path: Path) -> None:
    """Training and test error of digits.py over the model's size and the number of digits; trains some 40 models."""
    import digits
    import digits_report
    import digits_sweep

    config = digits.Config()
    train, test = digits.read_digits()
    errors = digits_sweep.sweep(
        train, test, config.recipe.width, config.recipe.hidden_layers, config.common.learning_rate
    )
    digits_report.plot_errors(path, *errors)


def timelines(path: Path) -> None:
    """GPipe, 1F1B and zero bubble on four stages as published, and zero bubble as jaxpar runs it."""
    published = [make_schedule(name, 4, 8) for name in ("gpipe", "1f1b", "zb-h1")]
    as_run = make_schedule("zb-h1", 4, 8, form=lockstep_form("zb-h1"))
    plot_timeline([*published, as_run], path, timing=("free", "free", "free", "lockstep"))


def deepspeed(path: Path) -> None:
    """DeepSpeed's figure: 32 GPUs on 4 nodes."""
    plot_placement(
        {"data": 2, "stage": 4, "tensor": 4}, 8, path=path, title="DeepSpeed's 3D figure"
    )


def resumed(path: Path) -> None:
    """The losses of a run of digits.py, stopped and resumed on another mesh, and of one that was not."""
    import digits
    from jaxpar.metrics.log import read_metrics

    def train(folder: str, *flags: str) -> tuple[list[int], list[float]]:
        flags = ("--no-sweep", "--checkpoint-every", "20", "--out-dir", folder, *flags)
        recipe.run(digits.main, digits.Config, flags)
        lines = read_metrics(Path(folder) / "metrics.jsonl")
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    with tempfile.TemporaryDirectory() as job, tempfile.TemporaryDirectory() as other:
        stopped = train(job, "--steps", "60", "--mesh.data", "2", "--mesh.stage", "4")
        whole = train(job, "--steps", "120", "--mesh.data", "4", "--mesh.tensor", "2", "--resume")
        undisturbed = train(other, "--steps", "120")
    figure, panel = plot(8.0, 4.2)
    panel.plot(
        *undisturbed,
        color="0.78",
        linewidth=7,
        solid_capstyle="round",
        label="never stopped: one device",
    )
    panel.plot(*stopped, color="#1b6ca8", linewidth=1.5, label="until step 60: data=2, stage=4")
    panel.plot(
        whole[0][59:],
        whole[1][59:],
        color="#d95f02",
        linewidth=1.5,
        label="resumed: data=4, tensor=2",
    )
    panel.axvline(59, color=INK, linestyle=":", linewidth=1)
    panel.text(60, 2.2, "stopped, and resumed\non another mesh", va="top", color=INK)
    panel.set(
        xlabel="steps",
        ylabel="loss",
        title="The loss of a run that is stopped and resumed, and of one that is not",
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=130)


def same_loss(path: Path) -> None:
    """The losses of digits.py on 1 and on 8 devices, and the timeline of the pipeline on the 8."""
    import digits
    from jaxpar.metrics.log import read_metrics
    from jaxpar.schedule.draw import draw_timeline

    schedule, num_stages, num_microbatches = "zb-h1", 2, 8

    def train(*flags: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            always = (
                "--no-sweep",
                "--steps",
                "60",
                "--num-microbatches",
                str(num_microbatches),
                "--out-dir",
                folder,
            )
            recipe.run(digits.main, digits.Config, (*always, *flags))
            return [line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl")]

    on_eight = (
        "--mesh.data",
        "2",
        "--mesh.stage",
        str(num_stages),
        "--mesh.tensor",
        "2",
        "--schedule",
        schedule,
    )
    one, eight = train(), train(*on_eight)
    assert np.allclose(one, eight, rtol=1e-3), "the picture shows equal losses"
    figure = Figure(figsize=(12.0, 2.7), layout="constrained")
    losses, pipeline = figure.subplots(1, 2, width_ratios=(1, 1.6))
    losses.plot(one, color="0.78", linewidth=7, solid_capstyle="round", label="1 device")
    losses.plot(eight, color="#d95f02", linewidth=1.5, label="8 devices: data=2, stage=2, tensor=2")
    losses.set(xlabel="steps", ylabel="loss", title="The loss is that of one device")
    losses.spines[["top", "right"]].set_visible(False)
    losses.legend(loc="best", frameon=False, fontsize=9)
    table = make_schedule(schedule, num_stages, num_microbatches, form=lockstep_form(schedule))
    timeline = simulate(table, timing="lockstep")
    draw_timeline(pipeline, timeline, 15.0)
    idle = f"{timeline.bubble_fraction:.1%} of the time is idle"
    pipeline.set_title(f"The pipeline of the 8 devices: {idle}", loc="left", fontsize=12)
    pipeline.set(
        xlim=(0, timeline.makespan),
        xlabel="time; one forward = 1. Blue: forward; orange, green: backward",
    )
    figure.savefig(path, dpi=130)


def recall(path: Path) -> None:
    """The losses of gpt.py on `--data recall`, over context=4: with attention to whole rows, and with a window."""
    import gpt
    from jaxpar.metrics.log import read_metrics

    seq, window = 1024, 256
    always = (
        "--data",
        "recall",
        "--model",
        "llama-tiny",
        "--mesh.data",
        "2",
        "--mesh.context",
        "4",
        "--seq",
        str(seq),
    )
    always += (
        "--batch-size",
        "4",
        "--optimizer",
        "muon",
        "--lr",
        "0.02",
        "--steps",
        "150",
        "--eval-rows",
        "4",
    )

    def train(*flags: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            recipe.run(gpt.main, gpt.Config, (*always, "--out-dir", folder, *flags))
            return [line["loss"] for line in read_metrics(Path(folder) / "metrics.jsonl")]

    figure, panel = plot(8.0, 3.6)
    panel.axhline(np.log(26), color=INK, linestyle=":", linewidth=1)
    panel.text(149, np.log(26) + 0.08, "ln 26: a guess", ha="right", va="bottom", color=INK)
    panel.plot(
        train("--window", str(window)),
        color="#d95f02",
        linewidth=2,
        label=f"a window of {window} tokens",
    )
    panel.plot(train(), color="#1b6ca8", linewidth=2, label="the whole row")
    panel.set(
        xlabel="steps",
        ylabel="loss",
        ylim=(0, 6),
        title=f"The answers lie {seq // 2} tokens back, or more",
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="best", frameon=False, title="attention to")
    figure.savefig(path, dpi=130)


def held(path: Path) -> None:
    """What one of 8 GPUs holds of a 7B model at rest, from the shapes and shardings of its state."""
    import math

    import jax
    import optax

    from jaxpar.models import transformer
    from jaxpar.params import init_params
    from jaxpar.planner import cluster
    from jaxpar.tensor_parallel import TRANSFORMER_RULES

    table = transformer.param_table(transformer.preset("llama-7b"))
    gib = lambda leaf: (
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize / 2**30
    )
    bars = {}
    for axes in (
        {"data": 8},
        {"data": 4, "tensor": 2},
        {"data": 2, "stage": 4},
        {"stage": 4, "tensor": 2},
    ):
        mesh = jaxpar.make_mesh(**axes)
        shardings = jaxpar.shardings_from_dims(table, mesh, TRANSFORMER_RULES)
        first = (
            lambda key: init_params(table, key),
            jax.random.key(0),
            optax.adam(1e-4),
            mesh,
            shardings,
        )
        for zero in (0, 1, 2, 3) if "data" in axes else (0,):
            state = jaxpar.abstract_state(*first, zero=zero)
            params, adam = (
                sum(map(gib, jax.tree.leaves(part))) for part in (state.params, state.opt_state)
            )
            name = "\n".join([*(f"{axis}={size}" for axis, size in axes.items()), f"ZeRO {zero}"])
            bars[name] = {
                "parameters": params,
                "gradients": adam / 2 if zero >= 2 else params,
                "Adam": adam,
            }
    figure, panel = plot(9.0, 4.4)
    groups = [name.rsplit("\n", 1)[0] for name in bars]
    places = np.arange(len(bars)) + 0.7 * np.cumsum(
        [a != b for a, b in zip(groups, [groups[0], *groups], strict=False)]
    )
    below = np.zeros(len(bars))
    for kind, colour in zip(("parameters", "gradients", "Adam"), SHARD_COLOURS, strict=False):
        heights = np.array([bar[kind] for bar in bars.values()])
        panel.bar(places, heights, bottom=below, color=colour, label=kind, width=0.7)
        below += heights
    for place, total in zip(places, below, strict=True):
        panel.text(place, total + 1.5, f"{total:.0f}", ha="center")
    limit = cluster("h100").memory_bytes / 2**30
    panel.axhline(limit, color="black", linestyle="--", linewidth=1)
    panel.text(places[-1] + 0.6, limit + 1.5, f"an H100 of 80 GB holds {limit:.1f} GiB", ha="right")
    panel.set_xticks(places, list(bars), fontsize=7.5)
    panel.tick_params(axis="x", length=0)
    panel.set(
        ylabel="GiB on each GPU, at rest",
        title="Llama 7B on 8 GPUs: what each holds before the first row",
    )
    panel.set(ylim=(0, 112), xlim=(places[0] - 0.6, places[-1] + 0.7))
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="upper right", frameon=False, ncols=3)
    figure.savefig(path, dpi=130)


def two_pods(path: Path) -> None:
    """The mesh of the manifest: 16 GPUs on 2 nodes."""
    plot_placement(
        {"data": 2, "stage": 2, "tensor": 4}, 8, path=path, title="Two pods of eight GPUs"
    )


def bloom(path: Path) -> None:
    """BLOOM's 384 GPUs on 48 nodes."""
    plot_placement({"data": 8, "stage": 12, "tensor": 4}, 8, path=path, title="BLOOM-176B")


def architecture(path: Path) -> None:
    """The parts of jaxpar in the layers of its import contract."""
    import imports

    figure, panel = plot(11.0, 7.6)
    panel.set_axis_off()
    write(figure, panel, path, *imports.draw(panel))


PICTURES: dict[str, Callable[[Path], None]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (
        same_loss,
        neuron,
        descent,
        learning_rates,
        fitting,
        replicas,
        server_and_ring,
        timelines,
        weights,
        experts,
        context,
        recall,
        fp8,
        four_bits,
        deepspeed,
        bloom,
        held,
        two_pods,
        resumed,
        architecture,
    )
}
ENGLISH = ("architecture",)  # on pages that are in English alone
SLOW = ("fitting", "recall", "resumed", "same-loss")  # half a minute of training


def draw(name: str, folder: Path) -> Path:
    """Draws one picture, and beside it, in the folder zh, the same with Chinese labels; returns the file of the first."""
    path = folder / f"{name}.png"
    chinese = folder / "zh" / path.name
    chinese.parent.mkdir(exist_ok=True)
    with nullcontext() if name in ENGLISH else pictures_zh.also_in_chinese(chinese):
        PICTURES[name](path)
    for each in (path,) if name in ENGLISH else (path, chinese):
        with Image.open(each) as image:
            few_colours = image.convert("RGB").quantize(NUM_COLOURS)
        few_colours.save(each, optimize=True)
    return path


if __name__ == "__main__":
    jaxpar.use_fake_devices(8)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        print(draw(name, FOLDER).relative_to(ROOT))
