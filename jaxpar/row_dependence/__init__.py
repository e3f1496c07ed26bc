"""Whether a function treats each row of a batch on its own, and a loss is a sum over rows: proved from its jaxprs.

A function is traced for two numbers of rows, and the two jaxprs are read side by side. A dim that differs holds rows, and a
literal that differs contains the number of rows:

    a:f32[8,2]          a:f32[32,2]          ROWS    along the dim that differs; each row depends on the same row alone
    b = reduce_sum a    b = reduce_sum a     SUM     over rows
    c = div b 8.0       c = div b 32.0       SUM     whose growth is 8 / 32, the ratio of the factors beside it: a mean
    d = sub a c         d = sub a c          MIXED   each row depends on all

A value that does not depend on rows is FREE; its growth is 1, or of one that counts rows their ratio. What an operation
without a rule makes, and one on integers that orders or counts rows, may be right: it is taken to have rows where its size
says so, and the doubt goes along with it.

- `values.py`: how a value depends on the rows: its kind, its growth, where it has rows.
- `operation.py`: an operation in both jaxprs, and the results that rules have in common.
- `rules.py`: the tables, of which rule is that of which operation.
- `elements.py`: the rules of operations on each element: sums, products, choices.
- `dims.py`: the rules of operations that reduce dims, move them, or put elements in another order.
- `parts.py`: the rules of operations that take parts of rows, or join them.
- `products.py`: the rules of products of matrices, convolutions and attention.
- `indices.py`: the rules of reads and writes at indices.
- `collectives.py`: the rules of collectives over a mesh axis that splits the rows.
- `copies.py`: the dims along which a value that depends on no row is one element, copied.
- `expressions.py`: which variables are computed in the same way.
- `trips.py`: what the trips of loops make of values.
- `places.py`: what makes values that depend on no row depend on their places.
- `constants.py`: arrays and numbers that are written in a function.
- `reader.py`: reads jaxprs: calls, branches and loops.
- `gradient.py`: the backward passes of functions with a derivative of their own.
- `mark.py`: ``row_wise`` and ``of_own_rows``, the marks of functions that are not read.
"""

from jaxpar.row_dependence.mark import of_own_rows, row_wise
from jaxpar.row_dependence.operation import span_of_shape
from jaxpar.row_dependence.reader import Reader, traced
from jaxpar.row_dependence.values import Kind, Reason, Span, Value

__all__ = [
    "Kind",
    "Reader",
    "Reason",
    "Span",
    "Value",
    "of_own_rows",
    "row_wise",
    "span_of_shape",
    "traced",
]
