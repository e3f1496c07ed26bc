"""The seconds of kernels on one device.

A product is computed in tiles, of which each multiprocessor computes one at a time:

    waves    ceil(tiles / multiprocessors), so that the last wave may leave most of them idle
    a wave   2 * tile rows * tile columns * (depth + FILL) operations; FILL is spent on filling the pipeline and on the result

The fastest of the usual tiles is taken, also with the depth divided over several multiprocessors. A product takes at least as
long as its bytes take to read and write (roofline: Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785), and
each kernel has a cost of launching. NVIDIA's "Matrix Multiplication Background User's Guide" describes tiles and waves.
"""

from functools import lru_cache

from jaxpar.planner.cluster import Cluster, Measured
from jaxpar.planner.job import JAXPAR, Software
from jaxpar.planner.kernels import Kernels, Product

# Rows and columns of a tile, and its share of the rate of the largest.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
_PARTS = (1, 2, 4, 8)
FILL = 256
# Bytes that kernels of single operations read and write, relative to those of fused chains: calibrated on the steps of
# `docs/published.md`.
UNFUSED = 2.5
# Scores in 16 bits, with a kernel for scale, mask and softmax and one for dropout, which together read and write 20 bytes a
# score forward and backward; XLA's, in float32, 34.
FUSED_SOFTMAX = 20 / 34


def seconds_of(
    kernels: Kernels,
    cluster: Cluster,
    tensor: int = 1,
    software: Software = JAXPAR,
    own_share: float = 1.0,
) -> float:
    """Returns the seconds of the kernels of an op.

    Args:
        kernels: The kernels.
        cluster: The machines.
        tensor: Size of the ``tensor`` axis.
        software: What runs them.
        own_share: The share of the slots for rows of experts that a device's own experts fill.
    """
    measured = cluster.measured if software.measured_kernels else None
    rate = software.product_rate
    if measured is not None:
        rate *= measured.product_share / cluster.product_share
    num_bytes = _bytes_of_chains(kernels, tensor, software, measured)
    return (
        _of_products(kernels, cluster, measured, rate)
        + _of_experts(kernels, cluster, software, own_share, rate)
        + _of_attention(kernels, cluster, measured)
        + num_bytes / memory_rate(cluster)
        + kernels.num_others * cluster.launch_seconds
    )


def _bytes_of_chains(
    kernels: Kernels,
    tensor: int,
    software: Software,
    measured: Measured | None,
) -> float:
    """Returns the bytes that kernels which are no products read and write, as many as fused ones do in that time."""
    of_scores = kernels.score_bytes * (FUSED_SOFTMAX if software.fused_softmax else 1.0)
    others = kernels.num_bytes - kernels.score_bytes
    if software.sequence_parallel:
        others -= kernels.replicated_bytes * (tensor - 1) / tensor
    factor = 1.0 if measured is None else measured.chain_bytes
    return of_scores + others * (factor if software.fused else UNFUSED)


def _of_products(
    kernels: Kernels,
    cluster: Cluster,
    measured: Measured | None,
    rate: float,
) -> float:
    """Returns the seconds of matrix products."""
    in_fp8 = cluster.fp8_rate if measured is None else measured.fp8_rate
    seconds = []
    for product, count in kernels.products:
        its_rate = rate * in_fp8 if product.in_fp8 else rate
        seconds.append(count * product_seconds(product, cluster, its_rate))
    return sum(seconds)


def _of_experts(
    kernels: Kernels,
    cluster: Cluster,
    software: Software,
    own_share: float,
    rate: float,
) -> float:
    """Returns the seconds of products of rows with the weights of their experts."""
    measured = cluster.measured if software.measured_kernels else None
    of_rows, of_weights = measured.grouped_shares if measured else (1.0, 1.0)
    seconds = 0.0
    for each in kernels.grouped:
        product = Product(*each.as_batch(software.expert_imbalance, own_share))
        its_rate = rate * (of_weights if each.is_gradient else of_rows)
        seconds += product_seconds(product, cluster, its_rate)
    return seconds


def _of_attention(kernels: Kernels, cluster: Cluster, measured: Measured | None) -> float:
    """Returns the seconds of fused attention."""
    forward, backward = kernels.attention
    if measured is None:
        shares = cluster.attention_share, cluster.attention_share
    else:
        shares = measured.attention(kernels.head_dim)
    # Backward recomputes the scores: five products for the four that count.
    arithmetic = (forward / shares[0] + 1.25 * backward / shares[1]) / cluster.peak_flops
    in_memory = kernels.attention_bytes / memory_rate(cluster)
    launches = bool(forward) + bool(backward)
    return max(arithmetic, in_memory) + launches * cluster.launch_seconds


def memory_rate(cluster: Cluster) -> float:
    """Returns the bytes per second that kernels read and write."""
    return cluster.memory_bandwidth * cluster.memory_share


@lru_cache(maxsize=65536)
def product_seconds(product: Product, cluster: Cluster, product_rate: float = 1.0) -> float:
    """Returns the seconds of a matrix product."""
    rate = cluster.peak_flops * cluster.product_share * product_rate
    arithmetic = min(_tiled(product, cluster, *tile) for tile in _TILES) / rate
    in_memory = product.num_bytes / memory_rate(cluster)
    return max(arithmetic, in_memory) + cluster.launch_seconds


def _tiled(product: Product, cluster: Cluster, rows: int, columns: int, share: float) -> float:
    """Returns the operations that all multiprocessors together could do in the time of the product, with tiles of one size."""
    tiles = product.batch * -(-product.rows // rows) * -(-product.columns // columns)
    # Smaller tiles share a multiprocessor.
    at_once = cluster.multiprocessors * (256 * 128 // (rows * columns))
    of_one_wave = 2 * rows * columns * at_once / share

    def in_parts(parts: int) -> float:
        waves = -(-tiles * parts // at_once)
        return waves * of_one_wave * (product.depth / parts + FILL)

    return min(map(in_parts, _PARTS))
