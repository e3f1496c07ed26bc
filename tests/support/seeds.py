"""Seeds that no run had before, which every failure names.

A seed follows from the one of the run and from the place that asks for it: a test, a fixture or a module. So the variable
JAXPAR_TEST_SEED, which a failure names too, gives each of them its seeds again, in whatever order and company it runs.
"""

import contextlib
import os
import sys
import zlib

import numpy as np
import pytest

VARIABLE = "JAXPAR_TEST_SEED"
OF_RUN = int(os.environ.get(VARIABLE) or np.random.SeedSequence().entropy % 2**31)
_drawn: dict[
    tuple[str, str], list[int]
] = {}  # by place: a test or a module, and the fixture within it, if any
_places: list[tuple[str, str]] = []  # what runs: a test, and fixtures that it asks for


def fresh_seed() -> int:
    """A seed that no run had before; the report of a failure names it."""
    place = (
        _places[-1] if _places else (sys._getframe(1).f_globals["__name__"], "")
    )  # a module draws as it is imported
    drawn = _drawn.setdefault(place, [])
    words = np.random.SeedSequence(
        [OF_RUN, zlib.crc32(f"{place} {len(drawn)}".encode())]
    ).generate_state(1)
    drawn.append(int(words[0] % 2**31))
    return drawn[-1]


@contextlib.contextmanager
def _running(*place: str):
    _drawn.pop(place, None)
    _places.append(place)
    try:
        yield
    finally:
        _places.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with _running(item.nodeid, ""):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    with _running(request.node.nodeid, fixturedef.argname):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and (seeds := seeds_of(item)):
        said = "\n".join(
            f"{' '.join(place).strip()}: {', '.join(map(str, drawn))}"
            for place, drawn in seeds.items()
        )
        report.sections.append(("fresh seeds", f"{said}\n{VARIABLE}={OF_RUN} repeats them"))
    return report


def seeds_of(item) -> dict[tuple[str, str], list[int]]:
    """The seeds that a test drew, or its module or a fixture of it, whichever test set that up."""
    nodes = {node.nodeid for node in item.listchain()} | {
        getattr(getattr(item, "module", None), "__name__", "")
    }
    names = {"", *getattr(item, "fixturenames", ())}
    return {
        place: drawn for place, drawn in _drawn.items() if place[0] in nodes and place[1] in names
    }
