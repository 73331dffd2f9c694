# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-file
"""Weights that stay in a mapped file, in its own form, until somebody needs them as float32.

Leaves out which files there are, and whose tensors are called what: the rooms interop and training.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.model.config import ModelConfig, parameter_shapes
from nanoeuler.model.weights import Weights

HALVES = ("F16", "BF16")  # numbers of 16 bits, by the names that safetensors gives them
AT_ONCE = 1 << 20  # numbers that are looked at in one go; what is in between takes some MB


def widened(bits: np.ndarray, kind: str) -> np.ndarray:
    """Numbers of the kind F16 or BF16, as uint16 of any shape, as float32: exact."""
    if kind == "F16":
        return bits.view("<f2").astype(np.float32)
    return (bits.astype("<u4") << 16).view("<f4")


def narrowed(x: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `widened`: float32 that are numbers of the kind, as uint16."""
    x = np.ascontiguousarray(x, "<f4")
    return x.astype("<f2").view("<u2") if kind == "F16" else (x.view("<u4") >> 16).astype("<u2")


class Piece(NamedTuple):
    """A matrix (rows, columns) in a mapped file, row by row; a vector is one row."""

    mapping: mmap.mmap
    begin: int  # its first byte
    shape: tuple[int, int]
    kind: str   # F32, F16, BF16, or one of blocks
    size: int   # bytes of a row
    decode: Callable[[np.ndarray, str], np.ndarray]  # bytes (n,) of whole rows as float32
    sound: Callable[[np.ndarray, str], bool] | None = None  # whether their numbers are finite

    @classmethod
    def of(
        cls, place: tuple[mmap.mmap, int], shape: tuple[int, ...], kind: str,
        block: tuple[int, int], *ways: Callable,
    ) -> "Piece":  # fmt: skip
        """A vector or a matrix of this shape, of blocks of so many numbers and bytes.

        place: the mapped file and the first byte; ways: decode, and sound if there is one.
        """
        rows, columns = shape if len(shape) == 2 else (1, *shape)
        numbers, size = block
        return cls(*place, (rows, columns), kind, columns // numbers * size, *ways)

    def raw(self, first: int, last: int) -> np.ndarray:
        """The bytes of some rows, (last - first, size) uint8, where they are mapped."""
        n = last - first
        whole = np.frombuffer(self.mapping, np.uint8, n * self.size, self.begin + first * self.size)
        return whole.reshape(n, self.size)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Some rows as float32, a copy (last - first, columns)."""
        found = self.decode(self.raw(first, last).reshape(-1), self.kind)
        found = np.array(found, np.float32).reshape(-1, self.shape[1])
        self.leave()
        return found

    def leave(self) -> None:
        """Give the pages of the file back: the system keeps them as long as it has room."""
        if hasattr(mmap, "MADV_DONTNEED"):
            page = mmap.PAGESIZE
            first = self.begin // page * page
            length = self.begin + self.shape[0] * self.size - first
            self.mapping.madvise(mmap.MADV_DONTNEED, first, length)

    def cut(self, rows: int) -> "Piece":
        """The first rows alone."""
        return self._replace(shape=(rows, self.shape[1]))

    def finite(self) -> bool:
        """Whether all numbers are."""
        step = max(1, AT_ONCE // max(1, self.shape[1]))
        spans = [(at, min(at + step, self.shape[0])) for at in range(0, self.shape[0], step)]
        if self.sound is None:
            return all(np.isfinite(self.rows(*span)).all() for span in spans)
        found = all(self.sound(self.raw(*span).reshape(-1), self.kind) for span in spans)
        self.leave()
        return found


# %% sec-token-file
class Part(NamedTuple):
    """A piece, as the next columns of a tensor of ours."""

    piece: Piece
    turned: bool  # whether its rows are our columns
    order: np.ndarray | None  # which of its rows, or numbers of a vector, come one after the other

    def raw(self) -> np.ndarray:
        """Its bytes, row by row in our order: (rows, size) uint8."""
        whole = self.piece.raw(0, self.piece.shape[0])
        return whole if self.order is None else whole[self.order]


class Stored:
    """A tensor of ours that is made of parts of a file, side by side; of none, it is zeros."""

    def __init__(self, shape: tuple[int, ...], parts: Sequence[Part]):
        self.shape, self.parts = shape, parts
        kinds = {part.piece.kind for part in parts}
        self.blocked = len(shape) == 2 and not kinds <= {"F32", *HALVES}  # in part, at least
        self.kind = kinds.pop() if len(kinds) == 1 and len(shape) == 2 else "F32"

    def columns(self, first: int, last: int, bits: bool = False) -> np.ndarray:
        """Columns [first, last) of a matrix (I, last - first), as float32, or as `narrowed` bits.

        Some rows of the file at a time, so there is no other copy.
        """
        kind = np.uint16 if bits else np.float32
        if (found := self._as_it_lies(first, last, bits)) is not None:
            return found
        out, at = np.zeros((self.shape[0], last - first), kind), 0
        for piece, turned, order in self.parts:
            width = piece.shape[0] if turned else piece.shape[1]
            low, high = max(first - at, 0), min(last - at, width)
            into = out[:, low + at - first : high + at - first]
            begin, end = (low, high) if turned else (0, piece.shape[0])
            step = max(1, AT_ONCE // piece.shape[1])
            for i in range(begin, end if low < high else begin, step):
                found = _rows(piece, order, i, min(i + step, end))
                found = narrowed(found, self.kind) if bits else found
                if turned:
                    into[:, i - low : i - low + len(found)] = found.T
                else:
                    into[i : i + len(found)] = found[:, low:high]
            at += width
        return out

    def _as_it_lies(self, first, last, bits):
        """A copy of columns whose numbers the file has in this form and order; None for others."""
        if len(self.parts) != 1 or self.parts[0].turned or self.parts[0].order is not None:
            return None
        piece = self.parts[0].piece
        if piece.kind not in (HALVES if bits else ("F32",)):
            return None
        numbers = piece.raw(0, piece.shape[0]).view("<u2" if bits else "<f4")
        found = np.array(numbers[:, first:last])
        piece.leave()
        return found

    def row_blocks(self, first: int, last: int) -> np.ndarray | None:
        """The bytes of rows [first, last) of a matrix in blocks, uint8; None if there are none."""
        if self.kind in ("F32", *HALVES) or len(self.parts) != 1:
            return None
        piece, turned, order = self.parts[0]
        if turned or order is not None:
            return None
        found = np.array(piece.raw(first, last))
        piece.leave()
        return found

    def blocks(self, first: int, last: int) -> np.ndarray | None:
        """The bytes of columns [first, last) in blocks along the depth, uint8 (last - first, size).

        None where the file has no such blocks: of other kinds, or along the other axis.
        """
        if self.kind in ("F32", *HALVES) or not all(part.turned for part in self.parts):
            return None
        found, at = [], 0
        for piece, _, order in self.parts:
            low, high = max(first - at, 0), min(last - at, piece.shape[0])
            if low < high:
                wanted = np.arange(low, high) if order is None else order[low:high]
                begin = int(wanted.min())
                found.append(piece.raw(begin, int(wanted.max()) + 1)[wanted - begin])
                piece.leave()
            at += piece.shape[0]
        return np.concatenate(found)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of a matrix, as float32 (last - first, O)."""
        if len(self.parts) == 1 and not self.parts[0].turned:
            return self.parts[0].piece.rows(first, last)
        return self.whole()[first:last]

    def whole(self) -> np.ndarray:
        """All of it as float32."""
        if len(self.shape) == 2:
            return self.columns(0, self.shape[1])
        found = [piece.rows(0, 1)[0] if order is None else piece.rows(0, 1)[0][order]
                 for piece, _, order in self.parts]  # fmt: skip
        return np.concatenate(found) if found else np.zeros(self.shape, np.float32)


# %% sec-token-file
def _rows(piece, order, low, high):
    """Rows [low, high) of a piece in this order, as float32. The order keeps near what is near."""
    if order is None:
        return piece.rows(low, high)
    wanted = order[low:high]
    first = int(wanted.min())
    return piece.rows(first, int(wanted.max()) + 1)[wanted - first]


class StoredWeights(Weights):
    """The weights of a model in mapped files. `stored` has its tensors, or None: see `flat`.

    `weights[name]` reads a tensor as float32, a copy that can't be written to. `flat` and
    `blocks` read all of them into memory, and from then on these count.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Stored]):
        self.config, self._lock = config, Lock()
        self.stored: Mapping[str, Stored] | None = tensors

    def __getattr__(self, name: str) -> Any:
        # Only what is not there yet comes here.
        if name not in ("flat", "blocks", "starts", "block_starts", "_views"):
            raise AttributeError(f"StoredWeights has no {name}")
        with self._lock:
            if self.stored is not None:
                made = Weights(self.config)
                for each, tensor in self.stored.items():
                    made[each][...] = tensor.whole()
                self.__dict__ |= made.__dict__
                self.stored = None
        return self.__dict__[name]

    def __getitem__(self, name: str) -> np.ndarray:
        if (stored := self.stored) is None:
            return super().__getitem__(name)
        found = stored[name].whole()
        found.setflags(write=False)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(parameter_shapes(self.config))

    def __len__(self) -> int:
        return len(parameter_shapes(self.config))
