"""Rows of facts, a gap and questions: every question can be answered by the facts of its row alone."""

from pathlib import Path

import numpy as np
import pytest

import gpt
from jaxpar.commands import recipe as cli
from jaxpar.data import recall
from jaxpar.data.packing import IGNORED
from jaxpar.data.recall import Recall
from jaxpar.data.text import Windows
from jaxpar.run import language_data, language_model
from jaxpar.run.language_data import DataFlags
from jaxpar.run.language_model import ModelFlags
from tests.support.real_runs import read_lines

SEQ = 64
ROWS = Recall(SEQ, vocab_size=256)


def test_each_question_is_about_a_fact_at_least_half_a_row_before_it_and_only_answers_are_learned():
    batch = ROWS.batch(8, seed=0, step=3)
    for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
        names, values = np.divmod(tokens[: SEQ // 4], recall.NUM_VALUES)
        value_of = dict(zip(names.tolist(), values.tolist(), strict=True))
        assert len(set(zip(names.tolist(), values.tolist(), strict=True))) == len(value_of), (
            "a name has one value"
        )
        assert (tokens[SEQ // 4 : -SEQ // 4] == recall.GAP).all()
        assert (targets[: -SEQ // 4] == IGNORED).all()
        asked = tokens[-SEQ // 4 :] - recall.QUESTION
        np.testing.assert_array_equal(
            targets[-SEQ // 4 :], [recall.ANSWER + value_of[name] for name in asked.tolist()]
        )
    assert max(batch["tokens"].max(), batch["targets"].max()) <= recall.GAP < 256
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


def test_rows_are_a_function_of_seed_and_step_and_those_held_out_are_others():
    again, held_out = Recall(SEQ, vocab_size=256), Recall(SEQ, vocab_size=256, is_test=True)
    ROWS.batch(4, seed=0, step=1)
    for name, column in ROWS.batch(4, seed=0, step=7).items():
        np.testing.assert_array_equal(column, again.batch(4, seed=0, step=7)[name])
    of_others = [
        ROWS.batch(4, seed=1, step=7),
        ROWS.batch(4, seed=0, step=8),
        held_out.batch(4, seed=0, step=7),
    ]
    assert not any(
        np.array_equal(again.batch(4, seed=0, step=7)["tokens"], other["tokens"])
        for other in of_others
    )
    assert not np.array_equal(
        ROWS.take(np.array([5]))["tokens"], held_out.take(np.array([5]))["tokens"]
    )


def test_rows_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError, match="a row of recall must have a fact, a gap and a question; got seq=3"
    ):
        Recall(3, vocab_size=256)
    with pytest.raises(
        ValueError,
        match=f"recall has {recall.GAP + 1} tokens, .* got vocab_size=128. Choose --model llama",
    ):
        Recall(SEQ, vocab_size=128)


def test_data_recall_is_made_unless_a_file_of_that_name_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = DataFlags(data=(Path("recall"),), seq=SEQ)
    train, test = language_data.make_rows(flags, language_data.load_data(flags), 256)
    assert isinstance(train, Recall)
    assert isinstance(test, Recall)
    assert (
        train.describe()
        == "rows of 64 tokens: 16 facts, a gap, and 16 questions, which alone are learned"
    )
    Path("recall").write_text("text " * 1000)
    train, _ = language_data.make_rows(flags, language_data.load_data(flags), 256)
    assert isinstance(train, Windows)


def test_a_window_is_the_models_own_unless_it_is_given():
    windows = [
        language_model.config_of_flags(ModelFlags(window=window), SEQ)[0].window
        for window in (None, 8)
    ]
    assert windows == [None, 8]


def train(folder, *own, seq=256, steps=100):
    """The last metrics of the command of recipes/gpt.py in docs/long-sequences.md, with shorter rows and more of them."""
    flags = [
        "--data",
        "recall",
        "--model",
        "llama-tiny",
        "--seq",
        str(seq),
        "--batch-size",
        "8",
        "--steps",
        str(steps),
    ]
    flags += ["--optimizer", "muon", "--lr", "0.02", "--eval-rows", "8", "--eval-every", str(steps)]
    cli.run(gpt.main, gpt.Config, [*flags, *own, "--out-dir", str(folder)])
    return read_lines(folder)[-1]


OVER_CONTEXT = "--mesh.data", "2", "--mesh.context", "4"


@pytest.mark.slow
def test_recipes_gpt_py_trains_on_them_over_context_as_on_one_device(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "conclude", lambda *_: None)
    runs = {"mesh": OVER_CONTEXT, "device": ()}
    last = {name: train(tmp_path / name, *own, seq=64, steps=3) for name, own in runs.items()}
    for name in ("loss", "test_loss", "grad_norm"):
        np.testing.assert_allclose(last["mesh"][name], last["device"][name], rtol=1e-3)


@pytest.mark.slow
def test_recipes_gpt_py_learns_them_over_context_and_not_with_a_window_that_does_not_reach(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpt, "conclude", lambda *_: None)
    runs = {"whole": OVER_CONTEXT, "window": ("--window", "64")}
    last = {name: train(tmp_path / name, *own) for name, own in runs.items()}
    assert last["whole"]["loss"] < 0.1
    assert last["whole"]["test_loss"] < 0.1, "on rows that it was not trained on"
    assert last["window"]["loss"] > np.log(recall.NUM_VALUES) - 0.2
