"""Trains a language model on real text with data, pipeline and tensor parallelism: GPT-2, Llama or BLOOM, by the byte or token.

    One device:                python recipes/gpt.py
    Three dimensions:          python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2
    Its cost, no training:     python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 --dry-run
    Your own text:             python recipes/gpt.py --data novels/
    GPT-2 on its tokens:       python recipes/gpt.py --model gpt2 --data fineweb/ --seq 1024 --batch-size 512 --dtype bfloat16
    From published weights:    python recipes/gpt.py --init-from tinyllama/ --data chat.jsonl --lr 3e-5 --save-hf tuned/
    LoRA on such weights:      python recipes/gpt.py --init-from tinyllama/ --data chat.jsonl --lora-rank 8 --save-hf tuned/
    On weights in four bits:   python recipes/gpt.py --init-from llama-70b/ --data chat.jsonl --lora-rank 16 --quantize nf4

The results are those of one device, for every mesh and schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh
from tyro.conf import OmitArgPrefixes

import jaxpar
from jaxpar.commands import recipe
from jaxpar.data.batches import round_up
from jaxpar.data.text import OF_NO_PATH
from jaxpar.data_parallel import check_sequences
from jaxpar.fields import check_at_least
from jaxpar.huggingface.config import beyond_positions
from jaxpar.metrics.log import read_metrics
from jaxpar.models import lora, transformer
from jaxpar.pipeline import masks_idle_ops
from jaxpar.plot.charts import plot_loss
from jaxpar.plot.figure import check_matplotlib
from jaxpar.run import (
    Run,
    batches,
    checks,
    evaluation,
    folder,
    language_data,
    language_model,
    lora_flags,
    make_mesh,
    model_files,
    optimizers,
    say,
)
from jaxpar.run.early_stop import check_best_is_saved
from jaxpar.run.flags import (
    CheckpointFlags,
    GpuFlags,
    MeshFlags,
    MonitoringFlags,
    OwnFlags,
    check_out_dir,
)
from jaxpar.run.language_data import Data, DataFlags
from jaxpar.run.messages import say_written
from jaxpar.run.remarks import check_same_data
from jaxpar.run.save_folder import SaveFolder
from jaxpar.run.start import saved_settings
from jaxpar.runtime.watchdog import Budgets
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline
from jaxpar.tensor_parallel import split_copied_heads

# The metrics of each step, and those of a model with routing losses.
OF_STEPS = ("loss", "grad_norm", "learning_rate", "skipped")
OF_ROUTING = ("balance_loss", "router_z_loss", "expert_imbalance", "dropped_experts")


@dataclass(frozen=True, kw_only=True)
class Common(language_data.LanguageCommon, optimizers.OptimizedCommon):
    out_dir: Path = Path("runs/gpt")
    """Folder for config.json, metrics.jsonl, plots, the sample and checkpoints."""
    learning_rate: Annotated[float, tyro.conf.arg(aliases=("--lr",))] = 3e-3
    """Highest learning rate, the factor of an update: it rises over the first steps, then follows --learning-rate-schedule."""


@dataclass(frozen=True, kw_only=True)
class Recipe(language_model.ModelFlags, OwnFlags):
    schedule: str = "zb-h1"
    """The pipeline's schedule: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Without a pipeline it has no effect."""
    num_chunks: int | None = None
    """Chunks of each stage. None: the number that the schedule needs, 2 for interleaved and zb-v, else 1."""
    layers_per_virtual_stage: tuple[int, ...] | None = None
    """Layers of each virtual stage, in the model's order, such as 5 6 6 5. None: as equal as possible."""
    remat: Literal["none", "full", "dots"] = "none"
    """What the backward pass recomputes. none: elementwise operations; dots: all but products and attention; full: all."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded over the replicas: 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence_parallel: bool = False
    """Shard activations between the layers' products over --mesh.tensor along the sequence."""
    eval_every: int = 50
    """Steps between two evaluations on the text held out."""
    eval_rows: int = 128
    """Rows of the text held out, the same in each evaluation, or as many more as make whole batches."""
    save_hf: Path | None = None
    """A folder for the trained model, which transformers reads, with the config.json and tokenizer of --init-from."""


@dataclass(frozen=True, kw_only=True)
class Config(language_data.LanguageFlags, optimizers.OptimizedFlags):
    mesh: MeshFlags = MeshFlags()
    common: OmitArgPrefixes[Common] = Common()  # pyright: ignore[reportIncompatibleVariableOverride]
    recipe: OmitArgPrefixes[Recipe] = Recipe()
    data: OmitArgPrefixes[DataFlags] = DataFlags()
    optimizer: OmitArgPrefixes[optimizers.OptimizerFlags] = optimizers.OptimizerFlags()
    lora: OmitArgPrefixes[lora_flags.LoraFlags] = lora_flags.LoraFlags()
    checkpoint: OmitArgPrefixes[CheckpointFlags] = CheckpointFlags()
    monitoring: OmitArgPrefixes[MonitoringFlags] = MonitoringFlags()
    gpu: OmitArgPrefixes[GpuFlags] = GpuFlags()
    budget: Budgets = Budgets()


def loss(logits: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"], batch["weight"])


def main(config: Config) -> None:
    with checks():
        config, mesh, text = read_flags(config)
        common, own = config.common, config.recipe
        shape = language_model.model_config(own, config.data.seq, text, mesh, config.gpu)
        check_keep_best(config, has_routing=shape.has_routing_losses)
        train, test = language_data.make_rows(config.data, text, shape.vocab_size)
        shape = language_model.with_documents(shape, config.data.max_documents, (train, test))
        saves = None if own.save_hf is None else SaveFolder(own.save_hf, common)
        if saves is not None:
            saves.check_room(shape, described_by=own.init_from)
        schedule = make_pipeline(config, mesh, len(train))
        layout = language_model.make_layout(shape, schedule, own.layers_per_virtual_stage)
        init, shardings = language_model.make_params(
            config.lora, shape, layout, mesh, own.experts, reads_weights=own.init_from is not None
        )
        optimizer, num_tokens = (
            optimizers.make_optimizer(config),
            common.batch_size * config.data.seq,
        )
        if own.router_bias_rate is not None:
            optimizer = transformer.balance_experts(optimizer, own.router_bias_rate)
        num_factors = model_files.num_factor_params(jax.eval_shape(init, jax.random.key(0)), layout)
        trainable = lora.ADAPTERS if num_factors else None
        parallel = jaxpar.Parallel(
            mesh, shardings, zero=own.zero, trainable=trainable, layout=layout
        )
        pipeline = jaxpar.Pipeline(
            schedule, num_microbatches=schedule.num_microbatches, remat=own.remat
        )
        constrain = jaxpar.sequence_parallel if own.sequence_parallel else split_copied_heads
        model, has_aux = (
            transformer.make_model(shape, constrain=constrain),
            shape.has_routing_losses,
        )
        whole_loss = transformer.add_routing_losses(shape, loss, metrics=True)
        value_and_grad = jaxpar.value_and_grad(
            model, whole_loss, parallel, pipeline, has_aux=has_aux
        )
        settings = numbers_depend_on(config, text)
        run = Run(
            config,
            mesh,
            settings,
            items="tokens",
            items_per_step=num_tokens,
            flops_per_step=num_tokens
            * language_model.flops_per_token(shape, config.data.seq, num_factors),
            schedule=schedule,
            learning_rate=optimizers.learning_rate(config),
            samples=lambda step: train.samples_before(common.batch_size, step, run.origin),
            remedy=f"Choose a smaller one than --learning-rate {common.learning_rate:g}"
            + (
                f", or a larger --expert-buffer than {own.expert_buffer:g}."
                if own.expert_buffer
                else "."
            ),
            draw=lambda: draw(run, text),
        )
        if saves is not None and not run.is_dry:
            saves.claim()
        first = init, jax.random.key(common.seed), optimizer, parallel
        run.restore(*first)
        if run.saved:
            model_files.check_description(run.out_dir / "model", shape)
        begins_with = own.init_from if config.makes_state else None
        weights = begins_with and model_files.read_weights(begins_with, shape, layout, run.target)
    optimizers.say_new_rate(config, run.saved, run.first_step)
    has_checkpoints = bool(config.common.checkpoint_every or config.checkpoint.checkpoint_minutes)
    for remark in (
        model_files.remark_on_origin(config, run.saved),
        remark_on_rows_held_out(config, settings, run.saved),
        lora_flags.remark_on_frozen(config.lora, own.init_from),
        *model_files.remarks_on_dtypes(own.init_from, has_checkpoints=has_checkpoints),
    ):
        if remark:
            say(remark)
    say(text.describe())
    say(language_model.describe(own, config.lora, shape, mesh, num_factors, schedule=own.schedule))
    if remark := remark_on_positions(config, shape):
        say(remark)
    batch_of = batches.Batches(run, train, common.batch_size, schedule.num_microbatches)

    with run:
        train_step = jaxpar.make_train_step(
            value_and_grad, optimizer, max_grad_norm=config.optimizer.max_grad_norm
        )
        train_step = run.compile(train_step, batch_of.abstract())
        with checks():
            language_model.check_compiled(train_step, shape, mesh, num_factors)
        if run.is_dry:
            return run.say_cost()
        state = run.begin(
            None if weights is None else partial(model_files.first_state, weights, *first)
        )
        described_by = run.out_dir / "model"
        jaxpar.huggingface.write_description(
            described_by, shape, source=own.init_from, tokenizer=config.data.tokenizer
        )
        held_out = batches.held_out_batches(
            common.batch_size, own.eval_rows, test, mesh, schedule.num_microbatches
        )
        evaluate = evaluation.Evaluation(model, loss, parallel, pipeline, held_out)

        def save_at_least() -> None:
            if saves is not None:
                saves.save_at_least(shape, state.params, described_by=described_by)

        for step in run.steps(if_not_saved=save_at_least):
            state, metrics = train_step(state, batch_of(step))
            if run.is_due(step, own.eval_every):
                with run.evaluation(metrics):
                    metrics |= evaluate.metrics(state.params, run.out_dir, step)
            run.log(step, state, metrics)
        run.say_pace()
        params = model_files.params_to_generate(state.params, layout)
        conclude(config, run, shape, text, params, float(evaluate(state.params)))
        run.say_skipped(state)
        if config.lora.lora_rank is not None:
            model_files.save_adapters(run.out_dir / "adapter", own, shape, state.params)
        if saves is not None:
            keep = partial(run.keep, state)
            saves.save(shape, state.params, described_by=described_by, keep=keep)
        evaluation.say_best(run)


def read_flags(config: Config) -> tuple[Config, Mesh, Data]:
    """Returns the flags, checked, with the numbers that depend on the mesh, the mesh and the tokens."""
    check_matplotlib()
    own = config.recipe
    with language_data.rows_checked_too(
        config, own.init_from, sequence_parallel=own.sequence_parallel
    ):
        mesh = make_mesh(config)
    saved = saved_settings(config)
    config = optimizers.with_saved_warmup(config, saved)
    model_files.check_origin(config, saved)
    language_model.check_biases(config.recipe, saved)
    check_factors(config.lora, saved)
    optimizers.check_saved(config, saved)
    check_flags(config, mesh)
    config = language_data.in_rows(config, mesh)
    multiple = language_data.row_multiple(mesh, sequence_parallel=config.recipe.sequence_parallel)
    text = language_data.load_data(config.data, config.recipe.init_from, multiple=multiple)
    check_data(config, text, saved)
    return config, mesh, text


def check_data(config: Config, text: Data, saved: Mapping[str, Any]) -> None:
    """Raises ValueError where a run with ``saved`` settings had other data, or had them in another order."""
    if "text" in saved and not config.may_change("text"):
        names = [*map(str, config.data.data)] or [text.source]
        check_same_data(names, [part.checksum for part in text.parts], str(saved["text"]))


def conclude(
    config: Config, run: Run, shape: Any, text: Data, params: dict, test_loss: float
) -> None:
    """Prints the loss on the text held out and a sample of text, and draws the run."""
    say(evaluation.describe_loss(test_loss, text))
    sample = evaluation.write_sample(config, config.recipe, shape, text, params)
    say(f"the model writes:\n{sample}\n")
    if jax.process_index() == 0:
        (run.out_dir / "sample.txt").write_text(sample + "\n")
    draw(run, text)
    pictures = ["loss.png", "timeline.svg"]
    texts = ["sample.txt", "metrics.jsonl", "config.json"]
    say_written(run.out_dir, "report.html", *pictures, *texts)


def draw(run: Run, text: Data) -> None:
    """Draws the losses so far and the pipeline's timeline."""
    if jax.process_index() == 0 and run.schedule is not None:
        plot_loss(
            run.out_dir / "loss.png",
            read_metrics(run.out_dir / "metrics.jsonl"),
            text.unigram_loss,
            text.unit,
        )
        plot_timeline(run.schedule, run.out_dir / "timeline.svg", timing="lockstep")


def check_settings(config: Config) -> None:
    """Raises where a flag is out of range or has no effect, as far as neither files nor devices are needed to tell."""
    own, data = config.recipe, config.data
    language_data.check_data_flags(data)
    optimizers.check_optimizer(config)
    check_at_least(1, eval_every=own.eval_every, eval_rows=own.eval_rows, top_k=own.top_k)
    check_keep_best(config, has_routing=True)  # which the model is not known yet to lack
    if own.init_from is None:
        language_model.check_model(own, data.seq, needs_weights=False)
        if not data.data:
            language_model.check_reads_bytes(own, data.seq, OF_NO_PATH)
    pipeline = own.schedule, own.num_chunks, own.layers_per_virtual_stage
    language_model.check_pipeline(config.mesh.stage, *pipeline)
    lora_flags.check_lora(config.lora, config.optimizer, own.router_bias_rate)
    check_is_split(own, config.mesh.tensor)
    if own.init_from is None:
        language_model.check_sizes(own, data.seq, config.mesh, *pipeline)


def check_is_split(own: Recipe, tensor: int) -> None:
    """Raises where --sequence-parallel has no effect."""
    if own.sequence_parallel and tensor == 1:
        raise ValueError(
            "--sequence-parallel splits activations over the tensor axis; got --mesh.tensor 1. Leave it out, or choose "
            "--mesh.tensor 2 or more."
        )


def check_keep_best(config: Config, *, has_routing: bool) -> None:
    """Raises where --keep-best names no metric of the run, or one that its checkpoints lack."""
    of_steps = (*OF_STEPS, *(OF_ROUTING if has_routing else ()))
    check_best_is_saved(config, config.recipe.eval_every, ("test_loss",), of_steps)


def check_flags(config: Config, mesh: Mesh) -> None:
    """Raises where a flag is out of range."""
    own, data = config.recipe, config.data
    check_settings(config)
    folder.check_apart(config.common.out_dir, data.data, own.save_hf, data.token_cache)
    language_model.check_model(own, data.seq, needs_weights=config.makes_state)
    pipeline = own.schedule, own.num_chunks, own.layers_per_virtual_stage
    language_model.check_mesh(own, config.lora, data.seq, mesh, *pipeline)
    multiple = language_data.row_multiple(mesh, sequence_parallel=own.sequence_parallel)
    check_is_split(own, mesh.shape["tensor"])
    if own.sequence_parallel and data.seq % multiple:
        tensor, context = mesh.shape["tensor"], mesh.shape["context"]
        rule, axis = "a row over the tensor axis, which must divide it", ""
        if context > 1:
            rule = (
                "the part of a row that each device of the context axis has over the tensor axis, so that the product of the "
                "two must divide a row, as must twice the context axis"
            )
            axis = f", --mesh.context {context}"
        raise ValueError(
            f"--sequence-parallel splits {rule}; got --seq {data.seq}, --mesh.tensor {tensor}{axis}. "
            f"Choose --seq {round_up(data.seq, multiple)}."
        )
    check_sequences({"tokens": jax.ShapeDtypeStruct((1, data.seq), "int32")}, mesh)
    if own.save_hf is not None:
        if own.router_bias_rate is not None:
            raise ValueError(
                "a model of transformers has no biases of --router-bias-rate; got it with --save-hf. Leave out one of the two."
            )
        SaveFolder(own.save_hf, config.common).check()
        check_out_dir(own.save_hf, "--save-hf")


def check_factors(flags: lora_flags.LoraFlags, saved: Mapping[str, Any]) -> None:
    """Raises where a run with ``saved`` settings cannot go on, since its params have other factors of LoRA than the flags."""
    given = lambda settings: [
        settings.get(name) for name in ("lora_rank", "lora_targets", "quantize")
    ]
    now, was = given(flags.settings), given(saved)
    if not saved or now == was:
        return

    def text(rank: int | None, targets: list[str], kind: str | None) -> str:
        own = "no --lora-rank" if rank is None else f"--lora-rank {rank} on {' '.join(targets)}"
        return own if kind is None else f"{own} --quantize {kind}"

    rank, targets, kind = was
    back = (
        "Leave --lora-rank out"
        if rank is None
        else f"Give --lora-rank {rank} --lora-targets {' '.join(targets)}"
    )
    if rank is not None and now[2] != kind:
        back += " and leave --quantize out" if kind is None else f" --quantize {kind}"
    raise ValueError(
        f"a run has the factors of LoRA that it began with; got {text(*now)} for a run saved with {text(*was)}. {back}, or "
        "start a run in another folder."
    )


def make_pipeline(config: Config, mesh: Mesh, num_rows: int) -> Schedule:
    """Returns the pipeline's schedule; raises where a step has too few rows for its microbatches."""
    own, stage = config.recipe, mesh.shape["stage"]
    num_microbatches = language_data.check_rows(config, num_rows, mesh)
    form, remat = (
        lockstep_form(own.schedule, masks=masks_idle_ops(mesh, own.schedule)),
        own.remat == "full",
    )
    return make_schedule(
        own.schedule, stage, num_microbatches, own.num_chunks, form=form, remat=remat
    )


def remark_on_positions(config: Config, shape: transformer.TransformerConfig) -> str:
    """Returns what to say where rows are longer than the sequences that the model in --init-from was made for; else ""."""
    folder = config.recipe.init_from
    told = "" if folder is None else beyond_positions(shape, config.data.seq, folder, "--seq")
    scaling, most = shape.rope.scaling, shape.max_positions
    advice = "raise it there to serve longer prompts"
    if scaling is not None and scaling.kind == "dynamic":
        advice = (
            "it is served up to that length alone, since wavelengths are stretched from that number, "
            "and with a larger one it would be another model"
        )
    elif scaling is not None and scaling.kind == "yarn" and scaling.original_positions == most:
        advice = (
            f'to serve longer prompts write "original_max_position_embeddings": {most} among its '
            "rope parameters, from which wavelengths are stretched, and then raise it there"
        )
    return told and f"{told}. A saved model keeps that number: {advice}"


def remark_on_rows_held_out(
    config: Config, settings: Mapping[str, Any], saved: Mapping[str, Any]
) -> str:
    """Returns what to say where a run with ``saved`` settings goes on with other rows to evaluate; else ""."""
    now, was = config.recipe.eval_rows, saved.get("eval_rows", Recipe.eval_rows)
    if not saved or (now == was and settings["text"] == saved.get("text")):
        return ""
    changed, are = "--data is another text", "may be"
    if now != was:
        changed, are = f"--eval-rows {now} instead of {was}", "are"
    best = config.checkpoint.keep_best
    compared = "" if best is None else f", and --keep-best {best} compares the two"
    return f"{changed}: the losses from here on {are} of other rows held out than those before{compared}"


def numbers_depend_on(config: Config, text: Data) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one, which excludes mesh, schedule, ZeRO and remat."""
    found = config.values("seed", "steps", "model", "seq", "batch_size", "dtype")
    if config.recipe.products != "compute":
        found["products"] = config.recipe.products
    if config.recipe.window is not None:
        found["window"] = config.recipe.window
    if config.recipe.eval_rows != Recipe.eval_rows:  # else losses on other rows would be compared
        found["eval_rows"] = config.recipe.eval_rows
    if config.recipe.init_from is not None:
        found["init_from"] = f"crc32 {model_files.checksum_of_model(config.recipe.init_from)}"
    if config.recipe.router_bias_rate is not None:
        found["router_bias_rate"] = config.recipe.router_bias_rate
    return found | optimizers.settings(config) | config.lora.settings | text.settings(config.data)


if __name__ == "__main__":
    recipe.run(main, Config)
