"""recipes/bloom.py, run as a user runs it: the published layouts, compiled for hundreds of devices on this machine."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import bloom
import bloom_jobs
import jaxpar
from jaxpar.commands import recipe as cli
from jaxpar.inspect.text import bytes_text
from jaxpar.run import folder as run_folder
from tests.support import doc_pages
from tests.support.flags import replaced
from tests.support.waiting import WAIT_SECONDS

RECIPE = Path(__file__).parents[1] / "recipes" / "bloom.py"


GIB = 2**30


ENVIRONMENT = {
    **os.environ,
    # With XLA's own passes as users have them, which the figures depend on; the machine code is never run.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
    "PYTHONPATH": os.pathsep.join([str(RECIPE.parents[1]), os.environ.get("PYTHONPATH", "")]),
}


def run_recipe(*flags):
    return subprocess.run(
        [sys.executable, str(RECIPE), *flags],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


def compiled(folder, *flags):
    """The folder, the figures and the words of a run."""
    done = run_recipe("--out-dir", str(folder), *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "report.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run of both layouts."""
    return compiled(tmp_path_factory.mktemp("bloom"))


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """A run of the layout with fewer devices."""
    return compiled(tmp_path_factory.mktemp("deepspeed"), "--job", "deepspeed")


@pytest.fixture
def run_of(request):
    """``run_of(name)``: a run with the layout of a name."""
    return lambda name: request.getfixturevalue("both" if name == "bloom" else "smaller")


BLOOM = pytest.param("bloom", marks=pytest.mark.slow)  # compiled for three times as many devices


@pytest.mark.slow
def test_it_fits_on_a_laptop(both):
    del both
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 8 * GIB


@pytest.mark.full
@pytest.mark.parametrize("name", [BLOOM, "deepspeed"])
def test_a_page_shows_the_compiled_step_beside_the_plan(run_of, name):
    folder, figures, _ = run_of(name)
    page = (folder / f"{name}-report.html").read_text()
    charts = dict(
        re.findall(r'<div class="chart" id="chart-([\w-]+)"><figure(.*?)</figure>', page, re.DOTALL)
    )
    assert {"timeline", "shards", "memory", "traffic", "step-time"} <= set(charts)
    assert "of the step compiled for" in page
    planned, compiled = (
        figures[name]["planned"]["memory_bytes"],
        figures[name]["memory_bytes"]["together"],
    )
    said = (
        rf"([\d.]+) GiB compiled for CPUs, {re.escape(bytes_text(planned))} planned for a100-80gb"
    )
    assert float(re.search(said, page)[1]) == pytest.approx(compiled / GIB, rel=0.01), (
        "apart from the rows of a batch"
    )
    assert "<th>why</th>" not in page, "of the one plan there is no why"
    axes, sizes = (
        re.findall(pattern, charts["traffic"])
        for pattern in (r'<span style="top[^>]*>([^<]*)', r'data-tip="(.*?)"')
    )
    sent = dict(zip(axes, sizes, strict=True))
    assert sent == {axis: bytes_text(size) for axis, size in figures[name]["sent_bytes"].items()}


@pytest.mark.full
def test_every_file_is_one_that_overwrite_would_delete(smaller):
    folder, _, _ = smaller
    assert {path for path in folder.rglob("*") if path.is_file()} == set(
        run_folder.own_files(folder)
    )


@pytest.mark.slow
def test_the_guide_quotes_it(both):
    (quoted,) = [
        command.quoted
        for command in doc_pages.commands(doc_pages.ROOT / "docs" / "three-dimensions.md")
        if command.words == ("python", "recipes/bloom.py")
    ]
    doc_pages.check_quoted(quoted, both[2], numbers=True)


@pytest.mark.slow
def test_blooms_embedding_and_head_displace_a_layer_each(both):
    _, figures, said = both
    assert figures["bloom"]["mesh"] == {"data": 8, "stage": 12, "tensor": 4}
    assert figures["bloom"]["layers_of_stages"] == [5, *[6] * 10, 5]
    assert figures["bloom"]["num_microbatches"] == 128
    assert "176,247,271,424 parameters" in said  # arXiv 2211.05100, table 3


@pytest.mark.slow
def test_each_device_holds_its_places_of_the_layers_and_its_part_of_the_optimizer(both):
    _, figures, _ = both
    width, vocabulary, shards = 14_336, 250_880, 4
    split = (
        12 * width**2 // shards + 3 * width // shards + 4 * width // shards
    )  # weights; biases of qkv and up
    layer = split + 6 * width  # and two norms, biases of out and down
    outer = vocabulary * width // shards + 4 * width
    held = figures["bloom"]["memory_bytes"]
    assert held["parameters, float32"] == 4 * (6 * layer + outer)
    moments = 2 * held["parameters, float32"] / 8  # two of them, over 8 replicas
    assert moments <= held["optimizer state, float32"] < 1.001 * moments


@pytest.mark.full
def test_a_stage_sends_an_activation_and_a_gradient_a_microbatch(smaller):
    _, figures, _ = smaller
    figure = figures["deepspeed"]
    activation = 4 * 2048 * 4096 * 4  # bytes: rows, tokens, width; float32 on CPUs
    messages = 2 * figure["num_microbatches"] * activation
    table = (
        50_304 * 4096 * 4 // 4
    )  # tokens, spread over the stages: gathered once, its gradient scattered once
    positions = 2048 * 4096 * 4
    once = 2 * (table + positions) * 3 // 4
    assert messages + once <= figure["sent_bytes"]["stage"] < messages + 1.01 * once


@pytest.mark.slow
def test_it_says_what_is_whole_on_every_stage(both):
    _, _, said = both
    assert "tokens: whole on every stage, since 12 stages divide no free dim of it" in said


@pytest.mark.full
@pytest.mark.parametrize("name", [BLOOM, "deepspeed"])
def test_pictures_are_drawn(run_of, name):
    folder, _, _ = run_of(name)
    for picture in ("nodes", "timeline"):
        assert (folder / f"{name}-{picture}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--mesh.data", "7"),
            "replicas must share out a batch in whole microbatches; got --mesh.data 7 for 1024 rows",
        ),
        (
            ("--mesh.tensor", "3"),
            "the tensor axis must fill a node's GPUs or divide them; got --mesh.tensor 3",
        ),
        (("--mesh.stage", "0"), "--mesh.stage must be at least 1; got 0"),
        (
            ("--out-dir", "/dev/null/x"),
            "--out-dir must be a folder that can be written to; got /dev/null/x",
        ),
        (
            ("--gpu", "h101"),
            "--gpu must be one of a100-40gb, a100-80gb, a100-80gb-jeanzay, h100, h200, b200; got 'h101'",
        ),
        (("--gpus-per-node", "0"), "--gpus-per-node must be at least 1; got 0"),
        (
            ("--job", "bloom", "--mesh.data", "1", "--mesh.stage", "2", "--schedule", "zb"),
            "Did you mean 'zb-v'",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused_in_one_line(
    flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(jaxpar, "use_fake_devices", lambda _: None)  # this process has its own
    monkeypatch.setattr(
        bloom_jobs,
        "mesh_of",
        lambda *_: pytest.fail("it must be refused before there is a mesh"),
    )
    with pytest.raises(SystemExit, match="2"):
        cli.run(bloom.main, bloom.Config, replaced(["--out-dir", str(tmp_path), *flags]))
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())


def test_more_stages_than_layers_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        jaxpar, "use_fake_devices", lambda _: None
    )  # this process has its own, fewer than stages
    monkeypatch.setattr(bloom_jobs, "mesh_of", lambda *_: jaxpar.make_mesh())
    with pytest.raises(SystemExit, match="2"):
        cli.run(
            bloom.main,
            bloom.Config,
            ["--out-dir", str(tmp_path), "--job", "deepspeed", "--mesh.stage", "33"],
        )
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "got 32 layers for --mesh.stage 33" in said
    assert said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())
