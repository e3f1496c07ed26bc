"""The files of a model's folder beside its weights: config.json, generation_config.json, those of the tokenizer, the licence.

A folder with these alone describes a model: recipes/gpt.py writes one into the folder of each run, so that a checkpoint can be
exported when the folder that the run began from is gone.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.huggingface.config import config_json, read_config, unmodelled_keys
from jaxpar.huggingface.folder import CONFIG
from jaxpar.huggingface.tensor_file import FLOATS
from jaxpar.huggingface.untrusted import file_inside, read_json, shorten
from jaxpar.models.transformer import TransformerConfig
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.files import write_atomically, write_whole

GENERATION = "generation_config.json"
CARRIED = (
    *(GENERATION, "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"),
)
DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5 and 4


def write_description(folder: Path | str, config: TransformerConfig, *, source: Path | str | None = None) -> None:
    """Writes a model's folder without its weights, or replaces it; every process must call it, the first one writes.

    Args:
        folder: The folder, created if needed.
        config: The model.
        source: The folder that the model was read from, whose config.json and tokenizer it keeps; None: a new model.
    """
    about = make_about(config, source, np.dtype("float32") if source is None else dtype_of(source))
    if jax.process_index() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if source is not None:
            copy_files(source, Path(folder))
        write_json(Path(folder) / CONFIG, about)
    exchange("description written", True)


def make_about(config: TransformerConfig, source: Path | str | None, dtype: np.dtype | None) -> dict[str, Any]:
    """Returns the contents of config.json: those of the source, with the dtype of the params.

    Args:
        config: The model.
        source: The folder that it was read from, or None.
        dtype: The dtype of its params; None: as the source says.

    Raises:
        ValueError: The model is not that of the source.
    """
    if source is None:
        return config_json(config, "float32" if dtype is None else dtype.name)
    given = read_json(file_inside(Path(source), CONFIG, str(source)))
    theirs = read_config(source, ignore=unmodelled_keys(source))
    one, other = (config_json(replace(each, ignored={}, tokens=None), "") for each in (config, theirs))
    if wrong := sorted(key for key in {**one, **other} if one.get(key) != other.get(key)):
        raise ValueError(
            f"a model must be that of its source; got {shorten(wrong)} that differ from {Path(source) / CONFIG}: "
            f"{', '.join(f'{one.get(key)!r} for {other.get(key)!r}' for key in wrong[:3])}. Give the folder that it was read "
            "from, or leave source out and copy the tokenizer's files."
        )
    name = next((key for key in DTYPE_KEYS if key in given), "torch_dtype")
    return given if dtype is None else given | {name: dtype.name}


def dtype_of(folder: Path | str) -> np.dtype | None:
    """Returns the dtype of the params that a folder's config.json names, if it is one that jaxpar writes."""
    given = read_json(file_inside(Path(folder), CONFIG, str(folder)))
    named = next((given[key] for key in DTYPE_KEYS if given.get(key) is not None), None)
    return next((dtype for dtype in FLOATS.values() if dtype.name == named), None)


def stop_tokens(folder: Path | str) -> tuple[int, ...]:
    """Returns the tokens that end a text, from generation_config.json, else from config.json; none if neither has any."""
    for name in (GENERATION, CONFIG):
        if (Path(folder) / name).exists():
            found = read_json(file_inside(Path(folder), name, str(folder))).get("eos_token_id")
            tokens = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(token) is int and token >= 0 for token in tokens):
                raise ValueError(
                    f"eos_token_id must be a token or a list of tokens; got {found!r} in {Path(folder) / name}. Correct it."
                )
            if tokens:
                return tuple(tokens)
    return ()


def copy_files(source: Path | str, folder: Path) -> None:
    """Copies those of the files of the tokenizer, of generation and of the licence that the source has."""
    for name in CARRIED:
        if os.path.lexists(Path(source) / name):
            found = file_inside(Path(source), name, str(source))
            if not (folder / name).exists() or not found.samefile(folder / name):
                write_atomically(folder / name, lambda path, found=found: shutil.copyfile(found, path))


def check_no_model(folder: Path | str) -> None:
    """Raises ValueError if a folder has a model; every process must call it."""
    folder = Path(folder)
    there: Sequence[Path] = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    own = [path.name for path in there if path.name == CONFIG or ".safetensors" in path.name or path == folder]
    if found := exchange("model to write", own)[0]:  # of the first process, which may be ahead of the others
        raise ValueError(
            f"a model is written to a folder without one; got {folder} with {shorten(found)}. Name another, or empty it."
        )


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Writes JSON atomically."""
    write_whole(path, json.dumps(found, indent=2, sort_keys=True) + "\n")
