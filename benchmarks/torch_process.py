"""The process that runs gpt_torch.py, the PyTorch side of a comparison: its inputs, its start, its answers."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt_training import CHECKED_STEPS, GIB, OPTIMIZER, Work

HERE = Path(__file__).parent
MODELS = ("tinyllama-1.1b", "gpt2")  # the kinds of which there is a PyTorch side
SHAPE = (
    "num_layers",
    "embed_dim",
    "num_heads",
    "kv_heads",
    "head_dim",
    "tied",
    "norm",
    "norm_epsilon",
    "positions",
)
SHAPE += ("mlp", "biases", "vocab_size")


class Theirs:
    """The process that runs gpt_torch.py."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self.about = self._answer()
        self.facts: dict[str, Any] = {}
        self.seconds = 0.0  # of the last call of train, as PyTorch's process measures it

    def train(self, count: int) -> list[float]:
        """Runs ``count`` steps and returns their losses."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        answer = self._answer()
        self.seconds = answer["seconds"]
        if answer["peak_bytes"] is not None:
            self.facts["peak GiB"] = answer["peak_bytes"] / GIB
        return answer["losses"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(
            f"the PyTorch side ended with exit code {self._process.wait()}: see its message above"
        )


def has_model(work: Work) -> bool:
    """Returns whether PyTorch's side can train this."""
    return work.model in MODELS and not work.documents


def write_inputs(folder: Path, work: Work, shape: Any, params: dict, batch: dict) -> None:
    """Writes the model, its initial parameters and the batch for gpt_torch.py."""
    import jax.numpy as jnp
    import numpy as np

    spec = {name: getattr(shape, name) for name in SHAPE} | OPTIMIZER
    spec |= {
        "rope_theta": shape.rope.theta,
        "compute_dtype": jnp.dtype(shape.compute_dtype).name,
        "seq": work.seq,
    }
    for path, array in (params | batch).items():
        np.save(folder / f"{path.replace('/', '.')}.npy", array)
    (folder / "spec.json").write_text(
        json.dumps(spec)
    )  # written last, when all that it describes is complete


@contextlib.contextmanager
def start(
    python: str, folder: Path, how: str, attention: str, *, cpu: bool = False
) -> Iterator[Theirs]:
    """Starts the PyTorch side on the inputs of a folder, and ends it at the end of the block.

    Args:
        python: The interpreter that has PyTorch.
        folder: What ``write_inputs`` wrote.
        how: "compile" or "eager".
        attention: The kernel on a GPU: "flash" or "cudnn".
        cpu: Whether it runs on the CPU also where there is a GPU.
    """
    (folder / "run.json").write_text(json.dumps({"torch": how, "attention": attention, "cpu": cpu}))
    command = [python, HERE / "gpt_torch.py", folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Theirs(process)
        finally:
            process.kill()


def losses_agree(shape: Any, ours: list[float], theirs: list[float]) -> bool:
    """Returns whether two runs train one model, by their first losses."""
    import jax.numpy as jnp
    import numpy as np

    return np.allclose(
        ours, theirs, rtol=1e-4 if jnp.dtype(shape.compute_dtype).itemsize > 2 else 1e-2
    )


def first_losses(theirs: Any) -> list[float]:
    """Runs the first steps, which the two sides compare, and returns their losses; times the first one."""
    start = time.perf_counter()
    losses = theirs.train(1)
    theirs.facts["first compile s"] = time.perf_counter() - start  # includes one step
    return losses + theirs.train(CHECKED_STEPS - 1)
