"""Associative recall: rows made for a test of the far past, which a model that sees only the near past cannot learn.

    a=3 c=9 a=3 d=7 ...      a quarter of the row: facts, each one token, a name and its value
    .  .  .  .  .  .         half of the row: one token over and over
    c? a? d? d? ...          a quarter of the row: questions, each a name, in any order
    9  3  7  7               what is learned: the value of that name in this row, and nothing else

Each row has other values, so weights cannot hold them: a model must attend to the facts, half a row or more back. If it
guesses among the 26 values, its loss is ln 26 = 3.26. A row depends on its number alone, and no run reads all of them.

**Reference**: Ba et al. 2016, arXiv 1610.06258, section 4.1. There a fact is two tokens, which a model needs two layers for.
"""

import numpy as np

from jaxpar.data.batches import RowSource
from jaxpar.data.packing import empty_rows
from jaxpar.fields import arg

NUM_NAMES, NUM_VALUES = 4, 26
NUM_FACTS = (
    NUM_NAMES * NUM_VALUES
)  # the tokens from 0: the first value of the first name, its second and so on
QUESTION = NUM_FACTS  # that about the first name; those about the others follow
ANSWER = QUESTION + NUM_NAMES  # the first value, likewise
GAP = ANSWER + NUM_VALUES
NUM_ROWS = 2**40  # no run reads as many, and so none reads a row twice


class Recall(RowSource):
    """Rows of facts, a gap and questions.

    Args:
        seq: Tokens per row, 4 or more.
        vocab_size: The vocabulary size of the model.
        is_test: Whether the rows are those held out, which have facts of their own.

    Raises:
        ValueError: The rows are too short, or the vocabulary is too small.
    """

    max_documents = 1

    def __init__(self, seq: int, *, vocab_size: int, is_test: bool = False) -> None:
        if seq < 4:
            raise ValueError(
                f"a row of recall must have a fact, a gap and a question; got {arg(seq=seq)}. Choose 4 or more."
            )
        if vocab_size <= GAP:
            raise ValueError(
                f"recall has {GAP + 1} tokens, which the vocabulary must have; got vocab_size={vocab_size}. Choose --model "
                "llama-tiny, say."
            )
        self._seq, self._is_test = seq, is_test

    def __len__(self) -> int:
        return NUM_ROWS

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``tokens`` and ``targets`` ``[len(rows), seq]``, int32, with targets of -100 where nothing is learned."""
        found, count = empty_rows(len(rows), self._seq), self._seq // 4
        del found["segments"]
        found["tokens"][:] = GAP
        for tokens, targets, row in zip(
            found["tokens"], found["targets"], rows.tolist(), strict=True
        ):
            rng = np.random.default_rng((self._is_test, row))
            values, named = (
                rng.integers(NUM_VALUES, size=NUM_NAMES),
                rng.integers(NUM_NAMES, size=count),
            )
            asked = rng.choice(named, count)
            tokens[:count] = NUM_VALUES * named + values[named]
            tokens[-count:], targets[-count:] = QUESTION + asked, ANSWER + values[asked]
        return found

    def describe(self) -> str:
        """Returns what a row consists of."""
        count = self._seq // 4
        return f"rows of {self._seq:,} tokens: {count:,} facts, a gap, and {count:,} questions, which alone are learned"
