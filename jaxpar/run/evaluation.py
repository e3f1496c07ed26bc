"""What a language model has learned: its loss on text held out, the loads of its experts, and a sample of its text."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import jaxpar
from jaxpar.models import transformer
from jaxpar.report import write_loads
from jaxpar.run.language_data import Data, LanguageFlags
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.messages import phase, say, stop
from jaxpar.run.run import Run
from jaxpar.runtime.exit_codes import ExitCode

LARGEST_EXPONENT = 709.0  # of e, in float64
MOST_WRITTEN = 256  # tokens of the sample after its prompt, each of which reads all before it


class Evaluation:
    """The mean loss of params on rows held out, and the loads of a model's experts.

    They are computed as a training step computes its loss (``jaxpar.make_eval_step``).

    Args:
        model: The model.
        loss: ``loss(logits, batch) -> (loss_sum, weight_sum)``.
        parallel: The Parallel of the run.
        pipeline: Its Pipeline.
        batches: The rows held out, on the mesh.

    Attributes:
        loads: The tokens that used each expert of each layer in the last evaluation; None without such a model.
    """

    def __init__(
        self,
        model: jaxpar.LayeredModel,
        loss: Callable[..., tuple[jax.Array, jax.Array]],
        parallel: jaxpar.Parallel,
        pipeline: jaxpar.Pipeline,
        batches: Sequence[dict[str, jax.Array]],
    ) -> None:
        def sums(outputs: PyTree, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict]:
            loads = transformer.loads_of(outputs, batch["weight"])
            return *loss(transformer.logits_of(outputs), batch), {"loads": loads}

        self._step, self._batches = jaxpar.make_eval_step(model, sums, parallel, pipeline), batches
        self.loads: jax.Array | None = None

    def __call__(self, params: PyTree) -> jax.Array:
        """Returns the mean loss."""
        found = [self._step(params, batch) for batch in self._batches]
        loss_sum, weight_sum, sums = jax.tree.map(lambda *each: jnp.stack(each).sum(0), *found)
        self.loads = sums["loads"]
        return loss_sum / weight_sum

    def metrics(self, params: PyTree, out_dir: Path, step: int) -> dict[str, Any]:
        """Returns the mean loss as ``test_loss``, and writes the loads into the folder of a run, after this step of it."""
        found = {"test_loss": jaxpar.fetch(self(params))}
        if self.loads is not None:
            write_loads(out_dir, jaxpar.fetch(self.loads), step)
        return found


def say_best(run: Run) -> None:
    """Prints which checkpoint of a run is the best one of --keep-best, and how to export it, if it is not the last one."""
    name, best = run.flags.checkpoint.keep_best, run.checkpoints.best()
    if name is None or best is None or best == run.checkpoints.latest():
        return
    metric, folder = name.removeprefix("-"), run.out_dir
    value = run.checkpoints.manifest(best).metrics[metric]
    say(
        f"the last state is not the best: of the checkpoints, that of step {best} has the best {metric}, {value:.6g}. To write "
        f"its model: python -m jaxpar export {folder} {folder.name}-step-{best} --step {best}"
    )


def write_sample(
    flags: LanguageFlags,
    model: ModelFlags,
    config: transformer.TransformerConfig,
    text: Data,
    params: dict,
) -> str:
    """Returns the prompt and its continuation up to the end of a text; without a tokenizer, the prompt is text held out."""
    seq, whole = flags.data.seq, text.prompt(flags.data)
    prompt = np.asarray(whole[-(seq - 1) :], np.int32)
    if flags.data.prompt is not None and len(prompt) < len(whole):
        say(
            f"the sample begins with the last {len(prompt)} of the {len(whole)} {text.unit}s of --prompt, for --seq {seq}"
        )
    drawn = {
        "temperature": model.temperature,
        "top_k": model.top_k,
        "key": jax.random.key(flags.common.seed),
    }
    drawn["eos"] = [token for token in text.ends if token < config.vocab_size]
    try:
        with phase("sampling"):
            num_tokens = min(seq - len(prompt), MOST_WRITTEN)
            tokens = transformer.generate(config, params, prompt[None], num_tokens, **drawn)
            written = jaxpar.fetch(tokens)[0]
    except FloatingPointError as error:
        stop(ExitCode.NOT_FINITE, str(error))
    return text.decode(written, len(prompt))


def describe_loss(test_loss: float, text: Data) -> str:
    """Returns the loss on the text held out in several units, as text."""
    perplexity = math.inf if test_loss > LARGEST_EXPONENT else math.exp(test_loss)
    return (
        f"text held out: loss {test_loss:.4f} nats a {text.unit}, {test_loss / math.log(2):.3f} bits, perplexity "
        f"{perplexity:.4g}; knowing the {text.unit}s' frequencies alone gives {text.unigram_loss:.4f}"
    )
