"""How likely given tokens are: against the model's own pass, and as a server tells it of prompts and answers."""

import jax
import numpy as np
import pytest
import tokenizers

from jaxpar.data.text import ByteTokenizer
from jaxpar.huggingface import read_tokenizer
from jaxpar.models import transformer
from jaxpar.models.transformer import TokenScores, scoring
from jaxpar.serve.logprobs import echo_of, logprobs
from jaxpar.serve.open_run import ModelSettings, open_model
from tests.support import serving, tiny_transformer
from tests.support.texts import write_tokenizer

CONFIG = serving.CONFIG
ENTRIES = ("tokens", "token_logprobs", "top_logprobs")


@pytest.fixture(scope="module")
def params():
    return tiny_transformer.make_params(CONFIG)


@pytest.fixture(scope="module")
def completions(tmp_path_factory):
    """Returns the endpoint of completions of a run, without a server, and the model's config and params."""
    folder = tmp_path_factory.mktemp("runs") / "gpt"
    params = serving.write_gpt_run(folder)
    (endpoint, *_) = open_model(folder, ModelSettings()).endpoints

    def ask(**fields):
        body = {"model": "gpt", "prompt": "def main", "max_tokens": 1, "temperature": 0} | fields
        reply = endpoint.make_reply(endpoint.body.model_validate(body))
        return reply.whole([*reply.work()])

    return ask, params


def of_full_pass(params, row):
    logits = jax.jit(transformer.make_model(CONFIG).apply)(params, {"tokens": np.array([row])})[0]
    return np.asarray(jax.nn.log_softmax(np.float32(logits), axis=-1))


def test_scores_are_those_of_a_full_pass_for_rows_of_any_length_and_in_any_parts(
    params, monkeypatch
):
    monkeypatch.setattr(scoring, "POSITIONS", 16)
    rng = np.random.default_rng(0)
    rows = [rng.integers(256, size=length).astype(np.int32) for length in (29, 1, 17)]
    found = transformer.score_tokens(CONFIG, params, rows, num_top=3)
    for row, scores in zip(rows, found, strict=True):
        whole = of_full_pass(params, row)
        assert scores.log_probs.shape == (len(row),)
        assert np.isnan(scores.log_probs[0])
        np.testing.assert_allclose(
            scores.log_probs[1:], whole[np.arange(len(row) - 1), row[1:]], rtol=1e-4, atol=1e-5
        )
        best = np.sort(whole[:-1], axis=-1)[:, :-4:-1]
        np.testing.assert_allclose(scores.top_log_probs[1:], best, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(scores.top[1:, 0], whole[:-1].argmax(-1))


def test_scores_that_are_not_finite_are_an_error(params):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    with pytest.raises(FloatingPointError, match="scores must be finite"):
        transformer.score_tokens(CONFIG, broken, [np.arange(4)])
    with pytest.raises(ValueError, match="vocab_size=256"):
        transformer.score_tokens(CONFIG, params, [np.array([256])])


@pytest.mark.parametrize(
    ("rows", "num_top", "error", "said"),
    [
        ([], 1, ValueError, "got no rows"),
        ([np.arange(3), np.arange(0)], 1, ValueError, r"got \(3,\), \(0,\)"),
        ([np.zeros((2, 3), np.int32)], 1, ValueError, r"got \(2, 3\)"),
        ([np.arange(3.0)], 1, TypeError, "tokens must be integers"),
        ([np.arange(3)], 0, ValueError, "num_top must be at least 1; got 0"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(params, rows, num_top, error, said):
    with pytest.raises(error, match=said):
        transformer.score_tokens(CONFIG, params, rows, num_top=num_top)


@pytest.mark.full
def test_a_prompt_is_told_with_the_likelihood_of_each_token_and_one_token_more(completions):
    ask, params = completions
    (choice,) = ask(prompt=[*b"def main"], echo=True, logprobs=1)["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith("def main")
    assert told["tokens"][:8] == [*"def main"]
    assert len(told["tokens"]) == 9, "an evaluation cuts off one token, that of the answer"
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["text_offset"][:8] == [*range(8)]
    row = np.frombuffer(b"def main", np.uint8).astype(np.int32)
    whole = of_full_pass(params, row)
    np.testing.assert_allclose(
        told["token_logprobs"][1:8], whole[np.arange(7), row[1:]], rtol=1e-4, atol=1e-5
    )
    for token, own, top in zip(
        told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
    ):
        assert top[token] == own <= max(top.values()), (
            "the token is among them, to be compared with the likeliest"
        )
        assert len(top) <= 2
    assert told["token_logprobs"][8] == max(told["top_logprobs"][8].values()), (
        "it was drawn as the likeliest"
    )


@pytest.mark.full
def test_the_forms_of_echo_and_logprobs_agree(completions):
    ask, _ = completions
    both = ask(prompt=["def main", "import"], echo=True, logprobs=2, max_tokens=3)["choices"]
    one = ask(prompt="import", logprobs=2, max_tokens=3)["choices"][0]
    assert both[1]["text"] == "import" + one["text"]
    assert both[1]["logprobs"]["tokens"] == [*"import", *one["logprobs"]["tokens"]]
    np.testing.assert_allclose(
        both[1]["logprobs"]["token_logprobs"][6:],
        one["logprobs"]["token_logprobs"],
        rtol=1e-4,
        atol=1e-5,
    )
    assert one["logprobs"]["text_offset"][0] == 0
    alone = ask(prompt="import", echo=True, logprobs=0, max_tokens=0)
    assert alone["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    (choice,) = alone["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("import", "length")
    assert choice["logprobs"]["tokens"] == [*"import"]
    assert [top and len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1, 1, 1, 1]
    plain = ask(prompt="import", echo=True, max_tokens=2)["choices"][0]
    assert plain["logprobs"] is None
    assert plain["text"].startswith("import")


@pytest.mark.parametrize(
    ("tokens", "text", "offsets"),
    [
        (b"h\xe6\x97hs", "h\ufffdhs", [0, 1, 1, 2, 3]),
        (b"h\xe6\x97", "h\ufffd", [0, 1, 1]),
        ("h\u65e5h".encode(), "h\u65e5h", [0, 1, 1, 1, 2]),
        (b"\xa5\xa5h", "\ufffd\ufffdh", [0, 0, 2]),
    ],
)
def test_offsets_of_tokens_after_a_part_of_a_character_are_their_own(tokens, text, offsets):
    found = echo_of(ByteTokenizer(), None, np.frombuffer(tokens, np.uint8).astype(np.int64))
    assert found.text == text
    assert found.offsets == offsets


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>user\nwhat is a cat?<|im_end|>\n<|im_start|>assistant\n",
        "the cat, naïve 東京 <|im_end|>",
    ],
)
def test_offsets_point_to_the_tokens_in_the_text_special_ones_too(tmp_path, prompt, as_tokens, bos):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", bos=bos))
    [(tokens, _)] = tokenizer.encode([prompt], begins=[True])
    [(answer, _)] = tokenizer.encode([" a small<|im_start|> café<|im_end|>"], begins=[False])
    echo = echo_of(tokenizer, None if as_tokens else prompt, tokens)
    assert echo.text == ("<|begin|>" if bos and as_tokens else "") + prompt
    row = [*tokens.tolist(), *answer.tolist()]
    scores = TokenScores(np.zeros(len(row)), np.zeros((len(row), 1), int), np.zeros((len(row), 1)))
    found = logprobs(tokenizer, row, scores, num_prompt=len(tokens), num_top=1, echo=echo)
    text = echo.text + tokenizer.decode(answer)
    assert len(found["tokens"]) == len(found["text_offset"]) == len(row)
    is_shown = lambda at: at < len(tokens) and (at or not bos or as_tokens)
    for at, (token, offset) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        if is_shown(at) or not token.startswith("<|"):
            assert token.startswith("bytes:") or text[offset:].startswith(token), (
                at,
                token,
                offset,
            )
    alone = logprobs(tokenizer, row, scores, num_prompt=len(tokens), num_top=1)
    assert alone["tokens"] == found["tokens"][len(tokens) :]
    assert alone["text_offset"] == [
        offset - len(echo.text) for offset in found["text_offset"][len(tokens) :]
    ]
    assert alone["tokens"][-1] == "<|im_end|>", (
        "the end is named, and has the offset of the end of the text"
    )
    assert found["text_offset"][-1] == len(text)


def byte_fallback(folder):
    """A tokenizer of SentencePiece's form, which has bytes for the characters that it does not know."""
    bytes_of_it = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate(["<unk>", "▁", "a", *bytes_of_it])}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def space_prefixed(folder):
    """A tokenizer in the form of Llama 2's and Mistral's: "▁" is a space, and the first one of a text is left out."""
    bytes_of_it = [f"<0x{byte:02X}>" for byte in range(256)]
    whole = ["<unk>", "<s>", "▁", "a", "b", "▁a", "▁b"]
    vocab = {token: index for index, token in enumerate([*whole, *bytes_of_it])}
    merges = [("▁", "a"), ("▁", "b")]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return read_tokenizer(folder)


def made_up(row, top):
    """Scores of -1 for each token of a row, and in each place from -2 down for the likeliest ones."""
    each = np.tile(-np.arange(len(top)) - 2.0, (len(row), 1))
    return TokenScores(-np.ones(len(row)), np.tile(top, (len(row), 1)), each)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a  b", ["a", " ", " b"]),
        ("ab b", ["a", "b", " b"]),
        (" b", ["", " b"]),
        ("b\n b", ["b", "\n", " b"]),
    ],
)
def test_names_of_tokens_have_the_spaces_that_the_text_has(tmp_path, text, names):
    tokenizer = space_prefixed(tmp_path / "model")
    [(tokens, _)] = tokenizer.encode([text], begins=[False])
    row = tokens.tolist()
    for given in (text, None):
        echo = echo_of(tokenizer, given, tokens)
        found = logprobs(
            tokenizer, row, made_up(row, [3]), num_prompt=len(row), num_top=1, echo=echo
        )
        assert (found["tokens"], "".join(names)) == (names, echo.text)
    longer = [*row, 6, 4]
    answer = logprobs(tokenizer, longer, made_up(longer, [3]), num_prompt=len(row), num_top=1)
    assert (answer["tokens"], answer["text_offset"]) == ([" b", "b"], [0, 2])


def test_two_tokens_of_one_name_are_two_entries(tmp_path):
    """A byte and the character that it is, and tokens of padding that the tokenizer does not have."""
    tokenizer = space_prefixed(tmp_path / "model")
    byte, row = 7 + ord("b"), [1, 5, 4, 300]
    scores, echo = made_up(row, [byte, 6, 4, 300, 301]), echo_of(tokenizer, None, np.array(row))
    found = logprobs(tokenizer, row, scores, num_prompt=len(row), num_top=5, echo=echo)
    *_, b, padding = found["top_logprobs"]
    assert b == {"b": -1, f"token_id:{byte}": -2, " b": -3, "": -5, "token_id:301": -6}
    assert padding == {"": -1, "b": -2, " b": -3, "token_id:4": -4, "token_id:301": -6}


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "bytes"])
def test_parts_of_a_character_are_named_by_their_bytes_and_are_entries_of_their_own(tmp_path, kind):
    make = {"byte-level": write_tokenizer, "byte-fallback": byte_fallback}.get(kind)
    tokenizer = ByteTokenizer() if make is None else read_tokenizer(make(tmp_path / "model"))
    text = "a 鏡台"
    [(tokens, _)] = tokenizer.encode([text], begins=[False])
    row = tokens.tolist()
    parts = list(dict.fromkeys(row[-6:]))
    top = np.array([parts[:5]] * len(row))
    scores = TokenScores(-np.ones(len(row)), top, np.tile(-np.arange(5.0) - 2, (len(row), 1)))
    echo = echo_of(tokenizer, text, tokens)
    found = logprobs(tokenizer, row, scores, num_prompt=len(row), num_top=5, echo=echo)
    written = "".join(f"\\x{byte:02x}" for byte in "鏡台".encode())
    assert "".join(found["tokens"][-6:]).replace("bytes:", "") == written
    assert all(len(each) in (5, 6) for each in found["top_logprobs"][1:]), "none is lost"
    for token, own, top in zip(*(found[key][-6:] for key in ENTRIES), strict=True):
        assert top[token] == own == -1, "it is likelier than as one of the likeliest"
    assert found["text_offset"][-6:] == [2, 2, 2, 3, 3, 3]
    assert echo.text == text
    assert tokenizer.bytes_of(row[-1]) == "台".encode()[-1:]
    assert b"a" in map(tokenizer.bytes_of, row)


def test_tokens_beyond_the_bytes_of_a_model_of_bytes_have_no_text():
    """Its vocabulary may be larger than 256: "jaxpar_tokens": "bytes" says only what the first 256 are."""
    tokenizer, row = ByteTokenizer(), [*b"ab", 283, 256]
    top = np.array([[283, 97]] * len(row))
    scores = TokenScores(-np.ones(len(row)), top, np.tile([-2.0, -3.0], (len(row), 1)))
    echo = echo_of(tokenizer, None, np.array(row))
    found = logprobs(tokenizer, row, scores, num_prompt=len(row), num_top=2, echo=echo)
    assert found["tokens"] == ["a", "b", "", ""]
    assert found["top_logprobs"][1] == {"b": -1, "": -2, "a": -3}
    assert tokenizer.decode(np.array(row)) == echo.text == "ab"
