"""How fast does one GPU train a Llama of 1B parameters? Tokens/s, MFU and memory, against PyTorch in the same run.

    python benchmarks/gpt_gpu.py                        on a GPU; also runs PyTorch where it is installed
    python benchmarks/gpt_gpu.py --torch-python ../torch/bin/python    PyTorch of another environment
    python benchmarks/gpt_gpu.py --smoke                a tiny model, to try it on any machine

Both train the same parameters on the same batch: bfloat16 products, float32 parameters, AdamW, flash attention (cuDNN's for
JAX). They take turns, and their first losses must agree. A second table compares ``jaxpar.value_and_grad`` with
``jax.value_and_grad`` on one device. Memory is the peak that the device reports, or the compiler's plan if it reports none.

MFU: (6 * parameters + 12 * layers * width * sequence) * tokens/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B,
without subtracting the causal half of attention) over the datasheet's dense bfloat16 peak.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import report
import tyro

HERE = Path(__file__).parent

# NVIDIA's datasheets, dense bfloat16.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
GIB = 2**30


@dataclass(frozen=True)
class Config(report.Options):
    """What to measure."""

    model: str = "tinyllama-1.1b"
    """A Llama by its preset's name."""
    seq: int = 4096
    """Tokens of a row."""
    batch_size: int = 4
    """Rows of a step."""
    remat: Literal["none", "full", "dots"] = "dots"
    """What JAX recomputes in the backward pass, as in recipes/gpt.py. PyTorch's compiler makes its own choice."""
    torch: Literal["auto", "compile", "eager", "none"] = "auto"
    """How PyTorch runs; auto: compiled where it is installed and there is a GPU, else not at all."""
    torch_python: str = sys.executable
    """The interpreter that has PyTorch."""
    steps: int = 5
    """Steps of a turn."""
    repeats: int = 7
    """Turns of each candidate."""
    peak_tflops: float | None = None
    """Peak of the device in dense bfloat16; None: by its name."""


OPTIMIZER = {"learning_rate": 3e-4, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
CHECKED_STEPS = 3
TINY = {"model": "llama-bytes", "seq": 32, "batch_size": 2, "steps": 2, "repeats": 1}


def main(config: Config) -> None:
    import jax
    import timing

    if jax.default_backend() != "gpu" and not config.smoke:
        print("gpt_gpu.py needs a GPU, and there is none here: nothing was measured; --smoke tries it on any machine")
        sys.exit(report.CANNOT_RUN)
    record = report.Record.start("gpt_gpu", config)
    config = dataclasses.replace(config, **TINY) if config.smoke else config
    shape = make_shape(config)
    batch = make_batch(config, shape)
    ours = Ours(config, shape, batch)
    rows = {"jaxpar": ours.facts}
    candidates: dict[str, Callable] = {"jaxpar": lambda: ours.train(config.steps)}
    with contextlib.ExitStack() as stack:
        if (how := torch_mode(config)) is not None:
            theirs = stack.enter_context(start_torch(config, how, shape, ours.host_params(), batch))
            candidates["PyTorch"], rows["PyTorch"] = (lambda: theirs.train(config.steps)), theirs.facts
            record.versions["torch"] = f"{theirs.about['torch']} ({how}, {theirs.about['device']})"
            check_same(shape, ours, theirs)
        else:
            ours.train(CHECKED_STEPS)
        ours.note_peak()  # before anything else of JAX runs
        steps = timing.measure(candidates, reference="jaxpar", repeats=config.repeats)
    for name, timed in steps.items():
        rows[name] |= figures(config, shape, ours.num_params, timed.wall_seconds / config.steps)
        rows[name]["time ratio"] = timed.wall_ratio
    pair = timing.measure(ours.value_and_grads(config), reference="jax.value_and_grad", repeats=config.repeats)
    record.tables.extend((training(config, shape, ours.num_params, rows), gradients(config, pair)))
    dataclasses.replace(record, machine=f"{record.machine}, {jax.devices()[0].device_kind}").finish(config.out)


def make_shape(config: Config) -> Any:
    from jaxpar.models import transformer

    if config.smoke:
        return transformer.preset(config.model, num_layers=2, embed_dim=32, mlp_dim=64)
    shape = transformer.preset(config.model, compute_dtype="bfloat16", attention="cudnn")
    if (shape.norm, shape.positions, shape.mlp, shape.biases) != ("rms", "rope", "swiglu", False):
        raise SystemExit(f"--model must be a Llama, which is what the PyTorch side is; got {config.model}")
    return shape


def make_batch(config: Config, shape: Any) -> dict:
    """Returns random tokens, and as targets the tokens one position later: the same batch in every step."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, shape.vocab_size, (config.batch_size, config.seq + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}


def loss(logits: Any, batch: dict) -> tuple[Any, Any]:
    import jaxpar

    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


class Ours:
    """jaxpar on a mesh of one device."""

    def __init__(self, config: Config, shape: Any, batch: dict) -> None:
        import jax
        import optax

        import jaxpar
        from jaxpar.backward.remat import REMAT
        from jaxpar.models import transformer
        from jaxpar.params import count_params, init_params
        from jaxpar.tensor_parallel import TRANSFORMER_RULES

        mesh, table = jaxpar.make_mesh(devices=jax.devices()[:1]), transformer.param_table(shape)
        remat = REMAT[config.remat]
        self.num_params, self.model = count_params(table), transformer.make_model(shape)
        self.batch = jaxpar.shard_batch(batch, mesh)
        self.value_and_grad = jaxpar.value_and_grad(self.model, loss, mesh, remat=remat)
        wrap = lambda layer: jax.checkpoint(layer, policy=None if remat is True else remat)
        self.plain_model = self.model if remat is False else self.model.wrap_layers(wrap)

        b1, b2 = OPTIMIZER["betas"]
        rate, decay = OPTIMIZER["learning_rate"], OPTIMIZER["weight_decay"]
        optimizer = optax.adamw(rate, b1, b2, OPTIMIZER["epsilon"], weight_decay=decay)
        shardings = jaxpar.shardings_from_dims(table, mesh, TRANSFORMER_RULES)
        self.state = jaxpar.init_state(
            lambda key: init_params(table, key), jax.random.key(0), optimizer, mesh, shardings
        )
        start = time.perf_counter()
        self.step = jaxpar.make_train_step(self.value_and_grad, optimizer).lower(self.state, self.batch).compile()
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
        import jax

        planned = self.step.memory_analysis()
        peak = planned.argument_size_in_bytes + planned.temp_size_in_bytes
        peak += planned.output_size_in_bytes - planned.alias_size_in_bytes
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", peak)
        self.facts["peak GiB"] = peak / GIB

    def value_and_grads(self, config: Config) -> dict[str, Callable]:
        """Returns functions that compute loss and gradients with plain JAX and with jaxpar."""
        import jax

        def mean(params: Any, batch: Any) -> jax.Array:
            total, weight = loss(self.plain_model.apply(params, batch), batch)
            return total / weight

        functions = {"jax.value_and_grad": jax.value_and_grad(mean), "jaxpar.value_and_grad": self.value_and_grad}
        args = (self.state.params, self.batch)
        compiled = {name: jax.jit(function).lower(*args).compile() for name, function in functions.items()}
        turn = lambda run: [run(*args)[0] for _ in range(config.steps)]
        return {name: lambda run=run: turn(run) for name, run in compiled.items()}


def torch_mode(config: Config) -> str | None:
    """Returns how PyTorch runs; None: not at all."""
    if config.torch != "auto":
        return None if config.torch == "none" else config.torch
    is_there = config.torch_python != sys.executable or importlib.util.find_spec("torch") is not None
    if not is_there:
        print("PyTorch is not installed, so jaxpar runs alone: pip install torch, or give --torch-python")
    return "compile" if is_there and not config.smoke else None


class Theirs:
    """The process that runs gpt_torch.py."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.about = self._answer()
        self.facts: dict[str, Any] = {}

    def train(self, count: int) -> list[float]:
        """Runs ``count`` steps and returns their losses."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        answer = self._answer()
        if answer["peak_bytes"] is not None:
            self.facts["peak GiB"] = answer["peak_bytes"] / GIB
        return answer["losses"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the PyTorch side ended with exit code {self._process.wait()}: see its message above")


@contextlib.contextmanager
def start_torch(config: Config, how: str, shape: Any, params: dict, batch: dict) -> Iterator[Theirs]:
    """Starts the PyTorch side on the same parameters and batch, and ends it at the end of the block."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    names = ("num_layers", "embed_dim", "num_heads", "kv_heads", "head_dim", "tied", "norm_epsilon", "rope_theta")
    spec = {name: getattr(shape, name) for name in names} | OPTIMIZER
    spec |= {"compute_dtype": jnp.dtype(shape.compute_dtype).name, "seq": config.seq, "torch": how}
    spec |= {"cpu": jax.default_backend() != "gpu"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec))
        for path, array in (params | batch).items():
            np.save(folder / f"{path.replace('/', '.')}.npy", array)
        command = [config.torch_python, HERE / "gpt_torch.py", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Theirs(process)
            finally:
                process.kill()


def check_same(shape: Any, ours: Ours, theirs: Theirs) -> None:
    """Raises unless both have the same number of parameters and their first losses agree; times PyTorch's first step."""
    import jax.numpy as jnp
    import numpy as np

    if theirs.about["num_params"] != ours.num_params:
        raise SystemExit(f"the models differ: {ours.num_params} parameters, {theirs.about['num_params']} in PyTorch")
    start = time.perf_counter()
    losses = theirs.train(1)
    theirs.facts["first compile s"] = time.perf_counter() - start  # includes one step
    losses += theirs.train(CHECKED_STEPS - 1)
    ours_losses = ours.train(CHECKED_STEPS)
    if not np.allclose(ours_losses, losses, rtol=1e-4 if jnp.dtype(shape.compute_dtype).itemsize > 2 else 1e-2):
        raise SystemExit(f"the two do not train one model: losses {ours_losses}, {losses} in PyTorch")


def figures(config: Config, shape: Any, num_params: int, step_seconds: float) -> dict[str, Any]:
    """Returns the rates and the MFU for a step's time."""
    tokens_per_second = config.batch_size * config.seq / step_seconds
    flops_per_token = 6 * num_params + 12 * shape.num_layers * shape.embed_dim * config.seq
    flops = flops_per_token * tokens_per_second
    peak = peak_flops(config)
    found = {"ms a step": step_seconds * 1e3, "tokens/s": tokens_per_second}
    return found | {"TFLOP/s": flops / 1e12, "MFU": "unknown" if peak is None else flops / peak}


def peak_flops(config: Config) -> float | None:
    import jax

    if config.peak_tflops is not None:
        return config.peak_tflops * 1e12
    kind = jax.devices()[0].device_kind
    return next((flops for name, flops in PEAK_FLOPS.items() if name in kind), None)


def training(config: Config, shape: Any, num_params: int, rows: dict[str, dict]) -> report.Table:
    """Returns the table of training steps."""
    import jax.numpy as jnp

    title = (
        f"Training steps of {config.model}{', made tiny' if config.smoke else ''}: {num_params:,} parameters, "
        f"{config.batch_size} rows of {config.seq} tokens, {jnp.dtype(shape.compute_dtype)}, remat {config.remat}"
    )
    columns = {"run": "", "ms a step": ".2f", "time ratio": ".3f", "tokens/s": ",.0f", "TFLOP/s": ".2f", "MFU": ".3f"}
    columns |= {"peak GiB": ".2f", "first compile s": ".1f"}
    return report.Table(
        title,
        columns,
        [{name: ({"run": run} | row).get(name) for name in columns} for run, row in rows.items()],
        "one device",
    )


def gradients(config: Config, pair: dict[str, Any]) -> report.Table:
    """Returns the table of loss and gradients alone."""
    columns = {"run": "", "ms a call": ".2f", "time ratio": ".3f"}
    milliseconds = {name: timed.wall_seconds / config.steps * 1e3 for name, timed in pair.items()}
    rows = [
        dict(zip(columns, (name, milliseconds[name], timed.wall_ratio), strict=True)) for name, timed in pair.items()
    ]
    return report.Table("Loss and gradients of the same model, without the optimizer", columns, rows, "one device")


if __name__ == "__main__":
    # PyTorch shares the GPU, so JAX must not preallocate three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(tyro.cli(Config, description=__doc__))
