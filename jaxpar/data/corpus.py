"""Documents to learn from and held-out ones: files of examples, tokenised once and split.

Of a folder with files or folders whose names have the word "val" or "test", those are held out. Otherwise a share of the
documents is held out, chosen by checksums of their tokens: two equal documents are on the same side. Of a single document, its
end is.

Files are tokenised once, into a folder of tokens named by a digest of what they are made of:

    cache/3f9a.../tokens.bin       the tokens of all documents, uint16 or uint32
                  learned.bin      uint8 for each token, 1: learned; absent if all are
                  documents.npy    int64 for each document: end, file, line, checksum of its tokens
                  manifest.json    sizes and checksums of the files above; written last

The digest is that of the files' contents, of the tokenizer and of this format, so a changed file or tokenizer makes a new
folder, and the same files by other names find the old one. A folder appears whole, by one rename. One process at a time makes
it, and others on the machine wait for it; without file locks each makes its own, and one of them is kept.
"""

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxpar.data.examples import Examples, Passage, place_text
from jaxpar.data.packing import Documents, check_targets
from jaxpar.data.readers import SNIFFED, format_of, is_records
from jaxpar.data.text import Tokenizer, check_test_fraction, held_out
from jaxpar.fields import arg
from jaxpar.runtime.output import FULL, fsync, printable, refusing

FORMAT = "jaxpar tokens 2"
MANIFEST, TOKENS, LEARNED, DOCUMENTS = "manifest.json", "tokens.bin", "learned.bin", "documents.npy"
END, FILE, LINE, CHECKSUM = range(4)  # the columns of documents.npy
LOOKED_FOR = 8  # raised when examples are looked through for more: caches whose remarks lack it are made again
PASSAGES_AT_ONCE, CHARACTERS_AT_ONCE = 1000, 2**23  # that are tokenised at once, whichever is fewer


@dataclass(frozen=True)
class TokenisedFiles:
    """The documents of files.

    Attributes:
        documents: The documents, in the order of the files.
        file_numbers: The number of the file of each document.
        checksums: A checksum of the tokens of each document.
        digest: The digest of files and tokenizer, which names the folder in the cache.
        ignored: Names of fields of the examples that are not used.
        is_chat: Whether there are messages among the examples.
        remarks: What a reader of the data should know: examples, texts and repetitions that may not be meant.
    """

    documents: Documents
    file_numbers: np.ndarray
    checksums: np.ndarray
    digest: str
    ignored: tuple[str, ...]
    is_chat: bool
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Corpus(TokenisedFiles):
    """Documents in two parts.

    Attributes:
        train: Documents to train on.
        test: Held-out documents.
    """

    train: Documents
    test: Documents

    def both_parts(self) -> Documents:
        """Returns the documents of both parts, in order: a single one is in two pieces."""
        if len(self.documents) > 1:
            return self.documents
        starts = np.append(self.train.starts, self.test.starts)
        return replace(
            self.documents, starts=starts, ends=np.append(self.train.ends, self.test.ends)
        )

    def checksums_of(self, documents: Documents) -> np.ndarray:
        """Returns the checksums of some of the documents; none if there is a single one, of which each part has a piece."""
        if len(self.documents) == 1:
            return self.checksums[:0]
        return self.checksums[np.searchsorted(self.documents.ends, documents.ends)]


def load_corpus(
    files: Sequence[Path], tokenizer: Tokenizer, cache: Path, *, test_fraction: float = 0.1
) -> Corpus:
    """Returns the documents of files in two parts.

    Args:
        files: Files of examples, in order.
        tokenizer: The tokenizer.
        cache: The folder of caches, as for ``tokenise``.
        test_fraction: The share of the documents that is held out if no file's name has the word "val" or "test".

    Raises:
        ValueError: An example cannot be used, the cache is damaged, or one part is empty or has no token to learn.
        OSError: The cache cannot be written.
    """
    check_test_fraction(test_fraction)
    found = tokenise(files, tokenizer, cache)
    train, test = _split(found, files, test_fraction)
    for share, documents in (("to learn from", train), ("held out", test)):
        whole = f"{len(found.documents)} documents of {_names(files)}"
        check_targets(documents, share, whole, found.remarks)
    if len(found.documents) == 1 and found.documents.learned is not None:
        told = f"the only example in {_names(files)} is cut in two: its last {test.num_tokens:,} tokens are held out"
        found = replace(found, remarks=(*found.remarks, told))
    return Corpus(**vars(found), train=train, test=test)


def _split(
    found: TokenisedFiles, files: Sequence[Path], test_fraction: float
) -> tuple[Documents, Documents]:
    documents = found.documents
    is_test = np.array(held_out(files))[found.file_numbers]
    if not is_test.any() or is_test.all():
        if len(documents) == 1:
            return _cut(documents, test_fraction)
        count = min(max(round(test_fraction * len(documents)), 1), len(documents) - 1)
        is_test = _choose(found.checksums, count)
        if is_test.all():
            raise ValueError(
                "documents are split into those to learn from and held-out ones, by their text; got "
                f"{len(documents)} equal ones in {_names(files)}. Give more text."
            )
    return documents.take(np.flatnonzero(~is_test)), documents.take(np.flatnonzero(is_test))


def _choose(checksums: np.ndarray, count: int) -> np.ndarray:
    """Returns which documents are held out: ``count``, or fewer where equal ones, which stay together, are too many.

    They are those of the smallest checksums; if all are repeated too often, the ones that are repeated least.
    """
    values, sizes = np.unique(checksums, return_counts=True)
    chosen, left = [], count
    for value, size in zip(values.tolist(), sizes.tolist(), strict=True):
        if size <= left:
            chosen.append(value)
            left -= size
        if not left:
            break
    return np.isin(checksums, chosen or values[np.argmin(sizes)])


def _cut(document: Documents, test_fraction: float) -> tuple[Documents, Documents]:
    start, end = int(document.starts[0]), int(document.ends[0])
    middle = end - round(test_fraction * (end - start))
    if not start + 1 < middle < end - 1:
        raise ValueError(
            "a single document is split into two by its length, each of two tokens or more; got "
            f"{end - start} tokens. Give a longer one, or more of them."
        )
    cut = np.array([middle])
    return replace(document, ends=cut), replace(document, starts=cut)


def default_cache() -> Path:
    """Returns the folder of caches of this user: ``$XDG_CACHE_HOME/jaxpar/tokens``, by default below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar" / "tokens"


def tokenise(files: Sequence[Path], tokenizer: Tokenizer, cache: Path) -> TokenisedFiles:
    """Returns the documents of files, from the cache if it has them.

    Args:
        files: Files of examples, in order.
        tokenizer: The tokenizer.
        cache: The folder of caches; it is made if it does not exist.

    Raises:
        ValueError: An example cannot be used, or the cache is damaged.
        OSError: The cache cannot be written.
    """
    digest = _digest(files, tokenizer)
    folder = cache / f"{digest[:32]}-{LOOKED_FOR}"
    if not folder.exists():
        with _naming(cache):
            _make_cache(cache)
            with _only_one(cache / f".{folder.name}.lock") as is_alone:
                if not folder.exists():
                    _make(folder, Examples(files, tokenizer), tokenizer, digest, is_alone)
    return _open(folder, files, digest)


@contextlib.contextmanager
def _naming(cache: Path) -> Iterator[None]:
    """Names the cache in the error of a disk that is full, which names no file where one is written."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(cache)) from error


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ValueError(
            f"{arg('token_cache')} must be a folder that can be written to; got {printable(str(cache))}: {error.strerror}. "
            "Name one, such as a folder beside the data."
        ) from error


def _digest(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    if all(file.is_file() and file.stat().st_size == 0 for file in files):
        names = ", ".join(printable(str(file)) for file in files[:3])
        raise ValueError(
            f"{arg('data files')} must hold text or rows; got {names}, empty. Name another file."
        )
    whole = hashlib.sha256(f"{FORMAT}\n{tokenizer.fingerprint()}\n".encode())
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{arg('data files')} must come from plain files; got {printable(str(file))}, which is none. Copy it to a "
                "file first."
            )
        with file.open("rb") as content:
            form = (
                " examples" if format_of(file) in SNIFFED and is_records(file) else ""
            )  # else text
            form += _read_otherwise(file, content, tokenizer)
            whole.update(
                f"{format_of(file)}{form} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode()
            )
    return whole.hexdigest()


def _read_otherwise(file: Path, content: BinaryIO, tokenizer: Tokenizer) -> str:
    """Returns what a digest has of a file whose calls of tools, or tools, had other tokens in earlier caches."""
    is_parquet, either = format_of(file) == ".parquet", (True, False)
    takes = lambda name: any(tokenizer.uses(name, has_tools=tools) for tools in either)
    has_calls = takes("tool_calls") and _mentions(content, b"tool_calls")
    has_tools = is_parquet and takes("tools") and _mentions(content, b"tools")
    # Arguments were strings in strings; in Parquet tools were left out, and nulls stood for keys of other rows.
    return " calls" * has_calls + " keys" * (is_parquet and (has_calls or has_tools))


def _mentions(content: BinaryIO, name: bytes) -> bool:
    """Returns whether the bytes of a file have this name."""
    if os.fstat(content.fileno()).st_size == 0:  # which mmap refuses
        return False
    with mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(name) >= 0


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Waits for the lock of a file; yields False if there are no locks here."""
    with path.open("ab") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
            return
        yield True


def _make(
    folder: Path, examples: Examples, tokenizer: Tokenizer, digest: str, is_alone: bool
) -> None:
    """Writes the cache into a folder beside ``folder``, and renames it."""
    if is_alone:
        for left in folder.parent.glob(f".{folder.name}.*.part"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
    part = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.part"
    part.mkdir()  # with the permissions of the umask: others may share the cache
    try:
        _write(part, examples, tokenizer, digest)
        _sync(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(part: Path, examples: Examples, tokenizer: Tokenizer, digest: str) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    with (part / TOKENS).open("wb") as tokens, (part / LEARNED).open("wb") as learned:
        documents, all_learned = _write_tokens(examples, tokenizer, dtype, tokens, learned)
    if all_learned:
        (part / LEARNED).unlink()
    names = ", ".join(printable(str(file)) for file in examples.files[:3])
    if len(documents) == 0:
        raise ValueError(
            f"{arg('data files')} must have an example to learn from; got none in {names}. Name other files."
        )
    if not documents[-1, END]:
        template = ", or correct the chat template" if examples.is_chat else ""
        raise ValueError(
            f"{arg('data files')} must have tokens; got {len(documents)} examples and none in {names}. Name other files"
            f"{template}."
        )
    np.save(part / DOCUMENTS, documents)
    written = [name for name in (TOKENS, LEARNED, DOCUMENTS) if (part / name).exists()]
    manifest = {
        "format": FORMAT,
        "digest": digest,
        "dtype": dtype.name,
        "ignored": sorted(map(str, examples.ignored)),
        "is_chat": examples.is_chat,
        "odd": {what: [count, *place] for what, (count, place) in examples.odd.items()},
        "files": {
            name: {"bytes": (part / name).stat().st_size, "crc32": _crc32(part / name)}
            for name in written
        },
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _write_tokens(
    examples: Examples, tokenizer: Tokenizer, dtype: np.dtype, tokens: BinaryIO, learned: BinaryIO
) -> tuple[np.ndarray, bool]:
    """Writes the tokens of all examples; returns the table of documents, and whether all tokens are learned."""
    table: list[tuple[int, int, int, int]] = []
    written, checksum, all_learned = 0, 0, True
    for passages in _in_batches(examples.passages()):
        for passage, (ids, marks) in zip(
            passages, _encode(passages, examples, tokenizer), strict=True
        ):
            stored = ids.astype(dtype).tobytes()
            tokens.write(stored)
            learned.write(marks.tobytes())
            all_learned &= bool(marks.all())
            written, checksum = written + len(ids), zlib.crc32(stored, checksum)
            if passage.ends:
                table.append((written, *passage.place, checksum))
                checksum = 0
    return np.array(table, np.int64).reshape(-1, 4), all_learned


def _in_batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    batch, characters = [], 0
    for passage in passages:
        batch.append(passage)
        characters += len(passage.text)
        if len(batch) == PASSAGES_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    passages: list[Passage], examples: Examples, tokenizer: Tokenizer
) -> Iterator[tuple[Any, Any]]:
    """Yields the tokens of each passage, and for each token whether it is learned, uint8."""
    texts, begins = [passage.text for passage in passages], [passage.begins for passage in passages]
    try:
        encoded = tokenizer.encode(texts, begins=begins)
    except ValueError:
        for passage in passages:
            try:
                tokenizer.encode([passage.text], begins=[passage.begins])
            except ValueError as error:
                raise ValueError(
                    f"{error} It is in {place_text(examples.files, *passage.place)}."
                ) from error
        raise
    examples.note_tokens(passages, encoded)
    for passage, (ids, ends) in zip(passages, encoded, strict=True):
        marks = np.full(len(ids), passage.learned is None, np.uint8)
        for first, last in passage.learned or ():
            # A token may begin with the space before an answer; one that ends after the answer is not the answer's.
            marks |= (ends > first) & (ends <= last)
        if passage.is_marked and tokenizer.end is not None:
            if len(ids) and ids[-1] == tokenizer.end:  # the tokenizer adds it itself
                marks[-1] = 1
            else:
                ids, marks = np.append(ids, tokenizer.end), np.append(marks, np.uint8(1))
        yield ids, marks


def _open(folder: Path, files: Sequence[Path], digest: str) -> TokenisedFiles:
    """Returns a cache; raises ValueError unless each of its files is as the manifest says."""
    kinds = (OSError, ValueError, KeyError, TypeError, AttributeError)
    remedy = "Remove that folder: it is made again from the data."
    with refusing(kinds, "a cache of tokens must be whole", folder, remedy):
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or manifest["digest"] != digest:
            raise ValueError("the manifest of other tokens")
        for name, want in manifest["files"].items():
            _check(folder / name, want)
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        tokens = np.memmap(folder / TOKENS, dtype, mode="r")
        is_there = LEARNED in manifest["files"]
        learned = np.memmap(folder / LEARNED, np.uint8, mode="r") if is_there else None
        table = np.load(folder / DOCUMENTS, allow_pickle=False)
        ignored, is_chat = tuple(manifest["ignored"]), bool(manifest["is_chat"])
        odd = [
            (str(what), count, place_text(files, file, line))
            for what, (count, file, line) in manifest["odd"].items()
        ]
    ends = table[:, END]
    starts = np.concatenate([[0], ends[:-1]])
    place = lambda start: place_text(
        files, *table[np.searchsorted(ends, start, "right"), [FILE, LINE]].tolist()
    )
    documents = Documents(tokens, starts, ends, learned, place)
    remarks = [
        f"{count:,} of {len(documents):,} examples have {what}, the first in {place}"
        for what, count, place in odd
    ]
    remarks += [*_remarks_on_texts(files), *_remarks_on_repeated(table[:, CHECKSUM], files)]
    return TokenisedFiles(
        documents, table[:, FILE], table[:, CHECKSUM], digest, ignored, is_chat, tuple(remarks)
    )


def _remarks_on_texts(files: Sequence[Path]) -> Iterator[str]:
    """Yields what to say of text files among files of examples, such as the README.md of a data set."""
    texts = [printable(str(file)) for file in files if not is_records(file)]
    if 0 < len(texts) < len(files):
        others = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
        yield (
            f"{len(texts)} of {len(files)} files are learned as plain text beside examples: {', '.join(texts[:3])}{others}. "
            "Move them out of the folder if they are not to be learned."
        )
    elif tables := [
        printable(str(file))
        for file in files
        if format_of(file) in SNIFFED and not is_records(file)
    ]:
        is_one, others = len(tables) == 1, f" and {len(tables) - 3} more" if len(tables) > 3 else ""
        names = "1 file is" if is_one else f"{len(tables)} files are"
        yield (
            f"{names} learned as plain text, since {'its' if is_one else 'their'} first value is no example: "
            f"{', '.join(tables[:3])}{others}"
        )


def _remarks_on_repeated(checksums: np.ndarray, files: Sequence[Path]) -> Iterator[str]:
    count = len(checksums)
    repeated = count - len(np.unique(checksums))
    if repeated > count**2 / 2**32:  # more than checksums of 32 bits that are equal by chance
        yield f"{repeated:,} of {count:,} documents in {_names(files)} equal an earlier one"


def _names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return printable(str(files[0])) + more


def _check(path: Path, want: dict[str, int]) -> None:
    if (size := path.stat().st_size) != want["bytes"]:
        raise ValueError(f"{path.name} of {size} bytes instead of {want['bytes']}")
    if _crc32(path) != want["crc32"]:
        raise ValueError(f"{path.name} with another checksum than when it was written")


def _crc32(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r").data)


def _sync(folder: Path) -> None:
    """Flushes a folder and its files to disk, so that a rename does not reach the disk before them."""
    for path in [
        *(each for each in folder.iterdir() if each.is_file() and each.suffix != ".lock"),
        folder,
    ]:
        with contextlib.suppress(
            OSError
        ):  # the file system does not support it; a checksum then finds a lost write
            fsync(path)
