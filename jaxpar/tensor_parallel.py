"""All of tensor parallelism: how a weight is cut over the ``tensor`` axis. XLA adds the collectives that the cuts need.

A weight W [in, out] on tensor=2, and what each device computes of y = x W:

    column_parallel           row_parallel
      in |W0|W1|                in |W0  |      x = [x0 x1]
         |  |  |                   |----|
         |  |  |                   |W1  |
      y = [x W0, x W1]          y = x0 W0 + x1 W1       one all-reduce
      each has half of y        each has all of y

A column-parallel weight followed by a row-parallel one, as in a transformer's attention and MLP, hands its half of y on as
the half of x that the second needs: one all-reduce forward and one backward for the pair (Shoeybi et al. 2019, arXiv
1909.08053, section 3).
"""

from jax.sharding import PartitionSpec

from jaxpar.mesh import TENSOR


def column_parallel(*, ndim: int = 2) -> PartitionSpec:
    """Returns the spec of a weight ``[in, out]`` split by column: its last dim, out, lies over ``tensor``.

    Args:
        ndim: Number of dims of the weight; 1 is the bias ``[out]`` of a column-parallel weight.
    """
    return PartitionSpec(*(None,) * (_checked(ndim) - 1), TENSOR)


def row_parallel(*, ndim: int = 2) -> PartitionSpec:
    """Returns the spec of a weight ``[in, out]`` split by row: its first dim, in, lies over ``tensor``.

    The bias ``[out]`` of a row-parallel weight is added after the sum, so it is replicated.

    Args:
        ndim: Number of dims of the weight.
    """
    return PartitionSpec(TENSOR, *(None,) * (_checked(ndim) - 1))


def vocab_parallel(*, vocab_dim: int = 0) -> PartitionSpec:
    """Returns the spec of an embedding ``[vocab, embed]`` split over its vocabulary.

    Args:
        vocab_dim: 0 for an embedding ``[vocab, embed]``, 1 for an output projection ``[embed, vocab]``.
    """
    if vocab_dim not in (0, 1):
        raise ValueError(f"vocab_dim must be 0 or 1; got {vocab_dim}. Use 0 for [vocab, embed], 1 for [embed, vocab].")
    return column_parallel() if vocab_dim else row_parallel()


def _checked(ndim: int) -> int:
    if ndim < 1:
        raise ValueError(
            f"a split weight must have at least one dim; got ndim={ndim}. Use jaxpar.replicated() for scalars."
        )
    return ndim
