"""A shell around a program: the lines that tell what becomes of SIGTERM and of the exit code."""

import pytest

from jaxpar.jobs import check_manifests, remarks
from jaxpar.jobs.shells import commands_in
from tests.support.written_manifests import documents, edit

RUN = "python -u train.py --out-dir /checkpoints/a"
NO_SIGNAL, NO_CODE = (
    "starts its program by sh, which passes no SIGTERM on",
    "after its program: the",
)


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (f"exec {RUN}", []),
        (f"pip install wandb && exec {RUN}", []),
        (f"ulimit -l unlimited; exec {RUN} 2>&1\n", []),
        (f"trap 'kill $!' TERM; {RUN} & wait", []),
        (RUN, [NO_SIGNAL]),
        (f"pip install wandb && {RUN}", [NO_SIGNAL]),
        (f"python -m pip install wandb; {RUN};", [NO_SIGNAL]),
        (f"{RUN}; echo done", [NO_SIGNAL, f"';' {NO_CODE}"]),
        (f"{RUN}\necho done", [NO_SIGNAL, f"'\\n' {NO_CODE}"]),
        (f"{RUN} 2>&1 | tee /checkpoints/log", [NO_SIGNAL, f"'|' {NO_CODE}"]),
        (f"exec {RUN} | tee /checkpoints/log", [NO_SIGNAL, f"'|' {NO_CODE}"]),
        (f"set -o pipefail; {RUN} | tee /checkpoints/log", [NO_SIGNAL]),
        (f"{RUN} || true", [NO_SIGNAL, f"'||' {NO_CODE}"]),
        (f"{RUN} && echo 'done; well'", [NO_SIGNAL]),
        (f"{RUN} 'not closed", [NO_SIGNAL]),
    ],
)
def test_what_a_shell_does_to_signals_and_exit_codes_is_told(script, parts):
    (job,) = documents("own")
    edit(job, "own", "main command", ["/bin/sh", "-c", script])
    check_manifests([job])
    said = remarks(job)
    assert len(said) == len(parts)
    assert all(part in line for part, line in zip(parts, said, strict=True))


def test_of_pods_that_serve_the_signal_alone_is_told():
    deployment = next(iter(documents("service")))
    usual = len(remarks(deployment))
    script = "python -m jaxpar serve /checkpoints/gpt; true"
    edit(deployment, "service", "main command", ["bash", "-c", script])
    said = [line for line in remarks(deployment) if "bash" in line]
    assert usual == 0
    assert len(said) == 1
    assert "passes no SIGTERM on" in said[0]


@pytest.mark.parametrize("operator", [";", "|", "||", "\n"])
def test_the_operator_after_a_command_is_read(operator):
    assert commands_in(f"a 1 {operator} b") == [(["a", "1"], operator), (["b"], "")]
