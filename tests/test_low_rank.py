"""Products with a matrix of few rows: both kernels beside float64, all kinds of edges, mistakes.

What bf16 is rounded to is off by 2^-8 of it at most (half of its last place, of 8 bits), after sums
in float32, of which each of K or N terms adds at most 2^-24 of the sum of their sizes: bounds take
that sum once for every addition.
"""

from itertools import product

import numpy as np
import pytest
from mutants import Mutant, load, source
from tiers import kept, thinned

from nanoeuler.emulator import run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.errors import UserError

NAN = 0x7FC0  # of bf16
# Ranks P, rows N, columns of x, and of each part of dy: whole tiles; ranks that are no 16 and rows
# that are no 8; more columns than a step has; three A below each other; one adapter alone.
SIZES = [(16, 32, 64, (64,)), (8, 18, 72, (24, 136)), (24, 35, 64, (72, 8)),
         (16, 70, 136, (64, 8, 24)), (48, 5, 520, (16,))]  # fmt: skip


def matrix(rng, rows, columns, behind=8):
    """bf16 with nans behind each row, and below."""
    whole = np.full((rows + 2, columns + behind), NAN, np.uint16)
    whole[:rows, :columns] = to_bf16(rng.standard_normal((rows, columns)).astype(np.float32))
    return whole[:rows, :columns]


def real(bits):
    return from_bf16(bits).astype(np.float64)


class Problem:
    """Adapters of a matrix, of which those of dy leave its first eight columns out."""

    def __init__(self, P, N, inputs, widths, kernels=low_rank):
        rng, n = np.random.default_rng(0), len(widths)
        self.N, self.rng, self.kernels = N, rng, kernels
        self.parts = [kernels.Part(0, 0, inputs, 0, inputs, n * P, 0, n * P)]
        start, column = n * P * inputs, 8
        for i, wide in enumerate(widths):
            self.parts.append(
                kernels.Part(1, column, wide, start, wide, P, (n + i) * P, i * P))
            start, column = start + P * wide, column + wide
        self.how = kernels.plan_narrow(self.parts, start, (inputs, column))
        self.wide = matrix(rng, N, inputs), matrix(rng, N, column)
        self.w = matrix(rng, 1, start)[0]

    def places(self, flat):
        """Of each part: its matrix in a flat array, its X, its Y in `across`, and in `down`."""
        for part in self.parts:
            mine = flat[part.start : part.start + part.rows * part.pitch]
            x = self.wide[part.wide][:, part.column : part.column + part.columns]
            yield (mine.reshape(part.rows, part.pitch), x,
                   *(slice(row, row + part.rows) for row in (part.own, part.other)))

    def across(self, seed=1):
        """H, and the zeros behind it."""
        N, h = self.N, np.full((self.how.rows, low_rank.eights(self.N)), NAN, np.uint16)
        run(self.kernels.across_launch(self.how, self.w, self.wide, h), seed)
        for w, x, own, _ in self.places(self.w):
            exact, size = real(w) @ real(x).T, np.abs(real(w)) @ np.abs(real(x)).T
            most = 2.0**-8 * np.abs(exact) + x.shape[1] * 2.0**-24 * size
            assert (np.abs(real(h[own, :N]) - exact) <= most).all()
        assert not h[:, N:].any()
        return h

    def down(self, seed=1, add=False, multiprocessors=1):
        """G, stored or added to, in one piece or in several."""
        N, size = self.N, self.how.size
        h = np.ascontiguousarray(matrix(self.rng, self.how.rows, low_rank.eights(N), 0))
        h[:, N:] = NAN  # nobody says what stands there
        rng = np.random.default_rng(1)
        g = rng.standard_normal(size).astype(np.float32) if add else np.full(size, np.nan, "f4")
        before = g.copy() if add else np.zeros(size)
        shape = self.kernels.space_of(self.how, N, multiprocessors)
        space = np.full(shape, np.nan, np.float32) if shape[0] else None
        launches = self.kernels.down_launches(
            self.how, h, self.wide, g, space, multiprocessors, add)
        for launch in launches:
            run(launch, seed)
        for (made, x, _, y), (old, *_) in zip(self.places(g), self.places(before), strict=True):
            y = real(h[y, :N])
            exact, size = old + y @ real(x), np.abs(old) + np.abs(y) @ np.abs(real(x))
            assert (np.abs(made - exact) <= (N + 1) * 2.0**-24 * size).all()
        return g


@pytest.mark.parametrize("seeds", kept([[1], [1, 2]], [1]), ids=len)
@pytest.mark.parametrize("sizes", SIZES)
def test_across(sizes, seeds):
    assert len({Problem(*sizes).across(seed).tobytes() for seed in (None, *seeds)}) == 1


# Each size stored or added: where a sum goes doesn't depend on how many there are.
@pytest.mark.parametrize("sizes, add", kept(
    product(SIZES, (False, True)), *((sizes, i % 2 == 0) for i, sizes in enumerate(SIZES))
))  # fmt: skip
def test_down(sizes, add):
    assert len({Problem(*sizes).down(seed, add).tobytes() for seed in (None, 1)}) == 1


IN_PIECES = 8, 1100, 72, (64, 24)


@pytest.mark.parametrize("add", kept([False, True], True))
def test_down_in_pieces(add):
    problem = Problem(*IN_PIECES)
    assert low_rank.space_of(problem.how, 1100, 4) == (2, 16 * 72 + 8 * 88)
    problem.down(add=add, multiprocessors=4)


@pytest.mark.parametrize("lines, strips, multiprocessors", [
    (8192, 288, 132), (8192, 64, 132), (8192, 1, 132), (8192, 264, 132), (100, 1, 132),
    (4096, 96, 46)])  # fmt: skip
def test_pieces_fill_the_card(lines, strips, multiprocessors):
    """A launch's last round of blocks, two on each multiprocessor, is 0.85 full, or there
    are as many pieces as may be. One that is full leaves no reason to cut."""
    share, slots = low_rank.share_of(lines, strips, multiprocessors), 2 * multiprocessors
    pieces = -(-lines // share)
    assert share % (low_rank.WARPS * low_rank.SIDE) == 0
    blocks = strips * pieces
    assert blocks / slots / -(-blocks // slots) > 0.85 or lines < 2 * share or share <= (
        low_rank.LEAST + low_rank.WARPS * low_rank.SIDE)  # fmt: skip
    assert pieces == 1 or strips != slots


def test_x_and_dy_are_read_once():
    P, N, inputs, widths = 16, 64, 512, (256, 128)
    problem = Problem(P, N, inputs, widths)
    wide, blocks = N * (inputs + sum(widths)), N // low_rank.ACROSS
    h = np.zeros((4 * P, N), np.uint16)
    report = run(low_rank.across_launch(problem.how, problem.w, problem.wide, h))
    table = 32 * 32 * low_rank.WARPS  # a Part, read by each thread of a block
    asked = 2 * problem.how.size * blocks + 3 * blocks * table
    assert report["global loads bytes"] == 2 * wide + asked
    g = np.zeros(problem.how.size, np.float32)
    (launch,) = low_rank.down_launches(problem.how, h, problem.wide, g, None, 1, False)
    report = run(launch)
    of_y = 2 * N * (2 * P * inputs + P * sum(widths)) // low_rank.DOWN
    strips = (inputs + sum(widths)) // low_rank.DOWN
    assert report["global loads bytes"] == 2 * wide + of_y + strips * table
    assert report["global stores bytes"] == 4 * problem.how.size


MISTAKES = {
    "the second pair of W first": (
        "make_across_step", "of_w[low], of_w[high], of_w[low + 1], of_w[high + 1]",
        "of_w[low + 1], of_w[high], of_w[low], of_w[high + 1]"),
    "a row of X too many": ("make_across_step", "n < x.rows and", "n <= x.rows and"),
    "a row of W too many": ("make_across_step", "p < w.rows and", "p <= w.rows and"),
    "columns behind the row's end": ("make_across_step", "column < w.columns", "True"),
    "the first warp's sums alone": ("make_across_end", "range(WARPS)", "range(1)"),
    "no zeros behind Y": ("across_launch", "eights(lines), *map", "lines, *map"),
    "warps that take the same columns": ("across_kernel", "(t >> 5) * STEP", "0 * STEP"),
    "x in the place of dy": ("across_kernel", "if wide:", "if False:"),
    "the first columns of dy": ("across_kernel", "* pitch + column) * 2", "* pitch) * 2"),
    "the first part's W": ("across_kernel", "(int64(start) + k) * 2", "int64(k) * 2"),
    "all Y in one place": ("across_kernel", "int64(own) * pitches.h", "int64(0) * pitches.h"),
    "odd columns from the low half": ("make_down_step", "if j & 1:", "if False:"),
    "rows of Y in another order": (
        "make_down_step", "of_y[k], of_y[k + 2], of_y[k + 1]", "of_y[k], of_y[k + 1], of_y[k + 2]"),
    "what stands behind Y": ("load_pairs", "a if left > 1 else int32(a & 0xFFFF)", "a"),
    "what stands behind Y, of three": ("load_pairs", "b if left > 3 else", "b if left > 2 else"),
    "columns of the neighbor's": ("make_down_end", "(lane & 3) * 16 + j", "(lane & 3) * 8 + j"),
    "stored, not added": ("make_down_end", "if add:", "if False:"),
    "Y of the part's own": (
        "down_kernel", "int64(other) * pitches.h", "int64(strips * 0) * pitches.h"),
    "the next piece's rows": ("down_kernel", "min(counts.lines, (piece + 1) * share)",
                              "counts.lines"),
    "every piece in one place": ("down_kernel", "int64(piece) * counts.size",
                                "int64(0) * counts.size"),
    "every strip in one place": ("down_kernel", "counts.size + start) * 4", "counts.size) * 4"),
    "strips of the same columns": ("plan_narrow", "column=part.column + at", "column=part.column"),
}  # fmt: skip
MODULE = "engines.gpu.gemm.low_rank"


def test_all_mistakes_have_their_place():
    for what, (function, old, new) in MISTAKES.items():
        source(Mutant(MODULE, function, what, old, new))


@pytest.mark.parametrize("what", thinned(MISTAKES, 8))
def test_a_mistake_is_seen(what):
    function, old, new = MISTAKES[what]
    wrong = load(Mutant(MODULE, function, what, old, new))
    with pytest.raises(Exception):  # noqa: B017, PT011 a fault of the emulator, or of the numbers
        for sizes in SIZES[1:]:
            problem = Problem(*sizes, wrong)
            problem.across()
            problem.down(add=True)
        Problem(*IN_PIECES, wrong).down(multiprocessors=4)


@pytest.mark.parametrize("change, words", [
    ({"wide": 2}, "x or dy"), ({"rows": 56}, "1 to 48 rows"), ({"columns": 60}, "multiples of 8"),
    ({"start": 4}, "multiples of 8"), ({"column": 8}, "lies outside of"), ({"columns": 0}, "lies"),
    ({"other": 24}, "lies outside of"), ({"other": -8}, "lies outside of"),
    ({"own": 8}, "leave nothing out"), ({"start": 8}, "leave nothing out"),
    ({"rows": 8}, "outside|leave nothing out"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused(change, words):
    problem = Problem(8, 16, 64, (32, 32))
    parts = [problem.parts[0]._replace(**change), *problem.parts[1:]]
    with pytest.raises(UserError, match=words):
        low_rank.plan_narrow(parts, problem.how.size, (64, 72))


def test_arrays_that_do_not_fit_are_refused():
    problem = Problem(8, 16, 64, (32, 32))
    how, w, (x, dy) = problem.how, problem.w, problem.wide
    h, g = np.zeros((32, 16), np.uint16), np.zeros(how.size, np.float32)

    def across(w=w, x=x, dy=dy, h=h):
        return low_rank.across_launch(how, w, (x, dy), h)

    def down(g):
        return low_rank.down_launches(how, h, (x, dy), g, None, 1, False)

    for call, words in (
        (lambda: across(w=w[:-8]), "W or G is uint16"),
        (lambda: across(x=x[:, :56]), r"x is bf16 \(16, 64\)"),
        (lambda: across(dy=dy[:8]), r"dy is bf16 \(16, 72\)"),
        (lambda: across(x=x.astype(np.float32)), "not float32"),
        (lambda: across(h=h[:, :8]), "H is uint16"),
        (lambda: down(g.astype(float)), "float64"),
    ):
        with pytest.raises(UserError, match=words):
            call()
    problem = Problem(*IN_PIECES)
    h, g = np.zeros((32, 1104), np.uint16), np.zeros(problem.how.size, np.float32)
    with pytest.raises(UserError, match=r"pieces need float32 \(2, 1856\), not None"):
        low_rank.down_launches(problem.how, h, problem.wide, g, None, 4, False)
