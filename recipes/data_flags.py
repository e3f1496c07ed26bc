"""Flags that name the data of a language model, and their checks. ``language_data.py`` loads what they name."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cli
import jax


@dataclass(frozen=True, kw_only=True)
class DataFlags(cli.SharedFlags):
    data: tuple[Path, ...] = ()
    """Files or folders of text, .jsonl or .parquet (text; prompt and completion; or messages), .parquet or .arrayrecord of rows
    of tokens, or .bin files of nanoGPT or llm.c. Without it: the source of Python's standard library."""
    data_weights: tuple[float, ...] = ()
    """Share of the rows from each --data, in any unit. Without it: shares by their numbers of rows."""
    tokenizer: Path | None = None
    """A folder with the model's tokenizer.json. None: that in --init-from; without one, the tokens of text are its bytes."""
    token_cache: Path | None = None
    """Folder for the tokens of files, which are tokenised once. None: jaxpar/tokens in the user's cache folder."""
    long_examples: Literal["refuse", "drop", "cut"] = "refuse"
    """What to do with examples with a prompt that are longer than a row: refuse them, leave them out, or cut them into rows."""
    seq: int = 128
    """Tokens of a row."""
    batch_size: int = 16
    """Rows of a step."""
    batch_tokens: int | None = None
    """Tokens of a step, instead of --batch-size: a multiple of --seq."""
    num_microbatches: int | None = None
    """Microbatches of each replica in a step, whose gradients are added. None: 2 for each stage of a pipeline, else 1."""
    microbatch_tokens: int | None = None
    """Tokens of a microbatch of a replica, instead of --num-microbatches: a multiple of --seq."""
    prompt: str | None = None
    """Beginning of the sample of text at the end of the run; for messages, what the user says. None: "def " for bytes, else the
    beginning of text held out."""


def check_data_flags(flags: DataFlags) -> None:
    """Raises where the flags of the data do not go together."""
    if flags.seq < 2:
        raise ValueError(f"--seq must be at least 2; got {flags.seq}. Choose 2 or more.")
    if flags.prompt == "":
        raise ValueError('--prompt must not be empty; got "". Give what the sample is to begin with.')
    if flags.data_weights and len(flags.data_weights) != len(flags.data):
        raise ValueError(
            f"--data-weights must have one for each --data; got {len(flags.data_weights)} for {len(flags.data)}. Leave it "
            f"out, or give {len(flags.data)}."
        )


def in_rows(flags: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns the flags with --batch-size and --num-microbatches in place of those given in tokens."""
    defaults = {field.name: field.default for field in dataclasses.fields(DataFlags)}
    for name, instead in (("batch_tokens", "batch_size"), ("microbatch_tokens", "num_microbatches")):
        tokens, flag, other = getattr(flags, name), name.replace("_", "-"), instead.replace("_", "-")
        if tokens is None:
            continue
        if getattr(flags, instead) != defaults[instead]:
            raise ValueError(f"--{flag} takes the place of --{other}; got both. Leave one of them out.")
        if tokens < flags.seq or tokens % flags.seq:
            raise ValueError(
                f"--{flag} must be a multiple of --seq, the tokens of a row; got {tokens} and {flags.seq}. Choose "
                f"{max(round(tokens / flags.seq), 1) * flags.seq}."
            )
    if flags.batch_tokens is not None:
        flags = dataclasses.replace(flags, batch_size=flags.batch_tokens // flags.seq, batch_tokens=None)
    if flags.microbatch_tokens is None:
        return flags
    replica = flags.batch_size // mesh.shape["data"]
    rows = flags.microbatch_tokens // flags.seq
    if replica * mesh.shape["data"] != flags.batch_size or replica % rows:
        fitting = [n for n in range(1, max(replica, 1) + 1) if replica % n == 0]
        nearest = max(n for n in fitting if n <= max(rows, 1))
        raise ValueError(
            "--microbatch-tokens must divide the tokens of a replica in a step; got "
            f"{flags.microbatch_tokens}, a step of {flags.batch_size * flags.seq} tokens, --mesh.data {mesh.shape['data']}. "
            f"Choose {nearest * flags.seq}, or a batch that is a multiple."
        )
    return dataclasses.replace(flags, num_microbatches=replica // rows, microbatch_tokens=None)
