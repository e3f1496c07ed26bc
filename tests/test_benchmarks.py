"""The benchmarks run, write figures that render, and what they count without a clock is what the README claims."""

import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import gpu_roofline
import jax
import numpy as np
import peers
import plain_gpt
import pytest
import report
import small_gpt
from peer_questions import jax_peer, jaxpp_peer, torch_peer

from tests.support.oracle import assert_same
from tests.support.waiting import WAIT_SECONDS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def smoke(tmp_path, script, *flags):
    """Returns the rows of all tables of a tiny run in a process of its own."""
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", "--out", str(out), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return rows_of(out, done.stdout, script, *flags)


@pytest.fixture
def smoke_here(tmp_path, monkeypatch, capsys):
    """The same in this process, where JAX has started and has as many devices as the script asks for.

    A script that measures in processes of their own starts those alone.
    """

    def run(script, *flags):
        out, devices = tmp_path / "figures.json", jax.devices()
        use_fake_devices = lambda count: monkeypatch.setattr(
            jax, "devices", lambda: devices[:count]
        )
        for module in ("jaxpar", "jaxpar.runtime.distributed"):
            monkeypatch.setattr(f"{module}.use_fake_devices", use_fake_devices)
        monkeypatch.setattr(sys, "argv", [script, "--smoke", "--out", str(out), *flags])
        with jax.numpy_rank_promotion("allow"):
            runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        return rows_of(out, capsys.readouterr().out, script, *flags)

    return run


def rows_of(out, printed, script, *flags):
    """Returns the rows of the tables that a tiny run wrote, which says what it writes."""
    record = report.Record.read(out)
    assert report.render(record) in printed, "what is written renders to what was said"
    assert record.smoke
    assert record.command == " ".join(["python", f"benchmarks/{script}", "--smoke", *flags])
    assert {"Python", "jax"} <= set(record.versions)
    assert all(table.mesh or "mesh" in table.columns for table in record.tables), (
        "each table names its mesh"
    )
    return [row for table in record.tables for row in table.rows]


@pytest.mark.slow
def test_traffic_of_a_step_is_the_least_on_each_axis(smoke_here):
    own = [row for row in smoke_here("traffic.py") if row["step"].startswith("jaxpar")]
    assert {row["mesh"] for row in own} == {"data 4", "tensor 4", "stage 4"}
    for row in own:
        assert row["ratio"] == row["sent MiB"] / row["least MiB"]
        assert 1 <= row["ratio"] < 1.005, row  # beside the gradients go a loss and a weight


@pytest.mark.slow
def test_1f1b_keeps_the_same_for_more_microbatches_and_a_quarter_of_what_gpipe_by_autodiff_does(
    smoke_here,
):
    by_step = {row["step"]: row for row in smoke_here("memory.py")}
    own, gpipe = by_step["jaxpar 1f1b"], by_step["GPipe by jax.grad"]
    few, many = "8 microbatches, MiB", "32 microbatches, MiB"
    assert own[few] == own[many]
    assert own[many] < gpipe[many] / 4
    assert own["32, ratio"] == own[many] / gpipe[many]


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param("checkpoint.py", ("--fake-devices", "2"), marks=pytest.mark.slow),
        pytest.param("remat.py", (), marks=pytest.mark.slow),
        ("pipeline.py", ("--num-microbatches", "8", "--schedules", "1f1b", "--mpmd")),
        pytest.param("scaling.py", (), marks=pytest.mark.slow),
    ],
)
def test_benchmarks_run(smoke_here, script, flags):
    assert smoke_here(script, *flags)


@pytest.mark.slow
def test_recovery_is_measured_in_a_process_of_its_own(tmp_path):
    assert smoke(tmp_path, "recovery.py", "--processes", "1")


def test_rings_are_told_from_activations_of_as_many_elements():
    job = next(each for each in gpu_roofline.SMALL if each.choice.schedule == "zb-v")
    choice = job.choice
    is_ring = gpu_roofline.rings_of(gpu_roofline.shape_of(job, is_planned=False), choice)
    # 4 slots, 4 layers in a chunk, keys of 2 heads of 64: as many elements as an activation, 2,048 positions of 2,048.
    assert choice.num_slots["residuals_b"] == 4
    assert is_ring("bf16[4,4,1,2048,2,64]")
    assert is_ring("bf16[16,2048,128]")
    assert not is_ring("bf16[1,2048,2048]")
    assert not is_ring("bf16[4,1,2048,2,64]")


def test_a_roofline_without_the_compiler_for_gpus_or_of_a_job_that_there_is_not_ends_with_one_line(
    monkeypatch, capsys
):
    monkeypatch.setattr(gpu_roofline, "start_on_cpu", lambda: None)  # too late here
    monkeypatch.setattr("jaxpar.compile_only.PLUGINS", ())
    with pytest.raises(SystemExit) as ended:
        gpu_roofline.main(gpu_roofline.Config())
    assert ended.value.code == report.CANNOT_RUN
    assert capsys.readouterr().err.startswith(
        "compiling for GPUs needs JAX's CUDA plugin of JAX's own version, "
    )
    with pytest.raises(SystemExit, match=r"^--jobs takes 8b, data 8, ZeRO 3; .*; got 9b\.$"):
        gpu_roofline.main(gpu_roofline.Config(jobs=("9b",)))


@pytest.mark.slow
def test_peers_step_in_turn_and_have_the_same_losses(smoke_here):
    rows = smoke_here("peers.py", "--only", "data")
    assert {"jax.jit with shardings, DP 2", "jaxpar, DP 2"} <= {row["peer"] for row in rows}


def test_figures_of_peers_are_medians_over_all_rounds_of_all_starts(monkeypatch):
    class Peer:
        def __init__(self, start, slower):
            self.first = {"loss": 3.0, "compile_seconds": 10.0 * start, "versions": "jax 1"}
            self.walls = iter([start * slower, 5.0 * slower])
            self.stop = lambda: {"peak_bytes": start * 2**20}

        def ask(self, wish):
            wall = next(self.walls)
            return {"loss": 2.0, "wall_seconds": wall, "cpu_seconds": 2 * wall}

    starts = iter([1.0, 2.0, 3.0])

    def start_peers(commands, smoke, jaxpp_python):
        start = next(starts)
        started = {
            "jax.jit, one device": Peer(start, 1.0),
            "jaxpar 1f1b": Peer(start, 0.5),
            "JaxPP DualPipeV": Peer(start, 2.0),
        }
        return (
            started
            if start != 2.0
            else {name: peer for name, peer in started.items() if name != "JaxPP DualPipeV"}
        )

    monkeypatch.setattr(peers, "start_peers", start_peers)
    table, versions = peers.compare("jaxpp", peers.Config(starts=3, repeats=2))
    reference, ours = table.rows
    figures = {
        "wall s": 4.0,
        "wall ratio": 1.0,
        "CPU s": 8.0,
        "least wall s": 1.0,
        "first step s": 20.0,
        "peak MiB": 2.0,
    }
    assert {key: reference[key] for key in figures} == figures
    assert (ours["peer"], ours["wall s"], ours["wall ratio"]) == ("jaxpar 1f1b", 2.0, 0.5)
    assert table.note.startswith(
        "Losses, to 0.0001 those of all: 3.00000, 2.00000, 2.00000. Left out: "
    )
    assert table.note.endswith("JaxPP DualPipeV."), "it did not start each time"
    assert versions == {"jax": "1"}


@pytest.mark.parametrize("other", [2.001, float("nan")])
def test_peers_with_other_losses_are_refused(other):
    peers.check_losses({"jax.jit": [3.0, 2.0], "jaxpar": [3.0, 2.00001]})
    with pytest.raises(
        SystemExit, match=r"^peers must have the same losses to 0\.0001; got .* from jaxpar"
    ):
        peers.check_losses({"jax.jit": [3.0, 2.0], "jaxpar": [3.0, other]})


@pytest.mark.parametrize("flag", ["--repeats", "--starts"])
def test_no_rounds_of_peers_are_refused_before_any_peer_starts(flag):
    config = peers.Config(**{flag[2:]: 0})
    with pytest.raises(
        SystemExit, match=f"^{flag} must be positive; got 0. Leave it out for the default.$"
    ):
        peers.main(config)


def test_a_peer_that_is_not_ours_and_does_not_start_is_left_out_with_one_line(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "torch.py").write_text('raise ImportError("no such libgomp")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "python_of", lambda *_: sys.executable)
    assert peers.start_peers({"PyTorch": torch_peer("single")}, smoke=True) == {}
    assert capsys.readouterr().out == (
        "left out: PyTorch ended with exit code 1: ImportError: no such libgomp (alone: python "
        "benchmarks/peers/torch_peer.py single)\n"
    )


def test_a_peer_of_ours_that_does_not_start_ends_the_run_with_one_line():
    with pytest.raises(
        SystemExit, match=r"^jaxpar ended with exit code 2: jax_peer.py: error: .*'nothing'.*\)$"
    ):
        peers.start_peers({"jaxpar": jax_peer("nothing")}, smoke=True)


# Runs the microbatches one after another, in place of JaxPP.
IN_SEQUENCE = """
import jax

__version__ = "of this test"
Add = jax.numpy.add
MpmdMesh = lambda mesh, axis: mesh


def Std1F1B(num_stages):
    assert num_stages == 4


def Interleaved1F1B(num_stages, mpmd_dim):
    assert (num_stages, mpmd_dim) == (8, 4)


marked = []
mark_stage_end = lambda x: (marked.append(x.shape), x)[1]


def treduce(fun, xs, schedule, operation):
    return jax.tree.map(lambda each: each.sum(0), jax.lax.map(fun, xs))


class Whole:
    def __init__(self, array):
        self.first_mpmd_replica = array
        self.block_until_ready = array.block_until_ready


def mpmd_jit_with_loop(fun, mpmd_mesh, donate_argnums):
    assert mpmd_mesh.shape == {"stage": 4}
    jitted = jax.jit(fun, donate_argnums=donate_argnums)

    def step(*args):
        params, loss = jitted(*args)
        assert len(marked) == WANTED, marked
        return params, Whole(loss)

    return step
"""


@pytest.mark.slow
def test_the_step_of_the_jaxpp_peer_marks_each_stage_and_trains_as_one_device(monkeypatch):
    api = types.ModuleType("jaxpp.api")
    exec(IN_SEQUENCE.replace("WANTED", "8"), vars(api))
    for name, module in {"jaxpp": types.SimpleNamespace(api=api), "jaxpp.api": api}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    import jaxpp_peer
    import protocol

    shape, count = plain_gpt.Shape(**plain_gpt.SMOKE), protocol.NUM_MICROBATCHES
    params, batch = plain_gpt.make_params(shape), plain_gpt.make_batch(shape)
    listed = jax.tree.map(jax.numpy.asarray, jaxpp_peer.listed_layers(params))
    microbatches = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("stage",))
    with jax.numpy_rank_promotion("allow"):
        loss, grads = jax.jit(small_gpt.one_device, static_argnums=2)(params, batch, count)
        trained, found = jaxpp_peer.make_train_step(mesh, "Interleaved1F1B", 4, shape.layers)(
            listed, microbatches
        )
    assert float(found.first_mpmd_replica) == pytest.approx(float(loss), rel=1e-5)
    want = jax.tree.map(lambda p, g: p - protocol.LEARNING_RATE * g, params, grads)
    assert_same(trained, jaxpp_peer.listed_layers(want), within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "num_marks"), [("Std1F1B", 4), ("Interleaved1F1B", 8)])
def test_the_jaxpp_peer_marks_each_stage_and_has_the_losses_of_one_device(
    tmp_path, monkeypatch, schedule, num_marks
):
    (tmp_path / "jaxpp").mkdir()
    (tmp_path / "jaxpp" / "__init__.py").touch()
    (tmp_path / "jaxpp" / "api.py").write_text(IN_SEQUENCE.replace("WANTED", str(num_marks)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peers.check_jaxpp(sys.executable)
    commands = {"jax.jit": jax_peer("plain"), "JaxPP": jaxpp_peer(schedule)}
    run = peers.take_turns(
        peers.start_peers(commands, smoke=True, jaxpp_python=sys.executable), count=1
    )
    before, after = run.losses("JaxPP")
    assert after < before - 1e-3, "a step trains"
    assert run.first["JaxPP"]["versions"].startswith("JaxPP of this test (jax ")
    assert all(last["peak_bytes"] > 0 for last in run.last.values())


def test_without_jaxpp_its_question_is_left_out_with_the_remedy(capsys):
    assert "jaxpp" not in peers.questions_of(peers.Config())
    assert (
        f"left out, since there is no --jaxpp-python: Pipelines beside JaxPP, 8 microbatches. {peers.JAXPP_REMEDY}\n"
        in (capsys.readouterr().out)
    )
    with pytest.raises(
        SystemExit,
        match=r"^--only jaxpp must have a Python with JaxPP; got none\. Install JaxPP beside ",
    ):
        peers.questions_of(peers.Config(only="jaxpp"))


@pytest.mark.parametrize(
    ("python", "why"),
    [(sys.executable, "ModuleNotFoundError: .*jaxpp"), ("/no/python", r"\[Errno 2\]")],
)
def test_a_python_without_jaxpp_is_refused_with_the_remedy(python, why):
    with pytest.raises(
        SystemExit,
        match=rf"^--jaxpp-python must .* imports jaxpp; got {python}: {why}.*Install JaxPP beside ",
    ):
        peers.questions_of(peers.Config(only="jaxpp", jaxpp_python=python))


@pytest.mark.slow
def test_jaxpp_trains_the_same_model(tmp_path):
    if not (python := os.environ.get("JAXPAR_TEST_JAXPP_PYTHON")):
        pytest.skip(f"JAXPAR_TEST_JAXPP_PYTHON names no Python with JaxPP. {peers.JAXPP_REMEDY}")
    rows = smoke(tmp_path, "peers.py", "--only", "jaxpp", "--jaxpp-python", os.path.relpath(python))
    assert {"JaxPP Std1F1B", "JaxPP ZeroBubble", "JaxPP DualPipeV"} <= {row["peer"] for row in rows}
