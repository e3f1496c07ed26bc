"""The planner against steps that were measured on one H100: `support/measured.py` and `data/measured.json`."""

import re
from pathlib import Path

import pytest

from tests.support import measured

PAGES = [Path(measured.__file__).parents[2] / "docs" / page for page in ("fp8.md", "zh/fp8.md")]

FULL = pytest.mark.full  # another model by the same constants
INDICES = [0, *(pytest.param(index, marks=FULL) for index in range(1, len(measured.ROWS)))]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: measured.ROWS[index]["model"])
def test_a_measured_step_is_planned_within_7_percent_and_the_page_says_so(index):
    """Its memory by what it compiles to today: when it was measured, layers were in a loop."""
    assert abs(measured.error(index)) < 0.07
    planned, compiled = (
        measured.planned(index).memory_bytes / 2**30,
        measured.ROWS[index]["compiled_gib"],
    )
    assert planned == pytest.approx(compiled, rel=0.02)
    table = measured.SECTION.search(measured.PAGE.read_text())
    assert table is not None
    assert measured.line(index) in table.group().splitlines(), (
        "renew it by python tests/support/measured.py"
    )


def test_linear_maps_in_fp8_are_planned_as_measured_and_the_pages_say_from_which_width_they_pay():
    for row in measured.LINEAR:
        sizes = row["rows"], row["ins"], row["outs"]
        planned = {
            products: 1e3 * measured.linear_seconds(*sizes, products)
            for products in ("compute", "fp8")
        }
        assert planned == pytest.approx({name: row[name] for name in planned}, rel=0.06)
    faster = lambda *sizes: "{:.2f}".format(
        measured.linear_seconds(16384, *sizes, "compute")
        / measured.linear_seconds(16384, *sizes, "fp8")
    )
    found = [faster(width, 4 * width) for width in (1024, 1536, 2048)] + [
        faster(width, width) for width in (4096, 2048)
    ]
    for page in PAGES:
        [line] = [line for line in page.read_text().splitlines() if "plan --products fp8" in line]
        assert re.findall(r"[01]\.\d\d", line) == found
