"""Draws the guide's diagrams that are boxes and arrows, whose numbers come from programs: for pictures.py."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon, Rectangle

import jaxpar
from jaxpar import fp8 as products
from jaxpar.models.quantized import NF4, dense, quantize_weight

SHARD_COLOURS = ("#5b92d0", "#f2b45c", "#8fca8b", "#bfaede")
INK, WHOLE = "0.25", "0.82"


def neuron(path: Path) -> None:
    """A neuron with the weights that house_prices.py learns."""
    table, best = houses()
    weights, values = best.weights, np.array([1650.0, 3.0])
    figure, panel = _sheet(8.0, 3.0)
    for y, name, value, weight in zip(
        (1.55, 0.45), ("area", "bedrooms"), values, weights, strict=True
    ):
        panel.add_patch(Circle((0.6, y), 0.45, color=SHARD_COLOURS[0]))
        panel.text(0.6, y, f"{name}\n{value:,.0f}", ha="center", va="center")
        _arrow(panel, (1.07, y), (3.52, 1.0 + 0.18 * np.sign(y - 1)))
        side = np.sign(y - 1)
        times = f"× {weight:,.2f}"  # noqa: RUF001
        panel.text(
            2.4,
            1 + (y - 1) * 0.6 + 0.12 * side,
            times,
            ha="center",
            va="bottom" if side > 0 else "top",
        )
    panel.add_patch(Circle((4.0, 1.0), 0.5, color=SHARD_COLOURS[1]))
    panel.text(4.0, 1.0, f"add up,\n+ {best.intercept:,.0f}", ha="center", va="center")
    _arrow(panel, (4.52, 1.0), (6.0, 1.0))
    panel.text(
        6.1, 1.0, f"price\n{best(values):,.0f} USD", ha="left", va="center", fontweight="bold"
    )
    panel.text(4.0, 0.25, "bias", ha="center", color=INK)
    panel.text(2.4, 1.85, "weights", ha="center", color=INK)
    panel.text(0.6, 2.1, "inputs", ha="center", color=INK)
    write(figure, panel, path, (-0.1, 7.4), (-0.1, 2.3))
    assert table.names == ("area_ft2", "bedrooms")


def replicas(path: Path) -> None:
    """A batch cut into rows by shard_batch, and what the replicas then send one another."""
    devices, rows = 4, 16
    mesh = jaxpar.make_mesh(data=devices)
    batch = jaxpar.shard_batch(np.arange(rows), mesh)
    figure, panel = _sheet(8.0, 5.0)
    panel.text(0.4, 4.3, "the batch,\ncut by rows", ha="center", color=INK)
    panel.text(
        2.9,
        4.3,
        "each replica: the whole model,\nits own rows, its own gradients",
        ha="center",
        color=INK,
    )
    panel.text(
        6.6,
        4.3,
        "after the all-reduce: the same\nsum, the same step, everywhere",
        ha="center",
        color=INK,
    )
    for shard in batch.addressable_shards:
        i, y, colour = shard.device.id, 3.3 - shard.device.id, SHARD_COLOURS[shard.device.id]
        first, last = shard.data[0], shard.data[-1]
        _box(panel, (0, y), (0.8, 0.7), colour, f"rows\n{first}-{last}")
        _arrow(panel, (0.85, y + 0.35), (1.75, y + 0.35))
        _box(
            panel,
            (1.8, y),
            (2.2, 0.7),
            "white",
            f"replica {i}: weights w\ngradients of rows {first}-{last}",
            colour,
        )
        _arrow(panel, (4.05, y + 0.35), (4.45, y + 0.35))
        _arrow(panel, (5.0, y + 0.35), (5.45, y + 0.35))
        step = f"replica {i}: w - rate ×\ngradients of rows 0-{rows - 1}"  # noqa: RUF001
        _box(panel, (5.5, y), (2.2, 0.7), "white", step, colour)
    _box(panel, (4.5, 0.3), (0.45, 3.7), "0.9", "")
    panel.text(4.725, 2.15, "all-reduce", rotation=90, ha="center", va="center")
    write(figure, panel, path, (-0.1, 7.8), (0.1, 4.95))


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
        step = jax.jit(
            jax.shard_map(way, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        )
        report = jaxpar.inspect_step(step, jax.ShapeDtypeStruct((devices, length), np.float32))
        links = link_bytes(report.collectives, devices)
        lines = line_bytes(links)
        for (sender, receiver), num_bytes in links.items():
            ends = places[sender], places[receiver]
            width = {"shrinkA": 15, "shrinkB": 15, "linewidth": 1.5 * num_bytes / (4 * length)}
            panel.annotate(
                "", ends[1], ends[0], arrowprops={"arrowstyle": "-|>", "color": INK, **width}
            )
        for device, place in enumerate(places):
            most = lines[device] == max(lines.values())
            panel.add_patch(Circle(place, 0.2, color=SHARD_COLOURS[1 if most else 0], zorder=3))
            panel.text(*place, str(device), ha="center", va="center", zorder=4)
            panel.text(
                *(1.36 * place),
                f"{lines[device] / (4 * length):.3g} G",
                ha="center",
                va="center",
                color=INK,
            )
        panel.set(xlim=(-2, 2), ylim=(-2, 2), aspect="equal", title=f"{name}, {devices} GPUs")
        panel.set_axis_off()
    figure.supxlabel(
        "through each GPU's line, in and out together; G: the bytes of the gradients", fontsize=10
    )
    figure.savefig(path, dpi=130)


def weights(path: Path) -> None:
    """A pair of hidden layers as each --split of digits.py places it on tensor=2: who holds what, and what is sent forward."""
    import digits

    mesh = jaxpar.make_mesh(tensor=2)
    table = digits.mlp.param_table(64, 10, width=64, num_hidden=2)
    shapes = digits.abstract_params(table)
    figure, panel = plot(8.0, 6.4)
    panel.set_axis_off()
    for row, split in enumerate(("column", "row", "mixed")):
        placed = jaxpar.shardings_from_paths(shapes, mesh, digits.SPLITS[split])["layers"]
        x, y = 1.55, -2.9 * row
        panel.text(0.0, y + 1.0, f"--split\n{split}", va="center", fontweight="bold", fontsize=12)
        _vector(panel, (x, y), "x", is_whole=True)
        for name in ("w_up", "w_down"):
            _weight(panel, (x + 0.4, y), name, placed[name], shapes["layers"][name].shape)
            by_column = placed[name].spec[2] is not None
            following = placed["w_down"].spec if name == "w_up" else placed["w_up"].spec
            stays_split = by_column and following[1] is not None
            sent = "" if stays_split else "all-gather" if by_column else "all-reduce"
            _arrow(panel, (x + 1.72, y + 0.85), (x + 2.68, y + 0.85))
            text, colour = sent or "nothing\nsent", "#2e7d32" if sent else INK
            panel.text(
                x + 2.2, y + 1.0, text, ha="center", va="bottom", fontsize=10.5, color=colour
            )
            x += 2.8
            _vector(panel, (x, y), "h" if name == "w_up" else "y", is_whole=not stays_split)
    panel.text(2.55, 2.08, "outputs", ha="center", va="bottom", color=INK, fontsize=10)
    panel.text(1.42, 1.0, "inputs", rotation=90, va="center", ha="center", color=INK, fontsize=10)
    below = -7.0
    for at, colour, text in (
        (1.55, SHARD_COLOURS[0], "on GPU 0"),
        (3.75, SHARD_COLOURS[1], "on GPU 1"),
        (5.95, WHOLE, "on both"),
    ):
        panel.add_patch(Rectangle((at, below), 0.25, 0.3, facecolor=colour))
        panel.text(at + 0.35, below + 0.14, text, va="center", fontsize=11)
    write(figure, panel, path, (-0.05, 7.6), (below - 0.1, 2.55))


def fp8(path: Path) -> None:
    """The values of a gradient among the numbers that a byte holds, before they are divided by their scale and after."""
    gradient = 1e-6 * np.random.default_rng(0).normal(size=100_000)
    dtype = products.OF_COTANGENTS
    units, scale = products.to_bytes(jnp.asarray(gradient, jnp.float32), dtype)
    least, most = float(jnp.finfo(dtype).smallest_subnormal), float(jnp.finfo(dtype).max)
    assert float(np.abs(np.float32(units)).max()) == most
    figure, panel = plot(8.0, 3.6)
    panel.axvspan(least, most, color=SHARD_COLOURS[2], alpha=0.35, linewidth=0)
    bins = np.geomspace(1e-12, 1e7, 160)
    for values, colour, name in (
        (gradient, SHARD_COLOURS[1], "gradients"),
        (gradient / float(scale), SHARD_COLOURS[0], "gradients / scale"),
    ):
        counts, _ = np.histogram(np.abs(values), bins)
        panel.fill_between(
            bins[:-1], counts / counts.max(), color=colour, step="post", label=name, alpha=0.9
        )
    panel.text(
        np.sqrt(least * most),
        1.08,
        f"a byte (e5m2): {least:.1e} to {most:,.0f}",
        ha="center",
        color=INK,
    )
    panel.text(1e-9, 1.08, "becomes 0", ha="center", color=INK)
    panel.set(xscale="log", xlim=(1e-12, 1e7), ylim=(0, 1.22), yticks=[])
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.legend(loc="center left", frameon=False)
    figure.savefig(path, dpi=130)


def four_bits(path: Path) -> None:
    """Two weights of a block among the numbers of NF4, and the byte and the scale that are stored of them."""
    block = 0.02 * np.random.default_rng(3).normal(size=64)
    stored = quantize_weight(np.float32(block)[:, None], "nf4", 1, 0, "w")
    scale, byte = float(stored.scales[0, 0]), int(stored.codes[0, 0])
    decoded = np.asarray(dense(stored))[:, 0]
    codes, colours = (byte >> 4, byte & 15), SHARD_COLOURS[:2]
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    line, below = figure.subplots(2, 1, height_ratios=(1.35, 1))
    counts, ends = np.histogram(block / scale, np.linspace(-1, 1, 17))
    line.bar(
        ends[:-1],
        counts / counts.max(),
        width=np.diff(ends),
        align="edge",
        color=WHOLE,
        linewidth=0,
    )
    for code, number in enumerate(NF4):
        own = [colour for colour, each in zip(colours, codes, strict=True) if each == code]
        line.plot(
            [number] * 2, [0, 1.12], color=own[0] if own else "0.55", linewidth=3 if own else 1
        )
        line.text(
            number, 1.17, code, ha="center", fontsize=9, fontweight="bold" if own else "normal"
        )
    for weight, code, colour in zip(block, codes, colours, strict=False):
        to_code = {"arrowstyle": "->", "color": INK, "shrinkA": 5, "shrinkB": 0}
        line.annotate("", (NF4[code], 0.5), (weight / scale, 0.5), arrowprops=to_code)
        line.plot(weight / scale, 0.5, "o", color=colour, markeredgecolor=INK, markersize=9)
    line.set(xlim=(-1.06, 1.06), ylim=(0, 1.4), yticks=[], xlabel="weights / scale")
    line.spines[["top", "right", "left"]].set_visible(False)

    below.set_axis_off()
    below.set_aspect("equal")
    for place, bit in enumerate(f"{byte:08b}"):
        _box(below, (0.55 * place, 0.6), (0.55, 0.6), colours[place // 4], bit)
    below.text(2.2, 1.4, "a byte", ha="center", color=INK)
    _box(below, (5.3, 0.6), (2.2, 0.6), SHARD_COLOURS[2], f"{scale:.4f}")
    below.text(6.4, 1.4, "the scale of 64 weights", ha="center", color=INK)
    for at, code, value in zip((1.1, 3.3), codes, decoded, strict=False):
        below.text(at, 0.32, code, ha="center", va="center", fontweight="bold")
        product = f"{NF4[code]:.3f} × {scale:.4f} = {value:.4f}"  # noqa: RUF001
        below.text(at, 0.0, product, ha="center", va="center", fontsize=8.5)
    write(figure, below, path, (-0.1, 8.0), (-0.2, 1.7))


def experts(path: Path) -> None:
    """Four tokens, the two of four experts that each uses, and the sums of what these give; two experts on each GPU."""
    chosen, tokens = ((1, 2), (0, 3), (1, 0), (1, 3)), range(4)
    figure, panel = _sheet(8.0, 4.4)
    for at, title in ((0.6, "inputs"), (4.0, "experts"), (7.4, "outputs")):
        panel.text(at, 4.35, title, ha="center", color=INK)
    for i in tokens:
        y = 3.25 - i
        _box(panel, (0.1, y), (1.0, 0.6), SHARD_COLOURS[i], f"t{i}")
        _box(panel, (6.9, y), (1.0, 0.6), SHARD_COLOURS[i], "by weight,\nadded up")
        users = [token for token in tokens if i in chosen[token]]
        gpu = i // 2
        _box(panel, (3.3, y), (1.4, 0.6), "white", f"E{i}", "0.55" if gpu else "0.25")
        panel.text(
            4.0, y - 0.15, f"on GPU {gpu}", ha="center", va="center", fontsize=7.5, color=INK
        )
        for token in users:
            for start, end in (
                ((1.15, 3.55 - token), (3.25, y + 0.3)),
                ((4.75, y + 0.3), (6.85, 3.55 - token)),
            ):
                panel.annotate(
                    "",
                    end,
                    start,
                    arrowprops={"arrowstyle": "->", "color": SHARD_COLOURS[token], "lw": 1.8},
                )
    write(figure, panel, path, (0.0, 8.0), (-0.1, 4.6))


def context(path: Path) -> None:
    """Which chunks of a row each of four devices has by shard_batch, and for which pairs of positions it computes attention."""
    devices, chunks = 4, 8
    mesh = jaxpar.make_mesh(context=devices)
    row = jaxpar.shard_batch({"chunk": np.arange(chunks)[None]}, mesh)["chunk"]
    held = {shard.device.id: shard.data[0].tolist() for shard in row.addressable_shards}
    owner = {chunk: device for device, own in held.items() for chunk in own}
    figure, panel = _sheet(8.0, 4.6)
    panel.text(2.0, 4.5, f"a row, cut into {chunks} chunks", ha="center", color=INK)
    for chunk in range(chunks):
        _box(panel, (0.5 * chunk, 3.95), (0.45, 0.4), SHARD_COLOURS[owner[chunk]], str(chunk))
    for device, own in held.items():
        y = 2.9 - 0.8 * device
        panel.text(0.0, y + 0.2, f"device {device}", va="center", fontsize=9.5)
        for at, chunk in enumerate(own):
            _box(panel, (1.0 + 0.5 * at, y), (0.45, 0.4), SHARD_COLOURS[device], str(chunk))
        _arrow(panel, (2.0, y + 0.2), (2.6, y + 0.2))
        _arrow(panel, (3.1, y + 0.2), (3.9, y + 0.2))
    _box(panel, (2.65, 0.35), (0.4, 3.1), "0.9", "")
    panel.text(2.85, 1.9, "all-gather of K, V", rotation=90, ha="center", va="center")
    side, corner = 0.42, (4.5, 0.35)
    panel.text(
        corner[0] + 4 * side,
        4.5,
        "each device: its own queries,\nall keys up to them, equal areas",
        ha="center",
        va="top",
    )
    for query in range(chunks):
        y = corner[1] + side * (chunks - 1 - query)
        for key in range(query + 1):
            x = corner[0] + side * key
            whole = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
            corners = whole if key < query else [whole[0], whole[1], whole[3]]
            panel.add_patch(
                Polygon(corners, facecolor=SHARD_COLOURS[owner[query]], edgecolor="white")
            )
        panel.text(corner[0] - 0.12, y + side / 2, str(query), ha="right", va="center", fontsize=9)
        panel.text(
            corner[0] + side * (query + 0.5),
            corner[1] - 0.08,
            str(query),
            ha="center",
            va="top",
            fontsize=9,
        )
    panel.text(corner[0] + 4 * side, -0.1, "keys", ha="center", va="top", color=INK, fontsize=9.5)
    panel.text(
        corner[0] - 0.4,
        corner[1] + 4 * side,
        "queries",
        rotation=90,
        ha="center",
        va="center",
        color=INK,
        fontsize=9.5,
    )
    write(figure, panel, path, (-0.1, 8.0), (-0.45, 4.8))


def _vector(panel: Any, corner: tuple[float, float], name: str, *, is_whole: bool) -> None:
    """Draws a vector that both GPUs hold, or half of it on each."""
    x, y = corner
    parts = (
        [(0.0, 2.0, WHOLE)]
        if is_whole
        else [(1.0, 1.0, SHARD_COLOURS[0]), (0.0, 1.0, SHARD_COLOURS[1])]
    )
    for above, height, colour in parts:
        _box(panel, (x, y + above), (0.2, height), colour, "")
    panel.text(x + 0.1, y - 0.12, name, ha="center", va="top", color=INK, fontsize=11)


def _weight(
    panel: Any, corner: tuple[float, float], name: str, sharding: Any, shape: tuple[int, ...]
) -> None:
    """Draws the parts of a weight [inputs, outputs] on each GPU."""
    (x, y), width = corner, 1.2
    for device, (_, ins, outs) in sharding.devices_indices_map(shape).items():
        top, bottom, _ = ins.indices(shape[1])
        left, right, _ = outs.indices(shape[2])
        size = width * (right - left) / shape[2], 2.0 * (bottom - top) / shape[1]
        at = x + width * left / shape[2], y + 2.0 * (1 - bottom / shape[1])
        _box(panel, at, size, SHARD_COLOURS[device.id], "")
    panel.text(x + width / 2, y - 0.12, name, ha="center", va="top", color=INK, fontsize=11)


def houses() -> tuple[Any, Any]:
    """The 47 sales, and the line of least squares, which descent ends at."""
    import house_prices
    from house_prices_least_squares import least_squares, read_table

    table = read_table(house_prices.HOUSES, ("area_ft2", "bedrooms"), "price_usd")
    return table, least_squares(table)


def plot(width: float, height: float) -> tuple[Any, Any]:
    """Returns a figure of a size in inches, and its panel."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _sheet(width: float, height: float) -> tuple[Any, Any]:
    figure, panel = plot(width, height)
    panel.set_axis_off()
    panel.set_aspect("equal")
    return figure, panel


def write(
    figure: Any, panel: Any, path: Path, x: tuple[float, float], y: tuple[float, float]
) -> None:
    """Writes a figure that shows a part of its panel."""
    panel.set(xlim=x, ylim=y)
    figure.savefig(path, dpi=130)


def _box(panel: Any, corner: Any, size: Any, colour: str, text: str, edge: str = "white") -> None:
    panel.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor=edge, linewidth=1.5))
    panel.text(
        corner[0] + size[0] / 2,
        corner[1] + size[1] / 2,
        text,
        ha="center",
        va="center",
        fontsize=9.5,
    )


def _arrow(panel: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    panel.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK})
