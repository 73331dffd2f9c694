"""A GPU emulator: each family of instructions against NumPy, and planted faults, all found."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from mutants import Mutant, load, source
from tiers import thinned
from tiled_product import make_product

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.emulator.ptx_parser import translate
from nanoeuler.engines.gpu.gemm import wgmma_epilogue, wgmma_form, wgmma_kernel, wgmma_launch
from nanoeuler.engines.gpu.gemm.wgmma_form import Form
from nanoeuler.engines.gpu.gemm.wgmma_launch import product
from nanoeuler.engines.gpu.lang import hopper
from nanoeuler.engines.gpu.lang import ptx as ptx_module
from nanoeuler.engines.gpu.lang.hopper import (
    bulk_commit,
    bulk_wait,
    cluster_arrive,
    cluster_wait,
    descriptor,
    load_bytes,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    proxy_fence,
    set_registers,
    tma_load,
    tma_store,
    wgmma,
    wgmma_wait,
)
from nanoeuler.engines.gpu.lang.instruction import (
    Instruction,
    cuda,
    float32,
    int8,
    int32,
    int64,
    ptx,
)
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.lang.ptx import barrier, grid_barrier, shared_address
from nanoeuler.errors import UserError

TILE = 4
rng = np.random.default_rng(0)


def random(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def play(function, args, *arrays, grid=(1,), threads=32, seed=None, fresh=(), **more):
    """Run a function as a kernel; `args` as in Kernel."""
    kernel = Kernel(function, args, threads, **more)
    return run(Launch(kernel, grid, arrays), seed, fresh)


def fault_of(kind, function, args, *arrays, text=None, **more):
    """Run what must be refused with this kind of fault, in order and in two other orders."""
    for seed in (None, 0, 1):
        with pytest.raises(Fault, match=text) as caught:
            play(function, args, *arrays, seed=seed, **more)
        assert caught.value.kind in kind.split(), caught.value
    return str(caught.value)


# ---- Threads, arrays, barriers.


def places(out):
    i = cuda.grid(1)
    out[cuda.blockIdx.y, i] = (
        cuda.blockDim.x * 1000 + cuda.gridDim.x * 100 + cuda.threadIdx.x * 10 + cuda.laneid
    )


@pytest.mark.parametrize("seed", [None, 0])
def test_every_thread_knows_its_place(seed):
    out = np.full((2, 120), -1, np.int32)
    play(places, "r[2]", out, grid=(3, 2), threads=40, seed=seed, fresh=(out,))
    t = np.tile(np.arange(40), 3)
    assert (out == 40 * 1000 + 300 + t * 10 + t % 32).all()


def place_in_three(out):
    t, b = cuda.threadIdx, cuda.blockIdx
    out[b.z * 2 + t.z, b.y * 3 + t.y, b.x * 4 + t.x] = cuda.grid(3)[0] + 100 * cuda.grid(3)[2]


def test_blocks_have_three_axes():
    out = np.full((4, 6, 8), -1, np.int32)
    play(place_in_three, "r[3]", out, grid=(2, 2, 2), threads=(4, 3, 2), fresh=(out,))
    assert (out == np.arange(8) + 100 * np.arange(4)[:, None, None]).all()


def sum_by_loops(x, out):
    near = cuda.local.array(3, float32)
    tile = cuda.shared.array(3, int32)
    t = cuda.threadIdx.x
    for i in range(3):
        near[i] = x[i]
    if t < 3:
        tile[t] = t + 1
    cuda.syncthreads()
    total = float32(0)
    for value in x:
        total += value
    for value in near:
        total += float32(10) * value
    for value in tile:
        total += float32(100 * value)
    out[t] = total


def test_a_loop_over_an_array_takes_its_elements():
    x, out = np.arange(1, 6, dtype=np.float32), np.zeros(40, np.float32)
    for threads in 32, 40:
        play(sum_by_loops, "f[1] f[1]", x, out, threads=threads)
        assert (out[:threads] == 15 + 60 + 600).all()
    report = fault_of("unwritten", sum_by_loops, "f[1] f[1]", x, out, threads=2)
    assert "for value in tile" in report


def test_a_product_with_tiles_and_its_counts():
    m, k, n = 8, 12, 16
    a, b, c = random(m, k), random(k, n), np.zeros((m, n), np.float32)
    more = {"grid": (n // TILE, m // TILE), "threads": (TILE, TILE), "fresh": (c,)}
    report = play(make_product(TILE), "f[2] f[2] f[2]", a, b, c, **more)
    assert np.abs(c - a @ b).max() < 1e-5
    blocks, steps = 8, 3
    assert report["barriers"] == blocks * steps * 2
    assert report["global loads bytes"] == 4 * 2 * blocks * steps * TILE * TILE
    assert report["global stores bytes"] == 4 * m * n
    # Half a warp of 16 threads has four rows of four floats: 16 bytes each, half a sector.
    assert report["global loads sectors"] == blocks * steps * 2 * TILE
    assert report["shared stores"] == report["global loads"] == blocks * steps * 2
    assert report["shared loads"] == blocks * steps * 2 * TILE
    first = c.copy()
    for seed in range(3):  # by threads now, in other orders: the same bits, the same counts
        again = play(make_product(TILE), "f[2] f[2] f[2]", a, b, c, seed=seed, **more)
        assert (c == first).all() and again.counts == report.counts


@pytest.mark.parametrize("barriers", ["first", "second"])
def test_a_missing_barrier_is_a_race(barriers):
    a, b, c = random(4, 12), random(12, 4), np.zeros((4, 4), np.float32)
    text = fault_of(
        "race", make_product(TILE, barriers), "f[2] f[2] f[2]", a, b, c, threads=(TILE, TILE),
        text="race on [ab]_tile",
    )  # fmt: skip
    assert "a_tile[y, x] = a[row, start + x]" in text or "b_tile[y, x]" in text
    assert "total += a_tile[y, k] * b_tile[k, x]" in text


def make_sum(sync):
    def total(x, out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(32, float32)
        s[t] = x[t]
        stride = 16
        while stride:
            sync()
            if t < stride:
                s[t] += s[t + stride]
            stride //= 2
        if t == 0:
            out[0] = s[0]

    return total


def warp():
    cuda.syncwarp()


def block():
    cuda.syncthreads()


def nothing():
    pass


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("sync", [warp, block])
def test_a_tree_of_sums(sync, seed):
    x, out = random(32), np.zeros(1, np.float32)
    play(make_sum(sync), "f[1] f[1]", x, out, seed=seed, fresh=(out,))
    assert abs(out[0] - x.sum()) < 1e-5


def test_a_missing_syncwarp_is_a_race():
    x, out = random(32), np.zeros(1, np.float32)
    fault_of("race", make_sum(nothing), "f[1] f[1]", x, out, text=r"race on s\[")


def lanes(x, out, bits):
    i = cuda.threadIdx.x
    v = x[i]
    out[0, i] = cuda.shfl_xor_sync(0xFFFFFFFF, v, 5)
    out[1, i] = cuda.shfl_up_sync(0xFFFFFFFF, v, 3)
    out[2, i] = cuda.shfl_down_sync(0xFFFFFFFF, v, 4)
    out[3, i] = cuda.shfl_sync(0xFFFFFFFF, v, 7)
    if i % 32 < 8:
        out[4, i] = cuda.shfl_xor_sync(0xFF, v, 1)
    bits[0, i] = cuda.ballot_sync(0xFFFFFFFF, v > 0)
    bits[1, i] = cuda.any_sync(0xFFFFFFFF, v > 10) + 2 * cuda.all_sync(0xFFFFFFFF, v < 10)


def test_shuffles_and_votes():
    x, out, bits = random(64), np.zeros((5, 64), np.float32), np.zeros((2, 64), np.int64)
    play(lanes, "f[1] f[2] l[2]", x, out, bits, threads=64, seed=1)
    lane, w = np.arange(64) % 32, x.reshape(2, 32)
    assert (out[0] == np.take(w, lane[:32] ^ 5, axis=1).ravel()).all()
    assert (out[1] == np.where(lane < 3, x, np.roll(x, 3))).all()
    assert (out[2] == np.where(lane >= 28, x, np.roll(x, -4))).all()
    assert (out[3] == w[:, 7].repeat(32)).all()
    assert (out[4] == np.where(lane < 8, x[np.arange(64) ^ 1], 0)).all()
    assert (bits[0] == ((w > 0) << np.arange(32)).sum(axis=1).repeat(32)).all()
    assert (bits[1] == 2).all()


def histogram(x, out):
    i = cuda.grid(1)
    local = cuda.shared.array(4, int32)
    if cuda.threadIdx.x < 4:
        local[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    cuda.atomic.add(local, x[i], 1)
    cuda.syncthreads()
    if cuda.threadIdx.x < 4:
        cuda.atomic.add(out, cuda.threadIdx.x, local[cuda.threadIdx.x])


def test_atomics_are_no_race():
    x, out = rng.integers(4, size=96).astype(np.int32), np.zeros(4, np.int32)
    for seed in (None, 2):
        out[:] = 0
        play(histogram, "r[1] r[1]", x, out, grid=(3,), seed=seed)
        assert (out == np.bincount(x, minlength=4)).all()


def set_and_add(out):
    if cuda.blockIdx.x:
        cuda.atomic.add(out, 0, 1)
    else:
        out[0] = 1


def test_an_atomic_races_with_a_plain_write_of_another_block():
    out = np.zeros(1, np.int32)
    more = {"threads": 1, "text": r"race on out\[0\]: another block has written it"}
    fault_of("race", set_and_add, "r[1]", out, grid=(2,), **more)


def add_then_set(out):
    cuda.atomic.add(out, 0, 1)
    cuda.syncthreads()
    if cuda.blockIdx.x == 2:
        out[0] = 1


def test_a_plain_write_races_with_an_atomic_of_any_earlier_block():
    out = np.zeros(1, np.int32)
    more = {"threads": 1, "text": r"race on out\[0\]: another block has written it"}
    fault_of("race", add_then_set, "r[1]", out, grid=(3,), **more)


def stored(x, out):
    local = cuda.local.array(1, int32)
    local[0] = int64(x[cuda.threadIdx.x])
    out[cuda.threadIdx.x] = local[0]


def converted(x, out):
    out[cuda.threadIdx.x] = int32(x[cuda.threadIdx.x])


@pytest.mark.parametrize("abreast", [True, False])
@pytest.mark.parametrize("kernel", [stored, converted])
def test_what_is_too_wide_for_an_integer_wraps(kernel, abreast):
    x, out = np.array([3e9, -3e9, 1.5, -1.5], np.float32), np.zeros(4, np.int32)
    launch = Launch(Kernel(kernel, "f[1] r[1]", threads=4), (1,), (x, out))
    run(launch, abreast=abreast)
    assert out.tolist() == [3 * 10**9 - 2**32, 2**32 - 3 * 10**9, 1, -1]


def helper(values, i):
    return values[i] * 2


def with_registers(x, out):
    t = cuda.threadIdx.x
    pile = cuda.shared.array(0, float32)  # the dynamic memory
    own = cuda.local.array(3, float32)
    for i in range(3):
        own[i] = x[3 * t + i]
    pile[t] = own[0] + helper(own, 1) + own[2]
    cuda.syncthreads()
    out[t] = pile[31 - t]


def test_helpers_registers_and_dynamic_memory():
    x, out = random(96), np.zeros(32, np.float32)
    for seed in (None, 1):
        play(with_registers, "f[1] f[1]", x, out, shared=128, seed=seed)
        assert np.abs(out - (x.reshape(32, 3) @ [1, 2, 1])[::-1]).max() < 1e-5


class Line(NamedTuple):
    """An array, and what is added to it."""

    values: Any
    more: int


def add_to_lines(one: Line, n, two: Line):
    i = cuda.threadIdx.x
    if i < n:
        one.values[i] += one.more
        two.values[i] += two.more


@pytest.mark.parametrize("abreast", [True, False])
def test_arguments_that_come_in_tuples(abreast):
    x, y = np.zeros(32, np.int32), np.zeros(32, np.int32)
    kernel = Kernel(add_to_lines, "r[1] r r r[1] r", 32)
    run(Launch(kernel, (1,), (x, 3, 20, y, 5)), abreast=abreast)
    assert (x == 3 * (np.arange(32) < 20)).all() and (y == 5 * (np.arange(32) < 20)).all()
    assert kernel.names() == ["values", "more", "n", "values", "more"]
    with pytest.raises(UserError, match="add_to_lines takes 5 arguments, but got 3"):
        Launch(kernel, (1,), (x, 3, 20))


def integers(x, out):
    out[0] = int32(x[0] * x[0])
    out[1] = int64(x[0]) * x[0]
    out[2] = int32(float32(-3.7))
    out[3] = int8(200)


def test_integers_wrap_where_they_are_converted():
    x, out = np.array([2**20], np.int32), np.zeros(4, np.int64)
    for seed in (None, 0):
        play(integers, "r[1] l[1]", x, out, threads=1, seed=seed)
        assert out.tolist() == [0, 2**40, -3, -56]


def make_copy(stride):
    def copy(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t * stride]

    return copy


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (8, 32), (0, 1)])
def test_sectors_of_global_memory(stride, sectors):
    x, out = random(32 * 8), np.zeros(32, np.float32)
    for seed in (None, 0):
        report = play(make_copy(stride), "f[1] f[1]", x, out, seed=seed)
        assert report["global loads sectors"] == sectors and report["global stores sectors"] == 4
        assert report["global loads"] == 1 and report["global loads bytes"] == 128


def make_transpose(width):
    def transpose(x, out):
        t = cuda.threadIdx.x
        tile = cuda.shared.array((32, width), float32)
        for i in range(32):
            tile[i, t] = x[i, t]
        cuda.syncthreads()
        for i in range(32):
            out[i, t] = tile[t, i]

    return transpose


@pytest.mark.parametrize("width, rounds", [(32, 32), (33, 1), (34, 2)])
def test_banks_of_shared_memory(width, rounds):
    x, out = random(32, 32), np.zeros((32, 32), np.float32)
    for seed in (None, 0):
        report = play(make_transpose(width), "f[2] f[2]", x, out, seed=seed)
        assert (out == x.T).all()
        assert report["shared loads wavefronts"] == 32 * rounds
        assert report["shared stores wavefronts"] == 32


# ---- Faults of plain kernels.


def test_an_index_outside_is_refused():
    def outside(x, out, index):
        out[0] = x[cuda.threadIdx.x + index]

    for index in 32, -1:
        arrays = random(32), random(1), index
        text = fault_of("bounds", outside, "f[1] f[1] r", *arrays, text="index")
        assert "out[0] = x[cuda.threadIdx.x + index]" in text


def test_reading_what_nobody_wrote_is_refused():
    def accumulate(x):
        s = cuda.shared.array(32, float32)
        s[cuda.threadIdx.x] += x[cuda.threadIdx.x]

    text = fault_of("unwritten", accumulate, "f[1]", random(32), text=r"nobody wrote s\[")
    assert "s[cuda.threadIdx.x] += x[cuda.threadIdx.x]" in text

    def half(x, out):
        t = cuda.threadIdx.x
        if t < 16:
            out[t] = x[t]
        cuda.syncthreads()
        x[t] = out[t]

    out = random(32)
    text = r"out\[(1[6-9]|[23]\d)\]"
    fault_of("unwritten", half, "f[1] f[1]", random(32), out, text=text, fresh=(out,))
    play(half, "f[1] f[1]", random(32), out)  # without `fresh`, what the host wrote counts


def test_a_barrier_that_not_all_reach_is_divergence():
    def one_branch(x):
        if cuda.threadIdx.x < 8:
            cuda.syncthreads()

    fault_of("divergence", one_branch, "f[1]", random(1), text="8 of 32 threads have come")

    def two_branches(x):
        if cuda.threadIdx.x < 8:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    fault_of("divergence", two_branches, "f[1]", random(1), text="wait at another")

    def a_lane_less(x):
        if cuda.threadIdx.x != 5:
            cuda.shfl_xor_sync(0xFFFFFFFF, x[0], 1)

    fault_of("divergence", a_lane_less, "f[1]", random(1), text="31 of 32 of warp 0")

    def two_meetings(x):
        if cuda.threadIdx.x < 5:
            cuda.shfl_xor_sync(0xFFFFFFFF, x[0], 1)
        else:
            cuda.ballot_sync(0xFFFFFFFF, 1)

    fault_of("divergence", two_meetings, "f[1]", random(1), text="while others of warp 0 are at")


def test_two_blocks_may_not_share_an_element():
    def both_write(x):
        x[cuda.threadIdx.x] = cuda.blockIdx.x

    fault_of("race", both_write, "f[1]", random(32), grid=(2,), text="another block has written")

    def pass_on(x):
        b = cuda.blockIdx.x
        x[b + 1] = x[b]

    fault_of("race", pass_on, "f[1]", random(4), grid=(3,), threads=1, text="another block")


def test_two_threads_may_not_write_one_element():
    def all_write(x):
        x[0] = cuda.threadIdx.x

    text = fault_of("race", all_write, "f[1]", random(1), text=r"race on x\[0\]")
    assert text.count("writes it") == 2


def test_what_is_no_index_and_what_is_too_much_are_refused():
    def a_row(x, out):
        out[0] = x[0][1]

    fault_of("misuse", a_row, "f[2] f[1]", random(2, 2), random(1), text="an index of 0")

    def much(x):
        s = cuda.shared.array(48 * 1024, int8)
        s2 = cuda.shared.array(48 * 1024, int8)
        s[0] = s2[0] = 0

    fault_of("misuse", much, "f[1]", random(1), threads=1, text="bytes of shared memory")


# ---- PTX, text to Python.


def make_one(instruction, count):
    """A kernel that calls an instruction once, with the values that it is given."""

    def one(out, a, b, c):
        value = instruction(a, b, c) if count == 3 else instruction(a, b) if count == 2 else (
            instruction(a)
        )  # fmt: skip
        out[0] = value

    return one


MAX = 2**31 - 1
VALUES = [
    ("add.s32 $0, $1, $2;", "r r", "r", (MAX, 1), -MAX - 1),
    ("div.u32 $0, $1, $2;", "r r", "r", (-1, 2), MAX),
    ("mul.lo.s32 $0, $1, $2;", "r r", "r", (1 << 20, 1 << 13), 0),
    ("xor.b32 $0, $1, $2;", "r r", "r", (12, 10), 6),
    ("shr.u32 $0, $1, $2;", "r r", "r", (-1, 28), 15),
    ("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, 5, 7, p; }", "r r", "r", (-1, 1), 5),
    ("{ .reg .pred p; setp.lt.u32 p, $1, $2; selp.b32 $0, 5, 7, p; }", "r r", "r", (-1, 1), 7),
    ("{ .reg .pred p; setp.eq.s32 p, $1, 3; mov.b32 $0, 1; @!p mov.b32 $0, 2; }",
     "r", "r", (3,), 1),
    ("{ .reg .pred p; .reg .b32 t; mov.b32 t, 0xffffffff; setp.eq.s32 p, t, $1;"
     " selp.b32 $0, 5, 7, p; }", "r", "r", (-1,), 5),
    ("cvt.rn.bf16x2.f32 $0, $2, $1;", "f f", "r", (1.0, 2.0), 0x40003F80),
    ("{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", "r", "f", (0x40003F80,), 1.0),
    ("{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", "r", "f", (0x40003F80,), 2.0),
    ("mov.f32 $0, 0f40490fdb;", "f", "f", (0.0,), np.float32(np.pi)),
    ("ex2.approx.ftz.f32 $0, $1;", "f", "f", (-1.0,), 0.5),
    ("ex2.approx.ftz.f32 $0, $1;", "f", "f", (-140.0,), 0.0),
    ("ex2.approx.f32 $0, $1;", "f", "f", (-140.0,), 2.0**-140),
    ("lg2.approx.ftz.f32 $0, $1;", "f", "f", (8.0,), 3.0),
    ("rsqrt.approx.f32 $0, $1;", "f", "f", (4.0,), 0.5),
    ("tanh.approx.f32 $0, $1;", "f", "f", (100.0,), 1.0),
    ("max.f32 $0, $1, $2;", "f f", "f", (float("nan"), 2.0), 2.0),
    # zeros have an order, whichever comes first
    ("{ .reg .f32 t; max.f32 t, $1, $2; mov.b32 $0, t; }", "f f", "r", (-0.0, 0.0), 0),
    ("{ .reg .f32 t; max.f32 t, $1, $2; mov.b32 $0, t; }", "f f", "r", (0.0, -0.0), 0),
    ("{ .reg .f32 t; min.f32 t, $1, $2; mov.b32 $0, t; }", "f f", "r", (-0.0, 0.0), -(2**31)),
    ("{ .reg .f32 t; min.f32 t, $1, $2; mov.b32 $0, t; }", "f f", "r", (0.0, -0.0), -(2**31)),
    ("fma.rn.f32 $0, $1, $2, $3;", "f f f", "f", (2.0, 3.0, 1.0), 7.0),
    ("fma.rn.f32 $0, $1, $2, $3;", "f f f", "f",  # in float64 the sum would be rounded to a tie
     (13325 * 2.0**-27, 80581 * 2.0**-27, 1.0), 1 + 2.0**-23),
    ("{ .reg .b32 t; mov.b32 t, $1;\n AGAIN:\n .reg .pred p; add.s32 t, t, $2;"
     " setp.lt.s32 p, t, 10; @!p bra DONE; add.s32 t, t, 100;\n DONE:\n mov.b32 $0, t; }",
     "r r", "r", (4, 5), 109),
]  # fmt: skip


@pytest.mark.parametrize("text, args, ret, values, expected", VALUES)
def test_an_instruction_on_values(text, args, ret, values, expected):
    out = np.zeros(1, np.float32 if ret == "f" else np.int32)
    tokens = [*args.split(), *["r"] * (3 - len(values))]
    given = [*values, *[0] * (3 - len(values))]
    one = make_one(ptx(text, args, ret), len(values))
    play(one, f"{ret}[1] {' '.join(tokens)}", out, *given, threads=1)
    assert out[0] == expected


WRONG = [
    ("cvt.rn.bf16x2.f16 $0, $2, $1;", "f f", "r", "no instruction 'cvt.rn.bf16x2.f16'"),
    ("mbarrier.init.shared::ctx.b64 [$0], $1;", "r r", "", "no instruction"),
    ("mbarrier.try_wait.shared::cta.b64 p, [$0], $1;", "r r", "", "no instruction"),
    ("wgmma.fence.sync;", "", "", "no instruction"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b8 {$0,$1,$2,$3}, [$4];", "r", "r r r r", "no instru"),
    ("add.s32 $0, $1;", "r", "r", "add.s32 with"),
    ("mov.u32 $0, %clock;", "", "r", "no special register"),
]


@pytest.mark.parametrize("text, args, ret, says", WRONG)
def test_what_the_emulator_does_not_know_is_refused(text, args, ret, says):
    instruction = ptx(text, args, ret)

    def kernel(x):
        instruction()

    with pytest.raises(UserError, match=says):
        play(kernel, "f[1]", random(1))


store_word = ptx("st.shared.b32 [$0], $1;", "r r")
inc_to = ptx("atom.relaxed.cta.shared::cta.inc.u32 $0, [$1], $2;", "r r", "r")


def test_a_count_has_a_limit_without_a_sign():
    def count(out):
        base = shared_address(cuda.shared.array(0, int8))
        store_word(base, 7)
        inc_to(base, -1)  # 2^32 - 1: far away
        out[0] = inc_to(base, -1)

    out = np.zeros(1, np.int32)
    play(count, "r[1]", out, threads=1, shared=16)
    assert out[0] == 8


def test_bytes_for_a_block_that_is_none():
    def send(source):
        base = shared_address(cuda.shared.array(0, int8))
        if cuda.threadIdx.x == 0:
            mbarrier_init(base, 1)
            mbarrier_init_fence()
            mbarrier_expect(base, 16)
            load_bytes(base + 16 | 3 << 24, source, 16, base)

    fault_of("bounds", send, "l", np.zeros(4, np.float32), shared=32, text="no block 3 among 1")


def grid_wait(x, word, out):
    if cuda.threadIdx.x == 0:
        x[cuda.blockIdx.x] = cuda.blockIdx.x + 1
        others = cuda.gridDim.x - 1
        grid_barrier(word, int32(0x80000000 - others) if cuda.blockIdx.x == 0 else 1)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        for i in range(cuda.gridDim.x):
            out[cuda.blockIdx.x, i] = x[i]


def test_blocks_that_run_together_can_wait_for_each_other():
    for seed in (None, 0, 1):
        x, word, out = np.zeros(3, np.float32), np.zeros(1, np.int32), np.zeros((3, 3), np.float32)
        play(grid_wait, "f[1] l f[2]", x, word, out, grid=(3,), together=True, seed=seed)
        assert (out == [1, 2, 3]).all()
    with pytest.raises(Fault, match="goes round in a loop") as caught:  # one after another: never
        play(grid_wait, "f[1] l f[2]", x, np.zeros(1, np.int32), out, grid=(3,))
    assert caught.value.kind == "deadlock"


# ---- Copies in a ring, two stages, wrapped more than twice.

ROWS, STAGES, COUNT = 8, 2, 6  # rows of a box of 64 bf16; boxes that go through the ring
BOX = ROWS * 128
FULL, EMPTY = STAGES * BOX, STAGES * BOX + 8 * STAGES


def make_ring(flaw=""):
    """Warp 0 fetches boxes, warp 1 adds 1 to each and stores them; `flaw` names what is wrong."""

    double = 2 if flaw == "too many bytes" else 1

    def ring(source, target):
        base = shared_address(cuda.shared.array(0, int8))
        t = cuda.threadIdx.x
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(base + FULL + 8 * s, 1)
                mbarrier_init(base + EMPTY + 8 * s, 1)
            if flaw != "no fence after init":
                mbarrier_init_fence()
        if flaw != "no barrier after init":
            cuda.syncthreads()
        for i in range(COUNT):
            stage, phase = i % STAGES, i // STAGES & 1
            box, full = int32(base + stage * BOX), int32(base + FULL + 8 * stage)
            empty = int32(base + EMPTY + 8 * stage)
            if t == 0:
                if flaw != "no wait for empty":
                    mbarrier_wait(empty, phase ^ (flaw != "wrong parity"))
                mbarrier_expect(full, BOX * double - 16 * (flaw == "too few bytes"))
                tma_load(box, source, 0, i * ROWS, full)
            elif t >= 32:
                if flaw != "no wait for full":
                    mbarrier_wait(full, phase)
                row = int32(box + (t - 32) // 4 * 128 + (t & 3) * 32)
                for j in range(8):
                    add_one(row + 4 * j)
                if flaw != "no proxy fence":
                    proxy_fence()
                if flaw != "no barrier before the store":
                    cuda.syncwarp()
                if t == 32:
                    tma_store(target, 0, i * ROWS, box)
                    bulk_commit()
                    last = flaw == "no wait at the end" and i == COUNT - 1
                    if flaw != "no wait for the store" and not last:
                        wait_read()
                    mbarrier_arrive(empty)
                    if flaw == "arrives twice":
                        mbarrier_arrive(empty)
        if t == 32 and flaw != "no wait at the end":
            bulk_wait()

    return ring


add_pair = ptx(
    "{ .reg .b32 a, b; ld.shared.b32 a, [$0]; add.s32 b, a, 65537; st.shared.b32 [$0], b; }", "r"
)
wait_read = ptx("cp.async.bulk.wait_group.read 0;")


def add_one(address):
    add_pair(address)


def ring(flaw="", seed=None):
    source = rng.integers(1000, size=(COUNT * ROWS, 64)).astype(np.uint16)
    target = np.zeros_like(source)
    report = play(
        make_ring(flaw), "l l", Map(source, (ROWS, 64)), Map(target, (ROWS, 64)),
        threads=64, shared=EMPTY + 8 * STAGES, seed=seed, fresh=(target,),
    )  # fmt: skip
    return source, target, report


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_a_ring_of_copies(seed):
    source, target, report = ring(seed=seed)
    assert (target == source + 1).all()
    assert report["copies in bytes"] == report["copies out bytes"] == source.nbytes


FLAWS = {
    "no fence after init": "misuse",
    "no barrier after init": "misuse race",
    "no wait for empty": "race misuse",
    "wrong parity": "deadlock race",
    "too few bytes": "race deadlock",
    "too many bytes": "deadlock",
    "no wait for full": "race unwritten",
    "no proxy fence": "proxy",
    "no barrier before the store": "proxy race",
    "no wait for the store": "race",
    "arrives twice": "misuse deadlock race",
    "no wait at the end": "flight",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_in_the_ring_is_found(flaw):
    for seed in (None, 0, 1):
        with pytest.raises(Fault) as caught:
            ring(flaw, seed)
        assert caught.value.kind in FLAWS[flaw].split(), caught.value



# ---- Tensor cores.


def make_fragments(trans):
    load = ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "r", "r r r r",
    )  # fmt: skip
    store = ptx(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1, $2, $3, $4}};", "r r r r r"
    )

    def fragments(x, pairs, out):
        t = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, int8))
        for i in range(4):
            store_word(base + t * 16 + 4 * i, x[t, i])
        cuda.syncwarp()
        a, b, c, d = load(base + t * 16)
        pairs[t, 0], pairs[t, 1], pairs[t, 2], pairs[t, 3] = a, b, c, d
        store(base + 512 + t * 16, a, b, c, d)
        cuda.syncwarp()
        for i in range(4):
            out[t, i] = load_word(base + 512 + t * 16 + 4 * i)

    return fragments


store_word = ptx("st.shared.b32 [$0], $1;", "r r")
load_word = ptx("ld.shared.b32 $0, [$1];", "r", "r")


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_to_fragments_and_back(trans):
    matrices = rng.integers(2**15, size=(4, 8, 8)).astype(np.uint16)
    x, pairs, out = (np.zeros((32, 4), np.int32) for _ in range(3))
    x[:] = matrices.reshape(32, 8).view(np.int32)
    report = play(make_fragments(trans), "r[2] r[2] r[2]", x, pairs, out, shared=1024)
    seen = matrices.transpose(0, 2, 1) if trans else matrices
    for lane in range(32):  # PTX ISA: lane 4 r + c has elements (r, 2 c) and (r, 2 c + 1)
        r, c = divmod(lane, 4)
        assert (pairs[lane].view(np.uint16).reshape(4, 2) == seen[:, r, 2 * c : 2 * c + 2]).all()
    assert (out == x).all()
    # A row of 16 bytes a lane: eight rows a round, without conflicts.
    assert report["shared loads wavefronts"] == 4 + 4 * 4  # of ldmatrix, and of load_word


mma = ptx(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7},"
    " {$8, $9}, {$10, $11, $12, $13};",
    "r r r r r r f f f f", "f f f f",
)  # fmt: skip


def multiply(a, b, c):
    t = cuda.threadIdx.x
    g, q = t // 4, t % 4
    d = mma(
        a[g, q], a[g + 8, q], a[g, q + 4], a[g + 8, q + 4], b[g, q], b[g, q + 4],
        c[g, 2 * q], c[g, 2 * q + 1], c[g + 8, 2 * q], c[g + 8, 2 * q + 1],
    )  # fmt: skip
    c[g, 2 * q], c[g, 2 * q + 1], c[g + 8, 2 * q], c[g + 8, 2 * q + 1] = d


def test_mma_sync():
    a, b, c = to_bf16(random(16, 16)), to_bf16(random(8, 16)), random(16, 8)
    want = c + from_bf16(a).astype(float) @ from_bf16(b).astype(float).T
    report = play(multiply, "r[2] r[2] f[2]", a.view(np.int32), b.view(np.int32), c)
    assert np.abs(c - want).max() < 1e-5 and report["tensor FLOPs"] == 2 * 16 * 8 * 16


def make_wgmma(layout, registers=False, flaw=""):
    """D (64 x 64) = A (64 x 32) B, both in boxes of 128 bytes, or A from a thread's registers."""
    a_step, b_step = (128 if layout[0] == "T" else 2), (128 if layout[1] == "N" else 2)
    from_shared, from_registers = wgmma(64, 2, a_step, b_step, layout), None
    if flaw == "no fence":
        text = from_shared.text.replace("wgmma.fence.sync.aligned;", "")
        from_shared = ptx(text, "+f*32 l l r")
    if registers:
        lines = ["{ .reg .pred t; setp.eq.b32 t, 0, 0; .reg .b64 b; wgmma.fence.sync.aligned;"]
        for k in range(2):
            lines.append(
                f"add.s64 b, $2, {k * b_step}; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
                f" {{$0[0:32]}}, {{$1[{4 * k}:{4 * k + 4}]}}, b, t, 1, 1, {int(layout[1] == 'N')};"
            )
        lines.append("wgmma.commit_group.sync.aligned; }")
        from_registers = ptx("\n".join(lines), "+f*32 r*8 l")
    wait = wgmma_wait(32)
    tall = 32 if layout[0] == "T" else 64
    b_rows = 64 if layout[1] == "T" else 32

    def kernel(map_a, map_b, pairs, out):
        t = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, int8))
        bar = base + 16384
        if t == 0:
            mbarrier_init(bar, 1)
            mbarrier_init_fence()
        cuda.syncthreads()
        if t == 0:
            mbarrier_expect(bar, (tall + b_rows) * 128)
            tma_load(base, map_a, 0, 0, bar)
            tma_load(base + 8192, map_b, 0, 0, bar)
        acc = cuda.local.array(32, float32)
        own = cuda.local.array(8, int32)
        for i in range(32):
            acc[i] = float32(1)
        for i in range(8):
            own[i] = pairs[t, i]
        if flaw != "no wait for the copy":
            mbarrier_wait(bar, 0)
        a = int64(descriptor(16, 1024)) | int64((base & 0x3FFFF) >> 4)
        b = int64(descriptor(16, 1024)) | int64(((base + 8192) & 0x3FFFF) >> 4)
        if registers:
            from_registers(acc, own, b)
            if flaw == "A overwritten":
                own[0] = 0
        else:
            from_shared(acc, a, b, 1)
        if flaw == "sums overwritten":
            acc[0] = float32(0)
        if flaw != "no wait for the product":
            wait(acc)
        for i in range(32):
            out[t, i] = acc[i]

    return kernel


def run_wgmma(layout, registers=False, flaw="", seed=None):
    a = to_bf16(random(32, 64) if layout[0] == "T" else random(64, 64))
    b = to_bf16(random(32, 64) if layout[1] == "N" else random(64, 64))
    A = from_bf16(a).astype(float)
    A = (A.T if layout[0] == "T" else A)[:, :32]  # of rows of 64, two steps of 16
    B = from_bf16(b).astype(float)
    B = B if layout[1] == "N" else B[:, :32].T
    t, i, h = np.arange(128)[:, None, None], np.arange(8)[None, :, None], np.arange(2)
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
    pairs = to_bf16(A[row + 0 * h, i // 4 * 16 + i % 4 // 2 * 8 + t % 4 * 2 + h])
    out = np.zeros((128, 32), np.float32)
    report = play(
        make_wgmma(layout, registers, flaw), "l l r[2] f[2]", Map(a, (len(a), 64)),
        Map(b, (len(b), 64)), pairs.reshape(128, 16).view(np.int32), out,
        threads=128, shared=16384 + 8, seed=seed, fresh=(out,),
    )  # fmt: skip
    i = np.arange(32)
    row = t[..., 0] // 32 * 16 + t[..., 0] % 32 // 4 + i % 4 // 2 * 8
    want = (1 + A @ B)[row, i // 4 * 8 + t[..., 0] % 4 * 2 + i % 2]
    return np.abs(out - want).max(), report


@pytest.mark.parametrize("layout, registers", [
    ("NT", False), ("NN", False), ("TN", False), ("TT", False), ("NT", True), ("NN", True),
])  # fmt: skip
def test_wgmma(layout, registers):
    error, report = run_wgmma(layout, registers)
    assert error < 1e-5 and report["tensor FLOPs"] == 2 * 64 * 64 * 32


@pytest.mark.parametrize("flaw, registers, kind", [
    ("no wait for the copy", False, "race unwritten"),
    ("no wait for the product", False, "flight"),
    ("no fence", False, "flight"),
    ("A overwritten", True, "flight"),
    ("sums overwritten", False, "flight"),
])  # fmt: skip
def test_a_flaw_around_wgmma_is_found(flaw, registers, kind):
    for seed in (None, 0, 1):
        with pytest.raises(Fault) as caught:
            run_wgmma("NT", registers, flaw, seed)
        assert caught.value.kind in kind.split(), caught.value


# ---- The other copies: cp.async, clusters, three axes, adding.

cp_async = ptx("cp.async.cg.shared.global [$0], [$1], 16;", "r l")
cp_commit = ptx("cp.async.commit_group;")
cp_wait = ptx("cp.async.wait_group 1;")
cp_wait_all = ptx("cp.async.wait_group 0;")
load_float = ptx("ld.shared.f32 $0, [$1];", "r", "f")
load_two = ptx("ld.shared.v2.f32 {$0, $1}, [$2];", "r", "f f")


def make_stream(flaw=""):
    """Each thread fetches 16 bytes a step, two steps ahead; its neighbour reads them."""

    def stream(x, out, steps):
        t = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, int8))
        cp_async(base + t * 16, x + t * 16)
        cp_commit()
        for s in range(steps):
            if s + 1 < steps:
                cp_async(base + (s + 1) % 2 * 512 + t * 16, x + (s + 1) * 512 + t * 16)
            cp_commit()
            if flaw != "no wait":
                cp_wait()
            if flaw != "no barrier":
                cuda.syncwarp()
            a, b = load_two(base + s % 2 * 512 + (t ^ 1) * 16)
            out[s, t] = a + b
            if flaw != "no barrier behind":
                cuda.syncwarp()
        cp_wait_all()

    return stream


def stream(flaw, seed):
    x, out = random(5, 32, 4), np.zeros((5, 32), np.float32)
    play(make_stream(flaw), "l f[2] r", x, out, 5, shared=1024, seed=seed)
    want = x[:, :, 0] + x[:, :, 1]
    return (out == want[:, np.arange(32) ^ 1]).all()


def test_cp_async_in_a_ring():
    for seed in (None, 0, 1):
        assert stream("", seed)
    with pytest.raises(Fault) as caught:
        stream("no wait", None)
    assert caught.value.kind == "race"


@pytest.mark.parametrize("cached, size, right", [
    ("ca", 4, True), ("ca", 8, True), ("ca", 16, True), ("ca", 2, False),
    ("cg", 4, False), ("cg", 8, False), ("cg", 16, True),
])  # fmt: skip
def test_cp_async_past_the_l1_cache_takes_16_bytes_only(cached, size, right):
    fetch = ptx(f"cp.async.{cached}.shared.global [$0], [$1], {size};", "r l")

    def once(x, out):
        t = cuda.threadIdx.x
        base = shared_address(cuda.shared.array(0, int8))
        fetch(base + t * 16, x + t * 16)
        cp_commit()
        cp_wait_all()
        out[t] = load_float(base + t * 16)

    x, out = random(32, 4), np.zeros(32, np.float32)
    if right:
        play(once, "l f[1]", x, out, shared=512)
        assert (out == x[:, 0]).all()
    else:
        fault_of("misuse", once, "l f[1]", x, out, shared=512, text=f"cp.async of {size}")


def make_cluster(flaw=""):
    """Block 0 sends one box to both; both add it to the target, through a map of three axes."""

    def cluster(source, target):
        t = cuda.threadIdx.x
        rank = cluster_rank()
        base = shared_address(cuda.shared.array(0, int8))
        bar = base + 1024
        if t == 0:
            mbarrier_init(bar, 1)
            mbarrier_init_fence()
            mbarrier_expect(bar, 1024)
        if flaw != "no barrier of the cluster":
            cluster_arrive()
            cluster_wait()
        if rank == 0 and t == 0:
            load_three(base, source, 0, 0, 1, bar, 3 if flaw != "a block that is none" else 5)
        mbarrier_wait(bar, 0)
        if t == 0:
            add_three(target, 0, rank * 4 - 4, 0, base)
            bulk_commit()
            bulk_wait()
        cluster_arrive()
        cluster_wait()

    return cluster


cluster_rank = ptx("mov.u32 $0, %cluster_ctarank;", "", "r")
load_three = ptx(
    "{ .reg .b16 m; cvt.u16.u32 m, $6; cp.async.bulk.tensor.3d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1, {$2, $3, $4}], [$5], m; }",
    "r l r r r r r",
)
add_three = ptx(
    "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [$0, {$1, $2, $3}],"
    " [$4];",
    "l r r r r",
)


def cluster(flaw, seed):
    source, target = random(2, 8, 32), np.ones((1, 8, 32), np.float32)
    maps = Map(source, (1, 8, 32)), Map(target, (1, 8, 32))
    play(make_cluster(flaw), "l l", *maps, grid=(2,), cluster=2, shared=2048, seed=seed)
    want = np.ones((8, 32), np.float32)
    want[:4] += source[1, 4:]  # the box begins 4 rows above the array: the rest is cut off
    want += source[1]
    return np.abs(target[0] - want).max()


def test_a_cluster_and_a_box_over_the_edge():
    for seed in (None, 0, 1):
        assert cluster("", seed) < 1e-6
    for flaw, kinds in ("no barrier of the cluster", "misuse"), ("a block that is none", "bounds"):
        with pytest.raises(Fault) as caught:
            cluster(flaw, None)
        assert caught.value.kind == kinds, caught.value


def test_an_address_in_a_block_that_is_none():
    def far(out):
        store_word(shared_address(cuda.shared.array(4, int32)) + (2 << 24), 1)

    fault_of(
        "bounds", far, "r[1]", np.zeros(1, np.int32), grid=(2,), cluster=2, threads=1,
        text=r"no block [23] among 2$",
    )  # fmt: skip


def make_named(count):
    def named(out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(64, float32)
        s[t] = t
        barrier(1, count)
        out[t] = s[63 - t]

    return named


def test_named_barriers():
    out = np.zeros(64, np.float32)
    play(make_named(64), "f[1]", out, threads=64, seed=1)
    assert (out == 63 - np.arange(64)).all()
    fault_of("race unwritten", make_named(32), "f[1]", out, threads=64, text=r"s\[")
    fault_of("misuse", make_named(96), "f[1]", out, threads=64, text="96 of 64 threads")


# ---- The tensor-core product of appendix I.


def multiply_emulated(m, n, k, seed=None, blocks=1, kernel=None, **form):
    """The relative error of a product against float64; `kernel` stands in for the package's."""
    form = Form(**form)
    a = to_bf16(random(*((k, m) if form.layout[0] == "T" else (m, k))))
    b = to_bf16(random(*((k, n) if form.layout[1] == "N" else (n, k))))
    c = np.zeros((m, n), np.float32 if form.out == "float32" else np.uint16)
    residual = to_bf16(random(m, n)) if form.epilogue == "residual" else None
    for launch in product(form, a, b, c, residual, blocks=blocks):
        if kernel:
            launch = Launch(kernel(form), launch.grid, launch.args)
        run(launch, seed, fresh=(c,))
    a, b = from_bf16(a).astype(float), from_bf16(b).astype(float)
    want = (a.T if form.layout[0] == "T" else a) @ (b if form.layout[1] == "N" else b.T)
    want = want if residual is None else want + from_bf16(residual)
    got = c if form.out == "float32" else from_bf16(c)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


BF16 = 2.0**-9  # the error of one rounding to bf16, relative, at most; its rms is a third of it
LONG = 600  # ten k-blocks: rings of four and of six stages wrap


@pytest.mark.parametrize("form", [
    {"m": 128, "layout": "NT", "seed": 1},
    {"m": 128, "layout": "NN"},
    {"m": 128, "layout": "TN", "out": "float32", "pieces": "together", "blocks": 2},
    {"m": 256, "layout": "NT", "pingpong": True, "seed": 0},
    {"m": 256, "layout": "NT", "cluster": 2, "blocks": 2},
    {"m": 200, "layout": "NT", "epilogue": "residual", "seed": 2},
])  # fmt: skip
def test_the_product_of_chapter_7c(form):
    error = multiply_emulated(n=256, k=LONG, **form)
    assert error < (1e-6 if form.get("out") else BF16)


FLAWS_7C = {  # what: (function, text in it, what it becomes, kinds of fault)
    "no wait for a stage": (
        "gemm.wgmma_kernel.make_multiply", "            mbarrier_wait(bars + 8 * stage, phase)\n",
        "",
        "race unwritten"),
    "a stage given back early": (
        "gemm.wgmma_kernel.make_multiply", "release(bars + 8 * (stages + last), t)",
        "release(bars + 8 * (stages + stage), t)", "race misuse deadlock"),
    "no wait before it is given back": (
        "gemm.wgmma_kernel.make_multiply", "                wgmma_wait_previous()\n", "", "race"),
    "no wait for the product": (
        "gemm.wgmma_kernel.make_consume", "            wait(acc)\n", "", "flight"),
    "no proxy fence": ("gemm.wgmma_epilogue.make_strip", "        proxy_fence()\n", "", "proxy"),
    "no barrier before the copy": (
        "gemm.wgmma_epilogue.make_strip", "        proxy_fence()\n        barrier(1 + me.c, 128)\n",
        "        proxy_fence()\n", "proxy race unwritten"),
    "a box used too early": (
        "gemm.wgmma_epilogue.free", "        bulk_wait_read()", "        pass", "race"),
    "too few bytes expected": (
        "gemm.wgmma_kernel.make_produce", "mbarrier_expect(full, stage_bytes)",
        "mbarrier_expect(full, stage_bytes - 1024)", "race deadlock misuse"),
    "wrong parity": (
        "gemm.wgmma_kernel.make_produce", "phase ^ 1)  # its last", "phase)  # its last",
        "deadlock"),
    "leaves before the copy is out": (
        "gemm.wgmma_kernel.make_block", "                bulk_wait()\n", "                pass\n",
        "flight"),
    "one warp says that all have read the residual": (
        "gemm.wgmma_epilogue.make_read_tile", "            barrier(1 + me.c, 128)  # all ",
        "            #", "race"),
    "no fence of the mbarriers": (
        "gemm.wgmma_form.prepare", "    mbarrier_init_fence()\n", "", "misuse"),
}  # fmt: skip


def test_all_flaws_of_chapter_7c_have_their_place():
    for flaw, (place, old, new, _) in FLAWS_7C.items():
        module, function = place.rsplit(".", 1)
        source(Mutant(f"engines.gpu.{module}", function, flaw, old, new))


# Those of the ring, which take hundredths of a second, are of the same kinds, and all are tried.
@pytest.mark.parametrize("flaw", thinned(FLAWS_7C, 4))
def test_a_flaw_in_the_product_of_chapter_7c_is_found(flaw, monkeypatch):
    place, old, new, kinds = FLAWS_7C[flaw]
    module, function = place.rsplit(".", 1)
    wrong = getattr(load(Mutant(f"engines.gpu.{module}", function, flaw, old, new)), function)
    for other in wgmma_form, wgmma_epilogue, wgmma_kernel:
        if hasattr(other, function):
            monkeypatch.setattr(other, function, wrong)
    # The wrong kernel must not be kept for the tests that come after this one.
    monkeypatch.setattr(wgmma_launch, "gemm_kernel", wgmma_kernel.gemm_kernel.__wrapped__)
    with pytest.raises(Fault) as caught:
        form = {"epilogue": "residual"} if function == "make_read_tile" else {}
        multiply_emulated(256, 256, LONG, kernel=wgmma_kernel.gemm_kernel.__wrapped__, **form)
    assert caught.value.kind in kinds.split(), caught.value


# ---- What a launch is refused for, and arrays that are given twice.


def shift(x, y):
    t = cuda.threadIdx.x
    y[t] = x[(t + 1) % 32]


def test_an_array_that_is_given_twice_is_one_array():
    x, y = random(32), random(32)
    play(shift, "f[1] f[1]", x, y)
    fault_of("race", shift, "f[1] f[1]", x, x, text=r"race on x\[")


def test_a_block_that_is_too_large_is_refused():
    for more in {"threads": (32, 33)}, {"shared": 227 * 1024 + 1}:
        with pytest.raises(UserError, match="at most 1024 threads and 232448 bytes"):
            play(shift, "f[1] f[1]", random(32), random(32), **more)
    with pytest.raises(UserError, match="is to be dense"):
        play(make_copy(1), "f[1] f[1]", random(64)[::2], random(32))


def add_heads(x, out, row, count):
    t = cuda.threadIdx.x
    store_one(out + t * row, load_one(x + t * row) + load_one(x + t * row + 4 * (count - 1)))


load_one = ptx("ld.global.f32 $0, [$1];", "l", "f")
store_one = ptx("st.global.f32 [$0], $1;", "l f")


def test_an_array_with_gaps_is_reached_by_its_strides():
    packed, out = random(32, 3, 4), np.full((32, 3, 4), 7, np.float32)
    want = packed[:, 1, 0] + packed[:, 1, 3]
    for seed in (None, 0):
        parts = packed[:, 1], out[:, 1]
        play(add_heads, "l l l l", packed[:, 1], packed[:, 2], 48, 4, seed=seed)
        assert (packed[:, 2, 0] == want).all()
        fault_of("bounds", add_heads, "l l l l", *parts, 48, 5, text="between the elements")
    fault_of("unwritten", add_heads, "l l l l", *parts, 48, 4, fresh=(parts[0],))
    with pytest.raises(UserError, match="lie on each other, or backwards"):
        play(add_heads, "l l l l", packed[::-1, 1], parts[1], 48, 4)
    with pytest.raises(UserError, match="lie on each other, or backwards"):
        play(add_heads, "l l l l", np.broadcast_to(random(4), (32, 4)), parts[1], 48, 4)


def test_a_run_that_is_given_up_leaves_no_trace():
    def twice(x):  # the threads part at the if: what they did abreast must be undone
        t = cuda.threadIdx.x
        x[t] += 1
        if t < 7:
            x[t] += 10

    x = np.zeros(32, np.float32)
    play(twice, "f[1]", x)
    assert (x == np.where(np.arange(32) < 7, 11, 1)).all()


def make_slots(most):
    """Boxes go out from two places in turn, at most `most` groups unread when one is used again."""
    wait_most = ptx(f"cp.async.bulk.wait_group.read {most};")

    def slots(target):
        base, t = shared_address(cuda.shared.array(0, int8)), cuda.threadIdx.x
        for i in range(6):
            box = int32(base + i % 2 * 1024)
            if t == 0:
                wait_most()
            cuda.syncwarp()
            for j in range(8):
                store_word(box + t * 32 + 4 * j, i)
            proxy_fence()
            cuda.syncwarp()
            if t == 0:
                tma_store(target, 0, i * 8, box)
                bulk_commit()
        if t == 0:
            bulk_wait()

    return slots


def test_a_place_is_used_again_when_its_copy_was_promised_to_have_read_it():
    for seed in (None, *range(6)):
        target = np.zeros((48, 64), np.uint16)
        play(make_slots(1), "l", Map(target, (8, 64)), shared=2048, seed=seed, fresh=(target,))
        assert (target.view(np.int32) == np.arange(48)[:, None] // 8).all()
        with pytest.raises(Fault) as caught:  # also where the copy happens to have been early
            play(make_slots(2), "l", Map(target, (8, 64)), shared=2048, seed=seed)
        assert caught.value.kind == "race"


def from_cp_async_to_wgmma(x, out):
    base = shared_address(cuda.shared.array(0, int8))
    cp_async(base + cuda.threadIdx.x * 16, x + cuda.threadIdx.x * 16)
    cp_commit()
    cp_wait_all()
    cuda.syncwarp()
    if cuda.threadIdx.x == 0:
        tma_store(out, 0, 0, base)
        bulk_commit()
        bulk_wait()


def test_what_cp_async_brought_needs_a_proxy_fence_too():
    maps = Map(np.zeros((4, 64), np.uint16), (4, 64))
    fault_of("proxy", from_cp_async_to_wgmma, "l l", random(128), maps, shared=1024)


def names_of_numbers(x, out):
    t = cuda.threadIdx.x
    i = t
    i += 5
    a = x[t]
    b = a
    b += 1
    b *= 2
    own = cuda.local.array(2, float32)
    own[0] = a
    c = own[0]
    own[0] = b
    d = 7 * t
    d //= 2
    d <<= 1
    d ^= t
    out[t, 0], out[t, 1], out[t, 2] = t, i, d
    out[t, 3], out[t, 4], out[t, 5] = a, b, c


@pytest.mark.parametrize("seed", [None, 0])
def test_a_number_does_not_change_under_another_name(seed):
    x, out = random(32), np.zeros((32, 6), np.float32)
    report = play(names_of_numbers, "f[1] f[2]", x, out, seed=seed)
    assert report.team == 32
    t = np.arange(32)
    assert (out[:, :3] == np.array([t, t + 5, (7 * t // 2 << 1) ^ t]).T).all()
    assert (out[:, 3:] == np.array([x, (x + 1) * 2, x]).T).all()


def choices(x, out):
    t = cuda.threadIdx.x
    larger = cuda.selp(x[t] > x[31 - t], x[t], x[31 - t])
    weight = float32(math.exp(x[t] - larger))
    out[t] = larger + float32(math.log(weight + float32(math.sqrt(float32(1) + weight))))


def test_threads_choose_and_take_exponentials_abreast():
    x, outs = random(32), np.zeros((2, 32), np.float32)
    for out, seed in zip(outs, (None, 0), strict=True):
        report = play(choices, "f[1] f[1]", x, out, seed=seed)
        assert report.team == 32
    assert outs[0].tobytes() == outs[1].tobytes()
    larger = np.maximum(x, x[::-1]).astype(float)
    weight = np.exp(x - larger)
    # Below five roundings of numbers up to 4.
    assert np.abs(outs[0] - larger - np.log(weight + np.sqrt(1 + weight))).max() < 5 * 4 * 2.0**-24


def named_and_mixed(out):
    t = cuda.threadIdx.x
    s = cuda.shared.array(2, float32)
    s[0] = t  # all lanes
    barrier(1, 32)
    out[t] = s[0]


def test_lanes_race_also_before_a_named_barrier():
    fault_of("race", named_and_mixed, "f[1]", random(32), text=r"race on s\[0\]")


def make_message(late):
    def message(out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(128, float32)
        s[t] = t
        if t < 32:
            bar_arrive(2, 64)
            s[t + 64] = t  # nobody has been told of this
        else:
            barrier(2, 64)
            out[t] = s[t + 32 if late else t - 32]

    return message


bar_arrive = ptx("bar.arrive $0, $1;", "r r")


def test_one_warp_may_come_and_not_wait():
    for seed in (None, 0, 1):
        out = np.zeros(64, np.float32)
        play(make_message(False), "f[1]", out, threads=64, seed=seed)
        assert (out[32:] == np.arange(32)).all()
    fault_of("race unwritten", make_message(True), "f[1]", out, threads=64, text=r"s\[")


def test_all_instructions_of_chapter_7c_are_known():
    made = [value for module in (ptx_module, hopper)
            for value in vars(module).values() if isinstance(value, Instruction)]
    made += [set_registers(40, False), wgmma(256, 4, 2, 128, "NN"), wgmma_wait(128)]
    assert len(made) > 30
    for instruction in made:
        assert callable(translate(instruction))


def make_addresses(store, load):
    def addresses(out):
        base = shared_address(cuda.shared.array(0, int8))
        store(base, 5, 6)
        out[0] = load(base)

    return addresses


def test_addresses_with_offsets_and_negative_numbers():
    store = ptx("st.shared.b32 [$0+8], $1; st.shared.b32 [$0+12], $2;", "r r r")
    load = ptx("{ .reg .b32 t; ld.shared.b32 t, [$1+8]; add.s32 $0, t, -7; }", "r", "r")
    out = np.zeros(1, np.int32)
    play(make_addresses(store, load), "r[1]", out, threads=1, shared=16)
    assert out[0] == -2
    short = ptx("st.shared.v2.b32 [$0], {$1}; st.shared.b32 [$0], $2;", "r r r")
    fault_of("misuse", make_addresses(short, load), "r[1]", out, threads=1, shared=16)


def told_too_early(out):
    t = cuda.threadIdx.x
    base = shared_address(cuda.shared.array(0, int8))
    if t < 32:
        store_word(base + 4 * t, 1)
        bar_arrive(2, 64)
        store_word(base + 4 * t, 2)  # nobody has been told of this
    else:
        barrier(2, 64)
        out[t - 32] = load_word(base + 4 * (t - 32))


def test_what_comes_after_an_arrival_is_not_promised():
    out = np.zeros(32, np.int32)
    fault_of("race", told_too_early, "r[1]", out, threads=64, shared=128, text="not ordered after")


# ---- Threads abreast: the same bits and counts, and nothing that goes unseen


def parting(x, out):
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(t % 5, 12, 1 + t % 3):
        if x[i] > 0 and i != t:
            total += x[i]
        elif t & 1:
            total -= float32(1)
    n = t
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        total += float32(1)
    out[t] = halved(total, t)


def halved(value, t):
    if t < 7:
        return value * float32(0.5)
    if t > 50:
        return -value
    return value


def both_ways(function, args, *arrays, threads=64, **more):
    """A function as a kernel, in teams and one by one; (arrays, report) of each."""
    kernel, runs = Kernel(function, args, threads, **more), []
    for abreast in (True, False):
        copies = [array.copy() for array in arrays]
        runs.append((copies, run(Launch(kernel, (1,), tuple(copies)), abreast=abreast)))
    return runs


def same_ways(runs):
    (ours, abreast), (theirs, alone) = runs
    assert abreast.team > 1 == alone.team, "it should go abreast"
    assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]
    assert abreast.counts == alone.counts


def test_threads_that_part_do_as_they_would_alone():
    same_ways(both_ways(parting, "f[1] f[1]", random(64), np.zeros(64, np.float32)))


def by_text(x, n, out):
    t = int32(cuda.threadIdx.x)
    a, b, c, d = load_four(x + 16 * int64(t))
    if_any = load_below(n + 4 * int64(t), t, int32(40))
    value = two_to(a) + one_over(b) + fused(a, c, d)
    if if_any & 1:
        value = value * a
    for bits in range(5):
        value = value + shuffle_by(value, int32(1 << bits))
    base = shared_address(cuda.shared.array(0, int8))
    store_word(base + 4 * (t ^ 5), int32(t + if_any))
    cuda.syncthreads()
    store_one(out + 4 * int64(t), value + float32(load_word(base + 4 * t)))


load_four = ptx("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "l", "f f f f")
load_below = ptx(
    "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.b32 $0, [$1]; }",
    "l r r", "r",
)  # fmt: skip
two_to = ptx("ex2.approx.ftz.f32 $0, $1;", "f", "f", True)
one_over = ptx("rcp.approx.ftz.f32 $0, $1;", "f", "f", True)
fused = ptx("fma.rn.f32 $0, $1, $2, $3;", "f f f", "f", True)
shuffle_by = ptx("shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "f r", "f")


def test_instructions_give_the_same_abreast():
    n = rng.integers(0, 99, 64).astype(np.int32)
    same_ways(both_ways(
        by_text, "l l l", random(64, 4), n, np.zeros(64, np.float32), shared=256
    ))  # fmt: skip


def make_unordered(flaw):
    """Lanes of one warp that need a `syncwarp`, which is missing."""

    def neighbour(source, out):
        base, t = shared_address(cuda.shared.array(0, int8)), int32(cuda.threadIdx.x)
        store_word(base + 4 * t, t)
        if flaw != "a word of another lane":
            cuda.syncwarp()
        store_one(out + 4 * int64(t), float32(load_word(base + 4 * (t ^ 1))))

    def behind(source, out):
        base, t = shared_address(cuda.shared.array(0, int8)), int32(cuda.threadIdx.x)
        bar = base + 1024
        if t == 0:
            mbarrier_init(bar, 1)
            mbarrier_init_fence()
        cuda.syncwarp()
        if t == 0:
            mbarrier_expect(bar, 1024)
            tma_load(base, source, 0, 0, bar)
            mbarrier_wait(bar, 0)
        if flaw != "others are behind":
            cuda.syncwarp()
        store_one(out + 4 * int64(t), float32(load_word(base + 4 * t)))

    def far(source, out):
        t = int32(cuda.threadIdx.x)
        store_one(out + 4 * int64(t), float32(t))
        if flaw != "global memory of another":
            cuda.syncthreads()
        store_one(out + 4 * int64(t), float32(load_one(out + 4 * int64(31 - t))))

    return {"a word of another lane": neighbour, "others are behind": behind}.get(flaw, far)


@pytest.mark.parametrize("flaw", [
    "a word of another lane", "others are behind", "global memory of another",
])  # fmt: skip
def test_lanes_that_nothing_orders_do_not_go_abreast(flaw):
    source = rng.integers(1000, size=(8, 64)).astype(np.uint16)
    kernel = Kernel(make_unordered(flaw), "l l", 32, shared=1024 + 8)
    try:
        report = run(Launch(kernel, (1,), (Map(source, (8, 64)), np.zeros(32, np.float32))))
    except Fault as fault:
        assert fault.kind in ("unwritten", "race")
    else:
        assert report.team == 1
