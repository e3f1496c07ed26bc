"""One word for each idea: docs/glossary.md defines each term once, and its names are those of the API."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
DEFINITION = re.compile(r"^\| (?!Term|---)(.*?) \| (.*) \|$", re.MULTILINE)


def test_a_term_is_defined_once():
    terms = [
        term.strip()
        for terms, _ in DEFINITION.findall(GLOSSARY)
        for term in re.split(r"[,:] ", terms.replace("`", ""))
    ]
    assert len(terms) > 50
    assert len(terms) == len(set(terms)), [term for term in terms if terms.count(term) > 1]


def test_the_chinese_glossary_has_the_terms_of_the_english_one():
    """Each in its place: the names of the API are the same, and the English word stands beside the Chinese one."""
    chinese = (ROOT / "docs" / "zh" / "glossary.md").read_text()
    found = re.findall(r"^\| (?!术语|---)(.*?) \| (.*) \|$", chinese, re.MULTILINE)
    english = DEFINITION.findall(GLOSSARY)
    assert len(found) == len(english)
    codes = lambda text: sorted(re.findall(r"`([^`]+)`", text))
    for (term, meaning), (own_term, own_meaning) in zip(found, english, strict=True):
        assert codes(term + meaning) == codes(own_term + own_meaning), term
        words = re.findall(r"[A-Za-z-]+", re.sub(r"`[^`]*`", "", own_term))
        missing = [
            word
            for word in words
            if word.lower() not in term.lower() and word not in ("the", "of", "a")
        ]
        assert not missing, (term, missing)


def test_words_of_the_api_exist():
    code = "\n".join(path.read_text() for path in ROOT.glob("jaxpar/**/*.py"))
    for word in re.findall(r"`(\w+)`", GLOSSARY):
        assert re.search(rf"\b{word}\b", code), f"nothing in jaxpar/ is called {word}"
