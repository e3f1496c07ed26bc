"""Writes a small language model with random weights, to rehearse fine-tuning before a published model is downloaded.

python recipes/untrained_model.py --out-dir small

The folder has the files of a published chat model: config.json, model.safetensors, tokenizer.json and a chat template.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
import jax

import jaxpar
from jaxpar.data.examples import check_messages
from jaxpar.data.readers import read_records
from jaxpar.models import transformer
from jaxpar.params import count_params, init_params
from jaxpar.runtime.extras import install_extra

SIZES = {"num_layers": 2, "embed_dim": 128, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 384, "max_positions": 512}
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
    with cli.checks():
        if config.vocab_size < 258:
            raise ValueError(f"--vocab-size must be at least 258; got {config.vocab_size}. Choose 1024, say.")
        jaxpar.huggingface.check_no_model(config.out_dir)
        tokenizer = train_tokenizer(list(contents(config.data)), config.vocab_size)
    shape = transformer.preset("qwen2.5-0.5b", **SIZES, vocab_size=tokenizer.get_vocab_size())
    params = init_params(transformer.param_table(shape), jax.random.key(config.seed))
    jaxpar.huggingface.write_model(config.out_dir, shape, params)
    tokenizer.save(str(config.out_dir / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (config.out_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = {"eos_token_id": tokenizer.token_to_id(END)}
    (config.out_dir / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    cli.say(f"written: {config.out_dir}/, a Qwen2 of {count_params(params):,} random parameters, for --init-from")


def contents(file: Path) -> Iterator[str]:
    """Yields what is said in a file of messages."""
    for _, example in read_records(file):
        yield from (message["content"] for message in check_messages(example["messages"]))


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Returns a byte-level BPE of the tokenizers library that is trained on texts."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError(
            f"making a tokenizer needs the tokenizers library; got no such package. {install_extra('hf')}."
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


if __name__ == "__main__":
    cli.run(main, Config)
