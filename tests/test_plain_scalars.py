"""Manifests as YAML: every program reads the same from them, and `manifest --check` finds what programs read differently."""

import itertools
import random
import re

import pytest
import yaml

from jaxpar.commands.manifest import main
from jaxpar.jobs import Job, Serving, to_jobset, to_podmonitor, to_service, to_trainjob
from jaxpar.jobs.plain_scalars import check_plain_scalars, is_string, readings, to_yaml
from tests.support import doc_pages
from tests.support.cluster import READERS, read

DOCS = doc_pages.ROOT / "docs"
# What YAML 1.1, YAML 1.2 and Go read these as without quotes.
DIFFERING = {
    "3e-4": ("3e-4", 0.0003, 0.0003),
    "1e3": ("1e3", 1000.0, 1000.0),
    "y": (True, "y", True),
    "NO": (False, "NO", False),
    "off": (False, "off", False),
    "010": (8, 10, 8),
    "0o17": ("0o17", 15, 15),
    "08": ("08", 8, 8.0),
    "1_000": (1000, "1_000", 1000),
    "0b11": (3, "0b11", 3),
    "1:30": (90, "1:30", "1:30"),
    "2026-01-31": (("date", "2026-01-31"), "2026-01-31", "2026-01-31"),
}
ALIKE = {
    "8": 8,
    "-3": -3,
    "0.5": 0.5,
    "0x1F": 31,
    "true": True,
    "~": None,
    "": None,
    "1.5e+3": 1500.0,
    ".5": 0.5,
}
PLAIN_STRINGS = (
    "gpt2",
    "64Gi",
    "10.0.0.1",
    "/checkpoints",
    "-u",
    "1.2.3",
    "e5",
    "2026-01-31-gpt",
    "yesterday",
    "0x",
)
FLAGS = ("--image", "a:1", "--mesh.data", "8", "recipes/gpt.py")


@pytest.mark.parametrize("text", DIFFERING)
def test_a_text_that_programs_read_differently_is_found_and_is_not_a_string(text):
    got = tuple(read(f"value: {text}", rule)[0]["value"] for rule in READERS)
    assert [*map(repr, got)] == [*map(repr, DIFFERING[text])], "the rules of the test itself"
    assert not is_string(text)
    with pytest.raises(
        ValueError,
        match=re.escape(
            f"a.yaml must be the same to every program that reads it; got {text} in line 2"
        ),
    ):
        check_plain_scalars(f"a: 1\nvalue: {text}\n", "a.yaml")
    check_plain_scalars(f'a: 1\nvalue: "{text}"\n', "a.yaml")


def test_a_text_that_all_programs_read_alike_is_taken():
    for text, value in ALIKE.items():
        assert {repr(read(f"value: {text}", rule)[0]["value"]) for rule in READERS} == {
            repr(value)
        }, text
        assert len(set(readings(text).values())) == 1, text
        assert not is_string(text), text
        check_plain_scalars(f"value: {text}", "a.yaml")
    for text in PLAIN_STRINGS:
        assert is_string(text), text
        assert {read(f"value: {text}", rule)[0]["value"] for rule in READERS} == {text}


def test_no_text_that_programs_read_differently_is_missed():
    """All texts of up to four of the characters of numbers, by the rules of the test."""
    letters = "019.-+_:exob"
    rng = random.Random(0)
    texts = {
        "".join(each) for size in (1, 2, 3) for each in itertools.product(letters, repeat=size)
    }
    texts |= {"".join(rng.choices(letters, k=rng.randrange(4, 9))) for _ in range(3000)}
    kinds = lambda text: {repr(rule(text)) for rule in READERS.values()}
    missed = [
        text
        for text in sorted(texts)
        if len(kinds(text)) > 1 and len(set(readings(text).values())) == 1
    ]
    assert not missed
    assert not [text for text in sorted(texts) if is_string(text) and kinds(text) != {repr(text)}]


def test_all_programs_read_the_manifest_that_was_meant():
    """Every kind of manifest, with words and values that YAML would take for something else."""
    words = (
        *DIFFERING,
        *filter(None, ALIKE),
        *PLAIN_STRINGS,
        "a: b",
        "#1",
        "é 😀",
        "'",
        '"',
        "\\",
        " x ",
        "<<",
        "=",
        "a" * 300,
    )
    env = tuple(f"V{i}={word}" for i, word in enumerate(words) if len(word) < 200)
    common = {"image": "a:1", "env": env, "metrics_port": 9090, "name": "y", "namespace": "1e3"}
    job = Job(
        command=("run", *words),
        data=8,
        rdma="1/e3=2",
        toleration=("1e3=0x1F:NoSchedule",),
        token="1e3",
        **common,
    )
    del common["metrics_port"]
    service = to_service(Serving(command=("jaxpar", "serve", *words), **common))
    manifests = [to_jobset(job), to_trainjob(job), to_podmonitor(job), *service]
    text = to_yaml(*manifests)
    for rule in READERS:
        assert read(text, rule) == manifests, rule
    assert list(yaml.safe_load_all(text)) == manifests
    check_plain_scalars(text, "a.yaml")


def test_all_programs_read_alike_what_the_pages_have_for_kubernetes_and_prometheus():
    pages = [*DOCS.glob("**/*.md")]
    blocks = [
        block.text for page in pages for block in doc_pages.blocks(page) if block.language == "yaml"
    ]
    assert len(blocks) >= 4
    for text in (*blocks, (DOCS / "monitoring" / "alerts.yaml").read_text()):
        check_plain_scalars(text, "a page")
        assert len({repr(read(text, rule)) for rule in READERS}) == 1


def test_names_of_fields_are_quoted_where_a_program_would_take_them_for_something_else():
    text = to_yaml({"kind": "on", "y": 1, "1e3": "a", "example.com/gpu": 8})
    assert text == 'kind: "on"\n"y": 1\n"1e3": "a"\nexample.com/gpu: 8\n'


def test_check_refuses_what_programs_read_differently_in_a_file_of_manifests(capsys, tmp_path):
    main(
        ["--name", "gpt", "--env", "J=y", "--env", "G=1e3", *FLAGS, "--lr", "3e-4", "--seq", "128"]
    )
    text, path = capsys.readouterr().out, tmp_path / "job.yaml"
    assert {repr(read(text, rule)) for rule in READERS} == {repr([*yaml.safe_load_all(text)])}
    for old, new, message in (
        ('"3e-4"', "3e-4", "got 3e-4 in line "),
        (
            'value: "y"',
            "value: y",
            "a bool by YAML 1.1, a string by YAML 1.2, a bool by the tools of Kubernetes",
        ),
        (
            'value: "1e3"',
            "value: 1e3",
            "Put a string into quotes; write a number in decimal digits",
        ),
        (
            '  name: "gpt"\n',
            '  name: "gpt"\n  namespace: 1e3\n',
            "--check must be the same to every program",
        ),
        (
            '"128"',
            "128",
            "spec.template.spec.containers.0.command.6 must be a string; got 128, without quotes",
        ),
        (
            'value: "1"',
            "value: 1",
            "value must be a string; got 1, without quotes in YAML. Put it into quotes.",
        ),
        (
            '  name: "gpt"\n',
            '  name: "gpt"\n  labels: {a: true}\n',
            "metadata.labels.a must be a string; got True",
        ),
        (
            '  name: "gpt"\n',
            '  name: "gpt"\n  name: "other"\n',
            "object once; got name again in line 5",
        ),
    ):
        path.write_text(text.replace(old, new, 1))
        assert path.read_text() != text, old
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["--check", str(path)])
