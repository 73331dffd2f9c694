# Made from book/19-other-peoples-models.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-others-safetensors
"""Safetensors files by hand: a header that says what is where, and numbers that stay in the file.

Leaves out which tensors a model has (families.py) and which files a folder has (huggingface.py).
"""

import json
import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.errors import UserError, quoted
from nanoeuler.files import check_regular, replacing
from nanoeuler.model.stored import Piece

# Bytes of one number of each type of the format, except those below a byte and the FNUZ ones.
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
FLOATS = ("F32", "F16", "BF16")  # the types that weights are published in
MOST_HEADER = 100_000_000  # bytes; the library refuses longer ones, too
MOST_AXES = 8  # of a tensor; more than any model has, and NumPy takes 64


class Entry(NamedTuple):
    """What the header says of a tensor: its type, its shape, its bytes counted from the data."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _once(pairs):
    """The dict of a JSON object; ValueError for a name that comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"its header has {quoted(twice)} twice")
    return found


def whole_numbers(values: Any, most: int) -> bool:
    """Whether `values` is a list of at most `most` whole numbers from 0 to 2^63 - 1."""
    good = type(values) is list and len(values) <= most
    return good and all(type(each) is int and 0 <= each < 1 << 63 for each in values)


def _entry(name, record):
    """The `Entry` of the header's record; ValueError unless all of it fits together."""
    label = quoted(name)
    if type(record) is not dict or record.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{label} is not described by dtype, shape and data_offsets")
    kind, shape, place = record["dtype"], record["shape"], record["data_offsets"]
    if type(kind) is not str or kind not in SIZES:
        raise ValueError(f"{label} has the unknown type {quoted(kind)}")
    if not whole_numbers(shape, MOST_AXES):
        raise ValueError(f"{label} has the shape {quoted(shape)}")
    if not whole_numbers(place, 2) or len(place) != 2:
        raise ValueError(f"{label} has the offsets {quoted(place)}")
    begin, end = place
    if end - begin != math.prod(shape) * SIZES[kind]:
        raise ValueError(f"{label} is {kind} {shape}, and has {end - begin} bytes")
    return Entry(kind, tuple(shape), begin, end)


def _check_cover(entries, size):
    """ValueError unless the tensors lie one after the other and fill the `size` bytes of data."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1][2:]):
        if entry.begin != at:
            what = "overlaps the one before it" if entry.begin < at else "leaves a hole before it"
            raise ValueError(f"{quoted(name)} {what}")
        at = entry.end
    if at != size:
        raise ValueError(f"its header promises {at} bytes of numbers, and it has {size}")


def _parse(file, size):
    """(where the data begins, entries, metadata) of an open file of `size` bytes; ValueError."""
    if size < 8:
        raise ValueError(f"it has {size} bytes, and its first 8 should be a length")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MOST_HEADER):
        raise ValueError(f"its header should have {length} bytes, and the file has {size}")
    header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_once)
    if type(header) is not dict:
        raise ValueError("its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(each) is str for each in metadata.values()):
        raise ValueError("its __metadata__ is not text")
    entries = {name: _entry(name, record) for name, record in header.items()}
    _check_cover(entries, size - 8 - length)
    return 8 + length, entries, metadata


def read_header(path: Path) -> tuple[int, dict[str, Entry], dict[str, str]]:
    """(where the data begins in bytes, the `Entry` of each tensor, metadata) of a file.

    Everything that a header can get wrong is checked against the file's size. UserError.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            return _parse(file, path.stat().st_size)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check the path and "
                        "the permissions") from None  # fmt: skip
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8, too
        raise UserError(f"expected a whole safetensors file, but {path}: {quoted(error, 200)}: "
                        "fetch it again") from None  # fmt: skip


def as_float32(raw: np.ndarray, kind: str) -> np.ndarray:
    """The numbers in `raw` (n,) uint8, of the type F32, F16 or BF16, as float32.

    A bf16 number is the upper half of a float32. F32 is not copied.
    """
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    assert kind == "BF16", kind
    out = np.zeros(raw.size // 2, "<u4")
    out.view("<u2")[1::2] = raw.view("<u2")  # the little end comes first
    return out.view("<f4")


def from_float32(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 `x` as F32, F16 or BF16 (its bits, uint16), rounded to the nearest, ties to even.

    UserError for numbers that the type can't hold.
    """
    if kind == "F32":
        return np.ascontiguousarray(x, "<f4")
    if kind == "F16":
        with np.errstate(over="ignore"):
            half = np.ascontiguousarray(x, "<f2")
        large = not np.isfinite(half).all()
    else:
        assert kind == "BF16", kind
        bits = np.ascontiguousarray(x, "<f4").view(np.uint32)
        half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        large = (bits & 0x7FFFFFFF >= 0x7F7F8000).any()  # rounded they are infinite, or lost nans
    if large:
        raise UserError(f"a weight of {np.abs(x).max():.3g} is more than {kind} can hold: choose "
                        "F32")  # fmt: skip
    return half


class Tensors(Mapping):
    """The tensors of safetensors files, by name, as float32; `shapes` and `kinds` describe them.

    The files are mapped into memory: a tensor is read when it is asked for, and only F32 stays
    where it is. `raw(name)` has the bytes; `piece(name)` reads some rows at a time.
    """

    def __init__(self, paths: list[Path]):
        self._places: dict[str, tuple[mmap.mmap, int, Entry]] = {}
        for path in paths:
            begin, entries, _ = read_header(path)
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            for name, entry in entries.items():
                if name in self._places:
                    raise UserError(f"{path} holds {quoted(name)}, which another file of the same "
                                    "model holds, too: fetch the model again")  # fmt: skip
                self._places[name] = data, begin, entry
        self.shapes = {name: entry.shape for name, (*_, entry) in self._places.items()}
        self.kinds = {name: entry.kind for name, (*_, entry) in self._places.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        kind = self._float_kind(name)
        return as_float32(self.raw(name), kind).reshape(self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor, (n,) uint8, mapped."""
        data, begin, entry = self._places[name]
        return np.frombuffer(data, np.uint8, entry.end - entry.begin, begin + entry.begin)

    def _float_kind(self, name):
        """The type of a tensor's numbers; UserError for those that weights aren't published in."""
        kind = self.kinds[name]
        if kind not in FLOATS:
            raise UserError(f"expected {quoted(name)} to be {', '.join(FLOATS[:-1])} or "
                            f"{FLOATS[-1]}, got {kind}: convert the model to bfloat16")  # fmt: skip
        return kind

    def piece(self, name: str) -> Piece:
        """A vector or a matrix where it lies. UserError as for `tensors[name]`."""
        kind, shape = self._float_kind(name), self.shapes[name]
        data, begin, entry = self._places[name]
        place = data, begin + entry.begin
        block = 1, SIZES[kind]
        return Piece.of(place, shape, kind, block, as_float32)


# %% sec-others-safetensors
def write(
    path: Path, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str], np.ndarray],
    kind: str = "F32",
) -> None:  # fmt: skip
    """Write tensors of these names and shapes; `make(name)` gives each as float32, when it's due.

    Only one tensor at a time is in memory. kind: F32, F16 or BF16. The file is whole or not there.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, shape in sorted(shapes.items()):
        place = [end, end := end + math.prod(shape) * SIZES[kind]]
        header[name] = {"dtype": kind, "shape": [*shape], "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(shapes):
            tensor = make(name)
            assert tensor.shape == tuple(shapes[name]), (name, tensor.shape)
            file.write(memoryview(from_float32(tensor, kind)).cast("B"))
