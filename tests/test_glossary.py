"""One word for each idea: what docs/glossary.md lists as replaced occurs nowhere else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
TEXTS = sorted(
    path
    for pattern in (
        "README.md",
        "SECURITY.md",
        "docs/**/*.md",
        "docs/*.py",
        "jaxpar/**/*.py",
        "recipes/*.py",
        "benchmarks/*.py",
    )
    for path in ROOT.glob(pattern)
    if path != GLOSSARY
)
DEFINITION = re.compile(r"^\| (?!Term|Was|---)(.*?) \| (.*) \|$", re.MULTILINE)
TERMS, REPLACED = GLOSSARY.read_text().split("## Replaced words")
OLD = [re.sub(r'^(["`])(.*)\1$', r"\2", old) for old, _ in DEFINITION.findall(REPLACED)]


def test_replaced_words_are_listed():
    assert len(OLD) >= 20


def test_a_replaced_word_occurs_nowhere_else():
    longest_first = sorted(OLD, key=len, reverse=True)
    found = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
    where = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path in TEXTS
        for text in [path.read_text()]
        for match in found.finditer(text)
        if not is_the_error_that_names_the_new_word(text, match)
    ]
    assert not where, "called otherwise now, see docs/glossary.md:\n" + "\n".join(where)


def is_the_error_that_names_the_new_word(text, match):
    return "is now called" in text[match.start() : match.end() + 40]


def test_a_term_is_defined_once():
    terms = [
        term.strip() for terms, _ in DEFINITION.findall(TERMS) for term in re.split(r"[,:] ", terms.replace("`", ""))
    ]
    assert len(terms) == len(set(terms)), [term for term in terms if terms.count(term) > 1]


def test_words_of_the_api_exist():
    code = "\n".join(path.read_text() for path in ROOT.glob("jaxpar/**/*.py"))
    for word in re.findall(r"`(\w+)`", TERMS):
        assert re.search(rf"\b{word}\b", code), f"nothing in jaxpar/ is called {word}"
