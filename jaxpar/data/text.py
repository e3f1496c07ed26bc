"""Training text: bytes of files, or tokens that another program wrote; and tokenizers, which turn text into tokens and back.

    no path                 the source of Python's standard library, available with every Python; bytes are the tokens
    a file or a folder      its bytes; a folder is split into train and test by file, a file by its length
    a .bin, or a folder     uint16 tokens of nanoGPT, or tokens of llm.c after its header; memory-mapped, never read at once

Tokens are split into windows of ``seq`` tokens and their targets. Windows do not overlap, so an epoch has every token once, but
those at the end of each part that fill no window. The batch of a step depends on seed and step only.

Tokenizers of published models are read by ``jaxpar.huggingface.read_tokenizer``; ``train_tokenizer`` makes one.
"""

import codecs
import math
import os
import re
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.batches import BLOCK, RowSource, check_vocabulary, locate
from jaxpar.data.checksums import checksum
from jaxpar.data.readers import find_files
from jaxpar.fields import arg, check_positive
from jaxpar.runtime.output import needing_extra, printable

BYTES = 256
OF_NO_PATH = "the source of Python's standard library"
MOST_COUNTED = 10_000_000  # tokens whose frequencies are counted, of all sources together
CHECKED_TOKENS = 2**20  # at each end of a part
LEAST_WIDE = 64  # bytes of a .bin that is looked at for tokens of four bytes each
MOST_WIDE = 2**20  # tokens at its beginning that are looked at
_HEADER_INTS = 256
# llm.c's header: 256 int32, the first three of them magic, version and number of tokens.
_LLM_C = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test|eval|evaluation|dev)(?![a-z])")
_NOT_THE_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


@dataclass(frozen=True)
class Text:
    """Tokens, in parts that need not be contiguous.

    Attributes:
        train: Parts to train on.
        test: Held-out parts.
        source: A description of their origin.
        is_bytes: Whether tokens are bytes; otherwise the vocabulary is that of the tokenizer that wrote them.
    """

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    source: str
    is_bytes: bool

    def checksum(self) -> str:
        """Returns a checksum of the parts' lengths, beginnings and ends, which does not depend on their paths."""
        found = 0
        for part in (*self.train, *self.test):
            for piece in (np.array(len(part)), part[:CHECKED_TOKENS], part[-CHECKED_TOKENS:]):
                found = zlib.crc32(np.ascontiguousarray(piece).tobytes(), found)
        return f"{found:08x}"


def load_text(path: Path | None = None, *, test_fraction: float = 0.1) -> Text:
    """Returns the text in ``path``, by default the source of Python's standard library.

    Args:
        path: A file or folder of text, a ``.bin`` of tokens, or a folder of ``.bin`` files, of which those with the word
            "val" or "test" in their names are held out.
        test_fraction: The share of the files of text that is held out, chosen by a hash of their names, if none has the word
            "val" or "test" in its name; of a single file, its end.

    Raises:
        FileNotFoundError: ``path`` does not exist, or a folder is empty.
        ValueError: A file is not text, a ``.bin`` is damaged, a link leads out of the folder, or one side of the split is
            empty.
    """
    check_test_fraction(test_fraction)
    if path is None:
        return _standard_library(test_fraction)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"text must come from a file or a folder; got {path}, which does not exist. Name one that is there."
        )
    if path.is_dir() and any(path.glob("*.bin")):
        return _folder_of_tokens(path)
    if path.is_dir():
        files = find_files(path)
        check_inside(path, files)
        return _split_by_file(path, files, test_fraction, str(path), by_name=True)
    tokens = read_tokens(path) if path.suffix == ".bin" else _read_bytes(path)
    return _cut(tokens, test_fraction, str(path), is_bytes=path.suffix != ".bin")


def check_test_fraction(test_fraction: float) -> None:
    """Raises ValueError unless a share of the text can be held out."""
    if not 0 < test_fraction < 1:
        raise ValueError(
            f"{arg('test_fraction')} must be between 0 and 1; got {test_fraction:g}. Choose one such as 0.1."
        )


def is_held_out(file: Path) -> bool:
    """Returns whether a file's name has a word for held-out rows, such as "val", "test" or "eval"."""
    return _HELD_OUT.search(file.stem.lower()) is not None


def held_out(files: Sequence[Path]) -> list[bool]:
    """Returns which of some files are held out: by their names, or by that of a folder which does not have them all.

    train/a.jsonl and test/b.jsonl of data/ are told apart by their folders, and those of a folder test/ by their names alone.
    """
    paths = [file.absolute() for file in files]
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    below = [path.relative_to(root) for path in paths]
    return [any(map(is_held_out, (path, *path.parents))) for path in below]


def _standard_library(test_fraction: float) -> Text:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        f
        for f in root.rglob("*.py")
        if not _NOT_THE_LIBRARY.intersection(f.relative_to(root).parts)
    )
    return _split_by_file(root, files, test_fraction, OF_NO_PATH)


def check_inside(folder: Path, files: Sequence[Path]) -> None:
    """Raises ValueError if one of the files in a folder is a link that leads out of it."""
    root = folder.resolve()
    for file in files:
        if not file.resolve().is_relative_to(root):
            raise ValueError(
                f"a folder of text or tokens must hold its files itself; got {str(file)!r}, a link to "
                f"{str(file.resolve())!r}. Copy that file into the folder, or remove the link."
            )


def _split_by_file(
    root: Path, files: Sequence[Path], test_fraction: float, source: str, *, by_name: bool = False
) -> Text:
    if not files:
        raise FileNotFoundError(
            f"a folder of text must hold files; got none in {root}. Name another by its path."
        )
    is_test = held_out(files) if by_name else []
    if len(set(is_test)) < 2:
        is_test = [
            zlib.crc32(f.relative_to(root).as_posix().encode()) < test_fraction * 2**32
            for f in files
        ]
    if len(set(is_test)) < 2:
        raise ValueError(
            "a folder of text is split into train and test by file; got "
            f"{len(files)} in {root}, of which {sum(is_test)} are held out. Give more files, or a single "
            "one, which is split by its length."
        )
    end = np.zeros(1, np.uint8)  # a separator after each file: a byte that no text has
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for file, side in zip(files, is_test, strict=True):
        parts[side].extend((_read_bytes(file), end))
    train, test = map(np.concatenate, parts)
    return Text((train,), (test,), source, is_bytes=True)


def _read_bytes(path: Path) -> np.ndarray:
    if not path.is_file():
        raise ValueError(
            f"text must come from a plain file; got {path}, a device or a pipe. Copy it to a file first."
        )
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if b"\0" in block:
                raise ValueError(
                    f"text must have no zero bytes; got some in {path}. Name a file or a folder of text alone, or a .bin of "
                    "tokens."
                )
    return np.frombuffer(path.read_bytes().removeprefix(codecs.BOM_UTF8), np.uint8)


def _cut(tokens: np.ndarray, test_fraction: float, source: str, *, is_bytes: bool) -> Text:
    num_test = round(test_fraction * len(tokens))
    if not 0 < num_test < len(tokens):
        raise ValueError(
            f"a file is split into train and test by its length; got {len(tokens)} tokens in {source}, of which {num_test} are "
            "held out. Give a longer one."
        )
    return Text((tokens[:-num_test],), (tokens[-num_test:],), source, is_bytes)


def _folder_of_tokens(path: Path) -> Text:
    files = sorted(path.glob("*.bin"))
    check_inside(path, files)
    sides = held_out(files)
    if len(set(sides)) < 2:
        raise ValueError(
            "a folder of tokens must hold .bin files to learn from and others with val or test in their names; got "
            f"{', '.join(printable(file.name) for file in files)} in {path}. Rename one, or name a single .bin."
        )
    train, test = (
        tuple(
            read_tokens(file) for file, is_test in zip(files, sides, strict=True) if is_test == side
        )
        for side in (False, True)
    )
    return Text(train, test, str(path), is_bytes=False)


def read_tokens(path: Path) -> np.ndarray:
    """Returns the tokens of a ``.bin`` as a memory map: those after llm.c's header if it has one, else all of it as uint16.

    Raises:
        ValueError: The header and the size of the file disagree, or the size is not a multiple of the tokens' size.
    """
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", min(_HEADER_INTS, size // 4))
    if len(header) == 0 or int(header[0]) not in _LLM_C:
        if size == 0 or size % 2:
            raise ValueError(
                f"a .bin without a header holds uint16 tokens, two bytes each; got {size} bytes in {path}. It is truncated, or "
                "not a file of tokens."
            )
        tokens = np.memmap(path, "<u2", mode="r")
        first, second = tokens[::2][:MOST_WIDE], tokens[1::2][:MOST_WIDE]
        if size >= LEAST_WIDE and size % 4 == 0 and first.any() and not second.any():
            raise ValueError(
                f"a .bin without a header holds uint16 tokens, two bytes each; got {path}, in which every second one is 0, as "
                "in a file of four bytes each. Write them as uint16, or with llm.c's header for four bytes."
            )
        return tokens
    version, dtype = _LLM_C[int(header[0])]
    start, width = 4 * _HEADER_INTS, np.dtype(dtype).itemsize
    if len(header) < _HEADER_INTS or int(header[1]) != version:
        raise ValueError(
            f"a .bin of llm.c with the magic number {int(header[0])} must have a header of {start} bytes and version "
            f"{version}; got {size} bytes and version {int(header[1]) if len(header) > 1 else None} in {path}. Write the file "
            "again."
        )
    num_tokens = int(header[2])
    if num_tokens < 1 or start + num_tokens * width != size:
        raise ValueError(
            f"a .bin of llm.c must hold the tokens that its header counts; got {num_tokens} of {width} bytes after {start} in "
            f"{path}, which has {size}. It is truncated or damaged: write it again."
        )
    return np.memmap(
        path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=start, shape=(num_tokens,)
    )


class Windows(RowSource):
    """Parts of a text as rows: each row is ``seq`` tokens and their targets, the tokens one position later.

    Args:
        parts: Tokens.
        seq: Tokens per row.
        vocab_size: The vocabulary size of the model, which all tokens must be below.
    """

    max_documents = 1

    def __init__(self, parts: Sequence[np.ndarray], seq: int, *, vocab_size: int) -> None:
        check_positive("Choose 1 or more.", seq=seq)
        self._parts, self._seq, self._vocab_size = parts, seq, vocab_size
        self._starts = np.cumsum([0, *(max(len(part) - 1, 0) // seq for part in parts)])
        if len(self) == 0:
            raise ValueError(
                f"a text must have a window of seq + 1 tokens; got {arg(seq=seq)} and parts of {[len(part) for part in parts]} "
                f"tokens. Choose a smaller {arg('seq')}, or give more text."
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``tokens`` and ``targets`` ``[len(rows), seq]``, int32.

        Raises:
            ValueError: A token is outside the model's vocabulary.
        """
        both = np.zeros((len(rows), self._seq + 1), np.int64)
        for index, row in enumerate(rows.tolist()):
            part, window = locate(self._starts, row)
            both[index] = self._parts[part][window * self._seq :][: self._seq + 1]
        check_vocabulary([both], self._vocab_size)
        both = both.astype(np.int32)
        return {"tokens": both[:, :-1], "targets": both[:, 1:]}

    def check(self) -> None:
        """Raises ValueError if a token is outside the model's vocabulary. Reads every token, one block at a time."""
        check_vocabulary(self._parts, self._vocab_size)

    def checksum(self) -> str:
        """Returns a checksum of the parts."""
        return checksum(self._parts)

    def describe(self) -> str:
        """Returns how many rows there are, where a document goes on that is longer than one, and what fills no row."""
        told = f"{len(self):,} rows of {self._seq:,} tokens, one after another: a document that a row cuts goes on in the next"
        in_rows = sum(rows * self._seq + 1 for rows in np.diff(self._starts).tolist() if rows)
        left = sum(map(len, self._parts)) - in_rows
        return told + f"; {left:,} tokens at the ends of files, too few for a row, are left out" * (
            left > 0
        )


class Sample(NamedTuple):
    """Tokens of one source.

    Attributes:
        parts: The tokens.
        num_tokens: The number of tokens for which they stand: that of the source, of which they may be a part.
        share_of_row: The share of the tokens of a row that are learned.
    """

    parts: Sequence[np.ndarray]
    num_tokens: float
    share_of_row: float = 1.0


def unigram_loss(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], *, max_tokens: int = MOST_COUNTED
) -> float:
    """Returns the loss on tokens held out, in nats a token, of a model that knows only how frequent tokens are in others.

    It gives a token the probability (n + 1) / (N + V), of which n is the token's count among ``train``, N that of all of them,
    and V the number of tokens that occur in ``train`` or ``test``: one that occurs in ``test`` alone has a finite loss too
    (Laplace's rule of succession).

    Args:
        train: Tokens whose frequencies the model knows.
        test: Tokens that it predicts; of none the loss is 0.
        max_tokens: The number of tokens of each to count, from the beginning of every part.
    """
    of_train, of_test = (Sample(each, sum(map(len, each))) for each in (train, test))
    return mixed_unigram_loss([of_train], [of_test], max_tokens=max_tokens)


def mixed_unigram_loss(
    train: Sequence[Sample],
    test: Sequence[Sample],
    *,
    weights: Sequence[float] = (),
    max_tokens: int = MOST_COUNTED,
) -> float:
    """Returns the loss of ``unigram_loss`` on tokens of several sources, all of which count by their numbers of tokens.

    Args:
        train: Tokens of each source whose frequencies the model knows.
        test: Those that it predicts.
        weights: The share of rows to learn from each source, in any unit; none: by their numbers of tokens.
        max_tokens: The number of tokens of each to count; the sources share it.
    """
    in_train = [each.num_tokens for each in train]
    if weights:
        in_train = [weight * each.share_of_row for weight, each in zip(weights, train, strict=True)]
    known, counts = _count(train, in_train, max_tokens)
    asked, times = _count(test, [each.num_tokens for each in test], max_tokens)
    # Only of tokens that occur: a table up to 2**32 would take 32 GiB.
    vocabulary = np.union1d(known, asked)
    weights_of = np.ones(len(vocabulary))
    weights_of[np.searchsorted(vocabulary, known)] += counts
    of_asked = weights_of[np.searchsorted(vocabulary, asked)]
    losses = np.log(weights_of.sum() / of_asked)
    return math.fsum(times * losses) / (math.fsum(times) or 1)


def _count(
    sources: Sequence[Sample], weights: Sequence[float], max_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that occur among ``max_tokens`` of all sources, in order, and the count of each in their mixture."""
    lengths = [sum(map(len, source.parts)) for source in sources]
    counted = []
    for source, most in zip(sources, _shared(lengths, max_tokens), strict=True):
        of_parts = [len(part) for part in source.parts]
        limits = _shared(of_parts, most)
        unique = [
            np.unique(part[:limit], return_counts=True)
            for part, limit in zip(source.parts, limits, strict=True)
        ]
        counted.append(_mixed(unique, of_parts))
    return _mixed(counted, weights)


def _shared(lengths: Sequence[int], most: int) -> list[int]:
    """Returns how many of ``most`` each of some lengths gets: an equal share, and what the shorter ones leave."""
    limits, left = [0] * len(lengths), most
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    for place, index in enumerate(ascending):
        limits[index] = min(lengths[index], left // (len(lengths) - place))
        left -= limits[index]
    return limits


def _mixed(
    counted: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all, in order, and their counts, of which each has the share that its weight says."""
    pairs = zip(counted, weights, strict=True)
    found = [(tokens, counts, weight) for (tokens, counts), weight in pairs if len(tokens)]
    if not found:
        return np.zeros(0, np.int64), np.zeros(0)
    total = sum(counts.sum() for _, counts, _ in found)
    of_all = math.fsum(weight for *_, weight in found)
    scaled = [counts * (weight / of_all * total / counts.sum()) for _, counts, weight in found]
    tokens = np.concatenate([tokens for tokens, *_ in found])
    vocabulary, places = np.unique(tokens, return_inverse=True)
    return vocabulary, np.bincount(places, weights=np.concatenate(scaled))


class Tokenizer(ABC):
    """Turns text into tokens and back.

    Attributes:
        end: The token after a document; None: there is none.
        vocab_size: The number of tokens.
        has_chat_template: Whether messages can be rendered.
    """

    end: int | None
    vocab_size: int
    has_chat_template: bool

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a digest of all that the tokens depend on."""

    @abstractmethod
    def encode(
        self, texts: Sequence[str], *, begins: Sequence[bool]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its tokens and, for each token, the index after its last character; -1: none of the text's."""

    def encode_prompt(self, text: str, *, begins: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Returns what ``encode`` does of a text that a model is to continue: without the end that it may add to a text."""
        [(tokens, ends)] = self.encode([text], begins=[begins])
        of_text = np.flatnonzero(ends >= 0)
        if len(of_text) and self.end in tokens[of_text[-1] + 1 :]:
            return tokens[: of_text[-1] + 1], ends[: of_text[-1] + 1]
        return tokens, ends

    def lost_in(self, text: str) -> str:
        """Returns the characters of a text that the tokenizer does not know: it leaves them out, or has one token for all."""
        return ""

    @abstractmethod
    def decode(self, tokens: np.ndarray, *, special: bool = False) -> str:
        """Returns the text of tokens, that of special ones too if they are to be shown."""

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character; where they are not known, those of its text."""
        return self.decode(np.array([token], np.int64), special=True).encode()

    @abstractmethod
    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Returns a conversation as text, with the tools that the model may call, and the spans of what the assistant says."""

    def uses(self, name: str, *, has_tools: bool = False) -> bool:
        """Returns whether ``render`` may write a field of this name of a message, besides role and content.

        Args:
            name: The name.
            has_tools: Whether the conversation has tools, for which a model may have another chat template.
        """
        del name, has_tools
        return False

    def special_in(self, text: str) -> set[str]:
        """Returns the special tokens that ``encode`` would read in a text, as they are written."""
        del text
        return set()


class ByteTokenizer(Tokenizer):
    """Bytes of UTF-8 as tokens; a document ends with a zero byte."""

    end = 0
    vocab_size = 256
    has_chat_template = False

    def fingerprint(self) -> str:
        """Returns a constant."""
        return "bytes of UTF-8"

    def encode(
        self, texts: Sequence[str], *, begins: Sequence[bool]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the bytes of each text and the index after the character that each belongs to.

        Raises:
            ValueError: A text has zero bytes.
        """
        del begins
        found = []
        for text in texts:
            if "\0" in text:
                raise ValueError(
                    "text as bytes must have no zero bytes, which end a document; got one. Remove it."
                )
            widths = [len(character.encode()) for character in text]
            found.append(
                (
                    np.frombuffer(text.encode(), np.uint8),
                    np.repeat(np.arange(len(text)) + 1, widths),
                )
            )
        return found

    def decode(self, tokens: np.ndarray, *, special: bool = False) -> str:
        """Returns the text of bytes, a replacement character for those that are not UTF-8; other tokens have no text."""
        del special
        found = np.asarray(tokens)
        return found[found < self.vocab_size].astype(np.uint8).tobytes().decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Returns the byte; none for a token of a larger vocabulary, which a model of bytes may have."""
        return bytes([token]) if token < self.vocab_size else b""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Raises: bytes have no chat template."""
        del messages, tools
        raise ValueError(
            "messages need a tokenizer with a chat template; got a model of bytes. Give prompt and completion, or name a "
            "model's folder by --init-from or --tokenizer."
        )


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, *, special_tokens: Sequence[str] = ()
) -> Any:
    """Returns a byte-level BPE of the tokenizers library that is trained on texts.

    Args:
        texts: The texts.
        vocab_size: The number of tokens, at least 256 and the special ones.
        special_tokens: Tokens that are no text, such as the marks of a chat template.

    Raises:
        ImportError: The library is not installed.
    """
    with needing_extra("making a tokenizer needs the tokenizers library", "hf"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens: Any = {
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
        "special_tokens": list(special_tokens),
    }
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, **tokens, show_progress=False)
    )
    return tokenizer
