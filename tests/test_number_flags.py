"""Every flag of a recipe that is a number is refused by name where no run could have it, before anything is trained."""

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import get_args

import jax
import pytest

import all_reduce
import bloom
import bloom_jobs
import digits
import gpt
import house_prices
import jaxpar
import untrained_model
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import list_flags
from jaxpar.run import Run
from tests.support.flags import replaced
from tests.support.tiers import full

NAME = lambda recipe: recipe.__name__
RECIPES = (all_reduce, bloom, digits, gpt, house_prices, untrained_model)
WORDS = "one two three four five six. " * 40
USUAL = {
    gpt: ["--data", "text.txt", "--seq", "8", "--model", "llama-tiny"],
    all_reduce: ["--devices", "2"],
}
# What a flag applies to, where a value of it would else be refused for that alone.
PIPELINE = ("--mesh.stage", "2")
NEEDED = {
    "--keep-every": ("--checkpoint-every", "5"),
    "--num-chunks": PIPELINE,
    "--layers-per-virtual-stage": PIPELINE,
    "--decay-steps": ("--learning-rate-schedule", "wsd"),
    "--momentum": ("--optimizer", "sgd"),
    "--lora-alpha": ("--lora-rank", "8"),
    "--router-bias-rate": ("--model", "moe-bytes"),
    "--nodes": ("--compile-for", "h100"),
    "--expert-buffer": ("--experts", "data", "--model", "moe-bytes"),
}


class AcceptedError(Exception):
    """All checks have passed."""


def accept(*_, **__):
    raise AcceptedError


@pytest.fixture
def said(monkeypatch, tmp_path):
    """Runs a recipe's checks; gives the message where it refuses, else None."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(WORDS)
    monkeypatch.setattr(Run, "compile", accept)
    monkeypatch.setattr(all_reduce, "init_params", accept)
    monkeypatch.setattr(bloom_jobs, "make_step", accept)
    monkeypatch.setattr(untrained_model, "write_untrained", accept)
    monkeypatch.setattr(jaxpar, "use_fake_devices", lambda _: None)
    monkeypatch.setattr(cli, "start_on_cpu", lambda: None)

    def said(recipe, *flags):
        err, code = io.StringIO(), None
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(err):
                cli.run(recipe.main, recipe.Config, replaced([*USUAL.get(recipe, []), *flags]))
        except AcceptedError:
            return None
        except SystemExit as end:
            code = end.code
        assert code == 2, f"{flags}: {code}: {err.getvalue()}"
        return " ".join(err.getvalue().split())

    yield said
    jax.config.update("jax_enable_x64", False)  # all_reduce.py computes in float64 from here on


def numbers(recipe, kind):
    """The flags of a recipe that take a number of a kind."""
    return [flag for _, flag, taken in list_flags(recipe.Config) if kind in kinds(taken)]


def kinds(taken):
    """A type, and those that it is made of."""
    return {taken}.union(*map(kinds, get_args(taken)))


@pytest.mark.parametrize(
    "recipe", [full(each) if each is gpt else each for each in RECIPES], ids=NAME
)
def test_a_number_that_no_run_could_have_is_refused(said, recipe):
    wrong = [(flag, value) for flag in numbers(recipe, float) for value in ("nan", "inf", "-1")]
    wrong += [(flag, "-1") for flag in numbers(recipe, int) if not flag.startswith("--mesh.")]
    rules = {
        each: (said(recipe, *NEEDED.get(each[0], ()), *each) or "").partition("; got ")[0]
        for each in wrong
    }
    assert not {each: rule for each, rule in rules.items() if each[0] not in rule}


@pytest.mark.parametrize(
    "recipe", [full(each) if each is gpt else each for each in RECIPES], ids=NAME
)
def test_no_zero_ends_with_a_traceback(said, recipe):
    for flag in (*numbers(recipe, float), *numbers(recipe, int)):
        message = said(recipe, *NEEDED.get(flag, ()), flag, "0")
        assert message is None or "error: " in message


@pytest.mark.parametrize("value", ["0", "nan"])
def test_all_reduce_refuses_a_learning_rate_as_other_recipes_do(said, value):
    rule = f"error: --learning-rate must be positive; got {value}. Choose such as 0.02."
    assert said(all_reduce, "--learning-rate", value) == rule
