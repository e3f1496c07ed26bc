"""Trains a language model on real text with data, pipeline and tensor parallelism: GPT-2, Llama or BLOOM, by the byte or token.

One device:                python recipes/gpt.py

Three dimensions:          python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2

Its cost, no training:     python recipes/gpt.py --fake-devices 8 --mesh.data 2 --mesh.stage 2 --mesh.tensor 2 --dry-run

Your own text:             python recipes/gpt.py --data novels/

GPT-2 on its tokens:       python recipes/gpt.py --model gpt2 --data fineweb/ --seq 1024 --batch-size 512 --dtype bfloat16

From published weights:    python recipes/gpt.py --init-from tinyllama/ --data fineweb/ --seq 1024 --save-hf tuned/

The results are those of one device, for every mesh and schedule.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import checkpointing
import cli
import compiling
import gpt_plots as plots
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from microbatches import check_microbatches

import jaxpar
from jaxpar.backward.remat import REMAT
from jaxpar.compile_only import check_cudnn
from jaxpar.data.batches import round_up, samples_before
from jaxpar.data.text import BYTES, Text, Windows, load_text, unigram_entropy
from jaxpar.metrics.log import MetricsLog, read_metrics
from jaxpar.models import transformer
from jaxpar.params import count_params, init_params, stack_layers
from jaxpar.pipeline import LayerLayout
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.schedule import Schedule, lockstep_form, make_schedule, plot_timeline
from jaxpar.tensor_parallel import TRANSFORMER_RULES, split_copied_heads

VOCAB_MULTIPLE = 128  # the same on every mesh, so that a checkpoint fits any


@dataclass(frozen=True, kw_only=True)
class Config(cli.SharedFlags):
    model: str = "llama-bytes"
    """A model by its name: llama-bytes, gpt2-bytes and bloom-bytes are small and read bytes; gpt2, llama-7b, bloom-176b and
    others are the published models, for tokens in --data."""
    init_from: Path | None = None
    """A folder with a model as saved by transformers, to train further instead of --model: GPT-2, Llama, Mistral, Qwen2, Qwen3,
    SmolLM2, OLMo 2 or BLOOM; --data must then hold tokens of its tokenizer."""
    ignore_config_keys: tuple[str, ...] = ()
    """Keys of the config.json in --init-from to ignore, such as attn_pdrop: jaxpar trains without dropout."""
    data: Path | None = None
    """A file or folder of text, whose bytes are the tokens; or a .bin of nanoGPT or llm.c, or a folder of them. None: the
    source of Python's standard library."""
    seq: int = 128
    """Tokens of a row."""
    batch_size: int = 16
    """Rows of a step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with --momentum."""
    learning_rate: float = 3e-3
    """Highest learning rate: it rises over the first steps, then falls to a tenth along a cosine."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises from 0."""
    momentum: float = 0.9
    """Momentum of SGD; 0: plain SGD, which stores nothing beside the parameters."""
    weight_decay: float = 0.1
    """Weight decay of AdamW, on weights and embeddings, not on biases, norms and positions."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    schedule: str = "zb-h1"
    """The pipeline's schedule: gpipe, 1f1b, interleaved, zb-h1 or zb-v. Without a pipeline it has no effect."""
    num_microbatches: int | None = None
    """Microbatches of each replica in a step. None: 2 for each stage of a pipeline, else 1."""
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
    eval_every: int = 50
    """Steps between two evaluations on the text held out."""
    eval_rows: int = 128
    """Rows of the text held out, the same in each evaluation."""
    save_hf: Path | None = None
    """A folder for the trained model, which transformers reads, with the config.json and tokenizer of --init-from."""
    prompt: str = "def "
    """Beginning of the sample of text at the end of the run."""
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
        plots.check_installed()
        mesh = cli.make_mesh(config)
        check_flags(config, mesh)
        if config.save_hf is not None:
            jaxpar.huggingface.check_no_model(config.save_hf)
        text = load_text(config.data)
        shape = model_shape(config, text, mesh)
        train, test = (Windows(parts, config.seq, vocab_size=shape.vocab_size) for parts in (text.train, text.test))
        for windows in (train, test):
            windows.check()  # so that tokens of another vocabulary are refused before anything is compiled
        schedule = make_timetable(config, mesh, len(train))
        layout = make_layout(config, shape, schedule)
        table = transformer.param_table(shape)
        packed = table | {"layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))}
        shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES)
        optimizer = make_optimizer(config)
        init = lambda key: layout.pack_params(init_params(table, key))
        first = (init, jax.random.key(config.seed), optimizer, mesh, shardings)
        value_and_grad = jaxpar.value_and_grad(
            transformer.make_model(shape, **activation_constraint(config)),
            loss,
            mesh,
            schedule=schedule,
            num_microbatches=schedule.num_microbatches,
            remat=REMAT[config.remat],
            zero=config.zero,
            layout=layout,
            shardings=shardings,
        )
        checkpoints = checkpointing.open_checkpoints(config, mesh)
        decisive = numbers_depend_on(config, text)
        abstract = jaxpar.abstract_state(*first, zero=config.zero)
        begin = checkpointing.resume(config, checkpoints, abstract, decisive)
        loaded = None if begin.state or config.compile_for else read_weights(config, shape, layout, abstract)

    entropy = unigram_entropy(text.train)
    describe(config, text, shape, table, mesh, entropy)
    multiple = mesh.shape["data"] * schedule.num_microbatches

    def rows_of(step: int) -> dict[str, np.ndarray]:
        return train.batch(config.batch_size, seed=config.seed, step=step, multiple=multiple, origin=begin.origin)

    start = begin.origin.step
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=config.max_grad_norm)
    train_step = compiling.compile_step(config, train_step, abstract, jaxpar.abstract_batch(rows_of(start), mesh))
    if config.dry_run:
        return compiling.say_cost(config, train_step, mesh, schedule)

    state = jaxpar.init_state(*first, zero=config.zero) if begin.state is None else begin.state
    state = state if loaded is None else dataclasses.replace(state, params=loaded)

    cli.write_config(config, mesh)
    jaxpar.huggingface.write_description(config.out_dir / "model", shape, source=config.init_from)
    held_out = held_out_batches(config, test, mesh)
    model = transformer.make_model(shape)
    evaluate = jax.jit(lambda packed, batch: loss(model.apply(layout.unpack_params(packed), batch), batch))
    began, num_tokens = time.perf_counter(), config.batch_size * config.seq
    flops = num_tokens * flops_per_token(config, shape, table)
    watchers = cli.watchers(config, checkpoints, flops_per_step=flops)
    kept = {"items_per_step": num_tokens, "items": "tokens", "first_step": start, "watchers": watchers}
    with (
        MetricsLog(config.out_dir, config.steps, **kept) as log,
        checkpointing.guard(
            config,
            checkpoints,
            log,
            config=decisive,
            samples=lambda step: samples_before(len(train), config.batch_size, step, begin.origin),
            remedy=f"Choose a smaller one than --learning-rate {config.learning_rate:g}.",
            draw=lambda: draw(config, text, entropy, schedule),
        ) as guard,
    ):
        for step in range(start, config.steps):
            state, metrics = train_step(state, jaxpar.shard_batch(rows_of(step), mesh))
            if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
                with guard.phase("evaluation"):
                    metrics |= {"test_loss": mean_loss(evaluate, state.params, held_out)}
            log.log(step, metrics)
            guard.after_step(step + 1, state, metrics)
    seconds = time.perf_counter() - began

    if num_steps := config.steps - start:
        rate = num_steps * num_tokens / seconds
        cli.say(
            f"{num_steps} steps in {seconds:.1f} s: {seconds / num_steps * 1e3:.0f} ms a step, {rate:,.0f} tokens/s"
        )
    test_loss = float(mean_loss(evaluate, state.params, held_out))
    params = jax.jit(layout.unpack_params)(state.params)
    conclude(config, shape, text, params, entropy, test_loss, schedule)
    checkpointing.say_skipped(state)
    if config.save_hf is not None:
        source = config.out_dir / "model"
        jaxpar.huggingface.write_model(config.save_hf, shape, state.params, source=source)
        cli.say(f"written: {config.save_hf}/, a model for transformers")


def conclude(
    config: Config,
    shape: transformer.TransformerConfig,
    text: Text,
    params: dict,
    entropy: float,
    test_loss: float,
    schedule: Schedule,
) -> None:
    """Prints the loss on the text held out and a sample of text, and draws the run."""
    unit = "byte" if text.is_bytes else "token"
    cli.say(
        f"text held out: loss {test_loss:.4f} nats a {unit}, {test_loss / math.log(2):.3f} bits; knowing the {unit}s' "
        f"frequencies alone gives {entropy:.4f}"
    )
    sample = write_sample(config, shape, text, params)
    cli.say(f"the model writes:\n{sample}\n")
    if jax.process_index() == 0:
        (config.out_dir / "sample.txt").write_text(sample + "\n")
    draw(config, text, entropy, schedule)
    cli.say(f"written: {config.out_dir}/ with loss.png, timeline.svg, sample.txt, metrics.jsonl, config.json")


def draw(config: Config, text: Text, entropy: float, schedule: Schedule) -> None:
    """Draws the losses so far and the pipeline's timeline."""
    if jax.process_index() == 0:
        lines = read_metrics(config.out_dir / "metrics.jsonl")
        plots.plot_loss(config.out_dir / "loss.png", lines, entropy, "byte" if text.is_bytes else "token")
        plot_timeline(schedule, config.out_dir / "timeline.svg", timing="lockstep")


def write_sample(config: Config, shape: transformer.TransformerConfig, text: Text, params: dict) -> str:
    """Returns the prompt and its continuation; where tokens are not bytes, the prompt is a piece of the text held out."""
    prompt = np.frombuffer(config.prompt.encode(), np.uint8) if text.is_bytes else text.test[0][: config.seq // 2]
    prompt = np.asarray(prompt[-(config.seq - 1) :], np.int32)
    drawn = {"temperature": config.temperature, "top_k": config.top_k, "key": jax.random.key(config.seed)}
    try:
        tokens = transformer.generate(shape, params, prompt[None], config.seq - len(prompt), **drawn)
    except FloatingPointError as error:
        cli.stop(ExitCode.NOT_FINITE, str(error))
    written = jaxpar.fetch(tokens)[0]
    return bytes(written.astype(np.uint8)).decode(errors="replace") if text.is_bytes else " ".join(map(str, written))


def mean_loss(evaluate: Any, params: dict, batches: list[dict[str, jax.Array]]) -> jax.Array:
    """Returns the mean loss over batches."""
    loss_sums, weight_sums = zip(*[evaluate(params, batch) for batch in batches], strict=True)
    return jnp.stack(loss_sums).sum() / jnp.stack(weight_sums).sum()


def held_out_batches(config: Config, test: Windows, mesh: jax.sharding.Mesh) -> list[dict[str, jax.Array]]:
    """Returns some rows of the text held out, the same for every mesh."""
    size = min(config.batch_size, len(test))
    count = -(-min(config.eval_rows, len(test)) // size)
    batches = [test.batch(size, seed=0, step=step, multiple=mesh.shape["data"]) for step in range(count)]
    return [jaxpar.shard_batch(batch, mesh) for batch in batches]


def model_shape(config: Config, text: Text, mesh: jax.sharding.Mesh) -> transformer.TransformerConfig:
    """Returns the model that the flags ask for."""
    changes = {"vocab_multiple": VOCAB_MULTIPLE, "compute_dtype": config.dtype}
    if config.init_from is None:
        shape, named = transformer.preset(config.model, **changes), f"--model {config.model}"
        if shape.positions == "learned":
            shape = dataclasses.replace(shape, max_positions=config.seq)
    else:
        shape = jaxpar.huggingface.read_config(config.init_from, ignore=config.ignore_config_keys, **changes)
        named = f"--init-from {config.init_from}"
    if shape.positions == "learned" and config.seq > shape.max_positions:
        raise ValueError(
            f"--seq must not be longer than a learned table of positions; got {config.seq}, and {shape.max_positions} "
            f"positions in {named}. Choose --seq {shape.max_positions} or less."
        )
    if text.is_bytes and (shape.tokens != "bytes" or shape.vocab_size < BYTES):
        other = (
            "choose --model gpt2-bytes, llama-bytes or bloom-bytes"
            if config.init_from is None
            else 'if its tokens are bytes, add "jaxpar_tokens": "bytes" to its config.json'
        )
        raise ValueError(
            f"{named} reads tokens of a vocabulary of {shape.vocab_size}; got {text.source}, whose tokens are bytes. Give a "
            f".bin of its tokens by --data, or {other}."
        )
    shape = shape.for_tensor(mesh.shape["tensor"])
    if mesh.devices.flat[0].platform == "gpu" and config.dtype == "bfloat16":
        if config.compile_for:
            check_cudnn()
        shape = dataclasses.replace(shape, attention=jaxpar.flash_attention)
    return shape


def make_layout(config: Config, shape: transformer.TransformerConfig, schedule: Schedule) -> LayerLayout:
    """Returns the layout that stores each layer on its stage, so that no step moves weights."""
    if schedule.num_stages == 1:
        return LayerLayout(shape.num_layers, 1)
    stages = schedule.num_stages, schedule.num_chunks, schedule.placement
    return LayerLayout(shape.num_layers, *stages, config.layers_per_virtual_stage)


def read_weights(
    config: Config, shape: transformer.TransformerConfig, layout: LayerLayout, state: jaxpar.TrainState
) -> dict | None:
    """Returns the parameters in --init-from, laid out as those of ``state``; None if there is no --init-from."""
    if config.init_from is None:
        return None
    packed = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    if layout.is_canonical:
        return jaxpar.huggingface.read_params(config.init_from, shape, packed)
    # The number of layers need not be divisible by the stages, so each stage has all layers until they are packed.
    on_all = lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    canonical = packed | {"layers": jax.tree.map(on_all, packed["layers"].tree)}
    params = jaxpar.huggingface.read_params(config.init_from, shape, canonical)
    return jax.jit(layout.pack_params, out_shardings=packed)(params)


def flops_per_token(config: Config, shape: transformer.TransformerConfig, table: dict) -> int:
    """Returns the useful operations of training on a token (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    return 6 * count_params(table) + 12 * shape.num_layers * shape.embed_dim * config.seq


def activation_constraint(config: Config) -> dict[str, Any]:
    return {"constrain": jaxpar.sequence_parallel if config.sequence_parallel else split_copied_heads}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns AdamW or SGD, with a learning rate that rises and then falls along a cosine."""
    falling = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.steps, config.learning_rate / 10
    )
    if config.optimizer == "sgd":
        return optax.sgd(falling, momentum=config.momentum or None)
    return optax.adamw(falling, b2=0.95, weight_decay=config.weight_decay, mask=is_weight)


def is_weight(params: dict) -> dict:
    """Returns for each parameter whether it is a weight or an embedding."""
    name = lambda path: path[-1].key
    return jax.tree_util.tree_map_with_path(
        lambda path, _: name(path).startswith("w_") or name(path) in ("tokens", "head"), params
    )


def check_flags(config: Config, mesh: jax.sharding.Mesh) -> None:
    """Raises where a flag is out of range."""
    for name, least in (("seq", 2), ("eval_every", 1), ("eval_rows", 1), ("top_k", 1), ("warmup_steps", 0)):
        if getattr(config, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least {least}; got {getattr(config, name)}. Choose {least} or more.")
    if config.warmup_steps >= config.steps:
        raise ValueError(
            f"--warmup-steps must be less than --steps; got {config.warmup_steps} and {config.steps}. Choose "
            f"{config.steps // 10}."
        )
    if not 0 < config.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be positive; got {config.learning_rate:g}. Choose such as 0.003.")
    if not 0 < config.max_grad_norm < math.inf:
        raise ValueError(
            f"--max-grad-norm must be positive; got {config.max_grad_norm:g}. Choose 1, say, or 1e9 to scale nothing down."
        )
    if not 0 <= config.momentum < 1:
        raise ValueError(f"--momentum must be from 0 to less than 1; got {config.momentum:g}. 0 is plain SGD.")
    if config.init_from is not None and config.model != Config.model:
        raise ValueError(
            f"--init-from determines the model; got it with --model {config.model}. Leave out one of the two."
        )
    if config.init_from is None and config.ignore_config_keys:
        raise ValueError(
            f"--ignore-config-keys are of the config.json in --init-from; got {' '.join(config.ignore_config_keys)} without a "
            "folder. Leave them out, or give --init-from."
        )
    if not 0 <= config.temperature < math.inf:
        raise ValueError(f"--temperature must be 0 or more; got {config.temperature:g}. 0 takes the likeliest token.")
    if not config.prompt:
        raise ValueError('--prompt must not be empty; got "". Give what the sample is to begin with.')
    if config.sequence_parallel and config.seq % mesh.shape["tensor"]:
        raise ValueError(
            f"--sequence-parallel splits a row over the tensor axis, which must divide it; got --seq {config.seq}, "
            f"--mesh.tensor {mesh.shape['tensor']}. Choose --seq {round_up(config.seq, mesh.shape['tensor'])}."
        )


def make_timetable(config: Config, mesh: jax.sharding.Mesh, num_rows: int) -> Schedule:
    """Returns the pipeline's schedule; raises where a step has too few rows for its microbatches."""
    stage = mesh.shape["stage"]
    num_microbatches = check_microbatches(
        config.batch_size, config.num_microbatches, num_rows, mesh, of=f" of --seq {config.seq}"
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
    text: Text,
    shape: transformer.TransformerConfig,
    table: dict,
    mesh: jax.sharding.Mesh,
    entropy: float,
) -> None:
    unit = "bytes" if text.is_bytes else "tokens"
    num_train, num_test = (sum(map(len, parts)) for parts in (text.train, text.test))
    cli.say(f"{text.source}: {num_train:,} {unit} to learn from, {num_test:,} held out, entropy {entropy:.4f} nats")
    cli.say(
        f"{config.init_from or config.model}: {shape.num_layers} layers, {shape.embed_dim} wide, "
        f"{count_params(table):,} parameters; "
        f"{', '.join(f'{axis}={size}' for axis, size in mesh.shape.items())}"
        + (f", {config.schedule}" if mesh.shape["stage"] > 1 else "")
    )
    if shape.ignored:
        cli.say(f"ignored in its config.json: {', '.join(shape.ignored)}")


def numbers_depend_on(config: Config, text: Text) -> dict[str, Any]:
    """Returns the settings that a resumed run must share with the saved one, which excludes mesh, schedule, ZeRO and remat."""
    names = (
        "seed",
        "steps",
        "model",
        "seq",
        "batch_size",
        "optimizer",
        "learning_rate",
        "warmup_steps",
        "weight_decay",
    )
    flags = {name: getattr(config, name) for name in (*names, "max_grad_norm", "dtype")}
    if config.optimizer == "sgd":
        flags["momentum"] = config.momentum
    if config.init_from is not None:
        flags["init_from"] = f"crc32 {checkpointing.checksum_of_model(config.init_from)}"
    return flags | {"text": f"crc32 {text.checksum()}", "train_tokens": sum(map(len, text.train))}


if __name__ == "__main__":
    cli.run(main, Config)
