"""Products of rows with one of several weights each, for NVIDIA's Hopper GPUs (Pallas, by way of Mosaic), in 16-bit floats.

    multiply    out[i] = rows[i] @ weights[e of i]    a tile of 128 rows has one weight, that of its owner
    contract    rows[of e].T @ ct[of e]               a tile of a weight at a time, the rows of its group in steps

As many blocks as there are multiprocessors go through the tiles of the result, in strips that share what they read. In
``multiply`` a third warpgroup loads the next tiles of rows and weights while two multiply, each half of the columns. The
128 that divide the widths are its smallest tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

gpu: Any = mosaic_gpu  # its types do not say what it has

TILE = 128  # rows
_SWIZZLED = 64  # columns of 16-bit floats that fill a row of swizzled shared memory
_NAME = "grouped_product"  # by which ``inspect/costs.py`` knows the kernels in a compiled program


class Tiles(NamedTuple):
    """How a product is divided.

    Attributes:
        columns: Of a tile of the result.
        depth: Of the products that are added to it at a time.
        steps: Of these, how many are loaded ahead.
        strip: Tiles that are side by side in a strip.
    """

    columns: int
    depth: int
    steps: int
    strip: int


# TFLOP/s measured on one H100 80GB SXM (700 W, jax 0.11.2, bf16): of 8192 rows of Mixtral, 8 weights [4096, 14336], forward and
# by transposed weights; then of 131072 rows of Qwen3-30B, 128 weights [2048, 768]. ``multiply`` waited for less then, without
# `tile_read`; ``contract`` was JAX's, with the same tiles.
WIDE = Tiles(256, 64, 3, 8)  # 633, 608; 564, 577
SMALL = Tiles(256, 64, 3, 2)  # 556, 578; 584, 559
NARROW = Tiles(128, 64, 5, 8)  # 573, 588; 561, 506
OF_WEIGHTS = Tiles(128, 64, 4, 4)  # 523; 504
_SMALL_WEIGHT = 2**21  # elements


def tiles_of(depth: int, width: int, *, transposed: bool) -> Tiles:
    """Returns those of the table that ``multiply`` uses for weights of this depth and width."""
    if width % WIDE.columns:
        return NARROW
    return SMALL if depth * width <= _SMALL_WEIGHT and not transposed else WIDE


def multiply(
    rows: Float[Array, "rows depth"],
    weights: Float[Array, "experts _ _"],
    owner: Int[Array, " tiles"],
    *,
    transposed: bool,
    blocks: int,
    interpret: Any = None,
) -> Float[Array, "rows width"]:
    """Returns each tile of rows times the weight of its owner, or times that transposed, and zeros where it has none.

    Args:
        rows: The rows, in tiles of 128.
        weights: The weights.
        owner: The weight of each tile; the number of weights where there is none.
        transposed: Whether to multiply by transposed weights.
        blocks: As many as the GPU has multiprocessors.
        interpret: Parameters of JAX's interpreter, to run without a GPU.
    """
    experts, *widths = weights.shape
    depth, width = reversed(widths) if transposed else widths
    tiles = tiles_of(depth, width, transposed=transposed)
    num_tiles = len(rows) // TILE, width // tiles.columns
    half = tiles.columns // 2

    def kernel(rows_gmem: Any, weights_gmem: Any, owner_gmem: Any, out_gmem: Any) -> None:
        run = _specialized(tiles, depth, rows.dtype, transposed=transposed)
        first_rows = rows_gmem.at[pl.ds(0, TILE), :]
        first_weight = _columns_of(weights_gmem.at[0], pl.ds(0, tiles.columns), transposed)
        out_form = _swizzled(_SWIZZLED, rows.dtype)

        @partial(
            pl.run_scoped,
            buffers=run(_nothing, _nothing).get_allocations(first_rows, first_weight),
            out_smem=gpu.SMEM((2, 2, TILE, _SWIZZLED), rows.dtype, transforms=out_form),
            tile_read=gpu.Barrier(num_arrivals=2),
            collective_axes="warpgroup",
        )
        def _in_shared_memory(buffers: Any, out_smem: Any, tile_read: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")
            mine = pl.ds(warpgroup * half, half)

            @gpu.nd_loop((num_tiles[0] * num_tiles[1],), collective_axes="block")
            def _each_tile(loop: Any) -> None:
                m, n = gpu.planar_snake(loop.index[0], num_tiles, 0, tiles.strip)
                tile = pl.ds(m * TILE, TILE)
                columns = pl.ds(n * tiles.columns, tiles.columns)
                out = out_gmem.at[tile, columns].at[:, mine]
                write = partial(_write, out, out_smem.at[warpgroup], half)
                expert = owner_gmem[m]

                def add(_: Any, left: Any, right: Any, total: Any) -> Any:
                    if transposed:
                        own = right.at[mine, :].transpose((1, 0))
                    else:
                        own = right.at[:, mine]
                    gpu.wgmma(total, left, own)
                    gpu.wgmma_wait(1)
                    return total

                def compute(run_steps: Callable) -> None:
                    @partial(pl.run_scoped, total=gpu.ACC((TILE, half), jnp.float32))
                    def _with_total(total: Any) -> None:
                        run_steps(total)
                        product = total[...].astype(rows.dtype)
                        gpu.barrier_arrive(tile_read)
                        write(lambda at: product[:, at : at + _SWIZZLED])

                @pl.when(expert < experts)
                def _of_an_owner() -> None:
                    weight = _columns_of(weights_gmem.at[expert], columns, transposed)
                    run(add, compute)(rows_gmem.at[tile, :], weight, allocations=buffers)

                    # The pipeline ends before the last product has been read: the next must not load over its operands.
                    @pl.when(warpgroup == 2)
                    def _loads() -> None:
                        gpu.barrier_wait(tile_read)

                @pl.when((expert >= experts) & (warpgroup < 2))
                def _of_none() -> None:
                    write(lambda _: jnp.zeros((TILE, _SWIZZLED), rows.dtype))

        gpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((len(rows), width), rows.dtype)
    threads = {"num_threads": 3, "thread_name": "warpgroup"}
    return _call(kernel, out, blocks, interpret, **threads)(rows, weights, owner)


def contract(
    rows: Float[Array, "rows in"],
    ct: Float[Array, "rows out"],
    sizes: Int[Array, " experts"],
    *,
    blocks: int,
    interpret: Any = None,
) -> Float[Array, "experts in out"]:
    """Returns for each group its rows, transposed, times their cotangents.

    Args:
        rows: The rows, in the order of their groups.
        ct: The cotangents of their products.
        sizes: The rows of each group, multiples of the depth of a step.
        blocks: As many as the GPU has multiprocessors.
        interpret: Parameters of JAX's interpreter, to run without a GPU.
    """
    tiles = OF_WEIGHTS
    experts, height, width = len(sizes), rows.shape[1], ct.shape[1]
    num_tiles = height // TILE, width // tiles.columns
    form = _swizzled(_SWIZZLED, rows.dtype)
    sizes = sizes.astype(jnp.int32)
    begins = jnp.cumsum(sizes, dtype=jnp.int32) - sizes

    def kernel(
        rows_gmem: Any, ct_gmem: Any, begins_gmem: Any, steps_gmem: Any, out_gmem: Any
    ) -> None:
        @gpu.nd_loop((experts, num_tiles[0] * num_tiles[1]), collective_axes="block")
        def _each_tile(loop: Any) -> None:
            expert = loop.index[0]
            m, n = gpu.planar_snake(loop.index[1], num_tiles, 1, tiles.strip)
            # It may go past the end, which no step reads.
            begin = pl.multiple_of(begins_gmem[expert], tiles.depth)
            group = pl.ds(begin, len(rows))

            def add(_: Any, left: Any, right: Any) -> None:
                gpu.wgmma(total_of_tile[0], left.transpose((1, 0)), right)
                gpu.wgmma_wait(1)

            total_of_tile: list[Any] = []

            def sum_steps(total: Any) -> Array:
                total_of_tile.append(total)
                spec = partial(gpu.BlockSpec, transforms=form, delay_release=1)
                in_specs = [
                    spec((tiles.depth, TILE), lambda k: (k, m)),
                    spec((tiles.depth, tiles.columns), lambda k: (k, n)),
                ]

                @pl.when(steps_gmem[expert] > 0)
                def _of_some() -> None:
                    steps = {"grid": (steps_gmem[expert],), "max_concurrent_steps": tiles.steps}
                    gpu.emit_pipeline(add, in_specs=in_specs, **steps)(
                        rows_gmem.at[group, :], ct_gmem.at[group, :]
                    )

                return total[...]

            total = pl.run_scoped(sum_steps, gpu.ACC((TILE, tiles.columns), jnp.float32))

            out_smem = gpu.SMEM((TILE, tiles.columns), rows.dtype, transforms=form)

            @partial(pl.run_scoped, out_smem=out_smem)
            def _write_tile(out_smem: Any) -> None:
                out_smem[...] = total.astype(rows.dtype)
                gpu.commit_smem()
                tile = pl.ds(m * TILE, TILE)
                columns = pl.ds(n * tiles.columns, tiles.columns)
                gpu.copy_smem_to_gmem(out_smem, out_gmem.at[expert, tile, columns])
                gpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((experts, height, width), rows.dtype)
    return _call(kernel, out, blocks, interpret)(rows, ct, begins, sizes // tiles.depth)


def _specialized(tiles: Tiles, depth: int, dtype: Any, *, transposed: bool) -> Callable[..., Any]:
    """Returns ``(body, compute) -> pipeline`` over the depth of a tile of rows and the columns of a weight."""
    by_depth = _swizzled(tiles.depth, dtype)
    by_columns = _swizzled(_SWIZZLED, dtype)
    spec = partial(gpu.BlockSpec, memory_space=gpu.SMEM, delay_release=1)
    of_rows = spec((TILE, tiles.depth), lambda k: (0, k), transforms=by_depth)
    if transposed:
        of_weight = spec((tiles.columns, tiles.depth), lambda k: (0, k), transforms=by_depth)
    else:
        of_weight = spec((tiles.depth, tiles.columns), lambda k: (k, 0), transforms=by_columns)

    def make(body: Callable, compute: Callable) -> Any:
        return gpu.emit_pipeline_warp_specialized(
            body,
            grid=(depth // tiles.depth,),
            in_specs=[of_rows, of_weight],
            max_concurrent_steps=tiles.steps,
            compute_context=compute,
            wg_axis="warpgroup",
            num_compute_wgs=2,
            memory_registers=40,
        )

    return make


def _write(own: Any, out_smem: Any, width: int, part: Callable[[int], Array]) -> None:
    """Writes the parts of a result by way of two buffers, of which one may still be read when this returns."""
    num_parts = width // _SWIZZLED
    for i in range(num_parts):
        gpu.wait_smem_to_gmem(min(num_parts, 2) - 1, wait_read_only=True)
        begin = i * _SWIZZLED
        buffer = i % 2
        out_smem[buffer] = part(begin)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(out_smem.at[buffer], own.at[:, pl.ds(begin, _SWIZZLED)])


def _columns_of(weight: Any, columns: Any, transposed: bool) -> Any:
    return weight.at[columns, :] if transposed else weight.at[:, columns]


def _swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """Returns the order in shared memory in which rows of a matrix of this width can be multiplied."""
    itemsize = jnp.dtype(dtype).itemsize
    num_bytes = gpu.find_swizzle(width * itemsize * 8)
    tiling = gpu.TilingTransform((8, num_bytes // itemsize))
    return tiling, gpu.SwizzleTransform(num_bytes)


def _nothing(*_: Any, **__: Any) -> None: ...


def _call(
    kernel: Callable[..., None], out: Any, blocks: int, interpret: Any, **threads: Any
) -> Callable[..., Array]:
    semantics = gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Warpgroup)
    if interpret is not None:
        threads["interpret"] = interpret
    return gpu.kernel(
        kernel,
        out_type=out,
        compiler_params=semantics,
        kernel_name=_NAME,
        grid=(blocks,),
        grid_names=("block",),
        **threads,
    )
