"""Training steps that tests compile for GPUs, of a Llama of many layers, and the mark of tests that need the compiler."""

import importlib.metadata
import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar.compile_only import NO_MEASUREMENT
from jaxpar.models import transformer
from jaxpar.params import init_params, stack_layers
from jaxpar.schedule import lockstep_form, make_schedule
from jaxpar.tensor_parallel import TRANSFORMER_RULES

# Sizes that no other dim of an array has, so that a ring is known by them.
NUM_LAYERS, NUM_ROWS, SEQ = 40, 13, 256
NUM_MICROBATCHES = 16


def shape(num_layers=NUM_LAYERS):
    config = transformer.preset("llama-7b", vocab_multiple=128, compute_dtype="bfloat16")
    sizes = {
        "num_layers": num_layers,
        "embed_dim": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_dim": 1024,
        "vocab_size": 1024,
    }
    return transformer.TransformerConfig(**vars(config) | sizes)


def report(
    gpus,
    schedule,
    *,
    data=1,
    stage=4,
    tensor=2,
    num_layers=NUM_LAYERS,
    rows=NUM_ROWS,
    num_microbatches=NUM_MICROBATCHES,
    constrain=None,
    **settings,
):
    """The report on a training step, in which a copy of half a slot of a ring of residuals counts.

    Microbatches of fewer ``rows`` have as many tokens, in longer rows.
    """
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor, devices=list(gpus))
    config = shape(num_layers)
    made = make_schedule(
        schedule, stage, num_microbatches, form=lockstep_form(schedule, masks=True)
    )
    layout = jaxpar.LayerLayout(num_layers, stage, made.num_chunks, placement=made.placement)
    table = transformer.param_table(config)
    packed = table | {
        "layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))
    }
    shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES)
    value_and_grad = jaxpar.value_and_grad(
        transformer.make_model(config, **({"constrain": constrain} if constrain else {})),
        lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"]),
        mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        layout=layout,
        shardings=shardings,
        **settings,
    )
    optimizer = optax.sgd(0.1)
    state = jaxpar.abstract_state(
        lambda key: layout.pack_params(init_params(table, key)),
        jax.random.key(0),
        optimizer,
        mesh,
        shardings,
        zero=settings.get("zero", 0),
    )
    tokens = jax.ShapeDtypeStruct(
        (rows * data * num_microbatches, NUM_ROWS * SEQ // rows), jnp.int32
    )
    batch = jaxpar.abstract_batch({"tokens": tokens, "targets": tokens}, mesh)
    step = jaxpar.make_train_step(value_and_grad, optimizer)
    compiled = step.lower(state, batch).compile()
    return jaxpar.inspect_step(compiled, mesh=mesh, large_bytes=1 << 19)


@dataclass(frozen=True)
class Program:
    """A training step for GPUs, by the arguments of ``report``."""

    schedule: str
    settings: tuple

    @property
    def zero(self):
        return dict(self.settings)["zero"]

    def __str__(self):
        named = [f"{name}={getattr(value, '__name__', value)}" for name, value in self.settings]
        return " ".join([self.schedule, *named])


def program(schedule, **settings):
    return Program(schedule, tuple(settings.items()))


def compiles(*programs, slow=()):
    """The mark of a test of each of these programs, of which ``slow`` are left out unless slow tests are asked for."""
    return pytest.mark.parametrize(
        "program",
        [*programs, *(pytest.param(each, marks=pytest.mark.slow) for each in slow)],
        ids=str,
    )


def has_compiler():
    """Whether CUDA's compiler is installed and XLA, which reads its flags once, has those of `make check-gpu`."""
    try:
        plugin = importlib.metadata.version("jax-cuda12-plugin")
    except importlib.metadata.PackageNotFoundError:
        return False
    return plugin == jax.__version__ and NO_MEASUREMENT in os.environ.get("XLA_FLAGS", "")


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs jaxpar[gpu-compile] and its flags: make check-gpu"
)
