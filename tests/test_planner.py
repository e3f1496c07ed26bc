"""The search: what is found for published models, what is refused and what is nearest; the command."""

import json

import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.__main__ import main
from jaxpar.models.transformer import TransformerConfig
from jaxpar.planner import Assumptions, Choice, Cluster, cluster, price, render, transformer_shape
from jaxpar.planner.plans import seconds_text
from jaxpar.schedule import simulate

BLOOM = Choice(
    data=8, stage=12, tensor=4, num_microbatches=128, zero=1, remat=True, layers_per_virtual_stage=(5, *(6,) * 10, 5)
)
SMALL = TransformerConfig(vocab_size=512, num_layers=8, embed_dim=256, num_heads=8, max_positions=128)


def gpt(num_layers, embed_dim, num_heads):
    """The models of arXiv 2104.04473, table 1."""
    shape = {"num_layers": num_layers, "embed_dim": embed_dim, "num_heads": num_heads}
    return TransformerConfig(vocab_size=51_200, max_positions=2048, compute_dtype=jnp.bfloat16, **shape)


def node(**changes):
    given = {"memory_bytes": 80e9, "peak_flops": 1e14, "memory_bandwidth": 1e12, "node_bandwidth": 1e11}
    return Cluster(**({"network_bandwidth": 1e10} | given | changes))


def test_bloom_as_it_was_trained_fits_and_runs_at_the_published_rate():
    plan = price("bloom-176b", cluster("a100-80gb", 48), BLOOM, batch_size=2048, executor="mpmd")
    assert 60 * 2**30 < plan.memory_bytes < 80 * 2**30
    assert plan.flops / plan.step_seconds / 1e12 == pytest.approx(150, rel=0.05)  # arXiv 2211.05100, section 3.3
    lockstep = price("bloom-176b", cluster("a100-80gb", 48), BLOOM, batch_size=2048)
    assert lockstep.step_seconds > plan.step_seconds


@pytest.mark.parametrize(
    ("model", "num_gpus", "batch_size", "choice", "published"),
    [
        (gpt(40, 6144, 48), 256, 1024, Choice(data=32, tensor=8, num_microbatches=4, remat=True), 135),
        (gpt(80, 12288, 96), 1536, 2304, Choice(data=24, stage=8, tensor=8, num_microbatches=96, remat=True), 148),
        pytest.param(
            gpt(128, 25600, 160),
            3072,
            3072,
            Choice(data=6, stage=64, tensor=8, num_microbatches=512, remat=True),
            163,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_megatrons_rates_are_met_within_a_fifth(model, num_gpus, batch_size, choice, published):
    """One efficiency for all rows; those of arXiv 2104.04473, table 1, count the recomputed forward passes."""
    plan = price(model, cluster("a100-80gb", num_gpus // 8), choice, batch_size=batch_size, executor="mpmd")
    assert plan.flops / plan.step_seconds / 1e12 == pytest.approx(published, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_blooms_mesh_is_among_the_first_five(executor):
    plans = jaxpar.plan("bloom-176b", cluster("a100-80gb", 48), batch_size=2048, executor=executor, top=5)
    meshes = [(plan.choice.data, plan.choice.stage, plan.choice.tensor) for plan in plans]
    assert (8, 12, 4) in meshes, render(plans)


def test_the_best_is_first_and_each_other_says_why_not():
    plans = jaxpar.plan(SMALL, cluster("h100"), batch_size=64, top=4)
    assert len(plans) == 4
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert len({plan.choice.mesh.shape_tuple for plan in plans}) == 4, "one plan a mesh"
    assert "faster than the next, which" in plans[0].why
    assert all("slower: " in plan.why for plan in plans[1:])
    assert len(render(plans).splitlines()) == 2 + len(plans)


def test_times_add_up_and_the_bubble_is_the_simulators():
    choice = Choice(stage=4, num_microbatches=8)
    assumed = Assumptions(compute=1, network=1)
    fast = node(node_bandwidth=1e30, network_bandwidth=1e30, node_latency_seconds=1e-30, network_latency_seconds=1e-30)
    plan = price(SMALL, fast, choice, batch_size=8, executor="mpmd", assumed=assumed)
    assert plan.step_seconds == pytest.approx(sum(vars(plan.ideal_time).values()))
    even = simulate(choice.table(8, "published")).bubble_fraction
    assert plan.bubble_fraction == pytest.approx(even, abs=0.12), "but for the head and unequal ops"


@pytest.mark.parametrize(
    "held", [{"tensor": 2}, {"stage": 2, "schedule": "zb-h1"}, {"zero": 0, "data": 4}, {"remat": True}]
)
def test_what_is_held_is_kept(held):
    for plan in jaxpar.plan(SMALL, cluster("h100"), batch_size=64, top=3, **held):
        assert all(getattr(plan.choice, name) == value for name, value in held.items())


def test_what_does_not_fit_is_named_with_the_nearest_that_does():
    big = TransformerConfig(vocab_size=512, num_layers=8, embed_dim=4096, num_heads=32, max_positions=512)
    shape = transformer_shape(big)
    with pytest.raises(
        ValueError, match=r"transformer needs \d+ GiB a device at tensor=1, stage=2, data=4; have 8\. Nearest: "
    ):
        jaxpar.plan(
            shape, node(memory_bytes=8 * 2**30), batch_size=64, tensor=1, stage=2, zero=0, remat=False, schedule="1f1b"
        )
    with pytest.raises(ValueError, match=r"transformer needs \d+ GiB a device at .*; have 3\. Nearest: \d+ nodes\."):
        jaxpar.plan(shape, node(memory_bytes=3 * 2**30, devices_per_node=1), batch_size=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster("v100"), r"gpu must be one of a100-40gb, .*; got 'v100'\."),
        (lambda: node(peak_flops=0), r"peak_flops of a cluster must be positive; got 0\."),
        (
            lambda: Assumptions(compute=1.5),
            r"an efficiency must be a share of the datasheet's figure; got compute=1.5\.",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, pipeline=2),
            r"a fixed setting must be one of .*; got \['pipeline'\]",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, schedule="2f2b"),
            r"schedule must be one of 1f1b, .*; got '2f2b'",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, executor="fast"),
            r'executor must be "spmd" or "mpmd"; got \'fast\'',
        ),
        (lambda: jaxpar.plan(SMALL, node(), batch_size=0, top=0), r"top must be 1 or more; got 0"),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=66, tensor=2, stage=1),
            r"data must divide the batch; got data=4.* batch_size=68",
        ),
        (
            lambda: jaxpar.plan(SMALL, node(), batch_size=64, tensor=3),
            r"the axes must multiply to the devices.* got tensor=3",
        ),
        (
            lambda: price(SMALL, node(), Choice(data=8, num_microbatches=3), batch_size=64),
            r"data times num_microbatches must divide batch_size; got 8 times 3 and batch_size=64. Choose a batch_size of 48\.",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_command_prints_a_table_or_a_list_for_programs(capsys, tmp_path):
    args = ["plan", "--model", "gpt2", "--gpu", "h100", "--batch-size", "64", "--tensor", "1"]
    assert main([*args, "--out-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpt2, 0.1245 billion parameters, 64 rows of 1024 tokens a step, on 1 x 8 h100")
    assert "best: tensor=1, stage=1, data=8" in out
    assert (tmp_path / "placement.svg").exists()
    assert (tmp_path / "memory.svg").exists()
    assert main([*args, "--json", "--remat", "no"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert len(plans) > 1
    assert plans[0] | {"data": 8, "stage": 1, "tensor": 1, "remat": False} == plans[0]
    assert plans[0]["memory_bytes"] == sum(plans[0]["bytes_per_device"].values())
    assert main(["plan", "--model", "gpt5"]) == 2
    assert "gpt5" in capsys.readouterr().err


@pytest.mark.parametrize("remat", [False, True])
def test_slots_and_times_of_many_microbatches_go_on_as_those_of_few(monkeypatch, remat):
    def slots_and_times(schedule, chunks):
        many = Choice(stage=4, schedule=schedule, num_chunks=chunks, num_microbatches=40, remat=remat)
        found = price("gpt2", cluster("h100", 1), many, batch_size=40)
        return many.num_slots, [found.time.total, found.ideal_time.total]

    schedules = (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2))
    extrapolated = [slots_and_times(*each) for each in schedules]
    monkeypatch.setattr(Choice, "num_simulated", property(lambda self: self.num_microbatches))
    for each, (slots, times) in zip(schedules, extrapolated, strict=True):
        exact, exact_times = slots_and_times(*each)
        assert slots == exact, each
        assert times == pytest.approx(exact_times, rel=1e-9), each


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [(0.01234, 3, "0.0123 s"), (9.876, 3, "9.88 s"), (1834.2, 3, "1834 s"), (180.4, 2, "180 s"), (0.5, 2, "0.5 s")],
)
def test_seconds_are_written_without_powers_of_ten(seconds, digits, text):
    assert seconds_text(seconds, digits) == text


def test_plans_that_do_not_fit_by_the_compilers_account_are_dropped(monkeypatch, capsys):
    args = ["plan", "--model", "gpt2", "--nodes", "1", "--seq", "128", "--batch-size", "64", "--json"]
    assert main(args) == 0
    first, second, *_ = json.loads(capsys.readouterr().out)
    sizes = iter([10**12, 7])
    monkeypatch.setattr("jaxpar.commands.plan._compile", lambda plans, *_: {each.choice: next(sizes) for each in plans})
    assert main([*args, "--compile", "2"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert left[0] == second | {"why": left[0]["why"], "compiled_memory_bytes": 7}
    axes = [(each["data"], each["stage"], each["tensor"]) for each in left]
    assert (first["data"], first["stage"], first["tensor"]) not in axes
    sizes = iter([10**12])
    assert main([*args, "--compile", "1", "--top", "1"]) == 2
    assert "a plan must fit the memory of a h100 by the compiler's account too; got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--compile", "-1"), "--compile must be at least 0; got -1."),
        (("--compile", "2", "--executor", "mpmd"), "got --executor mpmd, --compile 2. Leave one out."),
    ],
)
def test_what_cannot_be_compiled_is_refused(capsys, flags, said):
    assert main(["plan", "--model", "gpt2", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_compiler_for_gpus_is_named(monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.compile_only.PLUGINS", ())
    assert main(["plan", "--model", "gpt2", "--seq", "128", "--batch-size", "64", "--compile", "1"]) == 2
    assert "Install jaxpar[gpu-compile]" in capsys.readouterr().err
