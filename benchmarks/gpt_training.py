"""The training steps that gpt_gpu.py and gpu_day.py measure: a Llama with AdamW on one device, and its rates.

MFU: (6 * parameters + 12 * layers * width * sequence) * tokens/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B,
without subtracting the causal half of attention) over the datasheet's dense bfloat16 peak.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import report

GIB = 2**30
# NVIDIA's datasheets, dense bfloat16.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
OPTIMIZER = {"learning_rate": 3e-4, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
TINY = {"model": "llama-bytes", "seq": 32, "batch_size": 2}
CHECKED_STEPS = 3


@dataclass(frozen=True)
class Work(report.Options):
    """What is trained."""

    model: str = "tinyllama-1.1b"
    """A Llama by its preset's name."""
    seq: int = 4096
    """Tokens of a row."""
    batch_size: int = 4
    """Rows of a step."""
    peak_tflops: float | None = None
    """Peak of the device in dense bfloat16; None: by its name."""


def make_shape(work: Work, **changes: Any) -> Any:
    """Returns the model's configuration, with some fields changed; a smoke run gets a tiny one."""
    from jaxpar.models import transformer

    if work.smoke:
        return transformer.preset(work.model, num_layers=changes.get("num_layers", 2), embed_dim=32, mlp_dim=64)
    shape = transformer.preset(work.model, compute_dtype="bfloat16", attention="cudnn")
    if (shape.norm, shape.positions, shape.mlp, shape.biases) != ("rms", "rope", "swiglu", False):
        raise SystemExit(f"--model must be a Llama, which is what the PyTorch side is; got {work.model}")
    return dataclasses.replace(shape, **changes)


def make_batch(work: Work, shape: Any) -> dict:
    """Returns random tokens, and as targets the tokens one position later: the same batch in every step."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, shape.vocab_size, (work.batch_size, work.seq + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def loss(logits: Any, batch: dict) -> tuple[Any, Any]:
    import jaxpar

    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


class Model:
    """A model and its gradients on a mesh of one device, by jaxpar and by plain JAX with the same rematerialisation."""

    def __init__(self, shape: Any, mesh: Any, remat: str = "none") -> None:
        import jax

        import jaxpar
        from jaxpar.backward.remat import REMAT
        from jaxpar.models import transformer
        from jaxpar.params import count_params

        self.table, self.mesh = transformer.param_table(shape), mesh
        self.num_params, self.model = count_params(self.table), transformer.make_model(shape)
        policy = REMAT[remat]
        self.value_and_grad = jaxpar.value_and_grad(self.model, loss, mesh, remat=policy)
        wrap = lambda layer: jax.checkpoint(layer, policy=None if policy is True else policy)
        plain = self.model if policy is False else self.model.wrap_layers(wrap)

        def mean(params: Any, batch: Any) -> jax.Array:
            total, weight = loss(plain.apply(params, batch), batch)
            return total / weight

        self.plain_value_and_grad = jax.value_and_grad(mean)

    def init(self, key: Any) -> Any:
        from jaxpar.params import init_params

        return init_params(self.table, key)

    def shardings(self) -> Any:
        import jaxpar
        from jaxpar.tensor_parallel import TRANSFORMER_RULES

        return jaxpar.shardings_from_dims(self.table, self.mesh, TRANSFORMER_RULES)

    def train_step(self, *, plain: bool = False) -> tuple[Any, Any]:
        """Returns AdamW, and a training step with it."""
        import optax

        import jaxpar

        b1, b2 = OPTIMIZER["betas"]
        rate, decay = OPTIMIZER["learning_rate"], OPTIMIZER["weight_decay"]
        optimizer = optax.adamw(rate, b1, b2, OPTIMIZER["epsilon"], weight_decay=decay)
        gradients = self.plain_value_and_grad if plain else self.value_and_grad
        return optimizer, jaxpar.make_train_step(gradients, optimizer)


class Ours(Model):
    """A compiled training step in JAX and its state. With ``plain`` the gradients are those of ``jax.value_and_grad``."""

    def __init__(self, shape: Any, batch: dict, remat: str, *, plain: bool = False) -> None:
        import jax

        import jaxpar

        super().__init__(shape, jaxpar.make_mesh(devices=jax.devices()[:1]), remat)
        self.batch = jaxpar.shard_batch(batch, self.mesh)
        optimizer, step = self.train_step(plain=plain)
        self.state = jaxpar.init_state(self.init, jax.random.key(0), optimizer, self.mesh, self.shardings())
        start = time.perf_counter()
        self.step = step.lower(self.state, self.batch).compile()
        self.facts: dict[str, Any] = {"first compile s": time.perf_counter() - start}

    def host_params(self) -> dict:
        import jax

        import jaxpar

        leaves = jax.tree_util.tree_leaves_with_path(jaxpar.fetch(self.state.params))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    def train(self, count: int) -> list[float]:
        """Runs ``count`` steps, dispatched one after the other, and returns their losses."""
        losses = []
        for _ in range(count):
            self.state, metrics = self.step(self.state, self.batch)
            losses.append(metrics["loss"])
        return [float(loss) for loss in losses]

    def note_peak(self) -> None:
        """Records the peak of memory so far, as the device reports it, or the compiler's plan if it reports none."""
        self.facts["peak GiB"] = (device_peak() or planned_bytes(self.step)) / GIB


def device_peak() -> int | None:
    """Returns the most bytes that this process had on the first device so far; None where the device does not say."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def planned_bytes(compiled: Any) -> int:
    """Returns the bytes that the compiler planned for a program."""
    planned = compiled.memory_analysis()
    size = planned.argument_size_in_bytes + planned.temp_size_in_bytes
    return size + planned.output_size_in_bytes - planned.alias_size_in_bytes


def figures(
    work: Work, shape: Any, num_params: int, step_seconds: float, *, device_kind: str | None = None
) -> dict[str, Any]:
    """Returns the rates and the MFU for a step's time; by default of JAX's first device."""
    tokens_per_second = work.batch_size * work.seq / step_seconds
    flops_per_token = 6 * num_params + 12 * shape.num_layers * shape.embed_dim * work.seq
    flops = flops_per_token * tokens_per_second
    peak = peak_flops(work, device_kind)
    found = {"ms a step": step_seconds * 1e3, "tokens/s": tokens_per_second}
    return found | {"TFLOP/s": flops / 1e12, "MFU": "unknown" if peak is None else flops / peak}


def peak_flops(work: Work, device_kind: str | None = None) -> float | None:
    import jax

    if work.peak_tflops is not None:
        return work.peak_tflops * 1e12
    kind = device_kind or jax.devices()[0].device_kind
    return next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)
