"""The weights of a run: the folder that it begins with, those that it leaves for transformers and peft, and what is trained."""

import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

import jaxpar
from jaxpar.data.checksums import checksum_of_files
from jaxpar.huggingface.dtypes import dtype_of, has_float64, narrowed_dtypes
from jaxpar.huggingface.export import check_is_of
from jaxpar.huggingface.folder import ADAPTER_CONFIG, INDEX, ONE_FILE, read_json
from jaxpar.huggingface.from_codes import has_codes
from jaxpar.layered_model import open_packed
from jaxpar.models import lora
from jaxpar.models.transformer import TransformerConfig
from jaxpar.params import count_params
from jaxpar.pipeline import LayerLayout
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.messages import say
from jaxpar.runtime.coordination import check_agreement
from jaxpar.step.optimizer_state import Optimizer
from jaxpar.trainable import trained_part

CHECKED_BYTES = 2**20  # at each end of a file


def check_origin(flags: Any, saved: Mapping[str, Any]) -> None:
    """Raises where a run goes on without the folder of the model that it began with, whose description the run has too.

    Args:
        flags: The flags of a run with ModelFlags as its ``recipe``.
        saved: The settings of the saved run; empty for a new one.
    """
    folder, own = flags.recipe.init_from, flags.common.out_dir / "model"
    if (
        "init_from" not in saved
        or (folder is not None and folder.exists())
        or not (own / "config.json").exists()
    ):
        return
    if folder is None and flags.may_change("init_from"):
        return
    got = "none" if folder is None else f"{folder}, which does not exist"
    allowed = "" if flags.may_change("init_from") else " --allow-change init_from"
    raise FileNotFoundError(
        f"a run that began with --init-from goes on with the same folder, or with the description of its model; got {got}. "
        f"Give the folder, or, if it is gone, --init-from {shlex.quote(str(own))}{allowed}: the checkpoint has the weights."
    )


def check_description(folder: Path, config: TransformerConfig) -> None:
    """Raises where a run goes on as another model than it describes, which is that of its earlier checkpoints too.

    Args:
        folder: The folder of the description.
        config: The model.
    """
    if (folder / "config.json").is_file():
        check_is_of(
            config,
            folder,
            "Give the model that the run began with. To train it as another, write it by `python -m jaxpar export RUN DIR`, "
            "edit DIR/config.json, and begin a run with --init-from DIR.",
        )


def remarks_on_dtypes(init_from: Path | None, *, has_checkpoints: bool) -> Iterator[str]:
    """Yields what to say of a model whose tensors lose bits as they are read, or as all are written in one dtype.

    Args:
        init_from: The folder of the model, if there is one.
        has_checkpoints: Whether the run saves any, from which its model can be written in another dtype.
    """
    if init_from is None:
        return
    if has_float64(init_from):
        yield f"tensors of {init_from} in float64 are read as float32, in which a run has its params"
    narrowed = narrowed_dtypes(init_from)
    if not narrowed:
        return
    how = "`export --dtype float32`"
    remedy = f"{how} keeps their bits"
    if not has_checkpoints:
        remedy = f"to keep their bits save checkpoints, --checkpoint-every 100, say, for {how}"
    yield (
        f"tensors of {init_from} in {', '.join(narrowed)} are written in {dtype_of(init_from)}, which its config.json names: "
        f"{remedy}"
    )


def remark_on_origin(flags: Any, saved: Mapping[str, Any]) -> str:
    """Returns what to say where a run goes on beside another folder than it began with; else "".

    Args:
        flags: As for ``check_origin``, which takes them.
        saved: Likewise.
    """
    folder, began = flags.recipe.init_from, saved.get("init_from")
    if folder is None or began in (None, f"crc32 {checksum_of_model(folder)}"):
        return ""
    if not any(folder.glob("*.safetensors")):  # the description of the run
        return ""
    return (
        f"{folder} is not the folder that the run began with, or was changed since: the weights are those of the checkpoint, "
        "and only config.json and the tokenizer are read. Adapters name it as their base, so its weights must be those of the "
        "run"
    )


def read_weights(
    folder: Path, config: TransformerConfig, layout: LayerLayout, state: jaxpar.TrainState
) -> dict:
    """Returns the weights of a model as saved by transformers, laid out as those of ``state``.

    Raises:
        ValueError: The weights cannot be used, or processes of the run have others at this path.
    """
    if jax.process_count() > 1:
        files = sorted(folder.glob("*.safetensors"))
        check_agreement(
            "read --init-from", {"weights": f"{len(files)} files, {checksum_of_files(files)}"}
        )
    packed = jax.tree.map(lambda leaf: leaf.sharding, lora.without_factors(state.params))
    if layout.is_canonical:
        return jaxpar.huggingface.read_params(folder, config, packed)
    # The number of layers need not be divisible by the stages, so each stage has all layers until they are packed.
    on_all = lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    canonical = packed | {"layers": jax.tree.map(on_all, packed["layers"].tree)}
    params = jaxpar.huggingface.read_params(folder, config, canonical)
    return jax.jit(layout.pack_params, out_shardings=packed)(params)


def first_state(
    weights: dict,
    init: Callable[[jax.Array], PyTree],
    key: jax.Array,
    optimizer: Optimizer,
    parallel: jaxpar.Parallel,
) -> jaxpar.TrainState:
    """Returns the first state of a run that begins with weights that were read.

    With LoRA the factors and their moments are made, and nothing else: no device holds the frozen weights twice.

    Args:
        weights: The weights, from ``read_weights``.
        init: As for ``jaxpar.init_state``, as are ``key``, ``optimizer`` and ``parallel``.
        key: A PRNG key.
        optimizer: The optimizer.
        parallel: Where arrays live.
    """
    trained = partial(trained_part, trainable=parallel.trainable)
    of_trained = replace(parallel, shardings=trained(parallel.shardings), trainable=None)
    state = jaxpar.init_state(lambda key: trained(init(key)), key, optimizer, of_trained)
    return replace(state, params=lora.with_weights(state.params, weights))


def checksum_of_model(folder: Path) -> str:
    """Returns a checksum of the names, sizes, beginnings and ends of a model's files, which does not depend on the folder."""
    found = 0
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        found = checksum_of_file(path, path.name, found)
    return f"{found:08x}"


def checksum_of_file(path: Path, name: str, before: int = 0) -> int:
    """Returns a checksum of a name and of the size, beginning and end of a file, after those files with the one ``before``."""
    size = path.stat().st_size
    found = zlib.crc32(f"{name} {size}".encode(), before)
    with path.open("rb") as file:
        found = zlib.crc32(file.read(CHECKED_BYTES), found)
        file.seek(max(size - CHECKED_BYTES, 0))
        return zlib.crc32(file.read(), found)


def save_adapters(
    folder: Path, flags: ModelFlags, config: TransformerConfig, params: PyTree
) -> None:
    """Writes the factors of LoRA as peft reads them."""
    base = base_of_adapters(folder, flags.init_from)
    jaxpar.huggingface.write_adapters(folder, config, params, base=base)
    say(f"written: {folder}/, adapters for peft")


def base_of_adapters(folder: Path, init_from: Path | None) -> str | None:
    """Returns the model that adapters name as theirs: the one in --init-from, or, if its weights are gone, as named before."""
    if init_from is None or any((init_from / name).exists() for name in (ONE_FILE, INDEX)):
        return None if init_from is None else str(init_from)
    before = folder / ADAPTER_CONFIG
    return read_json(before).get("base_model_name_or_path") if before.is_file() else None


def merged(params: PyTree) -> PyTree:
    """Returns params on the mesh with the factors merged into the weights, which keep their shardings."""
    if not any(map(lora.is_adapted, jax.tree.leaves(params, is_leaf=lora.is_adapted))):
        return params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, lora.without_factors(params))
    return jax.jit(lora.merge, out_shardings=shardings)(params)


def params_to_generate(params: PyTree, layout: LayerLayout) -> PyTree:
    """Returns params of a run in the model's order, with factors merged, or as they are beside weights in codes.

    Merged weights would not be in codes, and take several times the memory.
    """
    if not has_codes(params):
        return jax.jit(lambda packed: lora.merge(layout.unpack_params(packed)))(params)
    if layout.is_canonical:
        return open_packed(params)
    return jax.jit(layout.unpack_params)(params)


def num_factor_params(params: PyTree, layout: LayerLayout) -> int:
    """Returns the number of params in the factors of LoRA, without what pads the layers of a stage: 0 without LoRA."""
    params = jax.eval_shape(layout.unpack_params, params)
    leaves = jax.tree.leaves(params, is_leaf=lora.is_adapted)
    return sum(count_params((node.lora_a, node.lora_b)) for node in leaves if lora.is_adapted(node))
