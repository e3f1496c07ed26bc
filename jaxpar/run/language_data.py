"""The data of a language model: its flags, the tokens to learn from and held out that they name, the tokenizer, and rows."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from jaxpar.data.batches import EachOnce, Mixture, RowSource
from jaxpar.data.corpus import Corpus, default_cache, load_corpus
from jaxpar.data.examples import check_examples
from jaxpar.data.packing import PackedRows, fit
from jaxpar.data.readers import SNIFFED, find_files, format_of, is_records, unread_fields
from jaxpar.data.recall import NUM_VALUES, Recall
from jaxpar.data.records import COLUMNS, RecordRows, holds_tokens, open_split, tokens_of
from jaxpar.data.text import (
    ByteTokenizer,
    Sample,
    Text,
    Tokenizer,
    Windows,
    check_inside,
    load_text,
    mixed_unigram_loss,
)
from jaxpar.fields import check_at_least
from jaxpar.huggingface import stop_tokens
from jaxpar.huggingface.families import TOKENS
from jaxpar.huggingface.folder import CONFIG, file_inside, missing_tokenizer, read_json
from jaxpar.huggingface.tokenizer import FolderTokenizer, has_tokenizer, read_tokenizer
from jaxpar.run.batches import check_microbatches, in_rows
from jaxpar.run.flags import CommonFlags, RunFlags
from jaxpar.run.messages import say
from jaxpar.run.remarks import (
    AND,
    remark_on_ends,
    remark_on_others,
    remark_on_tokenizer,
    remarks_on_all,
)

RECALL = Path("recall")  # of --data
MOST_HELD_OUT = 4096  # records
MOST_PROMPTED = 128  # tokens of a text that the sample begins with, where no prompt is given
MOST_ASKED = 4096  # tokens of a question held out that it begins with
MOST_CHECKED_BYTES = 2**24  # of data that are read although the mesh cannot be made
MOST_TOKENS = 2**31  # of a vocabulary that is not known yet
TEST_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The data of a language model.

    Attributes:
        data: Files or folders of text, .jsonl or .parquet (text; prompt and completion; or messages), .parquet or .arrayrecord
            of rows of tokens, or .bin files of nanoGPT or llm.c; or "recall", a test of the far past. Without it: the source of
            Python's standard library.
        data_weights: Share of the rows from each --data, in any unit. Without it: shares by their numbers of rows.
        tokenizer: A folder with the model's tokenizer.json. None: that in --init-from; without one, the tokens of text are its
            bytes.
        token_cache: Folder for the tokens of files, which are tokenised once. None: jaxpar/tokens in the user's cache folder.
        long_examples: What to do with examples with a prompt that are longer than a row: refuse them, leave them out, or cut
            them into rows.
        max_documents: Most documents of a row, its padding included; records with more are refused. None: as many as fit.
        seq: Tokens of a row.
        batch_tokens: Tokens of a step, instead of --batch-size: a multiple of --seq.
        num_microbatches: Microbatches of each replica in a step, whose gradients are added. None: 2 for each stage of a
            pipeline, else 1.
        microbatch_tokens: Tokens of a microbatch of a replica, instead of --num-microbatches: a multiple of --seq.
        prompt: Beginning of the sample of text at the end of the run; for messages, what the user says. None: "def " for bytes,
            else the beginning of text held out, of an example with a prompt or of a conversation all before its first answer.
    """

    data: tuple[Path, ...] = ()
    data_weights: tuple[float, ...] = ()
    tokenizer: Path | None = None
    token_cache: Path | None = None
    long_examples: Literal["refuse", "drop", "cut"] = "refuse"
    max_documents: int | None = None
    seq: int = 128
    batch_tokens: int | None = None
    num_microbatches: int | None = None
    microbatch_tokens: int | None = None
    prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class LanguageCommon(CommonFlags):
    """What most runs of a language model are given.

    Attributes:
        batch_size: Rows of a step.
    """

    batch_size: int = 16


class LanguageFlags(RunFlags):
    """The base of the flags of a language model's run, which has these groups."""

    common: LanguageCommon  # pyright: ignore[reportIncompatibleVariableOverride], it is frozen
    data: DataFlags


@dataclass(frozen=True)
class Part:
    """One --data.

    Attributes:
        rows: ``rows(seq, vocab_size)`` returns the rows to learn from and those held out, and what is left out of them.
        num_tokens: The numbers of tokens to learn from and held out; None: not known without reading all.
        learned: ``learned()`` returns targets of the rows to learn from and of those held out, for their frequencies; of large
            data some.
        held_out: Some tokens that are held out.
        checksum: Depends on the tokens, not on where they are.
        is_bytes: Whether tokens are bytes.
        ignored: Fields of examples that are not used.
        is_chat: Whether examples are conversations.
        remark: What to say about them when they are read.
        num_learned: The number of tokens to learn from that are targets, such as those of answers; None: all are.
        is_question: Whether ``held_out`` ends where an answer that is learned begins.
        checksums: Those of the documents to learn from and held out; None: rows are not of documents that are known.
    """

    rows: Callable[[int, int], tuple[RowSource, RowSource, str]]
    num_tokens: tuple[int, int] | None
    learned: Callable[[], tuple[Sample, Sample]]
    held_out: np.ndarray
    checksum: str
    is_bytes: bool
    ignored: tuple[str, ...] = ()
    is_chat: bool = False
    remark: str = ""
    num_learned: int | None = None
    is_question: bool = False
    checksums: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True)
class Data:
    """All that the flags name.

    Attributes:
        parts: One for each --data.
        source: A description of where they come from.
        tokenizer: Turns text into tokens and back; None: there is none for these tokens.
        ends: The tokens that end a text: that of the tokenizer, and those of the model in --init-from.
        weights: The share of the rows from each part, in any unit; none: by their numbers of rows.
    """

    parts: tuple[Part, ...]
    source: str
    tokenizer: Tokenizer | None
    ends: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return all(part.is_bytes for part in self.parts)

    @property
    def unit(self) -> str:
        """What a token is, for messages."""
        return "byte" if self.is_bytes else "token"

    @cached_property
    def unigram_loss(self) -> float:
        """The loss on the tokens held out, in nats each, of a model that knows how frequent those to learn are, and no more."""
        train, test = zip(*(part.learned() for part in self.parts), strict=True)
        return mixed_unigram_loss(train, test, weights=self.weights)

    def settings(self, flags: DataFlags) -> dict[str, Any]:
        """Returns what a resumed run must share with the saved one."""
        found: dict[str, Any] = {"text": AND.join(part.checksum for part in self.parts)}
        if len(self.parts) > 1:
            found["data_weights"] = list(flags.data_weights)
        others = {"long_examples": flags.long_examples, "max_documents": flags.max_documents}
        return found | {
            name: value for name, value in others.items() if value not in ("refuse", None)
        }

    def describe(self) -> str:
        """Returns a line about the data."""
        line = self.source
        counts = [part.num_tokens for part in self.parts if part.num_tokens]
        if len(counts) == len(self.parts):
            train, test = map(sum, zip(*counts, strict=True))
            learned = [part.num_learned for part in self.parts]
            pairs = zip(learned, counts, strict=True)
            targets = sum(of_part if own is None else own for own, (of_part, _) in pairs)
            of_which = (
                f", of which {targets:,} are learned,"
                if any(each is not None for each in learned)
                else ""
            )
            line += (
                f": {train:,} {self.unit}s to train on{of_which} and {test:,} held out; knowing the {self.unit}s' frequencies "
                f"alone gives {self.unigram_loss:.4f} nats"
            )
        ignored = sorted({name for part in self.parts for name in part.ignored})
        return line + (f"; fields ignored: {', '.join(ignored)}" if ignored else "")

    def prompt(self, flags: DataFlags) -> np.ndarray:
        """Returns the tokens that the sample begins with."""
        if flags.prompt is None and not self.is_bytes:
            return _held_out_prompt(self.parts[0], flags.seq)
        text = "def " if flags.prompt is None else flags.prompt
        if isinstance(self.tokenizer, FolderTokenizer) and any(part.is_chat for part in self.parts):
            text, _ = self.tokenizer.render([{"role": "user", "content": text}], ask=True)
            tokens, _ = self.tokenizer.encode_prompt(text, begins=False)
        else:
            tokens, _ = (self.tokenizer or ByteTokenizer()).encode_prompt(text)
        return tokens

    def decode(self, tokens: np.ndarray, num_prompt: int) -> str:
        """Returns tokens as text up to the end of a text after the prompt; as numbers, if there is no tokenizer."""
        found = np.flatnonzero(np.isin(tokens[num_prompt:], self.ends))
        tokens = tokens[: num_prompt + int(found[0])] if len(found) else tokens
        return (
            " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(tokens)
        )


def _held_out_prompt(part: Part, seq: int) -> np.ndarray:
    """Returns tokens held out for the sample to begin with, but none of an answer: it would seem to be the model's."""
    tokens, most = part.held_out, min(seq // 2, MOST_PROMPTED)
    if not part.is_question:
        return tokens[:most]
    return tokens if len(tokens) < min(seq, MOST_ASKED) else tokens[-most:]


def check_data_flags(flags: DataFlags) -> None:
    """Raises where the flags of the data do not go together."""
    check_at_least(2, seq=flags.seq, max_documents=flags.max_documents)
    if flags.prompt == "":
        raise ValueError(
            '--prompt must not be empty; got "". Give what the sample is to begin with.'
        )
    if flags.data_weights and len(flags.data_weights) != len(flags.data):
        raise ValueError(
            f"--data-weights must have one for each --data; got {len(flags.data_weights)} for {len(flags.data)}. Leave it "
            f"out, or give {len(flags.data)}."
        )
    if not all(0 < weight < math.inf for weight in flags.data_weights):
        given = " ".join(map("{:g}".format, flags.data_weights))
        raise ValueError(
            f"each of --data-weights must be above 0 and finite; got {given}. Correct it, or leave out a --data of no weight."
        )


def load_data(flags: DataFlags, init_from: Path | None = None, *, multiple: int = 1) -> Data:
    """Returns the data that the flags name.

    Args:
        flags: The flags.
        init_from: The folder of the model, which may have a tokenizer.
        multiple: What the mesh divides rows by, as ``row_multiple`` says.

    Raises:
        OSError, ValueError, ImportError: A file cannot be used; the message names it, and the line.
    """
    own = init_from if init_from and has_tokenizer(init_from) else None
    folder = flags.tokenizer or own
    tokenizer = read_tokenizer(folder) if folder else None
    if remark := remark_on_tokenizer(tokenizer, own):
        say(remark)  # before what is wrong with the examples, which it may explain
    if not flags.data:
        _check_reads_bytes(
            init_from,
            tokenizer,
            "no --data, for which the source of Python's standard library is read",
        )
        text = load_text()
        return Data(
            (_of_text(text),), text.source, ByteTokenizer(), _ends(ByteTokenizer(), init_from)
        )
    parts = tuple(_part(path, flags, tokenizer, init_from, multiple) for path in flags.data)
    if len({part.is_bytes for part in parts}) > 1:
        raise ValueError(
            f"all --data must have tokens of one kind; got bytes and others in {' '.join(map(str, flags.data))}. Name a "
            "tokenizer for the text by --tokenizer."
        )
    is_bytes = parts[0].is_bytes
    if flags.prompt is not None and tokenizer is None and not is_bytes:
        raise ValueError(
            f"--prompt needs a tokenizer; got {flags.prompt!r} without one. Name a folder with a tokenizer.json by "
            "--tokenizer, or leave it out."
        )
    chosen = ByteTokenizer() if is_bytes else tokenizer
    source = ", ".join(map(str, flags.data))
    return Data(parts, source, chosen, _ends(chosen, init_from), flags.data_weights)


def make_rows(flags: DataFlags, data: Data, vocab_size: int) -> tuple[RowSource, RowSource]:
    """Returns the rows to learn from and those held out, checked as far as can be before training."""
    of_documents = [part.checksums for part in data.parts if part.checksums is not None]
    remarks = [part.remark for part in data.parts]
    remarks += remarks_on_all(flags.data, of_documents, flags.prompt, data.tokenizer)
    for remark in filter(None, remarks):
        say(remark)
    rows = [part.rows(flags.seq, vocab_size) for part in data.parts]
    for train, test, left_out in rows:
        train.check()
        test.check()
        for told in filter(None, (train.describe(), left_out)):
            say(told)
    if len(rows) == 1:
        return rows[0][0], rows[0][1]
    trains, tests, _ = zip(*rows, strict=True)
    train, test = (Mixture(each, flags.data_weights or None) for each in (trains, tests))
    test = EachOnce(test)
    shares = ", ".join(
        f"{path} {share:.1%}" for path, share in zip(flags.data, train.shares, strict=True)
    )
    say(f"rows from {shares}")
    return train, test


def row_multiple(mesh: Any, *, sequence_parallel: bool = False) -> int:
    """Returns what must divide a row's tokens: ``context`` splits it into twice as many chunks, and ``tensor`` perhaps again.

    Args:
        mesh: The mesh.
        sequence_parallel: Whether ``tensor`` splits the sequence, of which a device has the part of its ``context``.
    """
    context = mesh.shape["context"]
    parts = 1 if context == 1 else 2 * context
    return math.lcm(parts, context * mesh.shape["tensor"] if sequence_parallel else 1)


@contextmanager
def rows_checked_too(
    flags: LanguageFlags, init_from: Path | None, *, sequence_parallel: bool = False
) -> Iterator[None]:
    """Adds what is wrong with the rows to an error of the ``with`` block, which makes the mesh, so that one message has all.

    Large data are not read for it.

    Args:
        flags: The flags.
        init_from: As for ``load_data``.
        sequence_parallel: As for ``row_multiple``.
    """
    try:
        yield
    except ValueError as error:
        sizes = SimpleNamespace(shape=dataclasses.asdict(flags.mesh))
        files = [file for path in flags.data.data if path.exists() for file in find_files(path)]
        if (
            min(sizes.shape.values()) < 1
            or sum(file.stat().st_size for file in files) > MOST_CHECKED_BYTES
        ):
            raise
        try:
            flags = in_rows(flags, sizes)
            multiple = row_multiple(sizes, sequence_parallel=sequence_parallel)
            data = load_data(flags.data, init_from, multiple=multiple)
            train, _ = make_rows(flags.data, data, MOST_TOKENS)
            check_rows(flags, len(train), sizes)
        except (ValueError, OSError) as other:
            raise ValueError(f"{error} Also, {other}") from error
        raise


def check_rows(flags: LanguageFlags, num_rows: int, mesh: Any) -> int:
    """Returns the number of microbatches; raises where a step has too few rows for them."""
    return check_microbatches(
        flags, flags.data.num_microbatches, num_rows, mesh, of=f" of --seq {flags.data.seq}"
    )


def _ends(tokenizer: Tokenizer | None, init_from: Path | None) -> tuple[int, ...]:
    own = () if init_from is None or not (init_from / CONFIG).exists() else stop_tokens(init_from)
    of_tokenizer = () if tokenizer is None or tokenizer.end is None else (tokenizer.end,)
    return tuple(dict.fromkeys((*own, *of_tokenizer)))


def _check_reads_bytes(
    init_from: Path | None, tokenizer: FolderTokenizer | None, text: str
) -> None:
    """Raises where text is to be learned by a model in --init-from that reads other tokens than bytes, without a tokenizer."""
    if init_from is None or tokenizer is not None:
        return
    if read_json(file_inside(init_from, CONFIG, str(init_from))).get(TOKENS) != "bytes":
        raise missing_tokenizer(init_from, "--init-from", text)


def _part(
    path: Path,
    flags: DataFlags,
    tokenizer: FolderTokenizer | None,
    init_from: Path | None,
    multiple: int,
) -> Part:
    if path == RECALL and not path.exists():
        return _of_recall()
    if not path.exists():
        raise FileNotFoundError(
            f"--data must be a file or a folder; got {path}, which does not exist. Name one that is there."
        )
    files = find_files(path)
    is_tokens = path.suffix == ".bin" or (path.is_dir() and any(path.glob("*.bin")))
    if is_tokens:
        return dataclasses.replace(_of_text(load_text(path)), remark=remark_on_others(path, files))
    if not path.is_dir() and format_of(path) in SNIFFED:
        check_examples(path)
    if not (tokenizer or any(map(is_records, files))):
        _check_reads_bytes(init_from, tokenizer, f"text in {path}")
        return _of_text(load_text(path))
    if path.is_dir():
        check_inside(path, files)
    if not files:
        raise FileNotFoundError(
            f"a folder of data must hold files; got none in {path}. Name another by its path."
        )
    if any(map(is_records, files)) and all(map(holds_tokens, files)):
        return _of_records(files, flags)
    _check_reads_bytes(init_from, tokenizer, f"text in {path}")
    chosen = tokenizer or ByteTokenizer()
    corpus = load_corpus(
        files, chosen, flags.token_cache or default_cache(), test_fraction=TEST_FRACTION
    )
    remarks = list(corpus.remarks)
    if tokenizer is not None:
        remarks.append(remark_on_ends(corpus, tokenizer, path, init_from))
    part = _of_corpus(corpus, flags, is_bytes=tokenizer is None, multiple=multiple)
    return dataclasses.replace(part, remark="\n".join(filter(None, remarks)))


def _of_text(text: Text) -> Part:
    rows = lambda seq, size: (
        Windows(text.train, seq, vocab_size=size),
        Windows(text.test, seq, vocab_size=size),
        "",
    )
    num_tokens = sum(map(len, text.train)), sum(map(len, text.test))
    return Part(
        rows,
        num_tokens,
        lambda: (Sample(text.train, num_tokens[0]), Sample(text.test, num_tokens[1])),
        text.test[0],
        f"crc32 {text.checksum()}",
        text.is_bytes,
    )


def _of_corpus(corpus: Corpus, flags: DataFlags, *, is_bytes: bool, multiple: int) -> Part:
    fitting = partial(fit, long_examples=flags.long_examples, multiple=multiple)

    def rows(seq: int, vocab_size: int) -> tuple[RowSource, RowSource, str]:
        if flags.long_examples == "refuse":
            fitting(corpus.both_parts(), seq)  # so that one --seq holds them all
        (train, some), (test, others) = (fitting(each, seq) for each in (corpus.train, corpus.test))
        make = partial(
            PackedRows, seq=seq, vocab_size=vocab_size, max_documents=flags.max_documents
        )
        lost = corpus.train.num_tokens + corpus.test.num_tokens - train.num_tokens - test.num_tokens
        told = f"left out: {some + others} of {len(corpus.documents)} examples, longer than --seq {seq}, with {lost:,} tokens"
        return make(train), make(test), told if some + others else ""

    train, test = corpus.train, corpus.test
    if flags.long_examples == "drop":  # what is left out is not counted
        train, test = (fitting(each, flags.seq)[0] for each in (train, test))
    before = test.before_learned(0)
    held_out = test.tokens_of(0)[: before or None]
    learned = lambda: (train.learned_sample(), test.learned_sample())
    of_data = (train.num_tokens, test.num_tokens), learned, held_out
    checksum = f"sha256 {corpus.digest[:32]}"
    return Part(
        rows,
        *of_data,
        checksum,
        is_bytes,
        corpus.ignored,
        corpus.is_chat,
        num_learned=train.num_learned,
        is_question=before > 0,
        checksums=(corpus.checksums_of(train), corpus.checksums_of(test)),
    )


def _of_recall() -> Part:
    rows = lambda seq, size: (
        Recall(seq, vocab_size=size),
        Recall(seq, vocab_size=size, is_test=True),
        "",
    )
    some = Recall(160, vocab_size=MOST_TOKENS, is_test=True).take(np.arange(1))["tokens"][
        0, :121
    ]  # with one question
    answers = Sample([np.arange(NUM_VALUES)], NUM_VALUES)
    return Part(rows, None, lambda: (answers, answers), some, "recall", is_bytes=False)


def _of_records(files: Sequence[Path], flags: DataFlags) -> Part:
    records, num_test, checksum = open_split(files, TEST_FRACTION, MOST_HELD_OUT)
    first = len(records) - num_test  # of those held out

    def rows(seq: int, vocab_size: int) -> tuple[RecordRows, RecordRows, str]:
        make = partial(
            RecordRows, records, seq, vocab_size=vocab_size, max_documents=flags.max_documents
        )
        return make(part=(0, first)), make(part=(first, len(records))), ""

    def learned() -> tuple[Sample, Sample]:
        train, test, _ = rows(flags.seq, MOST_TOKENS)
        return train.learned_sample(), test.learned_sample()

    held_out = tokens_of(records, first)
    ignored = set(records[0]).union(*(unread_fields(file, COLUMNS) for file in files)) - set(
        COLUMNS
    )
    return Part(
        rows, None, learned, held_out, checksum, is_bytes=False, ignored=tuple(sorted(ignored))
    )
