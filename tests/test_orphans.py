"""Launchers that are killed: nothing that they started is left, within seconds, whatever it was doing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.runtime.launch import Gang, Launch, ProcessGroups, run
from tests.support.real_runs import assert_all_end
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

ROOT = Path(__file__).parents[1]
WATCHER = ProcessGroups.WATCHER.splitlines()[0].encode()


def pids(folder, count):
    """The processes that have written their numbers to files in a folder, once there are so many."""
    found = lambda: [int(path.name) for path in folder.glob("[0-9]*")]
    wait_until(lambda: len(found()) >= count, lambda: f"{len(found())} of {count} processes came")
    return found()


def launcher(folder, *command, count=2):
    args = [
        sys.executable,
        "-m",
        "jaxpar",
        "launch",
        "-n",
        str(count),
        "--log-dir",
        str(folder / "logs"),
        *command,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HERE": str(folder)}
    return subprocess.Popen(args, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


HERE = "import os, pathlib\nhere = lambda: pathlib.Path(os.environ['HERE'], str(os.getpid())).touch()\n"
DEAF = (
    "import signal\nfor number in (1, 2, 3, 13, 15): signal.signal(number, signal.SIG_IGN)\n"
    "import multiprocessing, subprocess, sys, re\n"
)
WORK = {
    "asleep": "signal.pause()",
    "with the interpreter's lock": "re.match('(a+)+$', 'a' * 99 + 'b')",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_processes_and_their_children_end_when_the_launcher_is_killed(tmp_path, work):
    script = tmp_path / "script.py"
    script.write_text(
        HERE
        + DEAF
        + f"CHILD = {HERE + DEAF + 'here(); signal.pause()'!r}\n"
        + f"subprocess.Popen([sys.executable, '-c', CHILD])\nhere()\n{work}\n"
    )
    process = launcher(tmp_path, str(script))
    started = pids(tmp_path, 4)
    process.kill()
    process.wait()
    assert_all_end(started)


def test_a_program_inside_a_shell_ends_when_the_launcher_is_killed(tmp_path):
    process = launcher(tmp_path, "sh", "-c", f'touch "$HERE/$$"; sleep {NEVER}; true')
    started = pids(tmp_path, 2)
    process.kill()
    process.wait()
    assert_all_end(started)


KILLED_BEFORE_IT_TELLS = f"""
import os, signal, sys
from pathlib import Path
from jaxpar.runtime import launch

def add(self, group):
    Path(sys.argv[1], str(group)).touch()
    os.kill(os.getpid(), signal.SIGKILL)

launch.ProcessGroups.add = add
launch.run(launch.Launch(("sh", "-c", "touch $HERE/started; sleep {NEVER}"), 1, log_dir=Path(sys.argv[1], "logs")))
"""


def test_a_launcher_killed_before_its_watcher_knows_a_process_leaves_none(tmp_path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "HERE": str(tmp_path)}
    command = [sys.executable, "-c", KILLED_BEFORE_IT_TELLS, str(tmp_path)]
    subprocess.run(command, env=env, check=False, timeout=WAIT_SECONDS)
    assert_all_end(pids(tmp_path, 1))
    assert not (tmp_path / "started").exists()


def watchers():
    """The watchers that launchers of this process have started. Other tests may run launchers beside it."""
    parent = f"\nPPid:\t{os.getpid()}\n".encode()
    found = [path for path in Path("/proc").glob("[0-9]*") if WATCHER in _read(path / "cmdline")]
    return {int(path.name) for path in found if parent in _read(path / "status")}


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_launcher_that_ends_leaves_neither_children_of_its_processes_nor_a_watcher(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HERE", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(
        HERE
        + f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {HERE + DEAF + 'here(); signal.pause()'!r}])\n"
        "import time\nwhile len(list(pathlib.Path(os.environ['HERE']).glob('[0-9]*'))) < 2: time.sleep(0.02)\n"
    )
    before = watchers()
    assert run(Launch((str(script),), 2, log_dir=tmp_path / "logs")) == 0
    assert_all_end(pids(tmp_path, 2))
    assert watchers() <= before


def test_a_launcher_that_cannot_start_a_process_ends_those_that_it_has_started(tmp_path):
    (tmp_path / "logs" / "1.log").mkdir(parents=True)
    gang = Gang(Launch(("sleep", str(NEVER)), 2, log_dir=tmp_path / "logs"))
    with pytest.raises(IsADirectoryError):
        gang.start()
    assert [process.poll() for process in gang.processes] == [-signal.SIGTERM]


def test_a_run_goes_on_where_its_watcher_was_killed(tmp_path):
    before = watchers()
    until = f'while [ ! -e "{tmp_path / "killed"}" ]; do sleep 0.02; done'
    gang = Gang(Launch(("sh", "-c", until), 2, log_dir=tmp_path / "logs"))
    gang.start()
    wait_until(lambda: watchers() - before, "the watcher must start")
    for watcher in watchers() - before:
        os.kill(watcher, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert gang.wait() == 0


def test_groups_are_killed_once(monkeypatch):
    """The number of a group that has ended may be another's."""
    killed = []
    groups = ProcessGroups()
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    groups.add(2**22 + 1)
    groups.kill(2**22 + 1)
    groups.kill(2**22 + 1)
    groups.close()
    assert killed == [2**22 + 1]
