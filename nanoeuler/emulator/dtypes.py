# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-numbers
"""Numbers as a GPU's registers hold them: integers that wrap, and bits read as float32 or bf16.

A register of 32 bits travels as a Python int with a sign, or as a NumPy float32.
"""

from typing import Any

import numpy as np

from nanoeuler.engines.gpu.lang.bf16 import from_bf16 as from_bf16
from nanoeuler.engines.gpu.lang.bf16 import to_bf16 as to_bf16


class Integer:
    """An integer type. Called, it converts: towards zero, then by wrapping (a GPU clamps floats).

    It takes a number, or an array with a value of each thread, which becomes int64.
    """

    def __init__(self, name: str, bits: int, signed: bool = True):
        self.name, self.bits, self.dtype = name, bits, np.dtype(name)
        self.low = -(1 << bits - 1) if signed else 0
        self.mask = (1 << bits) - 1
        self.high = self.low + self.mask

    def __call__(self, value: Any) -> Any:
        if type(value) is not int:
            if isinstance(value, np.ndarray):
                value = value.astype(np.int64, copy=False)  # floats wrap, too
                return value.astype(self.dtype, copy=False).astype(np.int64, copy=False)
            value = int(value)
        if self.low <= value <= self.high:
            return value
        return ((value - self.low) & self.mask) + self.low


# The types that a kernel may name: `engines.gpu.lang.instruction` has them as place-holders.
int8, int32, int64 = Integer("int8", 8), Integer("int32", 32), Integer("int64", 64)
uint32 = Integer("uint32", 32, signed=False)  # instructions that read their operands so
float32 = np.float32  # rounds as a register of 32 bits does
Register = int | np.float32  # what a kernel finds in a register


def dtype(kind: Any) -> np.dtype:
    """NumPy's name for a type that a kernel gives to an array."""
    return kind.dtype if isinstance(kind, Integer) else np.dtype(getattr(kind, "__name__", kind))


_register = np.zeros(1, np.uint32)  # one register, seen as bits, with a sign, or as a number
_signed, _number = _register.view(np.int32), _register.view(np.float32)


def number(bits: int) -> np.float32:
    """The float32 whose bits these are."""
    _register[0] = bits & 0xFFFFFFFF
    return _number[0]


def bits(value: float) -> int:
    """The bits of a float32, as an int32."""
    _number[0] = value
    return _signed.item()
