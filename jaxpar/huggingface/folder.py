"""Reads the tensors of a model's folder: one safetensors file, or several files and an index.

model.safetensors
model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json
"""

import re
import shlex
from pathlib import Path

import numpy as np

from jaxpar.huggingface.tensor_file import open_tensors
from jaxpar.huggingface.untrusted import brief, file_inside, read_json, shorten

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def check_model_folder(folder: Path, flag: str, *, needs_weights: bool = True) -> None:
    """Raises unless a folder has the config and the weights of a model; the message names what is missing.

    Args:
        folder: The folder, which a user may have taken for the name of a model on the Hugging Face Hub.
        flag: The flag that names it, for messages.
        needs_weights: Whether the weights must be there.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
        ValueError: The folder holds adapters without a model.
    """
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        remedy = download_remedy(folder, f"give {flag}") or "Name the folder of a model."
        raise FileNotFoundError(f"{flag} must be a folder with a model; got {folder}, which {why}. {remedy}")
    check_no_adapters(folder)
    has_weights = any((folder / name).exists() for name in (ONE_FILE, INDEX))
    missing = [] if (folder / CONFIG).exists() else [CONFIG]
    missing += [f"{ONE_FILE} or {INDEX}"] if needs_weights and not has_weights else []
    if missing:
        remedy = f"Name another folder, or download the model again: {_download('ID', str(folder))}."
        if (folder / "checkpoints").is_dir():
            command = f"python -m jaxpar export {shlex.quote(str(folder))} DIR"
            remedy = f"It is a run: write its model with {command}, and give {flag} DIR."
        raise FileNotFoundError(
            f"{flag} must be a folder with {CONFIG} and the weights of a model; got no {' and no '.join(missing)} in {folder}. "
            f"{remedy}"
        )


def download_remedy(folder: Path, use: str) -> str:
    """Returns what to do where a folder does not exist and may be the name of a model on the Hugging Face Hub; "" elsewhere.

    Args:
        folder: The folder.
        use: What to do with the folder that is then there, such as "serve".
    """
    if folder.exists() or not HUB_ID.fullmatch(str(folder)):
        return ""
    return (
        "Name another; or, if it is the name of a model on the Hugging Face Hub, download it: "
        f"{_download(str(folder))}, and {use} {folder.name}."
    )


def missing_tokenizer(folder: Path, flag: str, text: str) -> ValueError:
    """Returns the error of a model's folder that text is to be learned with, but that has no ``tokenizer.json``.

    Args:
        folder: The folder.
        flag: The flag that names it.
        text: What is to be learned.
    """
    return ValueError(
        f"{flag} must be a folder with the tokenizer of its model, to learn from text; got no tokenizer.json in {folder}, and "
        f"{text}. Download it: {_download('ID tokenizer.json tokenizer_config.json', str(folder))}; or name a folder that "
        "has it by --tokenizer, give a .bin of the model's tokens by --data, or, if they are bytes, add "
        '"jaxpar_tokens": "bytes" to its config.json.'
    )


def _download(name: str, folder: str | None = None) -> str:
    return f"hf download {name} --local-dir {shlex.quote(folder or name.rpartition('/')[2])}"


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
