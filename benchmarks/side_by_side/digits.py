"""The clients of all programs: 40 owners of handwritten digits, each of whom keeps a quarter of its own for the test."""

import numpy as np
from sklearn.datasets import load_digits

CLIENTS, ROUNDS, RATE, BATCH = 40, 30, 0.3, 10


def clients():
    """(x, y, x of the test, y of the test) of every client."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    made = []
    for k in range(CLIENTS):
        mine = np.arange(k, len(y), CLIENTS)
        kept = len(mine) // 4
        made.append((x[mine[kept:]], y[mine[kept:]], x[mine[:kept]], y[mine[:kept]]))
    return made
