"""The marks of functions that are not read: one treats each row on its own, or numbers the rows of a device."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax

Args = ParamSpec("Args")
Result = TypeVar("Result")

# Of the calls in a jaxpr.
_ROW_WISE = "jaxpar_row_wise"
_OF_OWN_ROWS = "jaxpar_of_own_rows"


def row_wise(
    function: Callable[Args, Result],
) -> Callable[Args, Result]:
    """Returns ``function``, marked as one that treats each row of a batch on its own.

    jaxpar proves from the operations of a model and a loss that no row depends on another. It cannot where rows are sorted
    and put back, as tokens are by the experts that they choose, or inside a kernel. The mark is a promise: jaxpar takes each
    row of what the function returns for one that depends on the same row of its arguments alone, and checks nothing.
    ``jaxpar.check_split`` tests it with numbers.

    Args:
        function: A function of pytrees of arrays and numbers; it may close over anything else.

    Returns:
        The function, which computes the same. Its results have rows along each dim whose size depends on their number.
    """
    return _named(_ROW_WISE, function)


def of_own_rows(
    function: Callable[Args, Result],
) -> Callable[Args, Result]:
    """Returns ``function``, marked as one that returns something of each row that a device has, such as its number.

    It is right if it returns as many as the device has, which depends on the number of devices.
    """
    return _named(_OF_OWN_ROWS, function)


def _named(name: str, function: Callable[Args, Result]) -> Callable[Args, Result]:
    plain: Callable[..., Result] = function

    @wraps(function)
    def marked(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        # Another function each time: JAX would return the trace of earlier closures.
        def call(args: tuple, kwargs: dict[str, Any]) -> Result:
            return plain(*args, **kwargs)

        call.__name__ = call.__qualname__ = name
        return jax.jit(call)(args, kwargs)

    return marked


def is_row_wise(equation: Any) -> bool:
    """Returns whether an equation calls a function that is marked as ``row_wise``."""
    return equation.params.get("name") == _ROW_WISE


def is_of_own_rows(equation: Any) -> bool:
    """Returns whether an equation calls one that is marked as ``of_own_rows``."""
    return equation.params.get("name") == _OF_OWN_ROWS
