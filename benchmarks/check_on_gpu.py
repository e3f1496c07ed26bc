"""Checks that what jaxpar computes on this machine's GPU is right: `make check-on-gpu`, on a machine that has one.

    python benchmarks/check_on_gpu.py                 on a GPU, a few minutes
    python benchmarks/check_on_gpu.py --part 0/3      a third of the checks, so that three processes can share the GPU
    python benchmarks/check_on_gpu.py --small         tiny cases, on any machine

Losses and gradients against plain JAX on the same device: of microbatches, of the executor of pipelines in each form, of
experts by the kernel for GPUs, of attention by cuDNN with documents and windows, of the chunks of a context axis. Then tokens
from a cache against those of full passes, and a checkpoint. One line for each check; a failure stops no other, and the exit
code is 1. It needs no network, no pytest and no tyro, and pydantic for the checkpoint alone, which is left out without it.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

CANNOT_RUN = 77  # as the benchmarks
MEMORY = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
EXACT, ROUNDED = 1e-5, 3e-2  # how far off results may be in float32, and in bfloat16
ROWS = 8
# Schedule, chunks, form, and whether idle ops are masked.
EXECUTORS = (
    ("1f1b", 1, "fused", True),
    ("1f1b", 1, "merged", True),
    ("interleaved", 4, "merged", True),
    ("zb-h1", 1, "fused", True),
    ("1f1b", 1, "unit", False),
    ("gpipe", 1, "fused", True),
)


@dataclass(frozen=True)
class Check:
    """A check: ``run()`` returns how far off the result is, which must be at most ``limit``."""

    name: str
    limit: float
    run: Callable[[], float]


@dataclass(frozen=True)
class Sizes:
    """The model of the checks, a small Llama."""

    embed: int = 512
    heads: int = 8
    layers: int = 4
    seq: int = 512
    expert_dim: int = 256


SMALL = Sizes(embed=64, seq=32, expert_dim=64)


def main(args: argparse.Namespace) -> int:
    """Runs the checks, and returns the exit code."""
    if all(name in os.environ for name in MEMORY):
        print(
            f"{' and '.join(MEMORY)} must not both be set: JAX then stays off the GPU. Unset {MEMORY[1]}."
        )
        return 2
    import jax

    import jaxpar
    from jaxpar.devices import started_devices

    jaxpar.initialize()
    on_gpu = started_devices()[0].platform == "gpu"
    if not on_gpu and not args.small:
        print(
            "check_on_gpu.py needs a GPU, and there is none here: nothing was checked; --small tries it on any machine"
        )
        return CANNOT_RUN
    part, parts = args.part
    chosen = list(checks(SMALL if args.small else Sizes(), on_gpu))[part::parts]
    with jax.default_matmul_precision("highest"):
        failed = [check.name for check in chosen if not holds(check)]
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} hold{'' if not failed else '; not: ' + '; '.join(failed)}"
    )
    return 1 if failed else 0


def holds(check: Check) -> bool:
    """Runs a check, and prints a line about it."""
    began = time.time()
    try:
        off = check.run()
        is_right = off <= check.limit
        text = f"{'holds' if is_right else 'FAILS'}: {off:.2g}, at most {check.limit:g}"
    except Exception as error:  # the others are run all the same
        traceback.print_exc()
        is_right, text = (
            False,
            f"FAILS: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
        )
    print(f"{check.name}: {text}; {time.time() - began:.0f} s", flush=True)
    return is_right


def checks(sizes: Sizes, on_gpu: bool) -> Iterator[Check]:
    """Yields all checks; those of cuDNN's kernels need a GPU."""
    for settings in ({}, {"num_microbatches": 4}, {"num_microbatches": 4, "remat": True}):
        yield Check(
            f"value_and_grad {settings or ''}".strip(), EXACT, partial(of_step, sizes, settings)
        )
    for executor in EXECUTORS:
        words = "{}, {} chunks, {}, masks {}".format(*executor)
        yield Check(f"executor {words}", EXACT, partial(of_executor, sizes, executor))
    yield Check("experts in tiles, float32", 10 * EXACT, partial(of_experts, sizes, {}))
    yield Check(
        "experts with a capacity, float32",
        10 * EXACT,
        partial(of_experts, sizes, {"capacity_factor": 1.5}),
    )
    yield Check(
        "experts in tiles, bfloat16, over plain JAX's error",
        1.5,
        partial(of_narrow_experts, sizes),
    )
    if on_gpu:
        yield from of_kernels(sizes)
    yield Check("cached tokens", 0.0, partial(of_cache, sizes))
    if importlib.util.find_spec("pydantic") is None:
        print("left out: a checkpoint, which needs pydantic")
    else:
        yield Check("a checkpoint", 0.0, partial(of_checkpoint, sizes))


def of_kernels(sizes: Sizes) -> Iterator[Check]:
    """Yields the checks of cuDNN's attention in bfloat16, whose documents are parted by a bias or by where they lie."""
    for most in (None, 4):
        for changes in ({}, {"window": 100}, {"num_kv_heads": 2}):
            name = f"cuDNN's attention, documents by {'a bias' if most is None else 'their places'} {changes or ''}"
            given = changes | {"max_documents": most}
            yield Check(name.strip(), ROUNDED, partial(of_documents, sizes, given))
    yield Check("attention of chunks of a context", ROUNDED, of_chunks)


# Models ----------------------------------------------------------------------------------------------------------------------


def shape_of(sizes: Sizes, **changes: Any) -> Any:
    from jaxpar.models import transformer

    widths = {"embed_dim": sizes.embed, "num_heads": sizes.heads, "num_layers": sizes.layers}
    return dataclasses.replace(transformer.preset("llama-bytes"), **widths | changes)


@cache
def job(sizes: Sizes, shape: Any) -> tuple[Any, Any, Callable, dict[str, Any]]:
    """Returns params, a model, its loss, and a batch."""
    import jax
    import jax.numpy as jnp
    from gpt_training import loss

    from jaxpar.models import transformer
    from jaxpar.params import init_params

    table = transformer.param_table(shape)
    params = jax.jit(lambda key: init_params(table, key))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (ROWS, sizes.seq), 0, 256)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    with_routing = loss if shape.experts is None else transformer.add_routing_losses(shape, loss)
    return params, transformer.make_model(shape), with_routing, batch


def one_device() -> Any:
    import jax

    import jaxpar

    return jaxpar.make_mesh(devices=jax.devices()[:1])


def by_jaxpar(model: Any, loss: Callable, **settings: Any) -> Callable:
    import jax

    import jaxpar

    return jax.jit(jaxpar.value_and_grad(model, loss, one_device(), **settings))


def by_jax(model: Any, loss: Callable) -> Callable:
    import jax

    def mean(params: Any, batch: Any) -> Any:
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


@cache
def right(sizes: Sizes, shape: Any) -> tuple[Any, Any]:
    """Returns loss and gradients by plain JAX."""
    params, model, loss, batch = job(sizes, shape)
    return by_jax(model, loss)(params, batch)


def off_by(found: Any, expected: Any) -> float:
    """Returns how far any array of a tree is from the expected one: the norm of the difference over the norm."""
    import jax
    import numpy as np

    def of_array(a: Any, b: Any) -> float:
        wide, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(wide - right) / max(np.linalg.norm(right), 1e-30))

    offs = jax.tree.map(of_array, jax.device_get(found), jax.device_get(expected))
    worst = np.max(jax.tree.leaves(offs))  # NaN if one is
    return float(worst)


# Checks ----------------------------------------------------------------------------------------------------------------------


def of_step(sizes: Sizes, settings: dict[str, Any]) -> float:
    params, model, loss, batch = job(sizes, shape_of(sizes))
    return off_by(by_jaxpar(model, loss, **settings)(params, batch), right(sizes, shape_of(sizes)))


def of_executor(sizes: Sizes, executor: tuple[str, int, str, bool]) -> float:
    import jax
    from gpu_day_parts.pipelines import through_executor

    params, model, _, batch = job(sizes, shape_of(sizes))
    run = jax.jit(through_executor(model, sizes.layers, one_device(), *executor))
    return off_by(run(params, batch), right(sizes, shape_of(sizes)))


def experts(
    sizes: Sizes, products: str, capacity_factor: float | None = None, **changes: Any
) -> Any:
    from jaxpar.models.transformer import Experts

    of_experts = Experts(
        count=8,
        mlp_dim=sizes.expert_dim,
        balance_coefficient=0.01,
        capacity_factor=capacity_factor,
        products=products,
    )
    return shape_of(sizes, experts=of_experts, **changes)


def of_experts(sizes: Sizes, changes: dict[str, Any]) -> float:
    """By tiles against ``ragged_dot``; with a capacity there is one form alone."""
    tiles, ragged = ("auto", "auto") if changes else ("tiles", "ragged")
    params, model, loss, batch = job(sizes, experts(sizes, tiles, **changes))
    return off_by(
        by_jaxpar(model, loss)(params, batch), right(sizes, experts(sizes, ragged, **changes))
    )


def of_narrow_experts(sizes: Sizes) -> float:
    """Returns the error of bfloat16 over that of plain JAX in bfloat16, both against float32."""
    narrow = {"compute_dtype": "bfloat16"}
    params, model, loss, batch = job(sizes, experts(sizes, "tiles", **narrow))
    wide, plain = (
        right(sizes, experts(sizes, "ragged")),
        right(sizes, experts(sizes, "ragged", **narrow)),
    )
    return off_by(by_jaxpar(model, loss)(params, batch), wide) / off_by(plain, wide)


def of_documents(sizes: Sizes, changes: dict[str, Any]) -> float:
    import jax.numpy as jnp
    import numpy as np

    import jaxpar

    narrow = {"compute_dtype": "bfloat16"} | changes
    params, model, loss, batch = job(
        sizes, shape_of(sizes, attention=jaxpar.flash_attention, **narrow)
    )
    _, written_out, _, _ = job(sizes, shape_of(sizes, attention="xla", **narrow))
    segments = np.random.default_rng(0).integers(0, 4, batch["tokens"].shape)
    batch = batch | {"segments": jnp.asarray(np.sort(segments, 1), jnp.int32)}
    return off_by(by_jaxpar(model, loss)(params, batch), by_jax(written_out, loss)(params, batch))


def of_chunks(contexts: int = 4, seq: int = 2048) -> float:
    """Attention of what each device of a context axis computes, one after another, and its gradients."""
    import jax
    import jax.numpy as jnp

    keys, heads = jax.random.split(jax.random.key(0), 4), (8, 4, 4, 8)
    random = lambda key, count: jax.random.normal(key, (2, seq, count, 64), jnp.bfloat16)
    *inputs, ct = (random(key, count) for key, count in zip(keys, heads, strict=True))
    exact = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
    expected, exact_vjp = jax.vjp(exact, *(each.astype(jnp.float32) for each in inputs))
    found, vjp = jax.vjp(jax.jit(partial(in_chunks, contexts)), *inputs)
    return max(off_by(found, expected), off_by(jax.jit(vjp)(ct), exact_vjp(ct.astype(jnp.float32))))


def in_chunks(contexts: int, q: Any, k: Any, v: Any) -> Any:
    import jax.numpy as jnp

    from jaxpar.models.transformer.flash_chunks import chunked_causal_attention

    parts: list[Any] = [None] * (2 * contexts)
    for index in range(contexts):
        places = (index, 2 * contexts - 1 - index)
        own = lambda array, places=places: jnp.concatenate(
            [jnp.split(array, 2 * contexts, 1)[at] for at in places], 1
        )
        where = (index, contexts)
        mixed = chunked_causal_attention(own(q), (own(k), own(v)), (k, v), chunk_of_context=where)
        for at, part in zip(places, jnp.split(mixed, 2, 1), strict=True):
            parts[at] = part
    return jnp.concatenate(parts, 1)


def of_cache(sizes: Sizes, prompt: int = 16, new: int = 16) -> float:
    """Returns how many of the tokens that ``generate`` adds are not the likeliest ones of full passes."""
    import jax.numpy as jnp
    import numpy as np

    from jaxpar.models import transformer

    shape = shape_of(sizes)
    params, model, _, batch = job(sizes, shape)
    tokens = np.asarray(
        transformer.generate(shape, params, np.asarray(batch["tokens"][:, :prompt]), new)
    )
    # One pass over all tokens has the scores of each position: attention is causal.
    scores = model.apply(params, {"tokens": jnp.asarray(tokens[:, :-1])})
    likeliest = np.asarray(jnp.argmax(scores, -1))[:, prompt - 1 :]
    return float((likeliest != tokens[:, prompt:]).sum())


def of_checkpoint(sizes: Sizes) -> float:
    import jax
    import optax

    import jaxpar
    from jaxpar.models import transformer
    from jaxpar.params import init_params
    from jaxpar.tensor_parallel import TRANSFORMER_RULES

    table, mesh = transformer.param_table(shape_of(sizes)), one_device()
    shardings = jaxpar.shardings_from_dims(table, mesh, TRANSFORMER_RULES)
    given = (
        lambda key: init_params(table, key),
        jax.random.key(0),
        optax.adamw(1e-3),
        mesh,
        shardings,
    )
    state = jaxpar.init_state(*given)
    with tempfile.TemporaryDirectory() as folder:
        manager = jaxpar.CheckpointManager(folder, jaxpar.Parallel(mesh, shardings))
        manager.save(state)
        restored = manager.restore(jaxpar.abstract_state(*given))
        manager.close()
    return off_by(restored.params, state.params)


def parse(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="tiny cases, on any machine")
    parser.add_argument(
        "--part", default="0/1", help="which of how many parts of the checks to run, as 0/3"
    )
    args = parser.parse_args(flags)
    part, _, parts = args.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        parser.error(f"--part must be such as 0/3, 1/3 or 2/3; got {args.part}.")
    args.part = int(part), int(parts)
    return args


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # where jaxpar is not installed
    sys.exit(main(parse(sys.argv[1:])))
