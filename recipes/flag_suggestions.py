"""Names the flag that is meant by another trainer's name for it, such as --max-lr or torchtitan's --optimizer.lr."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.printable import tell

OTHER_NAMES = {
    "--steps": ("--max-steps", "--num-steps", "--train-steps", "--train-iters", "--max-iters", "--iters"),
    "--learning-rate": ("--lr", "--max-lr", "--rate", "--eta"),
    "--batch-size": ("--bs", "--batch", "--global-batch-size", "--train-batch-size"),
    "--num-microbatches": ("--microbatches", "--gradient-accumulation-steps", "--grad-accum"),
    "--seq": ("--seq-len", "--seq-length", "--block-size", "--max-seq-length", "--context-length"),
    "--mesh.data": (
        "--dp",
        "--data-parallel",
        "--data-parallel-size",
        "--data-parallel-replicate-degree",
        "--data-parallel-shard-degree",
        "--replicas",
    ),
    "--mesh.stage": (
        "--pp",
        "--pipe",
        "--pipeline",
        "--pipeline-parallel-size",
        "--pipeline-parallel-degree",
        "--pipeline-model-parallel-size",
        "--stages",
    ),
    "--mesh.tensor": (
        "--tp",
        "--mp",
        "--tensor-parallel-size",
        "--tensor-parallel-degree",
        "--tensor-model-parallel-size",
    ),
    "--zero": ("--zero-stage", "--fsdp"),
    "--dtype": ("--precision", "--bf16", "--fp16"),
    "--remat": ("--activation-checkpointing", "--gradient-checkpointing", "--recompute-activations"),
    "--checkpoint-every": ("--save-steps", "--save-interval", "--save-every", "--checkpoint-interval"),
    "--eval-every": ("--eval-steps", "--eval-interval"),
    "--out-dir": ("--output-dir", "--out", "--output", "--save-dir", "--log-dir"),
    "--max-grad-norm": ("--clip-grad", "--grad-clip", "--gradient-clipping", "--max-norm"),
    "--warmup-steps": ("--warmup", "--lr-warmup-iters", "--warmup-iters"),
    "--fake-devices": ("--num-devices", "--devices", "--cpus", "--gpus"),
}
# For names without an equal here: the flag to use, and how.
ADVICE = {
    ("--epochs", "--num-epochs", "--num-train-epochs"): (
        "--steps",
        "jaxpar counts steps; --steps = epochs x rows / --batch-size",
    ),
    ("--num-layers", "--n-layer", "--n-layers", "--hidden-size", "--n-embd", "--num-heads", "--n-head"): (
        "--model",
        "the model's size comes from --model",
    ),
}


@contextmanager
def suggested(args: Sequence[str] | None, config: type) -> Iterator[None]:
    """Where a command line in the ``with`` block is refused, prints which flags its names stand for.

    Args:
        args: The command line; None: that of the program.
        config: The dataclass of the recipe's flags; no others are named.
    """
    try:
        yield
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG:
            fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config)}
            for word in sys.argv[1:] if args is None else args:
                name = word.split("=")[0]
                for flag, text in _meant(name.replace("_", "-")) if name.startswith("--") else ():
                    if flag.split(".")[0] in fields:
                        tell(f"{name}: {text}")
        raise


def _meant(name: str) -> Iterator[tuple[str, str]]:
    """Yields the flag that a name stands for, and what to say of it. A name with dots stands for what is after the last one."""
    group, _, last = name.removeprefix("--").rpartition(".")
    bare = f"--{last}"
    for flag, others in OTHER_NAMES.items():
        if bare in others or (group and bare == flag):
            yield flag, f"did you mean {flag}?"
    for names, advice in ADVICE.items():
        if bare in names:
            yield advice
