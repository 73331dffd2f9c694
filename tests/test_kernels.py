"""The kernels of chapter 7 against float64 NumPy: edges, magnitudes, counts, and mutants.

Every bound is derived: u = 2^-24 is the relative error of one float32 rounding, and an error may be
at most u times the number of roundings on the way to a result, times the size of what was rounded.
"""

import itertools

import numpy as np
import pytest
from mutants import Mutant, load

from nanoeuler.engines.gpu import ladder
from nanoeuler.engines.gpu.door import SIMULATED, Counted, blocks
from nanoeuler.model import layers

U = 2.0**-24
simulated = pytest.mark.skipif(not SIMULATED, reason="only a simulated kernel can be counted")


def random(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def unwritten(*shape):
    return np.full(shape, np.nan, np.float32)  # what a kernel forgets to write fails every bound


def product_error(module, a, b, tile):
    """The largest error of a product as a fraction of its bound, K + 1 roundings of |a||b|."""
    c = unwritten(a.shape[0], b.shape[1])
    module.matmul(a, b, c, tile)
    a, b = a.astype(float), b.astype(float)
    bound = (a.shape[1] + 1) * U * (np.abs(a) @ np.abs(b))
    return np.max(np.abs(c - a @ b) / np.where(bound > 0, bound, U))


def rmsnorm_error(module, x, gain, threads):
    """As above: C + 1 roundings in the sum, halved by the root, and five more."""
    y, r = unwritten(*x.shape), unwritten(len(x), 1)
    module.rmsnorm(x, gain, y, r, threads=threads)
    exact_y, exact_r = layers.rmsnorm(x.astype(float), gain.astype(float))
    bound = ((x.shape[1] + 1) / 2 + 5) * U
    of_y = np.abs(y - exact_y) / np.where(exact_y, bound * np.abs(exact_y), U)
    return np.maximum(of_y.max(), (np.abs(r - exact_r) / (bound * exact_r)).max())  # nan stays nan


def softmax_error(module, x, threads):
    """As above: the difference x - m by its size, exp by 4 u, twice; C additions; a division."""
    y = unwritten(*x.shape)
    module.softmax(x, y, threads)
    shifted = x.astype(float) - x.max(axis=1, keepdims=True).astype(float)
    exact = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    finite = np.abs(shifted[np.isfinite(shifted)]).max()
    bound = (2 * finite + 2 * 4 + x.shape[1] + 2) * U
    smallest = 2.0**-126  # below it float32 keeps fewer digits, or nothing
    return np.max(np.abs(y - exact) / (bound * exact + smallest))


@pytest.mark.parametrize("tile", [1, 4, 5])
@pytest.mark.parametrize("M, K, N", [(1, 1, 1), (1, 9, 1), (5, 1, 3), (4, 4, 4), (6, 10, 7)])
def test_matmul(M, K, N, tile):
    assert product_error(ladder, random(0, M, K), random(1, K, N), tile) < 1


@pytest.mark.parametrize("scale", [1e-18, 1e18])  # products of 1e36: float32 ends at 3e38
def test_matmul_of_large_and_small_numbers(scale):
    assert product_error(ladder, random(0, 5, 6, scale=scale), random(1, 6, 3, scale=scale), 4) < 1


def test_matmul_refuses_what_does_not_fit():
    a, b = random(0, 3, 4), random(1, 4, 5)
    for wrong in [(a, b.T, unwritten(3, 5)), (a, b, unwritten(5, 3)), (a, b.astype(float), a)]:
        with pytest.raises(AssertionError):
            ladder.matmul(*wrong, tile=4)
    with pytest.raises(AssertionError):
        ladder.matmul(a, b, unwritten(3, 5), tile=33)


@pytest.mark.parametrize("threads", [1, 4, 16])
@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 4), (2, 17)])
def test_rows(rows, columns, threads):
    x = random(0, rows, columns)
    assert rmsnorm_error(ladder, x, random(1, columns), threads) < 1
    assert softmax_error(ladder, x, threads) < 1


@pytest.mark.parametrize("scale", [1e-12, 1e3, 1e18])  # 1e18 squared is 1e36: float32 ends at 3e38
def test_rows_of_large_and_small_numbers(scale):
    x = random(0, 2, 9, scale=scale)
    assert rmsnorm_error(ladder, x, random(1, 9), 4) < 1
    assert softmax_error(ladder, x, 4) < 1


def test_rows_of_zeros_and_masked_rows():
    y, r = unwritten(2, 3), unwritten(2, 1)
    ladder.rmsnorm(np.zeros((2, 3), np.float32), random(0, 3), y, r, threads=4)
    assert (y == 0).all() and np.allclose(r, np.sqrt(layers.RMSNORM_EPS), rtol=4 * U)
    x = np.array([[-np.inf, 0, 0], [-np.inf] * 3, [-np.inf, -np.inf, -3e38]], np.float32)
    y = unwritten(3, 3)
    ladder.softmax(x, y, threads=4)
    assert y.tolist() == [[0, 0.5, 0.5], [0, 0, 0], [0, 0, 1]]


def test_rows_refuse_what_does_not_fit():
    x, y, r = random(0, 2, 3), unwritten(2, 3), unwritten(2, 1)
    for threads in 3, 6, 0:
        with pytest.raises(AssertionError, match="power of two"):
            ladder.rmsnorm(x, random(1, 3), y, r, threads=threads)
        with pytest.raises(AssertionError, match="power of two"):
            ladder.softmax(x, y, threads=threads)
    with pytest.raises(AssertionError):
        ladder.rmsnorm(x, random(1, 2), y, r)
    with pytest.raises(AssertionError):
        ladder.softmax(x, unwritten(3, 2))


@pytest.mark.parametrize("kernel", ["matmul", "rmsnorm", "softmax"])
def test_two_runs_agree_to_the_last_bit(kernel):
    x, outputs = random(0, 4, 13), []
    for _ in range(2):
        y, r = unwritten(4, 13), unwritten(4, 1)
        if kernel == "matmul":
            ladder.matmul(x, random(1, 13, 13), y, tile=4)
        elif kernel == "rmsnorm":
            ladder.rmsnorm(x, random(1, 13), y, r, threads=8)
        else:
            ladder.softmax(x, y, threads=8)
        outputs.append(y.tobytes())
    assert outputs[0] == outputs[1]


@simulated
@pytest.mark.parametrize("tile", [2, 3, 4])
def test_matmul_reads_what_its_budget_says(tile):
    M, K, N = 5, 6, 7
    a, b, c = Counted(random(0, M, K)), Counted(random(1, K, N)), Counted(unwritten(M, N))
    ladder.matmul(a, b, c, tile)
    assert (a.reads == blocks(N, tile)).all() and (b.reads == blocks(M, tile)).all()
    assert (c.writes == 1).all() and (c.reads == 0).all()


@simulated
def test_rows_read_what_their_budgets_say():
    x, y, r, gain = (Counted(unwritten(*s)) for s in [(3, 10), (3, 10), (3, 1), (10,)])
    x.array[...], gain.array[...] = random(0, 3, 10), random(1, 10)
    ladder.rmsnorm(x, gain, y, r, threads=4)
    assert (x.reads == 2).all() and (gain.reads == 3).all()
    assert (y.writes == 1).all() and (r.writes == 1).all()
    ladder.softmax(x, y, threads=4)
    assert (x.reads == 2 + 3).all() and (y.writes == 2).all() and (y.reads == 0).all()


# In which function of `ladder`, what is wrong, the text and what it becomes. A comment stands
# for the barrier before it.
MUTANTS = [
    ("matmul_kernel", "a tile is read before it is full", "  # no thread reads a tile before", ""),
    ("matmul_kernel", "a tile is overwritten while read", "  # no thread fills the next tile", ""),
    ("matmul_kernel", "no left edge in a", "row < M and start + column_in_tile < K", "row < M"),
    ("matmul_kernel", "no lower edge in b", "column < N and start + row_in_tile < K", "column < N"),
    ("matmul_kernel", "one piece too few", "range(0, K, tile)", "range(0, K - tile, tile)"),
    ("matmul_kernel", "b transposed", "b_tile[k, column_in_tile]", "b_tile[column_in_tile, k]"),
    ("_block_reduction", "a share is read early", "  # no share is read before", ""),
    ("_block_reduction", "levels run into each other", "  # no thread reads the next level", ""),
    ("rmsnorm_kernel", "a sum, not a mean", "/ np.float32(columns)", "/ np.float32(1)"),
    ("rmsnorm_kernel", "epsilon forgotten", "mean + eps", "mean"),
    ("rmsnorm_kernel", "the gain of the row", "gain[column] *", "gain[row] *"),
    ("_block_reduction", "the result is overwritten", "  # no thread writes its next share", ""),
    ("_block_reduction", "half a tree", "stride = threads // 2", "stride = threads // 4"),
    ("softmax_kernel", "the maximum from 0", "np.float32(-math.inf)", "np.float32(0)"),
    ("softmax_kernel", "a sum for the maximum", "block_max(share", "block_sum(share"),
]


@pytest.mark.skipif(not SIMULATED, reason="on hardware a warp may hide a missing barrier")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a wrong kernel does with garbage
@pytest.mark.parametrize("function, what, old, new", MUTANTS)
def test_mutants_are_seen(function, what, old, new):
    if old.startswith("  #"):
        old, new = "cuda.syncthreads()" + old, "pass #"
    module = load(Mutant("engines.gpu.ladder", function, what, old, new))
    # Six rows of eight threads in a chance order: a lucky order for all is out of the question.
    far_below = random(0, 6, 19) - np.float32(200)  # where exp is 0 unless the maximum is right
    try:
        if function == "matmul_kernel":
            errors = [product_error(module, random(0, 6, 10), random(1, 10, 7), 4)]
        else:
            errors = [rmsnorm_error(module, random(0, 6, 19, scale=1e-2), random(1, 19), 8)]
            errors.append(softmax_error(module, far_below, 8))
    except (IndexError, ArithmeticError, ValueError):
        return  # an index outside, or garbage that Python's math refuses
    assert not np.max(errors) < 1, what


def test_the_tree_is_right_for_every_number_of_threads_and_columns():
    for threads, columns in itertools.product((1, 2, 8), (1, 7, 9)):
        ones = np.ones((1, columns), np.float32)
        y, r = unwritten(1, columns), unwritten(1, 1)
        ladder.rmsnorm(ones, ones[0], y, r, eps=0.0, threads=threads)
        assert r[0, 0] == 1, (threads, columns)  # a mean of ones is exact
