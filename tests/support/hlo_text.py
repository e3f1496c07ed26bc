"""Snippets of compiled programs, for tests of what reads them."""

import re
import textwrap

from jaxpar.inspect.hlo import parse_module

DATA_TENSOR = (("data", 2), ("tensor", 4))


def program(text: str):
    """Reads a snippet whose long instructions go on in lines that are indented further."""
    return parse_module(re.sub(r"\n {4,}", " ", textwrap.dedent(text)))
