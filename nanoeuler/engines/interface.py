# Made from book/05-backprop.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-backprop-engine
"""What the package asks of those who do the work, as typed protocols.

Leaves out all arithmetic. A stepper owns the state of training, wherever it lives.

B batch, T positions, H query heads, G key/value heads, D head width, K predicted tokens.
"""

from typing import NamedTuple, Protocol

import numpy as np


class Cache(Protocol):
    """The keys and values of one attention, at one place of the model, for the positions read."""

    def attention(self, heads: np.ndarray, n_kv: int, start: int) -> np.ndarray:
        """Keep the keys and values of `heads` (B, T, H + 2G, D) at positions start, start + 1, ...

        Returns y (B, T, H * D): each of the T queries over all positions up to its own.
        """


class Taken(NamedTuple):
    """What became known of a training step."""

    number: int             # of the step, from 1
    sums: np.ndarray        # (K,) of -log p in nats over the counted targets
    norm: float             # of the gradient, before it was clipped

    @property
    def finite(self) -> bool:
        """Whether the step was taken: one with a loss or gradient that is not finite is skipped."""
        return bool(np.isfinite(self.sums).all() and np.isfinite(self.norm))


class Stepper(Protocol):
    """Weights, gradients and the optimizer's moments, and the step that changes them."""

    def step(self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int) -> list[Taken]:
        """Begin training step `number` on tokens (B, T), targets (B, T, K) at learning rate lr.

        Returns the steps that have become known meanwhile, oldest first: on a processor this very
        one, on a device that works ahead of us the one before. A step whose loss or gradient is
        not finite changes nothing.
        """

    def finish(self) -> list[Taken]:
        """Wait for all steps that were begun; return those that `step` has not returned yet."""

    def sums(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The sums (K,) of -log p in nats over the counted targets, by a forward pass alone."""

    def pull(self) -> None:
        """Bring the weights and moments of the run up to date with the stepper's own."""

    def push(self) -> None:
        """Bring the stepper's own weights and moments up to date with those of the run."""
