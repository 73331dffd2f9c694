# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-list
"""A step over ranks, recorded: what is exchanged when, and who updates what. Nothing here runs.

Each rank records the same list for its own sequences. Gradients are reduced bucket by bucket beside
the backward pass; each rank updates its parts, and all gather what they multiply with. Left out:
who carries it (nccl.py, peer_copies.py, collectives.py). R ranks, K predicted tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.ranks.buckets import LEAST, Bucket, Sharing, names_of, padded
from nanoeuler.engines.gpu.rows import adamw, gradient_norm
from nanoeuler.engines.gpu.rows.residual_norm import add_scaled_launch
from nanoeuler.engines.gpu.step.engine import CudaEngine
from nanoeuler.engines.gpu.step.precision import COPIES, WEIGHTS, Precision
from nanoeuler.engines.gpu.step.program import Array, Excerpt
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS, Machine, ProgramBuilder, Rules
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights, flat_size

# Blocks that add up the squares of one bucket's part: two for each multiprocessor of an H200:
# a limit, since one block adds up what all these leave.
NORM_BLOCKS = 264
TOGETHER = 4  # buckets of copies in an exchange, since each has some microseconds of its own
ATTENTION, ONCE, AFTER = "beside attention", "at once", "after"  # when a bucket travels
NEVER = 1 << 30  # more than any block's number
MASTERS = "masters"  # memory: this rank's shard of float32 weights, where products read copies


class Link(Protocol):
    """What carries exchanges between this rank and the others."""

    rank: int
    size: int
    copies: bool  # whether gradients are handed over, and added by who gets them

    def exchange(self, work: "Exchange") -> Callable[..., None]:
        """A function of a stream that begins an exchange, after what the stream has so far."""

    def join(self) -> Callable[..., None]:
        """A function of a stream that has it wait for all exchanges that were begun."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """Work of a list that all ranks do together, beside what follows.

    kind: "reduce-scatter" of args (from, to), or "all-gather" of one or more such pairs: the
    longer is R times the shorter and may contain it, as in NCCL; "hand over" of (from, to),
    where to receives what the R - 1 others have for this rank, in their order; or "broadcast"
    of pairs of equal size: only the from of each one's rank in `roots` counts.
    """

    kind: str
    args: tuple[Any, ...]
    link: Any
    roots: tuple[int, ...] = ()

    def prepare(self, device: Any) -> Callable[..., None]:
        """A function of a stream that begins the exchange there, by its link."""
        return self.link.exchange(self)

    def pairs(self) -> list[tuple[Any, Any]]:
        """The args as (from, to)."""
        return list(zip(self.args[::2], self.args[1::2], strict=True))


@dataclass(frozen=True, eq=False)
class Join:
    """Work of a list after which all exchanges before it are done."""

    link: Any
    args: tuple[Any, ...] = ()

    def prepare(self, device: Any) -> Callable[..., None]:
        """A function of a stream that waits there for all exchanges before it."""
        return self.link.join()


class RankEngine(CudaEngine):
    """Calls `on_complete` when gradients are complete but for sums that wait: see `flush`.

    left: passes that are still to begin; only in the last are gradients complete.
    before_attention: called before the launches of each backward of attention.
    """

    left, due = 1, -1
    on_complete: Callable[[int], None]
    before_attention: Callable[[], None]

    def begin(self) -> None:
        super().begin()
        self.left -= 1

    def ready(self, i: int) -> None:
        """Note that gradients from block i on are complete once what is pending is launched."""
        self.due = -1 if self.left else i

    def flush_norm(self, dmoved: Array | None = None) -> None:
        """Launch the pending norm's sums; then tell of the gradients that were said to be ready."""
        due, self.due = self.due, -1
        super().flush_norm(dmoved)
        if due >= 0:
            self.on_complete(due)

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Any, first: Any = None, rope: Any = None
    ) -> Array:
        self.before_attention()
        return super().attention_backward(dy, heads, n_kv, p, first, rope)


# %% sec-exchange-update
class RankBuilder(ProgramBuilder):
    """Records for a rank: where it reads weights, and how long the ranks' flat buffers are.

    If products read copies, masters are in shards. flat: the weights, padded where products read
    float32.
    """

    def __init__(
        self, config: ModelConfig, machine: Machine, precision: Precision, link: Link,
        least: int = LEAST,
    ) -> None:  # fmt: skip
        self.link, self.length = link, padded(flat_size(config), link.size)
        self.sharing = Sharing(names_of(config), link.size, least)
        super().__init__(config, machine, precision)
        if self.copied:
            self.copies = self.recording.whole(COPIES, (self.length,), np.uint16)

    def read(self) -> Weights:
        if not self.copied:
            self.flat = self.entire(WEIGHTS)
            return super().read()
        size = sum(stop - start for start, stop in self.sharing.read)
        there = self.recording.whole(WEIGHTS, (size,), np.float32)
        self.flat = Excerpt(flat_size(self.config), there, self.sharing.read)
        return Weights(self.config, np.float32, self.flat)

    def entire(self, memory: str) -> Array:
        """A flat buffer with its padding."""
        return self.recording.whole(memory, (self.length,), np.float32)

    def whole(self, memory: str) -> Array:
        """A flat buffer (N,)."""
        return self.entire(memory)[: flat_size(self.config)]

    def shard(self, memory: str) -> Array:
        """What a rank has of something in shards."""
        return self.recording.whole(memory, (self.length // self.link.size,), np.float32)

    def memories(self, weights: Weights) -> dict[str, np.ndarray]:
        """What this rank's memories of weights hold; of masters its shard, if copies are read."""
        made, sharing = ProgramBuilder.memories(self, weights), self.sharing
        whole = sharing.pad(made[WEIGHTS])
        if not self.copied:
            return made | {WEIGHTS: whole}
        read = np.concatenate([whole[slice(*span)] for span in sharing.read])
        shard = sharing.shard(weights.flat, self.link.rank)
        return {WEIGHTS: read, COPIES: sharing.pad(made[COPIES]), MASTERS: shard}


# %% sec-exchange-update
class RankStepBuilder(RankBuilder):
    """Records a training step over ranks, with its exchanges and joins.

    when: complete buckets travel beside the next backward of attention, at once, or
    after the backward pass. matrices: what records the step of those that aren't AdamW's (muon.py).
    """

    engine_type = RankEngine
    matrices: Any = None

    def __init__(
        self, config: ModelConfig, machine: Machine, precision: Precision, link: Link,
        when: str = ATTENTION, least: int = LEAST,
    ) -> None:  # fmt: skip
        super().__init__(config, machine, precision, link, least)
        self.when, self.complete_from = when, NEVER
        self.engine.on_complete = self.complete
        self.engine.before_attention = self.reduce_complete if when == ATTENTION else lambda: None
        self.waiting = list(self.sharing.buckets)  # buckets that nobody has reduced
        self.received: list[tuple[slice, Array]] = []  # parts, and what others have for them

    def exchange(self, name: str, kind: str, *args: Array, roots: tuple[int, ...] = ()) -> None:
        """Write an exchange down."""
        self.recording.add(name, Exchange(kind, args, self.link, roots))

    def loss_sums(self, pieces: int) -> Array:
        """Where this rank's sums of losses go, among those of all ranks."""
        self.engine.left = pieces
        all_of_them = RankBuilder.loss_sums(self, pieces * self.link.size)
        return all_of_them[self.link.rank * pieces : (self.link.rank + 1) * pieces]

    def complete(self, block: int) -> None:
        """Hear that the gradients from this block on are on the list, but for sums that wait."""
        self.complete_from = block
        if self.when == ONCE:
            self.reduce_complete()

    def reduce_complete(self) -> None:
        """Reduce those buckets that are complete."""
        while self.waiting and self.waiting[0].block >= self.complete_from:
            self.engine.flush()
            self.reduce(self.waiting.pop(0))

    def reduce(self, bucket: Bucket) -> None:
        """Sum a bucket's gradients over all ranks, each its own part, in place."""
        flat, part = self.entire(GRADIENTS), self.sharing.part(bucket, self.link.rank)
        mine, whole = flat[part], flat[bucket.start : bucket.stop]
        if not self.link.copies:
            self.exchange("reduce", "reduce-scatter", whole, mine)
            return
        space = self.recording.take(((self.link.size - 1) * mine.shape[0],), np.float32)
        self.exchange("reduce", "hand over", whole, space)
        self.received.append((part, space))

    def add_received(self) -> None:
        """Add what was handed over, in the order of ranks, and give its memory back."""
        flat = self.entire(GRADIENTS)
        for part, space in self.received:
            mine, each = flat[part], part.stop - part.start
            for at in range(0, space.shape[0], each):
                launch = add_scaled_launch(mine, space[at : at + each], 1.0, mine)
                self.recording.add("add parts", launch)
        self.received = []

    def reduce_rest(self, losses: Array) -> None:
        """Gather the losses, reduce what is left, and wait for all of it."""
        whole = self.results["sums"].reshape(-1)
        self.exchange("gather losses", "all-gather", losses, whole)
        for bucket in self.waiting:
            self.reduce(bucket)
        self.recording.add("join", Join(self.link))
        self.add_received()

    def decide(self, limit: float) -> Array:
        """The decision (8,): see `gradient_norm.decide`."""
        flat, rank, add = self.entire(GRADIENTS), self.link.rank, self.recording.add
        parts = [flat[self.sharing.part(bucket, rank)] for bucket in self.sharing.buckets]
        grids = [min(NORM_BLOCKS, gradient_norm.blocks_for(part.shape[0])) for part in parts]
        each = sum(grids)
        partials = self.recording.take((each * self.link.size,), np.float32)
        mine = at = each * rank
        for part, blocks in zip(parts, grids, strict=True):
            args = part, partials[at : at + blocks], part.shape[0] // adamw.LANE
            add("norm of gradients", Launch(gradient_norm.ADD_SQUARES, (blocks,), args))
            at += blocks
        self.exchange("gather norms", "all-gather", partials[mine:at], partials)
        add("join", Join(self.link))
        losses, rates = self.results["sums"].reshape(-1), self.input("rates", (1, 4), np.float32)
        number = self.recording.whole("number", (1,), np.int32)
        decision, count = self.result("decision", (8,)), partials.shape[0]
        sums = partials, count, losses, losses.shape[0]
        args = *sums, rates, 1, number, float(limit), decision
        add("norm of gradients", Launch(gradient_norm.DECIDE, (1,), args))
        return decision

    def masters(self, bucket: Bucket) -> Array:
        """What this rank updates of a bucket's weights."""
        if self.copied:
            return self.shard(MASTERS)[self.sharing.held(bucket)]
        return self.flat[self.sharing.part(bucket, self.link.rank)]

    def gather_updated(self, buckets: list[Bucket]) -> None:
        """Gather what all ranks read of buckets: copies, and in float32 what is read so."""
        if self.copied:
            parts = (self.sharing.part(bucket, self.link.rank) for bucket in buckets)
            self.gather("gather copies", self.copies, buckets, [self.copies[x] for x in parts])
        read = [bucket for bucket in buckets if not self.copied or bucket.block < 0]
        if read:
            self.gather("gather weights", self.flat, read, [self.masters(x) for x in read])

    def gather(self, name: str, flat: Any, buckets: list[Bucket], parts: list[Array]) -> None:
        """Have buckets of a flat buffer gathered from all ranks' parts of them."""
        wholes = (flat[bucket.start : bucket.stop] for bucket in buckets)
        ends = chain.from_iterable(zip(parts, wholes, strict=True))
        self.exchange(name, "all-gather", *ends)

    def broadcast_norms(self) -> None:
        """Broadcast the vectors of norms, which are read in float32, each piece by its owner."""
        ends, roots, masters = [], [], self.shard(MASTERS)
        for span in self.sharing.read[1:]:
            for first, last, root, held in self.sharing.pieces(*span):
                to = self.flat[first:last]
                mine = masters[held : held + last - first]
                ends += [mine if root == self.link.rank else to, to]
                roots.append(root)
        self.exchange("spread norms", "broadcast", *ends, roots=tuple(roots))

    def update(self, flat: Array, losses: Array, rules: Rules) -> None:
        """Launch the optimizer on this rank's parts; then all gather the weights that they read."""
        self.reduce_rest(losses)
        decision = self.decide(rules.clip_norm)
        if self.matrices:
            self.matrices.orthogonalize(decision)
        tables, *blocks = reversed(self.sharing.buckets)
        starts = range(0, len(blocks), TOGETHER)
        for some in [tables], *(blocks[at : at + TOGETHER] for at in starts):
            for bucket in some:
                self.adamw(bucket, decision, rules)
                if self.matrices:
                    self.matrices.move(bucket, decision)
            self.gather_updated(some)
        if self.copied:
            self.broadcast_norms()
        self.recording.add("join", Join(self.link))

    def adamw(self, bucket: Bucket, decision: Array, rules: Rules) -> None:
        """Update this rank's part of a bucket, as far as it is AdamW's."""
        part, held = self.sharing.part(bucket, self.link.rank), self.sharing.held(bucket)
        segments = adamw.segments(self.weights)
        if self.matrices:
            segments = self.matrices.left(segments)
        tiles = tiles_of(segments, part.start, part.stop, self.copied)
        if not len(tiles):
            return  # padding, or matrices of another optimizer
        moments = (self.shard(name)[held] for name in MOMENTS)
        copies = self.copies[part] if self.copied else self.copies
        gradients = self.entire(GRADIENTS)[part]
        buffers = adamw.Buffers(self.masters(bucket), gradients, *moments, copies)
        table = self.recording.constant(tiles)
        given = table, decision, buffers, rules.beta1, rules.beta2, rules.eps
        self.recording.add("AdamW", adamw.adamw_launch(*given))


# %% sec-exchange-update
def tiles_of(parts: list[adamw.Segment], start: int, stop: int, copied: bool) -> np.ndarray:
    """The tiles of what segments have between start and stop, counted from start."""
    made = []
    for part in parts:
        first, last = max(start, part.start), min(stop, part.start + part.length)
        if first < last:
            to = first - start if copied and part.copy >= 0 else -1
            made.append(adamw.Segment(first - start, last - first, part.decay, to))
    return adamw.tiles(made)
