"""Rows of tokens read by their numbers from Parquet and ArrayRecord: the rows that were written, and no others are read."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.data import records
from jaxpar.data.corpus import tokenise
from jaxpar.data.packing import IGNORED, PackedRows
from jaxpar.data.records import (
    RecordRows,
    Records,
    holds_tokens,
    open_records,
    tokens_of,
    write_rows,
)
from jaxpar.data.text import ByteTokenizer
from tests.support import own_rows
from tests.support.texts import make_documents
from tests.support.waiting import WAIT_SECONDS

SEQ, VOCAB = 8, 100


@pytest.fixture(scope="module")
def packed():
    documents = make_documents(
        np.random.default_rng(0), [5, 3, 12, 9, 4] * 40, vocab=VOCAB, learned=0.8
    )
    return PackedRows(documents, SEQ, vocab_size=VOCAB)


def write_array_record(path, examples, *, group_size=1):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), f"group_size:{group_size}")
    for example in examples:
        writer.write(json.dumps(example).encode())
    writer.close()
    return path


def write_parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=4)
    return path


@pytest.fixture(scope="module", params=["parquet", "arrayrecord"])
def file(request, packed, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / f"rows.{request.param}"
    if request.param == "parquet":
        write_rows(path, packed, batch_size=37)
    else:
        columns = records.as_records(packed.take(np.arange(len(packed))))
        write_array_record(
            path,
            [dict(zip(records.WRITTEN, row, strict=True)) for row in zip(*columns, strict=True)],
        )
    return path


def same_documents(got, want):
    """Tokens and targets where there is something to learn or to see, and the same borders of documents."""
    np.testing.assert_array_equal(got["targets"], want["targets"])
    np.testing.assert_array_equal(got["tokens"], want["tokens"])
    np.testing.assert_array_equal(np.diff(got["segments"]) != 0, np.diff(want["segments"]) != 0)


def test_rows_that_are_written_are_read_again(packed, file):
    rows = RecordRows(open_records([file]), SEQ, vocab_size=VOCAB)
    rows.check()
    assert len(rows) == len(packed)
    chosen = np.random.default_rng(0).permutation(len(packed))
    same_documents(rows.take(chosen), packed.take(chosen))
    same_documents(rows.take(chosen[:0]), packed.take(chosen[:0]))


def test_batches_are_those_of_the_rows_in_memory(packed, file):
    rows = RecordRows(open_records([file]), SEQ, vocab_size=VOCAB)
    for step in (0, 7, 40):
        where = {"seed": 2, "step": step, "multiple": 8}
        same_documents(rows.batch(24, **where), packed.batch(24, **where))
        own = [rows.batch(24, **where, only=only) for only in (np.arange(12), np.arange(12, 24))]
        same_documents(
            {k: np.concatenate([o[k] for o in own]) for k in own[0]}, packed.batch(24, **where)
        )


def test_several_files_are_one_after_another(file, packed):
    both = open_records([file, file])
    assert len(both) == 2 * len(packed)
    assert both[len(packed) + 3] == both[3]
    part = RecordRows(both, SEQ, vocab_size=VOCAB, part=(len(packed), 2 * len(packed)))
    same_documents(part.take(np.arange(5)), packed.take(np.arange(5)))


def test_of_a_parquet_file_only_the_row_groups_asked_for_are_read(tmp_path, monkeypatch):
    path = write_parquet(
        tmp_path / "a.parquet", input_ids=[[i, i + 1] for i in range(40)], other=["x"] * 40
    )
    read = []
    from pyarrow.parquet import ParquetFile

    take_group = ParquetFile.read_row_group
    monkeypatch.setattr(
        ParquetFile,
        "read_row_group",
        lambda self, group, columns: (
            read.append((group, columns)),
            take_group(self, group, columns),
        )[1],
    )
    rows = RecordRows(open_records([path]), SEQ, vocab_size=VOCAB)
    assert rows.take(np.array([30, 5, 31, 6]))["tokens"][:, 0].tolist() == [30, 5, 31, 6]
    assert read == [(1, ["input_ids"]), (7, ["input_ids"])]


def test_only_what_a_process_is_asked_for_is_read(packed):
    class Counted(list):
        num_read = 0

        def __getitem__(self, index):
            self.num_read += 1
            return super().__getitem__(index)

    source = Counted({"input_ids": [i, i + 1]} for i in range(64))
    RecordRows(source, SEQ, vocab_size=VOCAB).batch(32, seed=0, step=0, only=np.arange(8, 16))
    assert source.num_read == 8


def test_labels_and_documents_are_optional_and_no_target_crosses_a_document():
    source = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"input_ids": [1, 2, 3, 4], "segment_ids": [5, 5, 9, 9]},
    ]
    rows = RecordRows(source, 4, vocab_size=VOCAB).take(np.arange(3))
    assert rows["targets"].tolist() == [
        [2, 3, IGNORED, IGNORED],
        [IGNORED, 3, 4, IGNORED],
        [2, IGNORED, 4, IGNORED],
    ]
    assert rows["segments"].tolist() == [[0, 0, 3, 3], [0, 0, 0, 4], [0, 0, 1, 4]]


def test_fields_of_a_record_that_are_null_are_left_out():
    record, names = {"input_ids": [1, 2, 3]}, ("labels", "targets", "segment_ids", "attention_mask")
    with_nulls = record | dict.fromkeys(names)
    rows = RecordRows([record, with_nulls], 4, vocab_size=VOCAB)
    rows.check()
    assert all(np.array_equal(*column) for column in rows.take(np.arange(2)).values())
    assert tokens_of([with_nulls], 0).tolist() == [1, 2, 3]


def test_padding_that_a_mask_names_is_left_out_before_and_after_the_tokens():
    source = [
        {"input_ids": [1, 2, 3, 0, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0, 0]},
        {"input_ids": [0, 0, 1, 2, 3], "attention_mask": np.array([0, 0, 1, 1, 1], bool)},
        {"input_ids": [0, 1, 2], "labels": [-100, 1, 2], "attention_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 3], "attention_mask": None},
    ]
    rows = RecordRows(source, 4, vocab_size=VOCAB).take(np.arange(4))
    one, short = [2, 3, IGNORED, IGNORED], [2, IGNORED, IGNORED, IGNORED]
    assert rows["targets"].tolist() == [one, one, short, one]
    assert rows["tokens"][:2].tolist() == [[1, 2, 0, 0]] * 2
    assert [tokens_of(source, number).tolist() for number in (1, 2)] == [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *(
            (
                {"input_ids": [1, 2, 3], "attention_mask": mask},
                r'"attention_mask" of a record must have a number for each of its 3 input_ids: .* It is record 2',
            )
            for mask in ([1, 1], [1, 0, 1], [1, 1, 2])
        ),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "must have from 2 to 9 input_ids"),
        (
            {"text": "a"},
            r'must have "input_ids", a list of integers; got another. .* It is record 2',
        ),
        ([1, 2], 'must have "input_ids"'),
        (
            {"input_ids": [0.5, 1]},
            r'"input_ids" of a record must be a list of integers; got float64',
        ),
        (
            {"input_ids": [[1], [2]]},
            r'"input_ids" of a record must be a list of integers; got int64 of shape \(2, 1\)',
        ),
        (
            {"input_ids": [1]},
            "seq=8 must have from 2 to 9 input_ids, and as many labels and segment_ids; got 1, 1, 1",
        ),
        (
            {"input_ids": [1] * 10},
            "seq=8 must have from 2 to 9 input_ids, and as many labels and segment_ids; got 10, 10, 10",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, "as many labels and segment_ids; got 2, 1, 2"),
        (
            {"input_ids": [1] * 9, "targets": [1] * 9},
            "seq=8 must have from 1 to 8 input_ids, and as many targets and",
        ),
        (
            {"input_ids": [1, 100]},
            "must be from 0 to below the model's vocab_size; got 100, vocab_size=100. Choose",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, -7]},
            r"must be from 0 to below the model's vocab_size; got -7, .*\. Write them again\.",
        ),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_with_its_number(record, message):
    with pytest.raises(ValueError, match=message):
        RecordRows([{"input_ids": [1, 2]}, record], SEQ, vocab_size=VOCAB).check()


def test_a_record_of_more_documents_than_the_model_is_told_is_refused_when_it_is_read():
    few, many = (
        {"input_ids": [1] * 7, "segment_ids": each}
        for each in ([0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2])
    )
    told = lambda most: RecordRows([few, many], SEQ, vocab_size=VOCAB, max_documents=most)
    told(3).take(np.array([0]))
    with pytest.raises(
        ValueError,
        match=r"got 4, max_documents=3. Choose max_documents=4 or more, or leave it out. It is record 2",
    ):
        told(3).take(np.arange(2))
    told(4).take(np.arange(2))
    assert told(4).max_documents == 4
    assert told(None).max_documents is None


def test_files_that_cannot_be_used_are_refused(tmp_path):
    for suffix in ("parquet", "arrayrecord"):
        (tmp_path / f"a.{suffix}").write_bytes(b"nothing of the kind" * 9)
        with pytest.raises(ValueError, match=rf"must be a whole \w+ file; got .* in .*a.{suffix}"):
            open_records([tmp_path / f"a.{suffix}"])
    with pytest.raises(
        ValueError,
        match=r"read from .parquet or .arrayrecord; got .*a.jsonl. Write them by jaxpar.data.rec",
    ):
        open_records([tmp_path / "a.jsonl"])
    with pytest.raises(ValueError, match="a source of records must have at least one; got none"):
        RecordRows(Records([]), SEQ, vocab_size=VOCAB)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(
        ValueError, match=r"written to a new .parquet file; got .*b.parquet. Name another"
    ):
        write_rows(tmp_path / "b.parquet", None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"input_ids": [1, 2], "labels": [-100, -100]},
            "must have labels to learn, of tokens that are no padding; got -100 alone there",
        ),
        (
            {"input_ids": [1, 2], "labels": [5, -100]},
            "must have labels to learn, .*; got -100 alone",
        ),
        (
            {"input_ids": [1, 2], "targets": [-100, -100]},
            "must have labels to learn, .*; got -100 a",
        ),
        (
            {"labels": [-100, -100, 5, 5], "attention_mask": [1, 1, 0, 0]},
            "must have labels to learn, of tokens that are no padding; got -100 alone there",
        ),
        ({"segment_ids": [0, 1, 0, 1]}, "got segment_ids by which no token with a label follows"),
        (
            {"labels": [-100, -100, 7, -100], "segment_ids": [0, 0, 1, 1]},
            "got segment_ids by which no token with a label follows one of its own segment",
        ),
    ],
)
def test_records_without_a_token_to_learn_are_refused_with_what_they_lack(record, message):
    usual = {"input_ids": [1, 2, 3, 4]}
    check = lambda record: RecordRows([usual, record], SEQ, vocab_size=VOCAB, part=(1, 2)).check()
    with pytest.raises(ValueError, match=rf"{message}.*\. The first is record 2\.$"):
        check(usual | record)
    if "segment_ids" in record:
        unlearned = usual | {"labels": [IGNORED] * 4}
        rows = RecordRows([unlearned, usual | record], SEQ, vocab_size=VOCAB)
        with pytest.raises(ValueError, match=rf"{message}.*\. The first is record 2\.$"):
            rows.check()
        labels = {name: value for name, value in record.items() if name == "labels"}
        check(usual | labels)
        check(usual | labels | {"segment_ids": [0, 0, 0, 1]})


@pytest.mark.parametrize("form", ["parquet", "array_record"])
def test_text_in_records_is_tokenised_like_text_in_lines(tmp_path, form):
    examples = [{"text": "one"}, {"prompt": "two", "completion": "three"}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(example) + "\n" for example in examples))
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        columns = {
            name: [example.get(name) for example in examples]
            for name in ("text", "prompt", "completion")
        }
        write_parquet(path, **columns)
    else:
        write_array_record(path, examples)
    assert not holds_tokens(path)
    got, want = (
        tokenise([each], ByteTokenizer(), tmp_path / "cache").documents for each in (path, lines)
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.learned, want.learned)
    np.testing.assert_array_equal(got.ends, want.ends)
    assert (got.place(1), want.place(1)) == (f"{path}, example 2", f"{lines}:2")


def test_records_of_tokens_are_told_from_records_of_text(file, tmp_path):
    assert holds_tokens(file)
    assert not holds_tokens(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("package", "suffix"), [("pyarrow", "parquet"), ("grain.sources", "arrayrecord")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, suffix):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / f"a.{suffix}").write_bytes(b"")
    with pytest.raises(ImportError, match=r"got .*\. Install it: pip install -e '\.\[records\]'"):
        open_records([tmp_path / f"a.{suffix}"])


@pytest.mark.full
def test_two_processes_read_their_own_records_and_columns_and_go_on_with_the_batches_of_one(
    packed, tmp_path
):
    for number in range(2):
        write_rows(tmp_path / f"rows-{number}.parquet", packed)
    mesh = jaxpar.make_mesh(data=4, devices=jax.devices()[:4])
    whole = own_rows.read_steps(tmp_path, mesh, range(12))
    command = [sys.executable, "-m", "jaxpar", "launch", "-n", "2", "--devices-per-process", "2"]
    command += [own_rows.__file__, str(tmp_path), "9", "12", str(tmp_path / "two")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [json.loads((tmp_path / f"two-{process}.json").read_text()) for process in range(2)]
    *columns, in_order = (
        parts[0][-1]["columns"],
        parts[1].pop()["columns"],
        parts[0].pop()["batch"],
    )
    assert columns == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]], (
        "two chunks of each of its two devices"
    )
    assert (
        in_order
        == own_rows.read_columns(jaxpar.make_mesh(context=4, devices=jax.devices()[:4]))["batch"]
    )
    assert in_order["tokens"][0] == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    for want, *steps in zip(whole[9:], *parts, strict=True):
        for found in steps:
            assert found["batch"] == want["batch"], (
                "the batch of one process, from the same step on"
            )
            assert found["read"] == found["own"], (
                "no record of another process is read, and none twice"
            )
        first, second = ([tuple(each) for each in found["own"]] for found in steps)
        assert (len(first), len(second)) == (8, 5), "rows of padding are read by none"
        assert sorted(first + second) == sorted(tuple(each) for each in want["own"])
