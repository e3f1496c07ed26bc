"""lm-evaluation-harness, where it is installed: a served model has the scores of its own backend for transformers."""

import json
import os
import warnings

import numpy as np
import pytest

import jaxpar
from jaxpar.models import transformer
from tests.support import serving, tiny_transformer
from tests.support.texts import TEXT, write_tokenizer

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when they are imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # theirs

CHOICES = """task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WHOLE = """task: whole
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{metric: word_perplexity}]
"""
WRITTEN = """task: written
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama as transformers reads it."""
    folder = write_tokenizer(
        tmp_path / "tiny", eos_token="<|im_end|>", tokenizer_class="PreTrainedTokenizerFast"
    )
    sizes = tiny_transformer.SHAPE | {"vocab_size": 512, "num_layers": 2, "max_positions": 128}
    config = transformer.TransformerConfig(**sizes, **tiny_transformer.LLAMA)
    jaxpar.huggingface.write_model(folder, config, tiny_transformer.make_params(config))
    return folder


@pytest.fixture
def tasks(tmp_path):
    rng = np.random.default_rng(0)
    words = " ".join(TEXT).split()
    draw = lambda: " ".join(rng.choice(words, size=rng.integers(2, 6)))
    rows = [
        {"question": draw(), "choices": [f" {draw()}" for _ in range(3)], "answer": i % 3}
        for i in range(6)
    ]
    data, place = tmp_path / "rows.jsonl", tmp_path / "tasks"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place.mkdir()
    for name, text in {"choices": CHOICES, "whole": WHOLE, "written": WRITTEN}.items():
        (place / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return TaskManager(include_path=str(place), include_defaults=False)


def evaluate(tasks, backend, **args):
    names = ["choices", "whole", "written"]
    args = ",".join(f"{name}={value}" for name, value in args.items())
    return lm_eval.simple_evaluate(
        model=backend,
        model_args=args,
        tasks=names,
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        device="cpu",
    )


def test_a_served_model_is_scored_unchanged_as_by_the_backend_for_transformers(
    folder, tasks, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = evaluate(tasks, "hf", pretrained=folder, dtype="float32")
    with serving.serving(folder, model_name="tiny") as client:
        url = f"http://127.0.0.1:{client.port}/v1/completions"
        found = evaluate(
            tasks, "local-completions", model="tiny", base_url=url, tokenizer=folder, max_length=127
        )
    for task, rows in expected["samples"].items():
        for ours, theirs in zip(found["samples"][task], rows, strict=True):
            if task == "written":
                assert ours["resps"] == theirs["resps"]
            else:
                flat = lambda row: np.array(
                    [np.ravel(each) for each in np.ravel(row["resps"]).reshape(-1, 1)], float
                )
                np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-3, atol=1e-3)
    for task, metrics in expected["results"].items():
        figures = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, float) and "stderr" not in name
        }
        assert figures, task
        for name, value in figures.items():
            assert found["results"][task][name] == pytest.approx(value, rel=1e-3), (task, name)
