"""Random models, run in random ways, give the numbers of one device: `fuzz_grammar.py` draws them, `fuzz_run.py` runs them.

A failure is made smaller, and its message has a line that runs it again. The long form draws JAXPAR_FUZZ_CASES cases, by
default 400 or about ten minutes, from JAXPAR_FUZZ_SEED, by default a seed that no run had before, which pytest shows.
"""

import functools
import os

import fuzz_run
import pytest
import tiny
from fuzz_grammar import cases
from hypothesis import HealthCheck, given, seed, settings

NUM_CASES = int(os.environ.get("JAXPAR_FUZZ_CASES", "400"))
SEED = int(os.environ.get("JAXPAR_FUZZ_SEED", tiny.fresh_seed()))
quiet = functools.partial(settings, database=None, suppress_health_check=list(HealthCheck))


@quiet(max_examples=25, derandomize=True)
@given(cases())
def test_random_models_run_in_random_ways_give_the_numbers_of_one_device(case):
    fuzz_run.check(case)


@pytest.mark.slow
def test_many_random_models_give_the_numbers_of_one_device():
    print(f"JAXPAR_FUZZ_SEED={SEED}")

    @seed(SEED)
    @quiet(max_examples=NUM_CASES)
    @given(cases())
    def check(case):
        fuzz_run.check(case)

    check()
