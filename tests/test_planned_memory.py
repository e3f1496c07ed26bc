"""The memory of plans against the compiler for GPUs, on jobs that differ in mesh, schedule, ZeRO level, remat and model.

Each job has the memory of its compiled step as it was recorded. Compiling them again needs jaxpar[gpu-compile], which
`make check-gpu` installs. `python -m tests.test_planned_memory` prints what each job needs.
"""

import functools
import sys
from dataclasses import replace

import jax
import optax
import pytest

import jaxpar
from jaxpar.inspect.text import bytes_text
from jaxpar.models.lora import Lora
from jaxpar.models.quantized import KINDS
from jaxpar.models.transformer import LAYER_WEIGHTS, Experts, TransformerConfig
from jaxpar.planner import Choice, cluster, price, transformer_shape
from jaxpar.planner.compiled import compile_choice
from tests.support.gpu_steps import needs_compiler

NODES, GPUS_PER_NODE = 2, 4
SEQ = 512
LLAMA = {
    "norm": "rms",
    "positions": "rope",
    "mlp": "swiglu",
    "tied": False,
    "biases": False,
    "mlp_dim": 1536,
}
EXPERTS = Experts(count=8, per_token=2, mlp_dim=1024)
MODELS = {
    "gpt": {},
    "bloom": {"positions": "alibi", "norm_embedding": True},
    "llama": LLAMA | {"num_kv_heads": 4},
    "vocabulary": {"vocab_size": 32768, "num_layers": 4},
    "wide": LLAMA
    | {"embed_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 14336, "num_layers": 4},
    "experts": LLAMA | {"experts": EXPERTS},
    "experts after two layers": LLAMA
    | {"experts": replace(EXPERTS, num_dense_layers=2), "num_layers": 18},
    "experts with room": LLAMA | {"experts": replace(EXPERTS, buffer=1.0)},
}
# model, rows of a microbatch, choice, MiB of the step that jax 0.10.2 compiles (0.12.0.1 where one stage runs microbatches in
# turn, or one alone)
JOBS = [
    ("gpt", 4, Choice(data=8), 1634),
    ("gpt", 4, Choice(data=8, num_microbatches=4, zero=1, remat=True), 677),
    ("llama", 2, Choice(data=8, num_microbatches=2, zero=3), 619),
    ("llama", 4, Choice(data=2, tensor=4, num_microbatches=4, zero=2, remat="dots"), 335),
    ("vocabulary", 2, Choice(data=4, tensor=2, num_microbatches=8, zero=1), 282),
    ("llama", 4, Choice(stage=4, tensor=2, num_microbatches=16), 1057),
    ("gpt", 4, Choice(stage=8, num_microbatches=32, remat=True), 409),
    (
        "bloom",
        2,
        Choice(data=2, stage=2, tensor=2, schedule="zb-h1", num_microbatches=8, zero=1),
        674,
    ),
    (
        "llama",
        2,
        Choice(data=2, stage=4, schedule="interleaved", num_chunks=2, num_microbatches=8, zero=1),
        877,
    ),
    ("gpt", 2, Choice(stage=4, tensor=2, schedule="zb-v", num_chunks=2, num_microbatches=8), 485),
    (
        "llama",
        2,
        Choice(data=4, stage=2, schedule="gpipe", num_microbatches=4, zero=2, remat=True),
        531,
    ),
    ("vocabulary", 2, Choice(data=2, stage=4, num_microbatches=8, zero=3, remat="dots"), 362),
    # As many microbatches as stages: idle stages write to one slot more. Chunks of one layer: no ring under remat.
    ("gpt", 4, Choice(stage=8, num_microbatches=8), 1227),
    (
        "llama",
        4,
        Choice(stage=8, schedule="interleaved", num_chunks=2, num_microbatches=8, remat=True),
        331,
    ),
    # Gradients that are reduced late, which with two chunks needs no more memory.
    ("gpt", 1, Choice(data=2, stage=4, num_microbatches=16, zero=3, remat=True), 250),
    (
        "gpt",
        1,
        Choice(
            data=2,
            stage=4,
            schedule="interleaved",
            num_chunks=2,
            num_microbatches=16,
            zero=3,
            remat=True,
        ),
        219,
    ),
    ("experts", 4, Choice(data=2, tensor=4, num_microbatches=4, zero=1), 1343),
    (
        "experts with room",
        4,
        Choice(data=4, stage=2, num_microbatches=8, zero=1, experts="data"),
        2284,
    ),
    ("experts after two layers", 4, Choice(stage=2, tensor=4, num_microbatches=8), 1414),
    ("llama, sequence parallel", 4, Choice(stage=2, tensor=4, num_microbatches=8), 486),
    # Layers so wide that their gradients, which wait for their reduction, are a large part.
    ("wide", 1, Choice(data=8, zero=3, remat=True), 3920),
    ("wide", 1, Choice(data=8, num_microbatches=2, zero=3, remat=True), 4408),
    ("wide", 1, Choice(data=8, zero=2, remat=True), 8496),
    ("wide", 1, Choice(data=8, zero=3), 4059),
    ("wide", 1, Choice(data=8, num_microbatches=2, zero=1), 9915),
    ("wide", 1, Choice(data=8, num_microbatches=4, zero=2, remat=True), 8464),
    ("vocabulary", 4, Choice(data=8, num_microbatches=4, zero=3), 540),
    # Factors beside weights in four bits (jax 0.12.0.1).
    ("llama, nf4", 4, Choice(data=4, tensor=2, remat=True), 138),
    ("llama, nf4-dq", 4, Choice(data=2, stage=2, tensor=2, num_microbatches=4), 827),
    # Params that are gathered after the update, beside the old ones.
    ("wide", 1, Choice(data=8, zero=1), 8464),
    ("wide", 1, Choice(data=2, tensor=4, zero=1), 3776),
    ("vocabulary", 1, Choice(data=4, tensor=2, num_microbatches=8, zero=2), 216),
    # A third of the layers have no copies in bfloat16.
    ("llama", 2, Choice(data=8, num_microbatches=8, zero=2), 834),
]
QUICK = (
    1,
    3,
    7,
    8,
    12,
    14,
    17,
    19,
    21,
    27,
)  # each model, schedule, level of ZeRO and form of recomputation


@functools.cache  # which keeps what is traced
def shape_of(model):
    sizes = {
        "num_layers": 16,
        "embed_dim": 512,
        "num_heads": 8,
        "vocab_size": 4096,
        "max_positions": SEQ,
    }
    name, _, how = model.partition(", ")
    config = TransformerConfig(**sizes | MODELS[name], compute_dtype="bfloat16")
    if how in KINDS:
        return transformer_shape(config, lora=Lora(8, LAYER_WEIGHTS), quantize=how)
    return transformer_shape(config, sequence_parallel=bool(how))


def planned(model, rows, choice):
    """The plan of a job."""
    batch_size = rows * choice.data * choice.num_microbatches
    return price(
        shape_of(model), cluster("h100", NODES, GPUS_PER_NODE), choice, batch_size=batch_size
    )


def compiled(model, rows, choice):
    """The memory of a job that the compiler says."""
    shape, batch_size = shape_of(model), rows * choice.data * choice.num_microbatches
    gpus = jaxpar.compile_only_devices("h100", num_nodes=NODES, devices_per_node=GPUS_PER_NODE)
    mesh = jaxpar.make_mesh(
        data=choice.data, stage=choice.stage, tensor=choice.tensor, devices=list(gpus)
    )
    _, report = compile_choice(shape, choice, mesh, optax.adam(1e-4), batch_size)
    return report.memory


of_jobs = pytest.mark.parametrize(
    ("model", "rows", "choice", "recorded"),
    [
        pytest.param(*job, id=f"{i}-{job[0]}", marks=() if i in QUICK else pytest.mark.full)
        for i, job in enumerate(JOBS)
    ],
)


@of_jobs
def test_a_plan_is_within_a_tenth_of_the_memory_that_was_recorded(model, rows, choice, recorded):
    plan = planned(model, rows, choice)
    assert 0.9 < plan.memory_bytes / 2**20 / recorded < 1.1, plan.bytes_per_device


@needs_compiler
@pytest.mark.slow
@of_jobs
def test_a_plan_is_within_a_tenth_of_the_compilers_memory(model, rows, choice, recorded):
    plan, memory = planned(model, rows, choice), compiled(model, rows, choice)
    assert 0.9 < plan.memory_bytes / memory.total_bytes < 1.1, (
        plan.bytes_per_device,
        memory,
        f"{recorded=}",
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for index in map(int, sys.argv[1:] or range(len(JOBS))):
        *job, recorded = JOBS[index]
        plan, memory = planned(*job), compiled(*job)
        ratio = plan.memory_bytes / memory.total_bytes - 1
        sizes = {kind: bytes_text(size) for kind, size in plan.bytes_per_device.items()}
        found = f"{memory.total_bytes / 2**20:.0f} MiB, recorded {recorded}"
        print(index, f"{ratio:+.1%}", found, sizes, memory, flush=True)
