"""Writes a small language model with random weights, to rehearse fine-tuning before a published model is downloaded.

python recipes/untrained_model.py --out-dir small

The folder has the files of a published chat model: config.json, model.safetensors, tokenizer.json and a chat template.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.commands import recipe
from jaxpar.data.examples import check_messages
from jaxpar.data.readers import read_records
from jaxpar.data.text import train_tokenizer
from jaxpar.fields import check_at_least
from jaxpar.huggingface import check_no_model, write_model
from jaxpar.models import transformer
from jaxpar.params import count_params, init_params
from jaxpar.run import checks, say
from jaxpar.run.flags import check_out_dir, check_seed

SIZES = {
    "num_layers": 2,
    "embed_dim": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 384,
    "max_positions": 512,
}
START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)


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
        check_out_dir(config.out_dir)
        check_at_least(258, "Choose 1024, say.", vocab_size=config.vocab_size)
        check_seed(config.seed)
        tokenizer = train_tokenizer(
            list(contents(config.data)), config.vocab_size, special_tokens=(START, END)
        )
    num_params = write_untrained(config.out_dir, tokenizer, config.seed)
    say(f"written: {config.out_dir}/, a Qwen2 of {num_params:,} random parameters, for --init-from")


def write_untrained(folder: Path, tokenizer: Any, seed: int) -> int:
    """Writes a Qwen2 with random weights for a tokenizer, with a chat template; returns its number of parameters."""
    shape = transformer.preset("qwen2.5-0.5b", **SIZES, vocab_size=tokenizer.get_vocab_size())
    params = init_params(transformer.param_table(shape), jax.random.key(seed))
    write_model(folder, shape, params)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = {"eos_token_id": tokenizer.token_to_id(END)}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    return count_params(params)


def contents(file: Path) -> Iterator[str]:
    """Yields what is said in a file of messages.

    Raises:
        ValueError: There is no such file, or it has other records.
    """
    if not file.is_file():
        raise ValueError(
            f"--data must be a file of messages; got {file}, which is none. Name one that is there."
        )
    for _, example in read_records(file):
        yield from (message["content"] for message in check_messages(example["messages"]))


if __name__ == "__main__":
    recipe.run(main, Config)
