"""The language model of a run: size, layout over stages, and weights to begin from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

import jaxpar
from jaxpar import fp8
from jaxpar.compile_only import check_cudnn
from jaxpar.data.batches import RowSource
from jaxpar.data.text import BYTES
from jaxpar.devices import are_gpus
from jaxpar.fields import check_not_negative
from jaxpar.huggingface.config import read_config_for
from jaxpar.huggingface.config_keys import WINDOW_KEYS
from jaxpar.huggingface.folder import check_model_folder
from jaxpar.huggingface.params import check_weights
from jaxpar.huggingface.tokenizer import FolderTokenizer
from jaxpar.mesh import sizes_text
from jaxpar.models import lora, transformer
from jaxpar.models.transformer import TransformerConfig
from jaxpar.params import count_params, init_params, is_spec, stack_layers, zeros
from jaxpar.pipeline import LayerLayout
from jaxpar.run.flags import GpuFlags, MeshFlags
from jaxpar.run.language_data import Data
from jaxpar.run.lora_flags import LoraFlags, check_targets, make_lora, remark_on_targets
from jaxpar.run.messages import say
from jaxpar.schedule import Schedule, make_schedule
from jaxpar.tensor_parallel import EXPERT_RULES, EXPERTS_OVER_DATA, TRANSFORMER_RULES

VOCAB_MULTIPLE = 128  # the same on every mesh, so that a checkpoint fits any
# Of a row, unless a run is told another number: 64 take as much memory as a bias of 32 heads of 4,096 tokens.
MOST_DOCUMENTS = 64


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model and where it begins; its base in a script has the script's own flags too.

    Attributes:
        model: A model by its name: llama-bytes, gpt2-bytes, bloom-bytes, moe-bytes and the tiny llama-tiny are small and read
            bytes; gpt2, llama-7b, mixtral-8x7b and others have the sizes of the published models and random weights, for
            tokens in --data.
        init_from: A folder with a model as saved by transformers, to train further instead of --model: GPT-2, Llama, Mistral,
            Qwen2, Qwen3, SmolLM2, OLMo 2, Granite, BLOOM, Mixtral, Qwen3-MoE or OLMoE; text in --data goes through its
            tokenizer.json.
        window: Each position attends to this many, itself included. None: as many as in the model named above; with --init-from
            no others.
        ignore_config_keys: Keys of the config.json in --init-from to ignore, such as attn_pdrop: jaxpar trains without dropout.
        dtype: Dtype of products and activations. Parameters, their updates, norms and the loss are float32.
        products: What layers multiply by their weights in. compute: --dtype. fp8: FP8 with a scale for each tensor, for weights
            whose widths are both at least 1024 and multiples of 16, on Hopper and later GPUs.
        expert_split: What --mesh.tensor splits in a model with experts: their number, or the hidden width of each.
        experts: The axis over which the experts of a model are divided: --mesh.tensor, as --expert-split says; or --mesh.data,
            whose replicas send each other rows, and --mesh.tensor splits their hidden width.
        expert_buffer: With --experts data, a replica has room for this many times the rows of its own tokens, and a step in
            which one gets more is skipped. None: for all rows that it can get.
        router_bias_rate: After each step the bias of an expert with fewer tokens than the mean rises by this, and that of one
            with more falls; 0.001, say. None: no biases.
        temperature: Temperature of the sample; 0 takes the likeliest token each time.
        top_k: The sample draws from this many of the likeliest tokens.
    """

    model: str = "llama-bytes"
    init_from: Path | None = None
    window: int | None = None
    ignore_config_keys: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["compute", "fp8"] = "compute"
    expert_split: Literal["experts", "expert_mlp"] = "experts"
    experts: Literal["tensor", "data"] = "tensor"
    expert_buffer: float | None = None
    router_bias_rate: float | None = None
    temperature: float = 0.8
    top_k: int = 40


# -- flags -------------------------------------------------------------------------------------------------------------


def check_model(flags: ModelFlags, seq: int, *, needs_weights: bool) -> None:
    """Raises where a flag of the model is out of range, or does not fit another.

    Args:
        flags: The flags.
        seq: The --seq.
        needs_weights: Whether --init-from must have weights, since the run begins with them.
    """
    check_origin(flags)
    if flags.init_from is not None:
        check_model_folder(flags.init_from, "--init-from", needs_weights=needs_weights)
    # A config that is wrong or cannot be read is named before text is read, and before a tokenizer is missed.
    check_config(flags, seq)
    if flags.init_from is not None and needs_weights:
        check_weights(flags.init_from, config_of_flags(flags, seq)[0])
    check_not_negative("0 takes the likeliest token.", temperature=flags.temperature)
    if flags.temperature == 0 and flags.top_k != ModelFlags.top_k:
        raise ValueError(
            f"--top-k applies to a sample that is drawn; got {flags.top_k} with --temperature 0, which takes the likeliest "
            "token each time. Leave it out, or choose a temperature above 0."
        )


def check_origin(flags: ModelFlags) -> None:
    """Raises ValueError where the flags name a model in two ways, or say how to read a folder and name none."""
    if flags.init_from is not None and flags.model != ModelFlags.model:
        raise ValueError(
            f"--init-from determines the model; got it with --model {flags.model}. Leave out one of the two."
        )
    if flags.init_from is None and flags.ignore_config_keys:
        raise ValueError(
            f"--ignore-config-keys are of the config.json in --init-from; got {' '.join(flags.ignore_config_keys)} without a "
            "folder. Leave them out, or give --init-from."
        )


def check_config(flags: ModelFlags, seq: int) -> None:
    """Raises where the model that the flags name does not exist, or a flag does not fit it; a folder is read."""
    _check_experts(flags, *config_of_flags(flags, seq))


def _check_experts(flags: ModelFlags, config: TransformerConfig, named: str) -> None:
    """Raises where a flag of experts has no effect, or does not fit another."""
    given = {
        "--experts data": flags.experts == "data",
        "--expert-split expert_mlp": flags.expert_split == "expert_mlp",
        "--router-bias-rate": flags.router_bias_rate is not None,
    }
    if config.experts is None and any(given.values()):
        flag = next(flag for flag, is_given in given.items() if is_given)
        raise ValueError(
            f"{flag} is for a model with experts; got {named}. Leave it out, or choose --model moe-bytes."
        )
    if flags.expert_buffer is not None and flags.experts != "data":
        raise ValueError(
            f"--expert-buffer applies to --experts data; got {flags.expert_buffer:g} with --experts {flags.experts}. Add "
            "--experts data, or leave it out."
        )
    if flags.experts == "data" and given["--expert-split expert_mlp"]:
        raise ValueError(
            "--expert-split applies to --experts tensor; got expert_mlp with --experts data, under which --mesh.tensor splits "
            "the hidden width of experts in any case. Leave it out."
        )
    if flags.router_bias_rate is not None and flags.init_from is not None:
        raise ValueError(
            "a model of transformers has no biases for --router-bias-rate; got it with --init-from. Leave out one of the two."
        )
    check_not_negative("Choose 0.001, say.", router_bias_rate=flags.router_bias_rate)


def check_biases(flags: ModelFlags, saved: Mapping[str, Any]) -> None:
    """Raises where a run with ``saved`` settings cannot go on, since only one of its model and this has biases of routers."""
    rate, had = flags.router_bias_rate, saved.get("router_bias_rate")
    if saved and (rate is None) != (had is None):
        raise ValueError(
            f"a run has biases of its routers from its first step, or none; got --router-bias-rate {rate} for a run saved with "
            f"{had}. {'Leave it out' if had is None else f'Add --router-bias-rate {had:g}'}, or start a run in another folder."
        )


# -- the model ---------------------------------------------------------------------------------------------------------


def config_of_flags(flags: ModelFlags, seq: int) -> tuple[TransformerConfig, str]:
    """Returns the model that the flags ask for, before its data are known, and the flag that names it."""
    changes = {
        "vocab_multiple": VOCAB_MULTIPLE,
        "compute_dtype": flags.dtype,
        "products": flags.products,
    }
    if flags.init_from is None:
        changes |= {} if flags.window is None else {"window": flags.window}
        config, named = transformer.preset(flags.model, **changes), f"--model {flags.model}"
        if config.positions == "learned":
            config = replace(config, max_positions=seq)
    else:
        config = read_config_for(flags.init_from, flags.ignore_config_keys, **changes)
        named = f"--init-from {flags.init_from}"
        if flags.window not in (None, config.window):
            raise ValueError(
                f"--init-from determines the model; got --window {flags.window}, and a model of {named} that has "
                f"{config.window or 'none'}. Leave --window out, or write sliding_window into a config.json of model_type "
                "mistral."
            )
    if config.experts is not None:
        has_bias = flags.router_bias_rate is not None
        config = config.with_experts(
            split=flags.expert_split, buffer=flags.expert_buffer, router_bias=has_bias
        )
    if config.positions == "learned" and seq > config.max_positions:
        raise ValueError(
            f"--seq must not be longer than a learned table of positions; got {seq}, and {config.max_positions} "
            f"positions in {named}. Choose --seq {config.max_positions} or less."
        )
    return config, named


def model_config(
    flags: ModelFlags, seq: int, text: Data, mesh: Mesh, gpu: GpuFlags | None = None
) -> TransformerConfig:
    """Returns the model that the flags ask for, for these data and this mesh."""
    if text.is_bytes:
        check_reads_bytes(flags, seq, text.source)
    config, named = config_of_flags(flags, seq)
    if flags.init_from is None and isinstance(text.tokenizer, FolderTokenizer):
        _check_tokenizer(text.tokenizer, config, named)
    config.check_tensor(mesh.shape["tensor"])
    config = config.for_tensor(mesh.shape["tensor"])
    if mesh.devices.flat[0].platform == "gpu" and flags.dtype == "bfloat16":
        if gpu is not None and gpu.compile_for:
            check_cudnn()
        config = replace(config, attention=jaxpar.flash_attention)
    return config


def check_reads_bytes(flags: ModelFlags, seq: int, source: str) -> None:
    """Raises ValueError where the model reads other tokens than bytes, which those of a source are."""
    config, named = config_of_flags(flags, seq)
    if config.tokens == "bytes" and config.vocab_size >= BYTES:
        return
    other = (
        "choose --model gpt2-bytes, llama-bytes, bloom-bytes or moe-bytes"
        if flags.init_from is None
        else 'if its tokens are bytes, add "jaxpar_tokens": "bytes" to its config.json'
    )
    raise ValueError(
        f"{named} reads tokens of a vocabulary of {config.vocab_size}; got {source}, whose tokens are bytes. Give a "
        f".bin of its tokens by --data, or text by --data with its tokenizer.json by --tokenizer, or {other}."
    )


def _check_tokenizer(tokenizer: FolderTokenizer, config: TransformerConfig, named: str) -> None:
    """Raises where a tokenizer has tokens that a named model lacks."""
    if (count := tokenizer.vocab_size) > config.vocab_size:
        fitting = [name for name, each in transformer.PRESETS.items() if each.vocab_size >= count]
        other = (
            f"choose --model {fitting[0]} or another of {count} tokens or more, or "
            if fitting
            else ""
        )
        raise ValueError(
            f"{named} has a vocabulary of {config.vocab_size} tokens; got {count} of the tokenizer in {tokenizer.folder}. To "
            f"train its model further, give --init-from its folder; else {other}leave --tokenizer out and learn bytes."
        )


def with_documents(
    config: TransformerConfig, most: int | None, sources: Sequence[RowSource]
) -> TransformerConfig:
    """Returns the model whose kernel may be told of ``most`` documents a row, by default as many as the sources know of."""
    known = [each.max_documents for each in sources]
    found = most or max((each for each in known if each is not None), default=1)
    if config.attention == "xla" or found == 1 or (most is None and None in known):
        return config
    if most is None and found > MOST_DOCUMENTS:
        say(
            f"rows have up to {found} documents; attention is faster with --max-documents {MOST_DOCUMENTS} or fewer"
        )
        return config
    return replace(config, max_documents=found)


def check_sizes(
    flags: ModelFlags,
    seq: int,
    mesh: MeshFlags,
    schedule: str,
    num_chunks: int | None,
    layers: Sequence[int] | None,
) -> None:
    """Raises where a mesh, as far as its sizes are known, does not divide the model of --model.

    It is what ``check_mesh`` finds without devices, for a manifest.
    """
    if mesh.tensor > 0:
        config, _ = config_of_flags(flags, seq)
        config.check_tensor(mesh.tensor)
        if mesh.stage > 0:
            schedule_of_one = make_schedule(schedule, mesh.stage, 1, num_chunks)
            make_layout(config.for_tensor(mesh.tensor), schedule_of_one, layers)


def check_pipeline(
    stage: int, schedule: str, num_chunks: int | None, layers: Sequence[int] | None
) -> None:
    """Raises where the flags of a pipeline have no effect, or its schedule is none.

    Args:
        stage: The stages of the mesh; -1: not known yet.
        schedule: The --schedule.
        num_chunks: The --num-chunks.
        layers: The --layers-per-virtual-stage.
    """
    if stage == 1 and (num_chunks or layers):
        raise ValueError(
            "--num-chunks and --layers-per-virtual-stage apply to pipelines; got one of them with --mesh.stage 1. "
            "Leave it out, or choose --mesh.stage 2 or more."
        )
    make_schedule(schedule, max(stage, 1), 1, num_chunks)


def check_mesh(
    flags: ModelFlags,
    lora_flags: LoraFlags,
    seq: int,
    mesh: Mesh,
    schedule: str,
    num_chunks: int | None,
    layers: Sequence[int] | None,
) -> None:
    """Raises where a mesh cannot split the model that the flags ask for, before its data are read."""
    check_pipeline(mesh.shape["stage"], schedule, num_chunks, layers)
    config = config_of_flags(flags, seq)[0].for_tensor(mesh.shape["tensor"])
    transformer.check_products(config)
    if config.products == "fp8" and are_gpus(mesh):
        fp8.check_gpu(mesh.devices.flat[0].device_kind)
    if lora_flags.quantize is not None and config.experts is not None:
        raise ValueError(
            f"--quantize is for models without experts; got {lora_flags.quantize} with {config.experts.count} experts a layer. "
            "Leave it out, or choose another model."
        )
    check_targets(lora_flags, config)
    layout = make_layout(
        config, make_schedule(schedule, mesh.shape["stage"], 1, num_chunks), layers
    )
    make_params(lora_flags, config, layout, mesh, flags.experts)


def make_layout(
    config: TransformerConfig, schedule: Schedule, layers: Sequence[int] | None = None
) -> LayerLayout:
    """Returns the layout that stores each layer on its stage, so that no step moves weights.

    Args:
        config: The model.
        schedule: The schedule of its pipeline.
        layers: Layers of each virtual stage; None: equal, or where they cannot be, the leading dense ones count too.
    """
    count, stages, chunks = config.num_stacked_layers, schedule.num_stages, schedule.num_chunks
    if stages == 1:
        return LayerLayout(count, 1)
    share, rest = divmod(count, stages * chunks)
    ends = min(config.num_leading_layers, share) if rest else 0, 0
    return LayerLayout(count, stages, chunks, schedule.placement, layers, ends)


def make_params(
    flags: LoraFlags,
    config: TransformerConfig,
    layout: LayerLayout,
    mesh: Mesh,
    experts: Literal["tensor", "data"] = "tensor",
    *,
    reads_weights: bool = False,
) -> tuple[Callable[[jax.Array], PyTree], PyTree]:
    """Returns the function that makes the params, in the order of the layout and with factors of LoRA, and their shardings.

    Weights that ``read_weights`` replaces begin at zero: random ones would take longer to compile and to draw.
    """
    table, factors = transformer.param_table(config), make_lora(flags)
    if reads_weights:
        table = jax.tree.map(lambda spec: replace(spec, init=zeros), table, is_leaf=is_spec)
    packed = table | {
        "layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))
    }
    split = "experts" if config.experts is None else config.experts.split
    of_experts = EXPERTS_OVER_DATA if experts == "data" else EXPERT_RULES[split]
    shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES | of_experts)
    if factors is None:
        return lambda key: layout.pack_params(init_params(table, key)), shardings
    with_factors = lambda key: factors.init(jax.random.fold_in(key, 1), init_params(table, key))
    shardings, kind = factors.shardings(shardings), flags.quantize
    if kind is None:
        return lambda key: layout.pack_params(with_factors(key)), shardings
    in_codes = lambda key: lora.quantize(with_factors(key), kind, transformer.LAYER_WEIGHTS)
    init = lambda key: layout.pack_params(in_codes(key))
    return init, lora.quantized_shardings(jax.eval_shape(init, jax.random.key(0)), shardings)


def check_compiled(
    compiled: jax.stages.Compiled, config: TransformerConfig, mesh: Mesh, num_factors: int
) -> None:
    """Raises ValueError where a step in FP8 was compiled for GPUs with fewer products in FP8 than its weights have.

    A weight has three, without a gradient two, and one where no layer below has factors that need it.
    """
    if config.products == "fp8" and are_gpus(mesh):
        num_weights = sum(transformer.fp8_weights(config).values())
        passes = fp8.PASSES if not num_factors else 2 if config.num_layers > 1 else 1
        fp8.check_products(compiled.as_text() or "", passes * num_weights)


def flops_per_token(config: TransformerConfig, seq: int, num_factors: int = 0) -> int:
    """Returns the useful operations of training on a token (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    A frozen weight takes 4 operations a token instead of 6, since it has no gradient; experts that a token does not use take
    none.
    """
    num_params = transformer.num_active_params(config)
    of_weights = 4 * num_params + 6 * num_factors if num_factors else 6 * num_params
    return of_weights + 12 * config.num_layers * config.embed_dim * seq


def describe(
    flags: ModelFlags,
    factors: LoraFlags,
    config: TransformerConfig,
    mesh: Mesh,
    num_factors: int,
    *,
    schedule: str,
) -> str:
    """Returns lines about the model, its mesh and what of it is trained.

    Args:
        flags: Its flags.
        factors: The flags of LoRA.
        config: The model.
        mesh: The mesh.
        num_factors: The number of params in factors of LoRA.
        schedule: The schedule of its pipeline, if the mesh has stages.
    """
    lines = [
        f"{flags.init_from or flags.model}: {config.num_layers} layer{'s' * (config.num_layers > 1)}, {config.embed_dim} wide, "
        f"{count_params(transformer.param_table(config)):,} parameters; "
        f"{sizes_text(mesh.shape)}" + (f", {schedule}" if mesh.shape["stage"] > 1 else "")
    ]
    if num_factors:
        targets = ", ".join(factors.lora_targets)
        lines.append(
            f"LoRA of rank {factors.lora_rank} on {targets}: {num_factors:,} parameters are trained"
        )
    if remark := remark_on_targets(factors, config):
        lines[-1] += f"; {remark}"
    if factors.quantize is not None:
        lines.append(
            f"{factors.quantize}: {', '.join(transformer.LAYER_WEIGHTS)} of each layer, which are frozen"
        )
    if products := transformer.describe_products(config):
        lines.append(products)
    if config.ignored:
        of_windows = ": where rows are longer than its window, it is another model"
        has_windows = {*WINDOW_KEYS} & {*config.ignored}
        ignored = f"ignored in its config.json: {', '.join(config.ignored)}"
        lines.append(ignored + of_windows * bool(has_windows))
    return "\n".join(lines)
