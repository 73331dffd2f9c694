# Made from book/11b-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-plan
"""Who multiplies what: work lists for the matrix products, made on the host.

A cluster of blocks owns a list of items, each a tile of C and a range of its k-blocks. Letters: a
product is C (m, n) over k; a cluster's tile has `rows` by `columns` elements, a k-block TILE_K.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nanoeuler.engines.gpu.lang.kernel import cover

TILE_K = 64        # elements of k in a block: 128 bytes of bf16, the width of a swizzled row
GROUP = 8          # row tiles that go together: 66 tiles then read 8 stripes and 9, chapter 11b
EPILOGUE = 4       # k-blocks: what a cluster's second piece costs beside its own k-blocks, about
SPARES = 2         # items after the last, for a consumer that reads one or two ahead


class Item(NamedTuple):
    """k-blocks first to end of tile (x, y); slot: where the piece waits for its sum, -1: whole."""

    x: int
    y: int
    first: int
    end: int
    slot: int = -1


class Sum(NamedTuple):
    """A strip (64 rows of 128 bytes) of tile (x, y) that is the sum of pieces: in block `rank`, in
    its upper 64 rows or the lower (half), the strip-th from the left."""

    x: int
    y: int
    rank: int
    half: int
    strip: int
    slot: int
    pieces: int


def table(parts: Iterable[Sequence[int]], width: int) -> np.ndarray:
    """Tuples of `width` numbers as int32 (count, width)."""
    return np.array(list(parts), np.int32).reshape(-1, width)


@dataclass(frozen=True, eq=False)
class Plan:
    """items: one table a cluster, rows as in `Item`; sums: one a warpgroup that multiplies, rows as
    in `Sum`; slots: places for pieces."""

    items: list[np.ndarray]
    sums: list[np.ndarray]
    slots: int

    @property
    def load(self) -> int:
        """The largest number of k-blocks that a cluster has: what the product waits for."""
        return max(int((own[:, 3] - own[:, 2]).sum()) for own in self.items)

    @cached_property
    def words(self) -> np.ndarray:
        """The lists as the kernels read them, int32 (n, 4); one array, however often it is asked.

        Row c: where the items of cluster c begin and end; row clusters + w: the same of the sums of
        warpgroup w; then items (x, y, first | end << 16, slot), sums (x, y, rank << 8 |
        half << 4 | strip, slot | pieces << 16), and spares.
        """
        lengths = [len(own) for own in (*self.items, *self.sums)]
        ends = len(lengths) + np.cumsum(lengths)
        words = np.zeros((ends[-1] + SPARES, 4), np.int32)
        words[: len(ends), 0], words[: len(ends), 1] = ends - lengths, ends
        x, y, first, end, slot = np.concatenate(self.items).T
        items = np.stack([x, y, first | end << 16, slot], 1)
        none = table((), len(Sum._fields))
        x, y, rank, half, strip, slot, pieces = np.concatenate([none, *self.sums]).T
        sums = np.stack([x, y, rank << 8 | half << 4 | strip, slot | pieces << 16], 1)
        words[len(lengths) : -SPARES] = np.concatenate([items, sums])
        words.setflags(write=False)
        return words


def tiles(m: int, n: int, rows: int, columns: int, group: int = GROUP) -> np.ndarray:
    """All tiles (x, y) of C, (count, 2), `group` rows of tiles at a time and down the rows first.

    Tiles that are worked on at the same time are neighbours in this order, and share what they
    read: a group of 8 by 8 tiles reads 8 stripes of A and 8 of B, not 64 and 1.
    """
    x, y = np.indices((cover(m, rows), cover(n, columns)), np.int32).reshape(2, -1)
    return np.stack([x, y], 1)[np.lexsort((x, y, x // group))]  # the last key counts first


def whole(order: np.ndarray, k_blocks: int, clusters: int) -> Plan:
    """Whole tiles of `k_blocks`, dealt to the clusters in turn."""
    items = np.empty((len(order), 5), np.int32)
    items[:, :2], items[:, 2:] = order, (0, k_blocks, -1)
    return Plan([items[c::clusters] for c in range(min(clusters, len(order)))], [], 0)


# %% sec-gemm-pieces
def level(order: np.ndarray, k_blocks: int, clusters: int) -> list[list[Item]]:
    """Every cluster gets the same number of k-blocks, or one more; slots are not given yet.

    Clusters take equal ranges of different tiles at the same k, so that together they read each
    part of A and B once, then the ranges that are left over.
    """
    total = len(order) * k_blocks
    room = [(c + 1) * total // clusters - c * total // clusters for c in range(clusters)]
    done, lists = [0] * len(order), [[] for _ in range(clusters)]
    todo = list(range(len(order)))  # tiles with something left, those with least done first
    while todo:
        rest, free = [], [c for c in range(clusters) if room[c]]
        for c, i in zip(free, todo, strict=False):
            take = min(room[c], k_blocks - done[i])
            lists[c].append(Item(*order[i], done[i], done[i] + take))
            room[c] -= take
            done[i] += take
            if done[i] < k_blocks:
                rest.append(i)
        todo = todo[len(free) :] + rest
    return [own for own in lists if own]


def longest(lists: list[list[Item]]) -> int:
    """The largest number of k-blocks on a list."""
    return max(sum(item.end - item.first for item in own) for own in lists)


def even(order: np.ndarray, k_blocks: int, clusters: int) -> list[list[Item]]:
    """Each tile in the same number of pieces, as many as there are clusters for, one a cluster."""
    pieces = max(1, min(k_blocks, clusters // len(order)))
    cuts = [i * k_blocks // pieces for i in range(pieces + 1)]
    return [[Item(*tile, cuts[i], cuts[i + 1])] for i in range(pieces) for tile in order]


def slotted(lists: list[list[Item]], k_blocks: int) -> tuple[list[list[Item]], dict]:
    """Items with slots, a tile's pieces in the order of k; tile -> (its first slot, pieces)."""
    pieces: dict[tuple[int, int], list[int]] = {}
    for item in (item for own in lists for item in own):
        if item.end - item.first < k_blocks:
            pieces.setdefault((item.x, item.y), []).append(item.first)
    slots, start = {}, 0
    for tile, firsts in pieces.items():
        slots[tile] = start, len(firsts)
        start += len(firsts)

    def place(item: Item) -> Item:
        tile = item.x, item.y
        if tile not in slots:
            return item
        slot = slots[tile][0] + sorted(pieces[tile]).index(item.first)
        return Item(item.x, item.y, item.first, item.end, slot)

    return [[place(item) for item in own] for own in lists], slots


def split(
    order: np.ndarray, k_blocks: int, clusters: int, cluster: int, strips: int,
    cut: str = "best",
) -> Plan:  # fmt: skip
    """Tiles cut along k; the pieces wait in slots, and each strip is summed in the order of k.

    cut: "level", "even", or "best": the one with the lesser load, or "even" if they are within
    EPILOGUE. Half a tile has `strips`; each is summed by one warpgroup, and which does not matter.
    """
    choices = {"level": level(order, k_blocks, clusters)}
    if len(order) * 2 <= clusters:
        choices["even"] = even(order, k_blocks, clusters)
    if cut == "best":
        cost = {name: longest(lists) for name, lists in choices.items()}
        cost["level"] += EPILOGUE
        cut = min(cost, key=cost.get)
    lists, slots = slotted(choices.get(cut, choices["level"]), k_blocks)
    tasks = [
        Sum(x, y, rank, half, strip, first, pieces)
        for (x, y), (first, pieces) in slots.items()
        for strip in range(strips)
        for half in range(2)
        for rank in range(cluster)
    ]
    workers, count = len(lists) * cluster * 2, sum(pieces for _, pieces in slots.values())
    sums = table(tasks, len(Sum._fields))
    items = [table(own, len(Item._fields)) for own in lists]
    return Plan(items, [sums[w::workers] for w in range(workers)], count)
