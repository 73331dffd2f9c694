"""Arrays without memory, the arena, and lists of launches: against NumPy, on random sequences."""

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from nanoeuler.emulator import run
from nanoeuler.engines.gpu.lang.kernel import Launch, Map
from nanoeuler.engines.gpu.lang.views import dense
from nanoeuler.engines.gpu.rows.residual_norm import add_scaled_launch
from nanoeuler.engines.gpu.step.program import (
    ALIGN,
    ARENA,
    CONSTANTS,
    Arena,
    Array,
    Recording,
    bind,
    constants,
)

FLOAT = np.dtype(np.float32)


def numbers(array, memory):
    """What of a memory, an array of bytes, an `Array` is."""
    rest = memory[array.address :]
    rest = rest[: len(rest) // array.dtype.itemsize * array.dtype.itemsize].view(array.dtype)
    return as_strided(rest, array.shape, array.strides)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_views_are_those_of_numpy(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    memory = np.arange(1200, dtype=np.float32).view(np.uint8)
    ours, theirs = Array("m", 64, shape, FLOAT, dense(shape, 4)), None
    theirs = memory.view(np.float32)[16 : 16 + np.prod(shape)].reshape(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        if not ours.shape:
            break
        axis = data.draw(st.integers(0, len(ours.shape) - 1))
        extent = ours.shape[axis]
        kind = data.draw(st.sampled_from(["T", "swap", "slice", "number"]))
        if kind == "T":
            ours, theirs = ours.T, theirs.T
        elif kind == "swap":
            other = data.draw(st.integers(0, len(ours.shape) - 1))
            ours, theirs = ours.swapaxes(axis, other), theirs.swapaxes(axis, other)
        else:
            first = data.draw(st.integers(0, extent - 1))
            last = data.draw(st.integers(first + 1, extent))
            part = slice(first, last) if kind == "slice" else first - extent
            key = (*[slice(None)] * axis, part)
            ours, theirs = ours[key], theirs[key]
    assert ours.shape == theirs.shape and ours.nbytes == theirs.nbytes
    np.testing.assert_array_equal(numbers(ours, memory), theirs)


def test_reshape_keeps_the_order_and_refuses_what_is_not_in_it():
    x = Array("m", 0, (2, 3, 4), FLOAT, dense((2, 3, 4), 4))
    assert x.reshape(-1, 4).shape == (6, 4) == x.reshape((6, 4)).shape
    assert x.reshape(2, -1).strides == (48, 4)
    with pytest.raises(AssertionError, match="C order"):
        x.T.reshape(-1, 2)
    with pytest.raises(AssertionError, match="is not"):
        x.reshape(5, 5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_the_arena_lends_nothing_twice(requests):
    arena, lent = Arena(), []
    for give, number in requests:
        if give and lent:
            arena.give(*lent.pop(number % len(lent)))
        else:
            holes = [end - start for start, end in arena.holes]
            before = arena.size
            start = arena.take(number)
            if any(hole >= number for hole in holes):
                assert arena.size == before, "it grew though there was room"
            lent.append((start, number))
        taken = sorted((start, start + size) for start, size in lent)
        parts = sorted([*taken, *arena.holes])
        ends = [0, *[end for _, end in parts]]
        assert [start for start, _ in parts] == ends[:-1] and ends[-1] == arena.size
        assert all(a[1] < b[0] for a, b in zip(arena.holes, arena.holes[1:], strict=False))


def test_the_smallest_hole_is_taken():
    arena = Arena()
    places = [arena.take(size) for size in (5, 1, 2, 1, 3)]
    for place, size in ((places[0], 5), (places[2], 2), (places[4], 3)):
        arena.give(place, size)
    assert arena.take(2) == places[2] and arena.take(3) == places[4] and arena.take(5) == 0


def two_adds():
    """A recording of y = x + t / 2 and z = y + y, whose y is forgotten in between."""
    recording = Recording()
    x, t = (recording.place("given", (2, 8), np.float32) for _ in "xt")
    y, z = (recording.take((2, 8), np.float32) for _ in "yz")
    recording.add("half", add_scaled_launch(x, t, 0.5, y))
    recording.add("twice", add_scaled_launch(y, y, 1.0, z))
    return recording, y, z


def test_an_array_is_lent_as_long_as_a_view_lives():
    recording, y, z = two_adds()
    view = y[1:].T
    del y
    gc.collect()
    assert not recording.program.loans, "a view is held"
    del view
    assert recording.program.loans == [(0, ALIGN, 0, 2)]
    w = recording.take((2, 8), np.float32)
    assert w.address == 0, "the place is free again, though a launch on the list names it"
    assert z.address == ALIGN


def test_a_list_is_bound_to_memory_and_runs():
    recording, y, z = two_adds()
    del y, z
    program, asked = recording.end(), []
    assert program.sizes == {CONSTANTS: 0, "given": 2 * ALIGN, ARENA: 2 * ALIGN}
    memories = {name: np.zeros(size, np.uint8) for name, size in program.sizes.items()}
    numbers = np.arange(16, dtype=np.float32)
    memories["given"][:64] = memories["given"][ALIGN : ALIGN + 64] = numbers.view(np.uint8)

    def part(memory, address, shape, dtype, strides):
        asked.append((memory, address))
        return np.ndarray(shape, dtype, memories[memory], address, strides)

    launches = bind(program, part)
    assert len(asked) == len(set(asked)) == 4, "one object for one place"
    assert launches[1].args[0] is launches[1].args[1]
    for launch in launches:
        run(launch)
    np.testing.assert_array_equal(
        memories[ARENA][ALIGN : ALIGN + 64].view(np.float32), 3 * numbers
    )


def test_maps_are_bound_too():
    recording = Recording()
    x = recording.take((64, 64), np.uint16)
    step = recording.program.steps
    kernel = add_scaled_launch(*[np.zeros((1, 8), np.float32)] * 2, 1.0, np.zeros((1, 8), "f4"))
    launch = Launch(kernel.kernel, (1,), (Map(x, (64, 64)), *kernel.args[1:]))
    recording.add("a map", launch)
    assert step[0].launch.args[0].array.lease is None
    del x, launch
    assert len(recording.program.loans) == 1
    real = np.zeros((64, 64), np.uint16)
    assert bind(recording.end(), lambda *place: real)[0].args[0].array is real


def test_constants_are_stored_once_and_whole():
    recording = Recording()
    tables = np.arange(5.0, dtype=np.float32), np.arange(5), np.arange(5.0, dtype=np.float32)
    first, second, third = map(recording.constant, tables)
    assert first is third and second.address == ALIGN
    stored = constants(recording.end())
    np.testing.assert_array_equal(numbers(first, stored), tables[0])
    np.testing.assert_array_equal(numbers(second, stored), tables[1])


def test_bytes_that_are_lent_must_have_come_back():
    recording = Recording()
    recording.lend("there", 1024, 1024)
    first = recording.take((64,), np.float32)
    recording.lending = True
    second, third = (recording.take(shape, np.float32) for shape in ((64,), (512,)))
    assert [x.memory for x in (first, second, third)] == [ARENA, "there", ARENA]
    assert second.address == 1024
    recording.lend("there", 2048, 512)
    fourth = recording.take((200,), np.float32)
    assert (fourth.memory, fourth.address) == ("there", 1280)
    recording.reclaim(512)  # nobody lent it
    with pytest.raises(RuntimeError, match="2048 to 2560"):
        recording.reclaim(2048)
    del fourth
    recording.lend("there", 2048, 512)
    recording.reclaim(2048)
    with pytest.raises(RuntimeError, match="1024 to 2048"):
        recording.reclaim(1024)
    assert recording.program.borrowed["there"] == [(1280, 1024, 0, 0)]
    assert recording.take((200,), np.float32).memory == ARENA
