"""Checks the fields of a job: no value may contain syntax that YAML, a shell, sbatch or a terminal would interpret."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_HOST_RULE = "lower-case letters, digits, - and ."
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUALIFIED = rf"({_HOST}/)?{_WORD}"
# The rules of Kubernetes, of container registries, and of SLURM's databases. No field takes a space or a quote.
FORMS = {
    "namespace": (_LABEL, "lower-case letters, digits and -"),
    "queue": (_HOST, _HOST_RULE),
    "checkpoint_claim": (_HOST, _HOST_RULE),
    "cache_claim": (_HOST, _HOST_RULE),
    "topology": (_QUALIFIED, "a node label, as in example.com/rack"),
    "replica_topology": (_QUALIFIED, "a node label, as in example.com/rack"),
    "rdma": (
        rf"{_HOST}/{_WORD}=[1-9][0-9]{{0,3}}",
        "a resource with its domain, and how many of it a node has, as in rdma/ib=8",
    ),
    "image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "a container image, as in registry/name:tag"),
    "partition": (r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*", "letters, digits, _, ., - and +, with commas between several"),
    "account": (r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*", "letters, digits, _, ., -, @ and +"),
    "token": (r"[A-Za-z0-9]*", "letters and digits"),
}
# The forms of fields that may be given several times.
FORMS_OF_EACH = {
    "toleration": (
        rf"{_QUALIFIED}(={_WORD})?(:(NoSchedule|PreferNoSchedule|NoExecute))?",
        "a taint whose effect is NoSchedule, PreferNoSchedule or NoExecute, as in nvidia.com/gpu=present:NoSchedule",
    ),
    # Kubernetes would expand $(NAME).
    "env": (r"[A-Za-z_][A-Za-z0-9_]*=(?!.*\$\().*", "a variable without $( and line ends, as in NCCL_DEBUG=INFO"),
}
MAX_LENGTH = 253  # of a Kubernetes name; images and partitions are shorter too
MAX_WORD = 2**16


def check_values(job: Any) -> None:
    """Raises ValueError unless each field of a job's settings has its type, and each string the form of its field."""
    for field in fields(job):
        value = getattr(job, field.name)
        if field.type is int:
            _check_integer(field.name, value)
        elif field.type is float:
            _check_number(field.name, value)
        elif field.name in FORMS and value != "":
            _check_form(field.name, value, FORMS[field.name])
        elif field.name in FORMS_OF_EACH:
            for each in value:
                _check_form(field.name, each, FORMS_OF_EACH[field.name])


def _check_integer(name: str, value: Any) -> None:
    if type(value) is not int or abs(value) >= 2**31:
        raise ValueError(f"{name} must be an integer under 2**31; got {value!r}. Give such as 8.")


def _check_number(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) >= 2**31:
        raise ValueError(f"{name} must be a number under 2**31; got {value!r}. Give such as 60.")


def _check_form(name: str, value: Any, form: tuple[str, str]) -> None:
    pattern, rule = form
    is_text = isinstance(value, str) and value.isprintable() and len(value) <= MAX_LENGTH
    if not is_text or not re.fullmatch(pattern, value):
        shown = value[:80] if isinstance(value, str) else value
        raise ValueError(
            f"{name} must be {rule}, at most {MAX_LENGTH} long; got {shown!r}. Give it in this form, without anything else."
        )


def check_command(command: Sequence[Any]) -> None:
    """Raises ValueError unless each word of a command is a printable string of limited length."""
    for word in command:
        check_word(word)


def check_word(word: Any) -> None:
    """Raises ValueError unless a word of a command is a printable string of limited length."""
    if not isinstance(word, str) or not word.isprintable() or len(word) > MAX_WORD:
        shown = word[:80] if isinstance(word, str) else word
        raise ValueError(
            f"the words of a command must be text without line ends and control characters, at most {MAX_WORD} long; got "
            f"{shown!r}. Put it into a file, and name that."
        )
