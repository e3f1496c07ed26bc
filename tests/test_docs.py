"""README and docs/ tell the truth: programs print what is shown, commands run, pictures are those that the code draws."""

import contextlib
import functools
import importlib
import io
import itertools
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import matplotlib.image
import numpy as np
import pictures
import pictures_zh
import pytest
import reference
import tyro
import yaml
from fontTools.ttLib import TTFont
from matplotlib import font_manager

import all_reduce
import bloom_jobs
import digits
import digits_report
import gpt
import house_prices
import house_prices_report
import jaxpar
from jaxpar.__main__ import COMMANDS
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import flag_names
from jaxpar.run import Run, evaluation, language_data
from jaxpar.runtime import launch
from tests.support import doc_pages
from tests.support.tiers import quick, without
from tests.support.waiting import WAIT_SECONDS

ROOT = doc_pages.ROOT
DOCS = ROOT / "docs"


ENGLISH, CHINESE = sorted(DOCS.glob("*.md")), sorted(DOCS.glob("zh/*.md"))
README = ROOT / "README.md"
IN_ORDER = [
    DOCS / name
    for name in dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text()))
]
REFERENCE = (
    "api.md",
    "architecture.md",
    "cheatsheet.md",
    "coming_from.md",
    "glossary.md",
    "optimizers.md",
    "pipeline.md",
    "plan.md",
    "published.md",
)  # not of the guide: for those who work on jaxpar, or know others
ALSO_IN_CHINESE = ("cheatsheet.md", "glossary.md")  # of the reference
name_of = lambda page: page.relative_to(ROOT).as_posix()

# All that is changed of a command that trains, if it does not say --steps itself.
CUT_SHORT = {
    "digits.py": ["--steps", "4"],
    "plan": ["--top", "1", "--remat", "yes", "--context", "1", "--zero", "1"],
    "gpt.py": [
        "--steps",
        "4",
        "--warmup-steps",
        "1",
        "--seq",
        "32",
        "--batch-size",
        "8",
        "--eval-rows",
        "8",
    ],
}
# The mesh and schedule of each plan: the search for them is that of test_planner.py.
MESHES_OF_PLANS = {
    "bloom-176b": [
        "--data",
        "8",
        "--stage",
        "12",
        "--num-microbatches",
        "128",
        "--schedule",
        "1f1b",
    ],
    "gpt2": ["--data", "8", "--stage", "2", "--num-microbatches", "64", "--schedule", "1f1b"],
    "llama3.1-8b": ["--data", "8", "--stage", "1", "--num-microbatches", "32"],
}
# What draws the pictures of a run, which the tests of its recipe look at.
DRAWING = (
    *(
        (gpt, "plot_loss"),
        (gpt, "plot_timeline"),
        (house_prices, "draw_descent"),
        (house_prices_report, "plot_errors"),
    ),
    *((digits_report, "plot_predictions"), (digits_report, "plot_errors")),
)
# Commands that another test runs.
RUN_BY = {
    "python recipes/gpt.py --data recall --model llama-tiny --fake-devices 8 --mesh.data 2 --mesh.context 4 --seq 4096 "
    "--batch-size 4 --optimizer muon --lr 0.02 --steps 150 --eval-rows 8 --out-dir runs/recall": "test_recall.py",
    "python recipes/all_reduce.py": "test_recipes_all_reduce.py",
    "python recipes/bloom.py": "test_recipes_bloom.py",  # which holds what pages quote of it
    "python -m jaxpar launch -n 2 --devices-per-process 4 recipes/gpt.py --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 "
    "--out-dir runs/launched": "test_launch.py",
    "python recipes/gpt.py --model moe-bytes --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 --out-dir "
    "runs/moe": "test_recipes_gpt.py",
    "python recipes/gpt.py --model moe-bytes --experts data --fake-devices 8 --mesh.data 4 --mesh.stage 2 --out-dir "
    "runs/moe-data": "test_recipes_gpt.py",
    "python -m jaxpar plan --model my_model:SHAPE --batch-size 256": "test_planner.py",
    "python -m jaxpar serve runs/house_prices": "test_serve.py",  # which sends what the page sends
    "python -m jaxpar serve runs/job": "test_serve.py",
    "python -m jaxpar serve exported --port 8001": "test_serve.py",
}
# Pages that a test of their own follows from end to end.
FOLLOWED_BY = {"fine-tuning.md": "test_fine_tuning_page.py", "own_script.md": "test_own_script.py"}
NOT_OURS = ("git", "docker", "kubectl", "kind", "sbatch", "curl", "vllm", "hf", "lm_eval")


def use_fake_devices(num_devices):
    assert num_devices <= 8, "no more are here: name the test that runs this command in RUN_BY"


@pytest.fixture
def _devices_are_here(monkeypatch):
    monkeypatch.setattr(jaxpar, "use_fake_devices", use_fake_devices)


@pytest.mark.usefixtures("_devices_are_here")
@pytest.mark.parametrize(
    "page",
    without(
        ENGLISH,
        *(
            DOCS / f"{name}.md"
            for name in ("coming_from", "long-sequences", "pretrained", "ring", "your_model")
        ),
    ),
    ids=name_of,
)
def test_page_shows_what_its_programs_print(page):
    names: dict = {}
    for program, shown in re.findall(
        r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), flags=re.DOTALL
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, names)
        assert printed.getvalue() == shown, f"{page.name} shows another output for:\n{program}"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, _devices_are_here, source_lines):
    """Runs a command in an empty folder beside recipes/, in this process, which has 8 devices; returns what it prints.

    What takes longest in a short run is left out: pictures, the sample of text and the sweep of digits.py, which the tests of
    each recipe look at. A launch runs its script in this process; test_launch.py compares that with two.
    """
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "80")
    for module, name in DRAWING:
        monkeypatch.setattr(module, name, leave_blank)
    monkeypatch.setattr(digits, "sweep", lambda *_: (None, None))
    monkeypatch.setattr(evaluation, "write_sample", lambda *_: "def sample")

    def run_recipe(script, args):
        recipe = importlib.import_module(Path(script).stem)
        cli.run(recipe.main, recipe.Config, args)

    def in_this_process(work):
        use_fake_devices(work.num_processes * work.devices_per_process)
        script, *args = work.command
        run_recipe(script, args)
        return 0

    monkeypatch.setattr(launch, "run", in_this_process)

    def run(command):
        capsys.readouterr()
        words, into = command.without_redirection()
        python, program, *args = words
        assert python == "python"
        if program == "-m":
            assert args[0] == "jaxpar"
            assert jaxpar_main(args[1:] + shortening(command)) == 0, capsys.readouterr().err
        else:
            run_recipe(program, args + shortening(command))
        said = capsys.readouterr().out
        if into:
            Path(into).write_text(said)
        return said

    return run


def leave_blank(*given, **_):
    """In place of a picture."""
    for each in given:
        if isinstance(each, Path):
            each.touch()


def shortening(command):
    """Returns the flags that cut a command short."""
    if {"--steps", "--dry-run"} & set(command.words):
        return []
    short = next(
        (CUT_SHORT[path.name] for path in map(Path, command.words) if path.name in CUT_SHORT), []
    )
    if short is CUT_SHORT["plan"]:
        return short + MESHES_OF_PLANS[command.words[command.words.index("--model") + 1]]
    return short


def reads_a_run(command):
    return any("runs/" in word for word in command.words) or "--predict" in command.words


class AcceptedError(Exception):
    """All checks have passed: what follows would compile."""


def accept(*_):
    raise AcceptedError


def test_the_programs_of_readme_and_guide_take_their_commands(run, monkeypatch):
    """A recipe checks its flags and model, up to where it would compile; other commands, and what reads a run, their flags."""
    monkeypatch.setattr(Run, "compile", accept)
    monkeypatch.setattr(all_reduce, "init_params", accept)
    monkeypatch.setattr(bloom_jobs, "make_step", accept)
    monkeypatch.setattr(language_data, "load_text", functools.cache(language_data.load_text))
    parse = tyro.cli
    as_it_is = lambda kind: (
        kind if isinstance(kind, type) else functools.wraps(kind)(lambda *_, **__: None)
    )
    tried = set()
    for command in itertools.chain.from_iterable(map(doc_pages.commands, (README, *IN_ORDER))):
        if command.words[0] != "python" or command.words in tried:
            continue
        tried.add(command.words)
        (_, script, *args), _ = command.without_redirection()
        if args[:2] == ["jaxpar", "train"]:
            script, args = args[2].replace("-", "_"), args[3:]
        is_launch = args[:2] == [
            "jaxpar",
            "launch",
        ]  # which runs a recipe, or a script that a page shows
        if is_launch and "recipes/" not in str(command):
            continue  # the test that follows the page runs it
        if script == "-m" and not is_launch:
            with monkeypatch.context() as patch:
                patch.setattr(
                    tyro, "cli", lambda kind, **settings: parse(as_it_is(kind), **settings)
                )
                assert jaxpar_main(args[1:]) == 0, command
        elif not is_launch and (
            str(command) in RUN_BY or {"--resume", "--predict", "--init-from"} & set(args)
        ):
            parse(importlib.import_module(Path(script).stem).Config, args=args)
        else:
            with contextlib.suppress(AcceptedError):
                run(command)


@pytest.mark.full
def test_who_follows_readme_and_guide_gets_what_they_quote(run):
    """Each Python command once, in the order of the pages, in one folder."""
    printed = {}
    for page in (README, *(page for page in IN_ORDER if page.name not in FOLLOWED_BY)):
        for command in doc_pages.commands(page):
            if command.words[0] != "python" or str(command) in RUN_BY:
                continue
            if (
                command.words == TRAINED.words and command.words not in printed
            ):  # a slow test runs it as it is
                printed[JOB.words] = run(JOB)
                shutil.copytree(
                    "runs/job", "runs/gpt", ignore=shutil.ignore_patterns("checkpoints")
                )
                printed[TRAINED.words] = printed[JOB.words].replace("runs/job", "runs/gpt")
            if command.words not in printed:
                printed[command.words] = run(command)
            numbers = not (shortening(command) or reads_a_run(command))
            doc_pages.check_quoted(command.quoted, printed[command.words], numbers=numbers)


def command_on(page, *words):
    """Returns the command of a page that has all these words and whose output is quoted with losses."""
    losses = re.compile("held out: loss|last$", flags=re.MULTILINE)
    (found,) = (
        c
        for c in doc_pages.commands(DOCS / page)
        if set(words) <= set(c.words) and losses.search(c.quoted)
    )
    return found


TRAINED = command_on("three-dimensions.md", "recipes/gpt.py", "zb-h1")
EXPERTS = command_on("experts.md", "recipes/gpt.py", "moe-bytes")
COMPARED = command_on("recovering.md", "plot")
(JOB,) = (
    each
    for each in doc_pages.commands(DOCS / "recovering.md")
    if {"recipes/gpt.py", "--metrics-port"} <= set(each.words)
)


def test_the_run_to_be_stopped_is_that_of_the_readme_with_checkpoints_and_metrics():
    flags = lambda command: {flag.partition(" ")[0]: flag for flag in str(command).split(" --")[1:]}
    other, schedule = flags(JOB), flags(TRAINED).pop("schedule")
    assert schedule == f"schedule {gpt.Recipe.schedule}"
    assert flags(TRAINED).items() <= {"schedule": schedule, **other}.items()
    assert other.keys() - flags(TRAINED).keys() == {"checkpoint-every", "metrics-port", "out-dir"}


def test_a_resumed_run_is_quoted_with_the_losses_of_the_uninterrupted_one():
    held_out = lambda command: [
        line for line in command.quoted.splitlines() if "held out: loss" in line
    ]
    assert held_out(command_on("recovering.md", "--resume")) == held_out(TRAINED)
    _, resumed, uninterrupted = COMPARED.quoted.splitlines()
    assert resumed.replace("job", "gpt") == uninterrupted


@pytest.mark.slow
def test_the_losses_of_the_gpt_are_those_that_pages_quote(tmp_path):
    """In a process of its own: XLA's flags in the other tests round differently, and 300 steps amplify that to 0.3%.

    The test of all commands runs four steps of it.
    """
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")
    }

    def said(*words):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    trained = said(*TRAINED.words[1:])
    frequencies = re.compile(r"frequencies alone gives [\d.]+")
    if frequencies.search(trained)[0] != frequencies.search(TRAINED.quoted)[0]:
        pytest.skip("another Python has another standard library to learn from")
    doc_pages.check_quoted(TRAINED.quoted, trained, numbers=True, within=1e-2)
    # Another rounding can give a token to another expert.
    doc_pages.check_quoted(EXPERTS.quoted, said(*EXPERTS.words[1:]), numbers=True, within=3e-2)
    header, _, uninterrupted = COMPARED.quoted.splitlines()
    plotted = said("-m", "jaxpar", "plot", "runs/gpt")
    doc_pages.check_quoted(f"{header}\n{uninterrupted}", plotted, numbers=True, within=1e-2)


@pytest.mark.parametrize("page", [*ENGLISH, README], ids=name_of)
def test_other_commands_are_there(page):
    makefile = (ROOT / "Makefile").read_text()
    for command in doc_pages.commands(page):
        program = command.words[0]
        assert program in ("python", "make", *NOT_OURS), command
        if program == "make":
            assert re.search(rf"^{command.words[1]}:", makefile, flags=re.MULTILINE), command
        if str(command) in RUN_BY:
            there = (ROOT / "tests" / RUN_BY[str(command)]).read_text()
            assert all(
                Path(word).name in there
                for word in command.words
                if word.startswith(("recipes/", "--mesh"))
            )


def test_readme_names_every_command():
    named = {
        c.words[3]
        for page in (*ENGLISH, README)
        for c in doc_pages.commands(page)
        if c.words[1] == "-m"
    }
    assert named == set(COMMANDS)


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_chinese_page_has_the_code_and_pictures_of_the_english_one(page):
    english = DOCS / page.name
    assert doc_pages.blocks(page) == doc_pages.blocks(english)
    shown = lambda text: re.findall(
        r"pictures/([\w-]+\.png)", text.replace("pictures/zh/", "pictures/")
    )
    assert shown(page.read_text()) == shown(english.read_text())
    labelled = re.findall(r"pictures/zh/([\w-]+\.png)", page.read_text())
    assert labelled == shown(page.read_text()), "its pictures have Chinese labels"


def test_guide_is_whole_in_both_languages():
    guide = [
        page.name for page in ENGLISH if page.name not in REFERENCE or page.name in ALSO_IN_CHINESE
    ]
    assert [page.name for page in CHINESE] == guide
    assert {"index.md", *(page.name for page in IN_ORDER)} == {page.name for page in ENGLISH}, (
        "the index leads to all"
    )


def test_links_lead_somewhere():
    links = [
        (page, link)
        for page in (*ENGLISH, *CHINESE)
        for link in doc_pages.LINK.findall(page.read_text())
    ]
    nowhere = [
        f"{name_of(page)}: {link}" for page, link in links if not (page.parent / link).exists()
    ]
    assert links
    assert not nowhere, "\n".join(nowhere)


def test_what_the_architecture_names_beside_a_file_is_in_it():
    """[`guard.py`](../jaxpar/guard.py) `after_step`, `_stop`: each is defined in that file."""
    named = re.findall(
        r"\]\(\.\./([\w/]+\.py)\) (`\w+`(?:, `\w+`)*)", (DOCS / "architecture.md").read_text()
    )
    each = [(file, name) for file, names in named for name in re.findall(r"\w+", names)]
    defines = lambda file, name: re.search(
        rf"^ *(def|class) {name}\b|^{name}\b.* = ", (ROOT / file).read_text(), re.MULTILINE
    )
    assert len(each) > 20
    assert [pair for pair in each if not defines(*pair)] == []


def test_reference_has_every_public_name():
    described = [module for modules in reference.pages().values() for module in modules]
    values = {name: getattr(jaxpar, name) for name in jaxpar.__all__}
    homes = {
        n: v.__name__ if isinstance(v, types.ModuleType) else v.__module__
        for n, v in values.items()
    }
    unknown = {
        name: home
        for name, home in homes.items()
        if not f"{home}.".startswith(tuple(f"{m}." for m in described))
    }
    assert not unknown, f"docs/reference.py must describe the module of each: {unknown}"


def test_every_picture_is_shown():
    shown = {
        link
        for page in (README, *ENGLISH)
        for link in re.findall(r"pictures/([\w-]+)\.png", page.read_text())
    }
    assert shown == set(pictures.PICTURES) == {path.stem for path in pictures.FOLDER.glob("*.png")}
    assert shown - set(pictures.ENGLISH) == {path.stem for path in pictures.FOLDER.glob("zh/*.png")}


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "name",
    quick(
        [
            pytest.param(n, marks=pytest.mark.slow) if n in pictures.SLOW else n
            for n in pictures.PICTURES
        ],
        "neuron",
    ),
)
def test_picture_is_the_one_that_the_code_draws(tmp_path, name):
    pictures.draw(name, tmp_path)
    for path in (f"{name}.png", f"zh/{name}.png")[: 1 if name in pictures.ENGLISH else 2]:
        drawn, there = (
            matplotlib.image.imread(folder / path) for folder in (tmp_path, pictures.FOLDER)
        )
        assert drawn.shape == there.shape, f"python docs/pictures.py {name}"
        assert np.abs(drawn - there).mean() < 0.004, f"python docs/pictures.py {name}"


def test_the_font_has_the_characters_of_the_chinese_labels():
    has = set(TTFont(pictures_zh.FONT).getBestCmap())
    assert {ord(each) for each in pictures_zh.characters()} <= has, (
        "python docs/pictures_zh.py FONT.otf"
    )


def test_labels_are_in_this_font_where_a_whole_one_of_its_name_is_installed(tmp_path, monkeypatch):
    manager = font_manager.fontManager
    name = font_manager.FontProperties(fname=str(pictures_zh.FONT)).get_name()
    whole = font_manager.FontEntry(fname=manager.ttflist[0].fname, name=name)
    monkeypatch.setattr(manager, "ttflist", [whole, *manager.ttflist])
    with pictures_zh.also_in_chinese(tmp_path / "picture.png"):
        assert Path(font_manager.findfont(name)) == pictures_zh.FONT


@pytest.mark.parametrize(
    ("label", "chinese"),
    [
        (
            "Two pods of eight GPUs\ndata=2 x stage=2 x tensor=4: 16 GPUs on 2 nodes of 8",
            "两个 pod，各有八块 GPU\n",
        ),
        ("stage 11", "阶段 11"),
        ("GPU 3", "GPU 3"),
    ],
)
def test_a_label_is_translated_with_its_numbers(label, chinese):
    assert pictures_zh.chinese(label).startswith(chinese)


def test_the_cheat_sheet_has_flags_that_the_recipe_takes():
    text = (DOCS / "cheatsheet.md").read_text()
    rows = lambda text: [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    names = lambda row: [re.findall(r"`[^`]+`", cell) for cell in (row[0], *row[2:])]
    in_chinese = rows((DOCS / "zh" / "cheatsheet.md").read_text())
    assert [*map(names, in_chinese)] == [*map(names, rows(text))], (
        "the Chinese page has the names of the English one"
    )
    flags = re.findall(r"^\| `(--[\w.-]+)", text, flags=re.MULTILINE)
    taken = set(flag_names(gpt.Config).values())
    assert set(flags) <= taken
    assert len(flags) > 20
    assert set(re.findall(r"python -m jaxpar (\w+)", text)) == set(COMMANDS)


def test_every_page_of_the_navigation_hangs_under_a_heading_of_its_language():
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    alone = [
        group for group in groups if not all(isinstance(pages, list) for pages in group.values())
    ]
    assert not alone, "a page alone hangs under the heading of the group before it"
    listed = {name: [page if isinstance(page, str) else next(iter(page.values())) for page in pages]
              for group in groups for name, pages in group.items()}  # fmt: skip
    assert sorted(listed["中文"]) == [f"zh/{page.name}" for page in CHINESE]
    others = [page for name, pages in listed.items() if name != "中文" for page in pages]
    assert sorted(others) == [page.name for page in ENGLISH]
    chinese = [page.removeprefix("zh/") for page in listed["中文"]]
    guide = [page for page in chinese if page not in ("when-not.md", *ALSO_IN_CHINESE)]
    assert listed["Guide"] == guide, "both languages have one order"


def test_a_page_of_the_guide_leads_to_the_one_after_it():
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    guide = groups[0]["Guide"]
    for page, after in itertools.pairwise(guide):
        for folder in ("", "zh/"):
            last = (DOCS / folder / page).read_text().strip().splitlines()[-1]
            for leads_to in re.findall(r"(?:Next: |下一页：)\[.*?\]\(([\w/.-]+)\)$", last):
                assert leads_to == after, f"{folder}{page}"


def test_a_page_of_the_reference_has_each_name_once():
    for name, modules in reference.pages().items():
        text = reference._page(name, modules)
        assert text.count("\n# ") + text.startswith("# ") == (name == reference.ONE_PAGE)
        assert re.findall(r"^::: (.*)$", text, re.MULTILINE) == modules
        assert text.count("heading_level: 1") == (name != reference.ONE_PAGE), (
            "the package is the title"
        )


def test_the_page_on_plans_is_read_in_ten_minutes():
    assert len((DOCS / "plan.md").read_text().split()) <= 2500


def test_every_public_module_is_in_the_reference():
    described = {module for modules in reference.pages().values() for module in modules}
    there = {module.name for module in pkgutil.walk_packages(jaxpar.__path__, "jaxpar.")}
    assert described == {name for name in there if "._" not in name}
