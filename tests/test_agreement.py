"""Processes that would train on different data are told before the first step, and the message says what differs."""

import types

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar import data_parallel
from jaxpar.data import checksums, same_batch
from jaxpar.data.batches import Columns, Mixture, RowSource
from jaxpar.data.packing import Documents, PackedRows
from jaxpar.data.records import RecordRows, Records, open_records, write_rows
from jaxpar.data.text import Windows
from jaxpar.run import BasicFlags, ConfigError, Run
from jaxpar.run.batches import Batches, held_out_batches
from jaxpar.runtime import coordination
from tests.support.fake_service import stand_in
from tests.support.real_runs import ROOT, run

TOKENS = np.arange(64, dtype=np.uint16) % 50


def rows_of(kind, tokens, folder):
    """Rows of a kind, of these tokens."""
    documents = Documents(tokens, np.array([0, 30]), np.array([30, 64]))
    if kind == "records":
        path = folder / f"{tokens[40]}.parquet"
        write_rows(path, PackedRows(documents, 8, vocab_size=100))
        return RecordRows(open_records([path]), 8, vocab_size=100)
    if kind == "other records":
        return RecordRows(
            Records([(1, lambda index: {"input_ids": tokens.tolist()})]), 64, vocab_size=100
        )
    made = {
        "columns": lambda: Columns({"x": tokens}),
        "windows": lambda: Windows([tokens], 8, vocab_size=100),
        "packed": lambda: PackedRows(documents, 8, vocab_size=100),
    }
    if kind == "mixture":
        return Mixture([made["packed"](), made["windows"]()])
    return made[kind]()


@pytest.mark.parametrize(
    "kind", ["columns", "windows", "packed", "records", "other records", "mixture"]
)
def test_the_checksum_of_rows_depends_on_each_of_their_tokens(tmp_path, kind):
    changed = TOKENS.copy()
    changed[40] += 1
    first, again, other = (
        rows_of(kind, tokens, tmp_path / name).checksum()
        for name, tokens in folders(tmp_path, changed)
    )
    assert first == again
    assert first != other


def folders(tmp_path, changed):
    for name in "abc":
        (tmp_path / name).mkdir()
    return zip("abc", (TOKENS, TOKENS, changed), strict=True)


def test_the_checksum_of_rows_of_a_class_of_ones_own_is_that_of_the_first_and_the_last():
    class Own(RowSource):
        def __init__(self, last):
            self.last = last

        def __len__(self):
            return 5

        def take(self, rows):
            return {"x": np.where(rows == 4, self.last, rows)}

    assert Own(1).checksum() == Own(1).checksum() != Own(2).checksum()


def test_of_data_that_are_too_large_evenly_spread_blocks_are_read(monkeypatch):
    monkeypatch.setattr(checksums, "MOST_BYTES", 2**18)
    read = []
    monkeypatch.setattr(checksums.zlib, "crc32", lambda block, found: read.append(len(block)) or 0)
    checksums.checksum([np.zeros(2**20, np.uint8)])
    assert sum(read[1:]) == 2**18


def with_another(monkeypatch, change):
    """Makes this process one of two that exchange values; the other has those of this one, changed."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(coordination, "exchange", lambda name, value: [value, change(dict(value))])


@pytest.fixture
def tiny_run(tmp_path):
    run = Run(
        BasicFlags.of(out_dir=tmp_path / "out", steps=3), jaxpar.make_mesh(), {"text": "crc32 1"}
    )
    run.target = "a state"  # none is compiled here
    return run


class NotLowered:
    def lower(self, *_):
        raise AssertionError("nothing is traced before the processes agree")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "rows to learn from",
            "7 rows, crc32 0",
            "'7 rows, crc32 0' on process 1, '16 rows, crc32 .*' on process 0",
        ),
        ("setting text", "crc32 2", "'crc32 2' on process 1, 'crc32 1' on process 0"),
        ("flag steps", 4, "4 on process 1, 3 on process 0"),
        ("jax.config jax_enable_x64", "other", "'other' on process 1, 'False' on process 0"),
    ],
)
def test_a_run_whose_processes_differ_is_refused_before_anything_is_traced(
    tiny_run, monkeypatch, name, value, message
):
    Batches(tiny_run, Columns({"x": TOKENS[:16]}), 8, 1)
    with_another(monkeypatch, lambda values: values | {name: value})
    with pytest.raises(
        ConfigError,
        match=f"all processes must agree on their {name} before they train; got {message}",
    ):
        tiny_run.compile(NotLowered(), None)


def test_all_that_differs_is_named(monkeypatch):
    with_another(monkeypatch, lambda values: {"rows": 2, "steps": 4})
    with pytest.raises(
        ValueError,
        match="on their rows, steps before they train; got rows 2 on process 1, 1 on process 0; ste",
    ):
        coordination.check_agreement("train", {"rows": 1, "steps": 3})


def test_rows_held_out_are_compared_too(monkeypatch):
    with_another(monkeypatch, lambda values: values | {"rows held out": "others"})
    with pytest.raises(
        ConfigError, match="on their rows held out before they evaluate; got 'others' on process 1"
    ):
        held_out_batches(8, 8, Columns({"x": TOKENS}), jaxpar.make_mesh())


def test_the_first_whole_batch_of_its_shapes_must_be_the_same_everywhere(monkeypatch):
    mesh, asked = jaxpar.make_mesh(data=8), []
    monkeypatch.setattr("jaxpar.data.same_batch._compared", set())
    with_another(monkeypatch, lambda values: {"batch": "another"})
    jaxpar.shard_batch({"x": np.ones((24, 2))}, mesh)  # this process holds all of the mesh
    monkeypatch.setattr("jaxpar.data.same_batch._is_of_all", lambda mesh: True)
    with_another(monkeypatch, lambda values: asked.append(values) or values)
    for rows in (8, 8, 16):
        jaxpar.shard_batch(
            {"x": np.ones((rows, 2)), "key": jax.random.split(jax.random.key(0), rows)}, mesh
        )
    assert len(asked) == 2, "once for each kind"
    with_another(monkeypatch, lambda values: {"batch": "another"})
    with pytest.raises(
        ValueError,
        match=r"must agree on their batch before they shard a whole batch; got 'another' on process 1, .*If each process gives "
        r"its own rows, .* add num_rows, .*: jaxpar\.shard_batch\(batch, mesh, num_rows=\.\.\.\)\.",
    ):
        jaxpar.shard_batch({"x": np.ones((24, 2))}, mesh)


@pytest.mark.parametrize("rows", ["equal", "own", "zeros"])
def test_processes_that_give_the_same_bytes_for_unlike_rows_are_told_once(
    monkeypatch, capsys, rows
):
    draw = lambda: (
        np.zeros((4, 3)) if rows == "zeros" else np.random.default_rng(0).normal(size=(4, 3))
    )
    service = stand_in(monkeypatch, process=1)
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(same_batch, "_looks", {"done": 0})
        for _ in range(3):
            own = process if rows == "own" else 0
            same_batch.look_for_equal_rows(
                {"x": draw() + own, "y": np.zeros(4)}, [np.arange(4) + 4 * process]
            )
    told = "processes 0, 1 give shard_batch the same bytes for unlike rows of its first batch"
    assert capsys.readouterr().err.count(told) == (rows == "equal")
    assert len(service.values) == (0 if rows == "zeros" else 2)
    is_replicated = same_batch.remark_on_equal_rows([["rows", "bytes"], None, ["rows", "bytes"]])
    assert is_replicated == "", (
        "processes that share rows over another axis, and one that has told nothing yet"
    )


def test_later_whole_batches_are_compared_where_the_processes_meet(monkeypatch, tiny_run):
    mesh, told = jaxpar.make_mesh(data=8), []
    monkeypatch.setattr("jaxpar.data.same_batch._compared", set())
    monkeypatch.setattr("jaxpar.data.same_batch._is_of_all", lambda mesh: True)
    with_another(monkeypatch, lambda values: told.append(values) or values)
    monkeypatch.setattr("jaxpar.data.same_batch._later", {"batches": 0, "crc32": 0})
    tiny_run._log = types.SimpleNamespace(flush=lambda: None)
    for value in (1, 2, 2, 3):
        jaxpar.shard_batch({"x": np.full((8, 2), value)}, mesh)
        tiny_run._before_save()
    _, *later = [values["batches after the first"] for values in told if "batch" not in values]
    assert len(set(later)) == 3, "each batch counts"
    assert [each.split()[0] for each in later] == ["1", "2", "3"]
    with_another(monkeypatch, lambda values: {"batches after the first": "3 of crc32 00000000"})
    with pytest.raises(
        ValueError, match=r"on their batches after the first before they train on; .* add num_rows"
    ):
        tiny_run._before_save()


@pytest.mark.parametrize(
    ("axes", "processes", "has_columns", "are_shared"),
    [
        ({"data": 4}, [0, 0, 1, 1], False, False),
        ({"data": 2, "stage": 2}, [0, 1, 0, 1], False, True),
        ({"data": 2, "stage": 2}, [0, 0, 1, 1], False, False),
        ({"context": 4}, [0, 0, 1, 1], False, True),
        ({"context": 4}, [0, 0, 1, 1], True, False),
        ({"context": 2, "tensor": 2}, [0, 1, 0, 1], True, True),
    ],
)
def test_rows_are_shared_where_devices_of_several_processes_hold_them(
    axes, processes, has_columns, are_shared
):
    sizes = {axis: axes.get(axis, 1) for axis in jaxpar.make_mesh().axis_names}
    devices = [types.SimpleNamespace(process_index=process) for process in processes]
    by_axis = np.array(devices, object).reshape(tuple(sizes.values()))
    mesh = types.SimpleNamespace(axis_names=tuple(sizes), devices=by_axis)
    assert data_parallel._are_shared(mesh, has_columns=has_columns) == are_shared


def test_rows_that_several_processes_hold_must_be_the_same_in_all(monkeypatch, tiny_run):
    monkeypatch.setattr(same_batch, "_compared", set())
    monkeypatch.setattr(same_batch, "_later_of_places", {})
    monkeypatch.setattr(same_batch, "_is_of_all", lambda mesh: True)
    with_another(monkeypatch, lambda values: values)
    rows, told = {"rows": np.arange(8), "num_rows": 16, "num_parts": 2}, []
    check = lambda batch: same_batch.check_same_rows(batch, tiny_run.mesh, **rows)

    def with_answer(change):
        monkeypatch.setattr(
            same_batch, "exchange", lambda name, own: [told.append(own) or own, change(own)]
        )

    same, other_rows = dict, lambda own: {"other rows": "other bytes"}
    for change in (same, other_rows):
        with_answer(change)
        monkeypatch.setattr(same_batch, "_compared", set())
        for value in (1, 2, 3):
            check({"x": np.full((8, 2), value)})
    assert len(told) == 2, "the first of its shapes"
    same_batch.check_same_since()
    assert [each[:11] for each in told[-1].values()] == ["4 of crc32 "] * 2, "of two replicas"
    with_answer(lambda own: dict.fromkeys(own, "other bytes"))
    message = r"hold the same rows, .* before they %s; got other bytes on process 1, .* on process 0\..* a seed that they share"
    with pytest.raises(ValueError, match=message % "go on"):
        same_batch.check_same_since()
    with pytest.raises(ValueError, match=message % "shard their first batch"):
        check({"x": np.ones((8, 3))})
    with_answer(lambda own: dict([*own.items()][1:]))
    check({"x": np.ones((8, 4))})  # the other holds the rows of one replica


OF_ONE_PROCESS = """
import sys
import jaxpar
jaxpar.initialize()
import jax, jax.numpy as jnp, numpy as np
what, process = sys.argv[1], jax.process_index()
mesh = jaxpar.make_mesh(stage=2)
model = jaxpar.LayeredModel(lambda o, b: b["x"], lambda w, h: h * w, lambda o, h: h)
own = 1.0 + (process if what == "loss" else 0)
loss = lambda y, batch: (own * y.sum(), jnp.float32(len(y)))
params = {"outer": {}, "layers": jnp.ones((2, 1))}
shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
evaluate = jaxpar.make_eval_step(model, loss, jaxpar.Parallel(mesh, shardings))
x = np.ones((4, 1), np.float32) * (1 + (process if what == "rows" else 0))
batch = jaxpar.shard_batch({"x": x}, mesh, num_rows=4)
print("sum", float(evaluate(jaxpar.shard(params, shardings), batch)[0]))
"""


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("rows", "must agree on them before they shard their first batch"),
        ("loss", "must agree on their program before they run an evaluation"),
        ("nothing", "sum 4.0"),
    ],
)
def test_two_real_processes_of_other_rows_or_another_evaluation_end_with_2(tmp_path, what, told):
    (tmp_path / "script.py").write_text(OF_ONE_PROCESS)
    code, out, err = run(
        *("-m", "jaxpar", "launch", "-n", 2, "--log-dir", tmp_path, tmp_path / "script.py", what)
    )
    assert code == (0 if what == "nothing" else 2), out + err
    assert told in out + err


DATA_OF_ITS_OWN = """
import os, sys
os.chdir(os.path.join(sys.argv.pop(1), os.environ["JAX_PROCESS_ID"]))
sys.path.insert(0, sys.argv.pop(1))
import gpt
from jaxpar.commands import recipe
recipe.run(gpt.main, gpt.Config, sys.argv[1:])
"""


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("change", ["a byte", "a third"])
def test_two_real_processes_with_other_data_at_one_path_end_with_2(tmp_path, change):
    text = bytes(np.random.default_rng(0).integers(97, 122, 3 * 2**16, np.uint8))
    middle = len(text) // 3
    other = text[:middle] if change == "a third" else text[:middle] + b"~" + text[middle + 1 :]
    for process, content in enumerate((text, other)):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "text.txt").write_bytes(content)
    (tmp_path / "script.py").write_text(DATA_OF_ITS_OWN)
    launch = [
        "-m",
        "jaxpar",
        "launch",
        "-n",
        2,
        "--log-dir",
        tmp_path / "logs",
        tmp_path / "script.py",
    ]
    flags = ["--mesh.data", 2, "--data", "text.txt", "--steps", 3, "--out-dir", tmp_path / "out"]
    code, out, err = run(*launch, tmp_path, ROOT / "recipes", *flags)
    assert code == 2, out + err
    assert "all processes must agree on their" in out, out + err
    assert "rows to learn from" in out
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
