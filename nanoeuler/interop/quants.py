# Made from book/19a-quantized-files.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-quantized-blocks
"""Numbers as GGUF stores them, in blocks with a scale: from bytes to float32, and Q8_0 back.

Leaves out where the blocks are (gguf.py). The layouts are those of ggml's `ggml-common.h`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nanoeuler.errors import UserError
from nanoeuler.interop.safetensors_file import as_float32, from_float32


class Kind(NamedTuple):
    """A type of GGUF: its number in a file, and how many numbers in how many bytes a block is."""

    code: int
    numbers: int
    size: int
    halves: tuple[int, ...] = ()  # where in a block its float16 are; all else is whole numbers


KINDS = {
    "F32": Kind(0, 1, 4), "F16": Kind(1, 1, 2), "BF16": Kind(30, 1, 2),
    "Q4_0": Kind(2, 32, 18, (0,)), "Q4_1": Kind(3, 32, 20, (0, 2)),
    "Q5_0": Kind(6, 32, 22, (0,)), "Q5_1": Kind(7, 32, 24, (0, 2)), "Q8_0": Kind(8, 32, 34, (0,)),
    "Q4_K": Kind(12, 256, 144, (0, 2)), "Q5_K": Kind(13, 256, 176, (0, 2)),
    "Q6_K": Kind(14, 256, 210, (208,)),
}  # fmt: skip
BY_CODE = {kind.code: name for name, kind in KINDS.items()}
# Types of ggml that we don't read, so that a refusal can name them.
UNREAD = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def _half(blocks, at):
    """The float16 at byte `at` of each block, as float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed):
    """The halves of bytes (n, m): all the low ones, then all the high ones, (n, 2 m)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks, at):
    """The 32 bits of the four bytes at `at`, each 0 or 16: (n, 32)."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """d q. Blocks (n, 34) uint8: d float16, then 32 int8. Equation eq-quantized-scale."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def q4_0(blocks: np.ndarray) -> np.ndarray:
    """d (q - 8). Blocks (n, 18) uint8: d float16, then 32 times 4 bits."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """d q + m. Blocks (n, 20) uint8: d and m float16, then 32 times 4 bits."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def q5_0(blocks: np.ndarray) -> np.ndarray:
    """d (q - 16). Blocks (n, 22) uint8: d float16, 32 fifth bits, then 32 times 4 bits."""
    q = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (q.astype(np.float32) - 16)


def q5_1(blocks: np.ndarray) -> np.ndarray:
    """d q + m. Blocks (n, 24) uint8: d and m float16, 32 fifth bits, then 32 times 4 bits."""
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * q + _half(blocks, 2)


# %% sec-quantized-k
def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of a K block from its 12 bytes: (n, 8) uint8 each, below 64.

    Bytes 0 to 3 and 4 to 7 hold the first four of either in their lower six bits. The other four
    have their lower four bits in bytes 8 to 11, and their upper two where bits were left.
    """
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


def _k_nibbles(packed):
    """The 4 bits of 256 numbers, (n, 8, 32): 32 bytes hold two sub-blocks, low and high."""
    groups = packed.reshape(-1, 4, 32)
    return np.stack([groups & 15, groups >> 4], axis=2).reshape(-1, 8, 32)


def _k_values(blocks, q):
    """d scale q - m minimum for q (n, 8, 32): equation eq-quantized-k."""
    scales, minima = six_bits(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return (scale[:, :, None] * q - least[:, :, None]).reshape(-1, 256)


def q4_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks (n, 144) uint8: d and m float16, 12 bytes of scales, 256 times 4 bits."""
    return _k_values(blocks, _k_nibbles(blocks[:, 16:]))


def q5_k(blocks: np.ndarray) -> np.ndarray:
    """Blocks (n, 176) uint8: as Q4_K, with 32 bytes of fifth bits before the others.

    Bit j of byte l belongs to number l of sub-block j.
    """
    bits = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # (n, 32, 8)
    return _k_values(blocks, _k_nibbles(blocks[:, 48:]) | bits.swapaxes(1, 2) << 4)


def q6_k(blocks: np.ndarray) -> np.ndarray:
    """d scale (q - 32). Blocks (n, 210) uint8: 4 bits of 256, 2 bits of 256, 16 int8 scales, d.

    Each half of a block has 64 bytes of lower bits and 32 bytes of upper ones. Of its four
    quarters the first two have the low nibbles, and quarter j has the bits 2 j and 2 j + 1 of the
    upper bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scale[:, :, None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


# %% sec-quantized-q8
UNPACK: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1,
    "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
AT_ONCE = 1 << 20  # numbers; what is in between takes some MB, however large the tensor


def dequantize(raw: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of whole blocks in `raw` (bytes,) uint8, as float32 (n,)."""
    _, numbers, size, _ = KINDS[kind]
    assert raw.size % size == 0, (kind, raw.size)
    if kind not in UNPACK:
        return as_float32(raw, kind)
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), numbers), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # of a damaged file; readers look for it
        step = AT_ONCE // numbers
        for at in range(0, len(blocks), step):
            out[at : at + step] = UNPACK[kind](np.asarray(blocks[at : at + step]))
    return out.reshape(-1)


def finite(raw: np.ndarray, kind: str) -> bool:
    """Whether all numbers of whole blocks in `raw` (bytes,) uint8 are finite.

    Of blocks they are if their float16 are: no product of those with the whole numbers beside them
    comes near the end of float32.
    """
    if kind not in UNPACK:
        return bool(np.isfinite(as_float32(raw, kind)).all())
    blocks = raw.reshape(-1, KINDS[kind].size)
    exponents = [blocks[:, at + 1] & 0x7C for at in KINDS[kind].halves]  # of float16's upper byte
    return not any((each == 0x7C).any() for each in exponents)


def quantize(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 numbers (n,) as bytes of F32, F16, BF16 or Q8_0: (bytes,) uint8.

    Of Q8_0 a number is off by at most half of its block's scale, equation eq-quantized-bound,
    where its largest number is 0.001 or more: below, float16 has too few bits for the scale.
    UserError for numbers that the kind can't hold.
    """
    if kind != "Q8_0":
        return from_float32(x, kind).view(np.uint8)
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, 32)
    with np.errstate(over="ignore"):
        d = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
    if np.isinf(d).any():
        raise UserError(f"a weight of {np.abs(x).max():.3g} is more than Q8_0 can hold: choose F32")
    scale = np.where(d == 0, np.float32(np.inf), d.astype(np.float32))  # all of its q are 0
    q = np.clip(np.rint(blocks / scale), -127, 127).astype(np.int8)
    return np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=1).reshape(-1)
