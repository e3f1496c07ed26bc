"""Crafted manifests of checkpoints, whose SHA-256 is right and whose content is not, are refused."""

import json

import pytest

from jaxpar.checkpoint.manifest import (
    ArrayRecord,
    FileRecord,
    Manifest,
    PrngKey,
    _digest,
    _render,
    is_safe,
    parse_manifest,
)

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
    body = json.loads(GOOD.render())["body"]
    del body["traits"]
    before = _render({"body": body, "sha256": _digest(body)}).encode()
    assert parse_manifest(before) == GOOD, "one that was written before there were traits"


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
    with pytest.raises(
        ValueError, match=r"must be a plain path inside the checkpoint|must be a text of at most"
    ):
        parse_manifest(crafted(files={name: {"bytes": 1, "sha256": "0" * 64}}))
    assert name == "manifest.json" or not is_safe(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "jaxpar checkpoint 2"}, "is not of the form 'jaxpar checkpoint 1'"),
        ({"code": "import os"}, "is not of the form"),
        ({"step": -1}, "step of manifest.json must be at least 0; got -1. Restore a backup"),
        ({"step": True}, "step of manifest.json must be an integer; got true"),
        ({"step": 1.0}, "step of manifest.json must be an integer; got 1.0"),
        ({"samples": "12"}, 'samples of manifest.json must be an integer; got "12"'),
        ({"config": ["a"]}, r'config of manifest.json must be an object; got \["a"\]'),
        ({"mesh": {"data": "2"}}, 'mesh.data of manifest.json must be an integer; got "2"'),
        ({"metrics": {"loss": "nan"}}, 'metrics.loss of manifest.json must be a number; got "nan"'),
        (
            {"arrays": {"w": {"shape": [1]}}},
            "arrays.w of manifest.json must have the field 'dtype'; got 'shape'",
        ),
        (
            {"arrays": {"w": {"shape": [1], "dtype": "f", "checksum": 0, "x": 0}}},
            "arrays.w of manifest.json must have no other fields; got 'x'",
        ),
        (
            {"arrays": {"w": {"shape": [-1], "dtype": "f", "checksum": 0}}},
            r"arrays.w.shape\[0\] of manifest.json must be at least 0; got -1",
        ),
        (
            {"arrays": {"w": {"shape": [1] * 65, "dtype": "f", "checksum": 0}}},
            "arrays.w.shape of manifest.json must have at most 64 items",
        ),
        (
            {"arrays": {"w": {"shape": [1], "dtype": "f", "checksum": 2**32}}},
            "arrays.w.checksum of manifest.json must be under 4294967296",
        ),
        (
            {"files": {"x": {"bytes": 1, "sha256": "0" * 63}}},
            'files.x.sha256 of manifest.json must match .*; got "0+',
        ),
        (
            {"files": {"x": {"bytes": 1, "sha256": "A" * 64}}},
            'files.x.sha256 of manifest.json must match .*; got "A+',
        ),
        (
            {"prng_key": {"impl": "x" * 2000, "words": []}},
            "prng_key.impl of manifest.json must have at most 1000 letters",
        ),
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
        _render(
            {
                "body": json.loads(GOOD.render())["body"] | {"step": 4},
                "sha256": json.loads(GOOD.render())["sha256"],
            }
        ).encode(),
    ],
    ids=range(11),
)
def test_text_that_is_no_manifest_is_refused(raw):
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        parse_manifest(raw)
