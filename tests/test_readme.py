"""What the README says is true: its program prints what is shown, its figures are measured, its links lead somewhere."""

import math
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import doc_pages
import pytest
from waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
TEXT = README.read_text()
LINES_OF_A_SCREEN, COLUMNS = 40, 90


def blocks(language: str) -> list[str]:
    return [block.text for block in doc_pages.blocks(README) if block.language == language]


def columns(line):
    """Returns the columns of a terminal that a line takes: two for a Chinese character."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in line)


def first_screen(text):
    return text.partition("\n## ")[0].splitlines()


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_the_first_screen_has_a_program_its_output_a_picture_and_figures(page):
    screen = first_screen(page.read_text())
    assert sum(max(1, math.ceil(columns(line) / COLUMNS)) for line in screen) <= LINES_OF_A_SCREEN
    whole = "\n".join(screen)
    for part in ("pip install", "```python", "```text", "same-loss.png", "| jaxpar |", "CPU", "GPU"):
        assert part in whole, part


def test_the_first_program_is_short_and_prints_what_is_shown(tmp_path):
    (program,), (shown,) = blocks("python"), blocks("text")
    assert all(len(line) <= COLUMNS for line in program.splitlines())
    script = tmp_path / "first.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=WAIT_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    doc_pages.check_quoted(shown, done.stdout, numbers=True)
    one, eight = (line.partition(": ")[2] for line in done.stdout.splitlines())
    assert one == eight, "the numbers of one device"


def test_figures_are_those_of_the_benchmarks():
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    pipelines = results[results.index("Pipelines, 8 microbatches.") :]
    pipelines = pipelines[: pipelines.index("Losses")]
    of = lambda peer: re.search(rf"^\| {peer} +\| +([\d.]+) \|", pipelines, flags=re.MULTILINE)[1]
    best = min(re.findall(r"^\| PyTorch \w+ +\| +([\d.]+) \|", pipelines, flags=re.MULTILINE), key=float)
    for page in (README, CHINESE):
        screen = "\n".join(first_screen(page.read_text()))
        figures = re.search(r"\| ([\d.]+) s \| ([\d.]+) s[:：] ?PyTorch 1F1B[^|\d]+([\d.]+) s", screen).groups()
        assert figures == (of("jaxpar 1f1b"), of("PyTorch 1F1B"), best)
        memory, gpipe = re.search(r"\| (\d+) MiB \| (\d+) MiB[:：]", screen).groups()
        ours = re.search(r"^\| jaxpar 1f1b +\| +[\d.]+ \| +[\d.]+ \| +([\d.]+) \|", results, flags=re.MULTILINE)
        against = re.search(r"^\| GPipe by jax.grad +\| +[\d.]+ \| +1.000 \| +([\d.]+) \|", results, flags=re.MULTILINE)
        assert (int(memory), int(gpipe)) == (round(float(ours[1])), round(float(against[1])))
        for axis in ("data 4", "tensor 4", "stage 4"):
            of_axis = re.findall(
                rf"^\| {axis} +\| jaxpar[^|]*\|[^|]*\|[^|]*\| +([\d.]+) \|", results, flags=re.MULTILINE
            )
            assert set(of_axis) == {"1.0000"}, axis
        assert "| 1.0000 |" in screen


def test_every_recipe_and_make_target_that_is_named_exists():
    commands = "".join(blocks("sh"))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", commands):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for recipe in re.findall(r"recipes/\w+\.py", TEXT):
        assert (ROOT / recipe).is_file(), recipe


@pytest.mark.parametrize("page", [README, CHINESE, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    links = doc_pages.LINK.findall(page.read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_chinese_readme_has_the_code_of_the_english_one():
    assert doc_pages.blocks(CHINESE) == doc_pages.blocks(README)
    pictures = lambda text: re.findall(r"pictures/(?:zh/)?([\w-]+\.png)", text)
    assert pictures(CHINESE.read_text()) == pictures(TEXT)


def test_jobs_of_the_readme_and_the_guide_save_before_they_end():
    pages = [README, *(ROOT / "docs").glob("*.md")]
    found = [c.words for page in pages for c in doc_pages.commands(page) if "--checkpoint-claim" in c.words]
    found = [words for words in found if "serve" not in words]  # which trains nothing
    assert len(found) >= 3
    for words in found:
        value = lambda flag, words=words: int(words[words.index(flag) + 1])
        assert 10 * value("--checkpoint-every") <= value("--steps"), words
