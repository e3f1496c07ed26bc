"""How what travels between layers depends on the rows of a batch, which are split into microbatches and replicas.

`kinds.py` has the kinds of dependence: none, row by row, a sum over rows, another. `reader.py` finds them in jaxprs, and
`leaves_of_x.py` refuses leaves of `x` without rows, such as means over the rows, by which the loss would depend on the split.
`sums_of_loss.py` refuses a loss that returns what is not a sum over rows.
"""

from jaxpar.row_dependence.leaves_of_x import check_leaves_of_x
from jaxpar.row_dependence.sums_of_loss import check_sums_of_loss

__all__ = ["check_leaves_of_x", "check_sums_of_loss"]
