"""A card that computes nothing and takes its time, for the host's part of a training run.

Its memory is this machine's, never written by a kernel. A graph of more than half a step's launches
counts as a step; each start keeps the card busy for its seconds, after all that was started before.
"""

import time
import weakref
from types import SimpleNamespace

import numpy as np

from nanoeuler.engines import registry
from nanoeuler.engines.gpu.lang.card import Card
from nanoeuler.engines.gpu.lang.views import dense, part_of
from nanoeuler.engines.gpu.step import stepper


class Sheet:
    """An array on the card."""

    def __init__(self, raw, offset, shape, dtype, strides):
        self.raw, self.offset, self.shape = raw, offset, tuple(shape)
        self.dtype, self.strides = np.dtype(dtype), strides
        self.address = raw.ctypes.data + offset

    @property
    def values(self):
        return np.ndarray(self.shape, self.dtype, self.raw, self.offset, self.strides)


class IdleCard:
    """As `engines.gpu.host.device.Device`. idle: seconds in which it had nothing to do."""

    name, multiprocessors, number = "an idle card", 132, 0

    def others(self):
        return {}

    def __init__(self, seconds=0.0, capability=(9, 0), free=20e9, whole=24e9):
        self.seconds, self.capability = seconds, capability
        self.card = self.real = Card(capability, self.multiprocessors, 50 << 20)
        self.driver = SimpleNamespace(cuMemGetInfo=lambda: (0, int(free), int(whole)))
        self.until, self.idle, self.gaps, self.starts = time.perf_counter(), 0.0, [], 0
        self.live = self.most = 0  # bytes

    def empty(self, shape, dtype):
        kind = np.dtype(dtype)
        raw = np.empty(max(1, int(np.prod(shape, dtype=np.int64)) * kind.itemsize), np.uint8)
        self.live += raw.size
        self.most = max(self.most, self.live)
        weakref.finalize(raw, self._gone, raw.size)
        return Sheet(raw, 0, shape, kind, dense(tuple(shape), kind.itemsize))

    def _gone(self, size):
        self.live -= size

    def part(self, array, offset, shape, dtype, strides=None):
        return Sheet(
            array.raw, array.offset + offset, *part_of(array, offset, shape, dtype, strides)
        )

    def array(self, values):
        made = self.empty(np.asarray(values).shape, np.asarray(values).dtype)
        self.fill(made, values)
        return made

    def zeros(self, shape, dtype):
        return self.array(np.zeros(shape, dtype))

    def fill(self, array, values):
        array.values[...] = values

    def host(self, array):
        self.mark()()
        return array.values.copy()

    def page(self, size):
        return np.zeros(size, np.uint8)

    def send(self, array, page):
        pass

    def fetch(self, page, array):
        page[...] = array.values

    def mark(self):
        until = self.until
        return lambda: time.sleep(max(0.0, until - time.perf_counter()))

    def load_all(self, kernels):
        list(kernels)

    def prepare(self, launch):
        return lambda stream=0: None

    def capture(self, starts):
        return SimpleNamespace(launch=self._launch, starts=list(starts))

    def _launch(self):
        now, self.starts = time.perf_counter(), self.starts + 1
        if now > self.until:
            self.idle += now - self.until
            self.gaps.append((now, now - self.until))
        self.until = max(now, self.until) + self.seconds


def install(monkeypatch, card):
    """Have this process believe that `card` is its GPU; the card."""
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    monkeypatch.setattr(stepper, "gpu", lambda: card)
    return card
