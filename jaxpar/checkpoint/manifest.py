"""The manifest of a checkpoint: its arrays, the run that saved it, and the SHA-256 of each file. Written last. No JAX.

    {"body": {"arrays": {"params/w": {"checksum": 17, "dtype": "float32", "shape": [8, 4]}, ...},
              "files": {"state/d/6b16": {"bytes": 580, "sha256": "9f..."}, ...},
              "config": {...}, "mesh": {...}, "step": 200, "samples": 3200, ...},
     "sha256": "of the body"}

A manifest is read as untrusted data: only JSON of one form, with every field checked and no name that leads out of the
checkpoint's folder. Its text must equal the output of `Manifest.render` byte for byte, so no bit of it can change unnoticed.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat

from jaxpar import fields

FILE_NAME = "manifest.json"
FORMAT = "jaxpar checkpoint 1"
LATER = "traits"  # a field that the first manifests did not have
MAX_BYTES = 64 << 20
NAME = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
)  # each part of a path: no "..", no hidden file, no separator
MAX_DEPTH = 16


def is_safe(name: str) -> bool:
    """Returns whether a file's relative path, written with slashes, stays in its folder on every system."""
    steps = name.split("/")
    return len(steps) <= MAX_DEPTH and all(NAME.fullmatch(step) for step in steps)


def _check_path(name: str) -> str:
    if not is_safe(name) or name == FILE_NAME:
        raise ValueError("must be a plain path inside the checkpoint")
    return name


Count = Annotated[int, Field(ge=0)]
Counts = Annotated[tuple[Count, ...], Field(max_length=64)]
Text = Annotated[str, Field(max_length=1000)]
FilePath = Annotated[Text, AfterValidator(_check_path)]
NOTHING_ELSE: Any = {"extra": "forbid"}


@dataclass(frozen=True)
class FileRecord:
    """A manifest's record of a file."""

    __pydantic_config__ = NOTHING_ELSE
    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class ArrayRecord:
    """A manifest's record of an array, layers in canonical order; the checksum is that of `jaxpar.checkpoint.checksums`."""

    __pydantic_config__ = NOTHING_ELSE
    shape: Counts
    dtype: Text
    checksum: Annotated[int, Field(ge=0, lt=2**32)]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PrngKey:
    """A PRNG key as plain data."""

    __pydantic_config__ = NOTHING_ELSE
    impl: Text
    words: Counts


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents and the origin of a checkpoint.

    Attributes:
        step: The number of steps taken.
        samples: The position in the data: samples taken, or None if the run did not give it.
        prng_key: The run's key, or None.
        config: The settings that the run's numbers depend on, as plain JSON, or None.
        traits: What else the run was known by (``jaxpar/run/traits.py``), or None.
        mesh: The mesh that it was saved on; it can be restored on any.
        num_processes: The number of processes that saved it.
        versions: The versions of the libraries.
        metrics: Metrics by which the best checkpoint is kept, such as the loss on held-out rows.
        saved_at: Seconds since 1970.
        arrays: The arrays of the complete state, by path.
        files: All files except the manifest, by relative path.
    """

    step: Count
    samples: Count | None = None
    prng_key: PrngKey | None = None
    config: Mapping[Text, Any] | None = None
    traits: Mapping[Text, Any] | None = None
    mesh: Mapping[Text, Count] = field(default_factory=dict)
    num_processes: Count = 1
    versions: Mapping[Text, Text] = field(default_factory=dict)
    metrics: Mapping[Text, FiniteFloat] = field(default_factory=dict)
    saved_at: FiniteFloat = 0.0
    arrays: Mapping[Text, ArrayRecord] = field(default_factory=dict)
    files: Mapping[FilePath, FileRecord] = field(default_factory=dict)
    format: str = FORMAT

    def render(self) -> str:
        """Returns the manifest as the text of its file."""
        body = asdict(self)
        return _render({"body": body, "sha256": _digest(body)})

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(record.bytes for record in self.files.values())


def _render(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=True) + "\n"


def _digest(body: Any) -> str:
    return hashlib.sha256(_render(body).encode()).hexdigest()


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as plain JSON values.

    Numbers of NumPy become those of Python, sets lists, dataclasses dicts of their fields under their name, other values text.

    >>> plain_json({"names": {"b", "a"}, "folder": Path("a"), "most": math.inf})
    {'names': ['a', 'b'], 'folder': 'a', 'most': 'inf'}
    """
    return {str(name): _plain(value) for name, value in config.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_json(value)
    if (parts := parts_of(value)) is not None:
        return {type(value).__name__: plain_json(parts)}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):  # in an order that is the same in each process
        return sorted(map(_plain, value), key=str)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or JAX
        return _plain(value.item())
    is_plain = (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    )
    return value if is_plain else str(value)


def parts_of(value: Any) -> dict[str, Any] | None:
    """Returns what a dataclass or a namespace holds, of which its text may leave something out; None for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return dict(vars(value)) if isinstance(value, (Namespace, SimpleNamespace)) else None


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest in a checkpoint's folder.

    Raises:
        ValueError: There is none, or it is damaged, foreign or crafted; the message is meant to follow "step N: ".
    """
    path = folder / FILE_NAME
    if folder.is_symlink() or path.is_symlink():
        raise ValueError("it is a link, which could lead anywhere")
    if not path.is_file():
        raise ValueError(f"it has no {FILE_NAME}: unfinished, or not a checkpoint of jaxpar")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{FILE_NAME} has {size} bytes, more than a manifest may have")
    return parse_manifest(path.read_bytes())


def check_readable(manifest: Manifest) -> None:
    """Raises ValueError for a manifest that could not be read again."""
    remedy = "Give samples, settings and a key that can be saved as JSON."
    try:
        parse_manifest(manifest.render().encode(), remedy)
    except TypeError as error:
        raise ValueError(
            f"what is saved beside a state must be JSON; got other values: {error}. {remedy}"
        ) from error


def parse_manifest(raw: bytes, remedy: str = "Restore a backup.") -> Manifest:
    """Returns the manifest in the bytes of a file; ``remedy`` ends a message about a field.

    Raises:
        ValueError: The bytes are not what ``Manifest.render`` writes.
    """
    body, is_intact = None, False
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        text = raw.decode("ascii")
        whole = json.loads(text)
        body = whole["body"]
        is_intact = _render(whole) == text and whole["sha256"] == _digest(whole["body"])
    if not is_intact:
        raise ValueError(f"{FILE_NAME} is damaged (it does not fit its own SHA-256)")
    names = Manifest.__dataclass_fields__.keys()
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.keys() | {LATER} != names:
        raise ValueError(f"{FILE_NAME} is not of the form {FORMAT!r}")
    return fields.read(Manifest, body, FILE_NAME, remedy)
