"""What the README says is true: its program runs, its commands exist, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_first_program_is_short_and_learns(tmp_path):
    (program,) = blocks("python")
    assert len(program.strip().splitlines()) <= 25, "the first program must fit a glance"
    script = tmp_path / "first.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"loss ([0-9.]+)", done.stdout).group(1)) < 0.02, done.stdout


def test_every_recipe_and_make_target_that_is_named_exists():
    commands = "".join(blocks("sh"))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", commands):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for recipe in re.findall(r"recipes/\w+\.py", commands):
        assert (ROOT / recipe).is_file(), recipe


def test_every_link_leads_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), link
