"""What programs take a text without quotes in YAML for, which is not one thing: a string, a number, a truth value, or a date.

    plain text   YAML 1.1    YAML 1.2    the tools of Kubernetes
    3e-4         a string    a number    a number
    yes          a bool      a string    a bool
    010          8           10          8
    gpt2         a string    a string    a string

The tools of Kubernetes are written in Go and read YAML by a library of rules of its own, between those of the two versions.
``check_plain_scalars`` refuses a file that holds a text on which they differ, and ``to_yaml`` writes every string in quotes.

**Reference**: yaml.org/type for YAML 1.1; the YAML 1.2.2 specification, section 10.3.2 (core schema); go-yaml's ``resolve``.
"""

import re
from collections.abc import Iterator
from typing import Any

from jaxpar.runtime.output import needing_extra, printable

STRING = "a string"
KUBERNETES = "the tools of Kubernetes"
NULL = r"|~|null|Null|NULL"
TRUE_OR_FALSE = "true|True|TRUE|false|False|FALSE"
YES_OR_NO = "y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF"
NOT_FINITE = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
DATE = r"\d{4}-\d\d?-\d\d?([Tt \t].*)?"
# A larger integer is a float for some programs. A zero before other digits makes it octal for some.
INTEGER = "[-+]?(0|[1-9][0-9]{0,17})"
# By program: what a plain text is that matches a pattern as a whole, the first that does; a string if none does.
RULES: dict[str, dict[str, str]] = {
    "YAML 1.1": {
        "null": NULL,
        "a bool": f"{TRUE_OR_FALSE}|{YES_OR_NO}",
        "an integer": INTEGER,
        "an octal number": "[-+]?0[0-7_]+",
        "a hexadecimal number": "[-+]?0x[0-9a-fA-F_]+",
        "a binary number": "[-+]?0b[01_]+",
        "a long integer": "[-+]?[1-9][0-9_]*",
        "a number": rf"[-+]?([0-9][0-9_]*\.[0-9_]*|\._*[0-9][0-9_]*)([eE][-+][0-9]+)?|{NOT_FINITE}",
        "a number of base 60": r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?",
        "a date": DATE,
        "a merge": "<<",
        "a value": "=",
    },
    "YAML 1.2": {
        "null": NULL,
        "a bool": TRUE_OR_FALSE,
        "an integer": INTEGER,
        "a hexadecimal number": "0x[0-9a-fA-F]+",
        "an octal number": "0o[0-7]+",
        "a number": rf"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|{NOT_FINITE}",
    },
    KUBERNETES: {
        "null": NULL,
        "a bool": f"{TRUE_OR_FALSE}|{YES_OR_NO}",
        "an integer": INTEGER,
        "an octal number": "[-+]?0[oO]?[0-7]+",
        "a hexadecimal number": "[-+]?0[xX][0-9a-fA-F]+",
        "a binary number": "[-+]?0[bB][01]+",
        "a number": rf"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|{NOT_FINITE}",
        "a date": DATE,
        "a merge": "<<",
    },
}


def readings(text: str) -> dict[str, str]:
    """Returns what each program takes a plain text for.

    >>> readings("1e3")
    {'YAML 1.1': 'a string', 'YAML 1.2': 'a number', 'the tools of Kubernetes': 'a number'}
    """
    return {program: _kind(text, program) for program in RULES}


def _kind(text: str, program: str) -> str:
    if program == KUBERNETES and re.match("[-+0-9]", text):
        text = text.replace("_", "")  # wherever it is
    return next(
        (kind for kind, pattern in RULES[program].items() if re.fullmatch(pattern, text)), STRING
    )


def is_string(text: str) -> bool:
    """Returns whether every program takes a plain text for a string."""
    return set(readings(text).values()) == {STRING}


def check_plain_scalars(text: str, what: str) -> None:
    """Raises ValueError if YAML holds a plain text that programs take for different things, or a field twice.

    Args:
        text: The YAML, of any number of documents.
        what: What it is, for the message.
    """
    yaml = load_yaml()
    for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
        for node in _nodes(document):
            if isinstance(node, yaml.MappingNode):
                _check_fields(node, what)
            elif isinstance(node, yaml.ScalarNode) and node.style is None:
                _check_scalar(node, what)


def _check_scalar(node: Any, what: str) -> None:
    found = readings(node.value)
    if len(set(found.values())) == 1:
        return
    differing = ", ".join(f"{kind} by {program}" for program, kind in found.items())
    raise ValueError(
        f"{what} must be the same to every program that reads it; got {printable(node.value)} in line "
        f"{node.start_mark.line + 1}: {differing}. Put a string into quotes; write a number in decimal digits, and a bool as "
        "true or false."
    )


def _check_fields(mapping: Any, what: str) -> None:
    seen = set()
    for key in (key for key, _ in mapping.value if isinstance(key.value, str)):
        if key.value in seen:
            begins = key.value in ("apiVersion", "kind")  # of another manifest
            remedy = "Put a line with --- between two manifests." if begins else "Leave one out."
            raise ValueError(
                f"{what} must have each field of an object once; got {printable(key.value)} again in line "
                f"{key.start_mark.line + 1}, where programs take different ones. {remedy}"
            )
        seen.add(key.value)


def _nodes(document: Any) -> Iterator[Any]:
    """Yields each node of a document once, also where aliases repeat it."""
    waiting, seen = [document], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if not isinstance(node.value, str):
            waiting += [
                each
                for item in node.value
                for each in (item if isinstance(item, tuple) else (item,))
            ]


def to_yaml(*manifests: dict[str, Any]) -> str:
    """Returns manifests as YAML, one document each, without sorting their fields; every string is in quotes.

    Names of fields have none, since every program takes them for strings.
    """
    yaml = load_yaml()

    class Quoting(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
            node = super().represent_mapping(tag, mapping, flow_style)
            for key, _ in node.value:
                key.style = None if is_string(key.value) else '"'
            return node

    quoted = lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    Quoting.add_representer(str, quoted)
    # A quoted text that is folded is the same for all programs, but not for people who search for it.
    return yaml.dump_all(manifests, Dumper=Quoting, sort_keys=False, width=float("inf"))


def load_yaml() -> Any:
    """Returns PyYAML; raises an ImportError with the remedy without it."""
    with needing_extra("writing YAML needs the package pyyaml", "kubernetes"):
        import yaml
    return yaml
