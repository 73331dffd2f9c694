"""Float32 products that split their operands in registers: on paper, against float64, counted."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from mutants import Mutant, load, source
from test_gemm_mma import rows_of
from tiers import thinned

from nanoeuler import emulator
from nanoeuler.engines.gpu.gemm import mma_floats, mma_kernel
from nanoeuler.engines.gpu.gemm.mma_floats import (
    LONGEST,
    FloatForm,
    choose_floats,
    floats_kernel,
    floats_product,
    in_registers,
)
from nanoeuler.engines.gpu.gemm.mma_launch import mma_product, pieces_of, space_for
from nanoeuler.engines.gpu.lang.card import SHARED
from nanoeuler.errors import UserError

F32 = np.float32
SMALL = dict(rows=64, columns=64)  # one warp
PAIR = dict(rows=64, columns=128)  # two
U = 2.0**-24
DEPTH = FloatForm().depth


def operands(layout, m, n, k, scales=(1, 1)):
    """A and B as they are stored, views with nan around them; the sums, and those of sizes."""
    rng = np.random.default_rng([m, n, k])
    a = rng.standard_normal((m, k) if layout[0] == "N" else (k, m), F32) * F32(scales[0])
    b = rng.standard_normal((k, n) if layout[1] == "N" else (n, k), F32) * F32(scales[1])
    left, right = (x.astype(float) for x in (a, b))
    left, right = left if layout[0] == "N" else left.T, right if layout[1] == "N" else right.T
    return rows_of(a, F32), rows_of(b, F32), left @ right, abs(left) @ abs(right)


def bound(k, absolute, more=0.0):
    """What two pieces leave out of a product, and 3 k sums of float32, with a hundredth for what
    squares of these make. A number is its pieces but for 2^-17 of it, since 8 bits round to 2^-9 of
    the rest, so a product is within 2 * 2^-17, and the product of the two small pieces 2^-18."""
    return 1.01 * ((2.0**-16 + 2.0**-18 + (3 * k + 2) * U) * absolute + more)


def multiplied(form, m, n, k, epilogue="store", seed=None, kernel=None, blocks=132, **more):
    """The worst error of a product, in its bound; C, and the reports."""
    a, b, want, absolute = operands(form.layout, m, n, k, **more)
    form, rng = replace(form, epilogue=epilogue), np.random.default_rng(k)
    before = rng.standard_normal((m, n), F32) if epilogue == "add" else np.full((m, n), np.nan)
    c = rows_of(before, F32)
    space = np.full(space_for(form, m, n, k, blocks) // 4, np.nan, F32)
    around = c.base.copy()
    launches = mma_product(form, a, b, c, space=space if space.size else None, blocks=blocks,
                           make=floats_kernel)  # fmt: skip
    if kernel is not None:
        launches[0] = replace(launches[0], kernel=kernel)
    reports = [emulator.run(launch, seed, fresh=[space]) for launch in launches[:1]]
    reports += [emulator.run(launch) for launch in launches[1:]]
    around[1:-1, 8 : 8 + n] = c
    np.testing.assert_array_equal(c.base, around)
    held = before.astype(float) if epilogue == "add" else 0
    off = abs(c - held - want) / bound(k, absolute, (len(launches) + 1) * U * abs(held))
    return off.max(), c, reports


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 1), (3, 70, 35), (72, 66, 33), (64, 64, 7 * DEPTH), (65, 8, 2 * DEPTH + 9)]
)
def test_any_size_is_right_and_stays_in_its_place(layout, m, n, k):
    assert multiplied(FloatForm(layout, **SMALL), m, n, k)[0] <= 1


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_tiles_of_several_warps_are_right(layout):
    for form in FloatForm(layout, **PAIR), choose_floats(layout, capability=(8, 9)):
        assert multiplied(form, 136, 132, 3 * DEPTH + 4, blocks=1)[0] <= 1


@pytest.mark.parametrize("epilogue", ["store", "add"])
def test_pieces_of_k_are_summed_in_order(epilogue):
    form = FloatForm("TN", **SMALL)
    assert pieces_of(form, 40, 43, 6 * DEPTH + 8, 3) == 3
    first, again = (multiplied(form, 40, 43, 6 * DEPTH + 8, epilogue, seed, None, 3)
                    for seed in (1, 2))  # fmt: skip
    assert first[0] <= 1 and len(first[2]) == 2
    assert first[1].tobytes() == again[1].tobytes()


def test_large_and_small_numbers_keep_their_digits():
    for scales in (1e18, 1e-18), (1e-15, 1e-15), (1e30, 1e5):
        assert multiplied(FloatForm("NN", **SMALL), 9, 17, 40, scales=scales)[0] <= 1


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_bytes_and_rounds_are_as_predicted(layout):
    """Each byte of a fragment passes once and no bank twice: 128 rows of 64 bytes a warp's step."""
    form, blocks, warps = FloatForm(layout, **PAIR), 3, 2
    _, _, (report,) = multiplied(form, 64, 128, blocks * DEPTH, blocks=1)
    fetched, filled = blocks * form.stage, (form.stages - 1) * form.stage
    assert report["global loads bytes"] == fetched
    assert report["global loads sectors"] == fetched // 32
    assert report["shared loads wavefronts"] == warps * 2 * blocks * 128 * 64 // 128
    assert report["shared stores wavefronts"] == (fetched + filled) // 128
    assert report["tensor FLOPs"] == 3 * 2 * 64 * 128 * blocks * DEPTH


# ---- Planted faults

TILE = "engines.gpu.gemm.mma_tile"  # whose copies are those of every product by mma.sync
FAULTS = {
    "no wait for the copies": ("make_multiply", "            wait()  # (2)", "            # (2)"),
    "one group too few is waited for": (
        "make_multiply", "copy_wait(stages - 2)", "copy_wait(stages - 1)"),
    "no barrier": ("make_multiply", "            cuda.syncthreads()  # so", "            # so"),
    "copies into the stage that is read": (
        "make_multiply", "ahead = slot", "ahead = slot + stage"),
    "another swizzle on the way out": ("make_load", "t ^ swizzle(group, True)", "t"),
    "no edge along k": ("make_copies", "int32(min(max(source.rest * size, 0), 16))", "int32(16)"),
    "an edge along k that is one late": (
        "make_copies", "source.rest * size, 0", "source.rest * size + 4, 0"),
    "no edge below": ("make_copies", "count if j * step < source.below else int32(0)", "count"),
    "the same step twice": ("make_multiply", "step(acc, at, slot, number)",
                            "step(acc, at, slot, 0)"),
    "small pieces of A by small ones of B": ("make_step", "mma(acc, rest_a, b)",
                                             "mma(acc, rest_a, rest_b)"),
    "no small pieces": (
        "cut", "ptx.pack_bf16(x - ptx.low_bf16(large), y - ptx.high_bf16(large))", "0"),
    "rows of A in B's order": (
        "make_load", "(i // 2 * 4 + i % 2, i // 2 * 4 + i % 2 + 2) if of_a else", "(i, i + 8) if "
        "of_a else"),
}  # fmt: skip
MODULE = "engines.gpu.gemm.mma_floats"


def flawed(function, old, new):
    """A context in which kernels are made with a fault: whose module looks it up, and the fault."""
    copies = function == "make_copies"
    wrong = load(Mutant(TILE if copies else MODULE, function, "", old, new))
    return mock.patch.object(mma_kernel if copies else mma_floats, function,
                             getattr(wrong, function))  # fmt: skip


def test_all_faults_have_their_place():
    for what, (function, old, new) in FAULTS.items():
        source(Mutant(TILE if function == "make_copies" else MODULE, function, what, old, new))


@pytest.mark.parametrize("name", thinned(FAULTS))
def test_a_fault_is_found(name):
    form = FloatForm("NT", **PAIR)
    floats_kernel(form)  # is kept, so that none with the fault is
    with flawed(*FAULTS[name]):
        kernel = floats_kernel.__wrapped__(form)
        with pytest.raises((emulator.Fault, AssertionError)):
            assert multiplied(form, 60, 128, 7 * DEPTH - 3, blocks=1, kernel=kernel)[0] <= 1


def test_a_swizzle_left_out_is_found_by_its_rounds():
    """All is right, and rounds are as many as lanes that meet in a bank: 2, or 4 across rows."""
    def plain(row, dense):
        return 0

    wrong = "int32((at ^ (i & 3) << 5)", "int32((at + ((i & 3) << 5))"
    part = load(Mutant(MODULE, "make_load", "", *wrong))
    part.swizzle = plain
    for layout, times in ("NT", 2), ("TN", 4):
        form = FloatForm(layout, **SMALL)
        with mock.patch.multiple(mma_floats, make_load=part.make_load, swizzle=plain):
            kernel = floats_kernel.__wrapped__(form)
        off, _, (slow,) = multiplied(form, 64, 64, DEPTH, kernel=kernel)
        _, _, (fast,) = multiplied(form, 64, 64, DEPTH)
        name = "shared loads wavefronts"
        assert off <= 1 and slow[name] == times * fast[name]


# ---- Launches


def test_launches_keep_sums_short():
    """Stretches where C is large, pieces of split-K where it's a gradient of weights."""
    def launches(layout, m, n, k):
        a = np.zeros((m, k) if layout[0] == "N" else (k, m), F32)
        b = np.zeros((k, n) if layout[1] == "N" else (n, k), F32)
        place = lambda need: np.zeros(need, np.uint8)  # noqa: E731
        form = choose_floats(layout, capability=(8, 9))
        return floats_product(form, a, b, np.zeros((m, n), F32), place=place)

    parts, sums = launches("TN", 768, 512, 8192)
    assert parts.grid[1] >= 8192 // (LONGEST * DEPTH) and sums.args[-1] == parts.grid[1]
    first, second = launches("NT", 2304, 8192, 4096)
    assert first.kernel is not second.kernel and second.kernel is floats_kernel(
        choose_floats("NT", "add", (8, 9)))  # fmt: skip
    assert [x.args[8] for x in (first, second)] == [2048, 2048]
    a_sum = FloatForm("TN")
    assert pieces_of(a_sum, 8192, 8192, 40 * LONGEST * DEPTH) == 40


def test_every_card_since_8_0_gets_a_form_that_fits():
    for capability, room in SHARED.items():
        form = choose_floats("NT", capability=capability)
        assert form.shared <= room and form.threads <= 256
    with pytest.raises(UserError, match="8.0 or newer, not"):
        choose_floats("NT", capability=(7, 5))
    assert in_registers((8, 9), 2) and not in_registers((9, 0), 2) and not in_registers((8, 9), 3)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="stored as float32, not as bf16"):
        FloatForm(out="bf16")
    a, b, c = np.zeros((8, 16), np.uint16), np.zeros((8, 16), F32), np.zeros((8, 8), F32)
    with pytest.raises(UserError, match="expected float32, float32, float32"):
        mma_product(FloatForm(), a, b, c, make=floats_kernel)
