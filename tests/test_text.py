"""Text to learn from: where it comes from, how it is cut, and which files are refused."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from jaxpar.data.text import (
    Sample,
    Text,
    Windows,
    held_out,
    load_text,
    mixed_unigram_loss,
    read_tokens,
    unigram_loss,
)


def write_llm_c(path, tokens, *, magic=20240520, version=1, count=None, dtype=np.uint16):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def write_files(folder, num=40):
    for i in range(num):
        (folder / f"sub{i % 3}").mkdir(exist_ok=True)
        (folder / f"sub{i % 3}" / f"{i}.txt").write_text(f"text {i} " * 20)
    return folder


@pytest.fixture(scope="module")
def library():
    return load_text()


def test_the_default_is_real_text_found_on_this_machine(library):
    (train,), (test,) = library.train, library.test
    assert library.is_bytes
    assert train.dtype == test.dtype == np.uint8
    assert len(train) > 4_000_000
    assert 0.03 < len(test) / (len(train) + len(test)) < 0.25
    assert b"def __init__(self" in train.tobytes()
    assert 2.5 < unigram_loss(library.train, library.test) < 4


def test_train_and_test_share_no_file(tmp_path):
    text = load_text(write_files(tmp_path))
    train, test = (set(part[0].tobytes().split(b"\0")) - {b""} for part in (text.train, text.test))
    assert len(train) + len(test) == 40
    assert train.isdisjoint(test)


def test_the_split_depends_on_the_names_of_the_files_alone(tmp_path):
    first = load_text(write_files(tmp_path)).test[0].tobytes()
    (tmp_path / "sub0" / "0.txt").write_text("other text")
    held_out = {
        part for part in load_text(tmp_path).test[0].tobytes().split(b"\0") if part != b"other text"
    }
    assert held_out <= set(first.split(b"\0"))


@pytest.mark.parametrize("name", ["val", "eval", "my-dev-2"])
def test_files_of_text_named_for_it_are_held_out(tmp_path, name):
    (write_files(tmp_path, 8) / f"{name}.txt").write_text("held out")
    text = load_text(tmp_path)
    assert text.test[0].tobytes() == b"held out\0"
    assert len(text.train[0].tobytes().split(b"\0")) == 9


def test_hidden_files_are_left_out(tmp_path):
    write_files(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\0\0")
    assert load_text(tmp_path).is_bytes


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.jsonl", "my-val.jsonl"], [False, True]),
        (["train/a.jsonl", "test/b.jsonl"], [False, True]),
        (["train/a.jsonl", "train/val.jsonl"], [False, True]),
        (["a/validation/0.jsonl", "b/0.jsonl", "b/contest.jsonl"], [True, False, False]),
        (["test/a.jsonl", "test/b.jsonl"], [False, False]),
        ([], []),
    ],
)
def test_files_are_held_out_by_their_names_or_those_of_the_folders_that_part_them(names, expected):
    assert held_out([Path("dev/data", name) for name in names]) == expected


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    text = load_text(tmp_path / "a.txt", test_fraction=0.2)
    assert (text.train[0].tobytes(), text.test[0].tobytes()) == (
        bytes(range(1, 81)),
        bytes(range(81, 101)),
    )


def test_tokens_of_nanogpt_and_of_llm_c_are_mapped_not_read(tmp_path):
    tokens = np.arange(1000) % 700
    (tmp_path / "nano.bin").write_bytes(tokens.astype(np.uint16).tobytes())
    for path in (
        tmp_path / "nano.bin",
        write_llm_c(tmp_path / "gpt2.bin", tokens),
        write_llm_c(tmp_path / "llama3.bin", tokens, magic=20240801, version=7, dtype=np.uint32),
    ):
        found = read_tokens(path)
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, tokens)


def test_a_folder_of_tokens_is_split_by_its_names(tmp_path):
    for i, name in enumerate(("latest_train_0", "a_train_1", "a_val_0")):
        write_llm_c(tmp_path / f"{name}.bin", np.full(100, i))
    text = load_text(tmp_path)
    assert [int(part[0]) for part in text.train] == [1, 0]
    assert [int(part[0]) for part in text.test] == [2]
    assert not text.is_bytes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"uint16 tokens, two bytes each; got 0 bytes in .*x.bin. It is truncated"),
        (b"abc", "two bytes each; got 3 bytes"),
        (
            np.array([20240520, 1], "<i4").tobytes(),
            "must have a header of 1024 bytes and version 1; got 8 bytes and version 1",
        ),
        (np.array([20240520], "<i4").tobytes(), "got 4 bytes and version None"),
        (
            np.arange(64, dtype="<u4").tobytes(),
            "every second one is 0, as in a file of four bytes each",
        ),
    ],
)
def test_a_file_that_is_no_file_of_tokens_is_refused(tmp_path, content, message):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_text(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"version": 2}, "and version 1; got 1224 bytes and version 2"),
        (
            {"count": 101},
            "must hold the tokens that its header counts; got 101 of 2 bytes after 1024 in .* which has 1224",
        ),
        ({"count": 99}, "got 99 of 2 bytes"),
        ({"count": -1}, "got -1 of 2 bytes"),
        ({"count": 2**31 - 1}, "got 2147483647 of 2 bytes"),
        ({"magic": 20240801, "version": 7}, "got 100 of 4 bytes"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, header, message):
    write_llm_c(tmp_path / "x.bin", np.arange(100), **header)
    with pytest.raises(ValueError, match=message):
        read_tokens(tmp_path / "x.bin")


def test_places_without_text_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"must come from a file or a folder; got .*nowhere, which does not exist",
    ):
        load_text(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="must hold files; got none in"):
        load_text(tmp_path)
    (tmp_path / "one.txt").write_text("some text")
    with pytest.raises(ValueError, match="split into train and test by file; got 1 in"):
        load_text(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(
        ValueError,
        match=r"must have no zero bytes; got some in .*picture.png. Name a file or a folder of text",
    ):
        load_text(tmp_path / "picture.png")
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(
        ValueError, match=r"by its length; got 2 tokens in .* of which 0 are held out"
    ):
        load_text(tmp_path / "short.txt")
    write_llm_c(tmp_path / "train.bin", np.arange(9))
    with pytest.raises(
        ValueError, match=r"others with val or test in their names; got train.bin in"
    ):
        load_text(tmp_path)
    with pytest.raises(ValueError, match=r"test_fraction must be between 0 and 1; got 1. Choose"):
        load_text(test_fraction=1.0)


def some_text():
    return Text((np.arange(0, 50), np.arange(50, 53), np.arange(100, 131)), (), "", is_bytes=True)


def test_targets_are_the_tokens_that_come_next_and_windows_do_not_overlap():
    windows = Windows(some_text().train, 4, vocab_size=256)
    assert len(windows) == 49 // 4 + 2 // 4 + 30 // 4
    rows = windows.take(np.arange(len(windows)))
    np.testing.assert_array_equal(rows["targets"], rows["tokens"] + 1)
    assert rows["tokens"].dtype == np.int32
    assert len(np.unique(rows["tokens"])) == rows["tokens"].size
    np.testing.assert_array_equal(
        rows["tokens"][12], np.arange(100, 104), "windows do not reach from part to part"
    )
    assert (
        windows.describe()
        == "19 rows of 4 tokens, one after another: a document that a row cuts goes on in the next; 6 tokens at the ends of "
        "files, too few for a row, are left out"
    ), "1 of 50, all 3, and 2 of 31"
    assert "left out" not in Windows([np.arange(9)], 4, vocab_size=256).describe()


@pytest.mark.parametrize("batch_size", [1, 4, 7, 19])
def test_an_epoch_has_every_window_once_and_epochs_differ(batch_size):
    windows = Windows(some_text().train, 4, vocab_size=256)
    steps = -(-len(windows) // batch_size)
    epochs = []
    for epoch in range(2):
        batches = [
            windows.batch(batch_size, seed=3, step=epoch * steps + step, multiple=4)
            for step in range(steps)
        ]
        assert {batch["tokens"].shape for batch in batches} == {(-(-batch_size // 4) * 4, 4)}
        epochs.append(
            np.concatenate([batch["tokens"][batch["weight"] > 0, 0] for batch in batches])
        )
        assert sorted(epochs[-1]) == sorted(windows.take(np.arange(len(windows)))["tokens"][:, 0])
    assert not np.array_equal(*epochs)


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = (Windows(some_text().train, 4, vocab_size=256) for _ in range(2))
    first.batch(4, seed=0, step=9)
    got, same = (windows.batch(4, seed=0, step=5)["tokens"] for windows in (first, again))
    np.testing.assert_array_equal(got, same)
    assert not np.array_equal(got, first.batch(4, seed=1, step=5)["tokens"])


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError,
        match=r"window of seq \+ 1 tokens; got seq=60 and parts of \[50, 3, 31\] tokens. Choose",
    ):
        Windows(some_text().train, 60, vocab_size=256)
    with pytest.raises(ValueError, match="seq must be positive; got 0"):
        Windows(some_text().train, 0, vocab_size=256)
    with pytest.raises(
        ValueError, match=r"below the model's vocab_size; got 128, vocab_size=64. Choose the"
    ):
        Windows(some_text().train, 4, vocab_size=64).batch(19, seed=0, step=0)


def test_the_loss_of_frequencies_is_that_on_other_tokens():
    """Of all tokens that occur, each counted once more than it is learned."""
    many = [np.repeat(np.arange(4), 2), np.repeat(np.arange(4), 5)]
    assert unigram_loss(many, [np.array([3])]) == pytest.approx(np.log(4))
    learned, held_out = [np.array([7, 7, 7, 5])], [np.array([7, 5]), np.array([9, 9])]
    shares = np.array([4, 2, 1, 1]) / 7
    assert unigram_loss(learned, held_out) == pytest.approx(-np.log(shares).mean())
    assert unigram_loss(held_out, learned) == pytest.approx(-np.log([2 / 7] * 4).mean())
    equal = [np.zeros(9, np.uint8)]
    assert f"{unigram_loss(equal, equal):.4f}" == "0.0000", "without a minus"
    assert unigram_loss(equal, []) == unigram_loss([], []) == 0, "of no tokens"
    cut = [np.array([0, 0, 1, 1])]
    assert unigram_loss(cut, cut, max_tokens=2) == 0


def test_the_frequencies_are_those_of_all_sources_in_their_shares():
    of_source = [np.tile(np.arange(first, first + 50), 40) for first in (0, 50)]
    sources = [Sample([tokens], len(tokens)) for tokens in of_source]
    limits = {"max_tokens": 1000}  # half of the first source
    assert unigram_loss(of_source, of_source, **limits) == pytest.approx(np.log(100))
    assert mixed_unigram_loss(sources, sources, **limits) == pytest.approx(np.log(100))
    counts = np.array([750 / 50 + 1, 250 / 50 + 1]) / 1100
    weighted = -np.log(counts).mean()
    assert mixed_unigram_loss(sources, sources, weights=[3, 1], **limits) == pytest.approx(weighted)
    half = [sources[0]._replace(share_of_row=1 / 3), sources[1]]
    equal = mixed_unigram_loss(half, sources, weights=[3, 1], **limits)
    assert equal == pytest.approx(np.log(100)), "a third of each row is learned, of three rows"
    stands_for_more = [sources[0]._replace(num_tokens=6000), sources[1]]
    held_out = mixed_unigram_loss(sources, stands_for_more, weights=[3, 1], **limits)
    assert held_out == pytest.approx(-np.log(counts) @ [0.75, 0.25])


# -- malicious files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "dtype", "token"), [(2**20 + 5, np.uint32, 2**32 - 1), (700, np.uint16, 65535)]
)
def test_every_token_of_a_file_is_checked_as_it_is_in_the_file(tmp_path, where, dtype, token):
    tokens = np.zeros(2**20 + 1000, dtype)
    tokens[where] = token
    magic, version = (20240801, 7) if dtype is np.uint32 else (20240520, 1)
    path = write_llm_c(tmp_path / "x.bin", tokens, magic=magic, version=version, dtype=dtype)
    windows = Windows([read_tokens(path)], 100, vocab_size=50257)
    windows.take(np.arange(3))
    with pytest.raises(
        ValueError,
        match=f"must be from 0 to below the model's vocab_size; got {token}, vocab_size=50257",
    ):
        windows.check()


def test_a_token_below_zero_is_refused():
    windows = Windows([np.array([3, -1, 2, 1])], 3, vocab_size=10)
    with pytest.raises(ValueError, match="got -1, vocab_size=10"):
        windows.take(np.arange(1))


def allocated_by(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_token_takes_no_table_of_its_size():
    tokens = np.array([0, 2**32 - 1], np.uint32)
    found = []
    assert allocated_by(lambda: found.append(unigram_loss([tokens, tokens], [tokens]))) < 2**24
    assert found == [pytest.approx(np.log(2))]


def test_a_file_that_is_no_text_is_refused_before_it_is_read_whole(tmp_path):
    with (tmp_path / "huge.txt").open("wb") as file:
        file.write(b"text")
        file.truncate(2**40)  # a hole, which takes no room on the disk
    refuse = pytest.raises(ValueError, match="must have no zero bytes; got some in")
    with refuse:
        assert allocated_by(lambda: load_text(tmp_path / "huge.txt")) < 2**24


def test_what_is_no_plain_file_is_refused():
    with pytest.raises(
        ValueError, match="must come from a plain file; got /dev/zero, a device or a pipe"
    ):
        load_text(Path("/dev/zero"))


@pytest.mark.parametrize("suffix", ["txt", "bin"])
def test_a_link_out_of_a_folder_is_refused(tmp_path, suffix):
    folder = tmp_path / "texts"
    folder.mkdir()
    if suffix == "txt":
        write_files(folder)
    else:
        write_llm_c(folder / "train.bin", np.arange(100))
    (tmp_path / f"secret.{suffix}").write_bytes(b"a key")
    (folder / f"val.{suffix}").symlink_to(tmp_path / f"secret.{suffix}")
    with pytest.raises(
        ValueError,
        match=rf"must hold its files itself; got .*val.{suffix}', a link to '.*secret.{suffix}'",
    ):
        load_text(folder)


def test_a_link_within_a_folder_and_a_link_to_a_folder_are_followed(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    write_files(folder)
    (folder / "again.txt").symlink_to(folder / "sub0" / "0.txt")
    (tmp_path / "link").symlink_to(folder)
    assert sum(map(len, load_text(tmp_path / "link").train)) > 0
