"""The seconds of kernels on a device, from the shapes of matrix products and the bytes of everything else.

A product is computed in tiles, of which each multiprocessor computes one at a time:

    waves    ceil(tiles / multiprocessors), so that the last wave may leave most of them idle
    a wave   2 * tile rows * tile columns * (depth + FILL) operations; FILL is spent on filling the pipeline and on the result

The fastest of the usual tiles is taken, also with the depth divided over several multiprocessors. A product takes at least as
long as its bytes take to read and write (roofline: Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785), and
each kernel has a cost of launching. NVIDIA's "Matrix Multiplication Background User's Guide" describes tiles and waves.
"""

from functools import lru_cache

from jaxpar.planner.cluster import Cluster
from jaxpar.planner.kernels import Kernels, Product
from jaxpar.planner.software import JAXPAR, Software

# Rows and columns of a tile, and its share of the rate of the largest.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
_PARTS = (1, 2, 4, 8)
FILL = 256


# Bytes that kernels of single operations read and write, relative to those of fused chains: calibrated on the published steps
# of `docs/plan.md`.
UNFUSED = 2.5
# Scores in 16 bits, with a kernel for scale, mask and softmax and one for dropout, which together read and write 20 bytes a
# score forward and backward; XLA's, in float32, 34.
FUSED_SOFTMAX = 20 / 34


def seconds_of(kernels: Kernels, cluster: Cluster, tensor: int = 1, software: Software = JAXPAR) -> float:
    """Returns the seconds of the kernels of an op.

    Args:
        kernels: The kernels.
        cluster: The machines.
        tensor: Size of the ``tensor`` axis.
        software: What runs them.
    """
    of_scores = kernels.score_bytes * (FUSED_SOFTMAX if software.fused_softmax else 1.0)
    others = kernels.num_bytes - kernels.score_bytes
    others -= kernels.replicated_bytes * (tensor - 1) / tensor if software.sequence_parallel else 0
    num_bytes = of_scores + others * (1.0 if software.fused else UNFUSED)
    forward, backward = kernels.attention
    # Backward recomputes the scores: five products for the four that count.
    attention = (forward + 1.25 * backward) / (cluster.attention_share * cluster.peak_flops)
    launches = kernels.num_others + bool(forward) + bool(backward)
    products = sum(count * product_seconds(each, cluster, software.product_rate) for each, count in kernels.products)
    return (
        products
        + max(attention, kernels.attention_bytes / memory_rate(cluster))
        + num_bytes / memory_rate(cluster)
        + launches * cluster.launch_seconds
    )


def memory_rate(cluster: Cluster) -> float:
    """Returns the bytes a second that kernels read and write."""
    return cluster.memory_bandwidth * cluster.memory_share


@lru_cache(maxsize=65536)
def product_seconds(product: Product, cluster: Cluster, product_rate: float = 1.0) -> float:
    """Returns the seconds of a matrix product."""
    rate = cluster.peak_flops * cluster.product_share * product_rate
    arithmetic = min(_tiled(product, cluster, *tile) for tile in _TILES) / rate
    return max(arithmetic, product.num_bytes / memory_rate(cluster)) + cluster.launch_seconds


def _tiled(product: Product, cluster: Cluster, rows: int, columns: int, share: float) -> float:
    """Returns the operations that all multiprocessors together could do in the time of the product, with tiles of one size."""
    tiles = product.batch * -(-product.rows // rows) * -(-product.columns // columns)
    at_once = cluster.multiprocessors * (256 * 128 // (rows * columns))  # smaller tiles share a multiprocessor
    of_one_wave = 2 * rows * columns * at_once / share
    return min(-(-tiles * parts // at_once) * of_one_wave * (product.depth / parts + FILL) for parts in _PARTS)
