"""The language model of a run: its config and the params of a checkpoint, which any mesh may have saved.

runs/gpt/model/          config.json and the tokenizer's files (`export.py`)
runs/gpt/checkpoints/    params, read when they are indexed (`jaxpar.checkpoint.restore`), LoRA's factors merged (`peft.py`)
"""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxtyping import PyTree

from jaxpar.checkpoint.restore import as_tree, open_params
from jaxpar.huggingface.config import read_config, unmodelled_keys
from jaxpar.huggingface.folder import CONFIG
from jaxpar.huggingface.peft import merge_factors
from jaxpar.models.transformer import TransformerConfig, param_table


@dataclass(frozen=True)
class RunModel:
    """The model of a run.

    Attributes:
        config: The model.
        params: Its params, as arrays that are read when they are indexed.
        source: The folder with its description.
        step: The step of the checkpoint.
    """

    config: TransformerConfig
    params: PyTree
    source: Path
    step: int


def open_run(run: Path, step: int | None = None, source: Path | None = None) -> RunModel:
    """Returns the model of a run of recipes/gpt.py.

    Args:
        run: The run's folder.
        step: The step of the checkpoint. None: the newest intact one.
        source: The folder with its description. None: model/ in the run's folder.

    Raises:
        FileNotFoundError, ValueError, BadCheckpointError: There is no such model, or it is damaged.
    """
    source = run / "model" if source is None else source
    if not (source / CONFIG).is_file():
        raise ValueError(
            f"a run must have a description of its model; got no {CONFIG} in {source}. Name the --out-dir of recipes/gpt.py, "
            "or give --source, the folder that the run began from."
        )
    stored, manifest = open_params(run / "checkpoints", step, otherwise=", or use the folder of its --save-hf")
    rows = stored["outer/tokens"].shape[0] if "outer/tokens" in stored else 1
    config = read_config(source, ignore=unmodelled_keys(source))
    config = replace(config, vocab_multiple=rows) if rows >= config.vocab_size else config
    stored = merge_factors(stored, manifest.config or {})
    return RunModel(config, as_tree(stored, param_table(config)), source, manifest.step)
