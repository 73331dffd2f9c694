"""Every PTX instruction, emulated, against NumPy (helpers/twins.py); the GPU runs in make test-gpu.

Bounds are the manual's for the hardware. The emulator computes in float64 and rounds once, except
logarithms, which it takes in float32.
"""

import inspect

import numpy as np
import pytest
import twins
from twins import TWINS, Bound, compare

from nanoeuler.emulator import run
from nanoeuler.emulator.machine import Fault
from nanoeuler.emulator.runner import instructions
from nanoeuler.engines.gpu.lang import hopper, ptx
from nanoeuler.engines.gpu.lang.instruction import Instruction

MODULES = ptx, hopper
# Functions of those modules that make instructions -> one that a twin uses.
MADE = {
    "copy_wait": twins.copy_none, "mma_tile": twins.mma_32x16, "set_registers": twins.shrink,
    "zeros": twins.clear_four, "ldmatrix_down": twins.down, "ldmatrix_across": twins.across,
    "wgmma": twins.BY_LAYOUT["NN"], "wgmma_wait": twins.finish,
    "product_of_rows": twins.by_rows, "add_product": twins.add,
    "product_done": twins.finish_previous,
}  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", TWINS)
def test_the_emulator_does_what_numpy_says(name, seed):
    twin = TWINS[name]
    arrays = twin.inputs(np.random.default_rng(1))
    before = {what: array.copy() for what, array in arrays.items()}
    run(twin.launch(arrays), seed)
    seen = compare(twin, arrays, before)
    assert {what: s for what, s in seen.items() if not s.distance <= s.bound.size} == {}
    after = {what: array.copy() for what, array in arrays.items()}
    written = [what for what in before if (before[what] != after[what]).any()]
    assert {name for _, name, *_ in twin.want(before)} <= {*written}  # nothing agrees unwritten


def test_no_instruction_is_without_a_twin():
    used = set().union(*(instructions(twin.make().function) for twin in TWINS.values()))
    for module in MODULES:
        ready = {n: v for n, v in vars(module).items() if isinstance(v, Instruction)}
        assert {name for name, value in ready.items() if value not in used} == set()
        makers = {
            name for name, value in vars(module).items()
            if callable(value) and not isinstance(value, Instruction | type)
            and inspect.signature(value).return_annotation is Instruction
            and name not in ("_group", "ptx", "instruction")
        }  # fmt: skip
        assert makers <= {*MADE}
    assert {name for name, value in MADE.items() if value not in used} == set()


@pytest.mark.parametrize("old, new", [
    ("load_int4(n + 16 * lane)", "load_int4(n + 16 * (lane ^ 1))"),
    ("ldmatrix4(s + 16 * lane)", "ldmatrix4_turned(s + 16 * lane)"),
    ("exp2(f)", "exp2(f * float32(1.000001))"),
    ("store_float4(out + 16 * lane, f, g, h, f);", "store_float4(out + 16 * lane, f, h, g, f);"),
])  # fmt: skip
def test_another_instruction_is_told_apart(old, new, monkeypatch):
    (name,) = (name for name, row in twins.TABLE.items() if row.lines == old)
    monkeypatch.setitem(twins.TABLE, name, twins.TABLE[name]._replace(lines=new))
    twin = TWINS["instructions"]
    arrays = twin.inputs(np.random.default_rng(1))
    before = {what: array.copy() for what, array in arrays.items()}
    kernel = twins.table_kernel.__wrapped__((8, 0))
    launch = twin.launch(arrays)
    run(type(launch)(kernel, launch.grid, launch.args))
    seen = compare(twin, arrays, before)
    assert [what for what, s in seen.items() if not s.distance <= s.bound.size] == [name]


def test_distances():
    one, two = (np.array([x], np.float32).view(np.int32) for x in (1, 1.5))
    nan = np.array([np.nan], np.float32).view(np.int32)
    assert Bound("bits").distance(one, two) == 1 and Bound("bits").distance(nan, nan) == 0
    assert Bound("relative").distance(two, one) == Bound("absolute").distance(two, one) == 0.5
    assert Bound("relative").distance(nan, one) == np.inf


@pytest.mark.parametrize("columns", [61, 63, 56, 64])
def test_a_store_writes_whole_16_bytes_of_a_row(columns):
    """As a GPU does: tests/bench/card/twins.py asks one."""
    twin = TWINS["the copy engine"]
    arrays = twin.inputs(np.random.default_rng(0))
    whole, end = np.full((8, 72), 9, np.uint16), -(-columns // 8) * 8
    arrays["to_two"] = whole[:, :columns]
    run(twin.launch(arrays))
    assert (whole[4:, :end] == arrays["two"][8:12, :end]).all()
    assert (whole[:4] == 9).all() and (whole[:, end:] == 9).all()


@pytest.mark.parametrize("missing", [3, 0])
def test_a_store_behind_the_last_row_of_a_memory_is_a_fault(missing):
    twin = TWINS["the copy engine"]
    arrays = twin.inputs(np.random.default_rng(0))
    flat = np.zeros(8 * 64 - missing, np.uint16)
    arrays["to_two"] = np.lib.stride_tricks.as_strided(flat, (8, 61), (128, 2))
    if missing:
        with pytest.raises(Fault, match="3 elements behind the last row"):
            run(twin.launch(arrays))
    else:
        run(twin.launch(arrays))
        assert (flat[-64:] == arrays["two"][11]).all()
