"""Crafted manifests of checkpoints, whose SHA-256 is right and whose content is not, are refused."""

import json

import pytest

from jaxpar.checkpoint.files import FileRecord, is_safe
from jaxpar.checkpoint.manifest import ArrayRecord, Manifest, PrngKey, _digest, _render, parse_manifest

GOOD = Manifest(
    step=3,
    samples=12,
    prng_key=PrngKey("threefry2x32", (0, 1)),
    config={"rate": 0.1, "nested": {"a": [1, None, "x"]}},
    mesh={"data": 2},
    metrics={"test_loss": 0.5},
    arrays={"params/w": ArrayRecord((2, 3), "float32", 17)},
    files={"state/d/0": FileRecord(10, "0" * 64)},
)


def crafted(**changes):
    body = json.loads(GOOD.render())["body"] | changes
    return _render({"body": body, "sha256": _digest(body)}).encode()


def test_a_manifest_comes_back_as_it_was():
    assert parse_manifest(GOOD.render().encode()) == GOOD


@pytest.mark.parametrize(
    "name",
    [
        "../../outside",
        "/etc/passwd",
        "state/../../x",
        "C:/x",
        "..",
        ".",
        "",
        "state//x",
        "state\\x",
        "~/x",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 300,
        "/".join("x" * 20),
        "manifest.json",
        "\u017ftate/x",
    ],
)
def test_a_manifest_that_names_files_outside_is_refused(name):
    with pytest.raises(ValueError, match=r"must be a plain path inside the checkpoint|must be a text of at most"):
        parse_manifest(crafted(files={name: {"bytes": 1, "sha256": "0" * 64}}))
    assert name == "manifest.json" or not is_safe(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "jaxpar checkpoint 2"}, "is not of the form 'jaxpar checkpoint 1'"),
        ({"code": "import os"}, "is not of the form"),
        ({"step": -1}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"samples": "12"}, "samples must be a whole number"),
        ({"config": ["a"]}, "config must be a mapping"),
        ({"mesh": {"data": "2"}}, "mesh of 'data' must be a whole number"),
        ({"metrics": {"loss": "nan"}}, "metrics of 'loss' must be a number"),
        ({"arrays": {"w": {"shape": [1]}}}, "arrays of 'w' must be a record of shape, dtype, checksum"),
        ({"arrays": {"w": {"shape": [-1], "dtype": "f", "checksum": 0}}}, "arrays of 'w' must be a whole number"),
        ({"arrays": {"w": {"shape": [1] * 65, "dtype": "f", "checksum": 0}}}, "must be a short list"),
        ({"arrays": {"w": {"shape": [1], "dtype": "f", "checksum": 2**32}}}, "must be a checksum of 32 bits"),
        ({"files": {"x": {"bytes": 1, "sha256": "0" * 63}}}, "files of 'x' must be a SHA-256 in hexadecimal"),
        ({"files": {"x": {"bytes": 1, "sha256": "A" * 64}}}, "files of 'x' must be a SHA-256 in hexadecimal"),
        ({"prng_key": {"impl": "x" * 2000, "words": []}}, "prng_key must be a text of at most 1000 letters"),
    ],
)
def test_a_crafted_manifest_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_manifest(crafted(**changes))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"null",
        b"[" * 100_000,
        b'{"body": {}, "sha256": 1}',
        b"\xff\xfe",
        GOOD.render().encode() + b" ",
        GOOD.render().replace(" ", "  ", 1).encode(),
        b'{"body": NaN}',
        b'{"step": 1' + b"0" * 5000 + b"}",
    ],
    ids=range(10),
)
def test_text_that_is_no_manifest_is_refused(raw):
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        parse_manifest(raw)
