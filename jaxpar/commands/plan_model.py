"""The model of `plan --model`: a preset, a folder as transformers writes it, or a model of one's own, as `module:name`.

plan --model llama3.1-8b                   a preset
plan --model ./Llama-3.1-8B                a folder with a config.json; no weights are read
plan --model my_model:SHAPE                a ModelShape, or a TransformerConfig, in my_model.py
"""

import dataclasses
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import jaxpar
from jaxpar.fields import arg
from jaxpar.huggingface.config import beyond_positions, read_config_for
from jaxpar.huggingface.folder import check_model_folder
from jaxpar.models.transformer import (
    PRESETS,
    TransformerConfig,
    describe_products,
    preset,
)
from jaxpar.planner import ModelShape, transformer_shape
from jaxpar.run.lora_flags import (
    LoraFlags,
    check_distinct,
    check_targets,
    make_lora,
    remark_on_targets,
)
from jaxpar.runtime.output import printable, tell
from jaxpar.tensor_parallel import flash_attention

KERNELS = {"flash": flash_attention, "xla": "xla"}
# What the files of jaxpar, of Python and of what is installed begin with, and code without a file.
LIBRARIES = (
    str(Path(jaxpar.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
DTYPE = "bfloat16"  # of products and activations, for which presets and folders are planned


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        name: For titles.
        shape: What is planned.
        to_compile: What --compile compiles: the same with the kernels of GPUs.
        attention: "flash" or "xla"; None: that of a ModelShape of one's own.
        run: The flags of a recipe that trains it, and their values, as a plan of `plan --json` has them.
        products: A line on its products in FP8; "" if there are none.
        factors: A line on targets of LoRA that some layers alone have; "" if all have them.
    """

    name: str
    shape: ModelShape
    to_compile: ModelShape
    attention: str | None = None
    run: dict[str, Any] = field(default_factory=dict)
    products: str = ""
    factors: str = ""


def planned_model(flags: Any) -> PlannedModel:
    """Returns the model that the flags of `plan` name.

    Raises:
        FileNotFoundError: There is no such folder.
        TypeError: A module has something else by this name.
        ValueError: There is no such preset or module, or a flag is for transformers alone.
    """
    named = flags.model
    if ".py:" in named:
        path, _, shape = named.partition(".py:")
        raise ValueError(
            f"{arg('model')} must name a module, not its file; got {named}. Call `plan` in its folder, with "
            f"{arg(model=f'{Path(path).name}:{shape}')}."
        )
    if named not in PRESETS and (Path(named).is_dir() or "/" in named or named.startswith(".")):
        run: dict[str, Any] = {"init_from": named, "dtype": DTYPE}
        run |= (
            {"ignore_config_keys": list(flags.ignore_config_keys)}
            if flags.ignore_config_keys
            else {}
        )
        config = _read_folder(named, flags.ignore_config_keys)
        if remark := beyond_positions(config, flags.seq or 0, named, "--seq"):
            tell(remark)
        return _of_config(flags, config, "flash", run)
    if flags.ignore_config_keys:
        raise ValueError(
            f"{arg('ignore_config_keys')} are of the config.json in a folder; got {' '.join(flags.ignore_config_keys)} for "
            f"{named}. Leave them out."
        )
    if ":" in named:
        found = _of_module(named)
        if isinstance(found, ModelShape):
            _check_unused(flags)
            found = dataclasses.replace(found, remake=None)  # its flags are refused
            return PlannedModel(named, found, found, run={"own_model": named})
        own = {"own_model": named, "dtype": jnp.dtype(found.compute_dtype).name}
        return _of_config(flags, found, None, own)
    try:
        config = preset(named, compute_dtype=DTYPE, vocab_multiple=128)
    except ValueError as error:
        raise ValueError(
            f"{error} Or name a folder, such as ./{named}, which is not here, or module:name."
        ) from error
    if config.positions == "learned" and flags.seq is not None:
        if flags.seq > config.max_positions:
            tell(
                f"{arg('seq')} {flags.seq} is longer than the {config.max_positions} positions of {named}: its learned table "
                "is planned with as many, as a run makes it"
            )
        # As the recipe makes its table.
        config = dataclasses.replace(config, max_positions=flags.seq)
    return _of_config(flags, config, "flash", {"model": named, "dtype": DTYPE})


def _of_config(
    flags: Any, config: TransformerConfig, usual: str | None, run: dict[str, Any]
) -> PlannedModel:
    """Returns a transformer with the attention and the rows that the flags ask for.

    Args:
        flags: The flags of `plan`.
        config: The transformer.
        usual: Its attention where the flags do not say; None: its own.
        run: What names it to a recipe.
    """
    attention = flags.attention or usual
    config = (
        config if attention is None else dataclasses.replace(config, attention=KERNELS[attention])
    )
    config = (
        config if flags.products is None else dataclasses.replace(config, products=flags.products)
    )
    if flags.expert_buffer is not None and config.experts is None:
        raise ValueError(
            f"{arg('expert_buffer')} is for a model with experts; got {arg(expert_buffer=flags.expert_buffer)} and "
            f"{flags.model}. Leave it out."
        )
    if flags.expert_buffer is not None and flags.experts == "tensor":
        raise ValueError(
            f"{arg('expert_buffer')} applies to {arg(experts='data')}; got it with {arg(experts='tensor')}. "
            "Leave one of the two out."
        )
    if flags.expert_buffer is not None:
        config = config.with_experts(buffer=flags.expert_buffer)
    if flags.sequence_parallel and flags.tensor == 1:
        raise ValueError(
            f"{arg('sequence_parallel')} splits activations over the tensor axis; got {arg(tensor=1)}. Leave one of them out."
        )
    rows: dict[str, Any] = {"seq": flags.seq, "sequence_parallel": flags.sequence_parallel}
    of_factors = ""
    if flags.lora_rank is not None:
        lora = LoraFlags(lora_rank=flags.lora_rank, lora_targets=flags.lora_targets)
        check_distinct(lora.lora_targets)
        check_targets(lora, config)
        rows["lora"], of_factors = make_lora(lora), remark_on_targets(lora, config)
    rows["quantize"] = flags.quantize
    if config.positions == "learned" and (flags.seq or 0) > config.max_positions:
        raise ValueError(
            f"{arg('seq')} must not be longer than a learned table of positions; got {flags.seq}, and {config.max_positions} "
            f"positions in {flags.model}. Choose {arg(seq=config.max_positions)} or less."
        )
    shape, to_compile = (
        transformer_shape(config, is_planned=planned, **rows) for planned in (True, False)
    )
    named = {"name": flags.model}
    return PlannedModel(
        flags.model,
        dataclasses.replace(shape, **named),
        dataclasses.replace(to_compile, **named),
        "xla" if config.attention == "xla" else "flash",
        run
        | {"seq": shape.tokens_per_row}
        | ({"products": "fp8"} if shape.in_fp8 else {})
        | ({"window": config.window} if config.window else {}),
        describe_products(config),
        of_factors,
    )


def _read_folder(named: str, ignore: Sequence[str]) -> TransformerConfig:
    check_model_folder(named, "--model", needs_weights=False)
    return read_config_for(Path(named), ignore, compute_dtype=DTYPE, vocab_multiple=128)


def _of_module(named: str) -> ModelShape | TransformerConfig:
    """Returns what ``module:name`` names; modules are looked for in the current folder too."""
    module, _, name = named.partition(":")
    remedy = f"Name a {ModelShape.__name__} or a {TransformerConfig.__name__}, such as my_model:SHAPE for SHAPE in my_model.py."
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"{arg('model')} must name a module, as in an import; got {named}. {remedy}"
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise _not_imported(named, error) from error  # a module that this one imports
        raise ValueError(
            f"{arg('model')} must name a module that is there; got {named}: {error}. {remedy}"
        ) from error
    except (Exception, SystemExit) as error:
        raise _not_imported(named, error) from error
    finally:
        sys.path.remove(here)
    if not hasattr(imported, name):
        raise ValueError(
            f"{arg('model')} must name a value of {module}; got {named}, which is not there. {remedy}"
        )
    found = getattr(imported, name)
    if not isinstance(found, (ModelShape, TransformerConfig)):
        kind = type(found).__name__
        raise TypeError(
            f"{arg('model')} must name a ModelShape; got {named}, of type {kind}. {remedy}"
        )
    return found


def _not_imported(named: str, error: BaseException) -> ValueError:
    """Returns what to say of an error of a module that is imported, with the last line that is of no library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    frame = (own or frames)[-1]
    where = f"{frame.filename}:{frame.lineno}"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    main = 'Put what runs a program under if __name__ == "__main__", or correct the module.'
    remedy = main if isinstance(error, SystemExit) else "Correct it."
    got = printable(f"{type(error).__name__}: {error}")[:200].removesuffix(".")
    return ValueError(
        f"{arg('model')} must name a module that can be imported; got {named}: {got} in {printable(where)}. {remedy}"
    )


def _check_unused(flags: Any) -> None:
    """Raises for flags that change a transformer, of which a ModelShape has none."""
    names = (
        "seq",
        "attention",
        "products",
        "sequence_parallel",
        "lora_rank",
        "quantize",
        "expert_buffer",
    )
    given = {name: value for name in names if (value := getattr(flags, name))}
    if given:
        raise ValueError(
            f"a ModelShape has its own rows, layers and sharding rules; got {arg(**given)} with {flags.model}. Change them in "
            "its module, and leave the flags out."
        )
