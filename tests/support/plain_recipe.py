"""Runs a recipe as a script, but without what it evaluates, compares and draws, which takes most of a short run's time.

STEP_SECONDS=0.05 python tests/support/plain_recipe.py house_prices --steps 4      or without a pause in each step
"""

import importlib
import os
import sys
import time
from pathlib import Path

import numpy as np

from jaxpar.commands import recipe
from jaxpar.metrics.log import MetricsLog
from jaxpar.run.evaluation import Evaluation

SECONDS = float(os.environ.get("STEP_SECONDS", "0"))
log = MetricsLog.log


def log_and_pause(*args):
    log(*args)
    time.sleep(SECONDS)


def some_digits(seed, test_fraction):
    """Rows like those of scikit-learn, without it."""
    rng = np.random.default_rng(0)
    rows = {
        "features": rng.uniform(size=(256, 64)).astype(np.float32),
        "label": rng.integers(10, size=256, dtype=np.int32),
    }
    return rows, rows


def make_plain(module, patch=setattr):
    """Patches a recipe's module; a test that runs it in its own process gives the ``setattr`` of its monkeypatch."""
    for name in {"conclude", "draw", "draw_descent"} & vars(module).keys():
        patch(module, name, lambda *_: None)
    if module.__name__ == "digits":
        patch(module, "read_digits", some_digits)
        patch(module, "evaluate", lambda *_: (0.0, 0.0))
        patch(module, "predict", lambda params, batch: batch["label"])
    patch(Evaluation, "__call__", lambda *_: 0.0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    module = importlib.import_module(sys.argv[1])
    make_plain(module)
    MetricsLog.log = log_and_pause
    recipe.run(module.main, module.Config, sys.argv[2:])
