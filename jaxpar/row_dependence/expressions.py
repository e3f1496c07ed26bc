"""Which variables of jaxprs are computed in the same way, from the same or from other parts of the rows."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxpar._compat import Literal, constants, inner_jaxprs

Equation = Any
Variable = Any


class Expressions:
    """Numbers the expressions of a jaxpr: equal ones, by operations, settings and operands, have equal numbers.

    Args:
        equations: Those of the jaxpr.
        leaves: What stands for variables that the jaxpr is given, by their ids: a name, or the number of an expression
            around it. Others stand for themselves.
        numbers: The numbers of expressions so far, which jaxprs share that are compared.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        leaves: Mapping[int, Hashable] | None = None,
        numbers: dict[Hashable, int] | None = None,
    ) -> None:
        self._made = {
            id(variable): (equation, at)
            for equation in equations
            for at, variable in enumerate(equation.outvars)
        }
        self._leaves = leaves or {}
        self._numbers = {} if numbers is None else numbers

    def of(
        self,
        equations: Sequence[Equation],
        leaves: Mapping[int, Hashable],
    ) -> "Expressions":
        """Returns the expressions of another jaxpr, whose numbers are comparable to these."""
        return Expressions(equations, leaves, self._numbers)

    def maker(self, variable: Variable) -> Equation | None:
        """Returns the equation that makes a variable; None if the jaxpr is given it."""
        equation, _ = self._made.get(id(variable), (None, 0))
        return equation

    def number(
        self,
        variable: Variable,
        stand_in: Callable[[Equation], Hashable | None] = lambda _: None,
    ) -> int:
        """Returns the number of an expression.

        Args:
            variable: What it makes.
            stand_in: What stands for an equation and all before it; None: it is read.
        """
        known: dict[int, int] = {}

        def number_of(of: Variable) -> int:
            if isinstance(of, Literal):
                return self._numbered(("literal", str(of.val), str(of.aval)))
            if id(of) not in known:
                made = expression(of)
                known[id(of)] = made if isinstance(made, int) else self._numbered(made)
            return known[id(of)]

        def expression(of: Variable) -> Hashable:
            equation, at = self._made.get(id(of), (None, 0))
            if equation is None:
                leaf = self._leaves.get(id(of), ("itself", id(of)))
                return leaf if isinstance(leaf, int) else ("leaf", leaf)
            if (stands := stand_in(equation)) is not None:
                return "in place of", stands
            operands = tuple(map(number_of, equation.invars))
            return equation.primitive.name, at, _settings(equation), operands

        return number_of(variable)

    def leaves(self, variable: Variable) -> set[Hashable]:
        """Returns what stands for the variables, of those that the jaxpr is given, of which a variable is made."""
        found, seen, waiting = set(), set(), [variable]
        while waiting:
            of = waiting.pop()
            if isinstance(of, Literal) or id(of) in seen:
                continue
            seen.add(id(of))
            equation = self.maker(of)
            if equation is None:
                found.add(self._leaves.get(id(of), id(of)))
            else:
                waiting += equation.invars
        return found

    def _numbered(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


def _settings(equation: Equation) -> Hashable:
    texts = sorted((name, str(value)) for name, value in equation.params.items())
    within = [id(each) for jaxpr in inner_jaxprs(equation) for each in constants(jaxpr)]
    return tuple(texts), tuple(within)
