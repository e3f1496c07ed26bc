"""The memory of plans against the compiler for GPUs, on jobs that differ in mesh, schedule, ZeRO level, remat and model.

It needs jaxpar[gpu-compile], which `make check-gpu` installs. `python -m tests.test_planned_memory` prints what each job needs.
"""

import sys

import jax
import optax
import pytest

import jaxpar
from jaxpar.inspect.text import bytes_text
from jaxpar.models.transformer import TransformerConfig
from jaxpar.planner import Choice, cluster, price, transformer_shape
from jaxpar.planner.compiled import compile_choice
from tests.support.gpu_steps import needs_compiler

NODES, GPUS_PER_NODE = 2, 4
SEQ = 512
LLAMA = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "tied": False, "biases": False, "mlp_dim": 1536}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_dim": 1024}
MODELS = {
    "gpt": {},
    "bloom": {"positions": "alibi", "norm_embedding": True},
    "llama": LLAMA | {"num_kv_heads": 4},
    "vocabulary": {"vocab_size": 32768, "num_layers": 4},
    "experts": LLAMA | EXPERTS,
    "experts after two layers": LLAMA | EXPERTS | {"num_layers": 18, "num_dense_layers": 2},
    "experts with room": LLAMA | EXPERTS | {"expert_buffer": 1.0},
}
# model, rows of a microbatch, choice
JOBS = [
    ("gpt", 4, Choice(data=8)),
    ("gpt", 4, Choice(data=8, num_microbatches=4, zero=1, remat=True)),
    ("llama", 2, Choice(data=8, num_microbatches=2, zero=3)),
    ("llama", 4, Choice(data=2, tensor=4, num_microbatches=4, zero=2, remat="dots")),
    ("vocabulary", 2, Choice(data=4, tensor=2, num_microbatches=8, zero=1)),
    ("llama", 4, Choice(stage=4, tensor=2, num_microbatches=16)),
    ("gpt", 4, Choice(stage=8, num_microbatches=32, remat=True)),
    ("bloom", 2, Choice(data=2, stage=2, tensor=2, schedule="zb-h1", num_microbatches=8, zero=1)),
    ("llama", 2, Choice(data=2, stage=4, schedule="interleaved", num_chunks=2, num_microbatches=8, zero=1)),
    ("gpt", 2, Choice(stage=4, tensor=2, schedule="zb-v", num_chunks=2, num_microbatches=8)),
    ("llama", 2, Choice(data=4, stage=2, schedule="gpipe", num_microbatches=4, zero=2, remat=True)),
    ("vocabulary", 2, Choice(data=2, stage=4, num_microbatches=8, zero=3, remat="dots")),
    # As many microbatches as stages: idle stages write to one slot more. Chunks of one layer: no ring under remat.
    ("gpt", 4, Choice(stage=8, num_microbatches=8)),
    ("llama", 4, Choice(stage=8, schedule="interleaved", num_chunks=2, num_microbatches=8, remat=True)),
    # Gradients that are reduced late, which with two chunks needs no more memory.
    ("gpt", 1, Choice(data=2, stage=4, num_microbatches=16, zero=3, remat=True)),
    ("gpt", 1, Choice(data=2, stage=4, schedule="interleaved", num_chunks=2, num_microbatches=16, zero=3, remat=True)),
    ("experts", 4, Choice(data=2, tensor=4, num_microbatches=4, zero=1)),
    ("experts with room", 4, Choice(data=4, stage=2, num_microbatches=8, zero=1, experts="data")),
    ("experts after two layers", 4, Choice(stage=2, tensor=4, num_microbatches=8)),
    ("llama, sequence parallel", 4, Choice(stage=2, tensor=4, num_microbatches=8)),
]


pytestmark = needs_compiler


def shape_of(model):
    sizes = {"num_layers": 16, "embed_dim": 512, "num_heads": 8, "vocab_size": 4096, "max_positions": SEQ}
    name, _, parallel = model.partition(", ")
    config = TransformerConfig(**sizes | MODELS[name], compute_dtype="bfloat16")
    return transformer_shape(config, sequence_parallel=bool(parallel))


def needed(model, rows, choice):
    """The plan of a job, and the memory that the compiler says."""
    shape, batch_size = shape_of(model), rows * choice.data * choice.num_microbatches
    plan = price(shape, cluster("h100", NODES, GPUS_PER_NODE), choice, batch_size=batch_size)
    gpus = jaxpar.compile_only_devices("h100", num_nodes=NODES, devices_per_node=GPUS_PER_NODE)
    mesh = jaxpar.make_mesh(data=choice.data, stage=choice.stage, tensor=choice.tensor, devices=list(gpus))
    _, report = compile_choice(shape, choice, mesh, optax.adam(1e-4), batch_size)
    return plan, report.memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rows", "choice"), [pytest.param(*job, id=f"{i}-{job[0]}") for i, job in enumerate(JOBS)]
)
def test_a_plan_is_within_a_tenth_of_the_compilers_memory(model, rows, choice):
    plan, memory = needed(model, rows, choice)
    assert 0.9 < plan.memory_bytes / memory.total_bytes < 1.1, (plan.bytes_per_device, memory)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for index in map(int, sys.argv[1:] or range(len(JOBS))):
        plan, memory = needed(*JOBS[index])
        ratio = plan.memory_bytes / memory.total_bytes - 1
        sizes = {kind: bytes_text(size) for kind, size in plan.bytes_per_device.items()}
        print(index, f"{ratio:+.1%}", bytes_text(memory.total_bytes), sizes, memory, flush=True)
