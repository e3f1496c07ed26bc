"""Files tokenised once: what an example may be, what is learned of it, what is refused and where, and the cache's safety."""

import errno
import json
import os
import shutil
import stat
import threading
import zlib

import numpy as np
import pytest

from jaxpar.data import corpus, examples
from jaxpar.data.corpus import default_cache, load_corpus, tokenise
from jaxpar.data.examples import TEXT_BLOCK, place_text
from jaxpar.data.readers import find_files, parse_json, read_records, unread_fields
from jaxpar.data.text import ByteTokenizer
from jaxpar.data.unused_fields import TRIED, UnusedFields
from jaxpar.huggingface import read_tokenizer
from tests.support.texts import CHATML, WordTokenizer, documents_of, write_lines, write_tokenizer


def word(text):
    return 2 + zlib.crc32(text.encode()) % 60_000


# What an example is.


def test_texts_are_learned_whole_with_their_beginning_and_end(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"text": "one two", "id": 7}, "", {"text": "three"})
    found, parts = documents_of(file, tmp_path / "cache")
    assert parts == [([0, word("one"), word("two"), 1], None), ([0, word("three"), 1], None)]
    assert found.ignored == ("id",)
    assert [found.documents.place(i) for i in (0, 1)] == [f"{file}:1", f"{file}:3"]
    assert found.documents.tokens.dtype == np.uint32, (
        "a vocabulary of 70,000 needs more than 16 bits"
    )


def test_another_user_can_read_the_cache_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        documents_of(write_lines(tmp_path / "a.jsonl", {"text": "one two"}), tmp_path / "cache")
    finally:
        os.umask(before)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "pods of another user share the volume"


def test_of_a_completion_the_prompt_is_not_learned(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl", {"prompt": "one two ", "completion": "three four"}, {"text": "five"}
    )
    _, parts = documents_of(file, tmp_path / "cache")
    assert parts[0] == ([0, *map(word, ("one", "two", "three", "four")), 1], [0, 0, 0, 1, 1, 1])
    assert parts[1][1] == [1, 1, 1]


def test_a_token_across_the_end_of_a_prompt_is_told_with_the_first_place(tmp_path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model"))
    rows = [("what is a ", "cat"), ("what is a", " cat"), ("what is a c", "at"), ("", " cat")]
    rows += [("what is a cat\n", "a small animal"), ("naï", "ve"), ("a cat", "")]
    lines = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    chat = {"messages": [{"role": "user", "content": "a "}, {"role": "assistant", "content": "b"}]}
    file = write_lines(tmp_path / "a.jsonl", {"text": "a cat"}, chat, *lines)
    told = [
        line for line in tokenise([file], tokenizer, tmp_path / "cache").remarks if "rea" in line
    ]

    def tokens(text):
        [(ids, _)] = tokenizer.encode([text], begins=[False])
        return ids.tolist()

    alone = [(tokens(prompt), tokens(prompt + completion)) for prompt, completion in rows]
    count = sum(prompt != whole[: len(prompt)] for prompt, whole in alone)
    assert 2 <= count < len(rows), "the spaces at least, and not all"
    what = (
        "a token that reaches from the prompt into the completion, which the prompt alone does not"
    )
    assert told == [f"{count} of 9 examples have {what} have, the first in {file}:3"]


def test_a_space_between_words_that_the_tokenizer_leaves_out_joins_nothing(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "one two ", "completion": "three four"})
    found, _ = documents_of(file, tmp_path / "cache")
    assert not any("reaches" in line for line in found.remarks)


def test_of_a_conversation_the_answers_are_learned(tmp_path):
    messages = [
        {"role": r, "content": c}
        for r, c in (("user", "one"), ("assistant", "two three"), ("user", "four"))
    ]
    messages += [{"role": "assistant", "content": "five", "name": None}]
    found, parts = documents_of(
        write_lines(tmp_path / "a.jsonl", {"messages": messages}), tmp_path / "cache"
    )
    words = [
        "user:",
        "one",
        "END",
        "assistant:",
        "two",
        "three",
        "END",
        "user:",
        "four",
        "END",
        "assistant:",
        "five",
        "END",
    ]
    assert parts == [(list(map(word, words)), [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1])]
    assert found.is_chat


def test_bytes_of_completions_keep_the_characters_of_more_than_one_byte_whole(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"prompt": "né", "completion": "é!"})
    _, parts = documents_of(file, tmp_path / "cache", ByteTokenizer())
    assert parts == [([*"néé!".encode(), 0], [0, 0, 0, 1, 1, 1, 1])]


def test_a_text_file_is_one_document_however_long(tmp_path):
    lines = [f"line {i}\n" for i in range(TEXT_BLOCK // 4)]
    (tmp_path / "a.txt").write_text("".join(lines))
    found, [(tokens, _)] = documents_of(tmp_path / "a.txt", tmp_path / "cache", ByteTokenizer())
    assert bytes(tokens[:-1]).decode() == "".join(lines)
    assert tokens[-1] == 0
    assert found.documents.place(0) == str(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a line must be JSON in UTF-8; got JSONDecodeError: .* in .*a.jsonl:2. Correct or remove the line"),
        ('{"text": "a', r"got JSONDecodeError: Unterminated string starting at column 10 in .*a.jsonl:2"),
        ("[" * 100_000, r"a line must be JSON in UTF-8; got RecursionError"),
        ('["a"]', r'an example must be an object with fields; got \["a"\]. Correct it. It is in .*a.jsonl:2\.'),
        ("[", r"in .*a.jsonl:2. A .jsonl has an object a line; if the file is one list of objects, name it .json."),
        ('[{"text": "a"}]', r"A .jsonl has an object a line; if the file is one list .*a.jsonl:2"),
        ('{"txt": "a"}', r'must have "text", or "prompt" and "completion", or "messages", .*; got the fields txt. .*a.jsonl:2'),
        ('{"input_ids": [1, 2]}', r"got the fields input_ids. Put records of tokens into a folder of their own. It is in"),
        ('{"text": "a", "messages": []}', r'got "text" and "messages". Keep those of .* others. It is in .*a.jsonl:2'),
        ('{"instruction": "a", "context": "", "response": "b"}', r'Rename "context" to "input", "response" to "output"\. It'),
        ('{"dialog": [{"role": "user", "content": "a"}]}', r'got the fields dialog\. Rename "dialog" to "messages"\. It is'),
        ('{"turns": [{"from": "human", "value": "a"}]}', r'Rename "turns" to "conversations"\. It is in .*a.jsonl:2'),
        ('{"data": [{"text": "a"}]}', r'Write each object of "data" on a line of its own, in a .jsonl\. It is in .*a.jsonl:2'),
        ('{"text": 3}', r'"text" must be a string; got 3\. .*a.jsonl:2'),
        (r'{"text": "\ud800"}', r'"text" must be valid Unicode; got half of a surrogate pair. .*a.jsonl:2'),
        ('{"messages": "a"}', r'"messages" must be a list of objects with "role" and "content"; got another .*a.jsonl:2'),
        ('{"messages": [{"role": "assistant"}]}', r'must have "content", a string or a list .*; got none in .*a.jsonl:2'),
        ('{"messages": [{"role": "user", "content": "a"}]}', r'of the role "assistant", to learn from; got .user.\. .*l:2'),
        ('{"text": "forbidden"}', r"a word is forbidden. It is in .*a.jsonl:2\."),
    ],
)  # fmt: skip
def test_an_example_that_cannot_be_used_is_refused_with_its_file_and_line(tmp_path, line, message):
    file = write_lines(tmp_path / "a.jsonl", {"text": "fine"}, line)
    with pytest.raises(ValueError, match=message):
        tokenise([file], WordTokenizer(), tmp_path / "cache")
    assert not any((tmp_path / "cache").glob("[!.]*")), "nothing is kept of data that was refused"
    assert not any((tmp_path / "cache").glob("*.part"))


def test_data_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfa")
    with pytest.raises(
        ValueError, match=r"text must be UTF-8; got .* invalid start byte in .*a.txt"
    ):
        tokenise([tmp_path / "a.txt"], WordTokenizer(), tmp_path / "cache")
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    with pytest.raises(ValueError, match=r"text must have no zero bytes; got some in .*b.txt"):
        tokenise([tmp_path / "b.txt"], WordTokenizer(), tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r"data files must have an example to learn from; got none in .*c.jsonl"
    ):
        tokenise([write_lines(tmp_path / "c.jsonl", "")], WordTokenizer(), tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r"data files must come from plain files; got /dev/zero, which is none\."
    ):
        tokenise([*map(type(tmp_path), ["/dev/zero"])], WordTokenizer(), tmp_path / "cache")
    file = write_lines(tmp_path / "d.jsonl", {"messages": [{"role": "assistant", "content": "a"}]})
    with pytest.raises(
        ValueError,
        match=r"messages need a tokenizer with a chat template; got a model of bytes. .*d.jsonl:1",
    ):
        tokenise([file], ByteTokenizer(), tmp_path / "cache")


def test_examples_without_tokens_are_refused_with_their_template(tmp_path):
    template = "{% if false %}{{ messages }}{% endif %}"
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_lines(tmp_path / "d.jsonl", {"messages": turns})
    message = (
        r"data files must have tokens; got 1 examples and none in .*or correct the chat template"
    )
    with pytest.raises(ValueError, match=message):
        tokenise([file], tokenizer, tmp_path / "cache")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_empty_is_refused_by_its_name(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(
        ValueError, match=rf"must hold text or rows; got .*{name}, empty\. Name another file"
    ):
        tokenise([tmp_path / name], WordTokenizer(), tmp_path / "cache")


def test_places_from_files_are_printed_without_control_characters(tmp_path):
    assert place_text([tmp_path / "a\x1b.jsonl"], 0, 3) == f"{tmp_path}/a\\x1b.jsonl:3"
    assert place_text([tmp_path / "a.parquet"], 0, 3) == f"{tmp_path}/a.parquet, example 3"
    with pytest.raises(ValueError, match=r"in a\\x1b:1"):
        parse_json(b"?", "a\x1b:1")


# What is told of examples that can be used.


def said(question, **answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", **answer}]}


def test_what_is_learned_but_may_not_be_meant_is_told_also_from_the_cache(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "README.md").write_text("about these data\n")
    empty, typed = said("a", content=" "), said("b", content="c")
    typed["messages"][0]["role"] = "usr"
    asked = said("d", content="e")
    asked["messages"].append({"role": "user", "content": "g"})
    rows = [empty, typed, asked, {"prompt": "f", "completion": ""}, {"text": ""}]
    file = write_lines(folder / "a.jsonl", *rows)
    for _ in range(2):
        remarks = tokenise(find_files(folder), WordTokenizer(), tmp_path / "cache").remarks
        assert remarks == (
            f"2 of 6 examples have an empty answer, which the model learns to give, the first in {file}:1",
            f"1 of 6 examples have messages of the role 'usr', the first in {file}:2",
            f"1 of 6 examples have a last message that no answer follows, of which nothing is learned, the first in {file}:3",
            f"1 of 6 examples have an empty text, the first in {file}:5",
            f"1 of 2 files are learned as plain text beside examples: {folder}/README.md. Move them out of the folder if they "
            "are not to be learned.",
        )


def test_special_tokens_in_texts_are_told_and_kinds_for_which_there_is_no_room_are_counted(
    tmp_path,
):
    folder = tmp_path / "data"
    folder.mkdir()
    typed = said("see <|end|> here", content="a <|end|>")
    file = write_lines(folder / "a.jsonl", typed, {"prompt": "b <|end|>", "completion": " c"})
    text = write_lines(folder / "b.txt", " ".join(f"<|{number}|>" for number in range(9)))
    remarks = tokenise([file, text], WordTokenizer(), tmp_path / "cache").remarks
    what = "in their text, which is read as the special token, the first in"
    assert remarks[0] == f"2 of 3 examples have <|end|> {what} {file}:1"
    assert remarks[1:8] == tuple(
        f"1 of 3 examples have <|{number}|> {what} {text}" for number in range(7)
    )
    further = "more that may not be meant, of kinds that are not named here"
    assert remarks[8] == f"1 of 3 examples have {further}, the first in {text}"


@pytest.mark.parametrize(
    "system", ["be brief", "is 7"], ids=["of its own", "which an answer quotes"]
)
def test_messages_that_the_template_leaves_out_and_weights_without_effect_are_told(
    tmp_path, system
):
    template = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    roles = {"system": system, "user": " a\n", "assistant": "it is 7"}
    turns = [{"role": role, "content": text, "weight": 1} for role, text in roles.items()]
    file = write_lines(tmp_path / "a.jsonl", {"messages": turns}, said("c", content="d"))
    assert tokenise([file], tokenizer, tmp_path / "cache").remarks == (
        '1 of 2 examples have a "weight" of 1 for a message that is not the assistant\'s, which is not learned, the first in '
        f"{file}:1",
        "1 of 2 examples have a message of the role 'system' that the chat template leaves out or cuts, the first in "
        f"{file}:1",
    )
    called = said("a", content=None, tool_calls=[{"id": "b"}])
    with pytest.raises(
        ValueError, match=r'needs a chat template that writes "tool_calls"; got one without'
    ):
        tokenise([write_lines(tmp_path / "b.jsonl", called)], tokenizer, tmp_path / "cache")


def test_a_template_that_leaves_out_the_answers_is_named_where_nothing_is_left_to_learn(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    file = write_lines(tmp_path / "a.jsonl", *[said(f"a {i}", content="b c") for i in range(20)])
    message = (
        r"got none in .* documents of .* Leave out .*\. Also, 20 of 20 examples have a message of the role 'assistant' that "
        r"the chat template leaves out or cuts, the first in .*a.jsonl:1\.$"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus([file], tokenizer, tmp_path / "cache")


def test_names_that_are_given_twice_are_refused(tmp_path):
    twice = '{"prompt": "a", "completion": "b", "completion": "c"}'
    listed = {"prompt": ["a"], "completion": ["b"]}
    with pytest.raises(
        ValueError,
        match=r'must be two strings, or two lists of messages; got \["a"\] for "prompt".',
    ):
        documents_of(write_lines(tmp_path / "d.jsonl", listed), tmp_path / "cache")
    for name, text in {"a.jsonl": twice, "b.json": f"[{twice}]"}.items():
        with pytest.raises(
            ValueError, match=rf"the key 'completion' twice in an object in .*{name}"
        ):
            list(read_records(write_lines(tmp_path / name, text)))
    with pytest.raises(
        ValueError, match=r"got the name 'text' twice in .*c.csv, near line 1. Correct the file"
    ):
        list(read_records(write_lines(tmp_path / "c.csv", "text,text", "a,b")))


def test_tables_without_examples_that_are_learned_as_text_are_told(tmp_path):
    (tmp_path / "a.json").write_text('{"data": [{"text": "a"}]}')
    (tmp_path / "b.txt").write_text("b")
    assert tokenise(find_files(tmp_path), WordTokenizer(), tmp_path.parent / "cache").remarks == (
        f"1 file is learned as plain text, since its first value is no example: {tmp_path}/a.json",
    )


def test_links_to_folders_and_to_nothing_are_refused_and_hidden_files_left_out(tmp_path):
    for name in ("data", "other"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "a.jsonl", {"text": "a"})
    write_lines(tmp_path / "data" / ".b.jsonl", {"text": "b"})
    assert find_files(tmp_path / "data") == [tmp_path / "data" / "a.jsonl"]
    for target, kind in (("other", "a folder"), ("none", "nothing")):
        (tmp_path / "data" / target).symlink_to(tmp_path / target)
        with pytest.raises(
            ValueError, match=rf"hold its files itself; got .*data/{target}, a link to {kind}. Copy"
        ):
            find_files(tmp_path / "data")
        (tmp_path / "data" / target).unlink()


OF_TOOLS = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% if message.role == 'tool' %}{{ message.name }}{% endif %}",
)


def test_fields_that_a_template_names_and_does_not_write_are_told_by_the_roles_that_have_them(
    tmp_path,
):
    folder = write_tokenizer(tmp_path / "model", template=OF_TOOLS)
    of_user = [{"role": "user", "name": "bob", "content": f"{i}?"} for i in range(3)]
    answer = {"role": "assistant", "content": "a cat"}
    of_tool = {"role": "tool", "name": "look", "content": "b"}
    lines = [{"messages": [each, answer]} for each in of_user]
    file = write_lines(tmp_path / "a.jsonl", *lines)
    found = tokenise([file], read_tokenizer(folder), tmp_path / "cache")
    assert found.ignored == ("name of messages of the role user",)
    file = write_lines(tmp_path / "b.jsonl", *lines, {"messages": [of_user[0], of_tool, answer]})
    found = tokenise([file], read_tokenizer(folder), tmp_path / "cache")
    assert found.ignored == ("name of messages of the role user",), "that of the tool is written"
    writes = CHATML.replace(
        "{{ message['content'] }}", "{{ message.name }}{{ message['content'] }}"
    )
    folder = write_tokenizer(tmp_path / "other", template=writes)
    assert tokenise([file], read_tokenizer(folder), tmp_path / "cache").ignored == ()


def test_a_field_that_no_conversation_needs_is_tried_in_the_first_of_them_alone():
    rendered = []
    fields = UnusedFields(lambda messages, tools: (rendered.append(messages) or "same", ()))
    for _ in range(TRIED + 5):
        fields.look_at([{"role": "user", "name": "a", "content": "b"}], {"name"}, "same", None)
    assert len(rendered) == TRIED
    assert fields.names() == {"name of messages of the role user"}


def test_fields_of_messages_and_columns_that_are_not_used_are_told(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    example = said("a", content="b", reasoning_content="c", tool_calls=[{"id": "d"}])
    file = write_lines(tmp_path / "a.jsonl", example, said("e", content="f"))
    found = tokenise([file], WordTokenizer(), tmp_path / "cache")
    assert found.ignored == ("reasoning_content of messages",), "the template has the other one"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "id": [1, 2]}), tmp_path / "a.parquet")
    assert tokenise([tmp_path / "a.parquet"], WordTokenizer(), tmp_path / "cache").ignored == (
        "id",
    )
    assert unread_fields(tmp_path / "a.parquet", ["id"]) == {"text"}


def test_a_null_in_a_column_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"prompt": ["a", "b"], "completion": ["c", None]}), tmp_path / "a.parquet"
    )
    with pytest.raises(
        ValueError, match=r'"completion" must be a string; got null. .*a.parquet, example 2'
    ):
        documents_of(tmp_path / "a.parquet", tmp_path / "cache")
    parquet.write_table(
        pyarrow.table({"text": ["a", None], "prompt": [None, "b"], "completion": [None, "c"]}),
        tmp_path / "b.parquet",
    )
    assert len(documents_of(tmp_path / "b.parquet", tmp_path / "cache")[1]) == 2, (
        "each row has a form of its own"
    )


def test_the_only_example_is_cut_and_that_is_told(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl", {"prompt": "a b c ", "completion": " ".join("defghijklmnopqrst")}
    )
    told = f"the only example in {file} is cut in two: its last 2 tokens are held out"
    assert load_corpus([file], WordTokenizer(), tmp_path / "cache").remarks == (told,)


def test_an_answer_of_weight_0_is_not_learned_and_calls_of_tools_need_no_content(tmp_path):
    turns = (
        said("a", content="b", weight=0)["messages"] + said("c", content="d", weight=1)["messages"]
    )
    file = write_lines(tmp_path / "a.jsonl", {"messages": turns})
    _, [(ids, marks)] = documents_of(file, tmp_path / "cache")
    assert [token for token, is_learned in zip(ids, marks, strict=True) if is_learned] == [
        word("d"),
        word("END"),
    ]
    sharegpt = [
        {"from": "human", "value": "a", "weight": 0},
        {"from": "gpt", "value": "b", "weight": 0},
    ]
    file = write_lines(tmp_path / "b.jsonl", {"conversations": sharegpt})
    with pytest.raises(
        ValueError,
        match=r'must have an answer of "weight" 1, to learn from; got 0 for all. .*b.jsonl:1',
    ):
        documents_of(file, tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r'"weight" of a message must be 0, .*; got 0.5. Correct it. .*c.jsonl:1'
    ):
        documents_of(
            write_lines(tmp_path / "c.jsonl", said("a", content="b", weight=0.5)),
            tmp_path / "cache",
        )
    file = write_lines(tmp_path / "d.jsonl", said("a", content=None, tool_calls=[{"id": "b"}]))
    assert tokenise([file], WordTokenizer(), tmp_path / "cache").remarks == ()
    calls = [
        [{"function": {"name": "f", "arguments": arguments}}]
        for arguments in ('{"a": 1}', {"a": 1}, '{"a": ', "[1]")
    ]
    rows = [said(f"a{i}", content="b", tool_calls=each) for i, each in enumerate(calls)]
    file = write_lines(tmp_path / "e.jsonl", *rows)
    [told] = tokenise([file], WordTokenizer(), tmp_path / "cache").remarks
    assert told.startswith("2 of 4 examples have arguments of a call of a tool that are not the JS")
    assert told.endswith(f"{file}:3")


def test_tools_beside_messages_are_given_to_a_template_that_writes_them(tmp_path):
    tools = [{"name": "add"}, {"name": "divide"}]
    rows = [
        said("a", content="b") | {"tools": each} for each in (tools, json.dumps(tools), [], None)
    ]
    rows.append({"prompt": said("a", content="b")["messages"][:1]})
    rows[-1] |= {"completion": said("a", content="b")["messages"][1:], "tools": tools}
    found = tokenise(
        [write_lines(tmp_path / "a.jsonl", *rows)], WordTokenizer(), tmp_path / "cache"
    )
    documents = [list(found.documents.tokens_of(i)[:2]) for i in range(len(found.documents))]
    with_tools = [word("add"), word("divide")]
    assert [each == with_tools for each in documents] == [True, True, False, False, True]
    assert found.ignored == ()
    for wrong in ("add", [1], {"name": "add"}):
        file = write_lines(tmp_path / "b.jsonl", said("a", content="b") | {"tools": wrong})
        with pytest.raises(ValueError, match=r'"tools" must be a list of objects, or a string'):
            documents_of(file, tmp_path / "cache")
    file = write_lines(tmp_path / "c.jsonl", {"prompt": "a ", "completion": "b", "tools": tools})
    assert tokenise([file], WordTokenizer(), tmp_path / "cache").ignored == ("tools",)


# The split.


def test_equal_documents_are_on_one_side_and_a_tenth_is_held_out(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", *({"text": f"number {i % 50}"} for i in range(200)))
    corpus = load_corpus([file], WordTokenizer(), tmp_path / "cache")
    train, test = (
        {tuple(d.tokens_of(i)) for i in range(len(d))} for d in (corpus.train, corpus.test)
    )
    assert train.isdisjoint(test)
    assert len(train) + len(test) == 50
    assert len(corpus.test) == 20
    again = load_corpus([file], WordTokenizer(), tmp_path / "cache")
    np.testing.assert_array_equal(again.test.starts, corpus.test.starts)


@pytest.mark.parametrize("repeated", ["dup 0", "dup 1", "dup 2", "dup 3"])
def test_a_document_that_is_repeated_often_is_not_most_of_what_is_held_out(tmp_path, repeated):
    texts = [*({"text": f"number {i}"} for i in range(20)), *[{"text": repeated}] * 100]
    corpus = load_corpus(
        [write_lines(tmp_path / "a.jsonl", *texts)], WordTokenizer(), tmp_path / "cache"
    )
    assert (len(corpus.train), len(corpus.test)) == (108, 12)
    assert f"99 of 120 documents in {tmp_path}/a.jsonl equal an earlier one" in corpus.remarks
    texts = [{"text": "a"}] * 2 + [{"text": "b"}] * 3
    corpus = load_corpus(
        [write_lines(tmp_path / "b.jsonl", *texts)], WordTokenizer(), tmp_path / "cache"
    )
    assert (len(corpus.train), len(corpus.test)) == (3, 2), "the least repeated ones"


def test_files_named_for_it_are_held_out(tmp_path):
    for name in ("train", "val"):
        write_lines(tmp_path / f"{name}.jsonl", {"text": name}, {"text": f"{name} {name}"})
    corpus = load_corpus(find_files(tmp_path), WordTokenizer(), tmp_path.parent / "cache")
    assert {tuple(corpus.test.tokens_of(i)[1:2]) for i in (0, 1)} == {(word("val"),)}
    assert len(corpus.train) == 2


def test_of_a_single_document_the_end_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    corpus = load_corpus([tmp_path / "a.txt"], ByteTokenizer(), tmp_path / "cache")
    assert (corpus.train.num_tokens, corpus.test.num_tokens) == (91, 10)
    (tmp_path / "b.txt").write_text("abc")
    with pytest.raises(
        ValueError, match=r"a single document is split into two by its length, .*; got 4 tokens"
    ):
        load_corpus([tmp_path / "b.txt"], ByteTokenizer(), tmp_path / "cache")
    equal = write_lines(tmp_path / "c.jsonl", {"text": "a b"}, {"text": "a b"})
    with pytest.raises(
        ValueError,
        match="split into those to learn from and held-out ones, by their text; got 2 equal ones",
    ):
        load_corpus([equal], WordTokenizer(), tmp_path / "cache")


def test_a_share_without_a_token_to_learn_is_named_with_its_file(tmp_path):
    full, empty, cache = {"text": "a b"}, {"text": ""}, tmp_path.parent / "cache"
    for name, share in (("val", "held out"), ("train", "to learn from")):
        for each in ("train", "val"):
            write_lines(tmp_path / f"{each}.jsonl", *[empty if each == name else full] * 2)
        message = (
            rf"the documents {share} must have a token to learn .*; got none in 2 of the 4 documents of .*, the first at "
            rf".*{name}.jsonl:1\. Leave out documents without one, or give more"
        )
        with pytest.raises(ValueError, match=message):
            load_corpus(find_files(tmp_path), ByteTokenizer(), cache)
    write_lines(tmp_path / "train.jsonl", full)
    assert load_corpus(find_files(tmp_path), ByteTokenizer(), cache).train.num_targets == 3


# The cache.


@pytest.fixture
def cached(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl", {"prompt": "one ", "completion": "two"}, {"text": "three"}
    )
    found = tokenise([file], WordTokenizer(), tmp_path / "cache")
    [folder] = (tmp_path / "cache").glob("[!.]*")
    return file, found, folder


@pytest.mark.parametrize("there", ["file", "/proc/none"])
def test_a_cache_that_cannot_be_written_is_refused_with_its_flag(tmp_path, there):
    file = write_lines(tmp_path / "a.jsonl", {"text": "three"})
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError,
        match=r"cache.* must be a folder that can be written to; got .*: .*\. Name one, such",
    ):
        tokenise([file], WordTokenizer(), tmp_path / there)


def test_files_are_tokenised_once(cached, tmp_path, monkeypatch):
    file, found, _ = cached
    monkeypatch.setattr(WordTokenizer, "encode", None)
    (tmp_path / "sub").mkdir()
    shutil.copy(file, tmp_path / "sub" / "b.jsonl")
    again = tokenise([tmp_path / "sub" / "b.jsonl"], WordTokenizer(), tmp_path / "cache")
    np.testing.assert_array_equal(again.documents.tokens, found.documents.tokens)
    np.testing.assert_array_equal(again.documents.learned, found.documents.learned)
    assert again.digest == found.digest
    assert again.documents.place(1).endswith("b.jsonl:2")


@pytest.mark.parametrize("change", ["data", "tokenizer", "files"])
def test_other_data_or_another_tokenizer_have_other_tokens(cached, monkeypatch, tmp_path, change):
    file, found, _ = cached
    files = [file, file] if change == "files" else [file]
    if change == "data":
        file.write_text(file.read_text().replace("two", "tvo"))
    if change == "tokenizer":
        monkeypatch.setattr(WordTokenizer, "version", "1")
    assert tokenise(files, WordTokenizer(), tmp_path / "cache").digest != found.digest


@pytest.mark.parametrize("name", ["tokens.bin", "learned.bin", "documents.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["a bit", "the end", "the file"])
def test_a_damaged_cache_is_refused_and_can_be_made_again(cached, tmp_path, name, damage):
    file, found, folder = cached
    tokens = np.array(found.documents.tokens)  # a copy of the file that is about to be damaged
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 4
    path.write_bytes(content[:-1] if damage == "the end" else content)
    if damage == "the file":
        path.unlink()
    if name == "manifest.json" and damage != "the file":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ValueError,
        match=r"a cache of tokens must be whole; got .* Remove that folder: it is made again",
    ):
        tokenise([file], WordTokenizer(), tmp_path / "cache")
    shutil.rmtree(folder)
    again = tokenise([file], WordTokenizer(), tmp_path / "cache")
    np.testing.assert_array_equal(again.documents.tokens, tokens)


def test_what_a_killed_process_left_is_removed(cached, tmp_path):
    file, _, folder = cached
    shutil.rmtree(folder)
    left = folder.with_name(f".{folder.name}.1234.part")
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    tokenise([file], WordTokenizer(), tmp_path / "cache")
    assert not left.exists()
    assert folder.exists()


@pytest.mark.parametrize("locks", [True, False])
def test_processes_at_once_get_the_same_whole_cache(tmp_path, monkeypatch, locks):
    file = write_lines(tmp_path / "a.jsonl", *({"text": f"number {i}"} for i in range(3000)))
    made = []
    make = corpus._make
    monkeypatch.setattr(corpus, "_make", lambda *args: (made.append(1), make(*args)))
    if not locks:
        import fcntl

        def refuse(*_):
            raise OSError("no locks here")

        monkeypatch.setattr(fcntl, "flock", refuse)
    found = []
    run = lambda: found.append(
        tokenise([file], WordTokenizer(), tmp_path / "cache").documents.tokens.tobytes()
    )
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(made) == 1 if locks else len(made) >= 1
    assert not any((tmp_path / "cache").glob("*.part"))


def test_caches_are_made_again_where_examples_are_looked_through_for_more(tmp_path, monkeypatch):
    remarks = {
        name for name in vars(examples) if name.isupper() and isinstance(vars(examples)[name], str)
    }
    assert (corpus.LOOKED_FOR, remarks) == (
        8,
        {
            *(
                "EMPTY",
                "EMPTY_TEXT",
                "UNREADABLE",
                "NOT_AN_ANSWER",
                "UNANSWERED",
                "JOINED",
                "UNKNOWN",
                "FURTHER",
            )
        },
    ), "another remark takes another number, as older caches never tell it"
    call = {"function": {"name": "f", "arguments": "{"}}
    file = write_lines(tmp_path / "a.jsonl", said("a", content="b", tool_calls=[call]))
    monkeypatch.setattr(examples, "_odd", lambda *args, **given: ())  # as an earlier version
    monkeypatch.setattr(corpus, "LOOKED_FOR", 7)
    read = lambda: tokenise([file], WordTokenizer(), tmp_path / "cache").remarks
    assert read() == ()
    monkeypatch.undo()
    assert len(read()) == 1


@pytest.mark.parametrize("column", ["tools", "tool_calls", "other"])
def test_a_table_that_was_read_otherwise_has_another_digest(tmp_path, monkeypatch, column):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    [row] = [said("a", content="b") | {column: [{"name": "f"}]}]
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    digest = lambda: tokenise([tmp_path / "a.parquet"], WordTokenizer(), tmp_path / "cache").digest
    now = digest()
    monkeypatch.setattr(corpus, "_read_otherwise", lambda *args: "")
    assert (digest() == now) == (column == "other")


def test_the_cache_is_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "jaxpar" / "tokens"


def test_a_cache_without_room_is_named(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(corpus, "_write", write)
    file = write_lines(tmp_path / "a.jsonl", {"text": "some words"})
    with pytest.raises(OSError, match=r"No space left on device: '.*cache'"):
        tokenise([file], WordTokenizer(), tmp_path / "cache")
