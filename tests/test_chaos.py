"""Runs under random faults end where a run without faults does: a minute of what `make chaos` does for 20."""

import os

import pytest

from tests.support import chaos, tiny

SECONDS = float(os.environ.get("JAXPAR_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("JAXPAR_CHAOS_SEED", tiny.fresh_seed()))


@pytest.mark.slow
def test_runs_under_random_faults_end_as_the_undisturbed_one():
    counts = chaos.main(SECONDS, SEED)
    assert counts["runs that ended as the undisturbed one"] > 0, counts
