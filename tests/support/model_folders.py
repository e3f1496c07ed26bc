"""Folders of models as transformers saves them: those in data/huggingface/, copies of them, and changes of a copy."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpar import huggingface
from jaxpar.huggingface import read_params

GOLDEN = (
    Path(__file__).parents[1] / "data" / "huggingface"
)  # made by make.py there, with transformers
ONE_FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def read_config(folder, *, ignore=DROPOUTS, **changes):
    """Reads a config and ignores dropout, which a GPT-2 has unless its config.json says otherwise."""
    return huggingface.read_config(folder, ignore=ignore, **changes)


def all_tensors(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def golden(name):
    config = read_config(GOLDEN / name)
    return config, read_params(GOLDEN / name, config), np.load(GOLDEN / name / "expected.npz")


def copy(family, tmp_path):
    return Path(shutil.copytree(GOLDEN / family, tmp_path / family))


def change(folder, changes=None, *, remove=()):
    """Changes a checkpoint of one file."""
    tensors = load_file(folder / ONE_FILE) | (changes or {})
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in remove}, folder / ONE_FILE
    )


def change_config(folder, **changes):
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))


def copy_with(name, tmp_path, **changes):
    folder = copy(name, tmp_path)
    change_config(folder, **changes)
    return folder
