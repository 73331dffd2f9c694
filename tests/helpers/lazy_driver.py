"""A driver whose GPU is this machine's memory, and which does everything as late as it may.

Launches and copies that need not be waited for are put on one list, in order, and run when somebody
waits; kernels run on paper. So a page that is written too early, or a result that is read too
early, has wrong numbers. While a graph is captured it refuses what NVIDIA's driver refuses.
"""

import ctypes
from itertools import count
from types import SimpleNamespace

import numpy as np

from nanoeuler import emulator
from nanoeuler.engines.gpu.lang.kernel import Launch

KINDS = {"h": "uint16", "r": "int32", "l": "int64", "f": "float32"}  # of arrays, by the letter


class Error(int):
    """An error of the driver, by its number, with its name."""

    def __new__(cls, number, name):
        made = super().__new__(cls, number)
        made.name = f"CUDA_ERROR_{name}"
        return made


NO_ROOM = Error(2, "OUT_OF_MEMORY")
UNSUPPORTED = Error(900, "STREAM_CAPTURE_UNSUPPORTED")
INVALIDATED = Error(901, "STREAM_CAPTURE_INVALIDATED")


def numbers(**values):
    """An enumeration, as far as the device looks at it."""
    return SimpleNamespace(**values)


class Memory:
    """Allocations on the host and on the device, each by its address."""

    CUdevice_attribute = numbers(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE=50 << 20,
    )  # the attribute is its own answer
    names = (b"a lazy card\0\0",)  # of all GPUs
    CUfunction_attribute = numbers(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, room=1 << 20):
        self.room, self.taken, self.pinned, self.captured = room, {}, {}, None
        self.broken, self.refused, self.fails = False, [], {}

    def unsafe(self, name):
        """The error of a call that no capture allows, not a relaxed one, and that spoils it."""
        if self.captured is None:
            return self.fails.get(name, 0)
        self.broken = True
        self.refused.append(name)
        return UNSUPPORTED

    def cuInit(self, Flags):
        return (0,)

    def cuDeviceGetCount(self):
        return 0, len(self.names)

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, dev):
        return 0, "context"

    def cuCtxSetCurrent(self, ctx):
        return (0,)

    def cuDeviceGetName(self, length, dev):
        return 0, self.names[dev]

    def cuDeviceGetAttribute(self, attrib, dev):
        return 0, attrib

    def cuMemGetInfo(self):
        return 0, self.room - sum(x.size for x in self.taken.values()), self.room

    def cuMemAlloc(self, bytesize):
        if bytesize > self.cuMemGetInfo()[1]:
            return NO_ROOM, None
        room = np.full(bytesize + 256, 0xFF, np.uint8)
        made = room[-room.ctypes.data % 256 :][:bytesize]
        self.taken[made.ctypes.data] = made
        return 0, made.ctypes.data

    def cuMemFree(self, dptr):
        if error := self.unsafe("cuMemFree"):
            return (error,)
        self.drain()
        del self.taken[dptr]
        return (0,)

    def cuMemHostAlloc(self, bytesize, Flags):
        made = np.full(bytesize, 0xFF, np.uint8)
        self.pinned[made.ctypes.data] = made
        return 0, made.ctypes.data

    def cuMemFreeHost(self, p):
        if error := self.unsafe("cuMemFreeHost"):
            return (error,)
        self.drain()
        del self.pinned[p]
        return (0,)


class Driver(Memory):
    """The list of work, and the calls that put something on it or wait for it.

    kernels: name -> the Kernel of that name.
    """

    CUlaunchAttributeID = numbers()
    CUlaunchConfig = SimpleNamespace
    CUstream_flags = numbers(CU_STREAM_DEFAULT=0, CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = numbers(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUevent_flags = numbers(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)

    def __init__(self, room=1 << 20):
        super().__init__(room)
        self.work, self.begun, self.done = [], 0, 0
        self.handles, self.events, self.graphs, self.kernels = count(100), {}, {}, {}

    def put(self, act):
        """Put something on the list, or into the graph."""
        if self.captured is not None:
            self.captured.append(act)
        else:
            self.work.append(act)
            self.begun += 1

    def drain(self, until=None):
        """Do what is on the list, or so much of it."""
        while self.work and (until is None or self.done < until):
            self.work.pop(0)()
            self.done += 1

    def cuModuleLoadData(self, image):
        return 0, "module"

    def cuModuleGetFunction(self, hmod, name):
        return 0, self.kernels[name.decode()]

    def cuFuncSetAttribute(self, hfunc, attrib, value):
        return (0,)

    def cuLaunchKernelEx(self, config, f, kernelParams, extra):
        grid, values = (config.gridDimX, config.gridDimY, config.gridDimZ), iter(kernelParams[0])
        args = []
        for operand in f.parameters:
            if not operand.axes:
                args.append(next(values))
                continue
            _, _, size, item, address = (next(values) for _ in range(5))
            shape, _ = (tuple(next(values) for _ in range(operand.axes)) for _ in range(2))
            there = (ctypes.c_uint8 * (size * item)).from_address(address)
            args.append(np.frombuffer(there, KINDS[operand.letter]).reshape(shape))
        self.put(lambda: emulator.run(Launch(f, grid, tuple(args))))
        return (0,)

    def cuMemcpyHtoD(self, dstDevice, srcHost, ByteCount):
        if error := self.unsafe("cuMemcpyHtoD"):
            return (error,)
        self.drain()
        ctypes.memmove(dstDevice, srcHost, ByteCount)
        return (0,)

    def cuMemsetD8(self, dstDevice, uc, N):
        if error := self.unsafe("cuMemsetD8"):
            return (error,)
        self.put(lambda: ctypes.memset(dstDevice, uc, N))
        return (0,)

    def cuMemcpyDtoH(self, dstHost, srcDevice, ByteCount):
        return self.cuMemcpyHtoD(dstHost, srcDevice, ByteCount)

    def cuMemcpyHtoDAsync(self, dstDevice, srcHost, ByteCount, hStream):
        self.put(lambda: ctypes.memmove(dstDevice, srcHost, ByteCount))
        return (0,)

    def cuMemcpyDtoHAsync(self, dstHost, srcDevice, ByteCount, hStream):
        return self.cuMemcpyHtoDAsync(dstHost, srcDevice, ByteCount, hStream)

    def cuCtxSynchronize(self):
        error = self.unsafe("cuCtxSynchronize")
        if not error:
            self.drain()
        return (error,)

    def cuStreamCreate(self, Flags):
        assert Flags == 0, "the device's stream is in order with the default stream"
        return 0, next(self.handles)

    def cuEventCreate(self, Flags):
        return 0, next(self.handles)

    def cuEventRecord(self, hEvent, hStream):
        self.events[hEvent] = self.begun
        return (0,)

    def cuEventSynchronize(self, hEvent):
        error = self.unsafe("cuEventSynchronize")
        if not error:
            self.drain(self.events[hEvent])
        return (error,)

    def cuEventDestroy(self, hEvent):
        del self.events[hEvent]
        return (0,)

    def cuStreamBeginCapture(self, hStream, mode):
        if self.captured is not None:
            return (Error(401, "ILLEGAL_STATE"),)
        self.captured, self.broken = [], False
        return (0,)

    def cuStreamEndCapture(self, hStream):
        captured, self.captured = self.captured, None
        if self.broken:
            return INVALIDATED, None
        self.graphs[handle := next(self.handles)] = captured
        return 0, handle

    def cuGraphInstantiate(self, hGraph, flags):
        self.graphs[handle := next(self.handles)] = list(self.graphs[hGraph])
        return 0, handle

    def cuGraphDestroy(self, hGraph):
        del self.graphs[hGraph]
        return (0,)

    def cuGraphExecDestroy(self, hGraphExec):
        del self.graphs[hGraphExec]
        return (0,)

    def cuGraphLaunch(self, hGraphExec, hStream):
        assert self.captured is None
        for act in self.graphs[hGraphExec]:
            self.put(act)
        return (0,)
