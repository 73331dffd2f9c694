"""The ladder of chapter 11a in the emulator: float64, edges, orders, bytes, planted mistakes.

The bound: products of bf16 are exact in float32; a sum of k of them is off by (k + 1) 2^-23 sum
|a||b| at most, if every step is cut off rather than rounded; and C is rounded to bf16, by 2^-8.
"""

import inspect
import itertools
from types import ModuleType

import numpy as np
import pytest
from bench.card import wgmma_ladder as card
from mutants import Mutant, execute, load, source
from registers import read
from tiers import kept, thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.engines.gpu import wgmma_ladder
from nanoeuler.engines.gpu.lang.bf16 import from_bf16, to_bf16
from nanoeuler.engines.gpu.wgmma_ladder import RUNGS, product
from nanoeuler.errors import UserError

NAN = 0x7FC0  # bf16
SHARED_LIMIT = 227 * 1024  # CUDA C++ Programming Guide, technical specifications: of a block, 9.0
SHARED_ALL = 228 * 1024  # of a multiprocessor, of which each block takes 1 KiB besides


def random(seed, *shape, scale=1.0):
    return to_bf16((scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32))


def worst(c, a, b):
    """The largest error of C = A B^T as a fraction of its bound; nan where C is."""
    a, b = from_bf16(a).astype(float), from_bf16(b).astype(float)
    e = (a.shape[1] + 1) * 2.0**-23 * (np.abs(a) @ np.abs(b).T)
    bound = e + 2.0**-8 * (np.abs(a @ b.T) + e)
    return np.max(np.abs(from_bf16(c) - a @ b.T) / np.where(bound > 0, bound, 1))


def play(name, a, b, seed=None, multiprocessors=4, module=wgmma_ladder):
    """C by a rung, which must write all of it, and the emulator's report."""
    c = np.full((len(a), len(b)), NAN, np.uint16)
    launch = module.product(name, a, b, c, multiprocessors)
    return c, run(launch, seed, fresh=[c])


# ---- Right on every size that a rung takes, in every order


SIZES = [(1, 8, 8), (136, 264, 200), (65, 520, 328)]


# Of the second size the short tests ask for equal bits, below, and of one rung for the numbers.
@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("m, n, k", kept(SIZES, SIZES[0], SIZES[2]))
def test_products(name, m, n, k):
    a, b = random(0, m, k), random(1, n, k)
    assert worst(play(name, a, b)[0], a, b) < 1


# The two ways to write sums; what a rung sums, all do.
@pytest.mark.parametrize("name", kept(RUNGS, "by hand", "TMA"))
def test_large_and_small_numbers(name):  # 1e36: float32 ends at 3e38
    a, b = random(0, 70, 72, scale=1e18), random(1, 16, 72, scale=1e18)
    assert worst(play(name, a, b)[0], a, b) < 1
    assert worst(play(name, random(0, 70, 72, scale=1e-18), b)[0],
                 random(0, 70, 72, scale=1e-18), b) < 1  # fmt: skip


# (order, number of blocks, of which a pair is the least): each of both at least once, and all.
SOME = [(None, 1), (1, 4), (2, 1)]
ALL = [*itertools.product((None, 1, 2), (1, 4))]


@pytest.mark.parametrize("plays", kept([SOME, ALL], SOME), ids=len)
@pytest.mark.parametrize("name", kept(RUNGS, "TMA", "multicast", "ping-pong"))
def test_bits_are_equal_in_every_order_and_on_every_number_of_blocks(name, plays):
    # More tiles than blocks, or more k-blocks than stages: rings go round.
    persistent = RUNGS[name].persistent
    m, n, k = (136, 520, 200) if persistent else (136, 264, 328)
    a, b = random(0, m, k), random(1, n, k)
    plays = plays if persistent else {(seed, 4) for seed, _ in plays}
    assert len({play(name, a, b, *each)[0].tobytes() for each in plays}) == 1


def test_all_rungs_give_the_same_bits():
    """All sum along k in the same steps, so a rung can take another's place."""
    a, b = random(0, 136, 200), random(1, 264, 200)
    outcomes = {play(name, a, b)[0].tobytes(): name for name in RUNGS}
    (bits,) = outcomes
    assert worst(np.frombuffer(bits, np.uint16).reshape(136, 264), a, b) < 1


# Of one k-block and of five each stage of a ring of four begins a tile, which goes round or not.
@pytest.mark.parametrize("blocks", kept(range(1, 6), 1, 5))
@pytest.mark.parametrize("name", kept(
    [name for name in RUNGS if RUNGS[name].persistent], "multicast", "ping-pong"
))  # fmt: skip
def test_a_ring_that_goes_round_while_tiles_change(name, blocks):
    """Depths of one to five k-blocks on rings of four: every phase a tile can begin in."""
    a, b = random(0, 200, 64 * blocks), random(1, 776, 64 * blocks)
    assert worst(play(name, a, b, multiprocessors=2)[0], a, b) < 1


# ---- Bytes


def fetched(name, m, n, k):
    """Bytes that a rung's blocks put into their shared memory: a whole stage for each k-block."""
    rung = RUNGS[name]
    tiles = -(-m // (rung.rows * rung.cluster)) * rung.cluster * -(-n // 256)
    return tiles * -(-k // 64) * rung.stage


@pytest.mark.parametrize("name", RUNGS)
def test_bytes_are_as_predicted(name):
    m, n, k = 256, 512, 192
    _, report = play(name, random(0, m, k), random(1, n, k))
    if RUNGS[name].maps:
        assert report["copies in bytes"] == fetched(name, m, n, k)
        assert report["copies out bytes"] == 2 * m * n
        assert report["global loads bytes"] == 0
    else:
        assert report["global loads bytes"] == fetched(name, m, n, k)
        assert report["global stores bytes"] == 2 * m * n


def test_sums_leave_without_bank_conflicts():
    """A warp's four matrices of `stmatrix` are 512 bytes, four rounds of the banks and no more."""
    m, n = 64, 256
    _, report = play("TMA", random(0, m, 64), random(1, n, 64))
    assert report["shared stores wavefronts"] == 2 * m * n // 128


def test_a_swizzled_tile_is_stored_without_bank_conflicts():
    _, report = play("by hand", random(0, 64, 64), random(1, 256, 64))
    assert report["shared stores wavefronts"] == 2 * 64 * (64 + 256) // 128


# ---- Shapes and what is refused


def test_rungs_fit_and_share_a_multiprocessor_as_the_chapter_says():
    """How many: by shared memory and by the registers of the table, which ptxas wrote."""
    registers = {line[1]: int(line[3]) for line in read() if line[0] == "wgmma_ladder"}
    for name, rung in RUNGS.items():
        assert rung.shared <= SHARED_LIMIT
        warps = -(-rung.threads // 128) * 4  # as the hardware counts them
        each = -(-registers[name] // 8) * 8 * 32 * warps
        together = min(SHARED_ALL // (rung.shared + 1024), 65536 // each)
        assert together == {"by hand": 2, "TMA": 3, "ring of 2": 2}.get(name, 1), name


def test_tiles_are_all_tiles_once(monkeypatch):
    monkeypatch.setattr(wgmma_ladder.ptx, "divide", lambda a, b: a // b)
    monkeypatch.setattr(wgmma_ladder, "int32", int)
    for down, across, group in (1, 1, 8), (7, 3, 4), (8, 5, 4), (3, 9, 16):
        order = [wgmma_ladder.tile_at(i, down, across, group) for i in range(down * across)]
        assert sorted(order) == [(x, y) for x in range(down) for y in range(across)]
        assert [x // group for x, _ in order] == sorted(x // group for x, _ in order)


def zeros(*shape, kind=np.uint16):
    return np.zeros(shape, kind)


@pytest.mark.parametrize("a, b, c, said", [
    (zeros(8, 16), zeros(12, 16), zeros(8, 12), "multiples of 8"),
    (zeros(8, 12), zeros(16, 12), zeros(8, 16), "multiples of 8"),
    (zeros(0, 16), zeros(16, 16), zeros(0, 16), "nothing is empty"),
    (zeros(8, 16), zeros(16, 24), zeros(8, 16), "C is"),
    (zeros(8, 16), zeros(16, 16), zeros(16, 8), "C is"),
    (zeros(8, 16), zeros(16, 16), zeros(8), "are matrices"),
    (zeros(8, 16, kind=np.float32), zeros(16, 16), zeros(8, 16), "uint16"),
    (zeros(16, 8).T, zeros(16, 16), zeros(8, 16), "dense"),
    (zeros(8, 16), zeros(16, 32)[:, :16], zeros(8, 16), "dense"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["by hand", "multicast"])
def test_what_does_not_fit_is_refused(name, a, b, c, said):
    with pytest.raises(UserError, match=said):
        product(name, a, b, c)


def test_an_unknown_rung_is_refused():
    with pytest.raises(UserError, match="rungs are by hand, TMA"):
        product("wgmma", zeros(8, 8), zeros(8, 8), zeros(8, 8))


def test_the_family_plans_every_rung():
    plans = card.plans()
    assert len(plans) == len(RUNGS) * (len(card.RAGGED) + len(card.TIMED))
    assert card.kernels().keys() == RUNGS.keys() and card.OURS in RUNGS
    for name, make in card.kernels().items():
        assert make() is make() and make().shared == RUNGS[name].shared


# ---- Planted mistakes: rung, function, what is wrong, the text, what it becomes, what the emulator
# says of it ("" where only the result is wrong, "any" where that hangs on the order). The emulator
# doesn't miss `map_acquire` and the last `meet`: its maps are there, its blocks keep their memory.


# Where what the ladder shares with other kernels stands.
OWNERS = {"advance": "tile.ring", "skip": "tile.ring", "put_scaled": "tile.store"}
MISTAKES = [
    ("by hand", "by_hand", "no fence", "proxy_fence()", "pass", "proxy"),
    ("by hand", "by_hand", "multiplied before all have stored", "cuda.syncthreads()", "pass",
     "race"),
    ("by hand", "by_hand", "sums are read early", "finish(acc)", "pass", "any"),
    ("by hand", "copy_rows", "no swizzle", "(t ^ r) & 7", "t & 7", ""),
    ("by hand", "copy_rows", "swizzled by another row", "(t ^ r) & 7", "(t ^ (r + 1)) & 7", ""),
    ("by hand", "copy_rows", "no lower edge", "first + r < rows and x", "x", "bounds"),
    ("by hand", "copy_rows", "no right edge", "first + r < rows and x < width",
     "first + r < rows", "any"),
    ("by hand", "write", "rows by the wrong lane", "(t & 31) >> 2", "(t & 31) & 7", "any"),
    ("by hand", "write", "no lower edge", "x < n and r + 8 < m", "x < n", "bounds"),
    ("TMA", "by_tma", "nobody waits", "mbarrier_wait(full, i & 1)", "pass", "race"),
    ("TMA", "by_tma", "always parity 0", "i & 1", "i & 0", "race"),
    ("TMA", "by_tma", "the other parity", "i & 1", "1 - (i & 1)", "any"),
    ("TMA", "by_tma", "too few bytes", "mbarrier_expect(full, STAGE)",
     "mbarrier_expect(full, B_BYTES)", "any"),
    ("TMA", "by_tma", "asked for while it is read", "finish(acc)\n    store", "pass\n    store",
     "any"),
    ("TMA", "by_tma", "the barrier is not there yet", "cuda.syncthreads()", "pass", "any"),
    ("TMA", "by_tma", "gone before the last box", "bulk_wait()", "pass", "any"),
    ("TMA", "put_scaled", "not swizzled", "squares_at(t, j)",
     "(t >> 5) * 2048 + (t & 15) * 128 + (2 * j + (t >> 4 & 1)) * 16", ""),
    ("TMA", "store", "no fence", "proxy_fence()", "pass", "proxy"),
    ("TMA", "store", "a box is overwritten", "bulk_wait_read()", "pass", "race"),
    ("TMA", "store", "others don't know that it has left", "barrier(group, 128)  # and",
     "pass  # and", "race"),
    ("TMA", "store", "sent before all have stored", "barrier(group, 128)  # all", "pass  # all",
     "any"),
    ("TMA", "store", "one box", "(strip & 1) * BOX", "0", "race"),
    ("ring of 2", "make_ring", "filled while it is read", "wgmma_wait_previous()", "pass", "race"),
    ("ring of 2", "make_ring", "filled again too early", "bars + 8 * last), int32(base + last",
     "bars + 8 * stage), int32(base + stage", "any"),
    ("ring of 2", "make_ring", "one k-block too few", "ahead < blocks", "ahead < blocks - 1",
     "deadlock"),
    ("ring of 4", "advance", "always parity 0", "phase ^ 1", "phase", "any"),
    ("producer", "with_producer", "wrong parity at empty", "phase ^ 1", "phase", "deadlock"),
    ("producer", "with_producer", "nobody waits for empty", "mbarrier_wait(full + 8, phase ^ 1)",
     "pass", "any"),
    ("producer", "make_accumulate", "nobody waits for full",
     "mbarrier_wait(bars + 16 * stage, phase)", "pass", "any"),
    ("producer", "make_accumulate", "a stage is given back before it was read",
     "wgmma_wait_previous()", "pass", "race"),
    ("producer", "make_accumulate", "stages are not given back", "i > 0", "i < 0", "deadlock"),
    ("producer", "make_accumulate", "both have the upper rows", "(t >> 7) * A_BYTES", "0", ""),
    ("producer", "with_producer", "one reader of two", "prepare(bars, STAGES, 2)",
     "prepare(bars, STAGES, 1)", "any"),
    ("persistent", "tile_at", "a last group as high as all", "min(group, down - first)", "group",
     ""),
    ("persistent", "make_accumulate", "the last stage is not given back",
     "finish(acc)\n release(bars + 16 * last + 8, t)", "finish(acc)", "deadlock"),
    ("persistent", "make_consume", "every tile twice", "cuda.gridDim.x // cluster", "1", "any"),
    ("multicast", "release_both", "the other block isn't told", "t & 127 < 2", "t & 127 < 1",
     "deadlock"),
    ("multicast", "fetch_shared", "the same half twice", "rank * (COLUMNS // 2)", "0", "any"),
    ("multicast", "fetch_shared", "to itself alone", "full, 3", "full, 1 << rank", "any"),
    ("multicast", "multicast", "half of the readers", "prepare(bars, STAGES, 4)",
     "prepare(bars, STAGES, 2)", "any"),
    ("multicast", "multicast", "the other's barriers may not be there", "meet()  # the other "
     "block's", "pass  # the other block's", "any"),
    ("ping-pong", "consume_in_turn", "a turn is never over", "turn ^ 1)", "turn)", "any"),
    ("ping-pong", "consume_in_turn", "nobody waits for a turn", "mbarrier_wait(turns + 8 * c, "
     "turn)", "pass", "any"),
    ("ping-pong", "consume_in_turn", "the turn is not passed on",
     "mbarrier_arrive(turns + 8 * (c ^ 1))", "pass", "deadlock"),
    ("ping-pong", "consume_in_turn", "not stepped over the other's",
     "skip(stage, phase, STAGES, blocks", "skip(stage, phase, STAGES, 0", "any"),
    ("ping-pong", "skip", "parity as it was", "(phase ^ rounds) & 1", "phase", "any"),
]  # fmt: skip


def mutant(function, what, old, new):
    room = OWNERS.get(function, "wgmma_ladder")
    return Mutant(f"engines.gpu.{room}", function, what, old, new)


def over(wrong):
    """The ladder, or, of a mistake in what it uses, a copy of it that uses the wrong functions."""
    if hasattr(wrong, "RUNGS"):
        return wrong
    copy = ModuleType("nanoeuler.mutants.ladder")
    execute(inspect.getsource(wgmma_ladder), "ladder", copy)
    for name in vars(copy).keys() & vars(wrong).keys():
        if inspect.isfunction(getattr(wrong, name)):
            setattr(copy, name, getattr(wrong, name))
    return copy


def test_all_mistakes_have_their_place():
    for _, *which, _ in MISTAKES:
        source(mutant(*which))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what a wrong kernel does with garbage
@pytest.mark.parametrize("name, function, what, old, new, kind", thinned(MISTAKES, 9))
def test_mistakes_are_seen(name, function, what, old, new, kind):
    module = over(load(mutant(function, what, old, new)))
    # By hand a k-block takes seconds, and three show what nine do: there is one stage.
    m, n, k = (72, 264, 136) if name == "by hand" else (200, 520, 520)
    a, b = random(0, m, k), random(1, n, k)
    if kind not in ("", "any"):
        with pytest.raises(Fault) as fault:
            play(name, a, b, None, 2, module)
        assert fault.value.kind == kind
        return
    try:
        seen = [worst(play(name, a, b, seed, 2, module)[0], a, b) for seed in (None, 1, 2)]
    except Fault:
        assert kind == "any"
    else:
        assert not max(seen) < 1
