"""The files of a model's folder, which is untrusted: JSON of bounded size with unique keys, paths inside the folder, tensors.

    model.safetensors
    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

Tensors are named, memory-mapped arrays: only the bytes that are used are read. The safetensors package parses the untrusted
header. It accepts only tensors that are contiguous, fill the file to its end and have the sizes of their shapes and dtypes, so
their places in the file follow from their order. The package itself would copy a tensor before it can be transposed; a memory
map is not read before a shard needs it.

**Reference**: the format's description at github.com/huggingface/safetensors.
"""

import json
import math
import os
import re
import reprlib
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.data.readers import check_not_pointer
from jaxpar.runtime.output import needing_extra, printable, refusing, write_whole

# The largest header or index of a published model, Llama 3.1 405B's in one piece, would have about 0.2 MB.
MAX_JSON_BYTES = 4 * 2**20
MAX_SIZE = 2**24  # of a model's dims
FLOATS = {
    "F64": np.dtype("f8"),
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
_INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}")
    for kind in "IU"
    for bits in (8, 16, 32, 64)
}
DTYPES = FLOATS | _INTEGERS | {"BOOL": np.dtype(bool)}
SNAPSHOTS = "snapshots"  # of a model, in the cache of the Hugging Face Hub
CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def check_file(path: Path) -> Path:
    """Returns ``path``; raises unless it is a regular file, fetched by Git LFS: opening a pipe would block forever."""
    if not path.exists():
        is_part = path.name != CONFIG and (path.parent / CONFIG).exists()
        remedy = "Download it again." if is_part else "Name the folder of a model."
        raise FileNotFoundError(f"a model's file must exist; got {path}, which does not. {remedy}")
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(
            f"a model's file must be a regular file; got {path}, which is none. Copy it into the folder."
        )
    check_not_pointer(path)
    return path


def file_inside(
    folder: Path | str, name: str, where: str | None = None, *, under: str = ""
) -> Path:
    """Returns the path of a file in a folder, given its untrusted name.

    A link may lead to another file in the folder, or from a snapshot in Hugging Face's cache to the blobs of the same model.

    Args:
        folder: The folder.
        name: The name, without folders.
        where: The origin of the name, for messages; None: the folder.
        under: A folder in it that the file is in.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The name leads out of the folder, or is not that of a regular file.
    """
    folder, where = Path(folder), str(folder) if where is None else where
    is_plain = 0 < len(name.encode()) < 256 and not any(c in name for c in "/\\\0")
    if not is_plain or name in (".", ".."):
        raise ValueError(
            f"the files of a model must be in its folder, under plain names; got {brief(name)} in {where}. Correct the "
            "name, and do not trust this folder."
        )
    path, root = folder / under / name, Path(os.path.realpath(folder))
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = Path(os.path.realpath(path))  # Path.resolve raises a RuntimeError for a link to itself
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ValueError(
            f"the files of a model must be in its folder; got {name!r} in {where}, a link to {target}. Replace the "
            "link by the file, if you trust it."
        )
    return check_file(path)


def check_size(path: Path, most: int, what: str) -> None:
    """Raises ValueError if a file has more bytes than are read at once."""
    if (size := path.stat().st_size) > most:
        raise ValueError(
            f"{what} must have at most {most} bytes; got {size} in {path}. Name the right file."
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not a regular file, is too large, or is not one JSON object.
    """
    check_size(check_file(path), MAX_JSON_BYTES, "JSON of a model")
    rule = "JSON of a model must be UTF-8, with each key once"
    with refusing((ValueError, RecursionError), rule, path, "Download it again."):
        found = json.loads(path.read_bytes().decode(), object_pairs_hook=_once_each)
    if not isinstance(found, dict):
        raise ValueError(
            f"JSON of a model must be an object; got a {type(found).__name__} in {path}. Download it again."
        )
    return found


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Writes JSON atomically."""
    write_whole(path, json.dumps(found, indent=2, sort_keys=True) + "\n")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{name[:80]!r} twice")
    return found


def shorten(names: Any, most: int = 3) -> str:
    """Returns the first of many names, for a message."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(brief, names[:most])) + more


def brief(found: Any) -> str:
    """Returns a short representation of an untrusted value, for a message."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    short.maxlist = 10
    return short.repr(found)


@dataclass(frozen=True)
class Reader:
    """The values of a JSON object.

    Attributes:
        given: The object.
        defaults: The values of keys that it lacks.
        path: Its file, for messages.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    path: Path

    def size(self, *keys: str) -> int | None:
        """Returns a size, by the first of its keys that is present; all that are present must agree."""
        found = {key: self.given[key] for key in keys if self.given.get(key) is not None}
        for key, value in found.items():
            self._check(
                key,
                value,
                type(value) is int and 0 < value <= MAX_SIZE,
                f"an integer from 1 to {MAX_SIZE}",
            )
        if len(set(found.values())) > 1:
            raise ValueError(
                f"keys of one meaning must agree; got {found} in {self.path}. Correct one."
            )
        if not found and keys[0] not in self.defaults:
            raise ValueError(
                f"config.json must have {keys[0]}; got nothing in {self.path}. Download it again."
            )
        return next(iter(found.values()), self.defaults.get(keys[0]))

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Returns a boolean."""
        return self._value(key, default, lambda value: isinstance(value, bool), "true or false")

    def positive(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        right = lambda value: type(value) in (int, float) and 0 < value < 1e300
        return float(self._value(key, default, right, "a positive number"))

    def number(self, key: str) -> float:
        """Returns a finite number above 0, which may be absent but not null: transformers would compute with null as it is."""
        if key in self.given and self.given[key] is None:
            self._check(key, None, right=False, rule="a positive number")
        return self.positive(key)

    def share(self, key: str, *, default: float) -> float:
        """Returns a finite number of 0 or more."""
        right = lambda value: type(value) in (int, float) and 0 <= value < 1e300
        return float(self._value(key, default, right, "a number of 0 or more"))

    def _value(self, key: str, default: Any, right: Callable[[Any], bool], rule: str) -> Any:
        value = self.given.get(key)
        value = self.defaults.get(key, default) if value is None else value
        self._check(key, value, right(value), rule)
        return value

    def _check(self, key: str, value: Any, right: bool, rule: str) -> None:
        if not right:
            raise ValueError(
                f"{key} must be {rule}; got {brief(value)} in {self.path}. Correct it."
            )


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file by their names, as read-only views of the file.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The extra ``hf`` is not installed.
        ValueError: The file is damaged, or has a dtype that is not supported.
    """
    with needing_extra("safetensors files need the package safetensors", "hf"):
        from safetensors import SafetensorError, safe_open
    rule = "a safetensors file must hold exactly the tensors of its header"
    remedy = "It is damaged or truncated: download it again."
    with refusing(SafetensorError, rule, path, remedy), safe_open(check_file(path), "np") as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        about = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()]
    data, tensors = np.memmap(path, np.uint8, "r"), {}
    at = 8 + int.from_bytes(
        data[:8].tobytes(), "little"
    )  # the length of the header, then the header
    for name, kind, shape in about:
        if kind not in DTYPES:
            raise ValueError(
                f"a tensor's dtype must be one of {', '.join(DTYPES)}; got {brief(kind)} for {brief(name)} in {path}. Convert "
                "the model to one of them: quantised weights are not read."
            )
        end = at + math.prod(shape) * DTYPES[kind].itemsize
        tensors[name], at = data[at:end].view(DTYPES[kind]).reshape(shape), end
    return tensors


def check_model_folder(given: Path | str, flag: str, *, needs_weights: bool = True) -> None:
    """Raises unless a folder has the config and the weights of a model; the message names what is missing.

    Args:
        given: The folder, which a user may have taken for the name of a model on the Hugging Face Hub. A text that begins with
            ``./`` is the name of none.
        flag: The flag that names it, for messages.
        needs_weights: Whether the weights must be there.

    Raises:
        FileNotFoundError: The folder or one of its files does not exist.
        ValueError: The folder holds adapters without a model.
    """
    folder = Path(given)
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        remedy = download_remedy(given, f"give {flag}") or "Name the folder of a model."
        raise FileNotFoundError(
            f"{flag} must be a folder with a model; got {given}, which {why}. {remedy}"
        )
    check_no_adapters(folder)
    has_weights = any((folder / name).exists() for name in (ONE_FILE, INDEX))
    missing = [] if (folder / CONFIG).exists() else [CONFIG]
    missing += [f"{ONE_FILE} or {INDEX}"] if needs_weights and not has_weights else []
    if missing:
        remedy = (
            f"Name another folder, or download the model again: {_download('ID', str(folder))}."
        )
        if others := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
            remedy = (
                f"jaxpar reads no pickles, such as {printable(others[0])} there: write the weights again, by "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers."
            )
        here = folder if folder.name == SNAPSHOTS else folder / SNAPSHOTS
        if snapshots := sorted(here.glob(f"*/{CONFIG}")):
            remedy = f"The cache of the Hugging Face Hub has models there: give {flag} {snapshots[-1].parent}."
        if (folder / "checkpoints").is_dir():
            command = f"python -m jaxpar export {shlex.quote(str(folder))} DIR"
            remedy = f"It is a run: write its model with {command}, and give {flag} DIR."
        raise FileNotFoundError(
            f"{flag} must be a folder with {CONFIG} and the weights of a model; got no {' and no '.join(missing)} in {folder}. "
            f"{remedy}"
        )


def download_remedy(given: Path | str, use: str) -> str:
    """Returns what to do where a folder does not exist and may be the name of a model on the Hugging Face Hub; "" elsewhere.

    Args:
        given: The folder; a text that begins with ``./`` names no model.
        use: What to do with the folder that is then there, such as "serve".
    """
    folder = Path(given)
    if folder.exists() or not HUB_ID.fullmatch(str(given)):
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
    """Raises ValueError for a folder of adapters, as peft writes it, also beside the weights of a model."""
    if not (folder / ADAPTER_CONFIG).exists():
        return
    if (folder / ONE_FILE).exists() or (folder / INDEX).exists():
        raise ValueError(
            f"a model's folder must hold its weights alone; got {ADAPTER_CONFIG} beside them in {folder}, whose adapters "
            f"transformers reads too where peft is installed. Remove {ADAPTER_CONFIG} to read the model alone, or merge the "
            "adapters: PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(DIR)."
        )
    base = read_json(file_inside(folder, ADAPTER_CONFIG)).get("base_model_name_or_path")
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
        return open_tensors(file_inside(folder, ONE_FILE))
    return _open_many(folder)


def _open_many(folder: Path) -> dict[str, np.ndarray]:
    index = file_inside(folder, INDEX)
    files = read_json(index).get("weight_map")
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(name, str) for name in files.values())
    ):
        raise ValueError(
            f"an index must have a weight_map of file by tensor; got none in {index}. Download it again."
        )
    opened = {
        name: open_tensors(file_inside(folder, name, str(index)))
        for name in dict.fromkeys(files.values())
    }
    there = {(tensor, name) for name, tensors in opened.items() for tensor in tensors}
    if wrong := sorted({tensor for tensor, _ in there ^ files.items()}):
        raise ValueError(
            f"an index must name the tensors of its files; got {shorten(wrong)} in only one of {index} and the files that it "
            "names. Download them again."
        )
    return {tensor: found for tensors in opened.values() for tensor, found in tensors.items()}
