"""The weights of a run: the folder that it begins with, those that it leaves for transformers and peft, and what is trained."""

import shlex
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

import jaxpar
from jaxpar.data.checksums import checksum_of_files
from jaxpar.huggingface import export
from jaxpar.huggingface.export import check_is_of, dtype_of
from jaxpar.huggingface.finite import OutOfRangeError
from jaxpar.huggingface.folder import read_json, write_json
from jaxpar.huggingface.from_codes import has_codes, layer_by_layer
from jaxpar.layered_model import open_packed
from jaxpar.models import lora
from jaxpar.models.transformer import TransformerConfig
from jaxpar.params import count_params
from jaxpar.pipeline import LayerLayout
from jaxpar.run.flags import CommonFlags
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.messages import say
from jaxpar.runtime.coordination import check_agreement, exchange
from jaxpar.step.optimizer_state import Optimizer
from jaxpar.trainable import trained_part

CHECKED_BYTES = 2**20  # at each end of a file
MARK = "save_hf.json"  # in the folder of a run: where it began to write its model
PART_OF_SAFETENSORS = ".tmp"  # begins the name under which the library writes a file


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
        size = path.stat().st_size
        found = zlib.crc32(f"{path.name} {size}".encode(), found)
        with path.open("rb") as file:
            found = zlib.crc32(file.read(CHECKED_BYTES), found)
            file.seek(max(size - CHECKED_BYTES, 0))
            found = zlib.crc32(file.read(), found)
    return f"{found:08x}"


def save_adapters(
    folder: Path, flags: ModelFlags, config: TransformerConfig, params: PyTree
) -> None:
    """Writes the factors of LoRA as peft reads them."""
    base = None if flags.init_from is None else str(flags.init_from)
    jaxpar.huggingface.write_adapters(folder, config, params, base=base)
    say(f"written: {folder}/, adapters for peft")


def check_save_folder(folder: Path, flags: CommonFlags) -> None:
    """Raises ValueError if the folder of --save-hf has a model, but for that of a run that was killed while it wrote it.

    A run notes in its own folder that it begins to write (``begin_to_save``), and is then resumed with as many steps.
    """
    if not _is_begun(folder, flags):
        jaxpar.huggingface.check_no_model(folder)


def begin_to_save(folder: Path, flags: CommonFlags) -> None:
    """Notes in the run's folder that the model is written now, and removes what is left of one that a killed run began."""
    if jax.process_index() != 0:
        return
    if _read_mark(flags.out_dir) == _mark(folder, flags) and folder.is_dir():
        for path in folder.iterdir():
            if export.is_of_model(path.name) or path.name.startswith(PART_OF_SAFETENSORS):
                path.unlink()
    write_json(flags.out_dir / MARK, _mark(folder, flags))


def _is_begun(folder: Path, flags: CommonFlags) -> bool:
    """Returns whether a run that goes on has begun to write its model; every process must call it."""
    is_begun = flags.resume and _read_mark(flags.out_dir) == _mark(folder, flags)
    return exchange("model that was begun", is_begun)[0]  # of the first process, which writes


def _mark(folder: Path, flags: CommonFlags) -> dict[str, Any]:
    return {"folder": str(folder.resolve()), "steps": flags.steps}


def _read_mark(out_dir: Path) -> dict[str, Any] | None:
    return read_json(out_dir / MARK) if (out_dir / MARK).exists() else None


def check_room(
    folder: Path, config: TransformerConfig, flags: CommonFlags, *, described_by: Path | None
) -> None:
    """Raises OSError if the disk of a folder has no room for the model that ``save_model`` would write there.

    What a killed run has written there takes room until ``begin_to_save`` removes it.
    """
    if not _is_begun(folder, flags):
        dtype = None if described_by is None else dtype_of(described_by)
        export.check_room(folder, config, dtype or "float32")


def save_model(
    folder: Path,
    config: TransformerConfig,
    params: PyTree,
    *,
    described_by: Path,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Writes the model as transformers reads it, with the description in another folder.

    Its dtype is that of the description, or float32 if a weight is too large for that one: params may be nowhere else.

    Args:
        folder: Where it is written.
        config: The model.
        params: Its params.
        described_by: The folder with its description.
        keep: Called where the disk takes no model, before the error is raised: saves the params elsewhere.
    """
    try:
        _save_model(folder, config, params, described_by)
    except OSError as error:
        # In a run of several processes the first one writes, and all know in advance that there is no room.
        if isinstance(error, export.NoRoomError) or jax.process_count() == 1:
            keep()
        raise


def save_model_at_least(
    folder: Path,
    config: TransformerConfig,
    params: PyTree,
    *,
    described_by: Path,
    flags: CommonFlags,
) -> None:
    """Writes the model of a run whose last checkpoint could not be saved; says why, if it cannot be written either.

    Args:
        folder: As for ``save_model``, as are the next three.
        config: Likewise.
        params: Likewise.
        described_by: Likewise.
        flags: As for ``begin_to_save``.
    """
    if jax.process_count() > 1:
        say(
            f"nor is there a model in {folder}: several processes write none once a save has failed"
        )
        return
    try:
        with suppress(
            OSError
        ):  # the disk of the run's folder is full, and that of the model may not be
            begin_to_save(folder, flags)
        _save_model(folder, config, params, described_by)
    except (OSError, ValueError) as error:
        say(f"nor could the model be written in {folder}: {error}")


def _save_model(
    folder: Path, config: TransformerConfig, params: PyTree, described_by: Path
) -> None:
    params, remark = layer_by_layer(params) if has_codes(params) else merged(params), ""
    try:
        jaxpar.huggingface.write_model(folder, config, params, source=described_by)
    except OutOfRangeError as error:
        remark = f", as float32: {error}"
        jaxpar.huggingface.write_model(folder, config, params, source=described_by, dtype="float32")
    say(f"written: {folder}/, a model for transformers{remark}")


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


def num_factor_params(params: PyTree) -> int:
    """Returns the number of params in the factors of LoRA: 0 without LoRA."""
    leaves = jax.tree.leaves(params, is_leaf=lora.is_adapted)
    return sum(count_params((node.lora_a, node.lora_b)) for node in leaves if lora.is_adapted(node))
