# Made from book/14-many-ranks.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ranks-step
"""How a batch is shared out between ranks, whatever they compute on.

B batch, T positions, K predicted tokens.
"""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from nanoeuler.engines.interface import Array, Stepper, Taken
from nanoeuler.engines.ranks.group import Group
from nanoeuler.model.transformer import head_weights, loss_scale


class Part(NamedTuple):
    """What a rank gets of a batch: its own sequences, and what it must know of the rest."""

    shape: tuple[int, int]     # (B, T) of the whole batch
    scale: np.ndarray          # (K,), see `loss_scale`, of the whole batch
    tokens: np.ndarray         # (b, T) of the b sequences of this rank
    targets: np.ndarray        # (b, T, K)
    first: np.ndarray | None   # (b, T) or None


def parts_of(
    rows: list[slice], tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
) -> list[Part]:
    """A batch of tokens (B, T), targets (B, T, K) in parts with these rows; nothing is copied."""
    shape, scale = tokens.shape, loss_scale(targets, head_weights(targets.shape[2]))
    return [
        Part(shape, scale, tokens[mine], targets[mine], None if first is None else first[mine])
        for mine in rows
    ]


class Dealt(Stepper):
    """A rank's stepper, which is dealt its part of a batch, or has the whole and takes its part."""

    group: Group

    @abstractmethod
    def expect_parts(self, shape: tuple[int, int]) -> None:
        """UserError unless a batch of tokens of this shape (B, T) has a part for each rank."""

    @abstractmethod
    def parts_to_judge(
        self, tokens: Array, targets: Array, first: Array | None = None
    ) -> list[Part]:
        """Each rank's part of a batch for `sums`; a part may be empty."""

    def parts(self, tokens: Array, targets: Array, first: Array | None = None) -> list[Part]:
        """Each rank's part of a batch to train on; UserError where there is not one for each."""
        self.expect_parts(tokens.shape)
        return self.parts_to_judge(tokens, targets, first)

    @abstractmethod
    def step_part(self, part: Part, lr: float, number: int) -> list[Taken]:
        """Training step `number` at learning rate lr; each rank passes its own part."""

    @abstractmethod
    def sums_part(self, part: Part) -> Array:
        """The sums (K,) of -log p over the whole batch; every rank passes its own part of it."""

    def step(
        self, tokens: Array, targets: Array, lr: float, number: int, first: Array | None = None
    ) -> list[Taken]:
        """Step `number` on tokens (B, T), targets (B, T, K): this rank takes its part of them."""
        return self.step_part(self.parts(tokens, targets, first)[self.group.rank], lr, number)

    def sums(self, tokens: Array, targets: Array, first: Array | None = None) -> Array:
        """The sums (K,) of -log p over tokens (B, T), targets (B, T, K), which all ranks have."""
        return self.sums_part(self.parts_to_judge(tokens, targets, first)[self.group.rank])
