# Made from book/19a-quantized-files.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-quantized-gguf
"""GGUF files, versions 2 and 3: metadata and tensors, read with suspicion and written.

Leaves out what the numbers of a block mean (quants.py), and models (gguf_model.py).
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, replacing
from nanoeuler.interop.quants import BY_CODE, KINDS, UNREAD, dequantize, finite, quantize
from nanoeuler.model.stored import Piece

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32  # the last one where a file doesn't say another
# The types of values: number in the file -> NumPy's name. 7 is a truth value, one byte.
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1",
           10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
TRUTH, STRING, ARRAY = 7, 8, 9  # the other types of values
MOST_NESTED = 2  # arrays around an array; ggml's own reader takes none
MOST_AXES = 4  # of a tensor; ggml's own limit


class Place(NamedTuple):
    """Where a tensor is: its kind, NumPy's shape, and its bytes counted from the file's start."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Cursor:
    """Reads values one after the other from the bytes of a file; ValueError where they end."""

    def __init__(self, data: mmap.mmap | bytes, at: int = 0):
        self.data, self.at = data, at

    def take(self, n: int) -> int:
        """Step over n bytes; return where they begin."""
        if n > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, inside its header")
        self.at += n
        return self.at - n

    def number(self, form: str) -> Any:
        """The next number, `form` as `struct` has it: I is 32 bits, Q is 64, without a sign."""
        return struct.unpack_from("<" + form, self.data, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        """The next string: its length in 64 bits, and UTF-8."""
        n = self.number("Q")
        at = self.take(n)
        return self.data[at : at + n].decode("utf-8")

    def value(self, code: int, depth: int = 0) -> Any:
        """The next value of this type: a number, bool, str, or what `_array` returns."""
        if code == STRING:
            return self.text()
        if code == ARRAY:
            return self._array(depth)
        if code not in SCALARS:
            raise ValueError(f"a value has the unknown type {code}")
        kind = np.dtype(SCALARS[code])
        at = self.take(kind.itemsize)
        value = np.frombuffer(self.data[at : self.at], kind)[0].item()
        return bool(value) if code == TRUTH else value

    def _array(self, depth):
        """The next array: of NumPy for numbers and bool, a list for texts and arrays."""
        code, n = self.number("I"), self.number("Q")
        if code in SCALARS:
            kind = np.dtype(SCALARS[code])
            at = self.take(n * kind.itemsize)
            values = np.frombuffer(self.data[at : self.at], kind)
            return values.astype(bool) if code == TRUTH else values
        if code == ARRAY and depth >= MOST_NESTED:
            raise ValueError(f"arrays are nested more than {MOST_NESTED} deep")
        if n > len(self.data) - self.at:
            raise ValueError(f"an array has {n} elements by its length, and fewer bytes are left")
        return [self.value(code, depth + 1) for _ in range(n)]


# %% sec-quantized-gguf
def _metadata(cursor, n):
    """The n keys and their values; ValueError for a key that comes twice."""
    metadata: dict[str, Any] = {}
    for _ in range(n):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"its metadata has {quoted(key)} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    return metadata


def _tensor(cursor):
    """(name, type's number, NumPy's shape, offset) of the next tensor; ValueError."""
    name, axes = cursor.text(), cursor.number("I")
    if axes > MOST_AXES:
        raise ValueError(f"{quoted(name)} has {axes} axes")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]  # a file begins with the last axis
    return name, cursor.number("I"), shape, cursor.number("Q")


def _place(name, code, shape, begin):
    """The `Place` of a tensor that begins at this byte; ValueError unless it is whole blocks."""
    if code not in BY_CODE:
        kind = UNREAD.get(code, f"the unknown type {code}")
        raise ValueError(f"{quoted(name)} is {kind}, and we read {', '.join(KINDS)}")
    kind = BY_CODE[code]
    _, numbers, size, _ = KINDS[kind]
    if not shape or shape[-1] % numbers or 0 in shape:
        raise ValueError(f"{quoted(name)} is {[*shape]}, which is no whole blocks of {numbers}")
    return Place(kind, shape, begin, begin + math.prod(shape) // numbers * size)


def _alignment(metadata):
    """The number of bytes of which every tensor begins at a multiple; ValueError."""
    value = metadata.get("general.alignment", ALIGNMENT)
    if type(value) is not int or not 8 <= value <= 1 << 20 or value & (value - 1):
        raise ValueError(f"its alignment is {quoted(value)}, and should be a power of two from 8 "
                         "to 2^20")
    return value


def _parse(data):
    """(metadata, {name: Place}) of the bytes of a file; ValueError for anything that is off."""
    cursor = Cursor(data)
    if data[:4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.take(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise ValueError("it is of a machine whose bytes are in the other order" if big else
                         f"it is of version {version}, and we read 2 and 3")  # fmt: skip
    n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
    metadata = _metadata(cursor, n_keys)
    alignment, places = _alignment(metadata), {}
    found = []
    for _ in range(n_tensors):
        found.append(_tensor(cursor))
    start = -(-cursor.at // alignment) * alignment
    for name, code, shape, offset in found:
        if name in places:
            raise ValueError(f"it has the tensor {quoted(name)} twice")
        if offset % alignment:
            raise ValueError(f"{quoted(name)} does not begin at a multiple of {alignment} bytes")
        places[name] = _place(name, code, shape, start + offset)
    at = start
    for name, place in sorted(places.items(), key=lambda pair: pair[1].begin):
        if place.begin < at:
            raise ValueError(f"{quoted(name)} overlaps the tensor before it")
        if place.end > len(data):
            raise ValueError(f"{quoted(name)} ends at byte {place.end} of a file of {len(data)}")
        at = place.end
    return metadata, places


class GgufTensors(Mapping):
    """The tensors of a GGUF file by name, as float32; each is dequantized when it is asked for.

    `shapes` and `kinds` say what they are; `raw(name)` has the bytes, mapped, and `piece(name)`
    reads some rows at a time.
    """

    def __init__(self, mapping: mmap.mmap, places: dict[str, Place]):
        self._mapping, self._places = mapping, places
        self.shapes = {name: place.shape for name, place in places.items()}
        self.kinds = {name: place.kind for name, place in places.items()}

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, (n,) uint8."""
        begin, end = self._places[name].begin, self._places[name].end
        return np.frombuffer(self._mapping, np.uint8, end - begin, begin)

    def piece(self, name: str) -> Piece:
        """A vector or a matrix where it lies."""
        kind, place = self.kinds[name], (self._mapping, self._places[name].begin)
        block = KINDS[kind].numbers, KINDS[kind].size
        return Piece.of(place, self.shapes[name], kind, block, dequantize, finite)

    def __getitem__(self, name: str) -> np.ndarray:
        return dequantize(self.raw(name), self.kinds[name]).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class GgufFile(NamedTuple):
    """What a GGUF file holds. Numbers in arrays of the metadata are NumPy arrays, texts lists."""

    metadata: dict[str, Any]
    tensors: GgufTensors


def read(path: str | Path) -> GgufFile:
    """Open a GGUF file: read its header, and map its tensors. UserError, in one line."""
    path = Path(path)
    check_regular(path)
    try:
        with open(path, "rb") as file:
            if path.stat().st_size < 24:
                raise ValueError("it is shorter than a header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, places = _parse(data)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path and "
                        "the permissions") from None  # fmt: skip
    except ValueError as error:  # of UTF-8, too
        raise UserError(f"expected a GGUF file that we can read, but {path}: {quoted(error, 200)}: "
                        "fetch it again, or choose another") from None  # fmt: skip
    return GgufFile(metadata, GgufTensors(data, places))


def _text(value):
    """A string as a file has it."""
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _array(values):
    """An array's type, length and elements; lists of int become int32, of float float32."""
    if len(values) and all(type(each) is str for each in values):
        return struct.pack("<IQ", STRING, len(values)) + b"".join(map(_text, values))
    array = np.asarray(values)
    if array.dtype == bool:
        code, array = TRUTH, array.astype("<u1")
    else:
        if not isinstance(values, np.ndarray):
            array = array.astype("<f4" if array.dtype.kind == "f" else "<i4")
        codes = {np.dtype(name): code for code, name in SCALARS.items() if code != TRUTH}
        code = codes[array.dtype.newbyteorder("<")]
    return struct.pack("<IQ", code, array.size) + array.astype(SCALARS[code]).tobytes()


def encoded(value: Any) -> bytes:
    """A value of the metadata as a file has it, its type first.

    int is 32 bits without a sign where it fits, else 64 with one; float is 32 bits.
    """
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", TRUTH, value)
    if isinstance(value, int):
        small = 0 <= value < 1 << 32
        return struct.pack("<II", 4, value) if small else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", ARRAY) + _array(value)


def _padding(n):
    """The zeros that bring n bytes to a multiple of the alignment."""
    return b"\0" * (-n % ALIGNMENT)


def write(
    path: str | Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
    make: Callable[[str], np.ndarray], kinds: Mapping[str, str],
) -> None:  # fmt: skip
    """Write a GGUF file of version 3; `make(name)` gives each tensor as float32, when it's due.

    kinds[name]: F32, F16, BF16 or Q8_0, whose last axis must be a multiple of 32. The file is
    whole or not there.
    """
    head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(shapes), len(metadata))
    head += b"".join(_text(key) + encoded(value) for key, value in metadata.items())
    at = 0
    for name, shape in shapes.items():
        code, numbers, size, _ = KINDS[kinds[name]]
        assert shape[-1] % numbers == 0, (name, shape)
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", code, at)
        n = math.prod(shape) // numbers * size
        at += n + len(_padding(n))
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(head + _padding(len(head)))
        for name in shapes:
            tensor = make(name)
            assert tensor.shape == tuple(shapes[name]), (name, tensor.shape)
            data = quantize(tensor.reshape(-1), kinds[name]).data
            file.write(data)
            file.write(_padding(len(data)))
