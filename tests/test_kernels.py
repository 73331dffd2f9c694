"""The ladder of chapter 11, emulated: counts as predicted, float64, edges, magnitudes, mutants.

Every bound is derived: u = 2^-24 is the relative error of one float32 rounding, and an error may be
at most u times the number of roundings on the way to a result, times the size of what was rounded.
"""

import math
from functools import partial

import numpy as np
import pytest
from mutants import Mutant, load, source
from tiers import thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.engines.gpu import ladder
from nanoeuler.errors import UserError

U = 2.0**-24
SMALLEST = 2.0**-126  # below it float32 keeps fewer digits, or nothing


def random(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def unwritten(*shape):
    return np.full(shape, np.nan, np.float32)  # what a kernel forgets to write fails every bound


def play(launches, out, seed=None):
    """Run launches in the emulator; `out` must be written before it is read."""
    for launch in launches if isinstance(launches, tuple) else (launches,):
        report = run(launch, seed, fresh=[a for a in launch.args if a is out])
    return report


# ---- Copies and transposes are exact


COPIES = {
    "4 bytes": (lambda m, x, y: m.copy(x, y), 2048),
    "4 bytes, two blocks": (lambda m, x, y: m.copy(x, y, grid=2), 2048),
    "16 bytes": (lambda m, x, y: m.copy_wide(x, y, 1), 4096),
    "4 x 16 bytes, one block": (lambda m, x, y: m.copy_wide(x, y, grid=1), 8192),
}
TURNS = {
    "straight": lambda m, x, y: m.transpose_plain(x, y),
    "tile": lambda m, x, y: m.transpose(x, y, 32),
    "padded": lambda m, x, y: m.transpose(x, y),
}


def exact(launch, x, y):
    """Whether a copy or a transpose is right; `launch` makes it of x and y."""
    play(launch(x, y), y)
    return np.array_equal(y, x if y.shape == x.shape else x.T)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("n", [4, 1000, 2052])
def test_copies(way, n):
    x = random(0, n)
    x[:2] = np.inf, 3e38
    assert exact(partial(COPIES[way][0], ladder), x, unwritten(n))


@pytest.mark.parametrize("shape", [(1, 1), (300, 3)])
def test_a_copy_of_numbers_far_apart(shape):
    assert exact(ladder.copy_apart, random(0, *shape), unwritten(*shape))


@pytest.mark.parametrize("way", TURNS)
@pytest.mark.parametrize("rows, columns", [(1, 1), (33, 7), (40, 65)])
def test_transposes(way, rows, columns):
    x, y = random(0, rows, columns), unwritten(columns, rows)
    play(TURNS[way](ladder, x, y), y)
    assert np.array_equal(y, x.T)


# ---- Sums, softmax, products within their bounds


def sum_error(module, x, wide, p=None):
    """The error of a sum as a fraction of its bound: roundings on a number's way, times sum |x|."""
    parts, total = unwritten(p or module.parts_size(x.size)), unwritten(1)
    play(module.sums(x, parts, total, wide), total)
    p = parts.size
    if wide:  # 16 of a thread at a time: 4 levels and one more; 5 shuffles; 8 warps; and again
        roundings = 5 * math.ceil(x.size / (4096 * p)) + 13 + 5 * math.ceil(p / 4096) + 13
    else:
        roundings = math.ceil(x.size / (256 * p)) + 8 + math.ceil(p / 256) + 8
    bound = roundings * U * np.abs(x.astype(float)).sum()
    return abs(total[0] - x.sum(dtype=float)) / bound


def softmax_error(module, x, way="softmax"):
    """As above: x - m by its size, exp by 4 u, twice; C additions; 1 / sum; a product."""
    y = unwritten(*x.shape)
    play(getattr(module, way)(x, y), y)
    shifted = x.astype(float) - x.max(axis=1, keepdims=True).astype(float)
    want = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    finite = np.abs(shifted[np.isfinite(shifted)]).max()
    bound = (2 * finite + 2 * 4 + x.shape[1] + 3) * U
    return np.max(np.abs(y - want) / (bound * want + SMALLEST))


PRODUCTS = {
    "naive": lambda m, a, b, c: m.matmul_plain(a, b, c, coalesced=False),
    "coalesced": lambda m, a, b, c: m.matmul_plain(a, b, c),
    "tiles of 5": lambda m, a, b, c: m.matmul_tiles(a, b, c, 5),
    "tiles of 8": lambda m, a, b, c: m.matmul_tiles(a, b, c, 8),
    "registers": lambda m, a, b, c: m.matmul_registers(a, b, c),
}


def product_error(module, a, b, way):
    """The largest error of a product as a fraction of its bound, K + 1 roundings of |a||b|."""
    c = unwritten(a.shape[0], b.shape[1])
    play(PRODUCTS[way](module, a, b, c), c)
    a, b = a.astype(float), b.astype(float)
    bound = (a.shape[1] + 1) * U * (np.abs(a) @ np.abs(b))
    return np.max(np.abs(c - a @ b) / np.where(bound > 0, bound, U))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("n, scale", [(4, 1), (1000, 1e30), (20_000, 1)])
def test_sums(n, scale, wide):
    assert sum_error(ladder, random(0, n, scale=scale), wide) < 1


@pytest.mark.parametrize("way", ["softmax_tree", "softmax"])
@pytest.mark.parametrize("shape, scale", [((1, 4), 1), ((9, 12), 1e-12), ((2, 260), 20)])
def test_softmax(way, shape, scale):
    assert softmax_error(ladder, random(0, *shape, scale=scale), way) < 1
    assert softmax_error(ladder, random(0, *shape, scale=1e18), way) < 1


@pytest.mark.parametrize("way", ["softmax_tree", "softmax"])
def test_masked_rows(way):
    low = -np.inf
    x = np.array([[low, 0, 0, low], [low] * 4, [low, low, -3e38, low]], np.float32)
    y = unwritten(3, 4)
    play(getattr(ladder, way)(x, y), y)
    assert y.tolist() == [[0, 0.5, 0.5, 0], [0, 0, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("way", PRODUCTS)
@pytest.mark.parametrize("M, K, N", [(1, 4, 4), (34, 12, 36)])
def test_products(way, M, K, N):
    assert product_error(ladder, random(0, M, K), random(1, K, N), way) < 1


@pytest.mark.parametrize("way", ["coalesced", "tiles of 8", "registers"])
def test_products_of_large_and_small_numbers(way):  # 1e36: float32 ends at 3e38
    a, b = random(0, 2, 4, scale=1e18), random(1, 4, 4, scale=1e18)
    assert product_error(ladder, a, b, way) < 1
    assert product_error(ladder, a / np.float32(1e36), b, way) < 1


# ---- Any order of blocks and warps


ORDERS = {
    "copy": lambda x, y: ladder.copy_wide(x.ravel(), y.ravel(), 1),
    "transpose": lambda x, y: ladder.transpose(x, y),
    "softmax tree": lambda x, y: ladder.softmax_tree(x[:6], y[:6]),
    "softmax": lambda x, y: ladder.softmax(x, y),
    "tiles": lambda x, y: ladder.matmul_tiles(x[:8], x, y[:8], 8),
    "registers": lambda x, y: ladder.matmul_registers(np.tile(x[:, :4], (4, 1)), x[:4], y),
}


@pytest.mark.parametrize("way", ORDERS)
def test_bits_are_equal_in_every_order(way):
    x = random(0, 36, 36)
    y, outcomes = unwritten(144 if way == "registers" else 36, 36), set()  # two blocks at least
    for seed in None, 1, 2:
        y[:] = np.nan
        run(ORDERS[way](x, y), seed)
        outcomes.add(y.tobytes())
    assert len(outcomes) == 1 and not np.isnan(y[:6]).any()


@pytest.mark.parametrize("wide", [False, True])
def test_sums_are_equal_in_every_order(wide):
    x, parts, total, outcomes = random(0, 5000), unwritten(8), unwritten(1), set()
    for seed in None, 1, 2:
        play(ladder.sums(x, parts, total, wide), total, seed)
        outcomes.add(total.tobytes())
    assert len(outcomes) == 1


# ---- Counts


def predictions():
    """Name -> (launch, its predicted counts), for multiples of the tiles."""
    for name, (make, n) in COPIES.items():
        wide = ladder.copy_wide_counts if "16" in name else ladder.copy_counts
        yield f"copy {name}", make(ladder, random(0, n), unwritten(n)), wide(n)
    for rows, columns in (256, 8), (512, 24):
        launch = ladder.copy_apart(random(0, rows, columns), unwritten(rows, columns))
        yield f"apart {rows, columns}", launch, ladder.copy_apart_counts(rows, columns)
    for rows, columns in (32, 32), (64, 96):
        x, y = random(0, rows, columns), unwritten(columns, rows)
        counts = ladder.transpose_plain_counts(rows, columns)
        yield f"straight {rows, columns}", ladder.transpose_plain(x, y), counts
        for pitch in 32, 33, 36, 40:
            counts = ladder.transpose_counts(rows, columns, pitch)
            yield f"pitch {pitch} {rows, columns}", ladder.transpose(x, y, pitch), counts
    for wide in False, True:
        launch = ladder.sums(random(0, 16384), unwritten(4), unwritten(1), wide)[0]
        yield f"sum, wide {wide}", launch, ladder.sums_counts(16384, 4, wide)
    for rows, columns in (2, 256), (8, 128):
        x, y = random(0, rows, columns), unwritten(rows, columns)
        yield f"softmax {rows, columns}", ladder.softmax(x, y), ladder.softmax_counts(rows, columns)
    x, y = random(0, 2, 512), unwritten(2, 512)
    yield "softmax tree", ladder.softmax_tree(x, y), ladder.softmax_tree_counts(2, 512)
    for coalesced in False, True:
        abc = random(0, 32, 8), random(1, 8, 64), unwritten(32, 64)
        counts = ladder.matmul_plain_counts(32, 64, 8, coalesced)
        yield f"coalesced {coalesced}", ladder.matmul_plain(*abc, coalesced), counts
    for tile in 8, 16, 32:
        abc = random(0, 32, 64), random(1, 64, 96), unwritten(32, 96)
        counts = ladder.matmul_tiles_counts(32, 96, 64, tile)
        yield f"tiles {tile}", ladder.matmul_tiles(*abc, tile), counts
    M, N = TALLEST
    abc = random(0, M, 16), random(1, 16, N), unwritten(M, N)
    yield "registers", ladder.matmul_registers(*abc), ladder.matmul_registers_counts(M, N, 16)


TALLEST = ladder.SIDE, ladder.SIDE
PREDICTIONS = {name: rest for name, *rest in predictions()}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_counts_are_as_predicted(name):
    launch, counts = PREDICTIONS[name]
    report = run(launch)
    assert counts and {name: report[name] for name in counts} == counts


# ---- What is refused


def test_what_does_not_fit_is_refused():
    x, y, a = random(0, 8), unwritten(8), random(0, 4, 8)
    for wrong in (
        lambda: ladder.copy(x, unwritten(7)),
        lambda: ladder.copy(x, y.astype(float)),
        lambda: ladder.copy_apart(a, unwritten(8, 4)),
        lambda: ladder.copy_wide(random(0, 6), unwritten(6)),
        lambda: ladder.transpose(a, unwritten(4, 8)),
        lambda: ladder.transpose_plain(a, unwritten(4, 8)),
        lambda: ladder.sums(x, unwritten(3), unwritten(1)),
        lambda: ladder.sums(random(0, 6), unwritten(4), unwritten(1)),
        lambda: ladder.softmax_tree(a, unwritten(8, 4)),
        lambda: ladder.softmax(random(0, 4, 6), unwritten(4, 6)),
        lambda: ladder.softmax(random(0, 1, 2052), unwritten(1, 2052)),
        lambda: ladder.matmul_plain(a, a, unwritten(4, 8)),
        lambda: ladder.matmul_tiles(a, a.T.copy(), unwritten(4, 4), 33),
        lambda: ladder.matmul_registers(random(0, 4, 6), random(0, 6, 4), unwritten(4, 4)),
    ):
        with pytest.raises(UserError, match="expected"):
            wrong()


def test_blocks_cover_and_no_more():
    for n in range(1, 20):
        for size in range(1, 8):
            assert (ladder.blocks(n, size) - 1) * size < n <= ladder.blocks(n, size) * size


# ---- Mutants: in which function, what is wrong, the text, what it becomes, the fault
# ("" where only the result is wrong). A comment stands for the barrier before it.


MUTANTS = [
    ("_copy", "one too far", "i < x.shape[0]", "i <= x.shape[0]", "bounds"),
    ("copy_wide_kernel", "half a step", "start += cuda", "start += 2 * cuda", ""),
    ("copy_wide_kernel", "loads overlap", "at = start + 4 * THREADS * j\n                held",
     "at = start + 4 * THREADS * (j // 2)\n                held", ""),
    ("transpose_kernel", "no barrier", "  # no thread reads the tile", "", "race"),
    ("transpose_kernel", "not turned", "tile[along, down + k]", "tile[down + k, along]", ""),
    ("transpose_kernel", "no right edge", " and column + along < x.shape[1]", "", "bounds"),
    ("_tree", "a share is read early", "  # no share is read before", "", "race"),
    ("_tree", "levels run into each other", "  # no thread reads the next level", "", "race"),
    ("_tree", "the result is overwritten", "  # no thread writes its next share", "", "race"),
    ("_tree", "half a tree", "stride = THREADS // 2", "stride = THREADS // 4", ""),
    ("_shuffle", "half a warp", "bits = WARP // 2", "bits = WARP // 4", ""),
    ("_sum_wide", "a share is read early", "  # no thread reads a share", "", "race"),
    ("_sum_wide", "numbers added twice", "start += 4 * step", "start += 3 * step", ""),
    ("_softmax_tree", "the maximum from 0", "float32(-math.inf)", "float32(0)", ""),
    ("_softmax_tree", "a sum for the maximum", "tree_max(share", "tree_sum(share", ""),
    ("_load_row", "zeros in the row", "at >= limit", "at > limit + 4", ""),
    ("softmax_kernel", "each lane's own maximum", "warp_max(largest)", "largest", ""),
    ("matmul_tiles_kernel", "read before it is full", "  # no thread reads a tile", "", "race"),
    ("matmul_tiles_kernel", "filled while read", "  # no thread fills the next", "", "race"),
    ("matmul_tiles_kernel", "no left edge in a", "row < M and start + along < K", "row < M",
     "bounds"),
    ("matmul_tiles_kernel", "one piece too few", "range(0, K, tile)", "range(0, K - tile, tile)",
     ""),
    ("matmul_tiles_kernel", "b turned", "b_tile[k, along]", "b_tile[along, k]", ""),
    ("_matmul_registers", "no barrier", "  # this stage is full", "", "unwritten"),
    ("_matmul_registers", "one stage", "stage = 1 - stage", "stage = 0", "race"),
    ("_matmul_registers", "one piece too few", "range(DEPTH, K + DEPTH", "range(DEPTH, K", ""),
    ("_matmul_registers", "no lower edge", "K if a_row < M else 0", "K", "bounds"),
    ("_multiply", "half of b twice", "b_at + 4 * HALF", "b_at", ""),
    ("_put", "a not turned", "a_k + i, a_row]", "i, a_row]", "unwritten"),
    ("_write", "beyond the edge", "N if at < M else 0", "N", "bounds"),
]  # fmt: skip


def judge(module, function):
    """The worst error, as a fraction of its bound, of what uses a function."""
    if function == "_copy":
        return not exact(module.copy, random(0, 300), unwritten(300))
    if function.startswith("copy"):
        return not exact(partial(module.copy_wide, grid=2), random(0, 9000), unwritten(9000))
    if function.startswith("transpose"):
        return not exact(module.transpose, random(0, 40, 36), unwritten(36, 40))
    if function == "_sum_wide":
        return sum_error(module, np.abs(random(0, 20_000)), True, p=4)  # twice round its loop
    if function in ("_tree", "_softmax_tree"):  # far below 0, where exp is 0 but for the maximum
        return softmax_error(module, random(0, 2, 300) - np.float32(200), "softmax_tree")
    if function in ("_shuffle", "_load_row", "softmax_kernel"):
        return softmax_error(module, random(0, 3, 100) - np.float32(200))
    way = "tiles of 8" if "tiles" in function else "registers"
    return product_error(module, random(0, 68, 12), random(1, 12, 68), way)


def mutant(function, what, old, new):
    if old.startswith("  #"):
        old, new = "cuda.syncthreads()" + old, "pass #"
    return Mutant("engines.gpu.ladder", function, what, old, new)


def test_all_mutants_have_their_place():
    for *which, _ in MUTANTS:
        source(mutant(*which))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a wrong kernel does with garbage
@pytest.mark.parametrize("function, what, old, new, kind", thinned(MUTANTS, 8))
def test_mutants_are_seen(function, what, old, new, kind):
    module = load(mutant(function, what, old, new))
    if kind:
        with pytest.raises(Fault) as fault:
            judge(module, function)
        assert fault.value.kind == kind
    else:
        try:
            assert not judge(module, function) < 1
        except (ArithmeticError, ValueError):
            pass  # garbage that Python's math refuses
