"""Serving: answers are those of the recipe, requests that are wrong get a clear error, those that are too many get 503."""

import asyncio
import contextlib
import dataclasses
import gzip
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

import digits
import gpt as gpt_recipe
import house_prices
import jaxpar
from house_prices_least_squares import least_squares, read_table
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint.restore import DeletedError
from jaxpar.data.text import ByteTokenizer
from jaxpar.models import mlp, trained_linear, transformer
from jaxpar.serve import open_run, openai_api, server
from jaxpar.serve.app import App
from jaxpar.serve.bodies import ChatBody, CompletionBody
from jaxpar.serve.language_model import GenerationRequest, LanguageModel, TextStream
from jaxpar.serve.requests import RequestError, Settings, Worker, parse
from tests.support import doc_pages, serving
from tests.support.model_folders import copy_with
from tests.support.texts import write_tokenizer
from tests.support.waiting import WAIT_SECONDS, wait_until

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "serving.md"


HOUSES = {"instances": [{"area_ft2": 1650, "bedrooms": 3}]}
GPT = "/v1/completions"
DRAWN = {"temperature": 0.7, "top_p": 0.9}
PROMPT = np.frombuffer(b"def main", np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "houses"
    folder.mkdir()
    table = read_table(house_prices.HOUSES, ("area_ft2", "bedrooms"), "price_usd")
    trained_linear.write_linear(
        folder / trained_linear.MODEL, least_squares(table).trained_on(table)
    )
    with serving.serving(folder) as client:
        yield folder, client


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gpt"
    params = serving.write_gpt_run(folder)
    with serving.serving(folder) as client:
        yield params, client


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A folder as transformers writes it, with a tokenizer and a chat template."""
    folder = write_tokenizer(tmp_path_factory.mktemp("models") / "chat", bos=True)
    config = transformer.TransformerConfig(
        **serving.tiny_transformer.SHAPE | {"vocab_size": 512, "max_positions": 64}
    )
    params = serving.tiny_transformer.make_params(config)
    jaxpar.huggingface.write_model(folder, config, params)
    with serving.serving(folder, model_name="tiny-chat") as client:
        yield folder, config, params, client


def ask(**fields):
    return {"model": "gpt", "prompt": "def main", "max_tokens": 12, "temperature": 0} | fields


def model_of(client):
    return client.app.served.endpoints[0].make_reply.__self__.model


# What is right -------------------------------------------------------------------------------------------------------


def test_a_house_has_the_price_that_the_recipe_predicts(houses):
    folder, client = houses
    found = client.post("/predict", HOUSES)
    assert (found.status, found.json["target"]) == (200, "price_usd")
    (price,) = found.json["predictions"]
    assert (
        trained_linear.describe_prediction(folder, (1650, 3))
        == f"price_usd {price['prediction']:,.6g} for area_ft2 1650, bedrooms 3"
    )
    assert price["outside_training_range"] == []


def test_a_house_unlike_those_of_the_training_is_marked(houses):
    found = houses[1].post(
        "/predict", {"instances": [{"area_ft2": 1650, "bedrooms": 99}, *HOUSES["instances"]]}
    )
    assert [each["outside_training_range"] for each in found.json["predictions"]] == [
        ["bedrooms"],
        [],
    ]


def test_requests_that_do_not_name_this_machine_are_refused_unless_their_name_is_allowed(houses):
    folder, client = houses
    for path, method in (("/docs", "GET"), ("/predict", "POST")):
        refused = client.send(method, path, headers={"Host": "elsewhere.example:8000"})
        assert refused.status == 421
        assert refused.message.startswith(
            "a request must name this server in its Host; got 'elsewhere.example:8000'. Ask"
        )
    assert client.send("GET", "/docs", headers={"Host": "localhost:9000"}).status == 200, (
        "through a tunnel"
    )
    with serving.serving(folder, limits=Settings(allowed_hosts=("gpu-box.example",))) as other:
        assert other.send("GET", "/docs", headers={"Host": "gpu-box.example"}).status == 200
        refused = other.send("GET", "/docs", headers={"Host": "elsewhere.example"})
        assert refused.status == 421
        assert "Ask it by a name of --allowed-hosts, or start it with this name in" in (
            refused.message
        )


def test_probes_that_ask_a_pod_by_its_address_are_answered_whatever_names_are_allowed(houses):
    """As the kubelet and Prometheus do; no page of another site can ask by an address."""
    folder, _ = houses
    with serving.serving(folder, limits=Settings(allowed_hosts=("gpt.example",))) as pod:
        status = lambda path, host: pod.send("GET", path, headers={"Host": host}).status
        for path in ("/healthz", "/readyz", "/metrics", "/readyz/"):
            assert status(path, "10.0.0.1:8000") == status(path, "[fd00::1]:8000") == 200
            assert status(path, "elsewhere.example") == 421
        assert status("/docs", "10.0.0.1:8000") == 421


@pytest.mark.full
def test_digits_are_those_that_the_recipe_reads(tmp_path):
    table = mlp.param_table(64, 10, width=16, num_hidden=4)
    params = jax.tree.map(jnp.asarray, serving.write_checkpoint(tmp_path / "digits", table))
    (tmp_path / "digits" / "config.json").write_text(json.dumps({"hidden_layers": 4, "width": 16}))
    images = (
        np.random.default_rng(0).uniform(size=(60, 64)).astype(np.float32)
        * (np.arange(60) % 3)[:, None]
        / 2
    )
    with serving.serving(tmp_path / "digits") as client:
        found = client.post(
            "/predict", {"instances": [{"pixels": image.tolist()} for image in images]}
        )
        wrong = client.post("/predict", {"instances": [{"pixels": [0.5] * 63}]})
    assert found.status == 200
    read = [each["digit"] for each in found.json["predictions"]]
    assert read == jax.jit(digits.predict)(params, {"features": images}).tolist()
    assert len(set(read)) > 1, "a model that reads one digit alone would show nothing"
    expected = jax.jit(
        lambda features: jax.nn.softmax(mlp.MODEL.apply(params, {"features": features}))
    )(images)
    np.testing.assert_allclose(
        [each["probabilities"] for each in found.json["predictions"]], expected, rtol=1e-5
    )
    assert "pixels must have at least 64 items; got an array of 63" in wrong.message


def test_a_completion_has_the_tokens_that_generate_draws(gpt):
    params, client = gpt
    drawn = transformer.generate(model_of(client).config, params, PROMPT[None], 12, eos=0)[0]
    found = client.post(GPT, ask()).json
    assert found["choices"][0]["text"] == serving.text_of(drawn[len(PROMPT) :])
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}
    assert (found["choices"][0]["finish_reason"], found["object"]) == ("length", "text_completion")


@pytest.mark.full
def test_a_model_with_experts_completes_as_full_passes_do(tmp_path):
    experts = transformer.Experts(count=4, balance_coefficient=0.01)
    config = dataclasses.replace(serving.CONFIG, experts=experts, tied=False)
    (folder := tmp_path / "gpt").mkdir()
    params = serving.write_gpt_run(folder, config)
    model = transformer.make_model(config)
    scores = jax.jit(lambda tokens: transformer.logits_of(model.apply(params, {"tokens": tokens})))
    tokens = np.pad(PROMPT, (0, 6))[None]
    for end in range(
        len(PROMPT), tokens.shape[1]
    ):  # what comes after a token does not change its scores
        tokens[0, end] = np.argmax(scores(tokens)[0, end - 1])
    found, served_config = serving.answer(folder, ask(max_tokens=6))
    assert served_config.experts.count == 4
    assert found["choices"][0]["text"] == serving.text_of(tokens[0, len(PROMPT) :])


@pytest.mark.full
def test_a_seed_draws_what_generate_draws_with_its_key(gpt):
    params, client = gpt
    rows = np.stack([PROMPT] * 4)  # a power of two, as three answers are computed
    drawn = transformer.generate(
        model_of(client).config, params, rows, 12, key=jax.random.key(3), eos=0, **DRAWN
    )[:3]
    answers = lambda seed: client.post(GPT, ask(seed=seed, n=3, **DRAWN)).json["choices"]
    first, again, other = ([choice["text"] for choice in answers(seed)] for seed in (3, 3, 4))
    assert first == again == [serving.text_of(row[len(PROMPT) :]) for row in drawn]
    assert len({*first, *other}) == 6, "each draws its own"


@pytest.mark.full
def test_prompts_of_unequal_lengths_get_the_answers_that_each_gets_alone(gpt):
    prompts = ["def main", "a = b", "import sys as"]
    alone = [gpt[1].post(GPT, ask(prompt=prompt)).json["choices"][0]["text"] for prompt in prompts]
    found = gpt[1].post(GPT, ask(prompt=prompts)).json
    assert [choice["text"] for choice in found["choices"]] == alone
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))
    tokens = [list(prompt.encode()) for prompt in prompts]
    assert [
        choice["text"] for choice in gpt[1].post(GPT, ask(prompt=tokens)).json["choices"]
    ] == alone


def test_a_stream_has_the_text_of_the_whole_answer(gpt):
    whole = gpt[1].post(GPT, ask()).json
    found = gpt[1].post(GPT, ask(stream=True, stream_options={"include_usage": True}))
    assert found.headers["Content-Type"].startswith("text/event-stream")
    *events, last = found.events
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({event["id"] for event in found.events}) == 1
    assert len(events) > 2, "it should come in pieces"


@pytest.mark.full
def test_a_model_in_float64_answers_with_what_generate_draws(gpt, x64):
    params, client = gpt
    config = dataclasses.replace(model_of(client).config, compute_dtype="float64")
    prompts = [PROMPT, PROMPT[:3]]
    want = transformer.generate(config, params, prompts, 6, key=jax.random.key(3), **DRAWN)
    request = GenerationRequest(prompts=prompts, max_tokens=6, seed=3, **DRAWN)
    deltas = [*LanguageModel(config, params, ByteTokenizer(), [], 64).answer(request)]
    for row, (prompt, tokens) in enumerate(zip(prompts, want, strict=True)):
        assert "".join(step[row].text for step in deltas) == serving.text_of(tokens[len(prompt) :])


def test_stop_strings_end_answers(gpt):
    text = gpt[1].post(GPT, ask()).json["choices"][0]["text"]
    stop = text[4:6]
    for stream in (False, True):
        found = gpt[1].post(GPT, ask(stop=[stop, "never"], stream=stream))
        choices = [event["choices"][0] for event in (found.events if stream else [found.json])]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.full
def test_a_conversation_is_answered_as_its_template_has_it(chat):
    folder, _, params, client = chat
    config = model_of(client).config
    messages = [{"role": "user", "content": "what is a cat?"}]
    tokenizer = jaxpar.huggingface.read_tokenizer(folder)
    text, _ = tokenizer.render(messages, ask=True)
    [(prompt, _)] = tokenizer.encode([text], begins=[False])
    (drawn,) = transformer.generate(config, params, prompt[None], 10, eos=tokenizer.end)
    expected = tokenizer.decode(drawn[len(prompt) :])
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "a cat?"}],
        }
    ]
    for conversation in (messages, parts):
        body = {"model": "tiny-chat", "messages": conversation, "max_tokens": 10, "temperature": 0}
        found = client.post("/v1/chat/completions", body).json
        assert found["choices"][0]["message"] == {"role": "assistant", "content": expected}
        assert found["usage"]["prompt_tokens"] == len(prompt)
    events = client.post("/v1/chat/completions", body | {"stream": True}).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_an_earlier_answer_is_taken_as_clients_keep_it(chat):
    client = chat[3]
    _, endpoint = client.app.served.endpoints
    asked = {
        "model": "tiny-chat",
        "messages": [{"role": "user", "content": "a cat"}],
        "max_tokens": 10,
        "temperature": 0,
    }
    unset = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    answer = client.post(endpoint.path, asked | {"parallel_tool_calls": True}).json["choices"][0][
        "message"
    ]
    more = [*asked["messages"], answer | unset, {"role": "user", "content": "b"}]
    reply = endpoint.make_reply(endpoint.body.model_validate(asked | {"messages": more}))
    said = model_of(client).tokenizer.decode(reply.work.__self__.request.prompts[0])
    assert said.index("a cat") < said.index(answer["content"]) < said.index("b"), said
    called = [*asked["messages"], answer | unset | {"tool_calls": [{"id": "x"}]}]
    assert (
        "messages[1].tool_calls[0] must have the field 'function'"
        in client.post(endpoint.path, asked | {"messages": called}).message
    ), "calls of tools are taken, as their API has them"


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
WITH_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.tool_call_id }}\n"
    "{{ m.content | tojson if m.role == 'tool' else m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.WRITTEN }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def of_tools(content='{"degrees": 21}'):
    return [
        {"role": "user", "content": "how warm is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": content},
    ]


def asked_of(messages):
    return ChatBody.model_validate({"model": "a", "messages": messages}).messages


@pytest.mark.parametrize("written", ["arguments", "arguments.city"])
def test_calls_of_tools_and_what_they_return_are_written_by_the_template(tmp_path, written):
    folder = write_tokenizer(tmp_path / "a", template=WITH_TOOLS.replace("WRITTEN", written))
    model = SimpleNamespace(tokenizer=jaxpar.huggingface.read_tokenizer(folder))
    text = openai_api._conversation(model, asked_of(of_tools()))
    assert ("Rome" if written.endswith("city") else '{"city": "Rome"}') in text
    assert 'tool c1\n"{\\"degrees\\": 21}"<|im_end|>' in text, "a template may write its JSON"
    assert text.endswith("<|im_start|>assistant\n")
    others = of_tools()
    others[0]["tool_calls"] = [CALL]
    with pytest.raises(ValueError, match=r"got tool_calls in a message of the role 'user'\. Leave"):
        openai_api._conversation(model, asked_of(others))


def test_a_template_by_which_no_question_can_be_asked_is_told_before_requests(tmp_path, capfd):
    today = "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}"
    folder = write_tokenizer(tmp_path / "a", template=today)
    tokenizer = jaxpar.huggingface.read_tokenizer(folder)
    config = SimpleNamespace(vocab_size=tokenizer.vocab_size)
    model = SimpleNamespace(
        tokenizer=tokenizer, has_chat_template=True, max_context=64, config=config
    )
    served = openai_api.language_model(model, "tiny", "a model", 8)
    told = capfd.readouterr().err
    assert "/v1/chat/completions refuses a message of the user: a chat template must give" in told
    assert "Write a date into the template" in served.endpoints[1].summary


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_told_before_requests(
    chat, monkeypatch, capfd
):
    model = model_of(chat[3])
    last = model.tokenizer.vocab_size - 1
    monkeypatch.setattr(model, "config", SimpleNamespace(vocab_size=last))
    monkeypatch.setattr(model, "encode", lambda text, begins=True: np.array([1, last]))
    served = openai_api.language_model(model, "tiny-chat", "a model", 8)
    told = capfd.readouterr().err
    assert f"the tokenizer has {last + 1:,} tokens and the model {last:,}: texts with one" in told
    assert (
        f"refuses a message of the user: tokens must be from 0 to {last - 1}; got {last}." in told
    )
    asked = {"model": "tiny-chat", "prompt": "a", "max_tokens": 1}
    with pytest.raises(RequestError, match="no embedding of this token of its tokenizer"):
        served.endpoints[0].make_reply(CompletionBody.model_validate(asked))


def test_calls_of_tools_that_a_template_does_not_write_are_a_400(chat):
    ask = lambda messages: chat[3].post(
        "/v1/chat/completions", {"model": "tiny-chat", "messages": messages, "max_tokens": 1}
    )
    found = ask(of_tools("21"))
    assert (found.status, found.json["error"]["param"]) == (400, "messages")
    assert (
        'tool_calls need a chat template that writes them; got one without "tool_' in found.message
    )
    asked, _, told = of_tools("21")
    assert ask([asked, told]).status == 200, "the role alone is the template's to write"


def test_a_completion_ends_where_the_model_ends_a_text(chat, monkeypatch):
    _, _, params, client = chat
    config = model_of(client).config  # equal but for how it names its dtype: compiled once
    prompt = [5, 6, 7] * 3  # with its answer as long as a conversation above: compiled once
    body = {"model": "tiny-chat", "prompt": prompt, "max_tokens": 10, "temperature": 0}
    drawn = np.asarray(transformer.generate(config, params, np.array([prompt]), 10, eos=3))[
        0, len(prompt) :
    ].tolist()
    model = model_of(client)
    monkeypatch.setattr(model, "_eos", (drawn[4],))
    found = client.post(GPT, body).json
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == drawn.index(drawn[4]) + 1


def test_an_end_that_the_vocabulary_lacks_ends_no_text(chat):
    _, _, _, client = chat
    model = model_of(client)
    beyond = LanguageModel(
        model.config, model._params, model.tokenizer, [model.config.vocab_size, 3], 32
    )
    assert beyond._eos == (3,)


# What is wrong -------------------------------------------------------------------------------------------------------

INSTANCE = "instances[0].area_ft2 must be"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"area=1650", "a body must be JSON in UTF-8"),
        (b"\xff\xfe", "a body must be JSON in UTF-8"),
        (b"", "got 0 bytes that are not"),
        (b"\xef\xbb\xbf{}", "a body must be JSON in UTF-8"),
        ('{"instances": []}'.encode("utf-16"), "a body must be JSON in UTF-8"),
        (b"{} x", "Extra data: line 1 column 4"),
        (b"[" * 100_000, "a body must be JSON in UTF-8"),
        (b'{"instances": [], "instances": []}', "a key occurs twice"),
        (b'{"instances": [{"area_ft2": NaN, "bedrooms": 3}]}', "NaN is not a number of JSON"),
        (
            b'{"instances": [{"area_ft2": -Infinity, "bedrooms": 3}]}',
            "-Infinity is not a number of JSON",
        ),
        (
            b'{"instances": [{"area_ft2": 1e999, "bedrooms": 3}]}',
            "1e999 is out of range, beyond 1.8e308",
        ),
        (
            b'{"instances": [{"area_ft2": %s, "bedrooms": 3}]}' % (b"9" * 5000),
            "that are not: 99999",
        ),
        ([], "the body must be an object; got []"),
        (b"null", "the body must be an object; got null"),
        ({}, "the body must have the field 'instances'; got no fields"),
        ({"instances": []}, "instances must have at least 1 item; got []"),
        ({"instances": [3]}, "instances[0] must be an object; got 3"),
        (
            {"instances": HOUSES["instances"] * 65},
            "instances must have at most 64 items; got an array of 65",
        ),
        (
            {"instances": [{"area_ft2": 1650}]},
            "instances[0] must have the field 'bedrooms'; got 'area_ft2'. Give such as 3",
        ),
        (
            {"instances": [{"area_ft2": "1650", "bedrooms": 3}]},
            f'{INSTANCE} a number; got "1650". Give such as ',
        ),
        ({"instances": [{"area_ft2": True, "bedrooms": 3}]}, f"{INSTANCE} a number; got true"),
        ({"instances": [{"area_ft2": None, "bedrooms": 3}]}, f"{INSTANCE} a number; got null"),
        (
            {"instances": [{"area_ft2": 1e200, "bedrooms": 3}]},
            f"{INSTANCE} at most 1e+12; got 1e+200",
        ),
        (
            {"instance": [], "instances": HOUSES["instances"]},
            "got 'instance' (did you mean 'instances'?). Leave it out",
        ),
    ],
)
def test_a_wrong_instance_is_a_400_that_names_it(houses, body, message):
    found = houses[1].post("/predict", body)
    assert found.status == 400
    assert message in found.message
    assert len(found.text) < 600, "a message fits on a screen"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -3}, "max_tokens must be at least 0; got -3. Give such as "),
        ({"max_tokens": 65}, "max_tokens must be at most 64; got 65"),
        (
            {"max_tokens": 60},
            "at most 64 tokens together; got a prompt of 8 and max_tokens=60. Give max_tokens=56 or less",
        ),
        (
            {"prompt": "x" * 64},
            "got a prompt of 64 and max_tokens=12. Cut the prompt",
        ),
        ({"max_tokens": 1.5}, "max_tokens must be an integer or null; got 1.5"),
        ({"prompt": ""}, 'a prompt must have a token; got ""'),
        ({"prompt": []}, "prompt must be a text, tokens, or an array of up to 8 of either; got []"),
        ({"prompt": [1, "a"]}, "prompt must be a text"),
        ({"prompt": [-1]}, "prompt must be a text"),
        ({"prompt": [256]}, "tokens must be from 0 to 255; got 256"),
        ({"prompt": [2**80]}, "prompt must be a text, tokens"),
        (
            {"prompt": ["a"] * 8, "n": 2},
            "the prompts times n must be at most 8; got 8 prompts, n=2",
        ),
        ({"prompt": "a\0b"}, "text as bytes must have no zero bytes"),
        ({"prompt": "\ud800"}, "text must be Unicode; got half of a surrogate pair"),
        ({"temperature": -1}, "temperature must be at least 0; got -1"),
        ({"temperature": "hot"}, "temperature must be a number or null"),
        ({"top_p": 0}, "top_p must be above 0; got 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"stop": [""]}, "stop must be a text before which"),
        ({"stream": "yes"}, "stream must be true or false or null"),
        ({"stream_options": {"include_usage": True}}, "stream_options are of a stream"),
        (
            {"max_tokens": 0},
            "max_tokens must be at least 1 without echo; got 0. Give such as 16, or echo=true.",
        ),
        ({"logprobs": 6}, "logprobs must be at most 5; got 6"),
        (
            {"echo": True, "stream": True},
            "echo and logprobs are of a whole answer; got one of them with stream=true.",
        ),
        ({"logprobs": 0, "stream": True}, "echo and logprobs are of a whole answer"),
        ({"frequency_penalty": 0.5}, "frequency_penalty must be 0 or null"),
        ({"top_k": 5}, "must have no fields but model, max_tokens"),
        ({"maxtokens": 5}, "(did you mean 'max_tokens'?)"),
    ],
)
def test_a_wrong_field_of_a_completion_is_a_400_that_names_it(gpt, fields, message):
    found = gpt[1].post(GPT, ask(**fields))
    assert found.status == 400, found.text
    assert message in found.message
    assert found.json["error"]["type"] == "invalid_request_error"
    assert found.json["error"]["param"]


@pytest.mark.parametrize(
    ("instance", "param"),
    [
        ({"area_ft2": "1650", "bedrooms": 3}, "instances[0].area_ft2"),
        ({"area_ft2": 1650}, "instances[0].bedrooms"),
        ({"area_ft2": 1650, "bedrooms": 3, "pool": 1}, "instances[0].pool"),
    ],
)
def test_a_wrong_a_missing_and_an_unknown_field_are_named_alike(houses, instance, param):
    assert houses[1].post("/predict", {"instances": [instance]}).json["error"]["param"] == param
    found = houses[1].post("/predict", {})
    assert found.json["error"]["param"] == "instances", "one of the body itself has no path"


def test_fields_that_change_nothing_are_taken(gpt):
    neutral = {
        "n": 1,
        "max_tokens": 12.0,  # JSON has one kind of numbers
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "presence_penalty": 0.0,
        "user": "me",
        "stop": None,
    }
    assert (
        gpt[1].post(GPT, ask(**neutral)).json["choices"] == gpt[1].post(GPT, ask()).json["choices"]
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must have at least 1 item; got []"),
        (
            [{"role": "cat", "content": "x"}],
            "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool'; got \"cat\". Give such as \"user",
        ),
        ([{"role": "user"}], "messages[0] must have the field 'content'"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content must be a text, or an array of",
        ),
        ([{"role": "user", "content": "cat " * 100}], "tokens together; got a prompt of 113. Cut"),
        ([{"role": "user", "content": "\ufdd0"}], "messages must have no noncharacters"),
    ],
)
def test_a_wrong_conversation_is_a_400(chat, messages, message):
    found = chat[3].post("/v1/chat/completions", {"model": "tiny-chat", "messages": messages})
    assert found.status == 400
    assert message in found.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"max_completion_tokens": 9999},
            "max_completion_tokens",
            "max_completion_tokens must be at most 64; got 9999",
        ),
        (
            {"max_completion_tokens": 60},
            "messages",
            "and max_completion_tokens=60. Give max_completion_tokens=",
        ),
        ({"max_tokens": 9999}, "max_tokens", "max_tokens must be at most 64"),
        (
            {"max_tokens": 2, "max_completion_tokens": 3},
            "max_completion_tokens",
            "are two names of one number; got 2 and 3",
        ),
        (
            {"messages": [{"role": "user", "content": "cat", "name": "Ann"}]},
            "messages",
            "the name of a message needs a chat template that writes names; got 'Ann'. Leave it out.",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "messages",
            "half of a surrogate pair",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1; got 0. Give such as 16."),
    ],
)
def test_the_field_that_is_wrong_is_the_one_that_was_sent(chat, fields, param, message):
    asked = {"model": "tiny-chat", "messages": [{"role": "user", "content": "cat"}]}
    found = chat[3].post("/v1/chat/completions", asked | fields)
    assert (found.status, found.json["error"]["param"]) == (400, param)
    assert message in found.message


def test_a_name_that_a_template_writes_of_functions_alone_is_a_400(chat, monkeypatch):
    client = chat[3]
    tokenizer = model_of(client).tokenizer
    monkeypatch.setattr(tokenizer, "uses", lambda name, has_tools=False: True)
    messages = [{"role": "user", "name": "Ann", "content": "cat"}]
    body = {"model": "tiny-chat", "messages": messages, "max_tokens": 1}
    found = client.post("/v1/chat/completions", body)
    assert (found.status, found.json["error"]["param"]) == (400, "messages")
    assert "needs a chat template that writes names; got 'Ann'. Leave it out." in found.message
    of_names = lambda messages, ask: ("".join(f"{m.get('name')}: cat" for m in messages), [])
    monkeypatch.setattr(tokenizer, "render", of_names)
    assert client.post("/v1/chat/completions", body).status == 200


def test_a_message_that_the_template_leaves_out_is_a_400(chat, monkeypatch):
    monkeypatch.setattr(
        model_of(chat[3]).tokenizer, "render", lambda messages, ask: (messages[-1]["content"], [])
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "cat"}]
    found = chat[3].post("/v1/chat/completions", {"model": "tiny-chat", "messages": messages})
    assert (found.status, found.json["error"]["param"]) == (400, "messages")
    assert "got a message of the role 'system' that it leaves out or changes" in found.message


def test_a_template_that_writes_nothing_for_a_conversation_is_a_400(chat, monkeypatch):
    client = chat[3]
    monkeypatch.setattr(model_of(client).tokenizer, "render", lambda messages, ask: ("", []))
    found = client.post(
        "/v1/chat/completions",
        {"model": "tiny-chat", "messages": [{"role": "user", "content": "x"}]},
    )
    assert (found.status, found.json["error"]["param"]) == (400, "messages")
    assert "a prompt must have a token" in found.message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (GPT, {"prompt": ["a"] * 200_000}),
        pytest.param(GPT, {"prompt": [1] * 300_000 + ["a"]}, marks=pytest.mark.full),
        pytest.param(GPT, {"prompt": [[-1]] * 150_000}, marks=pytest.mark.full),
        pytest.param(
            GPT,
            {"prompt": "a", **dict.fromkeys(map(str, range(80_000)), 1)},
            marks=pytest.mark.full,
        ),
        pytest.param("/v1/chat/completions", {"messages": [{}] * 250_000}, marks=pytest.mark.full),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [1] * 300_000}]},
            marks=pytest.mark.full,
        ),
    ],
    ids=["texts", "tokens", "rows", "keys", "messages", "parts"],
)
def test_a_large_body_full_of_mistakes_is_one_mistake(gpt, path, fields):
    """Each would be an error of its own: seconds, in which the server answers no one."""
    body = json.dumps({"model": "gpt"} | fields).encode()
    (endpoint,) = (each for each in gpt[1].app.served.endpoints if each.path == path)
    with pytest.raises((ValidationError, RequestError)) as found:
        endpoint.body.model_validate(parse(body))
    assert not isinstance(found.value, ValidationError) or found.value.error_count() <= 2
    assert gpt[1].post(path, body).status == 400


def test_a_model_without_a_template_takes_no_conversation(gpt):
    found = gpt[1].post(
        "/v1/chat/completions", {"model": "gpt", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (found.status, "Ask /v1/completions." in found.message) == (400, True)


@pytest.mark.parametrize(("value", "status"), [(None, 400), ([], 400)])
def test_a_field_of_conversations_is_none_of_completions(gpt, value, status):
    """As the page says: /v1/chat/completions takes the empty list of tools, which has no effect."""
    found = gpt[1].post(GPT, ask(tools=value))
    assert (found.status, "Leave it out" in found.message) == (status, True)


def test_an_unknown_model_is_a_404_that_names_the_one_that_is_served(gpt):
    found = gpt[1].post(GPT, ask(model="gpt-4"))
    assert (found.status, found.json["error"]["code"]) == (404, "model_not_found")
    assert "got 'gpt-4'. Give 'gpt'." in found.message
    (model,) = gpt[1].get("/v1/models").json["data"]
    assert model["id"] == "gpt"
    assert model["description"] == "step 0 of gpt"
    assert gpt[1].get("/v1/models/gpt").json == model
    other = gpt[1].get("/v1/models/org/gpt-4")
    assert (other.status, other.json["error"]["code"]) == (404, "model_not_found")


def test_paths_methods_and_kinds_of_bodies_that_are_not_served(houses):
    client = houses[1]
    assert (client.get("/nothing").status, "Ask /predict" in client.get("/nothing").message) == (
        404,
        True,
    )
    wrong = client.get("/predict")
    assert (wrong.status, wrong.headers["Allow"], wrong.message) == (
        405,
        "POST",
        "the path takes POST; got GET. Use POST.",
    )
    assert client.send("HEAD", "/healthz").status == 200, "as load balancers ask"
    assert client.get("/healthz/").status == 200
    assert client.post("/predict/", HOUSES).json == client.post("/predict", HOUSES).json
    assert client.get("/nothing/").status == 404
    form = client.send(
        "POST", "/predict", b"{}", {"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert (form.status, "Add the header Content-Type: application/json" in form.message) == (
        415,
        True,
    )
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    coded = client.send("POST", "/predict", gzip.compress(b"{}"), packed)
    assert (
        coded.status,
        "got Content-Encoding 'gzip'. Send it uncompressed." in coded.message,
    ) == (415, True)
    described = client.get("/openapi.json").json["paths"]["/predict"]["post"]["responses"]["415"]
    page = (Path(__file__).parents[1] / "docs/serving.md").read_text()
    assert (
        described["description"]
        == "The Content-Type is not application/json, or the body is compressed (Content-Encoding)."
    )
    assert "not sent as JSON, or compressed (`Content-Encoding`)" in page


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 415),
        ("text/plain", 415),
    ],
)
def test_a_body_is_read_if_its_media_type_is_json(houses, kind, status):
    body = json.dumps(HOUSES).encode()
    assert houses[1].send("POST", "/predict", body, {"Content-Type": kind}).status == status


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_a_413(houses, chunked):
    content = [b" " * 2**18] * 5 if chunked else b" " * (2**20 + 1)
    headers = {"Content-Type": "application/json"} | (
        {"Transfer-Encoding": "chunked"} if chunked else {}
    )
    found = houses[1].send("POST", "/predict", content, headers)
    assert (found.status, "a body must have at most 1048576 bytes; got" in found.message) == (
        413,
        True,
    )


def test_a_length_that_is_far_too_large_is_refused_before_the_body_comes(houses):
    with socket.create_connection(
        ("127.0.0.1", houses[1].port), timeout=WAIT_SECONDS
    ) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_a_408(houses, monkeypatch):
    monkeypatch.setattr("jaxpar.serve.requests.READ_SECONDS", 0.2)
    with socket.create_connection(
        ("127.0.0.1", houses[1].port), timeout=WAIT_SECONDS
    ) as connection:
        connection.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_what_is_no_http_gets_a_400_and_harms_nothing(houses):
    with socket.create_connection(
        ("127.0.0.1", houses[1].port), timeout=WAIT_SECONDS
    ) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert houses[1].post("/predict", HOUSES).status == 200


def test_connections_that_send_nothing_or_too_slowly_keep_nobody_out(houses, monkeypatch):
    client, connections = houses[1], houses[1].app.connections
    monkeypatch.setattr(connections, "_most", 8)
    connect = lambda: socket.create_connection(("127.0.0.1", client.port), timeout=WAIT_SECONDS)
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(connect()) for _ in range(20)]
        assert client.get("/healthz").status == 200
        assert client.post("/predict", HOUSES).status == 200
        assert silent[0].recv(1) == b"", "the oldest made room"
        assert len(connections) <= 8
    monkeypatch.setattr("jaxpar.runtime.connections.SECONDS_TO_ASK", 0.2)
    with connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost")
        assert slow.recv(1) == b""
    wait_until(lambda: len(connections) == 0)


def test_a_client_that_goes_away_while_it_sends_its_body_is_a_499_and_no_error(houses, capfd):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with socket.create_connection(
        ("127.0.0.1", houses[1].port), timeout=WAIT_SECONDS
    ) as connection:
        connection.sendall(head)
        wait_until(lambda: houses[1].app.num_open)
    wait_until(
        lambda: (
            'jaxpar_serve_requests_total{code="499",path="/predict"} 1.0'
            in houses[1].get("/metrics").text
        )
    )
    assert 'code="500"' not in houses[1].get("/metrics").text
    assert "Traceback" not in capfd.readouterr().err


# The interface -------------------------------------------------------------------------------------------------------


def test_docs_show_every_path_and_load_nothing(houses, gpt):
    for client, path, greedy in ((houses[1], "/predict", {}), (gpt[1], GPT, {"temperature": 0})):
        page, described = client.get("/docs").text, client.get("/openapi.json").json
        assert described["openapi"].startswith("3.1")
        assert all(each in page for each in described["paths"])
        for probe in ("/healthz", "/readyz"):
            assert "503" in described["paths"][probe]["get"]["responses"]
        assert "src=" not in page
        assert "<script" not in page
        assert "http" not in page.replace(f"http://127.0.0.1:{client.port}", ""), (
            "nothing is loaded from elsewhere"
        )
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        assert client.post(path, schema["examples"][0] | greedy).status == 200, "its example works"


def test_names_of_columns_cannot_add_to_the_page(tmp_path):
    table = read_table(house_prices.HOUSES, ("area_ft2", "bedrooms"), "price_usd")
    trained_linear.write_linear(
        tmp_path / trained_linear.MODEL, least_squares(table).trained_on(table)
    )
    model = json.loads((tmp_path / "model.json").read_text())
    model["features"][0] = "<script>alert('x')</script>"
    (tmp_path / "model.json").write_text(json.dumps(model))
    with serving.serving(tmp_path) as client:
        assert "<script" not in client.get("/docs").text


def test_metrics_count_what_was_answered(houses, gpt):
    before = gpt[1].get("/metrics").text
    gpt[1].post(GPT, ask())
    gpt[1].post(GPT, ask(max_tokens=-1))
    after = gpt[1].get("/metrics").text
    count = lambda page, name: sum(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)
    )
    grown = lambda name: count(after, name) - count(before, name)
    assert grown('jaxpar_serve_requests_total{code="200",path="/v1/completions"}') == 1
    assert grown('jaxpar_serve_requests_total{code="400",path="/v1/completions"}') == 1
    assert (
        grown("jaxpar_serve_prompt_tokens_total"),
        grown("jaxpar_serve_completion_tokens_total"),
    ) == (8, 12)
    assert (
        count(after, "jaxpar_serve_waiting_requests")
        == count(after, "jaxpar_serve_running_requests")
        == 0
    )
    for _ in range(3):
        houses[1].get(f"/nothing/{_}")
    assert houses[1].get("/metrics").text.count('path="other"') < 30, (
        "paths that strangers make up are one label"
    )


def test_the_guide_s_commands_get_the_answers_that_it_shows(houses, gpt):
    (shown,) = (
        json.loads(block.text) for block in doc_pages.blocks(GUIDE) if block.language == "json"
    )
    for command in doc_pages.commands(GUIDE):
        if command.words[0] != "curl":
            continue
        (url,) = (word for word in command.words if word.startswith("http://127.0.0.1:8000/"))
        path, body = url.removeprefix("http://127.0.0.1:8000"), json.loads(command.words[-1])
        if path == "/predict":
            found = houses[1].post(path, body).json
            prices = [answer["predictions"][0].pop("prediction") for answer in (found, shown)]
            assert prices[0] == pytest.approx(
                prices[1], rel=1e-6
            )  # the model of the test is that of least squares
            assert found == shown
        else:
            assert gpt[1].post(path, body | {"model": "gpt", "temperature": 0}).status == 200


# Load and time -------------------------------------------------------------------------------------------------------


def test_make_train_leaves_runs_that_are_served_and_prints_requests_that_they_answer(houses, gpt):
    makefile = (ROOT / "Makefile").read_text()
    train = re.search(r"^train:.*?\n\n", makefile, flags=re.M | re.S)[0]
    saved = dict(re.findall(r"recipes/(\w+)\.py (.*) --overwrite", train))
    steps = gpt_recipe.Config().common.steps
    assert all(
        steps % int(re.search(r"--checkpoint-every (\d+)", saved[name])[1]) == 0
        for name in ("gpt", "digits")
    )
    assert set(re.findall(r"jaxpar serve ([\w/]+)", train)) == set(
        re.findall(r"--out-dir (\S+)", train)
    )
    requests = re.findall(r"127\.0\.0\.1:8000(\S+) .*? -d '(.*)'", train.replace("\\", ""))
    assert [path for path, _ in requests] == [GPT, "/predict"]
    for (path, body), (_, client) in zip(requests, (gpt, houses), strict=True):
        quick = (
            {"max_tokens": 16, "temperature": 0} if path == GPT else {}
        )  # by a program that is compiled
        response = client.post(path, json.loads(body) | quick)
        assert response.status == 200, response.text


def test_every_client_gets_the_right_answer_or_is_told_to_wait(gpt, monkeypatch):
    client = gpt[1]
    prompts = [f"{i} times" for i in range(4)]
    right = [client.post(GPT, ask(prompt=prompt)).json["choices"][0]["text"] for prompt in prompts]
    monkeypatch.setattr(client.app.worker, "_max_waiting", 3)
    with ThreadPoolExecutor(16) as pool:
        found = list(
            pool.map(
                lambda i: client.post(GPT, ask(prompt=prompts[i % 4], stream=i % 3 == 0)), range(48)
            )
        )
    for i, response in enumerate(found):
        assert response.status in (200, 503)
        if response.status == 503:
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert "at most 3 requests may wait" in response.message
        elif i % 3 == 0:
            assert "".join(event["choices"][0]["text"] for event in response.events) == right[i % 4]
        else:
            assert response.json["choices"][0]["text"] == right[i % 4]
    statuses = [response.status for response in found]
    assert {200, 503} <= set(statuses)
    assert (client.app.worker.num_waiting, client.app.worker.is_running) == (0, False)


def test_a_client_that_goes_away_ends_its_work(gpt):
    client = gpt[1]
    for stream in (True, False):
        body = json.dumps(ask(max_tokens=16, stream=stream)).encode()
        head = f"POST {GPT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        before = client.app.served.usage["completion_tokens"]
        release = threading.Event()
        model = model_of(client)
        answer = model.answer

        def slow(asked, answer=answer, release=release):
            for pieces in answer(asked):
                yield pieces
                release.wait(0.05)

        object.__setattr__(model, "answer", slow)
        try:
            with socket.create_connection(
                ("127.0.0.1", client.port), timeout=WAIT_SECONDS
            ) as connection:
                connection.sendall(head.encode() + body)
                wait_until(
                    lambda before=before: client.app.served.usage["completion_tokens"] > before
                )
            wait_until(lambda: not client.app.worker.is_running)
        finally:
            object.__setattr__(model, "answer", answer)
        assert client.app.served.usage["completion_tokens"] - before < 16, (
            "the rest should not be computed"
        )
        wait_until(lambda: client.app.num_open == 0)


def worker_of(seconds=60.0, waiting=2):
    return Worker(waiting, seconds)


def test_the_first_request_which_compiles_may_take_longer_than_any_other_and_is_not_counted():
    usage = {"instances": 0}

    def slow():
        time.sleep(0.2)
        usage["instances"] += 1
        yield 1

    async def run():
        worker = worker_of(0.05)
        endpoint = SimpleNamespace(
            body=SimpleNamespace(model_validate=lambda body: body),
            make_reply=lambda body: SimpleNamespace(work=slow),
        )
        served = SimpleNamespace(endpoints=[endpoint], first={}, usage=usage)
        app = SimpleNamespace(worker=worker, served=served, is_ready=False)
        await App.warm_up(app)
        assert app.is_ready
        assert usage == {"instances": 0}
        with pytest.raises(RequestError, match=r"must be answered within 0.05 s"):
            await worker.ask(slow).all()
        worker.close()

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_given_up_and_those_behind_it_go_on():
    async def run():
        worker, release = worker_of(0.3, waiting=4), threading.Event()

        def forever():
            while not release.wait(0.02):
                yield 1

        late = worker.ask(forever)
        with pytest.raises(RequestError, match=r"must be answered within 0.3 s") as error:
            await late.all()
        assert error.value.status == 503
        assert error.value.retry_after
        assert await worker.ask(lambda: iter([3])).all() == [3]
        worker.close()

    asyncio.run(run())


def test_requests_are_computed_one_at_a_time_in_their_order():
    async def run():
        worker, running, order = worker_of(waiting=8), [], []

        def work(i):
            running.append(i)
            assert len(running) == 1
            order.append(i)
            yield i
            running.pop()

        answers = [worker.ask(lambda i=i: work(i)) for i in range(8)]
        answers[3].close()
        assert await asyncio.gather(
            *(answer.all() for i, answer in enumerate(answers) if i != 3)
        ) == [[i] for i in range(8) if i != 3]
        assert order == [i for i in range(8) if i != 3]
        assert worker.num_waiting == 0
        worker.close()

    asyncio.run(run())


def test_a_burst_beyond_the_limit_is_refused_at_once():
    async def run():
        worker = worker_of(waiting=2)
        taken = [worker.ask(lambda: iter([1])) for _ in range(3)]  # one runs, two wait
        with pytest.raises(RequestError, match="at most 2 requests may wait"):
            worker.ask(lambda: iter([1]))
        assert [await answer.all() for answer in taken] == [[1]] * 3
        worker.close()

    asyncio.run(run())


def test_an_error_of_the_model_is_a_500_and_the_next_request_is_answered(gpt, monkeypatch, capfd):
    client = gpt[1]
    model = model_of(client)

    def fails(asked):
        raise FloatingPointError("a model's scores must be finite")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(model, "answer", fails)
        found = client.post(GPT, ask())
    assert (found.status, found.message) == (500, "a model's scores must be finite")
    assert "FloatingPointError" in capfd.readouterr().err
    assert client.post(GPT, ask()).status == 200


# Text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [(), ("ï",), ("東京",), ("ve c", "zzz"), ("é, 東x",)])
def test_pieces_of_text_are_whole_characters_without_the_stop_string(stop):
    text = "naïve café, 東京!"
    row = TextStream(ByteTokenizer(), list(b"prompt "), stop)
    pieces = [row.add(token) for token in text.encode()] + [row.end()]
    ends = [text.index(each) for each in stop if each in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
    assert row.is_stopped == bool(ends)
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_text_come_out_as_replacement_characters():
    row = TextStream(ByteTokenizer(), [97], ())
    assert (
        "".join([row.add(token) for token in (0xE2, 0x82, 0x41, 0xE2)] + [row.end()])
        == "\ufffdA\ufffd"
    )


def test_a_character_that_begins_in_the_prompt_is_not_lost():
    prompt, rest = list("caf東".encode())[:-1], [0xB1, *b" x"]
    row = TextStream(ByteTokenizer(), prompt)
    assert "".join([row.add(token) for token in rest] + [row.end()]) == "東 x"


def test_pieces_of_random_bytes_add_up_to_their_text_up_to_a_stop_string():
    rng = np.random.default_rng(0)
    letters = ["a", "b", "é", "東", "😀", "\ufffd"]
    words = lambda most: "".join(rng.choice(letters, rng.integers(1, most)))
    for _ in range(500):
        noise = rng.integers(0, 256, rng.integers(0, 3)).astype(np.uint8).tobytes()
        data, stop = words(5).encode() + noise + words(5).encode(), [words(3), words(4)]
        row = TextStream(ByteTokenizer(), list(words(4).encode()), stop)
        got = "".join([row.add(token) for token in data] + [row.end()])
        text = data.decode(errors="replace")
        cuts = [text.index(each) for each in stop if each in text]
        assert got in [text[:cut] for cut in cuts] if cuts else got == text, (data, stop)


# The process ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loaded_ends_with_0(capsys, number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end, server.ending_on_signals():
        signal.raise_signal(number)
    assert end.value.code == 0
    assert f"{number.name}: stopping before the model is loaded" in capsys.readouterr().err
    assert signal.getsignal(number) is before


@pytest.mark.full
def test_sigterm_answers_those_who_asked_refuses_others_and_ends_with_0(tmp_path):
    folder = tmp_path / "gpt"
    serving.write_gpt_run(folder)
    words = [sys.executable, "-m", "jaxpar", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        client = serving.Client(int(process.stderr.readline().split(":")[-1].split("/")[0]))
        assert process.stderr.readline() == "ready\n"
        body = json.dumps(ask(max_tokens=56, stream=True, temperature=1)).encode()
        with ThreadPoolExecutor(8) as pool:
            running = []

            def six_are_accepted():  # for each that is answered meanwhile, another is sent
                num_running = sum(not each.done() for each in running)
                running.extend(pool.submit(client.post, GPT, body) for _ in range(6 - num_running))
                return "waiting_requests 5.0" in client.get("/metrics").text

            wait_until(six_are_accepted)
            process.send_signal(signal.SIGTERM)
            assert re.match(
                r"SIGTERM: answering [1-6] requests?, then stopping", process.stderr.readline()
            )
            late, ready, alive = (
                client.post(GPT, body),
                client.get("/readyz"),
                client.get("/healthz"),
            )
            found = [each.result() for each in running]
        assert (late.status, late.headers["Retry-After"], late.json["error"]["code"]) == (
            503,
            "2",
            "draining",
        )
        assert (ready.status, alive.status) == (503, 200)
        assert all(response.events[-1]["choices"][0]["finish_reason"] for response in found)
        assert process.wait(WAIT_SECONDS) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (
            lambda folder: None,
            [],
            "a folder to serve must be a run of house_prices.py, digits.py or gpt.py",
        ),
        (
            lambda folder: {"features": [], "target": "x"},
            [],
            "is served once it has ended; got no model.json",
        ),
        (
            lambda folder: {"hidden_layers": 4, "width": 8},
            [],
            "Train it with --checkpoint-every 100, say",
        ),
        (
            lambda folder: jaxpar.huggingface.write_description(folder / "model", serving.CONFIG),
            [],
            "--checkpoint-every 100, say, which also saves the last step, or use the folder of its --save-hf.",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text(
                '{"base_model_name_or_path": "llama"}'
            ),
            [],
            "which peft adds to those of 'llama'. Merge them: python -m jaxpar export RUN DIR",
        ),
        (
            lambda folder: (folder / "model.json").write_text("{}"),
            [],
            "model.json must be one that a run has written",
        ),
        (lambda folder: None, ["--port", "99999999"], "--port must be from 0 to 65535"),
        (lambda folder: None, ["--max-waiting", "-1"], "--max-waiting must be at least 0"),
        (
            lambda folder: None,
            ["--timeout-seconds", "nan"],
            "--timeout-seconds must be a finite number; got NaN",
        ),
        (lambda folder: None, ["--max-tokens", "0"], "--max-tokens must be at least 1; got 0"),
    ],
)
def test_what_cannot_be_served_ends_with_code_2_and_says_why(
    tmp_path, capsys, make, flags, message
):
    config = make(tmp_path)
    if isinstance(config, dict):
        (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        code = jaxpar_main(
            ["serve", str(tmp_path), *(["--port", "0"] if "--port" not in flags else []), *flags]
        )
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_name_of_a_model_on_the_hub_is_answered_with_the_command_that_downloads_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert jaxpar_main(["serve", "Qwen/Qwen2.5-0.5B", "--port", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "got Qwen/Qwen2.5-0.5B, which does not exist. Name another; or" in said
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B, and serve Qwen2.5-0.5B." in said


def test_a_server_opens_the_next_step_where_a_run_deletes_the_one_that_it_reads(
    tmp_path, monkeypatch, capfd
):
    (tmp_path / "config.json").write_text('{"hidden_layers": 1, "width": 4}')
    opened = []

    def read(folder, config, step):
        opened.append(step)
        if len(opened) == 1:
            raise DeletedError("it was deleted.")
        return "params"

    monkeypatch.setattr(open_run, "_digits", read)
    monkeypatch.setattr(open_run, "digits", lambda params, name: (params, name))
    assert open_run.open_model(tmp_path, open_run.ModelSettings(model_name="mine")) == (
        "params",
        "mine",
    )
    assert opened == [None, None]
    assert capfd.readouterr().err == "it was deleted. The newest step is read now.\n"


def test_a_run_is_served_with_its_own_copy_of_the_tokenizer(tmp_path):
    """Not with the folder that it was given, which may have been edited or be gone; only a run without a copy reads that."""
    config = dataclasses.replace(serving.CONFIG, vocab_size=512, tokens=None)
    serving.write_gpt_run(tmp_path / "run", config)
    named = write_tokenizer(tmp_path / "named")
    about = {"model": "tiny", "tokenizer": str(named)}
    (tmp_path / "run/config.json").write_text(json.dumps(about))

    def end_of_served():
        served = open_run.open_model(tmp_path / "run", open_run.ModelSettings())
        return served.endpoints[0].make_reply.__self__.model.tokenizer.end

    ends = [end_of_served()]
    write_tokenizer(tmp_path / "run/model", eos_token="<|begin|>")
    ends.append(end_of_served())
    shutil.rmtree(named)
    ends.append(end_of_served())
    assert ends == [2, 0, 0]


def test_what_is_not_modelled_is_refused_unless_it_is_ignored_and_dropout_is(tmp_path):
    folder = copy_with("llama", tmp_path, partial_rotary_factor=0.5, attention_dropout=0.1)
    opened = lambda *keys: open_run.open_model(
        folder, open_run.ModelSettings(ignore_config_keys=keys)
    )
    message = (
        r"got partial_rotary_factor=0\.5 in .*--ignore-config-keys (\S+ )?partial_rotary_factor:"
    )
    with pytest.raises(ValueError, match=message):
        opened()
    with pytest.raises(FileNotFoundError, match="is served with its tokenizer"):
        opened("partial_rotary_factor")
    jaxpar.huggingface.write_description(tmp_path / "run/model", serving.CONFIG)
    with pytest.raises(ValueError, match=r"got them for the run in .*run, which has its own"):
        open_run.open_model(tmp_path / "run", open_run.ModelSettings(ignore_config_keys=("a",)))


@pytest.mark.parametrize(
    ("file", "content", "settings", "message"),
    [
        (
            "model.json",
            {},
            {"step": 7},
            "step applies to other models; got the run of house_prices.py in",
        ),
        (
            "model.json",
            {},
            {"max_tokens": 5},
            "max_tokens applies to other models",
        ),
        (
            "config.json",
            {"model_type": "llama"},
            {"step": 7},
            "step .*; got the model in .*, which has no steps",
        ),
        (
            "config.json",
            {"hidden_layers": 8, "width": 4},
            {"dtype": "bfloat16", "tokenizer": Path("a")},
            "tokenizer, dtype .*; got the run of digits.py",
        ),
    ],
)
def test_settings_of_another_kind_of_model_are_refused(tmp_path, file, content, settings, message):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        open_run.open_model(tmp_path, open_run.ModelSettings(**settings))


def test_the_model_of_a_run_without_checkpoints_is_not_exported(tmp_path, capsys):
    jaxpar.huggingface.write_description(tmp_path / "model", serving.CONFIG)
    assert jaxpar_main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert (
        "Train it with --checkpoint-every 100, say, which also saves the last step, or use the folder of its --save-hf."
        in (capsys.readouterr().err)
    )


def test_a_port_that_is_taken_ends_with_code_2(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert jaxpar_main(["serve", str(tmp_path), "--port", str(port)]) == 2
    assert f"got 127.0.0.1 port {port}" in capsys.readouterr().err


def test_without_a_package_of_the_extra_it_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "jaxpar.serve.server")
    monkeypatch.delattr("jaxpar.serve.server")
    assert jaxpar_main(["serve", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        "serving needs starlette, uvicorn and prometheus-client; got import of uvicorn halted"
        in said
    )
    assert "Install it: pip install -e '.[serve]' in the clone of jaxpar." in said


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capsys):
    serving.write_checkpoint(tmp_path, mlp.param_table(64, 10, width=8, num_hidden=4))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_layers": 4, "width": 16}))
    assert jaxpar_main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "a checkpoint must have the shapes of its model; got " in capsys.readouterr().err
    for path in (tmp_path / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    assert jaxpar_main(["serve", str(tmp_path), "--port", "0"]) == 65
