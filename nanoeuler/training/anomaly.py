# Made from book/e-a-run-that-survives.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-train-loop
"""Find the first tensor that is not finite, in a step that went wrong.

Leaves out everything that is fast: the pass is taken again with the reference engine.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from nanoeuler.engines.interface import OPERATIONS
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
from nanoeuler.model.weights import Weights

PATIENCE = 60.0  # seconds of searching: a large batch of a large model would take minutes
# These see no weight or activation; all others are watched.
SILENT = ("begin", "scratch", "rope_tables")
# The names of the watched ones, in the order of the interface.
WATCHED = [name for name in OPERATIONS if name not in SILENT]


class _NotFinite(Exception):
    """Raised by `_Watched`; its text names the operation."""


class _Watched(ReferenceEngine):
    """The reference engine, stopped by the first operation that returns nan or infinity."""

    def __init__(self, *weights: Weights) -> None:
        tensors = [pair for each in weights for pair in each.items()]
        self.names = {tensor.ctypes.data: name for name, tensor in tensors}
        self.last = "embedding"
        for name in WATCHED:
            setattr(self, name, partial(self._watch, name, getattr(self, name)))

    def _watch(self, name: str, operation: Callable, *arguments):
        result = operation(*arguments)
        results = result if isinstance(result, tuple) else (result,)
        arrays = [a for a in (*results, *arguments) if isinstance(a, np.ndarray)]
        named = [self.names[a.ctypes.data] for a in arrays if a.ctypes.data in self.names]
        self.last = named[0] if named else self.last
        if not all(np.isfinite(array).all() for array in arrays):
            place = "with" if named else "after"
            raise _NotFinite(f"what {name} makes {place} {self.last}")
        return result


def first_bad_tensor(
    weights: Weights, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
) -> str:
    """Describe the first tensor that is not finite.

    tokens (B, T), targets (B, T, K), first (B, T) int: those of the bad step; weights: those before
    it.
    """
    for name, tensor in weights.items():
        if not np.isfinite(tensor).all():
            return f"the weight {name}"
    config, gradients = weights.config, Weights(weights.config, weights.flat.dtype)
    scale = loss_scale(targets, head_weights(config.n_predict))
    engine = _Watched(weights, gradients)
    began = time.perf_counter()
    for at in range(len(tokens)):
        if time.perf_counter() - began > PATIENCE:
            return f"none in the first {at} sequences of the batch; more were not looked at"
        row = slice(at, at + 1)
        try:
            with np.errstate(all="ignore"):
                loss_and_gradients(
                    engine, config, weights, tokens[row], targets[row], scale, gradients,
                    None if first is None else first[row],
                )  # fmt: skip
        except _NotFinite as error:
            return f"{error}, in sequence {at + 1} of the batch"
    return "none that the reference engine makes: compare the engine with it"
