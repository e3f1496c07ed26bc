"""Characters that a tokenizer leaves out, or has one token for, are told: a model would not learn what was written."""

import json

import pytest

from jaxpar.data.corpus import tokenise
from jaxpar.huggingface.tokenizer import read_tokenizer
from jaxpar.run.remarks import remark_on_prompt
from tests.support.texts import write_lines, write_tokenizer

pytest.importorskip("tokenizers")
KNOWN = ["\u2581the", "\u2581answer", "\u2581is", "\u2581", "a", "b", "ab", "\u00e9"]


def make(folder, kind):
    """A tokenizer that knows letters alone, of a kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    folder.mkdir()
    if kind == "bytes":
        write_tokenizer(folder)
        return read_tokenizer(folder)
    numbers = {token: number for number, token in enumerate(["<unk>", *KNOWN, "<0xE6>", "<s>"])}
    byte_tokens = {f"<0x{byte:02X}>": len(numbers) + byte for byte in range(256)}
    of = {
        "unigram": lambda: models.Unigram([(token, -1.0) for token in numbers], unk_id=0),
        "without": lambda: models.BPE(vocab=numbers, merges=[]),
        "unknown": lambda: models.BPE(vocab=numbers, merges=[], unk_token="<unk>"),
        "fallback": lambda: models.BPE(
            vocab=numbers | byte_tokens, merges=[], byte_fallback=True, unk_token="<unk>"
        ),
        "lower": lambda: models.BPE(vocab=numbers, merges=[]),
        "refuses": lambda: models.WordLevel(numbers, unk_token="[UNK]"),
    }[kind]
    tokenizer = Tokenizer(of())
    if kind == "lower":
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return read_tokenizer(folder)


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("unigram", "ab 10 \u65e5\u672c 1", "10\u65e5\u672c"),
        ("unigram", "ab a b \u00e9", ""),
        ("without", "ab 10 \u65e5\u672c 1", "10\u65e5\u672c"),
        ("unknown", "a\u65e5b", "\u65e5"),
        ("fallback", "ab 10 \u65e5\u672c 1", ""),
        ("bytes", "ab 10 \u65e5\u672c \U0001f600 1", ""),
        ("lower", "AB ab", ""),
        ("without", "AB ab", "AB"),
        ("without", "", ""),
        ("refuses", "a b ab", ""),
        ("without", " \n\t\u200b\ufeff", ""),
    ],
)
def test_characters_that_no_token_shows_are_lost(kind, text, lost, tmp_path):
    tokenizer = make(tmp_path / kind, kind)
    for _ in range(2):
        assert tokenizer.lost_in(text) == lost


def test_such_characters_of_a_prompt_are_told(tmp_path):
    tokenizer = make(tmp_path / "without", "without")
    assert "does not know '\u65e5' of --prompt" in remark_on_prompt("a\u65e5b\u65e5", tokenizer)
    assert remark_on_prompt("ab", tokenizer) == remark_on_prompt(None, None) == ""


@pytest.mark.parametrize("kind", ["unigram", "without", "fallback"])
def test_examples_with_such_characters_are_told_and_those_of_a_cache_too(kind, tmp_path):
    tokenizer = make(tmp_path / kind, kind)
    examples = [{"prompt": "a ", "completion": each} for each in ("b", "ab 1", "1\u65e5", "a")]
    file = write_lines(tmp_path / "a.jsonl", *map(json.dumps, examples))
    for _ in range(2):
        told = tokenise([file], tokenizer, tmp_path / "cache").remarks
        said = [each for each in told if "does not know" in each]
        assert len(said) == (kind != "fallback")
        if said:
            assert said[0].startswith("2 of 4 examples have characters that the tokenizer does not")
            assert said[0].endswith("a.jsonl:2")
