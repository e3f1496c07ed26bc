"""A folder with all that recipes/gpt.py tunes a model on."""

import json

import jax
import numpy as np

import gpt
from jaxpar import huggingface
from jaxpar.data.records import write_rows
from jaxpar.models import transformer
from jaxpar.params import abstract_params
from jaxpar.run import language_data
from tests.support.texts import CHATML, write_tokenizer

SEQ = 48
TINY = {
    "vocab_size": 352,
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "mlp_dim": 24,
    "max_positions": 64,
    "tied": False,
}
TINY |= {"norm": "rms", "positions": "rope", "mlp": "swiglu", "biases": False, "num_kv_heads": 2}


def tuning_flags(folder):
    """Flags of recipes/gpt.py for a short run that tunes the model of such a folder on its conversations."""
    flags = ["--init-from", str(folder / "llama"), "--token-cache", str(folder / "cache")]
    flags += ["--data", str(folder / "chat.jsonl"), "--seq", str(SEQ), "--batch-size", "8"]
    return [*flags, "--eval-rows", "8", "--warmup-steps", "1", "--lr", "0.05"]


def make_folder(path, **changes):
    """Writes a tiny Llama with its tokenizer, and data: conversations, lines, and rows of tokens; returns the folder."""
    shape, rng = transformer.TransformerConfig(**(TINY | changes)), np.random.default_rng(0)
    abstract = abstract_params(transformer.param_table(shape))
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.1, abstract
    )
    huggingface.write_model(path / "llama", shape, params)
    write_tokenizer(path / "llama", template=CHATML, bos=True)
    ask = lambda i: {"role": "user", "content": "what is a cat?" if i % 3 else f"東京 {i}?"}
    answer = {"role": "assistant", "content": "a small animal"}
    lines = [{"messages": [ask(i), answer] * (1 + i % 2), "id": i} for i in range(120)]
    (path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"the cat sat on the mat {i}"}) + "\n" for i in range(300))
    )
    flags = gpt.Config.of(
        data=(path / "lines.jsonl",), tokenizer=path / "llama", seq=SEQ, token_cache=path / "cache"
    )
    train, _ = language_data.make_rows(flags.data, language_data.load_data(flags.data), 352)
    write_rows(path / "rows.parquet", train)
    return path
