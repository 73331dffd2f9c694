# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""A batch over the cores: a fixed number of shards on a pool of threads, one engine to a thread.

Results depend on the number of shards, which is fixed, and never on the number of threads. Leaves
out more than one process: the kernels hold no GIL, so threads are enough.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from nanoeuler.engines import reference
from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine
from nanoeuler.errors import UserError
from nanoeuler.model.transformer import forward, loss_and_gradients

# Shards of a batch, on any machine: a float sum knows its order, so the order must not change.
SHARDS = 4
# Elements of a gradient that a thread adds up at a time: 256 KiB, a part of any level 2 cache.
SLICE = 1 << 16
# The engines by name: each entry makes one.
ENGINES = {"reference": lambda: reference, "fused": FusedEngine, "cpu": CpuEngine}


def engine_factory(name):
    """The function that makes engines of this name; "auto" is the fastest that runs everywhere."""
    name = "cpu" if name == "auto" else name
    if name not in ENGINES:
        raise UserError(f"unknown engine {name!r}: choose auto, {', '.join(ENGINES)}")
    return ENGINES[name]


def cores():
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cut(rows, parts):
    # A range in at most `parts` ranges of nearly equal length, none of them empty.
    parts = min(parts, len(rows))
    return [rows[len(rows) * i // parts : len(rows) * (i + 1) // parts] for i in range(parts)]


class Sharded:
    """Loss and gradients of batches of one `config`, by engines of one kind on `threads` threads.

    `make_engine` as from `engine_factory`; `threads` by default one per core, at most SHARDS. Each
    shard goes through an engine's memory in `pieces` parts, if it has so many sequences.
    """

    def __init__(self, make_engine, config, threads=None, pieces=1):
        self.config, self.pieces = config, pieces
        self.threads = threads or min(cores(), SHARDS)
        self.pool = ThreadPoolExecutor(self.threads)
        self.engines, self.parts = SimpleQueue(), []
        for _ in range(self.threads):
            self.engines.put(make_engine())

    def _over_shards(self, batch, work):
        # work(engine, rows, shard) for each piece of each shard of `batch` sequences; the sum.
        def run(shard, rows):
            engine = self.engines.get()
            try:
                pieces = _cut(rows, self.pieces)
                return sum(work(engine, slice(x.start, x.stop), shard) for x in pieces)
            finally:
                self.engines.put(engine)

        return sum(self.pool.map(run, range(SHARDS), _cut(range(batch), SHARDS)))

    def loss_and_gradients(self, w, tokens, targets, scale, dw):
        """As `model.loss_and_gradients`, but dw (Weights) is overwritten. Returns sums (K,)."""
        used = min(SHARDS, len(tokens)) - 1
        while len(self.parts) < used:
            self.parts.append(dw.zeros_like())
        parts = [dw, *self.parts[:used]]
        for part in parts:
            part.flat[...] = 0

        def run(engine, rows, shard):
            return loss_and_gradients(
                engine, self.config, w, tokens[rows], targets[rows], scale, parts[shard]
            )

        def add_up(start):
            piece = slice(start, start + SLICE)
            for part in parts[1:]:  # in this order, whoever computed them
                np.add(dw.flat[piece], part.flat[piece], out=dw.flat[piece])

        sums = self._over_shards(len(tokens), run)
        list(self.pool.map(add_up, range(0, dw.flat.size, SLICE)))
        return sums

    def loss(self, w, tokens, targets, scale):
        """The sums (K,) of `loss_and_gradients`, by a forward pass alone."""

        def run(engine, rows, shard):
            engine.begin()
            logits, _ = forward(engine, self.config, w, tokens[rows])
            return engine.cross_entropy(logits, targets[rows], scale)[0]

        return self._over_shards(len(tokens), run)
