"""Products with a matrix of few rows: both kernels beside float64, all kinds of edges, mistakes.

What bf16 is rounded to is off by 2^-8 of it at most (half of its last place, of 8 bits), after sums
in float32, of which each of K or N terms adds at most 2^-24 of the sum of their sizes: bounds take
that sum once for every addition.
"""

import numpy as np
import pytest
from mutants import Mutant, load, source
from tiers import thinned

from nanoeuler.emulator import run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import low_rank
from nanoeuler.errors import UserError

NAN = 0x7FC0  # of bf16
# P, N, K: whole tiles, ranks that are no 16, rows that are no 8, and more columns than a step has.
SIZES = [(16, 32, 64), (8, 18, 72), (24, 35, 64), (48, 70, 136), (16, 5, 520)]


def matrix(rng, rows, columns, behind=8):
    """bf16 with nans behind each row, and below."""
    whole = np.full((rows + 2, columns + behind), NAN, np.uint16)
    whole[:rows, :columns] = to_bf16(rng.standard_normal((rows, columns)).astype(np.float32))
    return whole[:rows, :columns]


def real(bits):
    return from_bf16(bits).astype(np.float64)


def check_across(kernels, P, N, K, seed=1):
    """Y, and the zeros behind it."""
    rng = np.random.default_rng(0)
    w, x = matrix(rng, P, K), matrix(rng, N, K)
    y = np.full((P, low_rank.eights(N)), NAN, np.uint16)
    run(kernels.across_launch(w, x, y), seed)
    exact, size = real(w) @ real(x).T, np.abs(real(w)) @ np.abs(real(x)).T
    assert (np.abs(real(y[:, :N]) - exact) <= 2.0**-8 * np.abs(exact) + K * 2.0**-24 * size).all()
    assert not y[:, N:].any()
    return y


def check_down(kernels, P, N, K, seed=1, add=False, multiprocessors=1):
    """G, stored or added to, in one piece or in several."""
    rng = np.random.default_rng(0)
    y, x = matrix(rng, P, low_rank.eights(N), 0), matrix(rng, N, K)
    y[:, N:] = NAN  # nobody says what stands there
    g = rng.standard_normal((P, K)).astype(np.float32) if add else np.full((P, K), np.nan, "f4")
    before = g.copy() if add else 0
    shape = kernels.space_of(P, N, K, multiprocessors)
    space = np.full(shape, np.nan, np.float32) if shape[0] else None
    for launch in kernels.down_launches(y, x, g, space, multiprocessors, add):
        run(launch, seed)
    exact, size = before + real(y[:, :N]) @ real(x), np.abs(before) + np.abs(real(y[:, :N])) @ (
        np.abs(real(x)))  # fmt: skip
    assert (np.abs(g - exact) <= (N + 1) * 2.0**-24 * size).all()
    return g


@pytest.mark.parametrize("sizes", SIZES)
def test_across(sizes):
    assert len({check_across(low_rank, *sizes, seed).tobytes() for seed in (None, 1, 2)}) == 1


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_down(sizes, add):
    assert len({check_down(low_rank, *sizes, seed, add).tobytes() for seed in (None, 1)}) == 1


@pytest.mark.parametrize("add", [False, True])
def test_down_in_pieces(add):
    sizes = 24, 1100, 72
    assert low_rank.space_of(*sizes, 4) == (2 * 24, 72)
    check_down(low_rank, *sizes, add=add, multiprocessors=4)


def test_x_is_read_once():
    P, N, K = 16, 64, 512
    rng = np.random.default_rng(0)
    w, x, y = matrix(rng, P, K, 0), matrix(rng, N, K, 0), np.zeros((P, N), np.uint16)
    report = run(low_rank.across_launch(w, x, y))
    blocks = N // low_rank.ACROSS
    assert report["global loads bytes"] == 2 * N * K + 2 * P * K * blocks
    g = np.zeros((P, K), np.float32)
    (launch,) = low_rank.down_launches(y, x, g, None, 1, False)
    report = run(launch)
    assert report["global loads bytes"] == 2 * N * K + 2 * P * N * (K // low_rank.DOWN)
    assert report["global stores bytes"] == 4 * P * K


MISTAKES = {
    "the second pair of W first": (
        "make_across_step", "of_w[low], of_w[high], of_w[low + 1], of_w[high + 1]",
        "of_w[low + 1], of_w[high], of_w[low], of_w[high + 1]"),
    "a row of X too many": ("make_across_step", "n < x.rows and", "n <= x.rows and"),
    "a row of W too many": ("make_across_step", "p < w.rows and", "p <= w.rows and"),
    "columns behind the row's end": ("make_across_step", "column < w.columns", "True"),
    "the first warp's sums alone": ("make_across_end", "range(WARPS)", "range(1)"),
    "no zeros behind Y": ("across_launch", "eights(lines), columns", "lines, columns"),
    "warps that take the same columns": ("across_kernel", "(t >> 5) * STEP", "0 * STEP"),
    "odd columns from the low half": ("make_down_step", "if j & 1:", "if False:"),
    "rows of Y in another order": (
        "make_down_step", "of_y[k], of_y[k + 2], of_y[k + 1]", "of_y[k], of_y[k + 1], of_y[k + 2]"),
    "what stands behind Y": ("load_pairs", "a if left > 1 else int32(a & 0xFFFF)", "a"),
    "what stands behind Y, of three": ("load_pairs", "b if left > 3 else", "b if left > 2 else"),
    "columns of the neighbor's": ("make_down_end", "(lane & 3) * 16 + j", "(lane & 3) * 8 + j"),
    "stored, not added": ("make_down_end", "if add:", "if False:"),
    "the next piece's rows": ("down_kernel", "min(lines, (piece + 1) * share)", "lines"),
    "every piece in one place": ("down_kernel", "int64(piece) * rows", "int64(0) * rows"),
}  # fmt: skip
MODULE = "engines.gpu.gemm.low_rank"


def test_all_mistakes_have_their_place():
    for what, (function, old, new) in MISTAKES.items():
        source(Mutant(MODULE, function, what, old, new))


@pytest.mark.parametrize("what", thinned(MISTAKES))
def test_a_mistake_is_seen(what):
    function, old, new = MISTAKES[what]
    wrong = load(Mutant(MODULE, function, what, old, new))
    with pytest.raises(Exception):  # noqa: B017, PT011 a fault of the emulator, or of the numbers
        for sizes in SIZES[1:]:
            check_across(wrong, *sizes)
            check_down(wrong, *sizes, add=True)
        check_down(wrong, 24, 1100, 72, multiprocessors=4)


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(0)
    w, x, y = matrix(rng, 8, 64), matrix(rng, 16, 64), np.zeros((8, 16), np.uint16)
    g, wide = np.zeros((8, 64), np.float32), matrix(rng, 56, 64)
    for call, words in (
        (lambda: low_rank.across_launch(wide, x, y), "1 to 48 rows"),
        (lambda: low_rank.across_launch(w[:, :60], x[:, :60], y), "a multiple of 8 columns"),
        (lambda: low_rank.across_launch(w, x, y[:, :8]), r"not .*\(8, 8\)"),
        (lambda: low_rank.across_launch(w.astype(np.float32), x, y), "are bf16"),
        (lambda: low_rank.down_launches(y, x, g[:4], None, 1, False), r"\(4, 64\)"),
        (lambda: low_rank.down_launches(y, x, g.astype(float), None, 1, False), "float64"),
        (lambda: low_rank.down_launches(np.zeros((8, 2048), np.uint16), matrix(rng, 2048, 64), g,
                                        None, 8, False), "pieces need float32"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            call()
