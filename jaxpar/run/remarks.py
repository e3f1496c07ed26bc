"""What a run says of its data: answers that teach no end, and files that are not read, or not held out as their names say.

    <|user|> what is a cat? <|assistant|> a small animal               teaches no end: the model goes on after its answer
    <|user|> what is a cat? <|assistant|> a small animal <|im_end|>    teaches one

The chat template decides: some mark no end of a turn but by the beginning of the next, and some have a block of
``{% generation %}`` that leaves the end out. Or answers end with a token that the model's files do not name as one to stop at.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxpar.data.corpus import Corpus
from jaxpar.data.forms import kind_of
from jaxpar.data.json_text import MAX_LINE_BYTES
from jaxpar.data.packing import Documents
from jaxpar.data.readers import find_files
from jaxpar.data.text import Tokenizer, is_held_out
from jaxpar.fields import arg
from jaxpar.huggingface.export import CONFIG, GENERATION, stop_tokens
from jaxpar.huggingface.tokenizer import REPLACEMENT, SETTINGS, FolderTokenizer, read_tokenizer
from jaxpar.runtime.output import printable

AND = " and "  # between the checksums of several --data
MOST_TOKENS = 2**18  # of the first conversations; the template is the same for all
SHOWN_TOKENS = 8  # of the end of an answer
MOST_NAMED = 3  # files


def check_same_data(names: Sequence[str], checksums: Sequence[str], saved: str) -> None:
    """Raises ValueError where a run that resumes has other data than the saved one, or has them in another order.

    Args:
        names: What each --data is called.
        checksums: That of each.
        saved: Those of the saved run, in order, as ``AND`` joins them.
    """
    if AND.join(checksums) == saved:
        return
    rule = "a run must continue with the data that it was saved with"
    got = f"got --data {' '.join(names)}"
    ways = f"allow this to change ({arg('allow_change')} text), or start a run in another folder."
    in_order = _named_in_order(names, checksums, saved)
    if in_order is not None:
        raise ValueError(
            f"{rule}, in the same order; {got}, saved as {' '.join(in_order)}. Give them in that order, {ways}"
        )
    of_saved = f"{AND}{saved}{AND}"
    others = [
        name
        for name, each in zip(names, checksums, strict=True)
        if f"{AND}{each}{AND}" not in of_saved
    ]
    if others:
        raise ValueError(
            f"{rule}; {got}, where the tokens of {', '.join(others)} are none that it had. Give the files and the "
            f"tokenizer as they were, {ways}"
        )
    raise ValueError(f"{rule}; {got}, which leaves out some of it. Give all that it had, {ways}")


def _named_in_order(names: Sequence[str], checksums: Sequence[str], saved: str) -> list[str] | None:
    """Returns the names in the order of the saved checksums; None if these are not those of the names, each once."""
    left, found = [*zip(names, checksums, strict=True)], []
    rest = f"{saved}{AND}"
    while rest and left:
        at = next((pair for pair in left if rest.startswith(f"{pair[1]}{AND}")), None)
        if at is None:
            return None
        left.remove(at)
        found.append(at[0])
        rest = rest.removeprefix(f"{at[1]}{AND}")
    return None if rest or left else found


def without_end(
    documents: Documents, ends: Sequence[int], text_of: Callable[[np.ndarray], str]
) -> tuple[int, int, np.ndarray]:
    """Returns how many answers do not end with one of the tokens, of how many, and the last tokens of the first of these.

    Args:
        documents: The first of these are looked at. An answer is a run of tokens that are learned.
        ends: The tokens that end a text. Only white space and special tokens may follow them in an answer.
        text_of: ``text_of(tokens)`` returns the text of tokens without special ones.
    """
    follows: dict[bytes, bool] = {}  # whether tokens may follow an end: most are the same

    def may_follow(tokens: np.ndarray) -> bool:
        key = tokens.tobytes()
        if key not in follows:
            follows[key] = not text_of(tokens).strip()
        return follows[key]

    starts, stops = documents.starts, documents.ends
    count = max(int(np.searchsorted(np.cumsum(stops - starts), MOST_TOKENS)), 1)
    missing, total, first = 0, 0, np.zeros(0, np.int64)
    for start, stop in zip(starts[:count].tolist(), stops[:count].tolist(), strict=True):
        for answer in _answers(documents, start, stop):
            total += 1
            at = np.flatnonzero(np.isin(answer, ends))
            if not len(at) or not may_follow(answer[at[-1] + 1 :]):
                first = first if missing else answer[-SHOWN_TOKENS:]
                missing += 1
    return missing, total, first


def _answers(documents: Documents, start: int, stop: int) -> list[np.ndarray]:
    tokens = documents.tokens[start:stop]
    marks = (
        np.ones(len(tokens), bool)
        if documents.learned is None
        else documents.learned[start:stop] != 0
    )
    parts = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(marks)) + 1)
    return [np.asarray(tokens[part]) for part in parts if len(part) and marks[part[0]]]


def remark_on_ends(
    corpus: Corpus, tokenizer: FolderTokenizer, data: Path, init_from: Path | None
) -> str:
    """Returns what to say where answers or texts teach no end, and how to add one; "" where all teach it.

    Args:
        corpus: Conversations; or texts, or completions of prompts, after which the tokenizer's own end of a text follows.
        tokenizer: Their tokenizer, with the chat template.
        data: The file or folder that they are in.
        init_from: The folder of the model, if there is one.
    """
    # As generate of transformers and `jaxpar serve` choose them.
    own = stop_tokens(init_from) if init_from is not None and (init_from / CONFIG).exists() else ()
    ends = own or (() if tokenizer.end is None else (tokenizer.end,))
    missing, total, last = without_end(corpus.documents, ends, tokenizer.decode)
    if not missing:
        return ""
    names = [tokenizer.text_of(token) for token in ends if token < tokenizer.vocab_size]
    of_tokenizer = f"eos_token of {tokenizer.folder / SETTINGS}"
    named = f"eos_token_id of {init_from / GENERATION}" if init_from else of_tokenizer
    # The first of the last tokens may be the end of a character.
    text = printable(tokenizer.decode(last, special=True).lstrip(REPLACEMENT))
    what, after = (
        ("texts", "a text") if corpus.documents.learned is None else ("answers", "its answer")
    )
    return (
        f"{missing} of the first {total} {what} in {data} do not end with a token at which the model stops "
        f'({" or ".join(names) or "its files name none"}), and the first of them ends with "{text}": a model that learns them '
        f"writes on after {after}. {_remedy(names, corpus.is_chat, tokenizer.folder)}If {what} end with a token of "
        f"their own, name it in {named}."
    )


def _remedy(names: Sequence[str], is_chat: bool, folder: Path) -> str:
    to_name = f"Name a token as eos_token in {folder / SETTINGS}"
    if not is_chat:  # a text or a completion is followed by it
        return "" if names else f"{to_name}. "
    to_add = f"Add {names[0]}" if names else f"{to_name}, and add it"
    where = f"the chat template of {folder}, after what the assistant says and inside {{% generation %}} if it has that"
    return f"{to_add} to {where}. "


def remarks_on_all(
    paths: Sequence[Path],
    documents: Sequence[tuple[np.ndarray, np.ndarray]],
    prompt: str | None,
    tokenizer: Tokenizer | None,
) -> list[str]:
    """Returns what to say of all --data together, and of --prompt, some of it "".

    Args:
        paths: The --data.
        documents: As for ``remark_on_equal``.
        prompt: --prompt.
        tokenizer: The tokenizer of the data.
    """
    of_paths = [remark_on_names(paths), remark_on_text(paths)]
    return [*of_paths, *remark_on_equal(documents), remark_on_prompt(prompt, tokenizer)]


def remark_on_names(paths: Sequence[Path]) -> str:
    """Returns what to say of several --data, one of which is there twice, or named as if it were held out; "" if none is."""
    if twice := [path for path in dict.fromkeys(paths) if paths.count(path) > 1]:
        return f"{_shown(twice)}: named more than once in --data. To learn it more often, name it once and give --data-weights"
    named = [path for path in paths if is_held_out(path)]
    if not 0 < len(named) < len(paths):
        return ""
    return (
        f"{_shown(named)}: learned like the other --data, but for a share of its own. Files with val or test in their names "
        "are held out of a folder: put them and the others into one, and name the folder."
    )


def remark_on_text(paths: Sequence[Path]) -> str:
    """Returns what to say of files that are learned as text, and begin with an example of JSON; "" if none does."""
    files = [
        file
        for path in paths
        if path.exists()
        for file in find_files(path)
        if file.suffix == ".txt"
    ]
    found = [file for file in files if _begins_with_example(file)]
    if not found:
        return ""
    return (
        f"{_shown(found)}: an example a line, learned as plain text, names of fields and brackets too. Name the file .jsonl to "
        "learn its examples"
    )


def remark_on_tokenizer(tokenizer: FolderTokenizer | None, own: Path | None) -> str:
    """Returns what to say of a tokenizer where that in the model's folder has other tokens by the same numbers; "" if not."""
    if tokenizer is None or own in (None, tokenizer.folder):
        return ""
    count = tokenizer.num_unlike(read_tokenizer(own))
    if not count:
        return ""
    return (
        f"{count:,} of the {tokenizer.vocab_size:,} tokens of --tokenizer {tokenizer.folder} are others in {own}, with which "
        "the model was trained. Leave --tokenizer out, unless the model is to learn this one anew"
    )


def remark_on_prompt(prompt: str | None, tokenizer: Tokenizer | None) -> str:
    """Returns what to say of characters of --prompt that the tokenizer does not know; "" if there are none."""
    lost = tokenizer.lost_in(prompt) if prompt and tokenizer is not None else ""
    if not lost:
        return ""
    return (
        f"the tokenizer does not know {printable(repr(lost))} of --prompt: it leaves such characters out, or has one token for "
        "all"
    )


def _begins_with_example(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            kind_of(json.loads(opened.readline(MAX_LINE_BYTES)))
    except (OSError, ValueError, RecursionError):
        return False
    return True


def remark_on_equal(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Iterator[str]:
    """Yields what to say of documents that are there twice: in several --data, or learned and held out.

    Args:
        parts: Checksums of the documents of each --data, of those to learn from and those held out.
    """
    if not parts:
        return
    learned, held_out = map(np.concatenate, zip(*parts, strict=True))
    count = len(learned) + len(held_out)
    by_chance = count**2 / 2**32  # checksums of 32 bits that are equal
    repeated = count - len(np.union1d(learned, held_out))
    if len(parts) > 1 and repeated > by_chance:
        yield f"{repeated:,} of {count:,} documents of all --data equal an earlier one"
    both = int(np.isin(held_out, learned).sum())
    if both > by_chance:
        yield (
            f"{both:,} of {len(held_out):,} held-out documents are learned too, from equal ones, so the loss on the text held "
            "out is not that of new text. Remove them from the data to learn from"
        )


def remark_on_others(path: Path, files: Sequence[Path]) -> str:
    """Returns what to say of files beside the .bin files of a folder; "" if there are none."""
    of_tokens = {path, *path.glob("*.bin")}
    others = [file for file in files if file not in of_tokens]
    return (
        f"of {printable(str(path))} only its .bin files are read, not {_shown(others)}"
        if others
        else ""
    )


def _shown(files: Sequence[Path]) -> str:
    shown = ", ".join(printable(str(file)) for file in files[:MOST_NAMED])
    return shown + (f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else "")
