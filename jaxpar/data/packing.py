"""Documents packed into rows of one length: each row holds whole documents, or pieces of long ones, as segments.

    documents of 3, 6 and 2 tokens, seq 6       tokens    a0 a1 b0 c0 c1 ..
                                                targets   a1 a2 b1 c1 -  -      "-" is -100, which the loss ignores
                                                segments   0  0  1 ...

A model keeps attention and positions within a segment (models/transformer), so the loss of a row is that of its documents in
rows of their own. Documents that have more than ``seq`` targets are cut into pieces, whose targets are disjoint.

**Reference**: best-fit decreasing (Johnson 1974), as in Ding et al. 2024, arXiv 2404.10830, section 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.data.batches import RowSource, check_vocabulary, round_up
from jaxpar.data.checksums import checksum
from jaxpar.data.text import Sample
from jaxpar.fields import arg, check_at_least, check_one_of, check_positive

IGNORED = -100  # the label that jaxpar.losses.softmax_cross_entropy ignores


@dataclass(frozen=True)
class Documents:
    """Tokens of documents, one after another.

    Attributes:
        tokens: ``[num_tokens]``, unsigned integers.
        starts: ``[num_documents]``, the index of the first token of each document.
        ends: ``[num_documents]``, the index after its last token.
        learned: ``[num_tokens]``, uint8: 1 for a token that is a target; None: all are, but the first of a document.
        place_of: ``place_of(start)`` returns where the document comes from that begins there, for messages.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    learned: np.ndarray | None = None
    place_of: Callable[[int], str] = "the document at token {}".format

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return int((self.ends - self.starts).sum())

    @property
    def num_learned(self) -> int | None:
        """The number of their tokens that are learned, the first of a document never; None: all others are."""
        if self.learned is None:
            return None
        before = np.concatenate([[0], np.cumsum(self.learned != 0)])
        second = np.minimum(self.starts + 1, self.ends)
        return int((before[self.ends] - before[second]).sum())

    @property
    def num_targets(self) -> int:
        """The number of tokens that rows of them have as targets."""
        sizes = self.ends - self.starts
        return int(np.maximum(sizes - 1, 0).sum()) if self.num_learned is None else self.num_learned

    def take(self, chosen: np.ndarray) -> "Documents":
        """Returns the documents of these numbers; no token is copied."""
        return replace(self, starts=self.starts[chosen], ends=self.ends[chosen])

    def place(self, index: int) -> str:
        """Returns where a document comes from."""
        return self.place_of(int(self.starts[index]))

    def tokens_of(self, index: int) -> np.ndarray:
        """Returns the tokens of a document."""
        return self.tokens[self.starts[index] : self.ends[index]]

    def before_learned(self, index: int) -> int:
        """Returns how many tokens a document has before the first that is learned; 0 if none is."""
        if self.learned is None:
            return 0
        return int(np.argmax(self.learned[self.starts[index] : self.ends[index]] != 0))

    def learned_sample(self, most: int = 2**22) -> Sample:
        """Returns the tokens that are learned, of the first documents up to about ``most`` tokens."""
        found, left = [], most
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            tokens = self.tokens[start:end]
            if self.learned is not None:
                tokens = tokens[self.learned[start:end] != 0]
            found.append(tokens[:left])
            left -= len(found[-1])
            if left <= 0:
                break
        share_of_row = self.num_targets / max(self.num_tokens, 1)
        return Sample([np.concatenate(found)], self.num_targets, share_of_row)


def check_targets(documents: Documents, share: str, whole: str, remarks: Sequence[str]) -> None:
    """Raises ValueError where documents have no token to learn.

    Args:
        documents: The documents.
        share: What they are for, such as "to learn from".
        whole: All documents that they are of, for the message.
        remarks: What was noticed of them, which may be why.
    """
    if documents.num_targets:
        return
    also = "".join(f" Also, {remark.rstrip('.')}." for remark in remarks)
    raise ValueError(
        f"the documents {share} must have a token to learn after the first one of a document; got none in {len(documents)} of "
        f"the {whole}, the first at {documents.place(0)}. Leave out documents without one, or give more text.{also}"
    )


class PackedRows(RowSource):
    """Documents as rows of ``seq`` tokens, targets and segments.

    Args:
        documents: The documents.
        seq: Tokens per row.
        vocab_size: The vocabulary size of the model, which all tokens must be below.
        max_documents: The most documents of a row, its padding included, 2 or more, for a model with such a ``max_documents``;
            None: as many as fit.

    Raises:
        ValueError: No document has a token to learn, or a number is too small.
    """

    def __init__(
        self, documents: Documents, seq: int, *, vocab_size: int, max_documents: int | None = None
    ) -> None:
        check_positive("Choose 1 or more.", seq=seq)
        check_at_least(
            2, "A row has one document and padding, or more of them.", max_documents=max_documents
        )
        self._documents, self._seq, self._vocab_size = documents, seq, vocab_size
        starts, counts = _pieces(documents, seq)
        if len(starts) == 0:
            raise ValueError(
                "documents must have a token to learn after their first one; got none in "
                f"{len(documents)} documents of {documents.num_tokens} tokens. Give more text."
            )
        row_of = pack(counts, seq, None if max_documents is None else max_documents - 1)
        order = np.argsort(row_of, kind="stable")
        self._starts, self._counts = starts[order], counts[order]
        self._row_starts = np.append(0, np.cumsum(np.bincount(row_of)))  # of the pieces
        filled = np.add.reduceat(self._counts, self._row_starts[:-1])
        self.max_documents = int(np.max(np.diff(self._row_starts) + (filled < seq)))

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``tokens``, ``targets`` and ``segments`` ``[len(rows), seq]``, int32.

        Targets are -100 where there is nothing to learn. Positions after the last document are a segment of their own.
        """
        found = empty_rows(len(rows), self._seq)
        for index, row in enumerate(rows.tolist()):
            own = [column[index] for column in found.values()]
            self._fill(row, *own)
        return found

    def _fill(
        self, row: int, tokens: np.ndarray, targets: np.ndarray, segments: np.ndarray
    ) -> None:
        documents = self._documents
        first, last = self._row_starts[row : row + 2].tolist()
        at = 0
        for segment, piece in enumerate(range(first, last)):
            start = int(self._starts[piece])
            count = int(self._counts[piece])
            whole = documents.tokens[start : start + count + 1].astype(np.int64)
            here = slice(at, at + count)
            tokens[here] = whole[:-1]
            segments[here] = segment
            learned = documents.learned
            is_target = 1 if learned is None else learned[start + 1 : start + count + 1]
            targets[here] = np.where(is_target, whole[1:], IGNORED)
            at += count
            segments[at:] = segment + 1

    def check(self) -> None:
        """Raises ValueError if a token is outside the model's vocabulary. Reads every token, one block at a time."""
        documents = self._documents
        check_vocabulary([documents.tokens], self._vocab_size, documents.place_of)

    def checksum(self) -> str:
        """Returns a checksum of the documents: their tokens, which of them are learned, and where each begins and ends."""
        documents = self._documents
        learned = () if documents.learned is None else (documents.learned,)
        return checksum([documents.tokens, *learned, documents.starts, documents.ends])

    def describe(self) -> str:
        """Returns how full the rows are, and how many documents were cut to fit into them."""
        filled = self._counts.sum() / (len(self) * self._seq)
        line = f"{len(self._documents):,} documents in {len(self):,} rows of {self._seq:,} tokens, {filled:.1%} filled"
        sizes = self._documents.ends - self._documents.starts
        cut = int((sizes > self._seq + 1).sum())
        left_out = (
            "" if self._documents.learned is None else ", those without a token to learn left out"
        )
        note = f"; {cut:,} are longer than a row and cut into pieces, each read without those before it{left_out}"
        return line + (note if cut else "")


def empty_rows(num_rows: int, seq: int) -> dict[str, np.ndarray]:
    """Returns rows in which nothing is learned: ``tokens``, ``targets`` and ``segments`` ``[num_rows, seq]``, int32."""
    shape = num_rows, seq
    return {
        "tokens": np.zeros(shape, np.int32),
        "targets": np.full(shape, IGNORED, np.int32),
        "segments": np.zeros(shape, np.int32),
    }


def _pieces(documents: Documents, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the first token of each piece, and its number of targets, of pieces that have one to learn.

    A document of 8 tokens, seq 3:

        targets    1 2 3   4 5 6   7
        pieces     number 0, 1 and 2, which start at tokens 0, 3 and 6
    """
    num_targets = np.maximum(documents.ends - documents.starts - 1, 0)
    num_pieces = -(-num_targets // seq)
    of_pieces = lambda values: np.repeat(values, num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    number = np.arange(num_pieces.sum()) - of_pieces(first_piece)
    starts = of_pieces(documents.starts) + number * seq
    ends = of_pieces(documents.starts + num_targets)
    counts = np.minimum(ends - starts, seq)
    learned = documents.learned
    if learned is None or len(starts) == 0:
        return starts, counts
    firsts = starts + 1
    spans = zip(firsts.tolist(), (firsts + counts).tolist(), strict=True)
    has_target = np.array([learned[first:end].any() for first, end in spans])
    return starts[has_target], counts[has_target]


def pack(sizes: np.ndarray, capacity: int, most: int | None = None) -> np.ndarray:
    """Returns the number of the row of each item: largest first, each into the row with the least room that it fits into.

    Args:
        sizes: Sizes from 1 to ``capacity``.
        capacity: The size of a row.
        most: The most items of a row; None: as many as fit.
    """
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: there is a row with room r
    row_of = np.empty(len(sizes), np.int64)
    num_rows = 0
    num_items = [0] * len(sizes)  # of each row
    of_item = sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = of_item[item]
        fitting = rooms >> size
        if fitting:
            lowest_bit = fitting & -fitting
            room = size + lowest_bit.bit_length() - 1
            row = rows_by_room[room].pop()
            rooms ^= 0 if rows_by_room[room] else 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of[item] = row
        num_items[row] += 1
        left = room - size
        if left and num_items[row] != most:
            rows_by_room[left].append(row)
            rooms |= 1 << left
    return row_of


def fit(
    documents: Documents, seq: int, long_examples: str, *, multiple: int = 1
) -> tuple[Documents, int]:
    """Returns the documents that a row can hold, and the number of those that are left out.

    Documents of which every token is learned always fit, in pieces. One with a prompt needs it in the same row.

    Args:
        documents: The documents.
        seq: Tokens per row.
        long_examples: What to do with examples with a prompt and more than ``seq`` targets: "refuse", "drop", or "cut", which
            learns what is after the first ``seq`` tokens without the prompt.
        multiple: What the mesh divides rows by, so that the ``seq`` of an error must be a multiple of it.

    Raises:
        ValueError: An example is too long and is to be refused.
    """
    check_one_of(("refuse", "drop", "cut"), long_examples=long_examples)
    if documents.learned is None or long_examples == "cut":
        return documents, 0
    starts, ends = documents.starts, documents.ends
    sizes = ends - starts
    enough = lambda sizes: round_up(int(sizes.max()) - 1, multiple)
    longer = np.flatnonzero(sizes > seq + 1)
    has_prompt = [not documents.learned[starts[i] + 1 : ends[i]].all() for i in longer.tolist()]
    too_long = longer[np.array(has_prompt, bool)]
    if long_examples == "drop" and 0 < len(too_long) == len(documents):
        raise ValueError(
            f"an example with a prompt must fit in a row of seq + 1 tokens; got {arg(seq=seq)} and {len(documents)} examples, "
            f"which are all longer, from {sizes.min()} tokens on. Choose {arg(seq=enough(sizes))}."
        )
    if long_examples == "drop" or len(too_long) == 0:
        fitting = np.setdiff1d(np.arange(len(documents)), too_long)
        return documents.take(fitting), len(too_long)
    sizes = sizes[too_long]
    place = documents.place(int(too_long[0]))
    raise ValueError(
        f"an example with a prompt must fit in a row of seq + 1 tokens; got {arg(seq=seq)} and {len(too_long)} longer "
        f"examples, the first of {int(sizes[0])} tokens in {place}. Choose {arg(seq=enough(sizes))}, or "
        f"{arg(long_examples='drop')} to leave them out, as for a model that takes no longer rows."
    )
