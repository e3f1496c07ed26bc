"""`python -m jaxpar launch`: processes that start and end together, and the same numbers as in one process."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import digits
import gpt
from jaxpar.__main__ import main
from jaxpar.commands import recipe as cli
from jaxpar.runtime.chatter import Quiet, without_chatter
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.launch import (
    Gang,
    Launch,
    explain,
    forwarded_signals,
    free_port,
    only_launch_in,
    run,
)
from tests.support.oracle import assert_same
from tests.support.plain_recipe import make_plain
from tests.support.real_runs import PLAIN
from tests.support.waiting import NEVER, WAIT_SECONDS, wait_until

ROOT = Path(__file__).parents[1]


@pytest.fixture
def launch(tmp_path):
    """Returns a Launch of a script of the given text, whose processes' logs go to a folder of their own."""

    def make(text, num_processes=3):
        script = tmp_path / "script.py"
        script.write_text(
            "import os, signal, sys, time\nme = int(os.environ['JAX_PROCESS_ID'])\n" + text
        )
        return Launch((str(script), "--flag", "a b"), num_processes, log_dir=tmp_path / "logs")

    return make


def test_every_process_is_told_its_place_and_logs_to_a_file(launch, capfd):
    work = launch(
        "told = ('JAX_NUM_PROCESSES', 'JAX_COORDINATOR_ADDRESS', 'JAXPAR_RUN_TOKEN')\n"
        "print(me, *(os.environ[name] for name in told), sys.argv[1:])"
    )
    assert run(work) == 0
    lines = [(work.log_dir / f"{n}.log").read_text().split(maxsplit=4) for n in range(3)]
    assert [line[:2] for line in lines] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({line[2] for line in lines}) == 1, "one coordinator"
    assert lines[0][2].startswith("127.0.0.1:"), "and it is not open to the network"
    assert len({line[3] for line in lines}) == 1, "one token"
    assert len(lines[0][3]) == 32
    assert lines[0][4].strip() == "['--flag', 'a b']"
    assert capfd.readouterr().out.split()[:2] == ["0", "3"], "process 0 alone is on the screen"


def test_each_run_has_a_token_of_its_own(launch):
    work = launch("print(os.environ['JAXPAR_RUN_TOKEN'])", 1)
    said = [run(work) or (work.log_dir / "0.log").read_text() for _ in range(2)]
    assert said[0] != said[1]


@pytest.mark.parametrize(("code", "follows"), [(2, 2), (1, 70)])
def test_one_whose_error_the_others_follow_before_it_ends_is_shown_and_gives_the_code(
    launch, capfd, code, follows
):
    work = launch(
        f"if me == 1: time.sleep(1.5); print('x must be y', flush=True); sys.exit({code})\n"
        "print('error: another process of the run is gone: process 1 of 3 has left', flush=True)\n"
        f"sys.exit({follows})"
    )
    assert run(work) == code
    told = capfd.readouterr().err
    assert "x must be y" in told
    assert f"launch: process 1 of 3 ended first (exit code {code}: " in told


def test_of_a_large_log_the_end_is_read_alone(launch, capfd, monkeypatch):
    monkeypatch.setattr("jaxpar.runtime.launch.BYTES_READ", 100)
    work = launch("print('y' * 1000 + '\\nat its end', flush=True)\nsys.exit(3 * me)", 2)
    assert run(work) == 3
    told = capfd.readouterr().err
    assert "at its end" in told
    assert told.count("y") < 100


def test_one_that_fails_takes_the_others_down_and_is_shown_last(launch, capfd):
    work = launch(
        "if me == 1: raise RuntimeError('out of luck')\n"
        f"signal.signal(15, lambda *_: None)\ntime.sleep({WAIT_SECONDS})\nprint('outlived', flush=True)"
    )
    assert run(work) == 1
    assert not any("outlived" in path.read_text() for path in work.log_dir.iterdir()), (
        "who ignores SIGTERM is killed"
    )
    said = capfd.readouterr().err.rstrip().splitlines()
    assert "RuntimeError: out of luck" in said[-3]
    assert said[-1].startswith("launch: process 1 of 3 ended first (exit code 1: an error)"), said[
        -1
    ]


def test_the_cause_is_named_not_its_consequences(launch, monkeypatch):
    """A peer of the one that failed often ends before it does: JAX aborts, our own code says 70."""
    monkeypatch.setattr(
        "jaxpar.runtime.launch.SECONDS_TO_EXPLAIN", WAIT_SECONDS
    )  # the cause may be late
    gloo = (
        "[Gloo] Rank 2 is connected to 2 peer ranks. Expected number of connected peer ranks is : 2"
    )
    work = launch(
        f"if me == 2: print('{gloo}', flush=True); print('the cause', flush=True); time.sleep(0.3); sys.exit(65)\n"
        "if me == 1: sys.exit(70)\nos.abort()"
    )
    gang = Gang(work)
    gang.start()
    assert gang.wait() == 65
    assert gang.first_failed == 2
    told = explain(gang, 65)
    assert (
        "process 2 of 3 ended first (exit code 65: a bad checkpoint, or bad data met while training)"
        in told
    )
    assert "the cause" in told
    assert "Gloo" not in told


@pytest.mark.parametrize(("first", "code"), [(0, 2), (1, 86)])
def test_a_process_that_takes_over_the_code_of_another_one_is_not_named_as_the_cause(
    launch, monkeypatch, first, code
):
    monkeypatch.setattr("jaxpar.runtime.launch.SECONDS_TO_EXPLAIN", WAIT_SECONDS)
    gone = f"error: another process of the run is gone: process {first} of 3 has ended with exit code {code}."
    work = launch(
        f"print({gone!r} if me != {first} else 'the cause', flush=True)\n"
        f"time.sleep(0.5 * (me == {first} == 0))\nsys.exit({code})"
    )
    gang = Gang(work)
    gang.start()
    assert (gang.wait(), gang.first_failed) == (code, first), "process 0 ends last"


@pytest.mark.parametrize("code", [74, 75, 86])
def test_where_all_agree_to_end_the_first_process_which_says_why_is_named(
    launch, code, monkeypatch
):
    monkeypatch.setattr(
        "jaxpar.runtime.launch.SECONDS_TO_EXPLAIN", WAIT_SECONDS
    )  # on a busy machine it ends late
    work = launch(
        f"time.sleep(0.3 * (me == 0)); print('why', flush=True) if me == 0 else None; sys.exit({code})"
    )
    gang = Gang(work)
    gang.start()
    assert (gang.wait(), gang.first_failed) == (code, 0)
    assert explain(gang, code).startswith("launch: process 0 of 3 ended first"), (
        "it is on the screen"
    )


def test_lines_of_gloo_are_hidden_wherever_they_are_cut_and_no_others():
    line = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    output = (
        b"loss 2\n"
        + line
        + b"[Gloo] Rank "
        + line
        + b"1\n[Gloo-like] progress 10%"
        + line
        + b" of 7\n7\n"
    )
    for cut in range(len(output)):
        quiet = Quiet()
        shown = quiet.feed(output[:cut]) + quiet.feed(output[cut:]) + quiet.end()
        assert shown == b"loss 2\n[Gloo-like] progress 10% of 7\n7\n", output[:cut]
    error = b"Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:50408\n"
    assert without_chatter(line + error + line) == error


def test_lines_of_gloo_that_threads_write_piece_by_piece_at_once_are_hidden():
    rng = np.random.default_rng(0)
    pieces = lambda rank: [
        *(b"[Gloo] Rank ", b"%d" % rank, b" is connected to ", b"3"),
        *(b" peer ranks. Expected number of connected peer ranks is : ", b"3", b"\n"),
    ]
    for _ in range(200):
        threads = [pieces(0), pieces(1), pieces(12)]
        order = rng.permutation(np.repeat(np.arange(3), [len(each) for each in threads]))
        output = b"".join(threads[which].pop(0) for which in order)
        assert without_chatter(output) == b"", output
        # What the program writes comes after an end of a line, with which Gloo writes what it holds.
        assert (
            without_chatter(output.replace(b"\n", b"\nloss 2 is connected\n"))
            == 3 * b"loss 2 is connected\n"
        ), output


def test_a_process_that_is_frozen_after_the_first_has_ended_is_ended(launch, capfd, monkeypatch):
    monkeypatch.setattr("jaxpar.runtime.launch.SECONDS_TO_FOLLOW", 1.0)
    work = launch(
        "ended = sys.argv[0] + '.1'\n"
        "if me == 1: open(f'{ended}.new', 'w').write(str(os.getpid())); os.rename(f'{ended}.new', ended)\n"
        "if me == 2: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if me == 0:\n"
        "    while not os.path.exists(ended) or os.path.exists('/proc/' + open(ended).read()): time.sleep(0.02)\n"
    )
    assert run(work) == ExitCode.STUCK
    told = "process 1 of 3 ended early, with exit code 0 while process 2 still ran: all must end together; its log: "
    assert told in capfd.readouterr().err


def test_a_process_that_others_have_waited_for_in_vain_is_named(launch, capfd, monkeypatch):
    monkeypatch.setattr("jaxpar.runtime.launch.SECONDS_TO_EXPLAIN", 0.3)
    work = launch("if me == 2: os.kill(os.getpid(), signal.SIGSTOP)\nsys.exit(124)")
    assert run(work) == ExitCode.STUCK
    told = "(exit code 124: stuck longer than its budget), and process 2 did not end by itself: frozen, or stuck too;"
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("early", [0, 1])
def test_a_process_that_ends_with_0_while_others_run_is_a_failure_that_names_it(
    launch, capfd, monkeypatch, early
):
    monkeypatch.setattr("jaxpar.runtime.launch.SECONDS_TO_FOLLOW", 0.5)
    code = run(launch(f"if me != {early}: print('waiting', flush=True); time.sleep({NEVER})"))
    assert code == (ExitCode.PEER_LOST if early else ExitCode.STUCK)
    others = ", ".join(str(number) for number in range(3) if number != early)
    said = capfd.readouterr().err
    assert (
        f"process {early} of 3 ended early, with exit code 0 while processes {others} still ran"
        in said
    )
    assert early or "waiting" in said, "the end of a log of those that ran"


def test_who_lost_a_process_that_ended_with_0_is_not_blamed(launch, capfd):
    work = launch(
        "import pathlib\nmark = pathlib.Path(sys.argv[0] + '.1')\n"
        "if me == 1: mark.write_text(str(os.getpid())); sys.exit(0)\n"
        "while not mark.exists() or not mark.read_text() or os.path.exists('/proc/' + mark.read_text()): time.sleep(0.02)\n"
        "time.sleep(0.1)\nsys.exit(70)"
    )
    assert run(work) == ExitCode.PEER_LOST
    assert (
        "process 1 of 3 ended early, with exit code 0 while processes 0, 2 still ran"
        in capfd.readouterr().err
    )


def test_a_process_that_is_killed_gives_the_code_of_a_shell(launch, capfd):
    assert run(launch(f"if me == 1: os.kill(os.getpid(), 9)\ntime.sleep({NEVER})")) == 128 + 9
    assert "ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_and_their_codes_come_back(launch, number):
    work = launch(
        "def leave(*_): print('saved', flush=True); time.sleep(0.2); sys.exit(75)\n"
        f"signal.signal({int(number)}, leave)\nopen(f'{{sys.argv[0]}}.{{me}}', 'w').close()\ntime.sleep({NEVER})"
    )
    gang = Gang(work)
    with forwarded_signals(gang):
        gang.start()
        wait_until(lambda: all(Path(f"{work.command[0]}.{n}").exists() for n in range(3)))
        os.kill(os.getpid(), number)
        assert gang.wait() == 75
    assert ["saved" in gang.log_path(n).read_text() for n in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "script.py"], "--num-processes must be at least 1; got 0"),
        (["-n", "2"], "needs a program to start; got none"),
        (["-n", "2", "nowhere.py"], "the script must exist; got nowhere.py"),
        (["-n", "2", "no-such-program"], "the program must be on the PATH; got no-such-program"),
        (["-n", "2", "--port", "65536", "true"], "--port must be under 65536; got 65536"),
        (
            ["-n", "2", "--log-dir", "/proc/x", "true"],
            "--log-dir must be a folder that can be written to; got /proc/x",
        ),
        (
            ["-n", "2", "--devices-per-process", "0", "x"],
            "--devices-per-process must be at least 1; got 0",
        ),
    ],
)
def test_bad_input_ends_with_code_2_and_a_message(args, message, capsys):
    assert main(["launch", *args]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["launch", "-n", "2", "--port", str(port), "true"]) == 2
    message = f"process 0 must be able to listen at --port; got {port} (Address already in use)."
    assert message in capsys.readouterr().err


def curve(out_dir):
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["digits", pytest.param("gpt", marks=pytest.mark.slow)])
def test_two_processes_that_share_a_pipeline_have_the_loss_curve_of_one(
    tmp_path, monkeypatch, recipe
):
    """recipes/gpt.py as the README starts it, on two processes of four devices; both without their evaluations and pictures."""
    text = tmp_path / "alphabet.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz, " * 400)
    mesh, own, devices = {
        "digits": (
            [],
            [
                "--hidden-layers",
                "4",
                "--width",
                "8",
                "--batch-size",
                "16",
                "--num-microbatches",
                "2",
            ],
            1,
        ),
        "gpt": (
            ["--mesh.data", "2", "--mesh.tensor", "2"],
            ["--data", str(text), "--seq", "16", "--warmup-steps", "1", "--eval-rows", "16"],
            4,
        ),
    }[recipe]
    flags = ["--mesh.stage", "2", *mesh, "--steps", "4", *own, "--out-dir"]
    launch = [
        "-m",
        "jaxpar",
        "launch",
        "-n",
        "2",
        "--devices-per-process",
        str(devices),
        "--log-dir",
        str(tmp_path),
    ]
    command = [
        sys.executable,
        *launch,
        PLAIN,
        recipe,
        *flags,
        str(tmp_path / "two"),
        "--checkpoint-every",
        "4",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    module = {"digits": digits, "gpt": gpt}[recipe]
    make_plain(module, monkeypatch.setattr)
    cli.run(
        module.main, module.Config, [*flags, str(tmp_path / "one")]
    )  # in this process, which has eight devices
    assert len(curve(tmp_path / "one")) == 4
    assert_same(curve(tmp_path / "two"), curve(tmp_path / "one"), within=1e-6)
    assert (tmp_path / "two/checkpoints/4").is_dir(), (
        "both processes wrote their parts of one checkpoint"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (
            "gpt",
            [
                "--seq",
                "16",
                "--warmup-steps",
                "1",
                "--eval-rows",
                "16",
                "--mesh.data",
                "2",
                "--mesh.stage",
                "2",
            ],
        ),
        ("house_prices", ["--mesh.data", "4"]),
        ("digits", ["--mesh.data", "2", "--mesh.tensor", "2", "--no-sweep"]),
        ("digits", ["--mesh.stage", "2", "--mesh.data", "2", "--no-sweep"]),
    ],
)
def test_recipes_run_unchanged_on_two_processes_and_go_on_in_one(tmp_path, recipe, flags):
    script = [
        str(ROOT / f"recipes/{recipe}.py"),
        *flags,
        "--checkpoint-every",
        "10",
        "--out-dir",
        str(tmp_path / "out"),
    ]
    launch = [sys.executable, "-m", "jaxpar", "launch", "-n", "2", "--devices-per-process", "2"]
    launch += ["--log-dir", str(tmp_path), *script, "--steps", "20"]
    resume = [sys.executable, *script, "--fake-devices", "4", "--steps", "30", "--resume"]
    for command in (launch, resume):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WAIT_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(curve(tmp_path / "out")) == 30


TWO_WITHOUT_ONE = """
import glob, os, sys
import jaxpar
jaxpar.initialize(heartbeat_seconds=int(sys.argv[1]))  # JAX alone would wait for its shutdown to time out
import jax
import jax.experimental.multihost_utils
jax.experimental.multihost_utils.sync_global_devices("all connections of gloo are there")
own = {os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.islink(path)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in own:
            print("listens", local.partition(":")[0], flush=True)
print("joined", jax.device_count(), flush=True)
from jaxpar.runtime.coordination import check_agreement
try:
    check_agreement("train", {"mesh": "same", "program": f"of process {jax.process_index()}"})
except ValueError as error:
    print(error, flush=True)
if jax.process_index() == 1:
    raise RuntimeError("out of luck")
jax.experimental.multihost_utils.sync_global_devices("never")
"""


def test_a_second_launch_does_not_write_over_the_logs_of_one_that_runs(tmp_path, capsys):
    command = ["launch", "-n", "1", "--log-dir", str(tmp_path), "true"]
    with only_launch_in(tmp_path):
        assert main(command) == 2
        told = "a folder has the logs of one launch at a time; got --log-dir"
        err = capsys.readouterr().err
        assert told in err
        assert f"another one writes, pid {os.getpid()} on " in err
        assert not (tmp_path / "0.log").exists()
    assert main(command) == 0, "after it has ended"


def test_a_launch_begins_where_the_disk_has_no_room_for_its_name(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "truncate", full)
    with only_launch_in(tmp_path), pytest.raises(ValueError, match=r"another one writes\. Choose"):
        only_launch_in(tmp_path)


@pytest.fixture(scope="module")
def two_without_one(tmp_path_factory):
    """Two processes that look at themselves, until one of them has an error."""
    script = tmp_path_factory.mktemp("two") / "script.py"
    script.write_text(TWO_WITHOUT_ONE)
    command = ["-m", "jaxpar", "launch", "-n", "2", "--log-dir", script.parent, script, int(NEVER)]
    command, env = [sys.executable, *map(str, command)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=env,
        timeout=WAIT_SECONDS,
    )
    assert "joined 2" in done.stdout, done.stdout + done.stderr
    return done


@pytest.mark.full
def test_processes_listen_at_their_own_addresses(two_without_one):
    listens = [
        line.split()[1]
        for line in two_without_one.stdout.splitlines()
        if line.startswith("listens ")
    ]
    assert listens, "the coordinator at least"
    assert all(set(address) - {"0"} for address in listens), "no process listens on all interfaces"


def test_processes_with_different_programs_are_told_before_they_train(two_without_one):
    told = "all processes must agree on their program before they train; got 'of process 1' on process 1"
    assert told in two_without_one.stdout


def test_an_exception_in_one_process_ends_the_run_at_once_with_its_traceback_last(two_without_one):
    err = two_without_one.stderr
    assert two_without_one.returncode == 1, err
    assert "RuntimeError: out of luck" in err[err.rindex("Traceback") :]
    assert "launch: process 1 of 2 ended first (exit code 1: an error)" in err.splitlines()[-1]


@pytest.mark.full
def test_a_recipe_whose_peer_never_comes_ends_with_code_70_and_its_name(tmp_path):
    place = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0",
    }
    env = os.environ | place | {"JAXPAR_INITIALIZATION_TIMEOUT": "1"}
    command = [
        sys.executable,
        str(ROOT / "recipes/house_prices.py"),
        "--out-dir",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=WAIT_SECONDS
    )
    assert done.returncode == 70, done.stderr
    assert "error: 2 processes must connect within 1 s; got 1, missing: process 1." in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_under_the_log_of_the_first_process_costs_lines_and_not_the_run(tmp_path):
    program = tmp_path / "run.py"
    program.write_text(
        "import sys\nfor _ in range(200):\n    print('x' * 100, flush=True)\nprint('the end')\n"
    )
    limit = "import os, resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (4096, -1)); os.execv(sys.argv[1], sys.argv[1:])"
    command = ["-m", "jaxpar", "launch", "-n", "1", "--log-dir", tmp_path / "logs", program]
    done = subprocess.run(
        [sys.executable, "-c", limit, sys.executable, *map(str, command)],
        capture_output=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"the end\n"), "the screen has all"
    assert (tmp_path / "logs" / "0.log").stat().st_size == 4096


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--max-restarts", "2"), marks=pytest.mark.full)],
    ids=["once", "supervised"],
)
def test_standard_error_on_a_full_disk_changes_no_exit_code(tmp_path, options):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(74)")
    command = [
        sys.executable,
        "-m",
        "jaxpar",
        "launch",
        "-n",
        "2",
        "--log-dir",
        str(tmp_path),
        *options,
        str(script),
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=full,
            check=False,
            cwd=ROOT,
            timeout=WAIT_SECONDS,
        )
    assert done.returncode == 74


def test_more_processes_than_a_machine_can_start_are_refused(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with pytest.raises(
        ValueError,
        match=r"num_processes must be at most 128 on this machine of 8 CPU cores, .*; got 129\.",
    ):
        Launch(("python",), 129)
    Launch(("python",), 128)
