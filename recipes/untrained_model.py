"""Writes a small language model with random weights, to rehearse fine-tuning before a published model is downloaded.

python recipes/untrained_model.py --out-dir small

The folder has the files of a published chat model: config.json, model.safetensors, tokenizer.json and a chat template.
"""

from dataclasses import dataclass
from pathlib import Path

from jaxpar.commands import recipe
from jaxpar.huggingface import check_no_model
from jaxpar.huggingface.untrained import contents, train_tokenizer, write_untrained
from jaxpar.run import checks, say


@dataclass(frozen=True, kw_only=True)
class Config:
    out_dir: Path = Path("small")
    """Folder to write, without a model in it."""
    data: Path = Path(__file__).parent / "data" / "chats.jsonl"
    """A .jsonl of messages, whose text determines the tokens."""
    vocab_size: int = 1024
    """The number of tokens, at least 258: bytes, and the two marks of the chat template."""
    seed: int = 0
    """Seed of the weights."""


def main(config: Config) -> None:
    with checks():
        check_no_model(config.out_dir)
        tokenizer = train_tokenizer(list(contents(config.data)), config.vocab_size)
    num_params = write_untrained(config.out_dir, tokenizer, config.seed)
    say(f"written: {config.out_dir}/, a Qwen2 of {num_params:,} random parameters, for --init-from")


if __name__ == "__main__":
    recipe.run(main, Config)
