"""Trains a language model on real text with data, pipeline and tensor parallelism: GPT-2, Llama or BLOOM, by the byte or token.

One device:                python recipes/gpt.py

Three dimensions:          python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2

Its cost, no training:     python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 --dry-run

Your own text:             python recipes/gpt.py --data novels/

GPT-2 on its tokens:       python recipes/gpt.py --model gpt2 --data fineweb/ --seq 1024 --batch-size 512 --dtype bfloat16

From published weights:    python recipes/gpt.py --init-from tinyllama/ --data chat.jsonl --lr 3e-5 --save-hf tuned/

LoRA on such weights:      python recipes/gpt.py --init-from tinyllama/ --data chat.jsonl --lora-rank 8 --save-hf tuned/

The results are those of one device, for every mesh and schedule.
"""

if __name__ == "__main__":
    import first_line

    first_line.say()

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import checkpointing
import cli
import compiling
import gpt_plots
import jax
import lora_flags
import run_report
from data_flags import DataFlags, check_data_flags, in_rows
from gpt_evaluation import conclude, draw, held_out_batches, mean_loss
from gpt_model import activation_constraint, flops_per_token, make_layout, model_shape, read_weights, shape_of_flags
from language_data import Data, bad_data, load_data, make_rows, rows_checked_too
from lora_flags import LoraFlags, check_lora
from microbatches import check_microbatches
from optimizer_flags import OptimizerFlags, check_optimizer, make_optimizer, say_new_rate, with_saved_warmup
from optimizer_flags import settings as optimizer_settings
from shared_flags import may_change

import jaxpar
from jaxpar.backward.remat import REMAT
from jaxpar.data.batches import round_up
from jaxpar.huggingface.folder import check_model_folder
from jaxpar.metrics.log import MetricsLog
from jaxpar.models import transformer
from jaxpar.models.lora import merge, with_weights
from jaxpar.params import count_params, init_params, stack_layers
from jaxpar.schedule import Schedule, lockstep_form, make_schedule
from jaxpar.tensor_parallel import EXPERT_RULES, TRANSFORMER_RULES


@dataclass(frozen=True, kw_only=True)
class Config(DataFlags, OptimizerFlags, LoraFlags):
    model: str = "llama-bytes"
    """A model by its name: llama-bytes, gpt2-bytes, bloom-bytes and moe-bytes are small and read bytes; gpt2, llama-7b,
    mixtral-8x7b and others are the published models, for tokens in --data."""
    init_from: Path | None = None
    """A folder with a model as saved by transformers, to train further instead of --model: GPT-2, Llama, Mistral, Qwen2, Qwen3,
    SmolLM2, OLMo 2, BLOOM, Mixtral, Qwen3-MoE or OLMoE; text in --data goes through its tokenizer.json."""
    ignore_config_keys: tuple[str, ...] = ()
    """Keys of the config.json in --init-from to ignore, such as attn_pdrop: jaxpar trains without dropout."""
    schedule: str = "zb-h1"
    """The pipeline's schedule: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Without a pipeline it has no effect."""
    num_chunks: int | None = None
    """Chunks of each stage. None: the number that the schedule needs, 2 for interleaved and zb-v, else 1."""
    layers_per_virtual_stage: tuple[int, ...] | None = None
    """Layers of each virtual stage, in the model's order, such as 5 6 6 5. None: as equal as possible."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes. none: only elementwise operations; full: all activations of a layer; dots: all but
    products with weights and fused attention."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded over the replicas: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of products and activations. Parameters, their updates, norms and the loss are float32."""
    sequence_parallel: bool = False
    """Shard activations between the layers' products over --mesh.tensor along the sequence."""
    expert_split: Literal["experts", "expert_mlp"] = "experts"
    """What --mesh.tensor splits in a model with experts: their number, or the hidden width of each."""
    eval_every: int = 50
    """Steps between two evaluations on the text held out."""
    eval_rows: int = 128
    """Rows of the text held out, the same in each evaluation."""
    save_hf: Path | None = None
    """A folder for the trained model, which transformers reads, with the config.json and tokenizer of --init-from."""
    temperature: float = 0.8
    """Temperature of the sample; 0 takes the likeliest token each time."""
    top_k: int = 40
    """The sample draws from this many of the likeliest tokens."""
    out_dir: Path = Path("runs/gpt")
    """Folder for config.json, metrics.jsonl, plots, the sample and checkpoints."""


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"], batch["weight"])


def main(config: Config) -> None:
    with cli.checks():
        gpt_plots.check_installed()
        with rows_checked_too(config, config.init_from):
            mesh = cli.make_mesh(config)
        config = with_saved_warmup(config, checkpointing.saved_settings(config))
        check_flags(config, mesh)
        if config.save_hf is not None:
            jaxpar.huggingface.check_no_model(config.save_hf)
        config = in_rows(config, mesh)
        text = load_data(config, config.init_from)
        shape = model_shape(config, text, mesh)
        train, test = make_rows(config, text, shape.vocab_size)
        schedule = make_timetable(config, mesh, len(train))
        layout = make_layout(config, shape, schedule)
        table, rules = transformer.param_table(shape), TRANSFORMER_RULES | EXPERT_RULES[shape.expert_split]
        packed = table | {"layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))}
        shardings, lora = jaxpar.shardings_from_dims(packed, mesh, rules), lora_flags.make_lora(config)
        shardings = shardings if lora is None else lora.shardings(shardings)
        optimizer = make_optimizer(config)
        init = lambda key: layout.pack_params(lora_flags.with_factors(lora, key, init_params(table, key)))
        held = {"zero": config.zero, "trainable": lora_flags.trainable(lora)}
        first = (init, jax.random.key(config.seed), optimizer, mesh, shardings)
        value_and_grad = jaxpar.value_and_grad(
            transformer.make_model(shape, **activation_constraint(config)),
            transformer.add_routing_losses(shape, loss, metrics=True),
            mesh,
            has_aux=shape.has_routing_losses,
            schedule=schedule,
            num_microbatches=schedule.num_microbatches,
            remat=REMAT[config.remat],
            layout=layout,
            shardings=shardings,
            **held,
        )
        checkpoints = checkpointing.open_checkpoints(config, mesh)
        decisive = numbers_depend_on(config, text)
        abstract = jaxpar.abstract_state(*first, **held)
        begin = checkpointing.resume(config, checkpoints, abstract, decisive)
        loaded = None if begin.state or config.compile_for else read_weights(config, shape, layout, abstract)

    say_new_rate(config, begin.saved, begin.origin.step)
    num_factors = lora_flags.num_factor_params(abstract.params)
    describe(config, text, shape, table, mesh, num_factors)
    multiple = mesh.shape["data"] * schedule.num_microbatches
    num_rows = round_up(config.batch_size, multiple)
    read = {
        "seed": config.seed,
        "multiple": multiple,
        "origin": begin.origin,
        "only": jaxpar.local_rows(num_rows, mesh),
    }

    def batch_of(step: int) -> dict[str, jax.Array]:
        with bad_data():
            rows = train.batch(config.batch_size, step=step, **read)
        return jaxpar.shard_batch(rows, mesh, num_rows=num_rows)

    start = begin.origin.step
    num_tokens = config.batch_size * config.seq
    watchers = cli.watchers(
        config, checkpoints, flops_per_step=num_tokens * flops_per_token(config, shape, num_factors)
    )
    with bad_data():
        own = train.batch(config.batch_size, step=start, **read)
    whole = jax.tree.map(lambda column: jax.ShapeDtypeStruct((num_rows, *column.shape[1:]), column.dtype), own)
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=config.max_grad_norm)
    train_step = compiling.compile_step(config, train_step, abstract, jaxpar.abstract_batch(whole, mesh))
    if config.dry_run:
        return compiling.say_cost(config, train_step, mesh, schedule)

    watchers.append(run_report.watcher(config, train_step, abstract, mesh, schedule))
    state = jaxpar.init_state(*first, **held) if begin.state is None else begin.state
    if loaded is not None:
        state = dataclasses.replace(state, params=with_weights(state.params, loaded))

    checkpointing.overwrite(config, checkpoints)
    cli.write_config(config, mesh)
    jaxpar.huggingface.write_description(config.out_dir / "model", shape, source=config.init_from)
    held_out = held_out_batches(config, test, mesh)
    model = transformer.make_model(shape)
    logits = lambda packed, batch: transformer.logits_of(model.apply(layout.unpack_params(packed), batch))
    evaluate = jax.jit(lambda packed, batch: loss(logits(packed, batch), batch))
    began = time.perf_counter()
    kept = {"items_per_step": num_tokens, "items": "tokens", "first_step": start, "watchers": watchers}
    with (
        MetricsLog(config.out_dir, config.steps, **kept) as log,
        checkpointing.guard(
            config,
            checkpoints,
            log,
            config=decisive,
            samples=lambda step: train.samples_before(config.batch_size, step, begin.origin),
            remedy=f"Choose a smaller one than --learning-rate {config.learning_rate:g}.",
            draw=lambda: draw(config, text, schedule),
        ) as guard,
    ):
        for step in range(start, config.steps):
            state, metrics = train_step(state, batch_of(step))
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                with log.pause(metrics), guard.phase("evaluation"):
                    metrics |= {"test_loss": jaxpar.fetch(mean_loss(evaluate, state.params, held_out))}
            log.log(step, metrics)
            guard.after_step(step + 1, state, metrics)
    seconds = time.perf_counter() - began

    if median := run_report.median_seconds(config.out_dir, first_step=start):
        cli.say(
            f"{config.steps - start} steps in {seconds:.1f} s, evaluations included; a step takes {median * 1e3:.0f} ms "
            f"(median), {num_tokens / median:,.0f} tokens/s"
        )
    test_loss = float(mean_loss(evaluate, state.params, held_out))
    params = jax.jit(lambda packed: merge(layout.unpack_params(packed)))(state.params)
    conclude(config, shape, text, params, test_loss, schedule)
    checkpointing.say_skipped(state)
    lora_flags.save_adapters(config, shape, state.params)
    if config.save_hf is not None:
        source = config.out_dir / "model"
        jaxpar.huggingface.write_model(config.save_hf, shape, lora_flags.merged(state.params), source=source)
        cli.say(f"written: {config.save_hf}/, a model for transformers")


def check_flags(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises where a flag is out of range."""
    check_data_flags(config)
    check_optimizer(config)
    check_lora(config)
    for name, least in (("eval_every", 1), ("eval_rows", 1), ("top_k", 1)):
        if getattr(config, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least {least}; got {getattr(config, name)}. Choose {least} or more.")
    if config.init_from is not None and config.model != Config.model:
        raise ValueError(
            f"--init-from determines the model; got it with --model {config.model}. Leave out one of the two."
        )
    if config.init_from is not None:
        check_model_folder(config.init_from, "--init-from", needs_weights=not (config.resume or config.compile_for))
        shape_of_flags(config)  # a config that cannot be read is named before a tokenizer is missed
    if config.init_from is None and config.ignore_config_keys:
        raise ValueError(
            f"--ignore-config-keys are of the config.json in --init-from; got {' '.join(config.ignore_config_keys)} without a "
            "folder. Leave them out, or give --init-from."
        )
    if not 0 <= config.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 or more; got {config.temperature:g}. 0 takes the likeliest token.")
    if config.sequence_parallel and config.seq % mesh.shape["tensor"]:
        raise ValueError(
            f"--sequence-parallel splits a row over the tensor axis, which must divide it; got --seq {config.seq}, "
            f"--mesh.tensor {mesh.shape['tensor']}. Choose --seq {round_up(config.seq, mesh.shape['tensor'])}."
        )


def make_timetable(config: Config, mesh: jax.sharding.Mesh, num_rows: int) -> Schedule:
    """Returns the pipeline's schedule; raises where a step has too few rows for its microbatches."""
    stage = mesh.shape["stage"]
    num_microbatches = check_microbatches(
        config.batch_size,
        config.num_microbatches,
        num_rows,
        mesh,
        of=f" of --seq {config.seq}",
        may_change_batch=may_change(config, "batch_size"),
    )
    if stage == 1 and (config.num_chunks or config.layers_per_virtual_stage):
        raise ValueError(
            "--num-chunks and --layers-per-virtual-stage apply to pipelines; got one of them with --mesh.stage 1. "
            "Leave it out, or choose --mesh.stage 2 or more."
        )
    form, remat = lockstep_form(config.schedule), config.remat == "full"
    return make_schedule(config.schedule, stage, num_microbatches, config.num_chunks, form=form, remat=remat)


def describe(
    config: Config,
    text: Data,
    shape: transformer.TransformerConfig,
    table: dict,
    mesh: jax.sharding.Mesh,
    num_factors: int,
) -> None:
    cli.say(text.describe())
    cli.say(
        f"{config.init_from or config.model}: {shape.num_layers} layers, {shape.embed_dim} wide, "
        f"{count_params(table):,} parameters; "
        f"{', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())}"
        + (f", {config.schedule}" if mesh.shape["stage"] > 1 else "")
    )
    if num_factors:
        cli.say(
            f"LoRA of rank {config.lora_rank} on {', '.join(config.lora_targets)}: {num_factors:,} parameters are trained"
        )
    if shape.ignored:
        cli.say(f"ignored in its config.json: {', '.join(shape.ignored)}")


def numbers_depend_on(config: Config, text: Data) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one, which excludes mesh, schedule, ZeRO and remat."""
    flags = {name: getattr(config, name) for name in ("seed", "steps", "model", "seq", "batch_size", "dtype")}
    if config.init_from is not None:
        flags["init_from"] = f"crc32 {checkpointing.checksum_of_model(config.init_from)}"
    return flags | optimizer_settings(config) | lora_flags.settings(config) | text.settings(config)


if __name__ == "__main__":
    cli.run(main, Config)
