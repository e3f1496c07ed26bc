"""The optimizer and learning rate that a recipe's flags ask for, and the flags that have no effect, which are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gpt
import jaxpar
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import flag_names
from jaxpar.fields import given_by
from jaxpar.run import muon, optimizers
from jaxpar.run.optimizers import check_optimizer, learning_rate, make_optimizer
from jaxpar.train import TrainState
from tests.support.oracle import assert_same
from tests.support.tiny_transformer import FAMILIES, jit, make_params, shardings

PARAMS = {
    "w_up": np.full((2, 3, 1, 4), 0.5, np.float32),
    "tokens": np.ones((5, 3), np.float32),
    "scale": np.ones(3, np.float32),
}


def updates(flags, *, steps=3, params=PARAMS):
    """The updates of the last of a few steps."""
    optimizer, rng = make_optimizer(flags), np.random.default_rng(0)
    state, found = optimizer.init(params), None
    for _ in range(steps):
        grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
        found, state = jax.jit(optimizer.update)(grads, state, params)
    return found


# The learning rate.


def rates(**flags):
    rate = learning_rate(gpt.Config.of(learning_rate=0.8, warmup_steps=4, steps=24, **flags))
    return np.array([rate(step) for step in range(25)])


FALLING = np.linspace(0.8, 0.08, 21)


@pytest.mark.parametrize(
    ("flags", "after_warmup"),
    [
        ({}, 0.08 + 0.72 * (1 + np.cos(np.pi * np.arange(21) / 20)) / 2),
        ({"final_learning_rate": 0.0}, 0.8 * (1 + np.cos(np.pi * np.arange(21) / 20)) / 2),
        ({"learning_rate_schedule": "linear"}, FALLING),
        (
            {"learning_rate_schedule": "linear", "final_learning_rate": 0.2},
            np.linspace(0.8, 0.2, 21),
        ),
        ({"learning_rate_schedule": "constant"}, np.full(21, 0.8)),
        ({"learning_rate_schedule": "wsd"}, [*[0.8] * 16, *np.linspace(0.8, 0.08, 5)]),
        (
            {"learning_rate_schedule": "wsd", "decay_steps": 10},
            [*[0.8] * 10, *np.linspace(0.8, 0.08, 11)],
        ),
        ({"learning_rate_schedule": "wsd", "decay_steps": 20}, FALLING),
    ],
    ids=str,
)
def test_the_learning_rate_rises_and_then_follows_its_schedule(flags, after_warmup):
    found = rates(**flags)
    np.testing.assert_allclose(found[:4], [0, 0.2, 0.4, 0.6], rtol=1e-6)
    np.testing.assert_allclose(found[4:], after_warmup, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_without_warmup_the_first_step_has_the_highest_rate(schedule):
    flags = gpt.Config.of(
        learning_rate=0.8, warmup_steps=0, steps=24, learning_rate_schedule=schedule
    )
    np.testing.assert_allclose(learning_rate(flags)(0), 0.8, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_default_warmup_and_decay_fit_a_run_of_any_length(schedule):
    for steps, warmup in ((1, 0), (4, 0), (10, 1), (199, 19), (300, 20), (10**6, 20)):
        flags = gpt.Config.of(steps=steps, learning_rate_schedule=schedule)
        check_optimizer(flags)
        assert optimizers.settings(flags)["warmup_steps"] == warmup
        assert np.isfinite([learning_rate(flags)(step) for step in (0, steps // 2, steps)]).all()
    check_optimizer(gpt.Config.of(steps=20, warmup_steps=19, learning_rate_schedule="wsd"))


def test_a_run_that_is_made_longer_keeps_its_warmup_and_says_its_learning_rate(capsys):
    saved = {"steps": 40} | optimizers.settings(gpt.Config.of(steps=40))
    flags = optimizers.with_saved_warmup(gpt.Config.of(steps=400), saved)
    assert flags.optimizer.warmup_steps == 4
    assert (
        optimizers.with_saved_warmup(gpt.Config.of(warmup_steps=9), saved).optimizer.warmup_steps
        == 9
    )
    optimizers.say_new_rate(flags, saved, 40)
    assert capsys.readouterr().out == (
        "the run has --steps 400 now, and had 40 when it was saved: from here on the learning rate follows the cosine schedule "
        "of 400 steps, 0.00295 at step 40 instead of 0.0003\n"
    )
    optimizers.say_new_rate(
        flags.replace(learning_rate=3e-2, learning_rate_schedule="wsd"), saved, 40
    )
    assert (
        "the wsd schedule of 400 steps, 0.03 at step 40 instead of 0.0003"
        in capsys.readouterr().out
    )
    optimizers.say_new_rate(flags, saved | {"steps": 400}, 40)
    assert not capsys.readouterr().out


# The optimizers.


def test_betas_and_epsilon_are_those_of_adamw():
    flags = gpt.Config.of(
        learning_rate_schedule="constant",
        warmup_steps=0,
        learning_rate=0.1,
        beta1=0.8,
        beta2=0.6,
        epsilon=0.3,
    )
    decayed = {"w_up": True, "tokens": True, "scale": False}
    own = optax.adamw(0.1, b1=0.8, b2=0.6, eps=0.3, weight_decay=0.1, mask=decayed)
    state, rng, want = own.init(PARAMS), np.random.default_rng(0), None
    for _ in range(3):
        grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), PARAMS)
        want, state = own.update(grads, state, PARAMS)
    assert_same(updates(flags), want, within=1e-6)


MUON = {
    "optimizer": "muon",
    "learning_rate_schedule": "constant",
    "warmup_steps": 0,
    "learning_rate": 0.1,
}


@pytest.mark.parametrize("kv_heads", [4, pytest.param(2, marks=pytest.mark.full), 8])
def test_muon_orthogonalizes_each_matrix_of_the_layers_and_leaves_the_rest_to_adamw(kv_heads):
    """Eight heads of queries are one matrix, in groups of one, two or four beside their key and value."""
    config = dataclasses.replace(FAMILIES["llama"], num_kv_heads=kv_heads)
    params = make_params(config, dtype=np.float32)
    found = updates(gpt.Config.of(**MUON, weight_decay=0.0), params=params)
    adam = updates(gpt.Config.of(**MUON | {"optimizer": "adamw"}, weight_decay=0.0), params=params)
    layers = found["layers"]
    for name, matrix in (
        ("w_q", layers["attention"]["w_qkv"][1, :, :, :-2].reshape(16, -1)),
        ("w_k", layers["attention"]["w_qkv"][1, :, :, -2].reshape(16, -1)),
        ("w_v", layers["attention"]["w_qkv"][1, :, :, -1].reshape(16, -1)),
        ("w_out", layers["attention"]["w_out"][1].reshape(-1, 16)),
        ("gate", layers["mlp"]["w_up"][1, :, 0]),
        ("up", layers["mlp"]["w_up"][1, :, 1]),
        ("w_down", layers["mlp"]["w_down"][1]),
    ):
        values = np.linalg.svd(matrix, compute_uv=False) / (
            0.1 * muon.RMS * max(matrix.shape) ** 0.5
        )
        assert values.max() < 1.4, f"{name}: {values}"
        assert np.mean(values > 0.4) > 0.9, (
            f"{name}: all singular values but the smallest come near 1; got {values}"
        )
    of_adam = lambda tree: {
        "outer": tree["outer"],
        "scales": [tree["layers"][name] for name in ("norm_1", "norm_2")],
    }
    assert_same(of_adam(found), of_adam(adam), within=1e-6)


def test_muon_decays_weights_and_embeddings_by_the_learning_rate():
    plain, decayed = (updates(gpt.Config.of(**MUON, weight_decay=decay)) for decay in (0.0, 0.2))
    for name, share in (("w_up", 0.02), ("tokens", 0.02), ("scale", 0.0)):
        np.testing.assert_allclose(decayed[name] - plain[name], -share * PARAMS[name], atol=1e-6)


@pytest.mark.full
def test_muon_on_a_mesh_gives_the_params_of_one_device():
    """Layers over stages, heads over tensor, momentum over replicas: the matrices are those of one device."""
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    grads = jax.tree.map(lambda leaf: np.asarray(jnp.sin(37 * leaf)), params)
    optimizer = make_optimizer(gpt.Config.of(**MUON))
    want = jit(lambda params: optimizer.update(grads, optimizer.init(params), params)[0])(params)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    on_mesh = shardings(config, mesh)
    state = jaxpar.init_state(
        lambda key: jax.tree.map(jnp.asarray, params),
        jax.random.key(0),
        optimizer,
        mesh,
        on_mesh,
        zero=1,
    )
    found = jax.tree_util.tree_leaves_with_path(state.opt_state)
    momentum = [leaf for path, leaf in found if "w_down" in str(path)]
    assert momentum
    assert all(not leaf.sharding.is_fully_replicated for leaf in momentum)
    step = jaxpar.make_train_step(lambda params, batch: (jnp.float32(0), batch), optimizer)
    new, _ = step(state, jaxpar.shard(grads, on_mesh))
    assert isinstance(new, TrainState)
    got = jax.tree.map(lambda new, old: new - old, jaxpar.fetch(new.params), params)
    assert_same(got, jaxpar.fetch(want), within=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("w_down", (1, 6, 4), lambda weight: weight[0]),
        ("w_qkv", (1, 6, 2, 4, 3), lambda weight: weight[0, :, :, :2].reshape(6, 12)),
        ("w_qkv", (1, 6, 2, 4, 3), lambda weight: weight[0, :, :, 2].reshape(6, 6)),
        ("w_qkv", (1, 6, 2, 4, 3), lambda weight: weight[0, :, :, 3].reshape(6, 6)),
        ("w_out", (1, 4, 3, 6), lambda weight: weight[0].reshape(12, 6)),
        ("w_up", (1, 6, 2, 8), lambda weight: weight[0, :, 1]),
        ("w_expert_up", (1, 2, 6, 8), lambda weight: weight[0, 1]),
    ],
)
def test_muon_is_that_of_optax_for_one_matrix(name, shape, part):
    """Queries are one matrix, also in groups of two beside their key and value."""
    rng = np.random.default_rng(0)
    weight = {name: rng.normal(size=shape).astype(np.float32)}
    own = contrib.muon(0.1, beta=0.95, eps=1e-8, consistent_rms=0.2, weight_decay=0.1)
    optimizer = make_optimizer(gpt.Config.of(**MUON))
    alone = {name: part(weight[name])}
    of_own, of_all = own.init(alone), optimizer.init(weight)
    for _ in range(2):
        grads = {name: rng.normal(size=shape).astype(np.float32)}
        want, of_own = own.update({name: part(grads[name])}, of_own, alone)
        got, of_all = optimizer.update(grads, of_all, weight)
    np.testing.assert_allclose(part(got[name]), want[name], rtol=1e-4, atol=1e-6)


def test_muon_orthogonalizes_the_matrices_of_leading_layers_as_those_of_others():
    params = make_params(FAMILIES["llama"], dtype=np.float32)
    leading = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(2)]
    params |= {"outer": {"dense_layers": leading}}
    optimizer, grads = (
        make_optimizer(gpt.Config.of(**MUON)),
        jax.tree.map(lambda leaf: jnp.sin(37 * leaf), params),
    )
    found = jit(lambda params: optimizer.update(grads, optimizer.init(params), params)[0])(params)
    want = [jax.tree.map(lambda leaf, i=i: leaf[i], found["layers"]) for i in range(2)]
    assert_same(found["outer"]["dense_layers"], want, within=1e-6)


# The flags.


def test_lr_is_the_learning_rate(monkeypatch):
    seen = []
    for flag in ("--lr", "--learning-rate"):
        cli.run(lambda flags: seen.append(flags.common.learning_rate), gpt.Config, [flag, "0.25"])
    assert seen == [0.25, 0.25]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"warmup_steps": -1}, "--warmup-steps must be at least 0; got -1"),
        (
            {"warmup_steps": 300},
            "must be less than --steps; got 300 and 300. Choose --warmup-steps 30, or --steps 301 or more.",
        ),
        (
            {"steps": 6, "warmup_steps": 20},
            "--warmup-steps must be less than --steps; got 20 and 6. Choose --warmup-steps 0, or --steps 21 or more.",
        ),
        (
            {"steps": 16, "warmup_steps": 20, "resume": True, "allow_change": ("learning_rate",)},
            "Choose --warmup-steps 1 --allow-change learning_rate warmup_steps, or --steps 21 or more; --steps is",
        ),
        (
            {"steps": 16, "warmup_steps": 20, "resume": True, "allow_change": ("warmup_steps",)},
            "Choose --warmup-steps 1, or --steps 21 or more; --steps is at least those that the run has done.",
        ),
        ({"beta1": 1.0}, "--beta1 must be from 0 to less than 1; got 1. Choose 0.9"),
        ({"beta2": float("nan")}, "--beta2 must be from 0 to less than 1; got nan"),
        ({"epsilon": 0.0}, "--epsilon must be positive; got 0. Choose 1e-8"),
        ({"weight_decay": -0.1}, "--weight-decay must be 0 or more; got -0.1"),
        (
            {"momentum": 1.0, "optimizer": "muon"},
            "--momentum must be from 0 to less than 1; got 1.",
        ),
        (
            {"momentum": 0.5},
            "--momentum applies to --optimizer sgd and muon; got --optimizer adamw. Leave it out, or",
        ),
        (
            {"beta1": 0.5, "optimizer": "sgd"},
            "--beta1 applies to --optimizer adamw and muon; got --optimizer sgd",
        ),
        (
            {"weight_decay": 0.5, "optimizer": "sgd"},
            "--weight-decay applies to --optimizer adamw and muon; got",
        ),
        (
            {"final_learning_rate": 1.0},
            "--final-learning-rate must be from 0 to --learning-rate; got 1 and 0.003",
        ),
        (
            {"final_learning_rate": 0.0, "learning_rate_schedule": "constant"},
            "--final-learning-rate applies to schedules that fall; got 0 with --learning-rate-schedule constant",
        ),
        (
            {"decay_steps": 5},
            "--decay-steps applies to --learning-rate-schedule wsd; got cosine. Leave it out",
        ),
        (
            {"decay_steps": 290, "learning_rate_schedule": "wsd"},
            "must be from 1 to the --steps after the warmup; got 290, and 280 steps after it. Choose --decay-steps 56.",
        ),
        (
            {"decay_steps": 290, "learning_rate_schedule": "wsd", "resume": True},
            "Choose --decay-steps 56 --allow-change decay_steps.",
        ),
    ],
)
def test_flags_that_do_not_fit_or_have_no_effect_are_refused(flags, message):
    with pytest.raises(ValueError) as refused, given_by(flag_names(gpt.Config)):  # noqa: PT011, it is compared below
        check_optimizer(gpt.Config.of(**flags))
    assert message in str(refused.value)


def test_what_a_resumed_run_must_share_has_new_flags_only_where_they_are_set():
    assert set(optimizers.settings(gpt.Config())) == {
        "optimizer", "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm"
    }  # fmt: skip
    assert optimizers.settings(gpt.Config.of(optimizer="sgd"))["momentum"] == 0.9
    assert optimizers.settings(gpt.Config.of(beta2=0.99))["beta2"] == 0.99
    of_final = lambda final: optimizers.settings(gpt.Config.of(final_learning_rate=final))
    assert of_final(1e-4)["final_learning_rate"] == 1e-4
    assert of_final(3e-4) == optimizers.settings(gpt.Config()), "a tenth is what is taken without"
