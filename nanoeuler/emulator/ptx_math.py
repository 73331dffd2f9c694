# Made from book/h-ptx-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-ptx-values
"""PTX instructions on values in registers: arithmetic, conversions, comparisons.

PTX ISA, "Integer Arithmetic", "Floating-Point", "Logic and Shift", "Data Movement" instructions.
Approximate functions are computed in float64, lg2 in float32. The manual has the hardware's error.
"""

import functools
import math
from typing import Any

import numpy as np

from nanoeuler.emulator.dtypes import bits, float32, from_bf16, int32, int64, uint32
from nanoeuler.emulator.ptx_parser import op

F32 = np.float32  # short, for the lines below
LEAST = 2.0**-126  # the smallest float32 that is not subnormal; .ftz makes 0 of what is below


def flush(value: float) -> np.float32:
    """.ftz: subnormal numbers become zeros of their sign."""
    return F32(math.copysign(0.0, value)) if abs(value) < LEAST else F32(value)


@op(r"ex2\.approx(\.ftz)?\.f32", 1)
def exponential(ftz: str | None, x: np.float32) -> np.float32:
    """2^x; the manual: relative error at most 2^-22."""
    x = float(x)  # if subnormal 2^x is 1, flushed or not
    y = math.inf if x >= 128 else 2.0**x if x > -1000 else 0.0 if x == x else x
    return flush(y) if ftz else F32(y)


@op(r"lg2\.approx(\.ftz)?\.f32", 1)
def logarithm(ftz: str | None, x: np.float32) -> np.float32:
    """Base 2; the manual: absolute error at most 2^-22 near 1, else relative."""
    x = flush(x) if ftz else x
    return np.log2(F32(x))


@op(r"(rcp|rsqrt|sqrt|tanh)\.approx(\.ftz)?\.f32", 1)
def approximate(name: str, ftz: str | None, x: np.float32) -> np.float32:
    """1 / x, 1 / sqrt(x), sqrt(x), tanh(x)."""
    x = np.float64(flush(x) if ftz else x)
    y = APPROXIMATE[name](x)
    return flush(y) if ftz else F32(y)


# By the mnemonic's first word, in float64.
APPROXIMATE = {
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "tanh": np.tanh
}  # fmt: skip


@op(r"(max|min)\.f32", 1)
def extreme(name: str, a: np.float32, b: np.float32) -> np.float32:
    """The larger or smaller, and 0 is larger than -0; a nan gives way to a number."""
    if a != a or b != b:
        return b if a != a else a
    return a if (a > b or a == b and np.signbit(b)) == (name == "max") else b


# By the mnemonic's first word.
FLOAT = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}
INTEGER = FLOAT | {"min": min, "max": max}  # on Python's integers, which the caller wraps
# Bit by bit.
LOGIC = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
ORDER = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


values = functools.partial(op, results=1, lanes=True)  # for functions that take arrays as well
op(r"(add|sub|mul)(?:\.rn)?\.f32", 1)(lambda name, a, b: F32(FLOAT[name](F32(a), F32(b))))
op(r"(add|sub|min|max)\.s32", 1)(lambda name, a, b: int32(INTEGER[name](a, b)))
values(r"(add|sub)\.[su]64")(lambda name, a, b: int64(INTEGER[name](a, b)))
values(r"(add|sub)\.u32")(lambda name, a, b: int32(INTEGER[name](a, b)))
values(r"mul\.lo\.[su]32")(lambda a, b: int32(a * b))
values(r"mul\.wide\.s32")(lambda a, b: int64(a * b))
op(r"div\.u32", 1)(lambda a, b: int32(uint32(a) // uint32(b)))
op(r"rem\.u32", 1)(lambda a, b: int32(uint32(a) % uint32(b)))
values(r"(and|or|xor)\.b32")(lambda name, a, b: int32(LOGIC[name](word(a), word(b))))
values(r"(and|or|xor)\.b64")(lambda name, a, b: int64(LOGIC[name](a, b)))
op(r"shl\.b32", 1)(lambda a, n: int32(word(a) << min(n, 32)))
op(r"shr\.u32", 1)(lambda a, n: int32(uint32(word(a)) >> min(n, 32)))
op(r"shl\.b64", 1)(lambda a, n: int64(a << min(n, 64)))
op(r"shr\.u64", 1)(lambda a, n: int64((a & (1 << 64) - 1) >> min(n, 64)))
op(r"setp\.(eq|ne|lt|le|gt|ge)\.(?:s32|s64|f32)", 1)(lambda name, a, b: ORDER[name](a, b))
values(r"setp\.(eq|ne)\.b32")(lambda name, a, b: ORDER[name](word(a), word(b)))
values(r"setp\.(lt|le|gt|ge)\.u32")(lambda name, a, b: ORDER[name](uint32(a), uint32(b)))
op(r"selp\.(?:b32|f32|s32)", 1)(lambda a, b, p: a if p else b)
values(r"mov\.b32")(lambda a: int32(a) if type(a) is int else a)  # a float stays one
values(r"mov\.(?:u|s)32")(int32)
values(r"mov\.(?:b|u|s)64")(int64)
op(r"mov\.f32", 1)(float32)
values(r"cvta\.to\.(?:shared|global)\.u64|cvta\.global\.u64")(int64)
values(r"cvt\.u32\.u64|cvt\.[us]32\.[us]32")(int32)
values(r"cvt\.u16\.u32")(lambda a: a & 0xFFFF)
op(r"cvt\.rn\.f32\.s32", 1)(lambda a: F32(a))


def word(value: Any) -> Any:
    """A register of 32 bits that may hold a float32, as an int32; or those of all threads."""
    if isinstance(value, np.ndarray) and value.dtype == F32:
        return value.view(np.int32).astype(np.int64)
    return bits(value) if isinstance(value, np.floating) else int32(value)


@op(r"fma\.rn\.f32", 1)
def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a b + c, rounded once: a float64 that lost something is made odd, so never halfway."""
    product, c = float(a) * float(b), float(c)  # exact: 24 bits by 24
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # exact (Knuth); nan where total is not finite
    if (lost < 0 or lost > 0) and not np.float64(total).view(np.int64) & 1:
        total = math.nextafter(total, math.copysign(math.inf, lost))
    return F32(total)


@op(r"cvt\.rn\.bf16\.f32", 1)
def rounded(value: float) -> int:
    """The bits of the bf16 that is nearest to a float32, ties to even."""
    x = bits(value) & 0xFFFFFFFF
    if x & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF  # the manual: a nan becomes this one
    return (x + 0x7FFF + (x >> 16 & 1)) >> 16


@op(r"cvt\.rn\.bf16x2\.f32", 1)
def pack(high: float, low: float) -> int:
    """Two float32 as bf16 in one register, the first in the upper half."""
    return int32(rounded(high) << 16 | rounded(low))


@op(r"(max|min)\.bf16x2", 1)
def extreme_pair(name: str, a: int, b: int) -> int:
    """`extreme` of the two lower bf16 of registers, and of the two upper ones."""
    low, high = (
        rounded(extreme(name, from_bf16(a >> by & 0xFFFF), from_bf16(b >> by & 0xFFFF)))
        for by in (0, 16)
    )
    return int32(high << 16 | low)
