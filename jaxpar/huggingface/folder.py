"""Reads the tensors of a model's folder: one safetensors file, or several files and an index.

model.safetensors
model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json
"""

from pathlib import Path

import numpy as np

from jaxpar.huggingface.tensor_file import open_tensors
from jaxpar.huggingface.untrusted import brief, file_inside, read_json, shorten

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft


def check_no_adapters(folder: Path) -> None:
    """Raises ValueError for a folder of adapters, as peft writes it: without the weights that the adapters belong to."""
    if not (folder / ADAPTER_CONFIG).exists() or (folder / ONE_FILE).exists() or (folder / INDEX).exists():
        return
    base = read_json(file_inside(folder, ADAPTER_CONFIG, str(folder))).get("base_model_name_or_path")
    raise ValueError(
        f"a model's folder must hold all of its weights; got the adapters in {folder}, which peft adds to those of "
        f"{brief(base)}. Merge them: python -m jaxpar export RUN DIR writes the merged model of a run of recipes/gpt.py, "
        "PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(DIR) that of other adapters."
    )


def open_folder(folder: Path) -> dict[str, np.ndarray]:
    """Returns all tensors of a model's folder by name, memory-mapped.

    Raises:
        FileNotFoundError: The folder has no safetensors.
        ValueError: A file is damaged, or the index and the files disagree.
    """
    is_one, is_many = (folder / ONE_FILE).exists(), (folder / INDEX).exists()
    if is_one == is_many:
        if is_one:
            raise ValueError(
                f"a model must be in {ONE_FILE} or in the files of {INDEX}; got both in {folder}. Remove one."
            )
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise FileNotFoundError(
            f"a model's folder must hold {ONE_FILE} or {INDEX}; got {shorten(there) or 'nothing'} in {folder}. Name another, "
            "or convert other formats by transformers' save_pretrained."
        )
    if is_one:
        return open_tensors(file_inside(folder, ONE_FILE, str(folder)))
    return _open_many(folder)


def _open_many(folder: Path) -> dict[str, np.ndarray]:
    index = file_inside(folder, INDEX, str(folder))
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"an index must have a weight_map of file by tensor; got none in {index}. Download it again.")
    listed: dict[str, set[str]] = {}
    for tensor, name in files.items():
        listed.setdefault(name, set()).add(tensor)
    paths = {name: file_inside(folder, name, str(index)) for name in listed}
    tensors: dict[str, np.ndarray] = {}
    for name, path in paths.items():
        found = open_tensors(path)
        if set(found) != listed[name]:
            raise ValueError(
                f"an index must name the tensors of its files; got {shorten(sorted(set(found) ^ listed[name]))} in only one of "
                f"{index} and {path}. Download both again."
            )
        tensors |= found
    return tensors
