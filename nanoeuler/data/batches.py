# Made from book/d-batches.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-batches-shuffle
"""Tokens in batches: windows in a new order in every pass, and their targets, K for each token.

Leaves out where the tokens come from (dataset.py) and the held-out side (validation.py).
B batch, T positions (the context), K predicted tokens.
"""

import threading
from concurrent.futures import Future

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from nanoeuler.data.shards import Tokens, windows
from nanoeuler.errors import UserError

STEP_TOKENS = 1 << 22  # at most in a step, above GPT-3's 3.2 million (Brown et al., 2020)


def check_batch_size(batch_size: int, context: int) -> None:
    """UserError for a step of more than STEP_TOKENS tokens."""
    if batch_size * context > STEP_TOKENS:
        raise UserError(
            f"expected a batch_size of at most {STEP_TOKENS // context} for a context of "
            f"{context}, got {batch_size}: choose a smaller one"
        )


def count_windows(n_tokens: int, context: int, n_predict: int) -> int:
    """The number of windows in a pass over the tokens. UserError if the text is too short."""
    count = (n_tokens - context - n_predict + 1) // context
    if count < 1:
        raise UserError(
            f"expected at least {2 * context + n_predict - 1} training tokens for a context of "
            f"{context}, got {n_tokens}: give a longer text or a smaller context"
        )
    return count


def order_of(seed: int, number: int, n: int, context: int) -> tuple[int, np.ndarray]:
    """(offset, order) of pass `number`: the first token of window 0, and a permutation of n.

    `order` has the smallest signed type that holds its numbers.
    """
    rng = np.random.default_rng((seed, number))
    offset = int(rng.integers(context))
    order = np.arange(n, dtype=np.min_scalar_type(-n))
    rng.shuffle(order)
    return offset, order


class Batches:
    """Batches that are a function of (seed, step) alone, so that a run can be resumed exactly.

    The tokens (an array, or `shards.Tokens`) are cut into windows of `context`, which are visited
    in a new random order in every pass, from a new random offset. The targets of a window extend
    n_predict tokens beyond it. The order of one pass is kept: four bytes a window.
    """

    def __init__(self, tokens: Tokens | np.ndarray, batch_size: int, context: int, n_predict: int,
                 seed: int) -> None:  # fmt: skip
        check_batch_size(batch_size, context)
        self.tokens, self.batch_size, self.context = tokens, batch_size, context
        self.n_predict, self.seed = n_predict, seed
        self.windows = count_windows(len(tokens), context, n_predict)
        self._kept = None, None  # the number of a pass, and its `order_of`

    def _pass(self, number):
        """`order_of` a pass; the last one is kept."""
        last, parts = self._kept
        if last != number:
            parts = order_of(self.seed, number, self.windows, self.context)
            self._kept = number, parts  # one assignment, so another thread sees both or neither
        return parts

    def starts(self, step: int) -> np.ndarray:
        """The first tokens of the windows of step 1, 2, ..., int64 (B,)."""
        number, place = divmod((step - 1) * self.batch_size, self.windows)
        starts, done = [], 0
        while done < self.batch_size:  # once, unless the batch ends a pass and begins the next
            offset, order = self._pass(number)
            part = order[place : place + self.batch_size - done].astype(np.int64)
            starts.append(offset + self.context * part)
            done, number, place = done + len(part), number + 1, 0
        return np.concatenate(starts)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens (B, T), targets (B, T, K) int32 of step 1, 2, ...; target k is 1 + k tokens on."""
        rows = windows(self.tokens, self.starts(step), self.context + self.n_predict)
        targets = sliding_window_view(rows[:, 1:], self.n_predict, axis=1)
        return rows[:, : self.context].copy(), targets.copy()


# %% sec-batches-ahead
class Prefetcher:
    """The batches of `batches`, each prepared by a thread while the caller works on the one before.

    A thread lives for one batch and doesn't keep the program from ending. An error in a batch is
    raised when the caller requests that batch.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._step, self._ready = None, None

    def batch(self, step: int) -> tuple[np.ndarray, ...]:
        """Return `batches.batch(step)`, and begin step + 1."""
        expected = self._step == step
        self._step, ready = None, self._ready
        batch = ready.result() if expected else self.batches.batch(step)
        ready = Future()
        threading.Thread(target=self._prepare, args=(step + 1, ready), daemon=True).start()
        self._step, self._ready = step + 1, ready  # not before: a thread may fail to start
        return batch

    def _prepare(self, step, ready):
        try:
            ready.set_result(self.batches.batch(step))
        except BaseException as error:  # any error belongs to the caller of `batch`
            ready.set_exception(error)
