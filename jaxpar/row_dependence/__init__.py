"""How what travels between layers depends on the rows of a batch, which are split into microbatches and replicas.

`kinds.py` has the kinds of dependence: none, row by row, a sum over rows, another. `reader.py` finds them in jaxprs, and
`leaves_of_x.py` refuses leaves of `x` without rows, such as means over the rows, by which the loss would depend on the split.
"""

from jaxpar.row_dependence.leaves_of_x import check_leaves_of_x

__all__ = ["check_leaves_of_x"]
