"""Draws the guide's pictures, each by the code that its page describes: `python docs/pictures.py [name ...]`.

A picture that needs a trained model trains it. tests/test_docs.py draws them again and holds docs/pictures/ to that.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "docs")]

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Circle, Rectangle  # noqa: E402
from PIL import Image  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.plot import plot_curves, plot_placement  # noqa: E402
from jaxpar.schedule import make_schedule, plot_timeline  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
NUM_COLOURS = 255  # of a file, which is a third as large then
SHARD_COLOURS = ("#5b92d0", "#f2b45c", "#8fca8b", "#bfaede")
INK = "0.25"


def neuron(path: Path) -> None:
    """A neuron with the weights that house_prices.py learns."""
    table, best = _houses()
    weights, values = best.weights, np.array([1650.0, 3.0])
    figure, panel = _sheet(8.0, 3.0)
    for y, name, value, weight in zip((1.5, 0.5), ("area", "bedrooms"), values, weights, strict=True):
        panel.add_patch(Circle((0.6, y), 0.42, color=SHARD_COLOURS[0]))
        panel.text(0.6, y, f"{name}\n{value:,.0f}", ha="center", va="center")
        _arrow(panel, (1.03, y), (3.55, 1.0))
        times = f"× {weight:,.2f}"  # noqa: RUF001
        panel.text(2.1, 1 + (y - 1) * 0.575, times, ha="center", va="center", bbox={"fc": "white", "lw": 0})
    panel.add_patch(Circle((4.0, 1.0), 0.5, color=SHARD_COLOURS[1]))
    panel.text(4.0, 1.0, f"add up,\n+ {best.intercept:,.0f}", ha="center", va="center")
    _arrow(panel, (4.5, 1.0), (6.0, 1.0))
    panel.text(6.1, 1.0, f"price\n{best(values):,.0f} USD", ha="left", va="center", fontweight="bold")
    panel.text(4.0, 0.3, "bias", ha="center", color=INK)
    panel.text(2.1, 1.85, "weights", ha="center", color=INK)
    panel.text(0.6, 2.05, "inputs", ha="center", color=INK)
    _write(figure, panel, path, (-0.1, 7.4), (-0.1, 2.2))
    assert table.names == ("area_ft2", "bedrooms")


def descent(path: Path) -> None:
    """The loss surface, and the path of a run of house_prices.py on it."""
    import house_plots
    import house_prices
    import house_report
    from least_squares import Standard

    table, best = _houses()
    with tempfile.TemporaryDirectory() as folder:
        house_prices.cli.run(house_prices.main, house_prices.Config, ["--out-dir", folder])
        lines = house_report.read_path(Path(folder), Standard.of(table), table)
    house_plots.plot_surface(path, lines, best, table)


def learning_rates(path: Path) -> None:
    """The error of house_prices.py under three learning rates."""
    import house_plots
    import house_prices
    from least_squares import Standard

    table, best = _houses()
    mesh = jaxpar.make_mesh()
    params = house_prices.abstract_params(house_prices.linear.param_table(len(table.names)))
    shardings = jaxpar.shardings_from_paths(params, mesh, house_prices.RULES)
    rates = house_prices.compare_learning_rates(Standard.of(table), table, mesh, shardings)
    figure, panel = _plot(6.5, 4.0)
    for (name, (rate, course)), colour in zip(rates.items(), ("#808080", "#1b9e77", "#d95f02"), strict=True):
        panel.plot(course, color=colour, linewidth=2, label=f"{name}: {rate:.2g}")
    panel.axhline(best.error(table), color="black", linestyle="--", label="least squares: the best there is")
    panel.set(yscale="log", xlim=(0, 50), ylim=(5e4, 5e6), xlabel="steps of gradient descent")
    panel.set(ylabel=f"{house_plots.error_label(table)}, log scale")
    panel.legend(title="learning rate")
    figure.savefig(path, dpi=130)


def fitting(path: Path) -> None:
    """Training and test error of digits.py over the model's size and the number of digits; trains some 40 models."""
    import digits
    import digits_plots
    import digits_sweep

    config = digits.Config()
    train, test = digits.read_digits(config)
    errors = digits_sweep.sweep(train, test, config.width, config.hidden_layers, config.learning_rate)
    digits_plots.plot_errors(path, *errors)


def replicas(path: Path) -> None:
    """A batch cut into rows by shard_batch, and what the replicas then send one another."""
    devices, rows = 4, 16
    mesh = jaxpar.make_mesh(data=devices)
    batch = jaxpar.shard_batch(np.arange(rows), mesh)
    figure, panel = _sheet(8.0, 3.6)
    panel.text(0.4, 4.3, "the batch,\ncut by rows", ha="center", color=INK)
    panel.text(2.9, 4.3, "each replica: the whole model,\nits own rows, its own gradients", ha="center", color=INK)
    panel.text(6.6, 4.3, "after the all-reduce: the same\nsum, the same step, everywhere", ha="center", color=INK)
    for shard in batch.addressable_shards:
        i, y, colour = shard.device.id, 3.3 - shard.device.id, SHARD_COLOURS[shard.device.id]
        first, last = shard.data[0], shard.data[-1]
        _box(panel, (0, y), (0.8, 0.7), colour, f"rows\n{first}-{last}")
        _arrow(panel, (0.85, y + 0.35), (1.75, y + 0.35))
        _box(panel, (1.8, y), (2.2, 0.7), "white", f"replica {i}: weights w\ngradients of rows {first}-{last}", colour)
        _arrow(panel, (4.05, y + 0.35), (4.45, y + 0.35))
        _arrow(panel, (5.0, y + 0.35), (5.45, y + 0.35))
        step = f"replica {i}: w - rate ×\ngradients of rows 0-{rows - 1}"  # noqa: RUF001
        _box(panel, (5.5, y), (2.2, 0.7), "white", step, colour)
    _box(panel, (4.5, 0.3), (0.45, 3.7), "0.9", "")
    panel.text(4.725, 2.15, "all-reduce", rotation=90, ha="center", va="center")
    _write(figure, panel, path, (-0.1, 7.8), (0.1, 4.95))


def server_and_ring(path: Path) -> None:
    """Who sends how much to whom, counted in the compiled programs of a parameter server and of a ring."""
    import jax
    from jax.sharding import PartitionSpec

    from jaxpar.collectives import parameter_server, ring_all_reduce
    from jaxpar.inspect import line_bytes, link_bytes

    devices, length = 8, 840
    ways = {
        "one parameter server": lambda x: parameter_server(x, "data")[0],
        "ring all-reduce": lambda x: ring_all_reduce(x, "data"),
    }
    mesh, rows = jaxpar.make_mesh(data=devices), PartitionSpec("data")
    angles = np.pi / 2 - 2 * np.pi * np.arange(devices) / devices
    places = 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    figure = Figure(figsize=(8.0, 4.9), layout="constrained")
    for panel, (name, way) in zip(figure.subplots(1, 2), ways.items(), strict=True):
        step = jax.jit(jax.shard_map(way, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
        report = jaxpar.inspect_step(step, jax.ShapeDtypeStruct((devices, length), np.float32))
        links = link_bytes(report.collectives, devices)
        lines = line_bytes(links)
        for (sender, receiver), num_bytes in links.items():
            ends = places[sender], places[receiver]
            width = {"shrinkA": 15, "shrinkB": 15, "linewidth": 1.5 * num_bytes / (4 * length)}
            panel.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": INK, **width})
        for device, place in enumerate(places):
            most = lines[device] == max(lines.values())
            panel.add_patch(Circle(place, 0.2, color=SHARD_COLOURS[1 if most else 0], zorder=3))
            panel.text(*place, str(device), ha="center", va="center", zorder=4)
            panel.text(*(1.36 * place), f"{lines[device] / (4 * length):.3g} G", ha="center", va="center", color=INK)
        panel.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", title=f"{name}, {devices} GPUs")
        panel.set_axis_off()
    figure.supxlabel("through each GPU's line, in and out together; G: the bytes of the gradients", fontsize=10)
    figure.savefig(path, dpi=130)


def timelines(path: Path) -> None:
    """GPipe, 1F1B and zero bubble on four stages."""
    plot_timeline([make_schedule(name, 4, 8) for name in ("gpipe", "1f1b", "zb-h1")], path)


def weights(path: Path) -> None:
    """The two weights of a pair of hidden layers as each --split of digits.py places them on tensor=2."""
    import digits

    mesh = jaxpar.make_mesh(tensor=2)
    table = digits.mlp.param_table(64, 10, width=64, num_hidden=2)
    shapes = digits.abstract_params(table)
    figure, panel = _sheet(8.0, 3.3)
    for column, split in enumerate(("column", "row", "mixed")):
        placed = jaxpar.shardings_from_paths(shapes, mesh, digits.SPLITS[split])["layers"]
        panel.text(2.6 * column + 1.05, 2.6, f"--split {split}", ha="center", fontweight="bold")
        for place, name in enumerate(("w_up", "w_down")):
            x, shape = 2.6 * column + 1.15 * place, shapes["layers"][name].shape
            panel.text(x + 0.475, -0.32, name, ha="center", color=INK)
            for device, (_, ins, outs) in placed[name].devices_indices_map(shape).items():
                top, bottom, _ = ins.indices(shape[1])
                left, right, _ = outs.indices(shape[2])
                size = 0.95 * (right - left) / 64, 2.0 * (bottom - top) / 64
                corner = x + 0.95 * left / 64, 2.0 * (1 - bottom / 64)
                _box(panel, corner, size, SHARD_COLOURS[device.id], f"GPU {device.id}")
    panel.text(-0.3, 1.0, "inputs", rotation=90, va="center", color=INK)
    panel.text(0.0, 2.15, "outputs", color=INK)
    _write(figure, panel, path, (-0.45, 7.5), (-0.4, 2.9))


def deepspeed(path: Path) -> None:
    """DeepSpeed's figure: 32 GPUs on 4 nodes."""
    plot_placement({"data": 2, "stage": 4, "tensor": 4}, 8, path=path, title="DeepSpeed's 3D figure")


def resumed(path: Path) -> None:
    """The losses of a run of digits.py, stopped and resumed on another mesh, and of one that was not."""
    import digits

    from jaxpar.metrics.log import read_metrics

    def train(folder: str, *flags: str) -> tuple[list[int], list[float]]:
        flags = ("--no-sweep", "--checkpoint-every", "20", "--out-dir", folder, *flags)
        digits.cli.run(digits.main, digits.Config, flags)
        lines = read_metrics(Path(folder) / "metrics.jsonl")
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    with tempfile.TemporaryDirectory() as job, tempfile.TemporaryDirectory() as other:
        stopped = train(job, "--steps", "60", "--mesh.data", "2", "--mesh.stage", "4")
        whole = train(job, "--steps", "120", "--mesh.data", "4", "--mesh.tensor", "2", "--resume")
        undisturbed = train(other, "--steps", "120")
    curves = {
        "undisturbed, one device": undisturbed,
        "until step 60: data=2, stage=4": stopped,
        "resumed: data=4, tensor=2": (whole[0][60:], whole[1][60:]),
    }
    plot_curves(curves, path)


def held(path: Path) -> None:
    """What one of 8 GPUs holds of a 7B model at rest, from the shapes and shardings of its state."""
    import math

    import jax
    import optax

    from jaxpar.models import transformer
    from jaxpar.params import init_params
    from jaxpar.tensor_parallel import TRANSFORMER_RULES

    table = transformer.param_table(transformer.preset("llama-7b"))
    gib = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize / 2**30
    bars = {}
    for axes in ({"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "stage": 4}, {"stage": 4, "tensor": 2}):
        mesh = jaxpar.make_mesh(**axes)
        shardings = jaxpar.shardings_from_dims(table, mesh, TRANSFORMER_RULES)
        first = (lambda key: init_params(table, key), jax.random.key(0), optax.adam(1e-4), mesh, shardings)
        for zero in (0, 1, 2, 3) if "data" in axes else (0,):
            state = jaxpar.abstract_state(*first, zero=zero)
            params, adam = (sum(map(gib, jax.tree.leaves(part))) for part in (state.params, state.opt_state))
            name = "\n".join([*(f"{axis}={size}" for axis, size in axes.items()), f"ZeRO {zero}"])
            bars[name] = {"parameters": params, "gradients": adam / 2 if zero >= 2 else params, "Adam": adam}
    figure, panel = _plot(9.0, 4.2)
    below = np.zeros(len(bars))
    for kind, colour in zip(("parameters", "gradients", "Adam"), SHARD_COLOURS, strict=False):
        heights = np.array([bar[kind] for bar in bars.values()])
        panel.bar(range(len(bars)), heights, bottom=below, color=colour, label=kind, width=0.7)
        below += heights
    for place, total in enumerate(below):
        panel.text(place, total + 1.5, f"{total:.0f}", ha="center")
    panel.axhline(80e9 / 2**30, color="black", linestyle="--", linewidth=1, label="a GPU of 80 GB")
    panel.set_xticks(range(len(bars)), list(bars), fontsize=7.5)
    panel.set(ylabel="GiB on each GPU, at rest", title="Llama 7B on 8 GPUs: what each holds before the first row")
    panel.legend()
    figure.savefig(path, dpi=130)


def two_pods(path: Path) -> None:
    """The mesh of the manifest: 16 GPUs on 2 nodes."""
    plot_placement({"data": 2, "stage": 2, "tensor": 4}, 8, path=path, title="Two pods of eight GPUs")


def bloom(path: Path) -> None:
    """BLOOM's 384 GPUs on 48 nodes."""
    plot_placement({"data": 8, "stage": 12, "tensor": 4}, 8, path=path, title="BLOOM-176B")


def architecture(path: Path) -> None:
    """The parts of jaxpar, and which imports which."""
    import imports

    figure, panel = _plot(11.0, 8.0)
    panel.set_axis_off()
    width, height = imports.draw(panel)
    _write(figure, panel, path, (0.0, width), (-0.2, height))


PICTURES: dict[str, Callable[[Path], None]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (
        neuron,
        descent,
        learning_rates,
        fitting,
        replicas,
        server_and_ring,
        timelines,
        weights,
        deepspeed,
        bloom,
        held,
        two_pods,
        resumed,
        architecture,
    )
}
SLOW = ("fitting", "resumed")  # half a minute of training


def draw(name: str, folder: Path) -> Path:
    """Draws one picture; returns its file."""
    path = folder / f"{name}.png"
    PICTURES[name](path)
    with Image.open(path) as image:
        few_colours = image.convert("RGB").quantize(NUM_COLOURS)
    few_colours.save(path, optimize=True)
    return path


def _houses() -> tuple[Any, Any]:
    """The 47 sales, and the line of least squares, which descent ends at."""
    import house_prices
    from least_squares import least_squares

    table = house_prices.read_table(house_prices.Config())
    return table, least_squares(table)


def _plot(width: float, height: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _sheet(width: float, height: float) -> tuple[Any, Any]:
    figure, panel = _plot(width, height)
    panel.set_axis_off()
    panel.set_aspect("equal")
    return figure, panel


def _write(figure: Any, panel: Any, path: Path, x: tuple[float, float], y: tuple[float, float]) -> None:
    panel.set(xlim=x, ylim=y)
    figure.savefig(path, dpi=130)


def _box(panel: Any, corner: Any, size: Any, colour: str, text: str, edge: str = "white") -> None:
    panel.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor=edge, linewidth=1.5))
    panel.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=8)


def _arrow(panel: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    panel.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})


if __name__ == "__main__":
    jaxpar.use_fake_devices(8)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        print(draw(name, FOLDER).relative_to(ROOT))
