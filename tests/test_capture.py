"""The device on paper: graphs of launches, what a graph cannot hold, views, and copies by post."""

import gc
import weakref

import numpy as np
import pytest

from nanoeuler.emulator import Device, Fault
from nanoeuler.engines.gpu.lang.instruction import cuda, int8
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.lang.ptx import load_float4, store_float, store_float4
from nanoeuler.errors import UserError


def scale(x, y, by):
    i = cuda.threadIdx.x
    y[i] = x[i] * by


def add(x, y):
    i = cuda.threadIdx.x
    y[i] += x[i]


SCALE, ADD = Kernel(scale, "f[1] f[1] f", 32), Kernel(add, "f[1] f[1]", 32)


def setting():
    """A device, x, y that nobody wrote, and the launches y = 3 x; x += y, prepared."""
    device = Device(seed=0)
    x, y = device.array(np.arange(32, dtype=np.float32)), device.empty((32,), np.float32)
    launches = Launch(SCALE, (1,), (x, y, 3.0)), Launch(ADD, (1,), (y, x))
    return device, x, y, [device.prepare(launch) for launch in launches]


def test_a_graph_plays_on_what_its_arrays_hold():
    device, x, y, starts = setting()
    graph = device.capture(starts)
    assert (device.host(x) == np.arange(32)).all()  # nothing has run
    for device.seed in (None, 0):
        reports = graph.launch()
    assert (device.host(x) == 16 * np.arange(32)).all() and len(reports) == 2
    assert reports[0]["global stores bytes"] == 128
    device.fill(x, 1)  # between starts the host may
    graph.launch()
    assert (device.host(x) == 4).all() and (device.host(y) == 3).all()
    for start in starts:  # and launches of its own
        assert start()["global stores bytes"] == 128
    assert (device.host(x) == 16).all()


def nothing(x):
    cuda.shared.array(1, int8)


NOTHING = Kernel(nothing, "l", 32)
MISTAKES = {
    "the host reads": lambda device, x: device.host(x),
    "the host writes": lambda device, x: device.fill(x, 0),
    "memory is allocated": lambda device, x: device.empty((1,), np.float32),
    "memory is alloc": lambda device, x: device.array(np.ones(1)),
    "memory is": lambda device, x: device.page(8),
    "the host waits": lambda device, x: device.waits(),
    "a mark is set": lambda device, x: device.mark(),
    "the host wait": lambda device, x: device.synchronize(),
    "a page is copied": lambda device, x: device.send(x, np.zeros(128, np.uint8)),
    "the host reads an": lambda device, x: device.fetch(np.zeros(128, np.uint8), x),
    "nothing is compiled": lambda device, x: device.run(device.mapped),
    "a map is encoded": lambda device, x: (device.loaded.add(NOTHING), device.run(device.mapped)),
    "a capture begins": lambda device, x: device.capture([]),
    "a graph is started": lambda device, x: device.graph.launch(),
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_what_a_graph_cannot_hold_is_refused(words):
    device, x, _, starts = setting()
    device.graph, device.waits = device.capture(starts), device.mark()
    array = device.array(np.zeros((8, 64), np.uint16))
    device.mapped = Launch(NOTHING, (1,), (Map(array, (8, 64)),))
    with pytest.raises(Fault, match=words) as caught:
        device.capture([starts[0], lambda stream: MISTAKES[words](device, x)])
    assert caught.value.kind == "capture"
    device.fill(x, 5), device.synchronize()  # the capture is over, whatever happened in it
    starts[0]()


def test_a_launch_that_was_prepared_before_is_captured_with_its_maps():
    device = Device()
    array = device.array(np.zeros((8, 64), np.uint16))
    graph = device.capture([device.prepare(Launch(NOTHING, (1,), (Map(array, (8, 64)),)))])
    graph.launch()


def test_a_graph_keeps_its_arrays_and_no_others():
    device, x, y, starts = setting()
    graph, kept = device.capture(starts), weakref.ref(y)
    del starts, y
    gc.collect()
    graph.launch()
    assert (device.host(x) == 4 * np.arange(32)).all()
    assert kept() is not None and device.memory_used() == 256
    del graph
    gc.collect()
    assert kept() is None and device.memory_used() == 128


def test_arrays_of_the_host_and_arrays_that_nobody_wrote_are_refused():
    device, x, y, _ = setting()
    with pytest.raises(UserError, match="scale is given an array of the host"):
        device.run(Launch(SCALE, (1,), (np.zeros(32, np.float32), y, 3.0)))
    with pytest.raises(Fault, match="nobody wrote") as caught:
        device.host(y)
    assert caught.value.kind == "unwritten"
    with pytest.raises(Fault) as caught:
        device.run(Launch(ADD, (1,), (x, y)))
    assert caught.value.kind == "unwritten"


# ---- Views


def test_a_part_is_the_same_memory_and_keeps_it():
    device = Device()
    rows = device.array(np.arange(24, dtype=np.float32).reshape(2, 12))
    keys = device.part(rows, 16, (2, 4), np.float32, (48, 4))
    inner = device.part(keys, 48, (2,), np.float32)
    assert (device.host(keys) == np.arange(24).reshape(2, 12)[:, 4:8]).all()
    device.fill(inner, [-1, -2])
    assert (device.host(rows)[1, 4:7] == [-1, -2, 18]).all()
    assert device.memory_used() == 96
    del rows, keys
    gc.collect()
    assert device.memory_used() == 96 and (device.host(inner) == [-1, -2]).all()
    del inner
    gc.collect()
    assert device.memory_used() == 0


@pytest.mark.parametrize(
    ("words", "part"),
    {
        "reaches outside of an array of 96 bytes": (4, (2, 12), np.float32, None),
        "reaches outside": (64, (2, 4), np.float32, (48, 4)),
        "lies at multiples of 4": (2, (2,), np.float32, None),
        "lies at multiples of 4, not at 0": (0, (2, 2), np.float32, (6, 4)),
        "no part begins at -4": (-4, (2,), np.float32, None),
        "with shape": (0, (2, 2), np.float32, (4,)),
    }.items(),
)
def test_a_part_that_is_none_is_refused(words, part):
    device = Device()
    with pytest.raises(UserError, match=words):
        device.part(device.empty((2, 12), np.float32), *part)


def ones(address):
    store_float(address + 4 * cuda.threadIdx.x, 1.0)


def copy_four(x, y):
    i = 16 * cuda.threadIdx.x
    store_float4(y + i, *load_float4(x + i))


def first_of_two(address):
    store_float(address + 8 * cuda.threadIdx.x, 1.0)


ONES, COPY = Kernel(ones, "l", 32), Kernel(copy_four, "l l", 8)


def test_what_was_written_is_known_of_the_memory_and_not_of_a_name():
    device = Device()
    arena = device.empty((64,), np.float32)
    halves = [device.part(arena, 128 * i, (32,), np.float32) for i in range(2)]
    again, out = device.part(arena, 0, (4, 8), np.float32), device.empty((32,), np.float32)
    device.run(Launch(ONES, (1,), (halves[0],)))
    assert (device.host(again) == 1).all()
    device.run(Launch(ADD, (1,), (device.part(arena, 0, (32,), np.float32), halves[0])))
    copied = Launch(COPY, (1,), (halves[1], out))
    for read in (lambda: device.host(arena), lambda: device.run(copied)):
        with pytest.raises(Fault) as caught:
            read()
        assert caught.value.kind == "unwritten"
    device.fill(halves[1], 7)
    device.run(copied)
    assert (device.host(out) == 7).all() and (device.host(arena)[:32] == 2).all()


def test_a_launch_wrote_the_elements_that_it_wrote_and_no_others():
    device = Device()
    rows = device.empty((32, 2), np.float32)  # the first column is a view with gaps
    column = device.part(rows, 0, (32,), np.float32, (8,))
    device.run(Launch(Kernel(first_of_two, "l", 32), (1,), (column,)))
    assert (device.host(column) == 1).all()
    with pytest.raises(Fault, match="nobody wrote"):
        device.host(rows)
    halves = device.part(rows, 0, (32, 4), np.uint16)  # half an element is none
    device.fill(device.part(rows, 4, (1,), np.uint16), 9)
    assert (device.host(device.part(halves, 4, (1,), np.uint16)) == 9).all()
    with pytest.raises(Fault, match="nobody wrote"):
        device.host(device.part(rows, 4, (1,), np.float32))


def test_where_a_part_begins_is_known():
    """16 bytes at a time, and maps, want multiples of 16, wherever the whole begins."""
    device = Device()
    arena, out = device.array(np.ones(40, np.float32)), device.empty((32,), np.float32)
    device.run(Launch(COPY, (1,), (device.part(arena, 16, (32,), np.float32), out)))
    with pytest.raises(Fault, match="16"):
        device.run(Launch(COPY, (1,), (device.part(arena, 4, (32,), np.float32), out)))
    rows = device.array(np.zeros((16, 64), np.uint16))
    with pytest.raises(UserError, match="to begin at multiples of 16"):
        part = device.part(rows, 8, (8, 32), np.uint16, (128, 2))
        device.prepare(Launch(NOTHING, (1,), (Map(part, (8, 32)),)))


def test_only_an_array_in_c_order_is_filled():
    device = Device()
    with pytest.raises(UserError, match="C order"):
        device.fill(device.part(device.empty((4, 4), np.float32), 0, (4,), np.float32, (16,)), 0)


# ---- Copies that nobody waits for


def test_what_is_fetched_comes_when_it_is_waited_for():
    device = Device()
    array, page = device.array(np.arange(8, dtype=np.uint8)), device.page(8)
    device.fetch(page, array)
    wait = device.mark()
    device.fill(array, 9)  # after the copy, as the device sees it
    assert (page == 255).all()
    wait(), wait()
    assert (page == np.arange(8)).all()


def test_a_page_is_left_alone_until_its_copy_was_waited_for():
    device = Device()
    array, page, other = device.empty((8,), np.uint8), device.page(8), device.page(8)
    page[...], other[...] = 1, 2
    device.send(array, page)
    wait = device.mark()
    device.send(array, other)
    with pytest.raises(Fault, match="copied again before") as caught:
        device.send(array, page)
    assert caught.value.kind == "race"
    wait()
    page[...] = 3
    device.send(array, page)
    page[...] = 4
    with pytest.raises(Fault, match="was written before anybody waited"):
        device.synchronize()
