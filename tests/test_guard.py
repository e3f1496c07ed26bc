"""The guard of a training loop: when it saves, what ends a run, and that it delays no step."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import jaxpar
from jaxpar.guard import Guard
from jaxpar.runtime import coordination
from jaxpar.runtime.coordination import AgreedStep, PeerLostError, check_agreement, is_peer_lost
from jaxpar.runtime.watchdog import Budgets, Heartbeat, Watchdog
from tests.support.fake_service import stand_in
from tests.support.tiny_state import at_step, make_state
from tests.support.waiting import WAIT_SECONDS, wait_until

FINE, BROKEN = {"skipped": np.float32(0)}, {"skipped": np.float32(1)}


class Clock:
    """A watchdog's clock, which stands still unless a test moves it."""

    def __init__(self):
        self.now, self.num_looks = 0.0, 0

    def __call__(self):
        self.num_looks += 1
        return self.now

    def passes(self, seconds):
        """Lets seconds pass, and the watchdog look at the clock twice."""
        self.now += seconds
        before = self.num_looks
        wait_until(lambda: self.num_looks >= before + 6)


@pytest.fixture
def _fault_handler_off(monkeypatch):
    """Else Python's own fault handler would end this process, where the machine keeps the watchdog's thread waiting."""
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **kwargs: None)


@pytest.fixture
def manager(tmp_path):
    return jaxpar.CheckpointManager(tmp_path, jaxpar.make_mesh(), keep=100)


@pytest.fixture
def said():
    return []


def train(guard, state, steps, metrics=lambda step: FINE):
    with guard:
        for step in steps:
            guard.after_step(step, at_step(state, step), metrics(step))


def test_it_saves_every_so_many_steps_and_at_the_end(manager):
    train(Guard(manager, num_steps=11, save_every=4), make_state(manager.mesh), range(1, 12))
    assert manager.steps() == (4, 8, 11)


@pytest.mark.parametrize("first", [np.nan, np.inf, 2.5])
def test_a_first_loss_that_is_not_finite_is_not_blamed_on_the_learning_rate(first, said):
    guard = Guard(
        num_steps=9, max_skipped=2, say=said.append, remedy="Choose a smaller learning rate."
    )
    with pytest.raises(SystemExit, match="86"):
        train(
            guard,
            make_state(jaxpar.make_mesh()),
            range(1, 9),
            lambda step: BROKEN | {"loss": np.float32(first)},
        )
    assert "Choose a smaller learning rate." not in said[-1]
    is_of_loss = not np.isfinite(first)
    for advice in (
        "look at the labels and ids, which must be from 0 to the vocabulary's size - 1",
        "--expert-buffer may be too small",
        "masks and weights, of which a batch must have one that is not 0",
    ):
        assert (advice in said[-1]) == is_of_loss
    assert ("in float16 at the loss scale" in said[-1]) != is_of_loss


def test_params_that_were_never_finite_are_not_blamed_on_the_learning_rate(manager, said):
    state = make_state(manager.mesh)
    state = dataclasses.replace(
        state, params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    )
    for first, blamed in ((np.nan, False), (2.5, True)):
        guard = Guard(
            manager,
            num_steps=8,  # of which the last is saved in any case
            save_every=1,
            say=said.append,
            remedy="Choose a smaller learning rate.",
        )
        with pytest.raises(SystemExit, match="86"):
            train(
                guard,
                state,
                range(1, 9),
                lambda step, loss=first: BROKEN | {"loss": np.float32(loss)},
            )
        assert "parameters must be finite to be saved; got NaN" in said[-1]
        assert said[-1].endswith("with a smaller learning rate.") == blamed
        assert (
            "Nothing was saved. The loss of the first step was not finite" in said[-1]
        ) != blamed


def test_a_loss_that_is_not_finite_after_an_update_is_blamed_on_the_learning_rate(said):
    guard = Guard(
        num_steps=9, max_skipped=2, say=said.append, remedy="Choose a smaller learning rate."
    )
    step = lambda step: (
        (FINE if step == 1 else BROKEN) | {"loss": np.float32(1 if step == 1 else np.nan)}
    )
    with pytest.raises(SystemExit, match="86"):
        train(guard, make_state(jaxpar.make_mesh()), range(1, 9), step)
    assert said[-1].endswith("Choose a smaller learning rate.")


def test_it_saves_by_time(manager, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jaxpar.guard.time.monotonic", lambda: now[0])
    with Guard(manager, num_steps=100, save_minutes=5.0) as guard:
        for step in range(1, 13):
            now[0] += 100.0
            guard.after_step(step, at_step(make_state(manager.mesh), step), FINE)
    assert manager.steps() == (3, 6, 9, 12)


def test_without_a_wish_nothing_is_saved(manager):
    train(Guard(manager, num_steps=3), make_state(manager.mesh), range(1, 4))
    assert manager.steps() == ()
    assert not manager.directory.exists() or not list(manager.directory.iterdir())


def test_a_step_that_is_there_no_more_is_not_said_to_be_saved(manager, said, monkeypatch):
    wait = manager.wait

    def lose():
        wait()
        shutil.rmtree(manager.directory / "1", ignore_errors=True)

    monkeypatch.setattr(manager, "wait", lose)
    guard = Guard(manager, num_steps=9, say=said.append)
    guard._agreed.ask("SIGTERM")
    with pytest.raises(SystemExit) as end:
        train(guard, make_state(manager.mesh), [1])
    assert end.value.code == 74
    assert said == [
        "error: the final state was not saved: step 1: it was saved, but no longer exists. There is no checkpoint. "
        "Make room, then begin again with overwrite=True."
    ]


def test_what_is_saved_beside_the_state_is_of_its_step(manager):
    lines = []
    guard = Guard(
        manager,
        num_steps=4,
        save_every=2,
        about=lambda step: {"samples": 8 * step, "config": {"seed": 1}},
        before_save=lambda: lines.append("flushed"),
    )
    train(
        guard,
        make_state(manager.mesh),
        range(1, 5),
        lambda step: FINE | {"test_loss": jnp.float32(step)},
    )
    assert [manager.manifest(step).samples for step in (2, 4)] == [16, 32]
    assert manager.manifest(2).metrics == {"skipped": 0.0, "test_loss": 2.0}
    assert lines == ["flushed"] * 2


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        pytest.param({3, 5, 7, 9}, None, marks=pytest.mark.full),
        ({4, 5, 6}, 86),
        pytest.param({10, 11}, None, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_so_many_steps_in_a_row_that_are_not_finite_end_the_run(manager, said, broken, code):
    guard = Guard(
        manager, num_steps=12, save_every=2, max_skipped=3, say=said.append, remedy="Do this."
    )
    run = lambda: train(
        guard, make_state(manager.mesh), range(1, 13), lambda s: BROKEN if s in broken else FINE
    )
    if code is None:
        return run()
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == code
    [once] = [line for line in said if "changed nothing" in line]
    assert once.startswith(
        f"step {min(broken)} changed nothing, since its loss or gradients were not finite"
    )
    assert said[-1].startswith(
        f"error: {len(broken)} consecutive steps had a loss or gradients that were not finite"
    )
    assert said[-1].endswith("is intact. Do this.")


def until_skipped(manager, said, skipped, steps=range(1, 13)):
    """Trains until steps that were skipped end the run; returns what it said last."""
    guard = Guard(
        manager,
        num_steps=12,
        save_every=2,
        max_skipped=3,
        say=said.append,
        remedy=lambda has_good: f"Continue: {has_good}.",
    )
    metrics = lambda step: (
        BROKEN | {"loss": np.float32(np.nan)} if step in skipped else FINE | {"loss": 1.0}
    )
    with pytest.raises(SystemExit, match="86"):
        train(guard, make_state(manager.mesh), steps, metrics)
    return said[-1]


def test_no_state_is_saved_that_skipped_steps_could_not_change_and_the_last_good_one_is_named(
    manager, said
):
    told = until_skipped(manager, said, {2, 6, 7, 8})
    assert manager.steps() == (3, 4), "2 waits for a finite step, 6 and 8 are not saved"
    assert told.endswith("were skipped. The checkpoint of step 4 is intact. Continue: True.")
    (manager.directory / "4").rename(manager.directory / "4.abandoned")
    told = until_skipped(manager, said, {4, 5, 6}, range(4, 13))
    assert "first step" not in told, "it was resumed"
    assert told.endswith(
        "Checkpoint 3: the state from which these steps were not finite, so that those after a resume may not be "
        "either. There is no earlier one. No step since the resume has made an update, so its learning rate is not the "
        "cause. Begin again with overwrite=True. If it ends so again, look at the rows of these steps: inputs, masks and "
        "weights must be finite."
    )


def test_a_checkpoint_from_which_no_step_is_finite_is_to_be_renamed(manager, said):
    told = until_skipped(manager, said, {5, 6, 7})
    assert manager.steps() == (2, 4)
    assert told.endswith(
        f"In {manager.directory} rename 4 to 4.abandoned: a resume then reads the checkpoint of step 2, which is intact. "
        "Continue: True."
    )
    told = until_skipped(manager, said, {5, 6, 7}, range(5, 13))
    assert f"In {manager.directory} rename 4 to 4.abandoned: a resume then reads" in told
    assert "so its learning rate is not the cause. Resume again." in told
    (manager.directory / "4").rename(manager.directory / "4.abandoned")
    assert manager.latest() == 2


def test_a_run_that_is_asked_to_stop_saves_after_a_skipped_step_too(manager, said):
    guard = Guard(manager, num_steps=9, save_every=1, say=said.append)
    guard._agreed.ask("SIGTERM")
    with pytest.raises(SystemExit, match="75"):
        train(guard, make_state(manager.mesh), range(1, 9), lambda step: BROKEN)
    assert len(manager.steps()) == 1


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_run_none_of_whose_steps_was_finite_ends_so_and_one_whose_last_ones_were_not_says_it(
    manager, said, num_steps
):
    """Of fewer steps than the limit."""
    broken = lambda step: BROKEN if step > 12 - num_steps else FINE
    state = make_state(manager.mesh)
    guard = Guard(num_steps=num_steps, say=said.append)
    with pytest.raises(SystemExit, match="86"):
        train(guard, state, range(1, 1 + num_steps), lambda _: BROKEN)
    assert said[-1].startswith(f"error: {num_steps} consecutive steps had a loss or gradients that")
    train(Guard(num_steps=12, say=said.append), state, range(1, 13), broken)
    last = {1: "step", 2: "2 steps"}[num_steps]
    assert said[-1] == (
        f"the last {last} changed nothing, since loss or gradients were not finite: the state is the one before"
    )


def spoil(state, name="bias"):
    """The state with another value in one element of one device's copy of a param."""
    array = state.params[name]
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[-1].flat[0] += 1
    put = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, array.addressable_shards, strict=True)
    ]
    changed = jax.make_array_from_single_device_arrays(array.shape, array.sharding, put)
    return dataclasses.replace(state, params=state.params | {name: changed})


def test_replicas_that_differ_end_a_run_without_checkpoints_at_the_next_comparison(said):
    fine = make_state(jaxpar.make_mesh(data=2, tensor=2))
    guard = Guard(num_steps=9, compare_every=2, say=said.append)
    with guard:
        for step in range(1, 5):
            guard.after_step(step, at_step(fine, step), FINE)
        guard.after_step(5, at_step(spoil(fine), 5), FINE)
        with pytest.raises(SystemExit) as end:
            guard.after_step(6, at_step(spoil(fine), 6), FINE)
    assert end.value.code == 70
    assert said == [
        "error: devices that hold the same part of an array must hold the same values; got different ones in "
        "['params/bias'] at step 6. Nothing was saved. Resume from a checkpoint, or begin again; a device may compute wrongly."
    ]


def test_replicas_are_compared_at_the_steps_that_are_not_saved_and_at_the_last_one(
    tmp_path, monkeypatch
):
    compared = []
    monkeypatch.setattr(
        "jaxpar.guard.diverged_replicas", lambda state: compared.append(int(state.step)) or []
    )
    mesh = jaxpar.make_mesh()
    train(Guard(num_steps=7, compare_every=3), make_state(mesh), range(1, 8))
    train(Guard(num_steps=7, compare_every=100), make_state(mesh), range(1, 8))
    train(Guard(num_steps=7), make_state(mesh), range(1, 8))
    assert compared == [3, 6, 7]
    compared.clear()
    manager = jaxpar.CheckpointManager(tmp_path, mesh)
    train(Guard(manager, num_steps=8, save_every=4, compare_every=2), make_state(mesh), range(1, 9))
    assert compared == [2, 6], "a save compares replicas itself"


def test_parameters_that_are_not_finite_end_the_run_instead_of_being_saved(manager, said):
    state = make_state(manager.mesh)
    state = dataclasses.replace(
        state, params=jax.tree.map(lambda x: x * np.float32(np.inf), state.params)
    )
    with pytest.raises(SystemExit, match="86"):
        train(Guard(manager, num_steps=4, save_every=2, say=said.append), state, range(1, 5))
    assert "parameters must be finite to be saved" in said[-1]
    assert manager.steps() == ()


def test_an_error_in_the_loop_is_not_swallowed_and_ends_the_threads(manager):
    with pytest.raises(KeyError, match="mine"), Guard(manager, num_steps=4, save_every=2):
        raise KeyError("mine")


def test_a_save_in_progress_is_finished_where_an_error_ends_the_loop(manager):
    def steps():
        yield 2
        raise KeyError("mine")

    guard = Guard(manager, num_steps=4, save_every=2)
    with pytest.raises(KeyError, match="mine"):
        train(guard, make_state(manager.mesh), steps())
    assert manager.saving is None
    assert manager.steps() == (2,)


def test_only_what_a_collective_says_of_a_lost_process_is_taken_for_that(monkeypatch):
    lost = jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer")
    assert not is_peer_lost(lost), "with one process there is no other"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert is_peer_lost(lost)
    assert is_peer_lost(PeerLostError("process 1 must answer"))
    assert is_peer_lost(ValueError("Gloo AllGather failed ... Connection reset by peer"))
    assert not is_peer_lost(ValueError("shapes differ"))
    assert not is_peer_lost(KeyError("connection closed"))


OF_NCCL = "INTERNAL: nccl_errors.cc:9: NCCL operation async_err failed: remote process exited or there was a network error."


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (JaxRuntimeError(OF_NCCL), True),
        (JaxRuntimeError("FAILED_PRECONDITION: NcclCommunicator aborted"), True),
        (JaxRuntimeError("UNAVAILABLE: /job:jax_worker/task:1 heartbeat timeout."), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"), True),
        (JaxRuntimeError("INTERNAL: NCCL operation ncclGroupEnd() failed: out of memory"), False),
        (
            JaxRuntimeError(
                "INTERNAL: Traceback (most recent call last): of a callback: connection closed"
            ),
            False,
        ),
        (ValueError("could not convert string to float: 'gloomy'"), False),
        (ValueError("no rule applies to heartbeat/w"), False),
        (ValueError("could not parse row 7 of heartbeat.csv"), False),
        (ValueError("the database must answer; got connection reset. Start it."), False),
        (ValueError(OF_NCCL), False),
        (ValueError("Connection reset by peer"), False),
    ],
)
def test_an_error_of_the_program_is_none_of_a_lost_process_by_a_word_in_it(
    monkeypatch, error, is_lost
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert is_peer_lost(error) == is_lost


@pytest.mark.parametrize("module", ["jax._src.array", "script"])
def test_a_value_error_is_jax_s_if_jax_has_raised_it(monkeypatch, module):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    names = {"__name__": module}
    exec("def fetch(): raise ValueError('at rank 1: connection closed by peer')", names)
    with pytest.raises(ValueError, match="closed by peer") as raised:
        names["fetch"]()
    assert is_peer_lost(raised.value) == (module != "script")


# -- what it is made of ------------------------------------------------------------------------------------------------


def test_one_process_agrees_with_itself():
    assert coordination.exchange("x", {"a": 1}) == [{"a": 1}]
    check_agreement("train", {"program": "abc"})
    with AgreedStep() as agreed:
        assert agreed.after(1) is None
        agreed.ask("SIGTERM")
        assert agreed.after(2) == "SIGTERM"
        assert agreed.after(3) is None


def test_processes_that_differ_are_named(monkeypatch):
    told = [
        {"mesh": "a", "program": "p"},
        {"mesh": "a", "program": "q"},
        {"mesh": "a", "program": "q"},
    ]
    monkeypatch.setattr(coordination, "exchange", lambda name, value: told)
    message = "all processes must agree on their program before they train; got 'q' on process 1, 2, 'p' on process 0"
    with pytest.raises(ValueError, match=message):
        check_agreement("train", told[0])


@pytest.mark.usefixtures("_fault_handler_off")
def test_the_watchdog_names_the_phase_its_budget_and_the_line(capfd):
    ends = []
    clock = Clock()
    with Watchdog(Budgets(step=0.3, save=0.0), end=ends.append, clock=clock) as watchdog:
        watchdog.begin("step", "7")
        with watchdog.phase("save"):
            clock.passes(0.6)
        assert ends == [], "a phase with a budget of 0 may take any time"
        clock.now += 0.4
        watchdog._thread.join(timeout=WAIT_SECONDS)
    assert ends == [124]
    said = capfd.readouterr().err
    assert "step must end within 0.3 s (budget.step); got process 0 of 1 stuck in step 7." in said
    assert "watchdog._thread.join(timeout=WAIT_SECONDS)" in said


@pytest.mark.usefixtures("_fault_handler_off")
@pytest.mark.parametrize(("longest", "most"), [(0, 300), (2, 60), (40, 120)])
def test_a_step_that_someone_waits_for_has_less_time_by_the_longest_one(capfd, longest, most):
    ends, clock = [], Clock()
    with Watchdog(Budgets(step=0.0), end=ends.append, clock=clock) as watchdog:
        watchdog.begin("step", "6")
        clock.now += longest
        watchdog.begin("step", "7")
        watchdog.hurry("SIGINT")
        with watchdog.phase("save"):
            clock.passes(500)
        clock.passes(11)
        assert ends == [], "a save has its own time, and the step as much as the longest ones"
        clock.now += most
        watchdog._thread.join(timeout=WAIT_SECONDS)
    assert ends == [124]
    said = capfd.readouterr().err
    left = most - 11
    assert (
        f"SIGINT: process 0 of 1 waits for the end of step 7, and ends without it in {left} s; a second"
        in said
    )
    assert (
        f"error: step must end within {most} s of SIGINT, after which the run is saved and ends; got process 0"
        in said
    )


@pytest.mark.usefixtures("_fault_handler_off")
def test_a_phase_that_has_ended_is_not_watched():
    ends = []
    clock = Clock()
    with Watchdog(Budgets(compile=0.2), end=ends.append, clock=clock) as watchdog:
        with watchdog.phase("compile"):
            pass
        clock.passes(0.5)
    assert ends == []


def test_what_runs_beside_is_watched_until_it_is_over(capfd):
    ends, over = [], [False]
    clock = Clock()
    with Watchdog(Budgets(save=0.1), end=ends.append, clock=clock) as watchdog:
        watchdog.beside("save", "of step 5", lambda: over[0])
        over[0] = True
        clock.passes(2.5)
        assert ends == [], "it has ended"
        watchdog.beside("save", "of step 6", lambda: False)
        clock.now += 2.5
        watchdog._thread.join(timeout=WAIT_SECONDS)
    assert ends == [124]
    assert "(budget.save); got process 0 of 1 stuck in save of step 6." in capfd.readouterr().err


@pytest.mark.usefixtures("_fault_handler_off")
def test_the_watchdog_names_the_silent_process_and_not_the_one_that_waits(monkeypatch, capfd):
    ends = []
    monkeypatch.setattr(Heartbeat, "silent", lambda self: {3: 6.4})
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with Watchdog(Budgets(step=0.1), end=ends.append) as watchdog:
        watchdog.begin("step", "7")
        watchdog._thread.join(timeout=WAIT_SECONDS)
    assert ends == [124]
    assert capfd.readouterr().err.startswith(
        "error: step must end within 0.1 s (budget.step); got process 3 of 4, silent for 6 s or more: stopped, or its "
        "machine is gone. Process 0 waits for it in step 7. The Python stack of process 0, the innermost call last:\n"
    )


@pytest.mark.usefixtures("_fault_handler_off")
def test_a_process_that_is_silent_for_longer_than_heartbeat_seconds_ends_the_run_before_a_budget(
    monkeypatch, capfd
):
    stand_in(monkeypatch)
    monkeypatch.setattr("jaxpar.runtime.watchdog._limits", [30])
    monkeypatch.setattr(Heartbeat, "lost", lambda self, seconds: {1: 32.0})
    ends, clock = [], Clock()
    with Watchdog(Budgets(), end=ends.append, clock=clock) as watchdog:
        clock.passes(40)
        assert ends == [], "no phase has begun"
        watchdog.begin("step", "7")
        clock.passes(40)
        assert ends == [], "this process itself may have been stopped, and hears the others soon"
        for _ in range(15):
            clock.passes(2)
        assert ends == [], "a little longer than the limit, for the time between two heartbeats"
        clock.now += 2.5
        watchdog._thread.join(timeout=WAIT_SECONDS)
    assert ends == [124]
    said = capfd.readouterr().err
    assert (
        "error: a process must not be silent for 30 s (heartbeat_seconds of jaxpar.initialize); got process 1 of 2, silent "
        "for 32 s or more: stopped, or its machine is gone. Process 0 waits for it in step 7."
        in said
    )


def test_the_fault_handler_stays_a_second_behind_the_phase_that_runs(monkeypatch):
    now, armed = [100.0], []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda left, **_: armed.append(now[0] + left)
    )
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: armed.append(None))
    watchdog = Watchdog(
        Budgets(compile=3600.0, step=600.0, save=1800.0, evaluation=0.0), clock=lambda: now[0]
    )
    with watchdog.phase("compile"):
        now[0] += 50
    watchdog.begin("step", "1")
    assert armed == [100 + 3600 + 1, None, 150 + 600 + 1]
    now[0] += 10
    with watchdog.phase("save"):
        now[0] += 1000
    assert armed[3:] == [160 + 1800 + 1, 1160 + 600 + 1], (
        "the longer budget of the save must not outlive it"
    )
    with watchdog.phase("evaluation"):
        assert armed[-1] is None, "any time"
    assert armed[-1] == 1160 + 600 + 1


def test_after_a_longer_phase_the_fault_handler_is_armed_at_the_budget_of_the_one_that_runs(
    monkeypatch,
):
    armed = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, **_: armed.append(seconds)
    )
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: None)
    watchdog = Watchdog(Budgets(compile=3600.0, step=600.0))
    with watchdog.phase("compile"):
        pass
    watchdog.begin("step", "1")
    assert armed[-1] < 700, armed


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_budget_must_be_a_number_of_seconds(seconds):
    with pytest.raises(ValueError, match=r"^budget\.step must be 0 or more seconds; got"):
        Budgets(step=seconds)
