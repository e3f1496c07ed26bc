"""The handwritten digits of scikit-learn: 1,797 images of 8x8 pixels."""

import importlib.util
import math

import numpy as np

from jaxpar.fields import arg
from jaxpar.runtime.output import install_extra

NUM_PIXELS, NUM_CLASSES = 64, 10

Rows = dict[str, np.ndarray]


def read_digits(seed: int = 0, test_fraction: float = 0.2) -> tuple[Rows, Rows]:
    """Returns the digits to learn from and those held out: "features" [rows, 64] from 0 to 1, and "label" [rows].

    Args:
        seed: Determines which digits are held out.
        test_fraction: Their share, the flag --test-fraction.

    Raises:
        ValueError: scikit-learn is not installed, or one of the two parts would be empty.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(f"the digits come with scikit-learn; got none. {install_extra('data')}.")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng([seed, 1]).permutation(len(labels))
    num_test = round(test_fraction * len(labels)) if math.isfinite(test_fraction) else 0
    if not 0 < num_test < len(labels):
        raise ValueError(
            f"{arg('test_fraction')} must leave digits to learn from and digits to test on; got {test_fraction:g}, which holds "
            f"out {num_test} of {len(labels)}. Choose one such as 0.2."
        )
    columns = {"features": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    of = lambda part: {name: column[part] for name, column in columns.items()}
    return of(order[num_test:]), of(order[:num_test])
