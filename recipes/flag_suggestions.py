"""Names the flag that is meant by another trainer's name for it, such as --lr."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.printable import tell

OTHER_NAMES = {
    "--steps": ("--max-steps", "--num-steps", "--train-steps", "--train-iters", "--max-iters", "--iters", "--epochs"),
    "--learning-rate": ("--lr", "--rate", "--eta"),
    "--batch-size": ("--bs", "--batch", "--global-batch-size", "--train-batch-size"),
    "--num-microbatches": ("--microbatches", "--gradient-accumulation-steps", "--grad-accum"),
    "--seq": ("--seq-len", "--seq-length", "--block-size", "--max-seq-length", "--context-length"),
    "--mesh.data": ("--dp", "--data-parallel", "--data-parallel-size", "--replicas"),
    "--mesh.stage": ("--pp", "--pipeline-parallel-size", "--pipeline-model-parallel-size", "--stages"),
    "--mesh.tensor": ("--tp", "--tensor-parallel-size", "--tensor-model-parallel-size"),
    "--zero": ("--zero-stage", "--fsdp"),
    "--dtype": ("--precision", "--bf16", "--fp16"),
    "--remat": ("--activation-checkpointing", "--gradient-checkpointing", "--recompute-activations"),
    "--checkpoint-every": ("--save-steps", "--save-interval", "--save-every", "--checkpoint-interval"),
    "--eval-every": ("--eval-steps", "--eval-interval"),
    "--out-dir": ("--output-dir", "--out", "--output", "--save-dir", "--log-dir"),
    "--max-grad-norm": ("--clip-grad", "--grad-clip", "--gradient-clipping"),
    "--warmup-steps": ("--warmup", "--lr-warmup-iters", "--warmup-iters"),
    "--fake-devices": ("--num-devices", "--devices", "--cpus", "--gpus"),
}


@contextmanager
def suggested(args: Sequence[str] | None) -> Iterator[None]:
    """Where a command line in the ``with`` block is refused, prints which flags its names stand for.

    Args:
        args: The command line; None: that of the program.
    """
    try:
        yield
    except SystemExit as end:
        if end.code == ExitCode.BAD_CONFIG:
            for word in sys.argv[1:] if args is None else args:
                for flag, others in OTHER_NAMES.items():
                    if word.split("=")[0].replace("_", "-") in others:
                        tell(f"{word.split('=')[0]}: did you mean {flag}?")
        raise
