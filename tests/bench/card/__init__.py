"""Families of kernels, each a module of this folder, that `tests/bench/gpu.py` runs on a card.

A family offers

    kernels() -> name -> maker of a Kernel, importable (a functools.partial of one is fine)
    checks(bench) -> name -> function that runs one check and returns its errors (see below)
    contests(bench) -> the Contests that are timed
    plans() -> name -> Launches on `Ghost`s; may be absent: what --dry lays out, without a GPU

All kernels are compiled beforehand. Makers give the same Kernel object for equal arguments. A check
returns {"error": ours, "peer": the library's at the same precision}, both relative to float64 if
no "unit" is named, or a dict of such by part. It has failed where it raises ValueError, and where
our error is above twice the peer's, or twice "least" if the outcome names one: a rounding that any
method makes at least.
"""

import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.host.device import Device, DeviceArray
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch

Calls = list[Callable[[], Any]]
MARGIN = 4096  # poisoned elements before and after an output


@dataclass
class Contest:
    """What is timed. what, case: names of its rows.

    entrants() -> name -> calls, one for each set of operands, which should overflow the L2 cache
    together; each call puts the work on torch's current stream. ours: whose rows have the engine
    "cuda"; the others that are no peers have rows under their own names. peer: one of the library's
    ways, or several. An entrant that raises at its first call is named and left out.
    """

    what: str
    case: str
    entrants: Callable[[], dict[str, Calls]]
    ours: str = "ours"
    peer: str | tuple[str, ...] = "torch"

    @property
    def peers(self) -> tuple[str, ...]:
        return (self.peer,) if isinstance(self.peer, str) else self.peer


@dataclass(frozen=True)
class Ghost:
    """Stands in for an array where there is no GPU: shape, dtype, strides; its parts, too.

    apart: the strides, where they are not those of an array in C order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    apart: tuple[int, ...] = ()

    @property
    def strides(self) -> tuple[int, ...]:
        size = np.dtype(self.dtype).itemsize
        whole = tuple(math.prod(self.shape[i + 1 :]) * size for i in range(len(self.shape)))
        return self.apart or whole

    def __getitem__(self, part: Any) -> "Ghost":
        return Ghost(np.broadcast_to(0, self.shape)[part].shape, self.dtype, self.strides)


def ghost(shape: Sequence[int], dtype: Any = np.uint16) -> Ghost:
    """A stand-in for an array of this shape; bf16 if nothing is said."""
    return Ghost(tuple(shape), np.dtype(dtype))


class Bench:
    """What checks and contests work with on the card.

    kernels: name -> maker of all kernels that may be launched; codes: name -> what was compiled of
    those that compile. torch, device: PyTorch and our Device, on the same context.
    """

    def __init__(self, kernels: Mapping[str, Callable[[], Kernel]], codes: Mapping[str, Any]):
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")
        self.device = Device()
        for name in kernels.keys() & codes.keys():
            self.device.load(kernels[name](), codes[name])

    @cached_property
    def kinds(self) -> dict[Any, np.dtype]:
        """dtypes of tensors -> of arrays: bf16 is uint16."""
        names = "float32", "int32", "int64", "uint8", "int8"
        kinds = {getattr(self.torch, name): np.dtype(name) for name in names}
        return kinds | {self.torch.bfloat16: np.dtype(np.uint16)}

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """A tensor of normal deviates; bf16 if nothing is said."""
        return self.torch.randn(*shape, device="cuda", dtype=dtype or self.torch.bfloat16)

    def output(self, *shape: int, dtype: Any = None) -> Any:
        """A tensor for a result, bf16 if nothing is said, with a margin on both sides (`repeat`).

        Tensor and margins hold NaN, or -1 in integers.
        """
        dtype = dtype or self.torch.bfloat16
        size = math.prod(shape)
        poison = math.nan if dtype.is_floating_point else -1
        flat = self.torch.full((size + 2 * MARGIN,), poison, device="cuda", dtype=dtype)
        return flat[MARGIN : MARGIN + size].view(shape)

    def view(self, tensor: Any) -> DeviceArray:
        """A tensor as kernels take it; bf16 as uint16."""
        strides = tuple(step * tensor.element_size() for step in tensor.stride())
        kind = self.kinds[tensor.dtype]
        return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), kind, strides, tensor)

    def call(self, launches: Launch | Sequence[Launch]) -> Callable[[], None]:
        """A function that puts launches, one after the other, on torch's current stream."""
        launches = [launches] if isinstance(launches, Launch) else launches
        starts = [self.device.prepare(launch) for launch in launches]

        def call() -> None:
            stream = self.torch.cuda.current_stream().cuda_stream
            for start in starts:
                start(stream)

        return call

    def error(self, values: Any, exact: Any) -> float:
        """The relative error of a tensor, as lengths, against one of float64."""
        return ((values.double() - exact).norm() / exact.norm()).item()

    def repeat(
        self, call: Callable[[], Any], outputs: Mapping[str, Any], times: int = 2
    ) -> dict[str, Any]:
        """Call again and again; returns name -> a copy of each of `outputs` after the first time.

        outputs: name -> tensor. All are as they are now before each call. ValueError where two
        times differ in a bit, where NaN is left, or a margin of an `output` was written.
        """
        torch, before = self.torch, {name: x.clone() for name, x in outputs.items()}
        first: dict[str, Any] = {}
        for _ in range(times):
            for name, tensor in outputs.items():
                tensor.copy_(before[name])
            call()
            torch.cuda.synchronize()
            for name, tensor in outputs.items():
                self.inspect(name, tensor, first.setdefault(name, tensor.clone()))
        return first

    def inspect(self, name: str, tensor: Any, first: Any) -> None:
        """ValueError where an output is not as it was the first time, or not all there."""
        bits = {2: self.torch.int16, 4: self.torch.int32}.get(tensor.element_size(), tensor.dtype)
        if many := int((tensor.view(bits) != first.view(bits)).sum()):
            raise ValueError(f"two runs differ in {many} values of {name}")
        if many := int(tensor.isnan().sum()):
            raise ValueError(f"{many} values of {name} are nan")
        whole = tensor._base
        if whole is not None and whole.dim() == 1 and whole.numel() == tensor.numel() + 2 * MARGIN:
            ends = whole[:MARGIN], whole[-MARGIN:]
            clean = [bool((x.isnan() | (x == -1)).all()) for x in ends]
            if not all(clean):
                raise ValueError(f"wrote beside {name}")


NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))  # of all families


def families(names: Sequence[str] = NAMES) -> dict[str, ModuleType]:
    """Name -> module of these families: the modules of this folder."""
    return {name: import_module(f"{__name__}.{name}") for name in names}
