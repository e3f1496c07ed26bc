"""Flash attention under a mesh, where ``data`` and ``stage`` are manual and each device has its heads, against without a mesh.

Forward pass alone, and with the gradients of queries, keys and values; on fresh random inputs, and compared with attention in
float32 that XLA compiles.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any

import report

from gpu_day_parts.common import Candidates, Context, off_by

COLUMNS = {
    "run": "",
    "mesh": "",
    "pass": "",
    "ms a call": ".3f",
    "time ratio": ".3f",
    "TFLOP/s a device": ".0f",
}
COLUMNS |= {"off by": ".1e", "temporary GiB": ".2f", "spread": ".1%"}
SIZES = {
    "batch": 4,
    "seq": 4096,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 64,
}  # of a layer of the 1B Llama
TINY = {"batch": 2, "seq": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}
TURN = 10


def measure(context: Context) -> Iterator[report.Table]:
    """Times the kernel with and without a mesh, and plain attention, in turn."""
    import jax

    import jaxpar

    sizes = TINY if context.smoke else SIZES
    one, many = jax.devices()[:1], gcd(len(jax.devices()), sizes["kv_heads"])
    meshes = [jaxpar.make_mesh(devices=one)]
    meshes += [jaxpar.make_mesh(tensor=many, devices=jax.devices()[:many])] if many > 1 else []
    inputs = random_inputs(sizes, jax.random.key(0))
    fused = "xla" if context.smoke else "cudnn"
    rows: list[dict[str, Any]] = []
    notes = ""
    for which in ("forward", "forward and backward"):
        candidates = Candidates(context, turn=1 if context.smoke else TURN)
        whole = which != "forward"
        expected = exact(inputs, whole)
        check = lambda found, expected=expected: {"off by": off_by(found, expected)}
        for name, (kernel, mesh) in kernels(fused, meshes).items():
            on = under(kernel, mesh, whole=whole)
            placed = inputs if mesh is None else on_mesh(inputs, mesh)
            candidates.add(name, on, *placed, check=check)
        notes += candidates.note()
        if candidates.runs:
            rows += rows_of(sizes, which, candidates, kernels(fused, meshes))
            yield report.Table(title(sizes), COLUMNS, rows, "", notes)
    if not rows:
        raise RuntimeError(f"no candidate ran: {notes}")


def title(sizes: dict[str, int]) -> str:
    return "Causal attention in bfloat16, " + ", ".join(
        f"{name} {size}" for name, size in sizes.items()
    )


def kernels(fused: str, meshes: list[Any]) -> dict[str, tuple[Callable, Any]]:
    """Returns attention functions by name, each with the mesh under which it runs; the reference first."""
    import jax

    import jaxpar

    plain = lambda implementation: partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )
    flash = (
        jaxpar.flash_attention
        if fused == "cudnn"
        else partial(jaxpar.flash_attention, kernel=plain(fused))
    )
    found: dict[str, tuple[Callable, Any]] = {"cuDNN, no mesh": (plain(fused), None)}
    found |= {f"jaxpar.flash_attention, {report.mesh_text(mesh)}": (flash, mesh) for mesh in meshes}
    return found | {"XLA, no mesh": (plain("xla"), None)}


def random_inputs(sizes: dict[str, int], key: Any) -> tuple[Any, ...]:
    """Returns queries, keys, values, and the cotangent of the result."""
    import jax
    import jax.numpy as jnp

    shape = lambda heads: (sizes["batch"], sizes["seq"], sizes[heads], sizes["head_dim"])
    shapes = [shape("heads"), shape("kv_heads"), shape("kv_heads"), shape("heads")]
    keys = jax.random.split(key, len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )


def under(kernel: Callable, mesh: Any, *, whole: bool) -> Callable:
    """Returns ``(q, k, v, ct) -> mixed``, or the gradients of q, k and v; under a mesh as ``value_and_grad`` runs a layer."""
    import jax
    from jax.sharding import PartitionSpec

    from jaxpar.mesh import DATA
    from jaxpar.shard_map import manual_over_data_and_stage

    def run(q: Any, k: Any, v: Any, ct: Any) -> Any:
        mixed, vjp = jax.vjp(lambda q, k, v: kernel(q, k, v, None), q, k, v)
        return vjp(ct) if whole else mixed

    rows = PartitionSpec(DATA)
    return (
        run
        if mesh is None
        else manual_over_data_and_stage(run, mesh, in_specs=rows, out_specs=rows)
    )


def on_mesh(inputs: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
    """Returns the inputs with heads sharded over ``tensor``."""
    import jaxpar

    return jaxpar.shard(inputs, (mesh_heads(mesh),) * len(inputs))


def mesh_heads(mesh: Any) -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpar.mesh import DATA, TENSOR

    return NamedSharding(mesh, PartitionSpec(DATA, None, TENSOR))


def exact(inputs: tuple[Any, ...], whole: bool) -> Any:
    """Returns attention, or its gradients, in float32, computed row by row, since its scores are large; on the host."""
    import jax
    import jax.numpy as jnp

    kernel = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    one_row = jax.jit(under(kernel, None, whole=whole))
    wide = [a.astype(jnp.float32) for a in inputs]
    with jax.default_matmul_precision("highest"):
        rows = [jax.device_get(one_row(*(a[i : i + 1] for a in wide))) for i in range(len(wide[0]))]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)


def flops(sizes: dict[str, int], whole: bool) -> int:
    """Operations of the products of causal attention, half of the scores: two forward, five more backward."""
    return (
        (14 if whole else 4)
        * sizes["batch"]
        * sizes["heads"]
        * sizes["seq"] ** 2
        * sizes["head_dim"]
        // 2
    )


def rows_of(
    sizes: dict[str, int], which: str, candidates: Candidates, kernels: dict
) -> list[dict[str, Any]]:
    rows = []
    for name, timed in candidates.timed("cuDNN, no mesh").items():
        seconds, mesh = timed.wall_seconds / candidates.turn, kernels[name][1]
        count = 1 if mesh is None else mesh.size
        facts = candidates.facts[name]
        cells = (
            name.partition(",")[0],
            "none" if mesh is None else report.mesh_text(mesh),
            which,
            seconds * 1e3,
            timed.wall_ratio,
            flops(sizes, which != "forward") / seconds / count / 1e12,
            facts["off by"],
            facts["temporary GiB"],
            timed.wall_spread,
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    return rows
