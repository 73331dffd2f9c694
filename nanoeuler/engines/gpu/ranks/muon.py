# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-muon
"""Muon's part of a step over ranks: momentum and step in shards, Newton-Schulz of whole matrices.

Directions are gathered in bf16; of each shape every rank orthogonalizes as many matrices as the
others, and all gather the results. Left out: sending a direction only to who needs it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.ranks.buckets import Bucket
from nanoeuler.engines.gpu.ranks.exchange import Join, RankStepBuilder
from nanoeuler.engines.gpu.rows import adamw, muon
from nanoeuler.engines.gpu.rows.fill import clear_launch, clear_table
from nanoeuler.engines.gpu.step.muon import orthogonal
from nanoeuler.engines.gpu.step.precision import Precision
from nanoeuler.engines.gpu.step.program import Array
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS, Machine
from nanoeuler.model.config import ModelConfig


def dealt(matrices: Sequence[muon.Matrix], rank: int, size: int) -> list[muon.Matrix]:
    """A rank's share of matrices of one shape, as many as any other's: the last is repeated."""
    each = cover(len(matrices), size)
    places = range(rank * each, (rank + 1) * each)
    return [matrices[min(i, len(matrices) - 1)] for i in places]


def between(found: Sequence[muon.Stretch], start: int, stop: int) -> list[tuple[int, int]]:
    """(first, count) of what lies in no stretch, of the elements from start to stop."""
    ends = [start, *(end for _, end, _ in found)]
    heads = [*(first for first, _, _ in found), stop]
    return [(end, first - end) for end, first in zip(ends, heads, strict=True) if end < first]


class SharedMatrices:
    """Records the step of the matrices of `rules` among the launches of a builder.

    directions: uint16 (N,), of the arena, where the step's are, from `orthogonalize` on.
    """

    directions: Array

    def __init__(self, builder: RankStepBuilder, rules: muon.MuonRules) -> None:
        self.builder, self.rules = builder, rules
        recording, sharing = builder.recording, builder.sharing
        self.take = muon.Take(recording.constant, recording.take)
        self.stretches = muon.stretches(rules.matrices)
        self.buckets = [each for each in sharing.buckets if self.within(each.start, each.stop)]

    def within(self, start: int, stop: int) -> list[muon.Stretch]:
        """The stretches of matrices from start to stop of the flat buffers."""
        return muon.within(self.stretches, start, stop)

    def part(self, bucket: Bucket) -> slice:
        """This rank's part of a bucket, in the flat buffer."""
        return self.builder.sharing.part(bucket, self.builder.link.rank)

    def left(self, segments: list[adamw.Segment]) -> list[adamw.Segment]:
        """The segments that are AdamW's: a tensor is of matrices, or has none."""
        return [each for each in segments if not self.within(each.start, each.start + each.length)]

    def orthogonalize(self, decision: Array) -> None:
        """Momentum of this rank's parts, and the new directions of all matrices."""
        builder, length = self.builder, self.builder.length
        pairs = builder.recording.take((length // 2,), np.float32)
        bf16 = dict(shape=(length,), dtype=np.dtype(np.uint16), strides=(2,))
        self.directions = replace(pairs, **bf16)
        for bucket in self.buckets:
            self.momentum(bucket, decision, pairs)
            whole = self.directions[bucket.start : bucket.stop]
            args = self.directions[self.part(bucket)], whole
            builder.exchange("gather directions", "all-gather", *args)
        builder.recording.add("join", Join(builder.link))
        batches = [self.rounds(these) for these in muon.shapes(self.rules.matrices).values()]
        builder.recording.add("join", Join(builder.link))
        for these, whole, _ in batches:
            launch = muon.deliver_launch(these, whole, self.directions, self.take)
            builder.recording.add("deliver", launch)

    def momentum(self, bucket: Bucket, decision: Array, pairs: Array) -> None:
        """Momentum of this rank's part of a bucket; between its matrices, directions are 0."""
        builder, part = self.builder, self.part(bucket)
        found = self.within(part.start, part.stop)
        gaps = [((first - part.start) // 2, count // 2)
                for first, count in between(found, part.start, part.stop)]  # fmt: skip
        if gaps:
            these = pairs[part.start // 2 : part.stop // 2]
            table = builder.recording.constant(clear_table(gaps, these.shape[0]))
            builder.recording.add("clear", clear_launch(table, these))
        if found:
            tiles = muon.line_tiles(found, part.start)
            m = builder.shard(MOMENTS[0])[builder.sharing.held(bucket)]
            gradients = builder.entire(GRADIENTS)[part]
            buffers = adamw.Buffers(None, gradients, m, None, None)
            given = self.rules, tiles, buffers, decision, self.directions[part], self.take
            builder.recording.add("momentum", muon.line_momentum_launch(*given))

    def rounds(self, these: list[muon.Matrix]) -> tuple[list[muon.Matrix], Array, Array]:
        """Orthogonalize this rank's share of matrices of one shape, and gather all.

        Returns them, the batch (1, count, r, c) that begins with all of them once gathered, and the
        share, which must not be given back before.
        """
        builder, link, take = self.builder, self.builder.link, self.builder.recording.take
        mine = dealt(these, link.rank, link.size)
        count, (r, c) = len(mine), sorted(these[0][2:4])
        x, scales = take((1, count, r, c), np.uint16), take(muon.scales_shape(count), np.float32)
        launches = muon.collect_launches(mine, self.directions, x, scales, self.take)
        builder.recording.add("collect", launches)
        x = orthogonal(builder.engine, x, (scales[0, :count], scales[1, :count]), self.rules)
        whole = take((1, count * link.size, r, c), np.uint16)
        builder.exchange("gather matrices", "all-gather", x.reshape(-1), whole.reshape(-1))
        return these, whole, x

    def move(self, bucket: Bucket, decision: Array) -> None:
        """The step of the matrices in this rank's part of a bucket."""
        builder, part = self.builder, self.part(bucket)
        tiles = muon.line_tiles(self.within(part.start, part.stop), part.start)
        if len(tiles):
            copies = builder.copies[part] if builder.copied else builder.copies
            buffers = adamw.Buffers(builder.masters(bucket), None, None, None, copies)
            given = self.rules, tiles, buffers, decision, self.directions[part], self.take
            builder.recording.add("Muon", muon.line_move_launch(*given))


# %% sec-exchange-muon
def muon_rank_builder(
    config: ModelConfig, machine: Machine, precision: Precision, *, rules: muon.MuonRules,
    **how: Any,
) -> RankStepBuilder:  # fmt: skip
    """What records steps with Muon over ranks; how: as `RankStepBuilder` has it."""
    made = RankStepBuilder(config, machine, precision, **how)
    made.matrices = SharedMatrices(made, rules)
    return made
