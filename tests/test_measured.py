"""The planner against steps that were measured on one H100: `support/measured.py` and `data/measured.json`."""

import pytest

from tests.support import measured

FULL = pytest.mark.full  # another model by the same constants
INDICES = [0, *(pytest.param(index, marks=FULL) for index in range(1, len(measured.ROWS)))]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: measured.ROWS[index]["model"])
def test_a_measured_step_is_planned_within_7_percent_and_the_page_says_so(index):
    assert abs(measured.error(index)) < 0.07
    assert measured.planned(index).memory_bytes / 2**30 == pytest.approx(measured.ROWS[index]["gib"], rel=0.16)
    table = measured.SECTION.search(measured.PAGE.read_text())
    assert table is not None
    assert measured.line(index) in table.group().splitlines(), "renew it by python tests/support/measured.py"
