"""The results of gpt.py: the loss on the text held out, a sample of text, and plots."""

import math
from typing import Any

import cli
import gpt_plots as plots
import jax
import jax.numpy as jnp
import numpy as np
import run_status
from language_data import Data, bad_data

import jaxpar
from jaxpar.data.batches import RowSource, round_up
from jaxpar.metrics.log import read_metrics
from jaxpar.models import transformer
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.schedule import Schedule, plot_timeline


def conclude(
    flags: Any,
    shape: transformer.TransformerConfig,
    text: Data,
    params: dict,
    test_loss: float,
    schedule: Schedule,
) -> None:
    """Prints the loss on the text held out and a sample of text, and draws the run."""
    cli.say(
        f"text held out: loss {test_loss:.4f} nats a {text.unit}, {test_loss / math.log(2):.3f} bits, perplexity "
        f"{math.exp(min(test_loss, 700)):.4g}; knowing the {text.unit}s' frequencies alone gives {text.entropy:.4f}"
    )
    sample = write_sample(flags, shape, text, params)
    cli.say(f"the model writes:\n{sample}\n")
    if jax.process_index() == 0:
        (flags.out_dir / "sample.txt").write_text(sample + "\n")
    draw(flags, text, schedule)
    cli.say(
        f"written: {flags.out_dir}/ with report.html, loss.png, timeline.svg, sample.txt, metrics.jsonl, config.json"
    )


def draw(flags: Any, text: Data, schedule: Schedule) -> None:
    """Draws the losses so far and the pipeline's timeline."""
    if jax.process_index() == 0:
        lines = read_metrics(flags.out_dir / "metrics.jsonl")
        plots.plot_loss(flags.out_dir / "loss.png", lines, text.entropy, text.unit)
        plot_timeline(schedule, flags.out_dir / "timeline.svg", timing="lockstep")


def write_sample(flags: Any, shape: transformer.TransformerConfig, text: Data, params: dict) -> str:
    """Returns the prompt and its continuation up to the end of a text; without a tokenizer, the prompt is text held out."""
    prompt = np.asarray(text.prompt(flags)[-(flags.seq - 1) :], np.int32)
    drawn = {"temperature": flags.temperature, "top_k": flags.top_k, "key": jax.random.key(flags.seed)}
    drawn["eos"] = [token for token in text.ends if token < shape.vocab_size]
    try:
        with run_status.phase("sampling"):
            tokens = transformer.generate(shape, params, prompt[None], flags.seq - len(prompt), **drawn)
            written = jaxpar.fetch(tokens)[0]
    except FloatingPointError as error:
        cli.stop(ExitCode.NOT_FINITE, str(error))
    return text.decode(written, len(prompt))


def mean_loss(evaluate: Any, params: dict, batches: list[dict[str, jax.Array]]) -> jax.Array:
    """Returns the mean loss over batches."""
    loss_sums, weight_sums = zip(*[evaluate(params, batch) for batch in batches], strict=True)
    return jnp.stack(loss_sums).sum() / jnp.stack(weight_sums).sum()


def held_out_batches(flags: Any, test: RowSource, mesh: jax.sharding.Mesh) -> list[dict[str, jax.Array]]:
    """Returns some rows of the text held out, the same for every mesh."""
    size = min(flags.batch_size, len(test))
    count, num_rows = -(-min(flags.eval_rows, len(test)) // size), round_up(size, mesh.shape["data"])
    read = {"seed": 0, "multiple": mesh.shape["data"], "only": jaxpar.local_rows(num_rows, mesh)}
    with bad_data():
        batches = [test.batch(size, step=step, **read) for step in range(count)]
    return [jaxpar.shard_batch(batch, mesh, num_rows=num_rows) for batch in batches]
