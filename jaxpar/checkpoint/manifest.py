"""The manifest of a checkpoint: its arrays, the run that saved it, and the SHA-256 of each file. Written last. No JAX.

    {"body": {"arrays": {"params/w": {"checksum": 17, "dtype": "float32", "shape": [8, 4]}, ...},
              "files": {"state/d/6b16": {"bytes": 580, "sha256": "9f..."}, ...},
              "config": {...}, "mesh": {...}, "step": 200, "samples": 3200, ...},
     "sha256": "of the body"}

A manifest is read as untrusted data: only JSON of one form, with every field checked and no name that leads out of the
checkpoint's folder. Its text must equal the output of `Manifest.render` byte for byte, so no bit of it can change unnoticed.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxpar.checkpoint.files import FileRecord, is_safe

FILE_NAME = "manifest.json"
FORMAT = "jaxpar checkpoint 1"
MAX_BYTES = 64 << 20
MAX_CHECKSUM = 2**32


@dataclass(frozen=True)
class ArrayRecord:
    """A manifest's record of an array, layers in canonical order; the checksum is that of `jaxpar.checkpoint.checksum`."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PrngKey:
    """A PRNG key as plain data."""

    impl: str
    words: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents and the origin of a checkpoint.

    Attributes:
        step: The number of steps taken.
        samples: The position in the data: samples taken, or None if the run did not give it.
        prng_key: The run's key, or None.
        config: The settings that the run's numbers depend on, as plain JSON, or None.
        mesh: The mesh that it was saved on; it can be restored on any.
        num_processes: The number of processes that saved it.
        versions: The versions of the libraries.
        metrics: Metrics by which the best checkpoint is kept, such as the loss on held-out rows.
        saved_at: Seconds since 1970.
        arrays: The arrays of the complete state, by path.
        files: All files except the manifest, by relative path.
    """

    step: int
    samples: int | None = None
    prng_key: PrngKey | None = None
    config: Mapping[str, Any] | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    num_processes: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at: float = 0.0
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
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


def parse_manifest(raw: bytes) -> Manifest:
    """Returns the manifest in the bytes of a file.

    Raises:
        ValueError: The bytes are not what ``Manifest.render`` writes.
    """
    body = _intact_body(raw)
    if body is None:
        raise ValueError(f"{FILE_NAME} is damaged (it does not fit its own SHA-256)")
    return _from_body(body)


def _intact_body(raw: bytes) -> Any:
    try:
        text = raw.decode("ascii")
        whole = json.loads(text)
        return whole["body"] if _render(whole) == text and whole["sha256"] == _digest(whole["body"]) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _from_body(body: Any) -> Manifest:
    names = {each.name for each in fields(Manifest)}
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.keys() != names:
        raise ValueError(f"{FILE_NAME} is not of the form {FORMAT!r}")
    return Manifest(**{name: _READERS[name](value, name) for name, value in body.items()})


# One reader per kind of value: each takes a JSON value and returns it typed, or raises a ValueError that names the field.


def _fail(name: str, rule: str) -> ValueError:
    return ValueError(f"{FILE_NAME} is malformed: {name} must be {rule}")


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise _fail(name, "a whole number")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _fail(name, "a number")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise _fail(name, "a text of at most 1000 letters")
    return value


def _optional(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else read(value, name)


def _mapping(read: Callable[[Any, str], Any]) -> Callable[[Any, str], dict[str, Any]]:
    def read_mapping(value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _fail(name, "a mapping")
        return {_text(key, name): read(each, f"{name} of {key!r}") for key, each in value.items()}

    return read_mapping


def _record(kind: type, **readers: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read_record(value: Any, name: str) -> Any:
        if not isinstance(value, dict) or value.keys() != readers.keys():
            raise _fail(name, f"a record of {', '.join(readers)}")
        return kind(**{key: read(value[key], name) for key, read in readers.items()})

    return read_record


def _counts(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise _fail(name, "a short list of whole numbers")
    return tuple(_count(each, name) for each in value)


def _checksum(value: Any, name: str) -> int:
    if _count(value, name) >= MAX_CHECKSUM:
        raise _fail(name, "a checksum of 32 bits")
    return value


def _sha256(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise _fail(name, "a SHA-256 in hexadecimal")
    return value


def _files(value: Any, name: str) -> dict[str, FileRecord]:
    records = _mapping(_record(FileRecord, bytes=_count, sha256=_sha256))(value, name)
    for path in records:
        if not is_safe(path) or path == FILE_NAME:
            raise _fail(f"the file {path!r}", "a plain path inside the checkpoint")
    return records


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "format": _text,
    "step": _count,
    "samples": _optional(_count),
    "prng_key": _optional(_record(PrngKey, impl=_text, words=_counts)),
    "config": _optional(_mapping(lambda value, name: value)),
    "mesh": _mapping(_count),
    "num_processes": _count,
    "versions": _mapping(_text),
    "metrics": _mapping(_number),
    "saved_at": _number,
    "arrays": _mapping(_record(ArrayRecord, shape=_counts, dtype=_text, checksum=_checksum)),
    "files": _files,
}
