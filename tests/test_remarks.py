"""Conversations whose answers teach no end are told when they are read, and the remedies that are told work."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpar.data.packing import Documents
from jaxpar.run import evaluation, language_data
from jaxpar.run.language_data import DataFlags
from jaxpar.run.remarks import check_same_data, without_end
from tests.support.texts import CHATML, write_tokenizer

# As GLM's: a turn ends where the next begins.
NO_END = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
# The block has what the assistant says and not the end after it.
LEFT_OUT = (
    "{% for message in messages %}[{{ message['role'] }}]\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}<|im_end|>{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ANSWER = "{{ message['content'] }}"


@pytest.fixture
def read(tmp_path, capsys):
    """Reads conversations by a chat template; returns what is said, and the text of the learned tokens of one of them."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "a small animal"},
            ]
            * 2
        }
        for i in range(20)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def reading(template, *, stops=None, **settings):
        folder = write_tokenizer(tmp_path / "model", template=template, **settings)
        (folder / "config.json").write_text("{}")
        if stops is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        flags = DataFlags(data=(tmp_path / "chat.jsonl",), token_cache=tmp_path / "cache", seq=64)
        data = language_data.load_data(flags, folder)
        train, _ = language_data.make_rows(flags, data, 400)
        row = train.take(np.arange(1))
        learned = row["targets"][row["targets"] >= 0]
        text = data.tokenizer._tokenizer.decode(learned.tolist(), skip_special_tokens=False)
        return capsys.readouterr().out, text

    return reading


@pytest.mark.parametrize(
    ("names", "checksums", "told"),
    [
        (
            "b a",
            "2 1",
            r"in the same order; got --data b a, saved as a b\. Give them in that order",
        ),
        (
            "a b",
            "1 3",
            r"got --data a b, where the tokens of b are none that it had\. Give the files and",
        ),
        (
            "a b c",
            "1 2 3",
            r"got --data a b c, where the tokens of c are none that it had\. Give the files",
        ),
        ("a", "1", r"got --data a, which leaves out some of it\. Give all that it had, allow this"),
    ],
)
def test_data_of_a_resume_that_differ_are_named_with_what_differs(names, checksums, told):
    with pytest.raises(ValueError, match=told):
        check_same_data(names.split(), checksums.split(), "1 and 2")
    check_same_data(names.split(), checksums.split(), " and ".join(checksums.split()))


def test_a_template_that_marks_no_end_of_a_turn_is_told_with_the_remedy(read, tmp_path):
    said, learned = read(NO_END)
    assert "<|im_end|>" not in learned
    assert (
        f"40 of the first 40 answers in {tmp_path}/chat.jsonl do not end with a token at which the model stops (<|im_end|>), "
        'and the first of them ends with "a small animal": a model that learns them writes on after its answer. Add <|im_end|> '
        "to the chat template of "
        f"{tmp_path}/model, after what the assistant says and inside {{% generation %}} if it has that. If"
    ) in said
    said, learned = read(
        NO_END.replace(
            ANSWER, ANSWER + "{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}"
        )
    )
    assert "answers" not in said
    assert learned.startswith("a small animal<|im_end|>a small animal<|im_end|>")


def test_a_block_that_leaves_the_end_out_is_told_with_the_remedy(read):
    said, learned = read(LEFT_OUT)
    assert (
        'do not end with a token at which the model stops (<|im_end|>), and the first of them ends with "a small animal"'
        in said
    )
    assert "<|im_end|>" not in learned
    said, learned = read(
        LEFT_OUT.replace("{% endgeneration %}<|im_end|>", "<|im_end|>{% endgeneration %}")
    )
    assert "answers" not in said
    assert learned.startswith("a small animal<|im_end|>a small animal<|im_end|>")


def test_the_line_break_after_an_answers_end_is_learned_unless_the_template_marks_the_answer(read):
    """As docs/text.md says of ChatML."""
    _, learned = read(CHATML, eos_token="<|im_end|>", stops=2)
    assert learned.startswith("a small animal<|im_end|>\na small animal<|im_end|>\n")
    marked = CHATML.replace(
        "{{ message['content'] }}<|im_end|>",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}",
    )
    _, learned = read(marked, eos_token="<|im_end|>", stops=2)
    assert learned.startswith("a small animal<|im_end|>a small animal<|im_end|>")


def test_answers_that_end_with_a_token_at_which_the_model_does_not_stop_are_told_with_the_remedy(
    read, tmp_path
):
    """As a base model with ChatML, whose files name another token."""
    said, _ = read(CHATML, eos_token="<|begin|>", stops=0)
    assert re.search(
        r'stops \(<\|begin\|>\), and the first of them ends with "[a-z ]*<\|im_end\|>\\n":', said
    ), said
    assert f"name it in eos_token_id of {tmp_path}/model/generation_config.json." in said
    said, _ = read(CHATML, eos_token="<|begin|>", stops=[0, 2])
    assert "answers" not in said
    said, _ = read(CHATML, eos_token="<|im_end|>", stops=0)
    assert "stops (<|begin|>)" in said, "what generate goes by is generation_config.json"
    said, _ = read(CHATML, eos_token=None, stops=[])
    assert "(its files name none)" in said
    assert (
        f"Name a token as eos_token in {tmp_path}/model/tokenizer_config.json, and add it to the chat template"
        in said
    )


def test_the_end_of_an_answer_is_shown_in_whole_characters(tmp_path, capsys):
    line = {"prompt": "what is a cat?", "completion": "x" * 40 + "\N{CAT FACE}" * 9 + "!"}
    lines = [json.dumps({**line, "prompt": f"{i}?"}) + "\n" for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    folder = write_tokenizer(tmp_path / "model", eos_token="<|begin|>")
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    flags = DataFlags(data=(tmp_path / "a.jsonl",), token_cache=tmp_path / "cache", seq=128)
    language_data.make_rows(flags, language_data.load_data(flags, folder), 400)
    said = capsys.readouterr().out
    assert "ends with" in said
    assert "\N{CAT FACE}" in said
    assert "\ufffd" not in said


@pytest.mark.parametrize("is_text", [False, True])
def test_texts_and_completions_whose_end_the_model_does_not_stop_at_are_told_with_the_remedy(
    tmp_path, capsys, is_text
):
    completion = {"prompt": "what is a cat?", "completion": " a small animal"}
    line = json.dumps({"text": "a cat is a small animal"} if is_text else completion) + "\n"
    (tmp_path / "a.jsonl").write_text(line + line.replace("cat", "dog"))
    flags = DataFlags(data=(tmp_path / "a.jsonl",), token_cache=tmp_path / "cache", seq=64)

    def said(stops, **settings):
        folder = write_tokenizer(tmp_path / "model", template=None, **settings)
        (folder / "config.json").write_text(json.dumps({"eos_token_id": stops}))
        data = language_data.load_data(flags, folder)
        train, _ = language_data.make_rows(flags, data, 400)
        targets = train.take(np.arange(1))["targets"]
        assert (data.tokenizer.end in targets) == (data.tokenizer.end is not None), (
            "the end is added and learned"
        )
        return capsys.readouterr().out

    what, after = ("texts", "a text") if is_text else ("answers", "its answer")
    assert "stops" not in said(2)
    assert "stops (<|begin|>)" in (told := said(0))
    assert (
        f"after {after}. If {what} end with a token of their own, name it in eos_token_id of "
        in told
    )
    assert f"Name a token as eos_token in {tmp_path}/model/tokenizer_config.json. If" in said(
        None, eos_token=None
    )


def test_examples_that_are_left_out_are_not_counted(tmp_path, capsys):
    some = [{"prompt": f"what is {i}?", "completion": " a cat"} for i in range(30)]
    long = [
        {"prompt": "what is a dog?", "completion": " a small animal" * count}
        for count in (30, 40, 50)
    ]
    folder = write_tokenizer(tmp_path / "model", template=None)

    def read(*examples):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
        flags = DataFlags(
            data=(tmp_path / "a.jsonl",),
            token_cache=tmp_path / "cache",
            seq=64,
            long_examples="drop",
        )
        data = language_data.load_data(flags, folder)
        sides = language_data.make_rows(flags, data, 400)
        train, test = (side.take(np.arange(len(side)))["targets"] for side in sides)
        counted = np.bincount(train[train >= 0], minlength=400)
        assert data.parts[0].num_learned == counted.sum(), (
            "the targets of the rows are what is counted"
        )
        held_out, occur = test[test >= 0], np.union1d(train, test)
        shares = (counted + 1) / (counted.sum() + (occur >= 0).sum())
        loss = -np.log(shares[held_out]).mean()
        assert data.unigram_loss == pytest.approx(loss)
        said = f"and {data.parts[0].num_tokens[1]} held out; knowing the tokens' frequencies alone "
        assert f"{said}gives {loss:.4f} nats" in data.describe()
        assert f"frequencies alone gives {loss:.4f}" in evaluation.describe_loss(1.0, data)

    read(*some)
    read(*some, *long)
    assert "left out: 3 of 33 examples" in capsys.readouterr().out


def test_answers_are_runs_of_learned_tokens_within_documents():
    tokens, learned = (
        np.array([5, 6, 9, 5, 7, 5, 8, 9]),
        np.array([0, 1, 1, 0, 1, 0, 1, 1], np.uint8),
    )
    documents = Documents(tokens, np.array([0, 5]), np.array([5, 8]), learned)
    text_of = lambda tokens: "".join("\n" if token == 5 else "a" for token in tokens.tolist())
    missing, total, first = without_end(documents, [9], text_of)
    assert (missing, total, first.tolist()) == (1, 3, [7])
    assert without_end(documents, [], text_of)[:2] == (3, 3)
    of_first = lambda count: Documents(tokens, np.array([0]), np.array([count]))  # all are learned
    found = [without_end(of_first(count), [9], text_of)[:2] for count in (8, 4, 5)]
    assert found == [(0, 1), (0, 1), (1, 1)], "white space may follow an end, text may not"


def test_an_answer_that_has_the_end_of_the_question_alone_is_told(read):
    """By a template that writes no end after the last message, and does not ask for an answer."""
    prefill = CHATML.partition("{% if add")[0].replace(
        "<|im_end|>\n{% endfor", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor"
    )
    said, learned = read(prefill.replace("messages %}", "messages[:2] %}"))
    assert learned.startswith("<|im_end|>\n<|im_start|>assistant\na small animal")
    assert 'stops (<|im_end|>), and the first of them ends with "' in said


@pytest.mark.parametrize(
    ("loss", "perplexity"), [(1.0, "2.718"), (14530.0, "inf"), (math.nan, "nan")]
)
def test_a_perplexity_that_is_too_large_is_infinite(loss, perplexity):
    text = SimpleNamespace(unit="token", unigram_loss=2.0)
    assert f"perplexity {perplexity}; knowing" in evaluation.describe_loss(loss, text)
