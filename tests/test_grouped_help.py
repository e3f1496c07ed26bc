"""The --help of training recipes: every flag with its text, in groups, the common ones first."""

import contextlib
import dataclasses
import os
import re
import sys

import pytest
import tyro

import digits
import gpt
import house_prices
from jaxpar.commands import recipe as cli

RECIPES = [gpt, digits, house_prices]


@pytest.fixture
def shown(monkeypatch, capsys):
    """Returns the help that a function prints, in one column."""
    monkeypatch.setenv("COLUMNS", "100")

    def shown(call):
        with pytest.raises(SystemExit) as end:
            call()
        assert not end.value.code
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)

    return shown


def options_of(text):
    """The help from its first group on, without borders."""
    return re.sub("[│╭╮╰╯─]", " ", text[text.index("--help") :])


def flags_of(text):
    return sorted(re.findall(r"^ +(--[a-z][\w.-]*)", options_of(text), flags=re.MULTILINE))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_the_help_has_every_flag_that_the_recipe_takes(shown, recipe):
    ours = shown(lambda: cli.run(recipe.main, recipe.Config, ["--help"]))
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff)
    plain = shown(lambda: tyro.cli(recipe.Config, args=["--help"], config=config))
    assert flags_of(ours) == flags_of(plain)
    assert len(flags_of(ours)) > 25
    titles = re.compile(r"^ *\w+ options *$", flags=re.MULTILINE)
    words = lambda text: sorted(re.findall(r"[a-z]{4,}", titles.sub("", options_of(text))))
    assert words(ours) == words(plain), "each has its text and its default"
    assert len(words(ours)) > 200


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_the_help_has_no_comment_of_the_code(shown, recipe):
    text = shown(lambda: cli.run(recipe.main, recipe.Config, ["--help"]))
    assert not re.search(r"pyright|noqa|ignore\[", text)


def test_the_help_ends_quietly_where_its_reader_has_ended(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(SystemExit) as end:
        cli.run(house_prices.main, house_prices.Config, ["--help"])
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    assert end.value.code == 0
    assert capsys.readouterr().err == ""
    assert sys.stdout is None, "else it would be flushed when the process ends"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_common_flags_come_first_and_rare_ones_last(shown, recipe):
    text = shown(lambda: cli.run(recipe.main, recipe.Config, ["-h"]))
    groups = re.findall(r"^ *(\w+) options *$", options_of(text), flags=re.MULTILINE)
    assert groups[:3] == ["mesh", "common", "recipe"]
    assert groups[-4:] == ["checkpoint", "monitoring", "gpu", "budget"]
    common = text.partition("common options")[2].partition("recipe options")[0]
    assert {
        "--steps",
        "--batch-size",
        "--out-dir",
        "--resume",
        "--fake-devices",
        "--dry-run",
    } < set(flags_of(f"--help\n{common}"))


def test_every_recipe_has_the_groups_of_a_run_and_their_flags_by_name():
    for recipe in RECIPES:
        names = [field.name for field in dataclasses.fields(recipe.Config)]
        assert names[:3] == ["mesh", "common", "recipe"]
        assert recipe.Config().as_json().keys() >= {"steps", "batch_size", "mesh", "budget", "keep"}
