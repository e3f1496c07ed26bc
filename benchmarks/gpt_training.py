"""The training steps that gpu_day.py measures: transformers with AdamW on one device, and their rates.

MFU: (6 * parameters + 12 * layers * heads * head_dim * sequence) * tokens/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix
B, without subtracting the causal half of attention) over the datasheet's dense bfloat16 peak. Of experts those count that a
token uses; frozen parameters count 4 times, since they get no gradients.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GIB = 2**30
# NVIDIA's datasheets, dense bfloat16.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
OPTIMIZER = {"learning_rate": 3e-4, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
CHECKED_STEPS = 3


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        title: The model in words.
        model: A preset's name.
        seq: Tokens of a row.
        batch_size: Rows of a step.
        changes: Fields of the configuration that differ from the preset.
        documents: The most documents of a row; 0: each row is one.
        lora_rank: The rank of factors that are trained in place of the parameters, which are in bfloat16; 0: none.
        smoke: Whether it is made tiny, to run on any machine.
    """

    title: str = "Llama of 1.1B"
    model: str = "tinyllama-1.1b"
    seq: int = 4096
    batch_size: int = 4
    changes: tuple[tuple[str, Any], ...] = ()
    documents: int = 0
    lora_rank: int = 0
    smoke: bool = False

    @property
    def job(self) -> str:
        """The model and its rows in words."""
        rows = f"{self.batch_size} rows" if self.batch_size > 1 else "one row"
        return f"{self.title}, {rows} of {self.seq:,} tokens{', made tiny' if self.smoke else ''}"


IN_DOCUMENTS = " with 8 documents in each row"
WORKS = {
    "llama": Work(),
    "documents": Work(f"Llama of 1.1B{IN_DOCUMENTS}", documents=8),
    "lora": Work(
        "Llama 3.1 8B in bfloat16 with LoRA of rank 16", "llama3.1-8b", batch_size=2, lora_rank=16
    ),
    "gpt2": Work("GPT-2 of 124M", "gpt2", 1024, 32, (("vocab_multiple", 128),)),
    "experts": Work(
        "Four layers of OLMoE 7B, 64 experts", "olmoe-1b-7b", changes=(("num_layers", 4),)
    ),
    "wide": Work(
        "Three layers of Llama 3 70B and 32,768 words",
        "llama3-70b",
        seq=8192,
        batch_size=1,
        changes=(("num_layers", 3), ("vocab_size", 32_768)),
    ),
}
TINY = {"seq": 32, "batch_size": 2}
TINY_SHAPE = {
    "vocab_size": 256,
    "max_positions": 64,
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "mlp_dim": 64,
}
TINY_EXPERTS = {"count": 4, "per_token": 2, "mlp_dim": 32}


def make_shape(work: Work, **changes: Any) -> Any:
    """Returns the model's configuration, with some fields changed; a smoke run gets a tiny one of the same kind."""
    import jaxpar
    from jaxpar.models import transformer

    most = work.documents or None
    if work.smoke:
        published = transformer.preset(work.model)
        shared = {} if published.num_kv_heads is None else {"num_kv_heads": 2}
        tiny = TINY_SHAPE | shared | {"max_documents": most}
        tiny |= {k: v for k, v in changes.items() if k == "num_layers"}
        small = published if published.experts is None else published.with_experts(**TINY_EXPERTS)
        return dataclasses.replace(small, **tiny)
    changes = (
        {"attention": jaxpar.flash_attention, "max_documents": most} | dict(work.changes) | changes
    )
    return transformer.preset(work.model, compute_dtype="bfloat16", **changes)


def make_batch(work: Work, shape: Any) -> dict:
    """Returns random tokens, and as targets the tokens one position later: the same batch in every step."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, shape.vocab_size, (work.batch_size, work.seq + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
    if work.documents:  # of random lengths
        segments = rng.integers(0, work.documents, batch["tokens"].shape)
        batch["segments"] = np.sort(segments, 1).astype(np.int32)
    return batch


def loss(logits: Any, batch: dict) -> tuple[Any, Any]:
    import jaxpar

    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


class Model:
    """A model and its gradients on a mesh of one device, by jaxpar and by plain JAX with the same rematerialisation."""

    def __init__(self, shape: Any, mesh: Any, remat: str = "none", lora_rank: int = 0) -> None:
        import jaxpar
        from jaxpar.backward.remat import REMAT
        from jaxpar.models import transformer
        from jaxpar.models.lora import ADAPTERS, Lora

        self.table, self.mesh, self.policy = transformer.param_table(shape), mesh, REMAT[remat]
        self.num_params = transformer.num_active_params(shape)
        self.model, self.loss = transformer.make_model(shape), loss
        if shape.experts is not None:
            self.loss = transformer.add_routing_losses(shape, loss)
        self.lora = (
            Lora(lora_rank, transformer.LAYER_WEIGHTS, 2.0 * lora_rank) if lora_rank else None
        )
        trainable = None if self.lora is None else ADAPTERS
        self.parallel = jaxpar.Parallel(mesh, self.shardings(), trainable=trainable)
        self.value_and_grad = jaxpar.value_and_grad(
            self.model, self.loss, self.parallel, remat=self.policy
        )

    @property
    def plain_value_and_grad(self) -> Callable[[Any, Any], Any]:
        """``jax.value_and_grad``, of layers in ``jax.checkpoint`` where there is a rematerialisation."""
        import jax

        policy = None if self.policy is True else self.policy
        wrap = lambda layer: jax.checkpoint(layer, policy=policy)
        plain = self.model if self.policy is False else self.model.wrap_layers(wrap)

        def mean(params: Any, batch: Any) -> jax.Array:
            total, weight = self.loss(plain.apply(params, batch), batch)
            return total / weight

        return jax.value_and_grad(mean)

    def init(self, key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        from jaxpar.params import init_params

        params = init_params(self.table, key)
        if self.lora is None:
            return params
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return self.lora.init(jax.random.fold_in(key, 1), narrow)

    def shardings(self) -> Any:
        import jaxpar
        from jaxpar.tensor_parallel import TRANSFORMER_RULES

        found = jaxpar.shardings_from_dims(self.table, self.mesh, TRANSFORMER_RULES)
        return found if self.lora is None else self.lora.shardings(found)

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

    def __init__(self, work: Work, remat: str = "none", *, plain: bool = False) -> None:
        import jax

        import jaxpar

        self.work, self.shape = work, make_shape(work)
        mesh = jaxpar.make_mesh(devices=jax.devices()[:1])
        super().__init__(self.shape, mesh, remat, work.lora_rank)
        self.batch = jaxpar.shard_batch(make_batch(work, self.shape), mesh)
        optimizer, step = self.train_step(plain=plain)
        self.state = jaxpar.init_state(self.init, jax.random.key(0), optimizer, self.parallel)
        start = time.perf_counter()
        self.step = step.lower(self.state, self.batch).compile()
        self.facts: dict[str, Any] = {"first compile s": time.perf_counter() - start}

    def host_params(self) -> dict:
        import jax

        import jaxpar

        leaves = jax.tree_util.tree_leaves_with_path(jaxpar.fetch(self.state.params))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
        }

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
    work: Work, shape: Any, num_params: int, step_seconds: float, device_kind: str
) -> dict[str, Any]:
    """Returns the rates and the MFU for a step's time on a device of this kind."""
    tokens_per_second = work.batch_size * work.seq / step_seconds
    of_attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * work.seq
    flops_per_token = (4 if work.lora_rank else 6) * num_params + of_attention
    flops = flops_per_token * tokens_per_second
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)
    found = {"ms a step": step_seconds * 1e3, "tokens/s": tokens_per_second}
    return found | {"TFLOP/s": flops / 1e12, "MFU": "unknown" if peak is None else flops / peak}
