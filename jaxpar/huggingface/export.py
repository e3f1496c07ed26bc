"""Writes a model's params as a folder that transformers reads, and the files beside its weights; opens the model of a run.

    one layer of one param --gathered, cast--> its tensors --> model-00001-of-00002.safetensors, ...

One layer of a param is gathered at a time, and the first process, which writes, holds the tensors of one file. Beside them are
config.json, generation_config.json, the files of the tokenizer and the licence. A folder with these alone describes a model:
recipes/gpt.py writes one into the folder of each run, so that a checkpoint can be exported when the folder that the run began
from is gone.

    runs/gpt/model/          config.json and the tokenizer's files
    runs/gpt/checkpoints/    params, read when they are indexed, LoRA's factors merged (`peft.py`)
"""

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.fields import arg
from jaxpar.huggingface import chat_template
from jaxpar.huggingface.config import config_json, family_of, read_config
from jaxpar.huggingface.config_keys import unmodelled_keys
from jaxpar.huggingface.dtypes import DTYPE_KEYS, dtype_of
from jaxpar.huggingface.families import ROUTER_BIAS
from jaxpar.huggingface.finite import cast, check_finite, is_finite, what_is_wrong
from jaxpar.huggingface.folder import (
    CONFIG,
    INDEX,
    ONE_FILE,
    file_inside,
    read_json,
    shorten,
    write_json,
)
from jaxpar.huggingface.from_codes import decoded, in_codes_of
from jaxpar.huggingface.params import ParamSlice, check_dtype, specs_of, tensors_of
from jaxpar.huggingface.peft import merge_factors
from jaxpar.huggingface.tokenizer import end_of_tokenizer
from jaxpar.layered_model import LAYERS, is_packed
from jaxpar.models.transformer import TransformerConfig, param_table
from jaxpar.runtime.coordination import exchange
from jaxpar.runtime.output import write_atomically
from jaxpar.shard_map import take_layer
from jaxpar.sharding import fetch, path_string

WRITE_SECONDS = 3600.0  # for the last file to reach the disk, while the other processes wait
GENERATION = "generation_config.json"
OF_MODEL = (GENERATION, "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md")
OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
    *(chat_template.TEMPLATE, chat_template.FOR_TOOLS, "chat_template.json"),
)
REMEDY = "Write a step from before they appeared, such as by --step of `python -m jaxpar export`."


def write_model(
    folder: Path | str,
    config: Any,
    params: Any,
    *,
    source: Path | str | None = None,
    dtype: Any = None,
    max_file_bytes: int = 5 * 10**9,
    note: Callable[[str, Path], None] | None = None,
) -> None:
    """Writes params as a folder that ``transformers``' ``from_pretrained`` reads; every process must call it.

    ``config.json`` is written last, so a folder that has one is complete.

    Args:
        folder: A folder without a model, created if needed; the first process writes to it.
        config: The model: a TransformerConfig that ``transformers`` has a class for. It may also come after the params.
        params: Its params: on the host, on a mesh, packed for a pipeline, or arrays that are read when they are indexed.
        source: The folder that the model was read from. Its ``config.json`` is kept, with the tokens that begin, end and pad a
            text, and so are its ``generation_config.json``, tokenizer, chat template and licence. None: the ``config.json`` has
            what jaxpar knows, with the keys that ``read_config`` ignored unchanged, and there is no tokenizer.
        dtype: The dtype to write; by default that of the source's tensors, of its ``config.json`` where they have several, or
            else of the params.
        max_file_bytes: If the tensors take more, they are distributed over several files. A file is larger than this only if
            it holds a single tensor.
        note: ``note(name, path)`` is called in the first process for each file of weights, at ``path`` with all its contents,
            before it gets its name. None: nothing is called.

    Raises:
        ImportError: The extra ``hf`` is not installed.
        ValueError: The model is of no family, or not that of the source; the params are not its params; the folder has a model;
            a weight is NaN, infinite, or too large for the dtype. No weights are left in the folder.
    """
    if isinstance(params, TransformerConfig):
        config, params = params, config
    folder = Path(folder)
    make_about(config, source, None)  # raises before anything is written
    from jaxpar.checkpoint.export import load_save_file  # here, since it imports Orbax

    save_file, (leaves, at) = load_save_file(), _check_params(config, params)
    dtype = _check_one_dtype(
        leaves, dtype_of(source) if dtype is None and source is not None else dtype
    )
    if max_file_bytes < 1:
        raise ValueError(
            f"{arg('max_file_bytes')} must be positive; got {max_file_bytes}. Leave it out for 5 GB."
        )
    check_no_model(folder)
    check_room(folder, config, dtype)
    files = _share_out(config, dtype, max_file_bytes)
    is_first = jax.process_index() == 0
    with _without_files(folder, files):
        for name, slices in files.items():
            tensors, wrong = {}, {}
            for tensor, layer in _gather(leaves, slices, at):
                if is_first:
                    given = slices[tensor][2].to_tensor(layer)
                    tensors[tensor] = cast(given, dtype)
                    if not is_finite(tensors[tensor]):
                        wrong[tensor] = what_is_wrong(given, dtype)
            check_finite(wrong, f"to be written to {folder}", dtype, REMEDY)
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)

                def write(path: Path, name: str = name, tensors: Any = tensors) -> None:
                    save_file(tensors, path, {"format": "pt"})
                    if note is not None:
                        note(name, path)

                write_atomically(folder / name, write)
    if is_first:
        if source is not None:
            copy_files(source, folder)
        if len(files) > 1:
            write_json(folder / INDEX, _index(files, dtype))
        write_json(folder / CONFIG, make_about(config, source, dtype))
    exchange("model written", None, timeout_seconds=WRITE_SECONDS)


class NoRoomError(OSError):
    """A disk has no room for a model; every process raises it."""


def check_room(folder: Path, config: TransformerConfig, dtype: Any) -> None:
    """Raises NoRoomError if the first process's disk has no room for a model; every process must call it.

    Args:
        folder: Where the model is to be written, which may not exist yet.
        config: The model.
        dtype: The dtype of its tensors.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free, each = exchange("room for a model", shutil.disk_usage(there).free)[0], np.dtype(dtype)
    needed = sum(_num_bytes(param_slice, each) for _, param_slice in tensors_of(config))
    if needed > free:
        why = f"for a model of {needed:,} bytes as {each}, with {free:,} free"
        raise NoRoomError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} {why}", str(folder))


def _check_params(
    config: TransformerConfig, params: PyTree
) -> tuple[dict[str, Any], Sequence[int]]:
    """Returns the params by path, and where the leading dim of stacked ones holds each layer."""
    layers: Any = params.get(LAYERS) if isinstance(params, dict) else None
    order = (
        layers.layout.packed_order if is_packed(layers) else np.arange(config.num_stacked_layers)
    )
    found = {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    stacked = lambda spec: spec.shape if spec.num_layers is None else (len(order), *spec.shape)
    shapes = {path: stacked(spec) for path, spec in specs_of(config).items()}
    got = {path: np.shape(leaf) for path, leaf in found.items()}
    if got != shapes or sum(order >= 0) != config.num_stacked_layers:
        wrong = sorted(path for path in {**got, **shapes} if got.get(path) != shapes.get(path))
        path = wrong[0] if wrong else next(iter(shapes))
        raise ValueError(
            f"params must be those of the model; got {got.get(path, 'none')} for {path}, where the model has "
            f"{shapes.get(path, 'none')}. Give the config that they were made with."
        )
    at = {int(layer): position for position, layer in enumerate(order) if layer >= 0}
    return {path: found[path] for path in shapes}, [
        at[layer] for layer in range(config.num_stacked_layers)
    ]


def _check_one_dtype(leaves: dict[str, Any], dtype: Any) -> np.dtype:
    own = {np.dtype(leaf.dtype) for leaf in leaves.values()}
    if dtype is None and len(own) > 1:
        raise ValueError(
            f"params must be of one dtype, or be written as one; got {', '.join(sorted(map(str, own)))}. Give {arg('dtype')}."
        )
    return check_dtype(own.pop()) if dtype is None else check_dtype(dtype, arg("dtype"))


Files = dict[str, dict[str, ParamSlice]]


@contextmanager
def _without_files(folder: Path, files: Files) -> Iterator[None]:
    """Removes the files of weights that are already there if the ``with`` block raises.

    A checkpoint may be deleted while it is read: the next try needs a folder without weights.
    """
    try:
        yield
    except BaseException:
        if jax.process_index() == 0:
            for name in files:
                (folder / name).unlink(missing_ok=True)
        raise


def _share_out(config: TransformerConfig, dtype: np.dtype, max_file_bytes: int) -> Files:
    """Returns the tensors of each file, in the order of the layers."""
    parts: list[dict[str, ParamSlice]] = [{}]
    room = max_file_bytes
    for tensor, param_slice in tensors_of(config):
        size = _num_bytes(param_slice, dtype)
        if size > room and parts[-1]:
            parts.append({})
            room = max_file_bytes
        parts[-1][tensor] = param_slice
        room -= size
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    return {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)
    }


def _num_bytes(param_slice: ParamSlice, dtype: np.dtype) -> int:
    return math.prod(param_slice[2].shape) * dtype.itemsize


def _index(files: Files, dtype: np.dtype) -> dict[str, Any]:
    size = sum(
        _num_bytes(param_slice, dtype)
        for slices in files.values()
        for param_slice in slices.values()
    )
    file_of = {tensor: name for name, slices in files.items() for tensor in slices}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}


def _gather(
    leaves: dict[str, Any], slices: dict[str, ParamSlice], at: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each tensor's name and, on every host, its param, or one layer of the param if it has layers."""
    for (path, layer), group in groupby(slices.items(), key=lambda item: item[1][:2]):
        leaf = leaves[path]
        if layer is not None:
            leaf = take_layer(leaf, at[layer]) if isinstance(leaf, jax.Array) else leaf[at[layer]]
        host = fetch(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
        yield from ((tensor, host) for tensor, _ in group)


def write_description(
    folder: Path | str,
    config: TransformerConfig,
    *,
    source: Path | str | None = None,
    tokenizer: Path | str | None = None,
) -> None:
    """Writes a model's folder without its weights, or replaces it; every process must call it, the first one writes.

    Args:
        folder: The folder, created if needed.
        config: The model.
        source: The folder that the model was read from, whose config.json and tokenizer it keeps; None: a new model.
        tokenizer: The folder whose tokenizer and chat template it keeps in place of those of the source.
    """
    # A run's own model may have a bias that no family has; it cannot be written with its weights.
    own = {}
    if config.experts is not None and config.experts.router_bias:
        config, own = config.with_experts(router_bias=False), {ROUTER_BIAS: True}
    about = (
        make_about(config, source, np.dtype("float32") if source is None else dtype_of(source))
        | own
    )
    if jax.process_index() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if source is not None:
            copy_files(source, Path(folder), OF_MODEL)
        if (chosen := tokenizer or source) is not None:
            copy_files(chosen, Path(folder), OF_TOKENIZER)
        write_json(Path(folder) / CONFIG, about)
    exchange("description written", True)


def make_about(
    config: TransformerConfig, source: Path | str | None, dtype: np.dtype | None
) -> dict[str, Any]:
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
    given = read_json(file_inside(source, CONFIG))
    family_of(config)  # raises for what no folder has
    check_is_of(
        config,
        source,
        "Give the folder that it was read from, or leave source out and copy the tokenizer's files.",
    )
    name = next((key for key in DTYPE_KEYS if key in given), "torch_dtype")
    return given if dtype is None else given | {name: dtype.name}


def check_is_of(config: TransformerConfig, source: Path | str, remedy: str) -> None:
    """Raises ValueError unless a model is the one that a folder describes.

    Args:
        config: The model.
        source: The folder.
        remedy: What to do otherwise.
    """
    theirs = read_config(source, ignore=unmodelled_keys(source))
    one, other = (config_json(_without_training(each), "") for each in (config, theirs))
    if wrong := sorted(key for key in {**one, **other} if one.get(key) != other.get(key)):
        raise ValueError(
            f"a model must be that of its source; got {shorten(wrong)} that differ from {Path(source) / CONFIG}: "
            f"{', '.join(f'{one.get(key)!r} for {other.get(key)!r}' for key in wrong[:3])}. {remedy}"
        )


def _without_training(config: TransformerConfig) -> TransformerConfig:
    """Returns a model without what is no part of it, but of its tokens and of the loss in training."""
    config = replace(config, ignored={}, tokens=None)
    if config.experts is None:
        return config
    return config.with_experts(balance_coefficient=0.0, router_bias=False)


def stop_tokens(folder: Path | str) -> tuple[int, ...]:
    """Returns the tokens that end a text: of generation_config.json, else of config.json, else the tokenizer's eos_token."""
    for name in (GENERATION, CONFIG):
        if (Path(folder) / name).exists():
            found = read_json(file_inside(folder, name)).get("eos_token_id")
            size = (
                read_json(file_inside(folder, CONFIG)).get("vocab_size")
                if (Path(folder) / CONFIG).exists()
                else None
            )
            tokens = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(token) is int and token >= 0 for token in tokens):
                raise ValueError(
                    f"eos_token_id must be a token or a list of tokens; got {found!r} in {Path(folder) / name}. Correct it."
                )
            if tokens and isinstance(size, int) and min(tokens) >= size:
                raise ValueError(
                    f"eos_token_id must have a token of the model, which ends a text; got {found!r} in {Path(folder) / name}, "
                    f"and vocab_size={size}. Correct it, since no text would end."
                )
            if tokens:
                return tuple(tokens)
    end = end_of_tokenizer(Path(folder))
    return () if end is None else (end,)


def copy_files(
    source: Path | str, folder: Path, names: Sequence[str] = (*OF_MODEL, *OF_TOKENIZER)
) -> None:
    """Copies those of the files of the tokenizer, of generation and of the licence that the source has."""
    for name in names:
        if os.path.lexists(Path(source) / name):
            at = Path(name)
            found = file_inside(source, at.name, under=str(at.parent))
            if not (folder / name).exists() or not found.samefile(folder / name):
                (folder / at.parent).mkdir(exist_ok=True)
                write_atomically(
                    folder / name, lambda path, found=found: shutil.copyfile(found, path)
                )


def is_of_model(name: str) -> bool:
    """Returns whether a file of this name says that a folder has a model, or a part of one."""
    return name == CONFIG or ".safetensors" in name


class FolderTakenError(ValueError):
    """A folder cannot take a model, as it has one or belongs to another; every process raises it.

    Args:
        found: The rule, and what there is.
        remedy: What to do about it.
    """

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}. {remedy}".rstrip())
        self.found = found


def check_no_model(folder: Path | str) -> None:
    """Raises FolderTakenError if a folder has a model; every process must call it."""
    folder = Path(folder)
    there: Sequence[Path] = (
        sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    )
    own = [path.name for path in there if is_of_model(path.name) or path == folder]
    if found := exchange("model to write", own)[
        0
    ]:  # of the first process, which may be ahead of the others
        if found == [folder.name] and folder.is_file():
            raise FolderTakenError(
                f"a model is written to a folder; got {folder}, which is a file", "Name another."
            )
        raise FolderTakenError(
            f"a model is written to a folder without one; got {folder} with {shorten(found)}",
            "Name another, or empty it.",
        )


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


def _check_is_run(folder: Path) -> None:
    """Raises ValueError for a folder within a run, and for a model that was written already, with what to give."""
    if (folder / "checkpoints").is_dir():
        return
    given = folder.resolve()
    above = next((each for each in given.parents[:2] if (each / "model" / CONFIG).is_file()), None)
    if above is not None:
        step = f", with --step {given.name}" if given.name.isdigit() else ""
        raise ValueError(
            f"a run must be given by its own folder; got {folder}, which is inside of it. Give {above}{step}."
        )
    if any((folder / name).exists() for name in (ONE_FILE, INDEX)):
        raise ValueError(
            f"a run must be the --out-dir of recipes/gpt.py; got {folder}, a model that transformers reads as it is. Use it."
        )


def open_run(
    run: Path, step: int | None = None, source: Path | None = None, *, keeps_codes: bool = False
) -> RunModel:
    """Returns the model of a run of recipes/gpt.py.

    Args:
        run: The run's folder.
        step: The step of the checkpoint. None: the newest intact one.
        source: The folder with its description. None: model/ in the run's folder.
        keeps_codes: Whether weights in codes are left so, beside their factors; otherwise they are decoded, and merged.

    Raises:
        FileNotFoundError, ValueError, BadCheckpointError: There is no such model, or it is damaged.
    """
    if not run.is_dir():
        raise FileNotFoundError(
            f"a run must be a folder; got {run}, which is none. Name the --out-dir of recipes/gpt.py."
        )
    _check_is_run(run)
    described = run / "model"
    source = described if source is None else source
    if not (source / CONFIG).is_file():
        raise ValueError(
            f"a run must have a description of its model; got no {CONFIG} in {source}. Name the --out-dir of recipes/gpt.py, "
            "or give --source, the folder that the run began from. The params of a model of your own: state = "
            "jaxpar.CheckpointManager(folder / 'checkpoints', mesh).restore(jaxpar.abstract_state(init_fn, key, optimizer, "
            "parallel)), and jaxpar.checkpoint.export_safetensors(path, state.params)."
        )
    from jaxpar.checkpoint.stored_params import (
        as_tree,
        open_stored_params,
    )  # here, since it imports Orbax

    stored, manifest = open_stored_params(
        run / "checkpoints", step, otherwise=", or use the folder of its --save-hf"
    )
    rows = stored["outer/tokens"].shape[0] if "outer/tokens" in stored else 1
    config = read_config(source, ignore=unmodelled_keys(source))
    if (described / CONFIG).is_file() and described.resolve() != source.resolve():
        own = read_config(described, ignore=unmodelled_keys(described))
        check_is_of(own, source, f"Leave --source out: {described} describes the model of the run.")
    config = replace(config, vocab_multiple=rows) if rows >= config.vocab_size else config
    settings, table = manifest.config or {}, param_table(config)
    params = as_tree(merge_factors(decoded(stored, config, settings), settings), table)
    if keeps_codes and "quantize" in settings:
        params = as_tree(in_codes_of(stored, config, settings), table)
    return RunModel(config, params, source, manifest.step)
