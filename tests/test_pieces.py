"""Float32 in pieces of bf16, and kernels that fill: on paper, against float64, with planted faults.

U = 2^-24 is what rounding to float32 costs at most, relative; to bf16 2^-8.
"""

from unittest import mock

import numpy as np
import pytest
from bench.card import ghost
from mutants import Mutant, load, source
from tiers import thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import choice, float32
from nanoeuler.engines.gpu.gemm.float32 import AXES, PAIRS, split_launch, split_shape, split_shapes
from nanoeuler.engines.gpu.gemm.mma_form import MmaForm
from nanoeuler.engines.gpu.host.device import DeviceArray
from nanoeuler.engines.gpu.rows import fill
from nanoeuler.errors import UserError

# Infinities are cut as well: what is left of one is nan, and float32 on paper says so aloud.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
U = 2.0**-24
NAN = 0x7FC0  # of bf16
LEFT = tuple(i for i, _ in PAIRS[3])  # the pieces of a left operand, in order


# ---- Cutting


def blank(shape, behind=64):
    """Room for bf16, nan, and more of it behind, which nobody may touch."""
    room = np.full(np.prod(shape) + behind, NAN, np.uint16)
    return room[:-behind].reshape(shape), room[-behind:]


def cut(x, which=(0, 1, 2), axis=1, seed=None, module=float32):
    """Pieces of x by the kernel, one array of float64 for each of `which`; and the report."""
    extent = x.shape
    out, behind = blank(split_shape(extent, len(which), axis))
    report = run(module.split_launch(x, out, which, axis), seed, [out])
    assert (behind == NAN).all()
    made = from_bf16(out).astype(float)
    if axis == 0:
        return made.reshape(len(which), *extent), report
    return made.reshape(extent[0], len(which), extent[1]).transpose(1, 0, 2), report


def spread(count, low, high, seed=0):
    """Numbers of both signs with exponents from `low` on and below `high`, all bits random."""
    rng = np.random.default_rng([seed, count])
    size = 1 + rng.integers(0, 1 << 23, count) * 2.0**-23
    powers = 2.0 ** rng.integers(low, high, count)
    return (rng.choice([-1, 1], count) * size * powers).astype(np.float32)


# Ties, all ones, none; a first piece that rounds up a power; the largest that bf16 has.
SPECIAL = [
    0.0, -0.0, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-17, 2 - 2.0**-23,
    2 - 2.0**-8, 1 + 2.0**-9 + 2.0**-17 + 2.0**-23, -(2 - 2.0**-7) * 2.0**127,
    (2 - 2.0**-8 - 2.0**-23) * 2.0**127, 2.0**-110,
]  # fmt: skip


def test_three_pieces_are_the_number():
    x = np.concatenate([np.array(SPECIAL), spread(1012, -110, 127)]).astype(np.float32)
    made, _ = cut(x.reshape(8, 128))
    made = made.reshape(3, -1)
    assert (made.sum(0) == x).all()
    size = abs(x.astype(float))
    assert (abs(made[1]) <= 2.0**-8 * size).all() and (abs(made[2]) <= 2.0**-17 * size).all()
    left = x
    for piece in made:  # each is what is nearest to what the ones before it leave
        assert (piece == from_bf16(to_bf16(left))).all()
        left = left - piece.astype(np.float32)
    assert (abs(x - made[0] - made[1]) <= 2.0**-17 * size).all()


def test_what_would_round_to_infinity_is_cut_off_and_still_exact():
    edge = (2 - 2.0**-8) * 2.0**127  # the middle between bf16's largest and the power above
    most = np.finfo(np.float32).max
    x = np.array([edge, 3.4e38, most, -edge, -3.4e38, -most, 1, 2], np.float32)
    made, _ = cut(x[None])
    assert np.isfinite(made).all() and (made.sum(0) == x).all()
    assert (abs(made[0, 0, :6]) == from_bf16(np.array(0x7F7F))).all()


def test_below_the_smallest_bf16_bits_are_lost_and_no_more():
    x = np.concatenate([spread(248, -149, -110), np.array([2, 1, -1, 3, 5, 7, -9, 11]) * 2.0**-149])
    x = x.astype(np.float32).reshape(4, 64)
    made, _ = cut(x)
    off = abs(made.sum(0) - x)
    assert (off <= 2.0**-134).all() and off.any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_stays_none(bad):
    made, _ = cut(np.array([[1, bad, 3, 4, 5, 6, bad, 8]], np.float32))
    assert np.isnan(made[1, 0, [1, 6]]).all() and not np.isfinite(made[0, 0, [1, 6]]).any()
    assert np.isfinite(made[:, 0, [0, 2, 3, 4, 5, 7]]).all()


def matrix(rows=5, columns=24, before=16, after=4, seed=0):
    """Some columns of a wider matrix, whose others are nan."""
    whole = np.full((rows, before + columns + after), np.nan, np.float32)
    x = whole[:, before : before + columns]
    x[...] = spread(rows * columns, -20, 20, seed).reshape(x.shape)
    return x


def check_layout(module, axis=1, which=LEFT, part=None, seed=None, **size):
    """Cut a matrix, or a part of it along the axis: each piece stands where it should; bytes are
    counted."""
    x = matrix(**size)
    first, end = part or (0, x.shape[axis])
    taken = x[first:end] if axis == 0 else x[:, first:end]
    made, report = cut(taken, which, axis, seed, module)
    alone, _ = cut(np.ascontiguousarray(taken))
    for piece, number in zip(made, which, strict=True):
        assert (piece == alone[number]).all()
    assert report["global loads bytes"] == 4 * taken.size
    assert report["global stores bytes"] == 2 * len(which) * taken.size
    return made


@pytest.mark.parametrize("axis, part", [(0, None), (1, None), (0, (1, 4)), (1, (8, 24))])
@pytest.mark.parametrize("which", [LEFT, (0, 1, 0), (0,)])
def test_pieces_stand_where_they_are_asked_for(axis, part, which):
    check_layout(float32, axis, which, part)


def test_the_order_of_blocks_moves_no_bit_of_a_piece():
    made = [check_layout(float32, seed=seed, rows=25, columns=96) for seed in (1, 2)]
    assert made[0].tobytes() == made[1].tobytes()
    assert split_launch(matrix(25, 96), blank((25, 576))[0], LEFT, 1).grid == (2,)


F32 = np.float32


@pytest.mark.parametrize(
    "x, which, axis, message",
    [
        (np.zeros((4, 16), F32), (0, 3), 1, "pieces 0, 1, 2 are laid"),
        (np.zeros((4, 16), F32), (), 1, "pieces 0, 1, 2 are laid"),
        (np.zeros((4, 16), F32), (0,), 2, "axis 0 or 1, not .* along 2"),
        (np.zeros((4, 16), np.uint16), (0,), 1, "float32 is cut, not uint16"),
        (np.zeros((4, 12), F32), (0,), 0, "in eights, not 12: pad"),
        (np.zeros((0, 16), F32), (0,), 1, "some elements, less than .*, not 0 x 16"),
        (np.zeros((4, 18), F32)[:, :16], (0,), 1, "multiple of 16 bytes apart"),
        (np.zeros((4, 32), F32)[:, ::2], (0,), 1, "rows are dense"),
    ],
)
def test_matrices_that_cannot_be_cut(x, which, axis, message):
    with pytest.raises(UserError, match=message):
        split_launch(x, np.zeros((4, 16), np.uint16), which, axis)


def test_pieces_that_do_not_fit():
    x = np.zeros((4, 16), F32)
    for out in np.zeros((4, 32), np.uint16), np.zeros((4, 48), F32), np.zeros((48, 4), np.uint16).T:
        with pytest.raises(UserError, match="the pieces is|rows are dense"):
            split_launch(x, out, (0, 1, 0), 1)
    lower = DeviceArray(72, (4, 16), np.dtype(F32), (64, 4))
    with pytest.raises(UserError, match="begins at a multiple of 16 bytes: 72"):
        split_launch(lower, np.zeros((4, 16), np.uint16), (0,), 1)
    with pytest.raises(UserError, match="less than 2.34, not 2147483648 x 8"):
        split_launch(ghost((1 << 31, 8), F32), ghost((1 << 31, 8)), (0,), 1)


# ---- Products


@pytest.mark.parametrize("count", PAIRS)
def test_pairs_are_all_that_count_and_the_smallest_come_first(count):
    pairs = PAIRS[count]
    assert {*pairs} == {(i, j) for i in range(count) for j in range(count - i)}
    assert len({*pairs}) == len(pairs)
    sizes = [i + j for i, j in pairs]
    assert sizes == sorted(sizes, reverse=True)


def small(layout, epilogue="store", out="bf16", second=False, sums="no", capability=(8, 0)):
    """In place of `choose_mma`: a tile of one warp, which the paper plays sooner."""
    return MmaForm(layout, epilogue, out, second, sums, rows=64, columns=64)


def hard(shape, seed=0):
    """Positive numbers whose pieces have one sign and are almost as large as can be.

    1 + 2^-8 - 2^-17 - d with a small d: 1, 2^-8 - 2^-16, 2^-17 - d.
    """
    rng = np.random.default_rng([seed, *shape])
    d = rng.integers(1, 32, shape) * 2.0**-23
    return ((1 + 2.0**-8 - 2.0**-17 - d) * 2.0 ** rng.integers(-3, 4, shape)).astype(F32)


def normal(shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, F32)


LEAVE = {1: 2.0**-7 + 2.0**-16, 2: 2.0**-15 * (1 + 2.0**-8), 3: 2.0**-24 + 2.0**-34}


def bound_of(count, k, stretches, absolute, before):
    """What a product may be off, of the sums of absolute values and of C before it.

    What the pieces leave out; k sums of the largest products, each off by U of no more than the
    absolute sum; those of smaller products, which begin it, by U of 3 * 2^-8 of it; one more for
    each stretch that is added; and a hundredth of all that for what squares of U make.
    """
    rounds = k + stretches + 1 + (len(PAIRS[count]) - 1) * k * 3 * 2.0**-8
    return 1.01 * ((LEAVE[count] + rounds * U) * absolute + (stretches + 1) * U * abs(before))


def check_product(
    module, layout="NT", m=9, n=16, k=16, count=3, stretches=1, epilogue="store", make=hard,
    scales=(1, 1), capability=(8, 0), seed=None, least=0.0,
):  # fmt: skip
    """Multiply and compare; returns C. least: of an element, what subnormal pieces lose."""
    of_a, of_b = AXES[layout]
    a = make((m, k) if of_a else (k, m)) * F32(scales[0])
    b = make((n, k) if of_b else (k, n), seed=1) * F32(scales[1])
    before = normal((m, n), 2) * F32(scales[0] * scales[1])
    c = before.copy() if epilogue == "add" else np.full((m, n), np.nan, F32)
    shapes = module.split_shapes(layout, m, n, k, count, stretches)
    work = [blank(shape) for shape in shapes]
    options = dict(pieces=count, epilogue=epilogue, stretches=stretches)
    arrays = a, b, c, *(room for room, _ in work)
    for launch in module.pieces_product(capability, layout, *arrays, **options):
        run(launch, seed)
    assert all((behind == NAN).all() for _, behind in work)
    left, right = (x.astype(float) for x in (a if of_a else a.T, b.T if of_b else b))
    before = before.astype(float) * (epilogue == "add")
    absolute = abs(left) @ abs(right)
    bound = bound_of(count, k, stretches, absolute, before) + least * abs(right).sum(0)
    assert (abs(c - before - left @ right) <= bound).all()
    return c


@pytest.fixture(autouse=True)
def one_warp():
    """All products by mma.sync here have small tiles."""
    with mock.patch.object(choice, "choose_mma", small):
        yield


@pytest.mark.parametrize("make", [hard, normal])
@pytest.mark.parametrize("layout, m", [("NT", 9), ("NN", 3), ("TN", 8)])
def test_a_product_in_three_pieces_is_one_of_float32(layout, m, make):
    check_product(float32, layout, m, make=make)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_pieces_are_as_exact_as_they_can_be(count):
    c = check_product(float32, "NN", count=count)
    with pytest.raises(AssertionError):  # and no more than that
        with mock.patch.dict(LEAVE, {count: LEAVE[count] / 8}):
            check_product(float32, "NN", count=count)
    assert np.isfinite(c).all()


@pytest.mark.parametrize("layout, k", [("NT", 24), ("NN", 24), ("TN", 19)])
@pytest.mark.parametrize("epilogue", ["store", "add"])
def test_a_product_in_three_stretches(layout, k, epilogue):
    check_product(float32, layout, 8, 16, k, stretches=3, epilogue=epilogue)


def test_the_order_of_blocks_moves_no_bit_of_a_product():
    made = [check_product(float32, "TN", 72, 80, 5, 2, seed=seed).tobytes() for seed in (1, 2)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "scales, least", [((1e30, 1e-30), 0), ((4e37, 1e-3), 0), ((1e-38, 1e10), 2.0**-134)]
)
def test_products_of_huge_and_tiny_numbers(scales, least):
    """hard() is below 8.1, so that 4e37 of it comes close to what float32 has."""
    check_product(float32, "NN", scales=scales, least=least)


def test_a_product_by_wgmma():
    check_product(float32, "NT", m=5, n=8, k=8, count=3, capability=(9, 0))


BIG, SMALL = (8192, 2304), (768, 768)  # C of 576 tiles and of 18


@pytest.mark.parametrize(
    "size, k, count, stretches",
    [
        (BIG, 768, 3, 6), (BIG, 3072, 3, 24), (BIG, 3072, 2, 2), (BIG, 16384, 3, 128),
        (SMALL, 16384, 3, 64), (SMALL, 16384, 1, 2), (BIG, 128, 3, 1), (BIG, 136, 3, 2),
        (BIG, 16411, 3, 129), (BIG, 50257, 3, 393), (BIG, 50257, 2, 25), (BIG, 5, 3, 1),
    ],
)  # fmt: skip
def test_stretches_are_not_too_long_whatever_k_is(size, k, count, stretches):
    assert float32.stretches_for(*size, k, count) == stretches
    length = float32.stretch_of(k, stretches)
    deep = float32.DEEP[count] * (2 if size == SMALL else 1)
    assert len(PAIRS[count]) * length <= deep + len(PAIRS[count]) * float32.WIDTH
    assert (stretches - 1) * length < k <= stretches * length
    for layout, axes in AXES.items():
        shapes = split_shapes(layout, *size, k, count)
        there = [shape[axis] for shape, axis in zip(shapes, axes, strict=True)]
        assert there == [len(PAIRS[count]) * length] * 2


@pytest.mark.parametrize("layout, k, sizes", [("NT", 40, [16, 16, 8]), ("TN", 19, [8, 8, 3])])
def test_the_last_stretch_has_what_is_left(layout, k, sizes):
    with mock.patch.object(float32, "split_launch", wraps=float32.split_launch) as cuts:
        check_product(float32, layout, 8, 16, k, stretches=3)
    axis = AXES[layout][0]
    assert [x.shape[axis] for (x, *_), _ in cuts.call_args_list[::2]] == sizes


def test_working_arrays_are_those_of_a_stretch():
    assert split_shapes("NT", 10, 20, 48, 3, 2) == ((10, 144), (20, 144))
    assert split_shapes("NN", 10, 20, 48, 2) == ((10, 144), (144, 24)), "columns come in eights"
    assert split_shapes("TN", 10, 20, 48, 1) == ((48, 16), (48, 24))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layout="TT"), "there are NT, NN, TN"),
        (dict(pieces=4), "1, 2, 3 pieces"),
        (dict(epilogue="bias"), "store and add, not .*'bias'"),
        (dict(b=np.zeros((16, 8), F32)), "does not fit"),
        (dict(c=np.zeros((8, 16), np.uint16)), "to uint16"),
        (dict(c=np.zeros((8, 24), F32)), "does not give"),
        (dict(a=np.zeros((8, 0), F32), b=np.zeros((16, 0), F32)), "does not fit"),
        (dict(split_a=np.zeros((8, 16), np.uint16)), "the pieces is|does not give"),
        (dict(capability=(7, 5)), "8.0 or newer"),
    ],
)
def test_products_that_do_not_fit(change, message):
    of = dict(
        capability=(8, 0), layout="NT", a=np.zeros((8, 16), F32), b=np.zeros((16, 16), F32),
        c=np.zeros((8, 16), F32), split_a=np.zeros((8, 96), np.uint16),
        split_b=np.zeros((16, 96), np.uint16),
    )  # fmt: skip
    with mock.patch.object(choice, "choose_mma", CHOOSE), pytest.raises(UserError, match=message):
        float32.pieces_product(**(of | change))


CHOOSE = choice.choose_mma  # as it is


# ---- Filling


def check_clear(module, spans=((4, 8), (20, 4100), (4200, 4)), length=4208, seed=None):
    flat = normal((length,))
    want, table = flat.copy(), module.clear_table(spans, length)
    for start, count in spans:
        want[start : start + count] = 0
    report = run(module.clear_launch(table, flat), seed)
    assert (flat == want).all()
    assert report["global stores bytes"] == 4 * sum(count for _, count in spans)


def test_spans_are_cleared_and_nothing_else():
    for seed in None, 1, 2:
        check_clear(fill, seed=seed)


@pytest.mark.parametrize(
    "spans, message",
    [
        ([(0, 20)], "20 elements from 0 on are not in a buffer of 16"),
        ([(-4, 8)], "from -4 on"), ([(4, 0)], "0 elements"), ([(2, 4)], "multiples of 4"),
        ([(4, 6)], "multiples of 4"),
    ],
)  # fmt: skip
def test_spans_that_cannot_be_cleared(spans, message):
    with pytest.raises(UserError, match=message):
        fill.clear_table(spans, 16)
    with pytest.raises(UserError, match="the table is int32"):
        fill.clear_launch(np.zeros((3, 3), np.int32), np.zeros(16, F32))


def stored(values, kind):
    return to_bf16(values) if kind == "bf16" else values


def real(array):
    """What is stored, as float64."""
    return (from_bf16(array) if array.dtype == np.uint16 else array).astype(float)


def check_add_row(module, kind="float32", rows=5, columns=24, scale=1.0, seed=None):
    y, row = stored(normal((rows, columns)) * F32(scale), kind), normal((columns,), 1) * F32(scale)
    before = real(y)
    report = run(module.add_row_launch(y, row), seed)
    want = before + row
    rounding = {"bf16": 2.0**-8, "float32": 0}[kind] + U
    assert (abs(real(y) - want) <= 1.01 * rounding * abs(want)).all()
    assert report["global stores bytes"] == y.nbytes
    assert report["global loads bytes"] == y.nbytes + 4 * y.size
    return y.tobytes()


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("rows, columns", [(1, 8), (5, 24), (40, 72)])
def test_a_row_is_added_to_all(kind, rows, columns):
    assert check_add_row(fill, kind, rows, columns, seed=1) == check_add_row(
        fill, kind, rows, columns, 1.0, 2
    )


@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_a_row_of_tiny_or_huge_numbers(scale):
    check_add_row(fill, scale=scale)


def test_rows_that_cannot_be_added():
    with pytest.raises(UserError, match="in eights, not 12"):
        fill.add_row_launch(np.zeros((2, 12), F32), np.zeros(12, F32))
    with pytest.raises(UserError, match="4294967296 threads is none or too many"):
        fill.add_row_launch(ghost((1 << 31, 8), F32), np.zeros(8, F32))
    with pytest.raises(UserError, match=r"the row is float32 \(8,\)"):
        fill.add_row_launch(np.zeros((2, 8), F32), np.zeros(8, np.uint16))


# ---- Planted faults


def laid(module):
    check_layout(module, 1, part=(8, 24))


def below(module):
    check_layout(module, 0, part=(1, 4))


def largest(module):
    x = np.full((1, 8), -3.4e38, F32)
    made, _ = cut(x, module=module)
    assert (made.sum(0) == x).all() and (made[0] == from_bf16(np.array(0xFF7F))).all()


def middle(module):
    made, _ = cut(np.full((1, 8), (2 - 2.0**-8) * 2.0**127, F32), module=module)
    assert np.isfinite(made).all()


def multiplied(module):
    check_product(module, "NN")


def in_stretches(module):
    check_product(module, "TN", 8, 16, 19, stretches=3)


FAULTS = [
    ("gemm.float32", "cut", "a - low_bf16(word)", "a - high_bf16(word)", laid),
    ("gemm.float32", "cut", "b - high_bf16(word)", "b", laid),
    ("gemm.float32", "cut", "p == 0", "p < 0", largest),
    ("gemm.float32", "inside", "size >= TOP", "size > TOP", middle),
    ("gemm.float32", "inside", "& 0x7FFFFFFF", "", largest),
    ("gemm.float32", "inside", "bits & -65536", "bits & -131072", largest),
    ("gemm.float32", "split", "if i < vectors", "if i <= vectors", laid),
    ("gemm.float32", "split", "w = which[q] * each", "w = q % count * each", laid),
    ("gemm.float32", "split", "at += step", "at += line", laid),
    ("gemm.float32", "split", "int64(row) * wide", "int64(row) * line", below),
    ("gemm.float32", "split_launch", "4 * pitch(x)", "4 * columns", laid),
    ("gemm.float32", "split_launch", "rows * out.strides[0]", "rows * wide", below),
    ("gemm.float32", "split_launch", "2 * columns if axis", "columns if axis", laid),
    ("gemm.float32", "pieces_product", "split_b, right, of_b", "split_b, left, of_b", multiplied),
    ("gemm.float32", "pieces_product", '"add" if at else epilogue', "epilogue", in_stretches),
    ("gemm.float32", "pieces_product", "size = min(length, k - at)", "size = length", in_stretches),
    ("gemm.float32", "pieces_product", "x[at : at + size]", "x[:size]", in_stretches),
    ("gemm.float32", "pieces_product", "if size == length", "if size", in_stretches),
    ("rows.fill", "clear", "if at < count", "if at <= count", check_clear),
    ("rows.fill", "clear", "i * THREADS + t", "t", check_clear),
    ("rows.fill", "clear", "first + at", "at", check_clear),
    ("rows.fill", "add_row", "if i < pieces", "if i <= pieces", check_add_row),
    ("rows.fill", "add_row", "i - across * divide(i, across)", "i", check_add_row),
    ("rows.fill", "add_row", "values[k] += others[k]", "values[k] = others[k]", check_add_row),
]  # fmt: skip


def test_all_faults_have_their_place():
    for module, function, old, new, _ in FAULTS:
        source(Mutant(f"engines.gpu.{module}", function, "", old, new))


@pytest.mark.parametrize(
    "module, function, old, new, check", thinned(FAULTS, 8),
    ids=lambda part: "" if callable(part) else str(part)[:30],
)  # fmt: skip
def test_planted_faults_are_found(module, function, old, new, check):
    wrong = load(Mutant(f"engines.gpu.{module}", function, "", old, new))
    with pytest.raises((AssertionError, Fault, UserError)):
        check(wrong)


@pytest.mark.parametrize("without", thinned(range(6)))
def test_a_pair_that_is_left_out_is_missed(without, monkeypatch):
    pairs = PAIRS[3][:without] + PAIRS[3][without + 1 :]
    monkeypatch.setitem(PAIRS, 3, pairs)
    with pytest.raises(AssertionError):
        check_product(float32, "NN", m=1, n=8)
