"""The forms of a job's settings: numbers in a range, and text by the rules of `forms.toml`."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

MAX_LENGTH = 253  # of most names of Kubernetes; images and partitions are shorter too


def _pattern(text: str) -> str:
    """Returns a pattern of `forms.toml` with its parts filled in."""
    return re.sub(r"<(\w+)>", lambda part: _pattern(_FORMS["parts"][part[1]]), text)


def _form(name: str) -> AfterValidator:
    """Returns a check of a string, so that none contains syntax that YAML, a shell, sbatch or a terminal would interpret."""

    def check(value: str) -> str:
        broken = broken_rule(name, value)
        if broken is None:
            return value
        rule, most = broken
        raise PydanticCustomError(
            "form", "must be {rule}, at most {most} long", {"rule": rule, "most": most}
        )

    return AfterValidator(check)


def one_of(names: Sequence[str]) -> AfterValidator:
    """Returns a check of a string that must be one of some names."""

    def check(value: str) -> str:
        if value in names:
            return value
        told = ", ".join(map(repr, names[:-1]))
        raise PydanticCustomError("name", "must be {names}", {"names": f"{told} or {names[-1]!r}"})

    return AfterValidator(check)


def broken_rule(name: str, value: str) -> tuple[str, int] | None:
    """Returns the rule of a form that a text does not fulfil, and how long it may be; None: it is well-formed.

    >>> broken_rule("namespace", "X_Y")
    ('lower-case letters, digits and -', 63)
    """
    text, rule, *other = _FORMS["forms"][name]
    (most,) = other or [MAX_LENGTH]
    is_formed = value.isprintable() and len(value) <= most and re.fullmatch(_pattern(text), value)
    return None if is_formed else (rule, most)


_FORMS = tomllib.loads(Path(__file__).with_name("forms.toml").read_text(encoding="utf-8"))
DNS_LABEL = re.compile(_FORMS["parts"]["label"])
Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0, lt=2**31, allow_inf_nan=False)]
Image = Annotated[str, _form("image")]
Namespace = Annotated[str, _form("namespace")]
Queue = Annotated[str, _form("queue")]
HostName = Annotated[str, _form("host_name")]
NodeLabel = Annotated[str, _form("node_label")]
Resource = Annotated[str, _form("resource")]
Taint = Annotated[str, _form("taint")]
Variable = Annotated[str, _form("variable")]
Partition = Annotated[str, _form("partition")]
Account = Annotated[str, _form("account")]
Token = Annotated[str, _form("token")]
Word = Annotated[str, _form("plan_word")]
