"""Malicious CSV files: messages about them fit on a screen and have no control characters."""

import re

import pytest

from jaxpar.data.csv_columns import MOST_IN_A_LINE, read_columns

SCREEN = 24 * 80


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (",".join(f"column{i}" for i in range(5000)) + "\n1\n", ["price"]),
        ("a" * 100_000 + "\n1\n", ["price"]),
        ("price\n" + "x" * 100_000 + "\n", ["price"]),
        ("p" * 100_000 + "\nx\n", ["p" * 100_000]),
        ("a," * 20_000 + "a\n", ["a"]),
        ("a\n" + "1," * 20_000 + "\n", ["a"]),
        (
            ",".join(f"column{i}" for i in range(5000)) + "\n1\n",
            [" ".join(f"column{i}" for i in range(5000))],
        ),
        ("a\n" + "1" * (MOST_IN_A_LINE + 5), ["a"]),
        ("a\n" + '"' + "1\n" * 100_000, ["a"]),
        ("a\x1b[2J\x07b\n\x1b[31mred\n", ["a\x1b[2J\x07b"]),
        ("\x1b]0;title\x07\n1\n", ["a"]),
    ],
    ids=range(11),
)
def test_what_is_said_of_a_table_fits_on_a_screen_and_is_plain(tmp_path, text, names):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        read_columns(path, names)
    assert len(str(refused.value)) < SCREEN
    assert str(refused.value).isprintable()
