# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""A training step on the cores: a batch in shards on a pool of threads, one engine to a thread.

Results depend on the number of shards, which the size of the batch decides, and never on the number
of threads. Leaves out more than one process: the kernels hold no GIL, so threads are enough; and
the optimizer, which is handed in.

B batch, T positions, K predicted tokens.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from nanoeuler.engines.interface import Engine, Optimizer, Stepper, Taken
from nanoeuler.engines.parts import cut, slices
from nanoeuler.measurements import cores
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale, loss_sums
from nanoeuler.model.weights import Weights

# The most shards of a batch, so the most threads that find something to do.
SHARDS = 64
# The fewest tokens of a shard, if the batch has so many: fewer are not worth adding up.
SHARD_TOKENS = 256
# Elements of a gradient that a thread adds up at a time: 256 KiB, a part of any level 2 cache.
SLICE = 1 << 16


def shards(batch: int, context: int) -> int:
    """The number of shards of `batch` sequences of `context` tokens, on any machine.

    A float sum knows its order: this number decides the last bits of a gradient, and nothing about
    the machine may decide this number.
    """
    return min(SHARDS, -(-batch // -(-SHARD_TOKENS // context)))


class CpuStepper(Stepper):
    """Training steps of one model on this machine's cores: see `interface.Stepper`.

    `make_engine` makes an engine, `weights` are changed in place by `optimizer`; `threads` is by
    default one per core, at most SHARDS. Each shard goes through an engine's memory in `pieces`
    parts, if it has so many sequences. `gradients` are those of the last step, clipped.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        weights: Weights,
        optimizer: Optimizer,
        threads: int | None = None,
        pieces: int = 1,
    ):
        self.weights, self.gradients = weights, weights.zeros_like()
        self.optimizer, self.pieces = optimizer, pieces
        self.threads = min(threads or cores(), SHARDS)
        self.engines = [make_engine() for _ in range(self.threads)]
        self.pool, self.buffers = ThreadPoolExecutor(self.threads), []

    def step(self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int) -> list[Taken]:
        """As `Stepper.step`: scale, gradients, clipping and update; returns this very step."""
        scale = loss_scale(targets, head_weights(self.weights.config.n_predict))
        sums = self.loss_and_gradients(tokens, targets, scale)
        taken = Taken(number, sums, self.optimizer.clip(self.gradients))
        if taken.finite:
            self.optimizer.update(self.weights, self.gradients, lr, number)
        return [taken]

    def finish(self) -> list[Taken]:
        """As `Stepper.finish`: nothing, since `step` returns what it has done."""
        return []

    def pull(self) -> None:
        """As `Stepper.pull`: nothing to do, the weights of the run are the stepper's own."""

    def push(self) -> None:
        """As `Stepper.push`: nothing to do, the weights of the run are the stepper's own."""

    def loss_and_gradients(
        self, tokens: np.ndarray, targets: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        """Write `gradients` anew; returns sums (K,). As `transformer.loss_and_gradients`.

        tokens (B, T) and targets (B, T, K) int, scale (K,).
        """
        config, sums = self.weights.config, []
        while len(self.buffers) < min(self.threads, shards(*tokens.shape) - 1):
            self.buffers.append(self.weights.zeros_like())

        def run(engine, rows, part):
            part.flat[...] = 0
            return sum(
                loss_and_gradients(engine, config, self.weights, tokens[x], targets[x], scale, part)
                for x in slices(rows, self.pieces)
            )

        own = [self.gradients]  # the first shard of all writes where the sum will be
        for rows in self._rounds(tokens):
            parts = own + self.buffers[: len(rows) - len(own)]
            sums += self._together(run, self.engines, rows, parts)
            self._add_up(parts[len(own) :])
            own = []
        return sum(sums)

    def sums(self, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """As `Stepper.sums`: (K,) in nats, of tokens (B, T) and targets (B, T, K)."""

        def run(engine, rows):
            return sum(
                loss_sums(engine, self.weights.config, self.weights, tokens[x], targets[x])
                for x in slices(rows, self.pieces)
            )

        rounds = self._rounds(tokens)
        return sum(x for each in rounds for x in self._together(run, self.engines, each))

    def _together(self, function, *columns):
        # What the function returns for each row of arguments, on as many threads as there are. If
        # one raises, so does this, but not before all have ended: an engine serves one at a time.
        jobs = [self.pool.submit(function, *row) for row in zip(*columns)]  # noqa: B905 as map
        wait(jobs)
        return [job.result() for job in jobs]

    def _rounds(self, tokens):
        # The shards of a batch, each the range of its sequences, as many at a time as threads.
        each = cut(range(len(tokens)), shards(*tokens.shape))
        return [each[i : i + self.threads] for i in range(0, len(each), self.threads)]

    def _add_up(self, parts):
        # Add the gradients of shards to the sum of those before them, in their order.
        total = self.gradients.flat

        def add(start):
            piece = slice(start, start + SLICE)
            for part in parts:
                np.add(total[piece], part.flat[piece], out=total[piece])

        self._together(add, range(0, total.size, SLICE))
