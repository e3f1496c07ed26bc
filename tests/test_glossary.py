"""One word for each idea: docs/glossary.md defines each term once, and its names are those of the API."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
DEFINITION = re.compile(r"^\| (?!Term|---)(.*?) \| (.*) \|$", re.MULTILINE)


def test_a_term_is_defined_once():
    terms = [
        term.strip() for terms, _ in DEFINITION.findall(GLOSSARY) for term in re.split(r"[,:] ", terms.replace("`", ""))
    ]
    assert len(terms) > 50
    assert len(terms) == len(set(terms)), [term for term in terms if terms.count(term) > 1]


def test_words_of_the_api_exist():
    code = "\n".join(path.read_text() for path in ROOT.glob("jaxpar/**/*.py"))
    for word in re.findall(r"`(\w+)`", GLOSSARY):
        assert re.search(rf"\b{word}\b", code), f"nothing in jaxpar/ is called {word}"
