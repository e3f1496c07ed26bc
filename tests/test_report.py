"""The report of a run and of plans: its data is that of the run, it loads nothing, and runs no text of a user."""

import base64
import contextlib
import hashlib
import html
import http.client
import json
import math
import re
import shutil
import socket
import subprocess
import threading
from html.parser import HTMLParser

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.__main__ import main as command
from jaxpar.commands import runs
from jaxpar.inspect.text import bytes_text
from jaxpar.metrics.log import MetricsLog, read_metrics
from jaxpar.report import ReportWriter, read_run, render_page, step_data, write_loads, write_page
from jaxpar.report.charts import EVEN, HIGH, LOW, make_charts
from jaxpar.report.data import MAX_POINTS, metrics, shards
from jaxpar.report.frame import Scale, number
from jaxpar.report.page import plans
from jaxpar.report.server import RunServer
from jaxpar.schedule import make_schedule, simulate
from jaxpar.schedule.draw import MAX_OPS, timeline_data
from tests.support import tiny
from tests.support.waiting import WAIT_SECONDS

SCHEDULE = make_schedule("1f1b", 2, 4, form="fused")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
SECTIONS = ["metrics", "timeline", "shards", "memory", "traffic", "config"]
SHAPES = "div", "figure", "svg", "rect", "path", "line", "circle", "button"
LOADS = [[1, 1, 1, 1], [0, 2, 0.5, 1.5]]
EVIL = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


class Page(HTMLParser):
    """What a browser sees in a page: its tags, the text of scripts, the text of each section, the tags of each chart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.texts, self.charts = [], [], {}, {}
        self._section = self._script = self._chart = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        name = dict(attrs).get("id", "") or ""
        self._chart = name.removeprefix("chart-") if tag == "div" and name else self._chart
        if tag in SHAPES:
            self.charts.setdefault(self._chart, []).append((tag, dict(attrs)))
        self._section = dict(attrs).get("id") if tag == "section" else self._section
        if tag == "script":
            self.scripts.append("")
        self._script = tag == "script"

    def handle_endtag(self, tag):
        self._section = None if tag == "section" else self._section
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        elif self._section:
            self.texts[self._section] = self.texts.get(self._section, "") + data + " "

    @property
    def data(self):
        return json.loads(self.scripts[0])

    def curves(self, chart):
        """The curves of a chart, as the script under the pointer reads them."""
        return next(
            json.loads(attrs["data-curves"])
            for _, attrs in self.charts[chart]
            if "data-curves" in attrs
        )

    def tips(self, chart):
        """The texts of a chart's bars."""
        return [
            attrs["data-tip"]
            for tag, attrs in self.charts[chart]
            if tag == "rect" and "data-tip" in attrs
        ]

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def step():
    """A compiled step of a pipeline on 8 devices, its state's shapes, its mesh."""
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    shardings = jaxpar.shardings_from_paths(tiny.make_params(), mesh, tiny.RULES)
    optimizer = optax.adam(1e-3)
    state = jaxpar.abstract_state(tiny.init, jax.random.key(0), optimizer, mesh, shardings)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, schedule=SCHEDULE, num_microbatches=4
    )
    lowered = jaxpar.make_train_step(value_and_grad, optimizer).lower(
        state, jaxpar.abstract_batch(tiny.make_batch(), mesh)
    )
    return lowered.compile(), state, mesh


@pytest.fixture(scope="module")
def data(step):
    compiled, state, mesh = step
    return step_data(compiled, state, mesh, schedule=SCHEDULE, num_steps=4)


def log_run(folder, data, losses=(3.0, 2.5, math.nan, 1.25)):
    """Writes a run of four steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"learning_rate": 0.125, "mesh": {"data": 2}}))
    writer = ReportWriter(folder, lambda: data)
    with MetricsLog(folder, 4, items_per_step=8, watchers=[writer]) as log:
        for at, loss in enumerate(losses):
            log.log(at, {"loss": loss, "grad_norm": 2.0 * at})
    return folder


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return log_run(tmp_path_factory.mktemp("runs") / "one", data)


def page_of(run):
    return Page((run / "report.html").read_text())


def test_shards_are_those_that_jax_puts_on_each_device():
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    specs = [
        (),
        ("stage", None, "tensor"),
        (("tensor", "data"), "stage"),
        (None, None, ("stage", "data", "tensor")),
    ]
    for spec in specs:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        array = jax.ShapeDtypeStruct((8, 4, 16), np.float32, sharding=sharding)
        (found,) = shards([array], mesh)["arrays"]
        want = sharding.devices_indices_map(array.shape)
        # Numbered as JAX numbers them, not by their places on the mesh.
        for device, held in zip(jax.devices(), found["held"], strict=True):
            whole = [slice(0, extent) for extent in array.shape]
            ours = found["shards"][held].strip("[]").split(", ")
            ranges = [
                s if part == ":" else slice(*map(int, part.split(":")))
                for part, s in zip(ours, whole, strict=True)
            ]
            theirs = [
                slice(*part.indices(n)[:2])
                for part, n in zip(want[device], array.shape, strict=True)
            ]
            assert ranges == theirs, (spec, device)
        assert found["device_bytes"] * len(found["shards"]) == found["bytes"] == 8 * 4 * 16 * 4


def test_shards_over_an_axis_of_one_device_are_whole():
    mesh = jaxpar.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    of = lambda *spec: jax.ShapeDtypeStruct(
        (8,), np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    both, none = shards([of(("replica", "data")), of("context")], mesh)["arrays"]
    assert (both["spec"], both["shards"]) == ("dim 0 over replica and data", ["[0:4]", "[4:8]"])
    assert (none["spec"], none["shards"]) == ("whole on every device", ["[:]"])


def test_devices_are_numbered_as_make_mesh_numbers_them():
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    sharding = NamedSharding(mesh, PartitionSpec("stage"))
    found = shards({"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)}, mesh)
    for at, place in enumerate(found["devices"]):
        assert list(place) == ["data", "stage", "tensor"]
        index = tuple(place.get(axis, 0) for axis in mesh.axis_names)
        assert mesh.devices[index].id == at
    chart = make_charts({"kind": "run", "shards": found})["shards"]
    assert "device; tensor varies fastest, then data, then stage" in chart
    assert "device 1 (data 0, stage 0, tensor 1)\nw[0:4]" in chart
    assert "device 4 (data 0, stage 1, tensor 0)\nw[4:8]" in chart


@pytest.mark.full
def test_memory_and_traffic_are_those_of_the_compiled_step(step, data):
    compiled, _, mesh = step
    report = jaxpar.inspect_step(compiled, mesh=mesh)
    kinds = data["memory"]["bars"]["a device"]
    assert sum(kinds.values()) == data["memory"]["total_bytes"] == report.memory.total_bytes
    assert kinds["params"] == sum(array["device_bytes"] for array in data["shards"]["arrays"])
    assert kinds["optimizer"] > 2 * kinds["params"] > 0, (
        "Adam has two numbers for each, and counters"
    )
    assert (
        kinds["batch"]
        == sum(leaf.nbytes for leaf in tiny.make_batch().values()) // mesh.shape["data"]
    )
    traffic = data["traffic"]
    assert set(traffic["axes"]) == {"data", "stage", "tensor"}
    assert traffic["axes"]["data"] == report.bytes_moved(axis="data")
    assert len(traffic["collectives"]) == len(report.collectives)
    assert data["problems"] == {}
    assert json.loads(json.dumps(data)) == data, "plain values"


def test_the_timeline_has_every_op_once_at_the_simulators_times():
    found, want = timeline_data(SCHEDULE), simulate(SCHEDULE, timing="lockstep")
    spans = {
        (stage, *span.op, span.start, span.end)
        for stage, order in enumerate(want.spans)
        for span in order
    }
    assert {tuple(op) for op in found["ops"]} == spans
    assert len(found["ops"]) == found["num_ops"] == len(spans)
    assert (found["makespan"], found["bubble_fraction"]) == (want.makespan, want.bubble_fraction)
    page = Page(f'<div id="chart-timeline">{make_charts({"timeline": found})["timeline"]}</div>')
    bars = [
        attrs for tag, attrs in page.charts["timeline"] if tag == "rect" and "data-tip" in attrs
    ]
    assert sorted(
        (int(float(bar["y"])), float(bar["x"]), float(bar["width"])) for bar in bars
    ) == sorted((stage, start, end - start) for stage, *_, start, end in spans)
    assert timeline_data(make_schedule("1f1b", 1, 4)) is None


def test_a_long_timeline_is_cut_and_says_so():
    found = timeline_data(make_schedule("zb-h1", 4, 512))
    assert len(found["ops"]) == MAX_OPS < found["num_ops"] == 4 * 3 * 512
    page = render_page({"kind": "run", "name": "long", "timeline": found})
    assert f"The first {MAX_OPS:,} of {found['num_ops']:,} ops are shown." in page


def test_a_run_ends_in_one_page_with_a_section_for_each_part(run):
    page = page_of(run)
    assert [attrs["id"] for attrs in page.named("section")] == SECTIONS
    drawn = {name for name, tags in page.charts.items() if any(tag == "figure" for tag, _ in tags)}
    assert drawn == {"loss", "rate", "grad-norm", "timeline", "shards", "memory", "traffic"}
    assert (run / "report.html").stat().st_size < 100_000, "it has no library of charts"
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "report.html",
        "report.json",
    ]


def test_its_curves_and_tables_have_the_numbers_of_the_metrics_log(run, data):
    page, lines = page_of(run), read_metrics(run / "metrics.jsonl")
    (loss,) = page.curves("loss")
    assert loss["x"] == [1, 2, 3, 4]
    assert loss["y"] == [3.0, 2.5, None, 1.25]
    paths = [attrs["d"] for tag, attrs in page.charts["loss"] if tag == "path"]
    assert [path.count("M") for path in paths] == [2, 2], (
        "linear and log, each with a gap where it is not finite"
    )
    (rate,) = page.curves("rate")
    assert rate["y"] == [line["rows_per_second"] for line in lines]
    row = re.search(r"\bloss ([\d. ]+?) grad_norm", page.texts["metrics"])[1].split()
    assert row == ["3", "1.25", "4", "3", "2.5", "1.25", "1"], (
        "first, lowest, its step, highest, median, last, not finite"
    )
    assert "learning_rate 0.125" in page.texts["config"]
    assert "mesh.data 2" in page.texts["config"]
    assert bytes_text(data["memory"]["total_bytes"]) in page.texts["memory"]
    for size in data["traffic"]["axes"].values():
        assert f"{size:,}" in page.texts["traffic"]
    for array in data["shards"]["arrays"]:
        assert f"{array['name']} " in page.texts["shards"]
    assert f"{data['timeline']['bubble_fraction']:.1%} idle" in page.texts["timeline"]


def test_loads_of_experts_are_a_map_of_layers_and_experts(data, tmp_path):
    folder = log_run(tmp_path / "experts", data)
    write_loads(folder, np.array([[1, 1, 1, 1], [0, 8, 2, 6]]), step=49)
    write_page(folder / "report.html", read_run(folder))
    page = page_of(folder)
    assert [attrs["id"] for attrs in page.named("section")] == ["metrics", "experts", *SECTIONS[1:]]
    tips = [
        f"layer {i}, expert {e}: {load} times the mean"
        for i, of in enumerate(LOADS)
        for e, load in enumerate(of)
    ]
    assert sorted(page.tips("experts")) == tips
    rects = [
        attrs for tag, attrs in page.charts["experts"] if tag == "rect" and "data-tip" in attrs
    ]
    places = {
        (int(tip["data-tip"][6]), int(tip["data-tip"][16])): (float(tip["y"]), float(tip["x"]))
        for tip in rects
    }
    assert all((int(y), int(x)) == at for at, (y, x) in places.items()), (
        "a row for each layer, a column for each expert"
    )
    assert "after 50 steps" in (folder / "report.html").read_text()
    assert re.search(r"\b1 1 2 0 0\s+$", page.texts["experts"]), (
        "the busiest expert of layer 1, and the idlest"
    )


@pytest.mark.parametrize(
    ("load", "colour"),
    [(0, LOW), (0.25, LOW), (1, EVEN), (1.02, EVEN), (4, HIGH), (100, HIGH), (2, "#d39589")],
)
def test_a_load_has_a_colour_between_that_of_a_quarter_and_of_four_times_the_mean(load, colour):
    (fill,) = re.findall(
        r'<g fill="(#\w+)"', make_charts({"experts": {"steps": 1, "loads": [[load]]}})["experts"]
    )
    assert fill == colour


def test_many_steps_are_thinned_out_to_means():
    lines = [{"step": at, "loss": float(at)} for at in range(2 * MAX_POINTS + 1)]
    curve = metrics(lines)["curves"]["loss"]
    assert curve["mean_of"] == 3
    assert len(curve["values"]) <= MAX_POINTS
    assert curve["values"][:2] == [1.0, 4.0]
    assert curve["steps"][:2] == [3, 6]
    assert curve["steps"][-1] == len(lines)


def test_jumps_of_the_loss_are_among_the_facts():
    lines = [{"step": step, "loss": 1e12 if step in (30, 60) else 2.0} for step in range(70)]
    page = render_page({"kind": "run", "name": "jumps", "metrics": metrics(lines)})
    assert (
        "jumps of the loss: 2</dt><dd>1e+12 at step 31, after 2; 1e+12 at step 61, after 2</dd>"
        in page
    )
    assert "jumps of the loss" not in render_page(
        {"kind": "run", "name": "none", "metrics": metrics(lines[:20])}
    )


def test_axes_have_round_numbers_inside_them():
    for low, high in ((0, 1), (1.25, 3.0), (-3, 12_345), (1e-9, 2e-9), (7, 7), (0, 0), (-2, -2)):
        scale = Scale.of([low, high])
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 11, (low, high)
        assert all(0 <= share <= 1 + 1e-9 for share, _ in ticks)
        assert len({text for _, text in ticks}) == len(ticks), "each number once"
    assert [text for _, text in Scale.of([0, 12_000]).ticks()] == ["0", "5,000", "10,000"]
    assert [text for _, text in Scale.of([0.01, 40], is_log=True).ticks()] == [
        "0.01",
        "0.1",
        "1",
        "10",
    ]
    assert [text for _, text in Scale.of([5.1, 5.9], is_log=True).ticks()] == [
        "5.2",
        "5.4",
        "5.6",
        "5.8",
    ]
    assert [number(size) for size in (0.25, 1234, 2_500_000, 0)] == ["0.25", "1,234", "2.5M", "0"]


def test_curves_of_steps_have_axes_of_one_width_and_buttons_outside_the_plots(run):
    page = page_of(run)
    for name in ("loss", "rate", "grad-norm"):
        figures = [attrs["class"] for tag, attrs in page.charts[name] if tag == "figure"]
        assert set(figures) == {"curves"}, "whose left column has a fixed width in page.css"
    style = (run / "report.html").read_text()
    assert re.search(r"figure\.curves \{ grid-template-columns: [\d.]+rem ", style)
    assert re.search(r"\.buttons \{ margin-left: auto; display: flex", style), (
        "in the row of the title, not over it"
    )
    assert "<figcaption><b>rows/s</b>" in style, "the unit of the fact above the charts"
    assert re.search(r"<dd>[\d,]+ rows/s \(median\)</dd>", style)


def test_on_a_telephone_facts_are_two_in_a_row_and_what_is_wider_shows_that_it_scrolls(run):
    """What the styles say; test_a_browser... looks at it where there is one."""
    styles = re.search(r"<style>(.*?)</style>", (run / "report.html").read_text(), re.DOTALL)[1]
    narrow = re.search(r"@media \(max-width: 600px\) \{(.*?)\n\}", styles, re.DOTALL)[1]
    assert "dl { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); }" in narrow
    scroll = re.search(r"\.scroll \{(.*?)\}", styles, re.DOTALL)[1]
    assert scroll.count("no-repeat scroll") == scroll.count("no-repeat local") == 2
    assert len(re.findall("--shade: ", styles)) == 2, "in light and dark"


def test_the_page_has_dark_colours_for_readers_who_want_them(run):
    style = re.search(r"<style>(.*?)</style>", (run / "report.html").read_text(), re.DOTALL)[1]
    light, dark = (
        set(re.findall(r"(--[\w-]+):", part))
        for part in style.split("prefers-color-scheme: dark")[:2]
    )
    assert light == dark >= {"--page", "--ink", "--panel", "--line"}
    rest = style.split("}", 4)[-1]
    assert re.findall(r"#[0-9a-f]{3,6}\b", rest) == ["#000"], (
        "every colour but that of text on coloured bars is one of these"
    )


def test_memory_has_one_unit_in_the_fact_the_chart_and_its_device(data):
    gib = 2**30
    for total, limit, unit in (
        (700 * 2**20, 80 * gib, "MiB"),
        (9 * gib, 80 * gib, "GiB"),
        (1023.8 * 2**20, None, "GiB"),
    ):
        memory = {
            "bars": {"stage 0": {"params": total}},
            "total_bytes": total,
            "limit_bytes": limit,
        }
        page = Page(render_page({"kind": "plan", "name": "one", "memory": memory}))
        assert f"{unit} on one device" in page.texts["memory"]
        assert bytes_text(total).endswith(unit)


def test_one_stage_has_no_timeline(data):
    page = Page(render_page({**data, "name": "one", "timeline": None}))
    assert "timeline" not in [attrs["id"] for attrs in page.named("section")]
    assert "#timeline" not in [attrs.get("href") for attrs in page.named("a")]
    assert "idle in the pipeline" not in render_page({**data, "name": "one", "timeline": None})
    broken = Page(
        render_page(
            {
                **data,
                "name": "one",
                "timeline": None,
                "problems": {"timeline": "ValueError: broken"},
            }
        )
    )
    assert "could not be gathered: ValueError: broken" in broken.texts["timeline"]


def test_the_page_loads_nothing_and_allows_its_own_scripts_alone(run):
    page = page_of(run)
    assert not [attrs for _, attrs in page.tags if {"src", "srcset", "data", "action"} & set(attrs)]
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert links
    assert all(link.startswith("#") for link in links), links
    assert not page.named("link")
    assert not page.named("iframe")
    (policy,) = [attrs["content"] for attrs in page.named("meta") if "http-equiv" in attrs]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    digest = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert re.findall(r"'sha256-([^']+)'", policy) == [
        digest(script) for script in page.scripts[1:]
    ]
    style = re.search(r"<style>(.*?)</style>", (run / "report.html").read_text(), re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_a_setting_without_a_value_is_shown_in_words(data):
    page = Page(
        render_page(
            {
                **data,
                "name": "plain",
                "config": {
                    "profile": None,
                    "keep_best": None,
                    "resume": False,
                    "mesh": {"data": 2},
                },
            }
        )
    )
    assert "None" not in page.texts["config"]
    assert page.texts["config"].count("not set") == 2
    assert "False" in page.texts["config"], "which is a value"


def test_text_of_a_user_is_shown_and_not_run(data, tmp_path):
    arrays = [{**array, "name": EVIL} for array in data["shards"]["arrays"]]
    found = {
        **data,
        "name": EVIL,
        "facts": {EVIL: EVIL},
        "problems": {"traffic": EVIL},
        "timeline": {**data["timeline"], "title": EVIL, "meanings": dict.fromkeys("FRBW", EVIL)},
        "shards": {**data["shards"], "arrays": arrays},
        "memory": {**data["memory"], "bars": {EVIL: {EVIL: 1}}},
        "metrics": metrics([{"step": 0, f"{EVIL}_loss": 1.0, f"{EVIL}_per_second": 2.0}]),
        "config": {EVIL: EVIL, "inner": {EVIL: [EVIL]}},
    }
    plain, evil = Page(render_page({**data, "name": "plain"})), Page(render_page(found))
    assert not evil.named("img")
    assert len(evil.scripts) == len(plain.scripts) == 2
    assert not [attrs for _, attrs in evil.tags if any(name.startswith("on") for name in attrs)]
    assert EVIL in evil.texts["config"], "it is shown as it is"
    assert any(EVIL in tip for tip in evil.tips("shards")), "which the script shows as text"
    assert ".innerHTML = html" in evil.scripts[1], "of the server, in which text is escaped"
    assert evil.scripts[1].count("innerHTML") == 1


def test_only_the_first_process_writes(data, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    log_run(tmp_path, data)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_that_fails_has_a_report_of_the_steps_before(data, tmp_path):
    def train():
        with MetricsLog(
            tmp_path, 4, items_per_step=8, watchers=[ReportWriter(tmp_path, lambda: data)]
        ) as log:
            log.log(0, {"loss": 3.0})
            log.log(1, {"loss": 2.0})
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train()
    page = page_of(tmp_path)
    assert page.curves("loss")[0]["y"] == [3.0]
    assert any(
        "1 of 4" in text
        for text in re.findall(r"<dd>(.*?)</dd>", (tmp_path / "report.html").read_text())
    )


def test_a_resumed_run_has_all_steps_and_says_where_it_began(data, tmp_path):
    log_run(tmp_path, data)
    with MetricsLog(
        tmp_path, 6, items_per_step=8, first_step=3, watchers=[ReportWriter(tmp_path, lambda: data)]
    ) as log:
        for at in (3, 4, 5):
            log.log(at, {"loss": float(at)})
    page = page_of(tmp_path)
    assert page.curves("loss")[0]["y"] == [3.0, 2.5, None, 3.0, 4.0, 5.0]
    assert "<dt>resumed</dt><dd>from step 3</dd>" in (tmp_path / "report.html").read_text()


def test_steps_before_a_resume_count_as_done_where_their_lines_are_missing(data, tmp_path):
    log_run(tmp_path, data | {"num_steps": 9})
    assert "without metrics" not in (tmp_path / "report.html").read_text()
    watchers = [ReportWriter(tmp_path, lambda: data | {"num_steps": 9})]
    with MetricsLog(tmp_path, 9, items_per_step=8, first_step=9, watchers=watchers):
        pass
    shown = (tmp_path / "report.html").read_text()
    assert "<dt>steps</dt><dd>9 of 9</dd>" in shown
    assert "<dt>steps without metrics</dt><dd>5</dd>" in shown


def test_data_that_cannot_be_gathered_do_not_end_a_run(step, tmp_path):
    _, state, mesh = step
    found = step_data(
        None, state, mesh, schedule=SCHEDULE, num_steps=4
    )  # which is no compiled step
    assert found["traffic"] is None
    assert found["shards"] is not None
    page = page_of(log_run(tmp_path, found))
    assert "could not be gathered: TypeError: fn must be a function" in page.texts["traffic"]


def test_a_report_that_cannot_be_written_does_not_end_a_run(data, tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "file").touch()
    log_run(tmp_path, data)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert f"{tmp_path / 'report.html'} could not be written: " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


# --- python -m jaxpar watch -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder, **flags):
    server = RunServer(folder, seconds=1, **flags)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=WAIT_SECONDS)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_watch_serves_the_page_and_new_lines_as_they_come(run, data, tmp_path):
    folder = log_run(tmp_path / "live", data)
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = ask(server, "/")
        page = Page(text)
        assert status == 200
        assert page.data["seconds"] == 1
        assert [attrs["id"] for attrs in page.named("section")] == SECTIONS
        assert "connect-src 'self'" in text
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "loss": 0.5, "step_seconds": 1.0}) + "\n")
        status, text = ask(server, "/live.json")
        live = json.loads(text)
        shown = Page(f'<div id="chart-loss">{live["charts"]["loss"]}</div>')
        assert shown.curves("loss")[0]["y"][-1] == 0.5
        assert "<dd>5 of 4</dd>" in live["tables"]["facts"]
        assert (shown_version := live["version"]) == page.data["version"]
        places = {attrs.get("id") for attrs in page.named("div")}
        assert {f"chart-{name}" for name in live["charts"]} <= places, (
            "the page has a place for each"
        )
        write_loads(folder, np.ones((2, 4)), step=4)
        live, page = json.loads(ask(server, "/live.json")[1]), Page(ask(server, "/")[1])
        assert live["version"] == page.data["version"] != shown_version, (
            "the page is loaded again, with the new section"
        )
        places = {attrs.get("id") for attrs in page.named("div")}
        assert {"chart-experts", "table-experts"} <= places
        assert "experts" in live["charts"].keys() & live["tables"].keys()


def test_watch_changes_nothing_and_answers_nobody_else(run):
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    with served(run) as server:
        assert ask(server, "/config.json")[0] == 404
        assert ask(server, "/../one/config.json")[0] == 404
        assert ask(server, "/", method="POST")[0] == 501
        assert ask(server, "/", method="DELETE")[0] == 501
        assert ask(server, "/", host="elsewhere.example")[0] == 421, (
            "a name that another site points here"
        )
        assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    with served(run, hosts=("gpu-box.example",)) as server:
        assert ask(server, "/", host="gpu-box.example")[0] == 200
        assert ask(server, "/", host="elsewhere.example")[0] == 421
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_watch_shows_a_run_that_still_compiles_and_reloads_once_it_trains(data, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with served(tmp_path) as server:
        text = ask(server, "/")[1]
        assert "known once the step is compiled" in text
        assert "No step has been logged yet." in text
        log_run(tmp_path, data)
        assert json.loads(ask(server, "/live.json")[1])["version"] != Page(text).data["version"]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("report.json", "[1]", "must be an object; got [1]"),
        (
            "report.json",
            '{"timeline": {"ops": []}}',
            "must be as this version of jaxpar writes them",
        ),
        (
            "expert_loads.json",
            '{"loads": [["low"]]}',
            "must be as this version of jaxpar writes them",
        ),
        ("metrics.jsonl", '{"step": 0, "loss": "low"}\n', "each an object of numbers"),
        ("config.json", "{", "must be JSON"),
    ],
)
def test_files_that_no_run_wrote_are_named(data, tmp_path, capsys, name, text, told):
    folder = log_run(tmp_path / "run", data)
    with served(folder) as server:
        (folder / name).write_text(text)
        status, answer = ask(server, "/live.json" if name == "metrics.jsonl" else "/")
        assert (status, told in json.loads(answer)["error"]) == (503, True)
    assert command(["watch", str(folder), "--out", str(tmp_path / "page.html")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_run_that_was_killed_before_it_wrote_anything_has_a_page(tmp_path, capsys):
    (tmp_path / ".lease").mkdir()
    assert command(["watch", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "whether it runs is not known" in (tmp_path / "page.html").read_text()


def test_watch_writes_the_page_of_a_run_that_could_not(run, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command(["watch", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert out.read_text() == (run / "report.html").read_text()
    assert command(["watch", str(run), "--out", str(tmp_path / "pages" / "new.html")]) == 0
    assert command(["watch", str(run), "--out", "/proc/pages/page.html"]) == 2
    assert (
        "--out's folder must be a folder that can be written to; got /proc/pages"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "0"], "--port must be from 1 to 65535; got 0. Choose 8765, say."),
        (["--seconds", "0"], "--seconds must be at least 0.5; got 0. Choose 5, say."),
        ([], "a run must be a folder with a config.json, metrics.jsonl or report.json; got"),
    ],
)
def test_watch_refuses_what_it_cannot_serve(tmp_path, capsys, flags, told):
    (tmp_path / "notes.txt").write_text("of something else")  # into an empty folder a run may come
    assert command(["watch", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


@pytest.mark.parametrize(("is_there", "what"), [(False, "does not exist"), (True, "is empty")])
def test_watch_waits_for_a_run_that_has_not_begun(monkeypatch, tmp_path, capsys, is_there, what):
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()

    def begin(_):
        assert not folder.is_dir() or not any(folder.iterdir()), "the folder is left as it is"
        (folder / ".lease").mkdir(parents=True)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setattr(runs.time, "sleep", begin)
    monkeypatch.setattr(RunServer, "serve_forever", lambda self: self.live())
    assert command(["watch", str(folder), "--port", str(port)]) == 0
    out, err = capsys.readouterr()
    told = f"{folder} {what}: its report is served once a run begins there; Ctrl-C ends this"
    assert told in err
    assert out.startswith(f"{folder} at http://127.0.0.1:{port}/")


@pytest.mark.parametrize("flags", [[], ["--out", "page.html"]])
def test_watch_does_not_wait_for_what_cannot_be_a_run(tmp_path, capsys, flags):
    file = tmp_path / "notes.txt"
    file.write_text("no folder")
    for path in (file, file / "run", *([tmp_path / "none"] if flags else [])):
        assert command(["watch", str(path), *flags]) == 2
        assert "a run must be a folder with a config.json" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--out", "page.html"]])
def test_watch_refuses_the_folder_of_a_model(tmp_path, capsys, flags):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert command(["watch", str(tmp_path), *flags]) == 2
    assert (
        "with a config.json, that of a model. Name a recipe's --out-dir." in capsys.readouterr().err
    )


def test_watch_names_a_port_that_is_taken(run, capsys):
    with served(run) as server:
        assert command(["watch", str(run), "--port", str(server.server_port)]) == 2
        told = (
            f"--address and --port must be free on this machine; got 127.0.0.1:{server.server_port}"
        )
        assert told in capsys.readouterr().err


# --- python -m jaxpar plan --------------------------------------------------------------------------------------------


def test_plans_show_every_axis_that_one_of_them_uses():
    settings = {
        "data": 2,
        "stage": 1,
        "tensor": 1,
        "schedule": "1f1b",
        "num_microbatches": 1,
        "zero": 1,
        "remat": False,
    }
    plan = settings | {
        "memory_bytes": 2**30,
        "step_seconds": 1.0,
        "bubble_fraction": 0.0,
        "why": "",
        "guesses": [],
        "uncounted": [],
    }
    names = "replica", "context", "experts"
    assert not any(name in plans([plan]) for name in names), "of size 1 they are left out"
    assert all(
        name in plans([plan, plan | {"replica": 2, "context": 4, "experts": "data"}])
        for name in names
    )


@pytest.mark.full
def test_the_report_of_a_plan_has_the_figures_that_it_prints(tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    few = ["--num-microbatches", "64", "--top", "2"]
    flags = ["--model", "gpt2", "--stage", "4", *few, "--json", "--report", str(out)]
    assert command(["plan", *flags]) == 0
    said = capsys.readouterr()
    best = json.loads(said.out)[0]
    assert said.err == f"wrote {out}\n"
    page = Page(out.read_text())
    assert [attrs["id"] for attrs in page.named("section")] == ["plans", *SECTIONS[1:]]
    assert bytes_text(best["memory_bytes"]) in page.texts["plans"]
    assert best["why"] in page.texts["plans"]
    axes = {axis: size for axis, size in best["bytes_moved"].items() if size}
    for size in axes.values():
        assert f"{size:,}" in page.texts["traffic"]
    params = sum(map(float, re.findall(r"params +([\d.]+) \w+", page.texts["memory"])))
    assert params > 0
    assert f"{best['num_microbatches']}" in page.texts["timeline"]
    assert f"num_microbatches {best['num_microbatches']}" in page.texts["config"]
    assert "layers_per_virtual_stage" in page.texts["config"]
    assert "step_seconds" not in page.texts["config"], "a figure of the plan is no setting"
    assert f"{best['tokens_per_second']:,.0f} tokens/s" in out.read_text()


# --- a browser --------------------------------------------------------------------------------------------------------


DRIVEN = """
const found = {};
const at = (element, x, y) => element.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: x, clientY: y }));
const tip = document.getElementById("tip");
const plot = document.querySelector("#chart-loss .of-linear .plot"), box = plot.getBoundingClientRect();
at(plot, box.right - 2, box.top + 5);
found.curve = tip.textContent;
const op = document.querySelector("#chart-timeline rect[data-tip]"), place = op.getBoundingClientRect();
at(op, place.left + 1, place.top + 1);
found.op = tip.textContent;
at(document.body, 1, 1);
found.beside = tip.textContent;
const height = (name) => document.querySelector("#chart-loss .of-" + name).offsetHeight > 0;
document.querySelector("#chart-loss button[data-scale=log]").click();
found.scales = [height("linear"), height("log")];
const svg = document.querySelector("#chart-rate svg"), before = svg.clientWidth;
document.querySelector("#chart-rate button[data-zoom='2']").click();
found.zoomed = svg.clientWidth / before;
const left = (name) => document.querySelector("#chart-" + name + " .scroll").getBoundingClientRect().left;
found.lefts = ["loss .of-log", "rate", "grad-norm"].map(left);
const boxes = [...document.querySelectorAll("#table-facts dl > div")].map((box) => box.getBoundingClientRect());
found.facts = boxes.map((box) => [Math.round(box.left), Math.round(box.top)]);
found.facts_width = Math.max(...boxes.map((box) => box.right)) - Math.min(...boxes.map((box) => box.left));
const wide = [...document.querySelectorAll(".scroll:has(> table)")].filter((box) => box.scrollWidth > box.clientWidth);
found.wide = wide.length;
found.shadows = wide.map((box) => getComputedStyle(box).backgroundImage.split("linear-gradient").length - 1);
found.scrolls = wide.map((box) => { box.scrollLeft = 50; return box.scrollLeft; });
found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
parent.document.title = JSON.stringify(found);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_browser_shows_values_zooms_and_keeps_the_page_in_its_width(run, tmp_path):
    text = (run / "report.html").read_text()
    policy = re.search(r"<meta http-equiv.*?>", text)[0]
    driven = text.replace(policy, "").replace("</body>", f"<script>{{{DRIVEN}}}</script></body>")
    page = tmp_path / "page.html"
    page.write_text(
        f'<iframe width=390 height=900 srcdoc="{html.escape(driven)}"></iframe>'
    )  # a window has 500 or more
    flags = [
        "--no-sandbox",
        "--headless",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'browser'}",
    ]
    flags += ["--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    assert found["curve"] == "4\nloss: 1.2500"
    assert found["op"] == "F forward\nstage 0, microbatch 0, from 0 to 1"
    assert found["beside"] == ""
    assert found["scales"] == [False, True]
    assert found["zoomed"] == pytest.approx(2, rel=0.01)
    assert len(set(found["lefts"])) == 1, "the axes of the curves are aligned"
    assert found["overflow"] == 0
    lefts, tops = zip(*found["facts"], strict=True)
    assert lefts == (*lefts[:2] * (len(lefts) // 2), *lefts[: len(lefts) % 2]), (
        "facts are two in a row"
    )
    assert lefts[0] < lefts[1]
    assert tops[0] == tops[1] < tops[2]
    assert found["facts_width"] > 330, "as wide as the page"
    assert found["wide"] >= 2, "tables that are wider than the page"
    assert set(found["shadows"]) == {4}, (
        "a shadow at each side where there is more, which the ends of the table cover"
    )
    assert all(found["scrolls"])
