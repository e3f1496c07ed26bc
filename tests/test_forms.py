"""The forms in which files have examples: each is learned as the same rows in .jsonl are, and what is of no form is refused."""

import csv
import json
import re

import numpy as np
import pytest

from jaxpar.data import json_text
from jaxpar.data.examples import Examples, check_examples, check_messages
from jaxpar.data.forms import as_learned
from jaxpar.data.readers import is_records, read_records
from jaxpar.data.text import ByteTokenizer, load_text
from jaxpar.huggingface import read_tokenizer
from tests.support.texts import CHATML, WordTokenizer, documents_of, write_lines, write_tokenizer

ALPACA = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Say é, \"yes\"\nor no.", "input": "", "output": "yes"},
]  # fmt: skip
SAID = [
    [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}],
    [{"role": "user", "content": 'Say é, "yes"\nor no.'}, {"role": "assistant", "content": "yes"}],
]
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": who, "value": turn["content"]}
            for who, turn in zip(("human", "gpt"), chat, strict=True)
        ],
    }
    for chat in SAID
]
PAIRS = [{"prompt": f"{' '.join(map(str, range(i)))} ", "completion": str(i)} for i in range(3)]


def as_csv(rows, delimiter=","):
    class Lines(list):
        write = list.append

    lines = Lines()
    writer = csv.DictWriter(lines, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return "".join(lines)


def read_as_named(file, cache):
    """As recipes read a file that --data names itself."""
    check_examples(file)
    documents_of(file, cache)


def written(tmp_path, name, text, tokenizer=None):
    """The documents of a file with this text."""
    (tmp_path / name).write_text(text)
    found, parts = documents_of(tmp_path / name, tmp_path / "cache", tokenizer)
    return [(list(map(int, ids)), marks) for ids, marks in parts], found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ALPACA)),
        ("a.json", json.dumps(SHAREGPT, indent=2)),
        ("a.json", json.dumps([{"messages": chat} for chat in SAID])),
        ("a.json", "".join(json.dumps(row) + "\n" for row in ALPACA)),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in ALPACA)),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in SHAREGPT)),
        ("a.jsonl", "".join(json.dumps({"conversations": chat}) + "\n" for chat in SAID)),
        ("a.csv", "\ufeff" + as_csv(ALPACA)),
        ("a.tsv", as_csv(ALPACA, "\t")),
    ],
)
def test_conversations_are_learned_alike_in_every_form(tmp_path, name, text):
    want, _ = written(
        tmp_path, "want.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in SAID)
    )
    got, found = written(tmp_path, name, text)
    assert got == want
    assert found.is_chat
    assert set(found.ignored) <= {"id"}


WRITES_TOOLS = "{{ tools | tojson if tools else '' }}"
WRITES_CALLS = (
    WRITES_TOOLS
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}"
    + "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    + "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FOR_TOOLS = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": WRITES_CALLS},
]


def schema_of(**properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


TOOLS = [schema_of(a={"type": "integer"}), schema_of(b={"type": "string", "enum": ["x"]})]


def calling(question, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": question}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [asked, answer], "tools": TOOLS}


def answered(**fields):
    return [{"question": "a?", **fields}]


@pytest.mark.parametrize(
    ("template", "rows"),
    [
        (CHATML, [{"text": "a", "id": 1}, {"text": "b", "id": 2}]),
        (CHATML, [PAIRS[0] | {"tools": TOOLS}]),
        (CHATML, [{"prompt": SAID[0][:1], "completion": SAID[0][1:]}]),
        (CHATML, [{"messages": chat, "source": "x"} for chat in SAID]),
        (CHATML, [{"messages": SAID[0]}, {"text": "a"}, PAIRS[0], ALPACA[0]]),
        (CHATML, [ALPACA[0] | {"system": "c"}, ALPACA[1]]),
        (None, ALPACA),
        (CHATML, SHAREGPT),
        (CHATML, [SHAREGPT[0] | {"system": "c", "tools": TOOLS}]),
        (WRITES_TOOLS + CHATML, [{"messages": SAID[0], "tools": TOOLS}, {"messages": SAID[1]}]),
        (WRITES_TOOLS + CHATML, [{"messages": SAID[0], "tools": json.dumps(TOOLS)}]),
        (WRITES_TOOLS + CHATML, [SHAREGPT[0] | {"tools": TOOLS}]),
        (FOR_TOOLS, [calling("a?", '{"a": 1}'), calling("b?", '{"b": null}')]),
        (FOR_TOOLS, [calling("a?", {"a": 1}), calling("b?", {"b": {"c": 2}})]),
        (WRITES_CALLS, [calling("a?", {"a": 1}), {"messages": SAID[0]}]),
        (CHATML, [calling("a?", '{"a": 1}')]),
        (CHATML, [{"prompt": "a?", "response": "b"}]),
        (CHATML, [{"instruction": "a?", "context": "c", "response": "b", "category": "x"}]),
        (CHATML, [{"prompt": [{"role": "user", "content": "a"}], "response": SAID[0][1:]}]),
        (CHATML, answered(answer="b", context="c", id=1)),
        (CHATML, answered(system="c", chosen="b", rejected="d")),
        (CHATML, answered(chosen=SAID[0][1:], rejected=SAID[1][1:])),
        (CHATML, [{"title": "a", "body": "b"}]),
        (CHATML, [{"text": "a", "messages": SAID[0]}]),
    ],
)  # fmt: skip
def test_examples_in_parquet_are_those_in_lines_with_the_same_remarks_and_errors(
    tmp_path, template, rows
):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tokenizer = read_tokenizer(write_tokenizer(tmp_path / "model", template=template))
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")

    def read(file):
        place = re.compile(rf"{re.escape(str(file))}(:|, example )?")
        try:
            check_examples(file)
            found, parts = documents_of(file, tmp_path / "cache", tokenizer)
        except ValueError as error:
            return place.sub("at ", str(error))
        return parts, found.ignored, [place.sub("at ", remark) for remark in found.remarks]

    assert read(tmp_path / "a.parquet") == read(lines)


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", json.dumps(PAIRS)), ("a.csv", as_csv(PAIRS))]
)
def test_pairs_are_learned_by_models_of_bytes(tmp_path, name, text):
    want, _ = written(
        tmp_path, "want.jsonl", "".join(json.dumps(row) + "\n" for row in PAIRS), ByteTokenizer()
    )
    got, _ = written(tmp_path, name, text, ByteTokenizer())
    assert got == want


def test_alpaca_is_a_prompt_and_its_completion_where_the_template_is_for_tools_alone(tmp_path):
    rows = "".join(json.dumps(row) + "\n" for row in ALPACA)
    for name, template in (("none", None), ("for tools", FOR_TOOLS[1:])):
        tokenizer = read_tokenizer(write_tokenizer(tmp_path / name, template=template))
        got, found = written(tmp_path, "a.jsonl", rows, tokenizer)
        assert not found.is_chat
        want = got if name == "none" else want
    assert got == want


def test_alpaca_without_a_chat_template_is_a_prompt_and_its_completion():
    learned, ignored = as_learned(ALPACA[0] | {"id": 3}, has_chat_template=False)
    assert (learned, ignored) == ({"prompt": "Add.\n\n1 2\n\n", "completion": "3"}, {"id"})
    assert (
        as_learned({"instruction": "Hi", "input": None, "output": "a"}, has_chat_template=False)[0][
            "prompt"
        ]
        == "Hi\n\n"
    )


def test_a_prompt_of_messages_is_not_learned_and_the_completion_is(tmp_path):
    turns = [*SAID[0], {"role": "user", "content": "again"}, {"role": "assistant", "content": "5"}]
    weighted = [turns[0], turns[1] | {"weight": 0}, *turns[2:]]
    want, _ = written(tmp_path, "want.jsonl", json.dumps({"messages": weighted}))
    got, found = written(
        tmp_path, "a.jsonl", json.dumps({"prompt": turns[:3], "completion": turns[3:]})
    )
    assert got == want
    assert found.is_chat


def test_a_system_message_comes_first():
    for example in (ALPACA[0] | {"system": "Be brief."}, SHAREGPT[0] | {"system": "Be brief."}):
        learned, ignored = as_learned(example, has_chat_template=True)
        assert learned["messages"] == [{"role": "system", "content": "Be brief."}, *SAID[0]]
        assert "system" not in ignored


def test_a_text_beside_other_fields_stays_what_is_learned():
    learned, ignored = as_learned(ALPACA[0] | {"text": "whole"}, has_chat_template=True)
    assert (learned, ignored) == ({"text": "whole"}, {"instruction", "input", "output"})


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_a_list_is_read_a_value_at_a_time_wherever_blocks_end(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_text, "JSON_BLOCK", block)
    (tmp_path / "a.json").write_text(json.dumps(ALPACA, indent=3) + "\n")
    assert list(read_records(tmp_path / "a.json")) == list(enumerate(ALPACA, 1))
    (tmp_path / "a.json").write_text(" [ ] ")
    assert list(read_records(tmp_path / "a.json")) == []


def test_the_first_examples_of_a_list_need_not_the_rest_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "JSON_BLOCK", 64)
    (tmp_path / "a.json").write_text(json.dumps(PAIRS) + "x" * 10**6)
    read = []
    of_text = json_text.JsonText._more
    monkeypatch.setattr(json_text.JsonText, "_more", lambda self: read.append(1) or of_text(self))
    assert next(read_records(tmp_path / "a.json")) == (1, PAIRS[0])
    assert len(read) <= 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"data": [1],\n "version": 2}', r"a .json must be a list of objects, or .*; got another value in .*a.js"),
        ("a.json", '[{"prompt": "a"}]', r'must have "text", .*, or "conversations"; got the fields prompt\.'),
        ("a.json", '["a"]', r'must be an object with fields; got "a"\. .*a.json, example 1; to learn .*, rename it to .txt'),
        ("a.json", "[]", r"a .json must have an example to learn from; got none. It is in .*a.json; to learn"),
        ("a.json", '[{"prompt": "a", "completion": "b"} 3]', r"got '3' between two values in .*a.json, example 2\. Correct"),
        ("a.json", '[{"prompt": "a", "completion": "b"}', r"got no end of the list in .*a.json, example 2"),
        ("a.json", '[{"prompt": "a", "completion": "b"}]\n[{"prompt": "c", "completion": "d"}]',
         r"got text after the end of the list in .*a.json, example 2\. Correct"),
        ("a.csv", "prompt;completion\na;b\n", r"got ';' between the names, and not ',' in .*a.csv, near line 1"),
        ("a.tsv", "prompt,completion\na,b\n", r"got ',' between the names, and not '\\t' in .*a.tsv, near line 1"),
        ("a.json", '[{"prompt": "a"', r"got Expecting ',' delimiter in .*a.json, example 1\."),
        ("a.csv", "a,b\n1,2\n", r"got the fields a, b. .*a.csv:2; to learn the file as plain text"),
        ("a.csv", "prompt,completion\n1,2\n1\n", r"got a row of another length than the 2 names .*a.csv, near line 3"),
        ("a.csv", 'prompt,completion\n1,"2\n', r"a .csv must have .*; got unexpected end of data in .*a.csv, near line 1"),
        ("a.json", '[{"conversations": [{"from": "tool"}]}]',
         r'"from" must be one of human, .*, system, gpt, .*; got .tool.*n, example 1'),
        ("a.json", '[{"conversations": [{"from": "GPT", "value": null}]}]',
         r'turn must have a "value"; got one from .GPT. without'),
        ("a.json", '[{"conversations": "a"}]', r'"conversations" must be a list of objects with "from" and "value"'),
        ("a.json", '[{"instruction": "a", "output": null}]', r'"output" must be a string; got null\. .*n, example 1'),
        ("a.json", '[{"messages": [{"role": "user", "content": 8}]}]', r"got 8 in one of 'user'. Correct"),
        ("a.json", '[{"messages": [{"role": "user", "content": [1]}]}]', r"got a list with 1 in one of 'user'. Correct"),
        ("a.json", '[{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b.png"}}]}]}]',
         r"\"content\", a string or a list of .*; got a list with {'type': 'image_url', .* in one of 'user'. Correct"),
        ("a.json", '[{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}]',
         r"with {'type': 'text', 'text': 1} in"),
        ("a.json", '[\n {"prompt": "a",\n  "completion": "b"},\n {"prompt": "a", "completion": 1}]', r"a.json, example 2\."),
        ("a.json", '{"prompt": "a", "completion": "b"}\n\n{"prompt": "a", "completion": 1}', r"a.json:3\."),
        ("a.json", '[{"messages": [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]}]',
         r"of the role \"assistant\", to learn from; got 'human', 'bot'. Rename the role of the answers, .*a.json, example 1"),
        ("a.json", '[{"instruction": 1, "output": "a"}]', r'"instruction" and "input" must be strings; .*a.json, example 1'),
    ],
)  # fmt: skip
def test_a_file_of_no_form_is_refused_by_its_name_and_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_as_named(tmp_path / name, tmp_path / "cache")


@pytest.mark.parametrize(
    "example",
    [
        {"text": None, "messages": SAID[0], "id": None},
        {"prompt": None, "completion": None, "messages": SAID[0]},
        {"messages": None, "instruction": None} | SHAREGPT[0],
        {"conversations": [turn | {"content": None} for turn in SHAREGPT[0]["conversations"]]},
        {"conversations": [turn | {"from": None, "value": None} for turn in SAID[0]]},
        {"messages": SAID[0], "tools": ""},
        {"text": None, "messages": None, "conversations": None} | ALPACA[0],
    ],
)
def test_fields_that_are_null_or_empty_are_those_that_are_left_out(tmp_path, example):
    want, _ = written(tmp_path, "want.jsonl", json.dumps({"messages": SAID[0]}))
    got, found = written(tmp_path, "a.jsonl", json.dumps(example))
    assert got == want
    assert set(found.ignored) <= {"id"}


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": None}, r'"text" must be a string; got null\.'),
        (
            {"text": None, "prompt": "a", "completion": None},
            r'"completion" must be a string; got nu',
        ),
        (
            {"text": None, "instruction": "a", "output": None},
            r'"output" must be a string; got null',
        ),
        ({"text": "a", "messages": []}, r'got "text" and "messages"\. Keep those of one kind'),
        (
            {"conversations": [{"from": None, "value": "a"}]},
            r'"from" must be one of .*; got None\.',
        ),
    ],
)
def test_a_null_that_is_needed_is_named(tmp_path, example, message):
    with pytest.raises(ValueError, match=message):
        written(tmp_path, "a.jsonl", json.dumps(example))


def test_the_parts_of_a_message_are_joined():
    parts = [
        {"type": "text", "text": "what is "},
        {"type": "text", "text": "a cat?", "image_url": None},
    ]
    answer = {"role": "assistant", "content": "an animal"}
    found = check_messages([{"role": "user", "content": parts}, answer])
    assert found == [{"role": "user", "content": "what is a cat?"}, answer]


def test_a_csv_that_is_not_utf_8_is_refused_with_the_way_to_save_it(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\na,é\n", encoding="latin-1")
    with pytest.raises(
        ValueError, match=r"a .csv must be in UTF-8; got 'utf-8' codec .*a.csv. Save it as UTF-8"
    ):
        list(read_records(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "list.json", "a.csv"])
def test_a_byte_order_mark_at_the_beginning_is_no_part_of_the_first_example(tmp_path, name):
    lines = "".join(json.dumps(row) + "\n" for row in PAIRS)
    table = "prompt,completion\n" + "".join(
        f"{row['prompt']},{row['completion']}\n" for row in PAIRS
    )
    text = {"list.json": json.dumps(PAIRS), "a.csv": table}.get(name, lines)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_text(text, encoding="utf-8")
    assert list(read_records(tmp_path / name)) == list(read_records(tmp_path / "plain" / name))


def test_a_byte_order_mark_at_the_beginning_of_a_text_is_not_learned(tmp_path):
    texts = []
    for encoding in ("utf-8-sig", "utf-8"):
        file = tmp_path / encoding / "a.txt"
        file.parent.mkdir()
        file.write_text("a bird \ufeff sings\n" * 20, encoding=encoding)
        passages = [passage.text for passage in Examples([file], ByteTokenizer()).passages()]
        read = load_text(file)
        texts.append((passages, np.concatenate([*read.train, *read.test]).tobytes()))
    assert texts[0] == texts[1]
    assert texts[0][1].decode().count("\ufeff") == 20, "one within a text is a character"


def test_json_of_other_things_in_a_folder_of_text_stays_text(tmp_path):
    (tmp_path / "package.json").write_text('{\n "name": "a"}')
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    write_lines(tmp_path / "rows.json", *PAIRS)
    assert [is_records(tmp_path / name) for name in ("package.json", "table.csv", "rows.json")] == [
        False,
        False,
        True,
    ]
    [(ids, marks)], _ = written(tmp_path, "b.json", '{\n "name": 1}', ByteTokenizer())
    assert (bytes(ids[:-1]), marks) == (b'{\n "name": 1}', None)


def test_a_wrong_line_is_named_by_one_number(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", PAIRS[0], '{"prompt" 3}')
    with pytest.raises(ValueError, match="got JSONDecodeError") as refused:
        documents_of(file, tmp_path / "cache", WordTokenizer())
    assert re.findall(r"line \d+|char \d+|jsonl:\d+", str(refused.value)) == ["jsonl:2"]
    assert "at column 11 in" in str(refused.value)


@pytest.mark.parametrize("name", ["a.ndjson", "A.JSONL", "a.JsonL"])
def test_other_names_of_json_lines_are_read_as_such(tmp_path, name):
    file = write_lines(tmp_path / name, *PAIRS)
    assert is_records(file)
    assert [example for _, example in read_records(file)] == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b"\x1f\x8b", r"data must not be compressed; got .*a.jsonl.gz. Decompress it"),
        ("a.txt", "é".encode("utf-16"), r"text must be UTF-8; got UTF-16 in .*a.txt. Save it as UTF-8: iconv"),
        ("a.jsonl", "{}".encode("utf-16"), r"a .jsonl must be in UTF-8; got UTF-16 in .*a.jsonl. Save it as UTF-8: iconv"),
        ("a.jsonl", b'{"text": "\xe9"}', r"got UnicodeDecodeError: .*a.jsonl:1. Save the file as UTF-8, or remove"),
        ("a.data", b'{"text": "a"}\n', r"a file with an example a line must be named .jsonl; got .*a.data. Rename it, or to"),
        ("conversations", b'{"messages": []}\n', r"must be named .jsonl; got .*conversations. Rename it"),
    ],
)  # fmt: skip
def test_a_file_that_would_be_learned_as_other_text_than_it_has_is_refused(
    tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        documents_of(tmp_path / name, tmp_path / "cache")


def test_lines_of_examples_in_a_txt_and_other_json_stay_text(tmp_path):
    for name, text in (("a.txt", '{"text": "a"}\n'), ("b.log", '{"level": 1}\n')):
        [(ids, _)], _ = written(tmp_path, name, text, ByteTokenizer())
        assert bytes(ids[:-1]).decode() == text
