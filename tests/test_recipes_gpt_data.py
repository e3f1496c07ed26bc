"""recipes/gpt.py on text, conversations and rows of tokens: what is learned, what is written, what is refused and where."""

import contextlib
import dataclasses
import io
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gpt
import jaxpar
from jaxpar import huggingface
from jaxpar.checkpoint.restore import check_config
from jaxpar.commands import recipe as cli
from jaxpar.data.forms import as_learned, kind_of
from jaxpar.data.packing import IGNORED
from jaxpar.huggingface import read_tokenizer
from jaxpar.models import transformer
from jaxpar.run import Run, evaluation, language_data, language_model
from jaxpar.run.language_data import DataFlags
from jaxpar.run.language_model import ModelFlags
from tests.support.flags import replaced
from tests.support.gpt_data import SEQ, make_folder
from tests.support.oracle import assert_same
from tests.support.real_runs import curve, read_lines

STEPS = 6
HALF = str(STEPS // 2)
IN_THREE_DIMENSIONS = ["--mesh.data", "2", "--mesh.stage", "2", "--mesh.tensor", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(folder):
    usual = [
        "--init-from",
        str(folder / "llama"),
        "--token-cache",
        str(folder / "cache"),
        "--seq",
        str(SEQ),
    ]
    usual += [
        "--steps",
        str(STEPS),
        "--warmup-steps",
        "1",
        "--batch-size",
        "8",
        "--eval-rows",
        "8",
        "--lr",
        "0.01",
    ]
    return lambda out_dir, *flags: cli.run(
        gpt.main, gpt.Config, replaced([*usual, "--out-dir", str(out_dir), *flags])
    )


@pytest.fixture(scope="module")
def mixed(folder):
    return [
        "--data",
        str(folder / "chat.jsonl"),
        str(folder / "rows.parquet"),
        "--data-weights",
        "3",
        "1",
    ]


@pytest.fixture(scope="module")
def tuned(run, mixed, tmp_path_factory):
    """The folder of a run on one device, and what it printed."""
    out_dir, printed = tmp_path_factory.mktemp("runs") / "tuned", io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(out_dir, *mixed, "--checkpoint-every", HALF, "--prompt", "what is a cat?")
    return out_dir, printed.getvalue()


@pytest.mark.full
def test_a_model_is_tuned_on_a_mixture(tuned):
    """Loss falls, and the sample answers in the form of a conversation."""
    out_dir, said = tuned
    assert re.search(r"rows from .*chat.jsonl 75.0%, .*rows.parquet 25.0%", said)
    assert "fields ignored: id" in said
    assert re.search(
        r"nats a token, .* bits, perplexity [\d.]+; knowing the tokens' frequencies", said
    )
    assert (out_dir / "sample.txt").read_text().startswith("user\nwhat is a cat?\nassistant\n")
    losses = [line["loss"] for line in read_lines(out_dir)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [["--mesh.data", "4"], IN_THREE_DIMENSIONS], ids=["data", "three-dimensions"]
)
def test_a_run_on_a_mixture_goes_on_on_another_mesh_with_the_same_curve(
    run, tuned, mixed, tmp_path, mesh
):
    shutil.copytree(tuned[0] / "checkpoints" / HALF, tmp_path / "checkpoints" / HALF)
    run(tmp_path, *mesh, *mixed, "--resume")
    assert_same(curve(tmp_path), curve(tuned[0])[STEPS // 2 :], within=1e-4)


@pytest.fixture
def checked(run, monkeypatch, tmp_path, capsys):
    """Runs up to where the recipe would compile; gives what it says where it refuses, else None."""

    class AcceptedError(Exception):
        pass

    def accept(*_):
        raise AcceptedError

    monkeypatch.setattr(Run, "compile", accept)

    def said(*flags):
        try:
            run(tmp_path / "none", *flags)
        except AcceptedError:
            capsys.readouterr()
            return None
        except SystemExit as end:
            code = end.code
        assert code == 2
        return " ".join(capsys.readouterr().err.split())

    return said


def test_a_recipe_learns_the_completions_of_a_table_and_refuses_a_file_of_other_fields(
    checked, tmp_path
):
    (tmp_path / "a.csv").write_text(
        "prompt,completion\n" + "".join(f"the cat {i} ,a mat\n" for i in range(300))
    )
    assert checked("--data", str(tmp_path / "a.csv")) is None
    (tmp_path / "a.json").write_text('[{"question": "a", "answer": "b"}]')
    said = checked("--data", str(tmp_path / "a.json"))
    assert (
        'got the fields answer, question. Rename "question" to "instruction", "answer" to "output"'
        in said
    )


def test_a_metric_of_experts_is_one_of_models_with_experts_alone(checked, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 300)
    given = ("--data", str(tmp_path / "a.txt"), "--checkpoint-every", "50", "--keep-best")
    rule = "--keep-best must name a metric of the run"
    others = "Choose from test_loss, or loss, grad_norm, learning_rate, skipped."
    for name in ("dropped_experts", "-balance_loss"):
        assert f"{rule}; got {name.removeprefix('-')}. {others}" in checked(*given, name)
        gpt.check_keep_best(gpt.Config.of(keep_best=name), has_routing=True)
    assert checked(*given, "grad_norm") is None


def test_only_answers_are_targets(folder):
    flags = gpt.Config.of(
        data=(folder / "chat.jsonl",),
        init_from=folder / "llama",
        seq=SEQ,
        token_cache=folder / "cache",
    )
    data = language_data.load_data(flags.data, flags.recipe.init_from)
    train, _ = language_data.make_rows(flags.data, data, 352)
    rows = train.take(np.arange(len(train)))
    told = {data.tokenizer.decode(row[row != IGNORED]) for row in rows["targets"]}
    assert all(set(text.replace("a small animal", "").split()) == set() for text in told)
    assert rows["segments"].max() > 1, "several conversations a row"


@pytest.mark.full
def test_the_first_batch_has_the_loss_of_the_model_alone(tuned, folder, mixed):
    """Rows read by their numbers and packed are the rows that the loss is computed on."""
    flags = gpt.Config.of(data=tuple(map(Path, mixed[1:3])), data_weights=(3.0, 1.0), seq=SEQ, init_from=folder / "llama",
                       token_cache=folder / "cache")  # fmt: skip
    train, _ = language_data.make_rows(
        flags.data, language_data.load_data(flags.data, flags.recipe.init_from), 352
    )
    batch = train.batch(8, seed=0, step=0)
    shape = huggingface.read_config(folder / "llama")
    params = huggingface.read_params(folder / "llama", shape)
    total, weight = gpt.loss(jax.jit(transformer.make_model(shape).apply)(params, batch), batch)
    np.testing.assert_allclose(read_lines(tuned[0])[0]["loss"], total / weight, rtol=1e-5)


def test_tokens_of_a_step_and_of_a_microbatch_are_rows():
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    flags = language_data.in_rows(
        gpt.Config.of(seq=16, batch_tokens=2048, microbatch_tokens=256), mesh
    )
    assert (flags.common.batch_size, flags.data.num_microbatches) == (128, 4)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}', [], r'must have "text", .*; got the fields txt. .* It is in .*a.jsonl:2\.'),
        ('{"prompt": "a", "completion": "%s"}' % ("b " * 60), [], r"must fit in a row of seq \+ 1 tokens; got --seq 48 and 1"),
        ('{"text": "a"}', ["--data-weights", "1", "2"], "--data-weights must have one for each --data; got 2 for 1. Leave"),
        ('{"text": "a"}', ["--data-weights", "-1"], "each of --data-weights must be above 0 and finite; got -1. Correct it"),
        ('{"text": "a"}', ["--tokenizer", "nowhere"], "--tokenizer must be a folder with a tokenizer.json; got none in n"),
        ('{"text": "a"}', ["--long-examples", "shorten"], "shorten"),
        (
            '{"text": "a"}',
            ["--microbatch-tokens", "144"],
            "--microbatch-tokens must divide .*; got 144, a step of 384 tokens, --mesh.data 1. Choose 96",
        ),
        ('{"text": "a"}', ["--model", "gpt2"], "--init-from determines the model"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_end_the_run_before_anything_is_compiled(
    checked, tmp_path, lines, flags, message
):
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    said = checked("--data", str(tmp_path / "a.jsonl"), *flags)
    assert re.search(message, said), said


def test_the_remedies_for_long_examples_are_taken(checked, tmp_path):
    long = {"prompt": "what is a cat?", "completion": "a small animal " * 20}
    some = [{"prompt": f"what is {i}?", "completion": "a cat"} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*some, long]))
    data = ["--data", str(tmp_path / "a.jsonl")]
    seq, _ = re.search(r"Choose --seq (\d+), or --long-examples (drop)", checked(*data)).groups()
    assert checked(*data, "--seq", seq) is None
    assert checked(*data, "--long-examples", "drop") is None
    assert checked(*data, "--long-examples", "cut") is None


def test_the_seq_for_long_examples_is_one_that_the_mesh_splits(checked, tmp_path):
    """The longest example may be held out, and --seq be no multiple of what the mesh divides it by."""
    rows = [{"prompt": "p" * 31, "completion": "c" * each} for each in range(40, 60)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[10:]))
    mesh = ["--mesh.context", "2", "--mesh.tensor", "4", "--sequence-parallel", "--eval-rows", "2"]
    flags = ["--data", str(data), *mesh, "--batch-size", "2"]
    seq = re.search(r"Choose --seq (\d+), or", checked(*flags))[1]
    assert int(seq) % 8 == 0, "tensor splits what each part of context has"
    assert checked(*flags, "--seq", seq) is None
    beside_mesh = checked(*flags, "--mesh.data", "7")
    assert "Also, an example with a prompt must fit in a row" in beside_mesh
    assert f"Choose --seq {seq}, or" in beside_mesh


def test_a_single_example_of_which_both_pieces_fit_is_learned(tmp_path):
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"prompt": "p" * 30, "completion": "c" * 82}))
    given = {"data": (data,), "token_cache": tmp_path / "cache"}

    def rows(seq):
        flags = DataFlags(seq=seq, **given)
        return language_data.make_rows(flags, language_data.load_data(flags), 256)

    with pytest.raises(
        ValueError, match=r"examples?, the first of 102 tokens .*seq=101"
    ) as refused:
        rows(90)
    assert [len(part) for part in rows(101)] == [1, 1], refused.value


@pytest.mark.parametrize(
    "preferred",
    [
        {"prompt": "a?", "chosen": "b", "rejected": "c"},
        {"chosen": "a? b", "rejected": "a? c"},
        {
            "prompt": [{"role": "user", "content": "a?"}],
            "chosen": [{"role": "assistant", "content": "b"}],
            "rejected": [{"role": "assistant", "content": "c"}],
        },
        {
            "prompt": "a?",
            "chosen": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}],
            "rejected": [],
        },
        {
            "prompt": [{"role": "user", "content": "a?"}],
            "chosen": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}],
            "rejected": [],
        },
        {
            "system": "of s",
            "chosen": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}],
            "rejected": [],
        },
    ],
)
def test_preferences_are_told_that_they_are_not_trained_and_how_to_learn_the_chosen(preferred):
    with pytest.raises(ValueError, match="Preferences are not trained; to learn the") as refused:
        kind_of(preferred)
    old, new = re.search(r'rename "(\w+)" to "(\w+)"', str(refused.value)).groups()
    renamed = {name: value for name, value in preferred.items() if name != old}
    learned, _ = as_learned(renamed | {new: preferred[old]}, has_chat_template=True)
    for text in ("a?", "b", preferred.get("system", "")):
        assert text in str(learned)
    assert str(learned).count("a?") == 1
    assert "c" not in str(learned.get("completion", ""))


@pytest.mark.parametrize(
    ("preferred", "told"),
    [
        ({"prompt": "a?"}, 'write "prompt" as the first message of "chosen", and '),
        ({"question": "a?", "id": "c"}, 'write "question" as the first message of "chosen", and '),
        (
            {"system": "of s", "question": "a?", "context": "of c"},
            'write "system" and "question" and "context" as the first messages of "chosen", and ',
        ),
        ({}, 'write what is answered as the first message of "chosen", and '),
    ],
)
def test_what_chosen_messages_answer_is_written_before_them(preferred, told):
    chosen = [{"role": "assistant", "content": "b"}]
    example = {**preferred, "chosen": chosen, "rejected": []}
    with pytest.raises(ValueError, match=rf'answers alone, {told}.*rename "chosen" to "messages"'):
        kind_of(example)
    texts = [preferred[name] for name in re.findall(r'"(\w+)"', told) if name in preferred]
    first = [{"role": "user", "content": text} for text in texts or ["a?"]]
    with pytest.raises(ValueError, match='answers alone, rename "chosen" to "messages"\\.'):
        kind_of(example | {"chosen": [*first, *chosen]})


@pytest.mark.parametrize(
    ("preferred", "told"),
    [
        (
            {"prompt": [{"role": "user", "content": "a?"}], "chosen": "b"},
            'write "chosen" as a list with a message of the assistant, and rename it to "completion"',
        ),
        ({"prompt": "a?", "chosen": {"text": "b"}}, "write each example with these fields: str"),
    ],
)
def test_answers_of_another_kind_than_their_prompt_are_not_renamed_alone(preferred, told):
    with pytest.raises(ValueError, match=f"to learn the chosen answers alone, {told}"):
        kind_of(preferred | {"rejected": "c"})


NO_KIND = [
    {"prompt": "a?", "response": "b"},
    {"prompt": "a?", "answer": "b", "context": "of c"},
    {"question": "a?", "completion": "b"},
    {"instruction": "a?", "completion": "b", "input": "of c"},
    {"query": "a?", "answer": "b", "response": "b"},
    {"question": "a?", "answer": "b", "passages": [{"title": "c", "text": "d"}]},
    {"question": "a?", "answer": "b", "history": [{"role": "user", "content": "c"}]},
    {"question": "a?", "answer": "b", "context": "of c"},
    {"instruction": "a?", "context": "of c", "response": "b", "category": "closed_qa"},
    {"system": "of s", "question": "a?", "chosen": "b", "rejected": "d"},
    {"system": "of s", "prompt": "a?", "chosen": "b", "rejected": "d"},
    {"instruction": "a?", "input": "of c", "chosen": "b", "rejected": "d"},
    {"question": "a?", "chosen": "b", "rejected": "d"},
    {"system": "of s", "question": "a?", "answer": "b", "context": "of c"},
]


@pytest.mark.parametrize("example", NO_KIND, ids=" ".join)
def test_what_an_error_of_fields_says_to_rename_is_learned_as_it_was_meant(example):
    with pytest.raises(ValueError, match="an example must have") as refused:
        kind_of(example)
    found = re.findall(r'((?:"\w+" or )*"\w+") to "(\w+)"', str(refused.value))
    names = [re.findall(r"\w\w\w+", old) for old, _ in found]
    for chosen in itertools.product(*names):
        new = dict(zip(chosen, (name for _, name in found), strict=True))
        renamed = {new.get(name, name): value for name, value in example.items()}
        learned, _ = as_learned(renamed, has_chat_template=False)
        assert learned["completion"] == "b"
        assert "a?" in learned["prompt"]
        assert ("of c" in learned["prompt"]) == ("of c" in example.values())
        in_chat, _ = as_learned(renamed, has_chat_template=True)
        told = {name: text for name, text in example.items() if isinstance(text, str)}
        told = {name: text for name, text in told.items() if name not in ("rejected", "category")}
        for text in told.values():
            assert text in str(in_chat), "a text of the row is not learned"


def test_examples_in_a_list_of_one_object_are_told_where_to_write_them_and_what_to_rename():
    with pytest.raises(
        ValueError, match=r'"data" on a line of its own, in a .jsonl; there rename "q'
    ):
        kind_of({"version": 1, "data": [{"question": "a?", "answer": "b"}]})


def test_messages_beside_a_prompt_of_messages_are_its_completion():
    turns = {"prompt": [{"role": "user"}], "response": [{"role": "assistant"}]}
    with pytest.raises(ValueError, match='Rename "response" to "completion"\\.'):
        kind_of(turns)


@pytest.mark.parametrize(
    ("example", "remedy"),
    [
        ({"prompt": "a?"}, 'Write "prompt" as the first message of "response", and rename '),
        ({"system": "of s"}, 'Write "system" as the first message of "response", and rename '),
        ({}, 'Write what is answered as the first message of "response", and rename '),
    ],
)
def test_messages_of_another_name_keep_what_they_answer(example, remedy):
    answer = {"role": "assistant", "content": "b"}
    with pytest.raises(ValueError, match=f'{remedy}"response" to "messages"\\.'):
        kind_of(example | {"response": [answer]})
    asked = [{"role": "user", "content": text} for text in [*example.values()] or ["a?"]]
    with pytest.raises(ValueError, match='Rename "response" to "messages"\\.'):
        kind_of(example | {"response": [*asked, answer]})


def test_an_answer_that_is_no_string_has_no_other_name():
    squad = {"context": "c", "question": "a?", "answers": {"text": ["b"]}}
    with pytest.raises(ValueError, match=r"question\. Write each example with these fields: str"):
        kind_of(squad)


def test_an_example_with_fields_of_two_kinds_is_told_which():
    with pytest.raises(ValueError, match=r'got "text" and "prompt" with "completion"\. Keep those'):
        kind_of({"prompt": "a", "completion": "b", "text": "c"})


def test_a_tokenizer_of_more_tokens_than_the_named_model_is_refused_with_models_that_have_them(
    folder,
):
    data = dataclasses.replace(
        language_data.load_data(DataFlags()), tokenizer=read_tokenizer(folder / "llama")
    )
    text = dataclasses.replace(data, parts=(dataclasses.replace(data.parts[0], is_bytes=False),))
    make = lambda **given: language_model.model_config(
        ModelFlags(**given), 48, text, jaxpar.make_mesh()
    )
    with pytest.raises(
        ValueError,
        match=r"--model llama-bytes has a vocabulary of 256 tokens; got \d+ of the tokenizer in .*llama\. ",
    ) as raised:
        make()
    assert make(model=re.search(r"choose --model (\S+) or", str(raised.value))[1]).vocab_size > 352
    assert make(init_from=folder / "llama").vocab_size == 352


LLAMA = Path(__file__).parent / "data" / "huggingface" / "llama"


def test_rows_longer_than_the_positions_of_a_model_are_told():
    shape = huggingface.read_config(LLAMA)
    of = lambda seq: gpt.remark_on_positions(gpt.Config.of(init_from=LLAMA, seq=seq), shape)
    most = shape.max_positions
    assert of(most + 1) == (
        f"--seq {most + 1} is longer than the {most} positions that {LLAMA} was trained for (max_position_embeddings). "
        "A saved model keeps that number: raise it there to serve longer prompts"
    )
    assert of(most) == ""
    for kind, said in (
        ("dynamic", "served up to that length alone"),
        ("yarn", f'write "original_max_position_embeddings": {most} among'),
    ):
        scaling = transformer.RopeScaling(kind=kind, factor=2.0, original_positions=most)
        stretched = dataclasses.replace(shape, rope=transformer.Rope(scaling=scaling))
        given = gpt.Config.of(init_from=LLAMA, seq=most + 1), stretched
        assert said in gpt.remark_on_positions(*given), kind
    assert gpt.remark_on_positions(gpt.Config.of(seq=most + 1), shape) == "", (
        "of a model that begins with this run"
    )


def test_a_prompt_that_is_longer_than_a_row_is_told(capsys, monkeypatch):
    monkeypatch.setattr(
        evaluation.transformer, "generate", lambda config, params, prompt, *_, **__: prompt
    )
    flags, shape = gpt.Config.of(seq=8, prompt="a b c d e f g h i"), huggingface.read_config(LLAMA)
    data = SimpleNamespace(
        prompt=lambda _: np.arange(9), ends=(), unit="token", decode=lambda tokens, _: len(tokens)
    )
    assert evaluation.write_sample(flags, flags.recipe, shape, data, {}) == 7
    assert (
        "the sample begins with the last 7 of the 9 tokens of --prompt, for --seq 8"
        in capsys.readouterr().out
    )


def test_a_damaged_cache_ends_the_run_with_its_folder(checked, folder, tmp_path):
    cache = tmp_path / "cache"
    data = ["--data", str(folder / "lines.jsonl"), "--token-cache", str(cache)]
    assert checked(*data) is None
    [made] = cache.glob("[!.]*")
    (made / "tokens.bin").write_bytes(b"")
    said = checked(*data)
    assert f"in {made}. Remove that folder" in said
    shutil.rmtree(made)
    assert checked(*data) is None


def test_damaged_weights_are_told_before_text_is_tokenised(checked, folder, tmp_path):
    model, cache = shutil.copytree(folder / "llama", tmp_path / "llama"), tmp_path / "cache"
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    flags = ("--init-from", model, "--data", folder / "lines.jsonl", "--token-cache", cache)
    assert "must hold exactly the tensors of its header" in checked(*map(str, flags))
    assert not cache.exists()


def test_a_prompt_without_a_tokenizer_is_refused(checked, tmp_path):
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    shutil.copytree(Path(__file__).parent / "data" / "huggingface" / "llama", tmp_path / "llama")
    flags = [
        "--init-from",
        str(tmp_path / "llama"),
        "--data",
        str(tmp_path / "a.bin"),
        "--prompt",
        "a",
    ]
    assert (
        "--prompt needs a tokenizer; got 'a' without one. Name a folder with a tokenizer.json by --tokenizer"
        in checked(*flags)
    )


def test_conversations_for_a_model_without_a_tokenizer_are_refused_by_the_file_that_is_missing(
    checked, folder, tmp_path
):
    llama = shutil.copytree(folder / "llama", tmp_path / "llama")
    (llama / "tokenizer.json").unlink()
    said = checked("--init-from", str(llama), "--data", str(folder / "chat.jsonl"))
    assert (
        f"--init-from must be a folder with the tokenizer of its model, to learn from text; got no tokenizer.json in {llama}, "
        in said
    )
    assert (
        checked(
            "--init-from",
            str(llama),
            "--data",
            str(folder / "chat.jsonl"),
            "--tokenizer",
            str(folder / "llama"),
        )
        is None
    )


def test_adapters_to_start_from_are_refused_with_the_way_to_merge_them(checked, folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "llama"}')
    said = checked("--init-from", str(tmp_path), "--data", str(folder / "chat.jsonl"))
    assert (
        f"got the adapters in {tmp_path}, which peft adds to those of 'llama'. Merge them: python -m jaxpar"
        in said
    )
    shutil.copytree(folder / "llama", tmp_path, dirs_exist_ok=True)
    said = checked("--init-from", str(tmp_path), "--data", str(folder / "chat.jsonl"))
    assert (
        f"got adapter_config.json beside them in {tmp_path}, whose adapters transformers reads too where peft is "
        "installed. Remove adapter_config.json to read the model alone" in said
    )


@pytest.mark.full
def test_the_sample_ends_where_the_model_ends_a_text(folder, tmp_path):
    source, cache = shutil.copytree(folder / "llama", tmp_path / "llama"), folder / "cache"
    flags = gpt.Config.of(
        data=(folder / "lines.jsonl",),
        token_cache=cache,
        seq=SEQ,
        temperature=0.0,
        prompt="the cat",
    )
    shape = huggingface.read_config(source)
    params, data = (
        huggingface.read_params(source, shape),
        language_data.load_data(flags.data, source),
    )
    end, prompt = data.tokenizer.end, data.prompt(flags.data)
    assert data.ends == (end,)
    [row] = np.asarray(
        transformer.generate(
            shape, params, prompt[None], SEQ - len(prompt), top_k=flags.recipe.top_k, eos=[0, end]
        )
    )
    [at, *_] = [i for i in range(len(prompt) + 2, SEQ) if row[i] not in row[:i]]
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [int(row[at]), 10**6]})
    )
    data = language_data.load_data(flags.data, source)
    assert data.ends == (row[at], 10**6, end), "a token outside the vocabulary ends nothing"
    assert evaluation.write_sample(
        flags, flags.recipe, shape, data, params
    ) == data.tokenizer.decode(row[:at])
    as_numbers = dataclasses.replace(data, tokenizer=None).decode(row, len(prompt))
    assert as_numbers.split() == [str(token) for token in row[:at]]


def test_bytes_and_other_tokens_do_not_mix(checked, tmp_path):
    (tmp_path / "a.txt").write_text("the cat " * 200)
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    llama = shutil.copytree(
        Path(__file__).parent / "data" / "huggingface" / "llama", tmp_path / "llama"
    )
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"jaxpar_tokens": "bytes"}))
    said = checked(
        "--init-from", str(llama), "--data", str(tmp_path / "a.txt"), str(tmp_path / "a.bin")
    )
    assert "all --data must have tokens of one kind; got bytes and others in" in said


def test_examples_are_read_as_bytes_by_models_of_bytes(tmp_path):
    lines = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = gpt.Config.of(data=(tmp_path / "a.jsonl",), seq=16, token_cache=tmp_path / "cache")
    data = language_data.load_data(flags.data)
    train, _ = language_data.make_rows(flags.data, data, 256)
    row = train.take(np.arange(1))
    assert data.is_bytes
    assert bytes(row["targets"][row["targets"] > 0].astype(np.uint8)).decode().isdigit()


def test_rows_of_files_named_for_it_are_held_out_and_a_record_without_tokens_is_named(tmp_path):
    import pyarrow
    from pyarrow import parquet

    for name, count in (("train", 30), ("test", 7)):
        parquet.write_table(
            pyarrow.table({"input_ids": [[1, 2, count]] * count}), tmp_path / f"{name}.parquet"
        )
    flags = gpt.Config.of(data=(tmp_path,), seq=16)
    data = language_data.load_data(flags.data)
    train, test = language_data.make_rows(flags.data, data, 256)
    assert (len(train), len(test)) == (30, 7)
    assert data.parts[0].checksum.endswith(", 7 held out"), (
        "a run that held others out is not resumed"
    )
    np.testing.assert_array_equal(test.take(np.arange(7))["targets"][:, :2], [[2, 7]] * 7)
    loss = -np.log([31 / 63, 1 / 63]).mean()  # of 30 times 2 and 30, and of 7 that is not learned
    assert data.unigram_loss == pytest.approx(loss), "of targets alone"
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2], None]}), tmp_path / "test.parquet")
    with pytest.raises(
        ValueError,
        match=r'must have "input_ids", a list of integers; .* It is record 2 of .*test.parquet',
    ):
        language_data.make_rows(flags.data, language_data.load_data(flags.data), 256)


def test_the_loss_of_frequencies_is_that_of_the_weighted_data(tmp_path):
    for name, first, count in (("a", 0, 4000), ("b", 50, 1000)):
        tokens = np.arange(count, dtype=np.uint16) % 50 + first
        tokens.tofile(tmp_path / f"{name}.bin")
    paths = tmp_path / "a.bin", tmp_path / "b.bin"

    def loss_of(shares):
        counts = np.array(shares) * 4500 / 50 + 1  # of each of 50 tokens of a source
        return -np.log(counts / 4600) @ [0.8, 0.2]

    for weights, shares in (((), (0.8, 0.2)), ((1, 3), (0.25, 0.75))):
        flags = gpt.Config.of(data=paths, data_weights=weights, seq=16)
        data = language_data.load_data(flags.data)
        assert data.unigram_loss == pytest.approx(loss_of(shares))


def test_the_frequencies_of_short_records_are_those_of_many(tmp_path):
    import pyarrow
    from pyarrow import parquet

    tokens = np.random.default_rng(0).integers(500, size=(4000, 4)).tolist()
    parquet.write_table(pyarrow.table({"input_ids": tokens}), tmp_path / "a.parquet")
    data = language_data.load_data(gpt.Config.of(data=(tmp_path / "a.parquet",), seq=16).data)
    assert 6.2 < data.unigram_loss < 6.3, "about log 500"
    (part,) = data.parts
    train, test = part.learned()
    assert train.num_tokens + test.num_tokens == 3 * 4000 == sum(map(len, train.parts + test.parts))
    assert train.share_of_row == 3 / 16


def test_files_that_are_not_read_or_not_held_out_are_told(tmp_path, capsys):
    lines = [json.dumps({"text": f"number {i}"}) + "\n" for i in range(40)]
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("".join(lines))
    flags = gpt.Config.of(
        data=(tmp_path / "train.jsonl", tmp_path / "val.jsonl"),
        seq=16,
        token_cache=tmp_path.parent / "cache",
    )
    language_data.make_rows(flags.data, language_data.load_data(flags.data), 256)
    said = capsys.readouterr().out
    assert (
        f"{tmp_path}/val.jsonl: learned like the other --data, but for a share of its own. Files with val or test"
        in said
    )
    assert "40 of 80 documents of all --data equal an earlier one" in said
    assert "documents are learned too" not in said, "equal ones are chosen alike"
    for name in ("train.bin", "val.bin", "more/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.zeros(100, np.uint16).tofile(tmp_path / name)
    flags = gpt.Config.of(data=(tmp_path,), seq=16)
    [part] = language_data.load_data(flags.data).parts
    names = f"{tmp_path}/more/train.bin, {tmp_path}/train.jsonl, {tmp_path}/val.jsonl"
    assert part.remark == f"of {tmp_path} only its .bin files are read, not {names}"
    assert (
        not language_data.load_data(gpt.Config.of(data=(tmp_path / "val.bin",)).data)
        .parts[0]
        .remark
    )


def test_held_out_documents_that_are_learned_are_told(tmp_path, capsys):
    """From another --data, or from another file of a folder."""

    def said_of(*names):
        flags = gpt.Config.of(
            data=[tmp_path / name for name in names], seq=16, token_cache=tmp_path / "cache"
        )
        language_data.make_rows(flags.data, language_data.load_data(flags.data), 256)
        return capsys.readouterr().out

    def write(name, numbers):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines = [json.dumps({"text": f"number {i}"}) + "\n" for i in numbers]
        (tmp_path / name).write_text("".join(lines))

    write("a/train.jsonl", range(40))
    write("a/val.jsonl", range(100, 110))
    write("b/train.jsonl", range(200, 220))
    write("b/val.jsonl", range(37, 45))
    assert "documents are learned too" not in said_of("a")
    said = said_of("a", "b")
    assert "3 of 78 documents of all --data equal an earlier one" in said
    assert "3 of 18 held-out documents are learned too, from equal ones, so the loss on" in said
    write("a/val.jsonl", range(38, 50))
    assert "2 of 12 held-out documents are learned too" in said_of("a")


def test_the_sample_begins_with_a_question_held_out_and_not_with_its_answer(folder, tmp_path):
    """Which a reader would take for what the model writes."""
    own, cache = read_tokenizer(folder / "llama"), folder / "cache"
    completions = [{"prompt": f"what is {i}?", "completion": " a small animal"} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in completions))

    def prompt(data, seq=SEQ):
        flags = DataFlags(data=(data,), token_cache=cache, seq=seq)
        tokens = language_data.load_data(flags, folder / "llama").prompt(flags)
        return own.decode(tokens, special=True)

    asked = r"(<\|begin\|>)?<\|im_start\|>user\n.*\?<\|im_end\|>\n<\|im_start\|>assistant\n"
    whole = prompt(folder / "chat.jsonl")
    assert re.fullmatch(asked, whole)
    assert re.fullmatch(r"(<\|begin\|>)?what is \d+\?", prompt(tmp_path / "a.jsonl"))
    assert whole.endswith(prompt(folder / "chat.jsonl", seq=8)), "the end of one that is too long"
    assert len(prompt(folder / "lines.jsonl", seq=8)) > 4, "of text, its beginning"


def test_a_run_goes_on_with_the_rows_held_out_that_it_had(folder):
    """Else --keep-best would compare losses on other rows."""
    data = language_data.load_data(DataFlags(data=(folder / "lines.jsonl",)), folder / "llama")
    of = lambda **flags: gpt.Config.of(keep_best="test_loss", **flags)
    saved, usual = (gpt.numbers_depend_on(of(**each), data) for each in ({"eval_rows": 64}, {}))
    with pytest.raises(ValueError, match=r"got eval_rows=4 \(saved: 64\) for step 1"):
        check_config(gpt.numbers_depend_on(of(eval_rows=4), data), saved, "step 1")
    with pytest.raises(
        ValueError,
        match=r"got eval_rows=not given \(saved: 64\) .* Give the saved values, allow",
    ):
        check_config(usual, saved, "step 1")
    told = "of other rows held out than those before, and --keep-best test_loss compares the two"
    other = usual | {"text": "another"}  # with --allow-change text
    for given, was, beginning in (
        ({"eval_rows": 4}, saved, "--eval-rows 4 instead of 64: the losses from here on are "),
        ({}, other, "--data is another text: the losses from here on may be "),
    ):
        assert gpt.remark_on_rows_held_out(of(**given), usual, was) == beginning + told
    for given, was in (({"eval_rows": 64}, saved), ({}, usual), ({"eval_rows": 4}, {})):
        assert gpt.remark_on_rows_held_out(of(**given), usual, was) == ""


def test_a_token_that_was_added_to_the_tokenizer_is_named_with_its_line(folder, tmp_path):
    lines = ["a cat", "the mat", "a <|im_end|> cat"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines * 2))
    flags = DataFlags(data=(tmp_path / "a.jsonl",), token_cache=tmp_path / "cache", seq=16)
    data = language_data.load_data(flags, folder / "llama")
    where = re.escape(f"{tmp_path}/a.jsonl:")
    with pytest.raises(
        ValueError,
        match=rf"got \d+, vocab_size=256 in {where}\d\..* enlarge its embedding first, by model.resize_token_emb",
    ):
        language_data.make_rows(flags, data, 256)


def test_the_largest_metric_is_asked_for_as_the_help_has_it():
    """Tyro alone takes -test_loss for a flag."""
    parse = lambda *args: cli.parse(gpt.main, gpt.Config, args).checkpoint.keep_best
    for given in (["--keep-best", "-test_loss"], ["--keep-best=-test_loss"]):
        assert parse(*given, "--steps", "9") == "-test_loss"
    assert parse("--keep-best", "test_loss") == "test_loss"


@pytest.mark.full
def test_a_record_that_is_wrong_ends_a_run_with_code_65(run, folder, tmp_path, capsys):
    import pyarrow
    from pyarrow import parquet

    rows = [[1, 2, 3]] * 1000
    rows[501] = [1] * 99  # not among the records that are checked before
    parquet.write_table(pyarrow.table({"input_ids": rows}), tmp_path / "rows.parquet")
    with pytest.raises(SystemExit) as stop:
        run(
            tmp_path / "out",
            "--data",
            str(tmp_path / "rows.parquet"),
            "--batch-size",
            "256",
            "--steps",
            "4",
        )
    assert stop.value.code == 65
    assert re.search(
        r"must have from 2 to 49 input_ids, .*; got 99, 99, 99. .* It is record 502",
        capsys.readouterr().err,
    )


def test_a_tokenizer_with_other_tokens_than_the_models_own_is_told(folder, tmp_path, capsys):
    def told(change):
        other = shutil.copytree(folder / "llama", tmp_path / change.__name__)
        file = json.loads((other / "tokenizer.json").read_text())
        change(file["model"]["vocab"])
        (other / "tokenizer.json").write_text(json.dumps(file))
        flags = DataFlags(
            data=(folder / "lines.jsonl",), tokenizer=other, token_cache=tmp_path / "cache"
        )
        language_data.load_data(flags, folder / "llama")
        return capsys.readouterr().out

    def same(vocab):
        vocab["another"] = len(vocab)

    def exchanged(vocab):
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    assert told(same) == ""
    assert re.match(
        r"2 of the \d+ tokens of --tokenizer .* are others in .*llama, with", told(exchanged)
    )
