"""Texts as data: lines of a file, tokenizers of words and of bytes, documents."""

import json
import zlib

import numpy as np

from jaxpar.data.corpus import tokenise
from jaxpar.data.packing import Documents
from tests.support.tiny_transformer import VOCAB

TEXT = [
    "the cat sat on the mat",
    "what is a cat? a small animal",
    "naïve café, 東京",
    "user assistant system",
] * 20
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WordTokenizer:
    """Words as tokens, with tokens for the beginning and the end of a document; messages as "role: content" lines."""

    end, vocab_size, version, has_chat_template = 1, 70_000, "0", True

    def fingerprint(self):
        return f"words {self.version}"

    def encode(self, texts, *, begins):
        found = []
        for text, begin in zip(texts, begins, strict=True):
            if "forbidden" in text:
                raise ValueError("a word is forbidden.")
            starts = [
                i
                for i, c in enumerate(text)
                if not c.isspace() and (i == 0 or text[i - 1].isspace())
            ]
            ids = [2 + zlib.crc32(text[s:].split()[0].encode()) % 60_000 for s in starts]
            ends = [start + len(text[start:].split()[0]) for start in starts]
            found.append(
                (np.array([0] * begin + ids, np.int64), np.array([-1] * begin + ends, np.int64))
            )
        return found

    def render(self, messages, *, tools=None):
        text, spans = "".join(f"{tool['name']} " for tool in tools or ()), []
        for message in messages:
            text += f"{message['role']}: "
            if message["role"] == "assistant":
                spans.append((len(text), len(text) + len(message["content"]) + 5))
            text += f"{message['content']} END "
        return text, tuple(spans)

    def uses(self, name, *, has_tools=False):
        return name in ("tool_calls", "tools")

    def lost_in(self, text):
        return ""

    def special_in(self, text):
        return {word for word in text.split() if word.startswith("<|")}

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def write_lines(path, *examples):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in examples))
    return path


def documents_of(file, cache, tokenizer=None):
    found = tokenise([file], tokenizer or WordTokenizer(), cache)
    parts = []
    for i in range(len(found.documents)):
        start, end = found.documents.starts[i], found.documents.ends[i]
        marks = (
            None if found.documents.learned is None else found.documents.learned[start:end].tolist()
        )
        parts.append((found.documents.tokens[start:end].tolist(), marks))
    return found, parts


def write_tokenizer(folder, *, template=CHATML, bos=False, adds_end=False, **settings):
    """A byte-level BPE in the form of GPT-2's and Llama 3's, trained on a few lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from tokenizers import decoders as decode

    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decode.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    )
    if bos or adds_end:
        added = "<|begin|> " * bos + "$A" + " <|im_end|>" * adds_end
        bpe.post_processor = processors.TemplateProcessing(
            single=added, special_tokens=[("<|begin|>", 0), ("<|im_end|>", 2)]
        )
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    found = {
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": template,
    } | settings
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in found.items() if v is not None})
    )
    return folder


def make_documents(rng, lengths, *, vocab=VOCAB, learned=True):
    tokens = rng.integers(0, vocab, sum(lengths)).astype(np.uint16)
    ends = np.cumsum(lengths)
    marks = None if learned is True else (rng.uniform(size=len(tokens)) < learned).astype(np.uint8)
    place = lambda start: f"a.jsonl:{np.searchsorted(ends, start, 'right') + 1}"
    return Documents(tokens, ends - lengths, ends, marks, place)
