# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""A training step on the cores: a batch in shards on a pool of threads, one engine to a thread.

Results depend on the number of shards, which the size of the batch decides, and never on the number
of threads. Leaves out more than one process, which chapter 14 adds; and the optimizer, which is
handed in.

B batch, T positions, K predicted tokens.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from nanoeuler.engines.interface import Engine, Optimizer, Stepper, Taken
from nanoeuler.engines.sharding import HALVINGS, additions, cut, slices
from nanoeuler.measurements import cores
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale, loss_sums
from nanoeuler.model.weights import Weights

# The most shards of a batch, so the most threads that find something to do.
SHARDS = 64
# About the fewest tokens of a shard, if the batch has so many: fewer are not worth adding up.
SHARD_TOKENS = 256
# Elements of a gradient that a thread adds at a time: 256 KiB. Both addends fit an L2 of 512 KiB.
SLICE = 1 << 16


def shards(batch: int, context: int) -> int:
    """The number of shards of `batch` sequences of `context` tokens, on any machine.

    A float sum knows its order: this number decides the last bits of a gradient, and nothing about
    the machine may decide this number.
    """
    return min(SHARDS, -(-batch // -(-SHARD_TOKENS // context)))


def shards_of(batch: int, context: int) -> list[range]:
    """The shards of such a batch, each the range of its sequences."""
    return cut(range(batch), shards(batch, context))


def gradients_held(count: int, threads: int) -> int:
    """How many gradients are held at once, the sum among them, while `count` shards are summed."""
    after, held, most = additions(count), 0, 0
    for i in range(0, count, threads):
        held += len(after[i : i + threads])
        most = max(most, held)
        held -= sum(after[i : i + threads])
    return most


class CpuStepper(Stepper):
    """Training steps of one model on this machine's cores: see `interface.Stepper`.

    `make_engine` makes an engine; `threads` is by default one per core, at most SHARDS. Each shard
    goes through an engine's memory in `pieces` parts, if it has so many sequences. `weights` are
    changed in place by `optimizer`; None: `sums` alone is used, and engines keep nothing of a pass.
    `gradients` are those of the last step, clipped; `buffers` is memory for more of them, made when
    it is needed.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], weights: Weights, optimizer: Optimizer | None,
        threads: int | None = None, pieces: int = 1,
    ) -> None:  # fmt: skip
        self.weights, self.gradients = weights, weights.zeros_like()
        self.optimizer, self.pieces = optimizer, pieces
        self.threads = min(threads or cores(), SHARDS)
        if optimizer is not None:
            optimizer.threads = self.threads
        self.engines = [make_engine() for _ in range(self.threads)]
        for engine in self.engines:
            engine.forward_only = optimizer is None
        self.pool, self.buffers = ThreadPoolExecutor(self.threads), []

    def _map(self, function, *columns):
        # What the function returns for each row of arguments, on as many threads as there are. If
        # one raises, so does this, but not before all have ended: an engine serves one at a time.
        jobs = [self.pool.submit(function, *row) for row in zip(*columns)]  # noqa: B905 as map
        wait(jobs)
        return [job.result() for job in jobs]

    def shard_sums(
        self, tokens: np.ndarray, targets: np.ndarray, rows: list[range] | None = None,
        first: np.ndarray | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """The sums (K,) of each of the shards `rows`, None for all, by a forward pass alone."""
        def run(engine, rows):
            return sum(
                loss_sums(engine, self.weights.config, self.weights, tokens[x], targets[x],
                          None if first is None else first[x])
                for x in slices(rows, self.pieces)
            )  # fmt: skip

        rows = shards_of(*tokens.shape) if rows is None else rows
        rounds = [rows[i : i + self.threads] for i in range(0, len(rows), self.threads)]
        return [x for each in rounds for x in self._map(run, self.engines, each)]

    def sums(
        self, tokens: np.ndarray, targets: np.ndarray, first: np.ndarray | None = None
    ) -> np.ndarray:
        """The sums (K,) in nats over tokens (B, T), targets (B, T, K): a forward pass alone."""
        return sum(self.shard_sums(tokens, targets, first=first))

    def _add_up(self, pairs):
        # Add to the first of each pair its second, in slices; return the second ones, now free.
        def add(start):
            piece = slice(start, start + SLICE)
            for total, part in pairs:
                np.add(total[piece], part.flat[piece], out=total[piece])

        self._map(add, range(0, self.gradients.flat.size, SLICE))
        return [part for _, part in pairs]

    def shard_gradients(
        self, tokens: np.ndarray, targets: np.ndarray, scale: np.ndarray,
        rows: list[range] | None = None, halvings: int = HALVINGS, first: np.ndarray | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Make `gradients` the sum of those of the shards `rows`; returns the sums (K,) of each.

        tokens (B, T), targets (B, T, K) int, scale (K,) of the loss; rows None: all shards.
        """
        assert self.optimizer is not None, "made without an optimizer, it has `sums` alone"
        rows = shards_of(*tokens.shape) if rows is None else rows
        sums, waiting, after = [], [], additions(len(rows), halvings)
        free = [self.gradients, *self.buffers]

        def run(engine, rows, part):
            part.flat[...] = 0
            return sum(
                loss_and_gradients(engine, part.config, self.weights, tokens[x], targets[x], scale,
                                   part, None if first is None else first[x])
                for x in slices(rows, self.pieces)
            )  # fmt: skip

        for i in range(0, len(rows), self.threads):
            now = slice(i, i + self.threads)
            while len(free) < len(rows[now]):
                self.buffers.append(self.weights.zeros_like())
                free.append(self.buffers[-1])
            parts = [free.pop(0) for _ in rows[now]]
            sums += self._map(run, self.engines, rows[now], parts)
            free += self._add_up([*_due(waiting, parts, after[now])])
        return sums

    def step(
        self, tokens: np.ndarray, targets: np.ndarray, lr: float, number: int,
        first: np.ndarray | None = None,
    ) -> list[Taken]:  # fmt: skip
        """One step: scale, gradients, clipping, update; it is known at once, and returned."""
        scale = loss_scale(targets, head_weights(self.weights.config.n_predict))
        sums = sum(self.shard_gradients(tokens, targets, scale, first=first))
        taken = Taken(number, sums, self.optimizer.clip(self.gradients))
        if taken.finite:
            self.optimizer.update(self.weights, self.gradients, lr, number)
        return [taken]


# %% sec-cpu-shards
def _due(waiting, parts, after):
    # Append each of the parts to the sums that wait, and after it yield the additions that follow:
    # (the sum that goes on, the newest one, which is added to it and whose memory is then free).
    for part, count in zip(parts, after, strict=True):
        waiting.append(part)
        for _ in range(count):
            newest = waiting.pop()
            yield waiting[-1].flat, newest
