"""What failed saves leave in the process of the tests."""

import gc
import warnings

import pytest


@pytest.fixture(scope="module", autouse=True)
def writes_given_up():
    """Collects what failed saves leave, coroutines of Orbax that nobody awaits: Python would warn of them in a later test.

    For a module whose tests share this process with others, which has ``pytestmark = GIVES_WRITES_UP`` too.
    """
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was never awaited", RuntimeWarning)
        gc.collect()


GIVES_WRITES_UP = pytest.mark.filterwarnings("ignore:.* was never awaited:RuntimeWarning")
