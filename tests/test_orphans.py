"""Launchers that are killed: nothing that they started is left, within seconds, whatever it was doing."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxpar.runtime import orphans
from jaxpar.runtime.launch import Gang, Launch, run
from jaxpar.runtime.orphans import ProcessGroups
from tests.support.real_runs import assert_all_end
from tests.support.waiting import NEVER, wait_until

ROOT = Path(__file__).parents[1]
# Stands for `from jaxpar.runtime.orphans import end_with_launcher`, which would import JAX.
LOADED = (
    "import importlib.util, os, signal, subprocess, sys, time\n"
    f"spec = importlib.util.spec_from_file_location('orphans', {orphans.__file__!r})\n"
    "orphans = importlib.util.module_from_spec(spec)\n"
    "spec.loader.exec_module(orphans)\n"
)


def pids(folder, count):
    """The processes that have written their numbers to files in a folder, once there are so many."""
    found = lambda: [int(path.name) for path in folder.glob("[0-9]*")]
    wait_until(lambda: len(found()) >= count, lambda: f"{len(found())} of {count} processes came")
    return found()


def launcher(folder, *command, count=2):
    args = [sys.executable, "-m", "jaxpar", "launch", "-n", str(count), "--log-dir", str(folder / "logs"), *command]
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


def watchers():
    """The watchers that run, of all launchers."""
    found = (path for path in Path("/proc").glob("[0-9]*/cmdline"))
    return {int(path.parent.name) for path in found if orphans.__file__.encode() in _read(path)}


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_launcher_that_ends_leaves_neither_children_of_its_processes_nor_a_watcher(tmp_path, monkeypatch):
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


# -- the kernel's part, without a watcher -------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has PR_SET_PDEATHSIG")
STARTS = (
    "started = lambda text, **told: subprocess.Popen(\n"
    "    [sys.executable, '-c', text], start_new_session=True, env=os.environ | orphans.own_pid() | told)\n"
)


def program(folder, parent, child):
    """Starts a parent, which may start the child's text as ``child``; returns it."""
    text = LOADED + HERE + STARTS + f"child = {LOADED + HERE + child!r}\n" + parent
    return subprocess.Popen([sys.executable, "-c", text], env=os.environ | {"HERE": str(folder)})


@linux
def test_the_kernel_ends_a_process_with_its_launcher(tmp_path):
    child = f"orphans.end_with_launcher()\nassert orphans.VARIABLE not in os.environ\nhere()\ntime.sleep({NEVER})\n"
    process = program(tmp_path, f"started(child)\ntime.sleep({NEVER})\n", child)
    found = pids(tmp_path, 1)
    process.kill()
    process.wait()
    assert_all_end(found)


@linux
def test_a_process_whose_launcher_ended_before_it_asked_ends_at_once(tmp_path):
    child = (
        "here()\nwhile os.getppid() == int(os.environ[orphans.VARIABLE]): time.sleep(0.02)\n"
        f"time.sleep(0.5)\norphans.end_with_launcher()\ntime.sleep({NEVER})\n"
    )
    process = program(tmp_path, "started(child)\nhere()\n", child)
    (found,) = [pid for pid in pids(tmp_path, 2) if pid != process.pid]
    assert process.wait() == 0
    assert_all_end([found])


@linux
def test_a_process_outlives_the_thread_that_started_it(tmp_path, monkeypatch):
    """The kernel would end it with the thread; its launcher, whose other thread waits, still runs."""
    monkeypatch.setenv("HERE", str(tmp_path))
    script = tmp_path / "script.py"
    script.write_text(LOADED + HERE + "orphans.end_with_launcher()\nhere()\ntime.sleep(1)\n")
    gang = Gang(Launch((str(script),), 2, log_dir=tmp_path / "logs"))
    thread = threading.Thread(target=gang.start)
    thread.start()
    thread.join()
    pids(tmp_path, 2)
    assert gang.wait() == 0


@linux
@pytest.mark.parametrize("session", [True, False])
def test_a_process_whose_parent_is_another_than_the_launcher_is_let_be(tmp_path, session):
    """Such as a script between the two that starts the program in a session of its own."""
    between = (
        LOADED + f"sys.exit(subprocess.call([sys.executable, '-c', os.environ['CHILD']], start_new_session={session}))"
    )
    child = LOADED + "orphans.end_with_launcher()\ntime.sleep(0.2)\nsys.exit(7)"
    parent = f"sys.exit(started({between!r}, CHILD={child!r}).wait())\n"
    assert program(tmp_path, parent, "").wait() == 7


def test_groups_are_killed_once(monkeypatch):
    """The number of a group that has ended may be another's."""
    killed = []
    monkeypatch.setattr(orphans, "kill_groups", lambda groups: killed.extend(groups))
    groups = ProcessGroups()
    groups.add(2**22 + 1)
    groups.kill(2**22 + 1)
    groups.kill(2**22 + 1)
    groups.close()
    assert killed == [2**22 + 1]
