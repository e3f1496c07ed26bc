"""Runs a recipe as a script, but without what it evaluates, compares and draws, which takes most of a short run's time.

STEP_SECONDS=0.05 python tests/support/plain_recipe.py house_prices --steps 4      or without a pause in each step
"""

import importlib
import os
import sys
import time
from pathlib import Path

from jaxpar.commands import recipe
from jaxpar.metrics.log import MetricsLog
from jaxpar.run.evaluation import Evaluation

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
SECONDS = float(os.environ.get("STEP_SECONDS", "0"))
log = MetricsLog.log


def log_and_pause(*args):
    log(*args)
    time.sleep(SECONDS)


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    for name in {"conclude", "draw", "draw_descent"} & vars(module).keys():
        setattr(module, name, lambda *_: None)
    Evaluation.__call__ = lambda *_: 0.0
    MetricsLog.log = log_and_pause
    recipe.run(module.main, module.Config, sys.argv[2:])
