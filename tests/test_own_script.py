"""docs/own_script.md as its reader follows it: the script that it shows, on two processes, prints what it quotes."""

import re

import pytest

from tests.support.doc_pages import ROOT, commands
from tests.support.real_runs import run


@pytest.mark.full
def test_the_script_of_the_page_prints_what_the_page_quotes(tmp_path):
    page = ROOT / "docs" / "own_script.md"
    script = tmp_path / "train.py"
    [shown] = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    script.write_text(shown.replace("runs/mine", f"{tmp_path}/run"))
    (launched, _) = commands(page)
    words = [str(script) if word == "train.py" else word for word in launched.words[1:]]
    code, out, err = run(*words[:3], "--log-dir", tmp_path, *words[3:])
    assert code == 0, out + err
    assert launched.quoted in out
    assert (tmp_path / "run" / "checkpoints" / "200").is_dir()
