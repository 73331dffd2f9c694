"""Launches that are captured on paper and replayed, and what a graph cannot hold: refused, each."""

import numpy as np
import pytest

from nanoeuler.engines.gpu.instruction import cuda, int8
from nanoeuler.engines.gpu.kernel import Kernel, Launch, Map
from nanoeuler.engines.gpu.paper import Device, Fault
from nanoeuler.errors import UserError


def scale(x, y, by):
    i = cuda.threadIdx.x
    y[i] = x[i] * by


def add(x, y):
    i = cuda.threadIdx.x
    y[i] += x[i]


SCALE, ADD = Kernel(scale, "f[1] f[1] f", 32), Kernel(add, "f[1] f[1]", 32)


def setting():
    """A device with both kernels, x, y that nobody wrote, and the launches y = 3 x; x += y."""
    device = Device(seed=0)
    x, y = device.array(np.arange(32, dtype=np.float32)), device.empty((32,), np.float32)
    device.load(SCALE), device.load(ADD)
    return device, x, y, (Launch(SCALE, (1,), (x, y, 3.0)), Launch(ADD, (1,), (y, x)))


def test_a_graph_plays_on_what_its_arrays_hold():
    device, x, y, launches = setting()
    with device.capture() as graph:
        for launch in launches:
            device.run(launch)
    assert (device.host(x) == np.arange(32)).all()  # nothing has run
    for seed in (None, 0):
        reports = graph.replay(seed)
    assert (device.host(x) == 16 * np.arange(32)).all() and len(reports) == 2
    assert reports[0]["global stores bytes"] == 128
    device.fill(x, 1)  # between replays the host may
    graph.replay()
    assert (device.host(x) == 4).all() and (device.host(y) == 3).all()
    for launch in launches:  # and launches of its own
        device.run(launch)
    assert (device.host(x) == 16).all()



def nothing(x):
    cuda.shared.array(1, int8)


NOTHING = Kernel(nothing, "l", 32)
MISTAKES = {
    "the host reads": lambda device, x, launch: device.host(x),
    "the host writes": lambda device, x, launch: device.fill(x, 0),
    "memory is asked for": lambda device, x, launch: device.empty((1,), np.float32),
    "memory is asked": lambda device, x, launch: device.array(np.ones(1)),
    "the host waits": lambda device, x, launch: device.synchronize(),
    "nothing is compiled": lambda device, x, launch: device.run(launch),
    "a map is encoded": lambda device, x, launch: (
        device.loaded.add(NOTHING), device.run(launch)),
    "a capture begins": lambda device, x, launch: device.capture().__enter__(),
}  # fmt: skip


@pytest.mark.parametrize("words", MISTAKES)
def test_what_a_graph_cannot_hold_is_refused(words):
    device, x, _, launches = setting()
    launch = Launch(NOTHING, (1,), (Map(device.array(np.zeros((8, 64), np.uint16)), (8, 64)),))
    with pytest.raises(Fault, match=words) as caught, device.capture():
        MISTAKES[words](device, x, launch)
    assert caught.value.kind == "capture"
    device.fill(x, 5), device.synchronize()  # the capture is over, whatever happened in it
    device.run(launches[0])


def test_a_launch_that_was_prepared_before_is_captured_with_its_maps():
    device = Device()
    array = device.array(np.zeros((8, 64), np.uint16))
    start = device.prepare(Launch(NOTHING, (1,), (Map(array, (8, 64)),)))
    with device.capture() as graph:
        start()
    graph.replay()
    del start, array
    with pytest.raises(Fault, match="argument 0 of nothing was freed") as caught:
        graph.replay()
    assert caught.value.kind == "dead"


def test_an_array_that_was_freed_is_not_written():
    device, x, y, launches = setting()
    with device.capture() as graph:
        for launch in launches:
            device.run(launch)
    del launches, launch, y
    with pytest.raises(Fault, match="argument 1 of scale was freed after it was captured"):
        graph.replay()


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
