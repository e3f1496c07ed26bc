"""The tokenizer of a model's folder: the library's own tokens, what is learned of them, chat templates, what is refused."""

import json
import shutil

import numpy as np
import pytest

from jaxpar.data.corpus import tokenise
from jaxpar.data.tool_arguments import read_arguments
from jaxpar.huggingface import chat_template, tokenizer
from jaxpar.huggingface.export import copy_files
from jaxpar.huggingface.tokenizer import read_tokenizer
from tests.support.texts import CHATML, TEXT, write_tokenizer

MARKED = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {% if message['role'] == 'assistant' %}"
    "{%- generation -%}{{ message['content'] }}{{ eos_token }}{% endgeneration -%}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
# As Qwen3's, which leaves out the thoughts of all answers but the last.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "small animal"},
    {"role": "user", "content": "what is a cat?"},
    {"role": "assistant", "content": "a small animal"},
    {"role": "user", "content": "東京?"},
    {"role": "assistant", "content": "naïve"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "model", bos=True)


def learned_text(found, tokens):
    """The text of each run of learned tokens of the first document."""
    ids, marks = found.documents.tokens, found.documents.learned
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(marks)) + 1)
    return [
        tokens._tokenizer.decode(ids[run].tolist(), skip_special_tokens=False)
        for run in runs
        if marks[run[0]]
    ]


def test_special_tokens_that_somebody_wrote_in_a_text_are_found(folder):
    own = read_tokenizer(folder)
    assert own.special_in("a <|im_end|> b <|begin|>") == {"<|im_end|>", "<|begin|>"}
    assert own.special_in(TEXT[0]) == set()


def test_tokens_are_those_of_the_library_and_decode_to_the_text(folder):
    import tokenizers

    own, want = (
        read_tokenizer(folder),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    assert own.vocab_size == want.get_vocab_size()
    assert own.end == want.token_to_id("<|im_end|>")
    for text in TEXT[:4]:
        for begin in (False, True):
            [(ids, ends)] = own.encode([text], begins=[begin])
            assert ids.tolist() == want.encode(text, add_special_tokens=begin).ids
            assert (ends[0] == -1) == begin, "the token for the beginning belongs to no character"
            assert own.decode(ids) == text
    assert own.decode(np.array([10**6, *ids])) == text, "padding rows of an embedding have no text"


def test_a_prompt_has_no_end_where_the_tokenizer_adds_one_to_a_text(folder, tmp_path):
    own = read_tokenizer(folder)
    ending = read_tokenizer(write_tokenizer(tmp_path / "model", bos=True, adds_end=True))
    for text in (TEXT[0], "a cat<|im_end|>"):
        [(ids, _)] = own.encode([text], begins=[True])
        [(whole, _)] = ending.encode([text], begins=[True])
        assert whole.tolist() == [*ids, own.end]
        for each in (own, ending):
            prompt, ends = each.encode_prompt(text)
            assert prompt.tolist() == ids.tolist()
            assert len(ends) == len(ids)


def test_texts_with_and_without_a_beginning_stay_in_their_order(folder):
    own = read_tokenizer(folder)
    many = own.encode(TEXT[:4], begins=[True, False, True, False])
    for text, begin, (ids, _) in zip(TEXT, [True, False, True, False], many, strict=False):
        np.testing.assert_array_equal(ids, own.encode([text], begins=[begin])[0][0])


def test_of_a_completion_its_tokens_and_the_end_are_learned(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": "what is a cat?", "completion": " a small animal"}) + "\n"
    )
    own = read_tokenizer(folder)
    found = tokenise([tmp_path / "a.jsonl"], own, tmp_path / "cache")
    assert learned_text(found, own) == [" a small animal<|im_end|>"]
    assert own._tokenizer.id_to_token(int(found.documents.tokens[0])) == "<|begin|>"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, ["a small animal<|im_end|>\n", "naïve<|im_end|>\n"]),
        (MARKED, [" a small animal<|im_end|>", "naïve<|im_end|>"]),
    ],
    ids=["by its beginnings", "by its marks"],
)
def test_of_a_conversation_what_the_assistant_says_is_learned(tmp_path, template, wanted):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    text, spans = own.render(CHAT)
    assert [text[start:end] for start, end in spans] == [each.lstrip(" ") for each in wanted]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    found = tokenise([tmp_path / "a.jsonl"], own, tmp_path / "cache")
    assert learned_text(found, own) == wanted
    [(ids, _)] = own.encode([text], begins=[False])
    np.testing.assert_array_equal(
        found.documents.tokens, ids, "the tokens of the whole text, as apply_chat_template gives"
    )


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("arguments | tojson", '{"city": "Zürich"}'),
        ("arguments['city']", "Zürich"),
        ("arguments.items() | list | length", "1"),
        ("arguments", '{"city":"Zürich"}'),
    ],
    ids=["as JSON", "an entry", "its entries", "as it is"],
)
def test_arguments_of_a_call_are_objects_or_their_json_as_the_template_takes_them(
    tmp_path, written, wanted
):
    calls = (
        "{% for call in message.tool_calls or [] %}{{ call.function." + written + " }}{% endfor %}"
    )
    template = CHATML.replace("message['content']", "message['content'] }}" + calls + "{{ ''")
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    as_text = '{"city":"Zürich"}'
    of_each = [as_text] + [json.loads(as_text)] * (written != "arguments")
    for number, arguments in enumerate(of_each):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*CHAT[:2], {"role": "assistant", "content": None, "tool_calls": [call]}]
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"messages": messages}) + "\n")
        found = tokenise([file], own, tmp_path / "cache")
        assert learned_text(found, own) == [wanted + "<|im_end|>\n"]


def test_arguments_that_are_no_object_stay_as_they_are():
    for text in ("Zürich", "[1]", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\ud800"):
        assert read_arguments(text) == text


def test_a_question_ends_with_the_beginning_of_an_answer(folder):
    text, spans = read_tokenizer(folder).render(CHAT[:2], ask=True)
    assert text.endswith("cat?<|im_end|>\n<|im_start|>assistant\n")
    assert spans == ()


def test_a_template_uses_the_fields_of_messages_that_it_names(tmp_path):
    calls = (
        CHATML
        + "{% if messages[0].tool_calls %}{{ messages[0]['tool_calls'] | tojson }}{% endif %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "a", template=calls))
    assert [tokenizer.uses(name) for name in ("tool_calls", "weight", "calls")] == [
        True,
        False,
        False,
    ]
    assert not read_tokenizer(write_tokenizer(tmp_path / "b", template=None)).uses("tool_calls")


def test_a_template_writes_the_tools_that_it_is_given(tmp_path):
    writes = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", template=writes))
    tools = [{"type": "function", "function": {"name": "add"}}]
    text, spans = tokenizer.render(CHAT[:3], tools=tools)
    plain, of_plain = tokenizer.render(CHAT[:3])
    begins = json.dumps(tools)
    assert text == begins + plain
    assert spans == tuple((a + len(begins), b + len(begins)) for a, b in of_plain)


@pytest.mark.parametrize("form", ["listed", "in files", "beside the settings", "beside a list"])
def test_conversations_with_tools_are_written_by_the_template_for_them(tmp_path, form):
    for_tools = "{{ tools | tojson }}" + CHATML
    listed = [{"name": "tool_use", "template": for_tools}, {"name": "default", "template": CHATML}]
    if form == "beside a list":  # whose template of this name the file replaces
        listed[0]["template"] = "no"
    is_listed = form in ("listed", "beside a list")
    folder = write_tokenizer(tmp_path / "model", template=listed if is_listed else CHATML)
    before = read_tokenizer(write_tokenizer(tmp_path / "other", template=CHATML)).fingerprint()
    if form == "in files":
        (folder / "chat_template.jinja").write_text(CHATML)
    if form != "listed":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
        copy_files(folder, tmp_path / "other")
        folder = tmp_path / "other"
    own = read_tokenizer(folder)
    tools = [{"name": "add"}]
    plain, _ = own.render(CHAT[:3])
    assert own.render(CHAT[:3], tools=tools)[0] == json.dumps(tools) + plain
    assert own.render(CHAT[:3], tools=[])[0] == plain
    assert own.uses("tools", has_tools=True)
    assert not own.uses("tools"), "as the other template writes none"
    assert own.fingerprint() != before


def test_a_template_for_tools_alone_writes_no_other_conversations(tmp_path):
    listed = [{"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML}, {"name": ["x"]}]
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=listed))
    assert own.render(CHAT[:3], tools=[{"name": "add"}])[0].startswith('[{"name": "add"}]')
    assert not own.has_chat_template, "rows of Alpaca, which have no tools, are prompts then"
    with pytest.raises(ValueError, match=r"got tool_use alone, which is for tools, in .*Add chat_"):
        own.render(CHAT[:3])


def test_a_template_that_forgets_is_refused_for_more_than_one_answer(tmp_path):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=FORGETFUL))
    text, [(start, end)] = own.render(CHAT[:3])
    assert text[start:end] == "<think></think>a small animal<|im_end|>\n"
    with pytest.raises(
        ValueError,
        match=r"got .*<think></think>a small a' for the first 3 of 5 messages and .*\\na small animal.* for all of them "
        r"from the chat template .* End each conversation with its first answer, mark what the assistant says by \{% gen",
    ):
        own.render(CHAT)


THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
# As those of the distillations of DeepSeek-R1, which leave out the thoughts of answers.
THOUGHTLESS = THINKING.replace("message['content']", "message['content'].rpartition('</think>')[2]")


def test_an_answer_that_does_not_begin_as_the_template_asks_is_refused_with_what_mends_it(tmp_path):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=THINKING))
    question, answer = CHAT[1], "<thanks> a small animal"  # which begins as the prompt does
    with pytest.raises(ValueError, match="an answer must begin with what") as raised:
        own.render([question, {"role": "assistant", "content": answer}])
    said = str(raised.value)
    assert r"start|>assistant\n<think>\n' to ask and ..." in said
    assert r"assistant\n<thanks> a small " in said
    assert "for message 2 from the chat" in said
    assert r"Begin each answer with '<think>\n', mark what the assistant says by {% gen" in said
    text, [(start, end)] = own.render(
        [question, {"role": "assistant", "content": f"<think>\n{answer}"}]
    )
    assert text[start:end] == f"{answer}<|im_end|>\n"
    own = read_tokenizer(write_tokenizer(tmp_path / "other", template=THOUGHTLESS))
    with pytest.raises(ValueError, match=r"other\. Mark what the assistant says by \{% gen"):
        own.render([question, {"role": "assistant", "content": "<think>\nso</think>yes"}])


def test_a_template_that_ends_a_conversation_is_refused_for_more_than_one_answer(tmp_path):
    ends = CHATML + "{% if not add_generation_prompt %}<|begin|>{% endif %}"
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=ends))
    text, [(start, end)] = own.render(CHAT[:3])
    assert text[start:end] == "a small animal<|im_end|>\n<|begin|>"
    with pytest.raises(
        ValueError,
        match=r"<\|im_end\|>\\n<\|begin\|>' for the first 3 of 5 messages and \.\.\..*start",
    ):
        own.render(CHAT)


@pytest.mark.parametrize("form", ["jinja file", "named", "none"])
def test_a_chat_template_is_found_where_it_may_be(tmp_path, form):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    folder = write_tokenizer(tmp_path / "model", template=named if form == "named" else None)
    if form == "jinja file":
        (folder / "chat_template.jinja").write_text(CHATML, newline="")
    own = read_tokenizer(folder)
    assert own.has_chat_template == (form != "none")
    if form == "none":
        with pytest.raises(
            ValueError,
            match=r"messages need a chat template; got none in .*Add chat_template.jinja, or",
        ):
            own.render(CHAT)
    else:
        assert own.render(CHAT[:2])[0].startswith("<|im_start|>system\nsmall animal<|im_end|>\n")


def test_the_end_of_a_text_comes_from_config_json_if_the_settings_have_none(tmp_path):
    folder = write_tokenizer(tmp_path / "model", eos_token=None)
    assert read_tokenizer(folder).end is None
    (folder / "config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read_tokenizer(folder).end == 2


def test_the_fingerprint_follows_what_tokens_depend_on(folder, tmp_path):
    prints = {read_tokenizer(folder).fingerprint()}
    shutil.copytree(folder, tmp_path / "copy")
    prints.add(read_tokenizer(tmp_path / "copy").fingerprint())
    assert len(prints) == 1, "it does not depend on the folder's name"
    (tmp_path / "copy" / "chat_template.jinja").write_text(MARKED)
    prints.add(read_tokenizer(tmp_path / "copy").fingerprint())
    prints.add(read_tokenizer(write_tokenizer(tmp_path / "other", bos=False)).fingerprint())
    assert len(prints) == 3


SPECIAL = (
    "{{ bos_token }}{{ image_token }}{{ other }}{{ additional_special_tokens[1] }}{{ unk_token }}|"
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("settings", "of_map", "wanted"),
    [
        ({}, {}, "<|begin|>|"),
        ({"bos_token": None}, {"bos_token": "<|im_end|>"}, "<|im_end|>|"),
        ({}, {"bos_token": {"content": "<|im_end|>"}}, "<|im_end|>|"),
        ({"bos_token": None, "added_tokens_decoder": {}}, {"bos_token": "<|im_end|>"}, "|"),
        ({"image_token": "<|im_end|>"}, {}, "<|begin|><|im_end|>|"),
        ({"extra_special_tokens": {"other": "<|im_end|>"}}, {}, "<|begin|><|im_end|>|"),
        ({"model_specific_special_tokens": {"image_token": "b"}}, {}, "<|begin|>b|"),
        ({"additional_special_tokens": ["a", {"content": "b"}]}, {}, "<|begin|>b|"),
        ({"extra_special_tokens": ["a", "b"]}, {}, "<|begin|>b|"),
        ({"extra_special_tokens": {"messages": "b"}}, {}, "<|begin|>|"),
        ({}, {"chat_template": "another", "added_tokens_decoder": {"999": "c"}}, "<|begin|>|"),
    ],
)
def test_a_template_has_the_special_tokens_that_transformers_gives_it(
    tmp_path, settings, of_map, wanted
):
    folder = write_tokenizer(tmp_path / "model", template=SPECIAL, **settings)
    (folder / "special_tokens_map.json").write_text(json.dumps(of_map))
    with_error = SPECIAL.replace(
        "additional_special_tokens[1]", "(additional_special_tokens or ['', ''])[1]"
    )
    (folder / "chat_template.jinja").write_text(with_error)
    own = read_tokenizer(folder)
    text, _ = own.render(CHAT, ask=True)
    assert text.startswith(wanted + CHAT[0]["content"])


def test_the_end_of_a_text_is_the_one_of_the_map_where_transformers_reads_it(tmp_path):
    folder = write_tokenizer(tmp_path / "model", eos_token=None)
    before = read_tokenizer(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    after = read_tokenizer(folder)
    assert (before.end, after.end) == (None, 2)
    assert before.fingerprint() != after.fingerprint()


def test_settings_for_inference_cut_no_example(folder, tmp_path):
    from tokenizers import Tokenizer

    shutil.copytree(folder, tmp_path / "copy")
    path = str(tmp_path / "copy" / "tokenizer.json")
    cut = Tokenizer.from_file(path)
    cut.enable_truncation(4)
    cut.enable_padding(length=50)
    cut.save(path)
    [(ids, _)] = read_tokenizer(tmp_path / "copy").encode([TEXT[0]], begins=[True])
    assert ids.tolist() == read_tokenizer(folder).encode([TEXT[0]], begins=[True])[0][0].tolist()


# Malicious folders.


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_runs_in_a_sandbox(tmp_path, template):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    with pytest.raises(
        ValueError,
        match=r"must be one that the model's chat template takes; got .* Correct the messages, or the temp",
    ):
        own.render(CHAT)


def test_a_template_may_refuse_messages_and_knows_no_date(tmp_path):
    refusing = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    )
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=refusing))
    with pytest.raises(ValueError, match="got begin with the user in the template of"):
        own.render(CHAT)
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}no date{% endif %}"
    assert (
        read_tokenizer(write_tokenizer(tmp_path / "dated", template=dated)).render(CHAT, ask=True)[
            0
        ]
        == "no date"
    )
    today = read_tokenizer(
        write_tokenizer(tmp_path / "today", template="{{ strftime_now('%d') }}" + CHATML)
    )
    with pytest.raises(
        ValueError,
        match=r"must give the same text on every day, .*; got strftime_now, which asks for today's date, in the template of "
        r".*today. Write a date into the template in its place",
    ):
        today.render(CHAT)


def test_an_empty_template_is_none(tmp_path):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=" \n"))
    assert not own.has_chat_template


def test_messages_with_the_marks_of_answers_are_refused(tmp_path):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=MARKED))
    marked = f"a{chat_template.END}b"
    call = {"function": {"name": "f", "arguments": {marked: 1}}}
    for name, answer, tools in (
        ("messages", {"content": marked}, None),
        ("messages", {"content": "a", "tool_calls": [call]}, None),
        ("tools", {"content": "a"}, [{"name": marked}]),
    ):
        rule = rf"{name} must have no noncharacters of Unicode; got U\+FDD0 or U\+FDD1\. Remove"
        with pytest.raises(ValueError, match=rule):
            own.render([*CHAT, {"role": "assistant", **answer}], tools=tools)


def test_the_escapes_of_the_marks_are_plain_text(tmp_path):
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=MARKED))
    asked = {"role": "user", "content": r"what is '\ufdd0' in Python?"}
    answer = {"role": "assistant", "content": r"'\ufdd1' comes after '\ufdd0'"}
    text, [(start, end)] = own.render([asked, answer])
    assert asked["content"] in text
    assert answer["content"] in text[start:end]


def with_dropout(folder):
    found = json.loads((folder / "tokenizer.json").read_text())
    return json.dumps(found | {"model": found["model"] | {"dropout": 0.5}})


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), r"a folder with a tokenizer.json; got none in .*save_pretrained"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), r"must be a tokenizer of the tokenizers library; got .*again"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "JSON of a model must be an object; got a list"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": "<s>"}'), r"must be a token of .*; got '<s>' in"),
        (lambda f: (f / "tokenizer.json").write_text(with_dropout(f)), "must give the same tokens .*; got a dropout of 0.5 in"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"9": {"content": "<new>"}}}'),
            r"added_tokens_decoder .* must be an added token of tokenizer.json .*; got '<new>' in .*save_pretrained"),
        (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), "must be a Jinja template; got"),
        (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), r"must be UTF-8; got .*jinja.*Download it again"),
        (lambda f: (f / "chat_template.jinja").write_text("x" * 2**21), "chat_template.jinja must have at most 1048576 bytes"),
        (lambda f: (f / "chat_template.jinja").symlink_to("/etc/hostname"), "must be in its folder; got .*, a link to"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_used_is_refused(folder, tmp_path, break_it, message):
    shutil.copytree(folder, tmp_path / "copy")
    break_it(tmp_path / "copy")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_tokenizer(tmp_path / "copy")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TOKENIZER_BYTES", 10)
    with pytest.raises(ValueError, match=r"tokenizer.json must have at most 10 bytes; got \d+ in"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("package", "message"), [("tokenizers", "tokenizers library"), ("jinja2", "Jinja")]
)
def test_a_missing_package_is_named_with_its_extra(folder, monkeypatch, package, message):
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"{message}.*got .*\. Install it: pip install -e '\.\[hf\]'"
    ):
        read_tokenizer(folder)


def test_calls_are_refused_where_the_template_of_their_conversation_does_not_write_them(tmp_path):
    """The one for tools does, and this conversation lists none."""
    either = "{{ message['tool_calls'] or message['content'] }}"
    for_tools = "{{ tools | tojson }}" + CHATML.replace("{{ message['content'] }}", either)
    listed = [{"name": "tool_use", "template": for_tools}, {"name": "default", "template": CHATML}]
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=listed))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        ValueError, match=r'needs a chat template that writes "tool_calls"; got one'
    ):
        tokenise([tmp_path / "a.jsonl"], own, tmp_path / "cache")
    (tmp_path / "b.jsonl").write_text(json.dumps(row | {"tools": [{"name": "f"}]}))
    assert tokenise([tmp_path / "b.jsonl"], own, tmp_path / "cache").ignored == ()


def test_a_conversation_that_begins_with_an_answer_is_told_so(tmp_path):
    first = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + CHATML
    own = read_tokenizer(write_tokenizer(tmp_path / "model", template=first))
    answer, question = {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}
    with pytest.raises(ValueError, match=r"begins with an answer, for the template of .*Put a mes"):
        own.render([answer, question, answer])
