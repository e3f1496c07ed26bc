"""The flags of `python -m jaxpar plan`, and the checks that need neither JAX nor the planner, whose imports take seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxpar.fields import arg, check_at_least, check_one_of
from jaxpar.gpus import GPUS
from jaxpar.schedule import check_schedule_name

Target = Literal["w_qkv", "w_out", "w_up", "w_down"]
MOST = (
    2**31
)  # of machines, rows and tokens: the divisors of a number take as long as its square root


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the command.

    Attributes:
        model: A transformer by name, such as bloom-176b, llama3-70b or gpt2; the folder of a model as
            transformers writes it, such as ./Llama-3.1-8B; or module:name of a ModelShape or a TransformerConfig of your own.
        ignore_config_keys: Keys of the folder's config.json to ignore, as the recipes' flag of that name.
        nodes: Machines.
        gpus_per_node: GPUs per machine, joined by fast links.
        gpu: a100-40gb, a100-80gb, a100-80gb-jeanzay, h100, h200 or b200.
        batch_size: Rows per step, over all replicas; by default about 4 million tokens, which the devices divide. Of
            your own ModelShape whose rows are one token each it must be given.
        seq: Tokens per row; by default the model's longest, at most 8192.
        replica: Fixes the number of groups of replicas, inside which ZeRO shards.
        data: Fixes the number of replicas of a group.
        context: Fixes the number of parts of each sequence.
        stage: Fixes the number of pipeline stages.
        tensor: Fixes the number of shards of each weight.
        schedule: Fixes the schedule of meshes with stages: gpipe, 1f1b, interleaved, zb-h1, zb-v.
        num_microbatches: Fixes the number of microbatches.
        num_chunks: Fixes the number of chunks of each stage, of meshes with stages.
        zero: Fixes the ZeRO level.
        remat: Fixes what is recomputed: complete layers (yes), attention scores (dots) or no matrix product (no).
        experts: Fixes the axis over which the experts of layers are.
        expert_buffer: With experts over data, as the recipes' --expert-buffer: room for this many times the rows of a
            replica's own tokens; by default for all rows that it can get.
        executor: Rank by lock-step time (spmd) or by free-running time (mpmd).
        top: Number of plans to print.
        compute_efficiency: Fraction of the peak FLOPs that a layer reaches; by default each kernel's time is told by its shape.
        network_efficiency: Fraction of a link's bandwidth that collectives reach.
        memory_headroom: Fraction of a GPU's memory that a plan leaves free, since CUDA, NCCL and fragmentation take it.
        attention: Attention by a fused kernel, as recipes run it on GPUs in bfloat16 (flash), or by XLA, which stores scores;
            by default flash, and of a TransformerConfig of your own what it says.
        products: What layers multiply by their weights in, as the recipes' --products: bfloat16 (compute), or FP8 for large
            weights (fp8); by default bfloat16, and of a TransformerConfig of your own what it says.
        sequence_parallel: Shard activations between pairs of splits over tensor, as the recipes' --sequence-parallel.
        lora_rank: Trains factors of this rank beside the weights of layers and nothing else, as the recipes' --lora-rank.
        lora_targets: The weights that get factors, as the recipes' --lora-targets; the experts of a model take none.
        quantize: Holds the weights of layers beside --lora-rank in nf4, nf4-dq, int8 or fp8, as the recipes' --quantize.
        compile_: Number of the best plans to compile for these GPUs, which need not be there; plans that do not fit by the
            compiler's account are dropped. It needs the extra gpu-compile, and about a minute for each.
        json_: Print the plans as JSON, with every figure. ideal_step_seconds is with stages that run freely, as those
            of the mpmd executor do.
        out_dir: Folder for report.html and for plots of the best plan: its GPUs on the nodes, its memory; needs matplotlib.
        report: File for one page, such as report.html, with the plans and the timeline, shards, memory and traffic of the best.
    """

    model: str
    ignore_config_keys: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    gpu: str = "h100"
    batch_size: int | None = None
    seq: int | None = None
    replica: int | None = None
    data: int | None = None
    context: int | None = None
    stage: int | None = None
    tensor: int | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    num_chunks: int | None = None
    zero: int | None = None
    remat: Literal["yes", "no", "dots"] | None = None
    experts: Literal["tensor", "data"] | None = None
    expert_buffer: float | None = None
    executor: Literal["spmd", "mpmd"] = "spmd"
    top: int = 10
    compute_efficiency: float | None = None
    network_efficiency: float = 0.7
    memory_headroom: float = 0.1
    attention: Literal["flash", "xla"] | None = None
    products: Literal["compute", "fp8"] | None = None
    sequence_parallel: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    lora_rank: int | None = None
    lora_targets: tuple[Target, ...] = ("w_qkv", "w_out", "w_up", "w_down")
    quantize: Literal["nf4", "nf4-dq", "int8", "fp8"] | None = None
    compile_: Annotated[int, tyro.conf.arg(name="compile")] = 0
    json_: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
    out_dir: Path | None = None
    report: Path | None = None


def check_plan_flags(flags: PlanFlags) -> None:
    """Raises ValueError where a number is out of range or a name is unknown, as far as that is told without the planner."""
    names = ("nodes", "gpus_per_node", "top", "batch_size", "seq", "lora_rank")
    axes = ("replica", "data", "context", "stage", "tensor", "num_microbatches", "num_chunks")
    check_at_least(1, **{name: getattr(flags, name) for name in (*names, *axes)})
    for name in ("nodes", "gpus_per_node", "batch_size", "seq"):
        if (getattr(flags, name) or 0) > MOST:
            raise ValueError(
                f"{arg(name)} must be at most {MOST}; got {getattr(flags, name)}. Choose less."
            )
    check_at_least(0, "Choose the number of plans to compile, such as 3.", compile=flags.compile_)
    check_one_of([*GPUS], "Choose the nearest one.", gpu=flags.gpu)
    if flags.schedule is not None:
        check_schedule_name(flags.schedule)
    if flags.lora_targets != PlanFlags.lora_targets and flags.lora_rank is None:
        raise ValueError(
            f"{arg('lora_targets')} applies to {arg('lora_rank')}; got it without that. Add {arg(lora_rank=8)}, or leave it "
            "out."
        )
    if flags.compile_ and flags.executor == "mpmd":
        raise ValueError(
            "--compile compiles the one program of --executor spmd; got --executor mpmd, "
            f"--compile {flags.compile_}. Leave one out."
        )
