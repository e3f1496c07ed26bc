"""`python -m jaxpar export RUN DIR`: a run's checkpoint as a folder that Hugging Face's transformers reads.

It needs no devices of the run's mesh: a layer of a param is read, converted and written at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxpar.commands.cli import call_with_checkpoint
from jaxpar.huggingface.export import write_model


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")],
    step: int | None = None,
    source: Path | None = None,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes the model of a run's checkpoint as a folder for transformers, with its tokenizer; any mesh may have saved it.

    Args:
        run: The run's folder, its --out-dir, with checkpoints/ and model/, as recipes/gpt.py writes them.
        out: A folder without a model.
        step: The step to export. None: the newest intact checkpoint.
        source: The folder whose config.json and tokenizer to keep. None: model/ in the run's folder.
        dtype: float32, bfloat16 or float16. None: that of the source.
        max_file_bytes: The size of a file of weights, which memory must have room for.
    """
    from jaxpar.huggingface.export import open_run  # here, since it imports Orbax

    opened = open_run(run, step, source)
    write_model(out, opened.config, opened.params, source=opened.source, dtype=dtype, max_file_bytes=max_file_bytes)
    count = len(list(out.glob("*.safetensors")))
    print(f"{out}: step {opened.step} of {run}, {count} file{'s' * (count > 1)} of weights")


def main(args: Sequence[str]) -> int | None:
    """Runs the command with its arguments; returns its exit code if there is no intact checkpoint."""
    return call_with_checkpoint(export, args, "export", example="runs/gpt exported")
