"""Documents to learn from and held-out ones: files of examples, tokenised once and split.

Of a folder with files whose names have the word "val" or "test", those are held out. Otherwise a share of the documents is held
out, chosen by checksums of their tokens: two equal documents are on the same side. Of a single document, its end is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxpar.data.packing import Documents
from jaxpar.data.token_cache import TokenisedFiles, tokenise
from jaxpar.data.tokenizer import Tokenizer

_HELD_OUT = re.compile(r"(?<![a-z])(val|valid|validation|test)(?![a-z])")


@dataclass(frozen=True)
class Corpus:
    """Documents in two parts.

    Attributes:
        train: Documents to train on.
        test: Held-out documents.
        digest: A digest of files and tokenizer.
        ignored: Names of fields of the examples that are not used.
        is_chat: Whether the examples are conversations.
    """

    train: Documents
    test: Documents
    digest: str
    ignored: tuple[str, ...]
    is_chat: bool


def load_corpus(files: Sequence[Path], tokenizer: Tokenizer, cache: Path, *, test_fraction: float = 0.1) -> Corpus:
    """Returns the documents of files in two parts.

    Args:
        files: Files of examples, in order.
        tokenizer: The tokenizer.
        cache: The folder of caches (``token_cache.py``).
        test_fraction: The share of the documents that is held out if no file's name has the word "val" or "test".

    Raises:
        ValueError: An example cannot be used, the cache is damaged, or one part is empty.
        OSError: The cache cannot be written.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1; got {test_fraction:g}. Choose one such as 0.1.")
    found = tokenise(files, tokenizer, cache)
    train, test = _split(found, files, test_fraction)
    return Corpus(train, test, found.digest, found.ignored, found.is_chat)


def _split(found: TokenisedFiles, files: Sequence[Path], test_fraction: float) -> tuple[Documents, Documents]:
    documents = found.documents
    of_file = np.array([_HELD_OUT.search(file.stem.lower()) is not None for file in files])
    is_test = of_file[found.file_numbers]
    if not is_test.any() or is_test.all():
        if len(documents) == 1:
            return _cut(documents, test_fraction)
        ranks = np.argsort(np.argsort(found.checksums, kind="stable"), kind="stable")
        count = min(max(round(test_fraction * len(documents)), 1), len(documents) - 1)
        is_test = found.checksums <= found.checksums[np.argmax(ranks == count - 1)]
        if is_test.all():
            raise ValueError(
                "documents are split into those to learn from and held-out ones, by their text; got "
                f"{len(documents)} equal ones. Give more text."
            )
    return documents.take(np.flatnonzero(~is_test)), documents.take(np.flatnonzero(is_test))


def _cut(document: Documents, test_fraction: float) -> tuple[Documents, Documents]:
    start, end = int(document.starts[0]), int(document.ends[0])
    middle = end - round(test_fraction * (end - start))
    if not start + 1 < middle < end - 1:
        raise ValueError(
            "a single document is split into two by its length, each of two tokens or more; got "
            f"{end - start} tokens. Give a longer one, or more of them."
        )
    halves = [np.array([start, middle]), np.array([middle, end])]
    parts = [replace(document, starts=half[:1], ends=half[1:]) for half in halves]
    return parts[0], parts[1]
