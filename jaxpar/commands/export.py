"""`python -m jaxpar export RUN DIR`: a run's checkpoint as a folder that Hugging Face's transformers reads.

It needs no devices of the run's mesh: a layer of a param is read, converted and written at a time.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxpar.commands.cli import call
from jaxpar.huggingface.config import read_config, unmodelled_keys
from jaxpar.huggingface.export import write_model
from jaxpar.huggingface.folder import CONFIG
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.params import is_spec
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.runtime.printable import printable_lines, tell
from jaxpar.sharding import path_string


def export(
    run: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
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
    from jaxpar.checkpoint.stored import open_params  # here, since it imports Orbax

    source = run / "model" if source is None else source
    if not (source / CONFIG).is_file():
        raise ValueError(
            f"a run must have a description of its model; got no {CONFIG} in {source}. Name the --out-dir of recipes/gpt.py, "
            "or give --source, the folder that the run began from."
        )
    stored, manifest = open_params(run / "checkpoints", step)
    rows = stored["outer/tokens"].shape[0] if "outer/tokens" in stored else 1
    config = read_config(source, ignore=unmodelled_keys(source))
    config = replace(config, vocab_multiple=rows) if rows >= config.vocab_size else config
    write_model(out, config, _as_tree(config, stored), source=source, dtype=dtype, max_file_bytes=max_file_bytes)
    count = len(list(out.glob("*.safetensors")))
    print(f"{out}: step {manifest.step} of {run}, {count} file{'s' * (count > 1)} of weights")


def _as_tree(config: TransformerConfig, stored: dict) -> dict:
    """Returns stored params as the tree of a model; raises ValueError if they are not those of this model."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(param_table(config), is_leaf=is_spec)
    paths = [path_string(path) for path, _ in leaves]
    if wrong := sorted(set(paths) ^ set(stored)):
        raise ValueError(
            f"a checkpoint must hold the params of its model; got {', '.join(wrong[:3])} in only one of them. Give the run's "
            "own --source."
        )
    return treedef.unflatten([stored[path] for path in paths])


def main(args: Sequence[str]) -> int | None:
    """Runs the command with its arguments; returns its exit code if there is no intact checkpoint."""
    from jaxpar.checkpoint.errors import BadCheckpointError

    try:
        return call(export, args, "export")
    except BadCheckpointError as error:
        tell(f"error: {printable_lines(str(error))}")
        return ExitCode.BAD_DATA
