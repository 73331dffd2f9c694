# Made from book/g-gpu-emulator.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-paper-launch
"""A launch as a plain object: the kernel, its blocks and its arguments. Two targets run it.

Arrays here have `shape`, `dtype` and `strides` as NumPy's do, wherever their memory is. bf16,
which NumPy lacks, travels as uint16.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nanoeuler.engines.gpu.lang.instruction import Operand, operands
from nanoeuler.errors import UserError

SWIZZLE = 128  # bytes: a row of a box at most, in the swizzle that all maps here use
BOX_ROWS = 256  # CUDA driver API, cuTensorMapEncodeTiled: an extent of a box at most
# Bytes, ibid.: of an array's address and of its row strides; and, as a card showed (appendix H),
# of what is stored of a row at a time.
MAP_ALIGN = 16
ELEMENTS = {"uint16": "bf16", "float32": "float32"}  # dtypes of arrays that a map can have


def cover(n: int, size: int) -> int:
    """How many of `size` cover n: n / size, rounded up."""
    return -(-n // size)


@dataclass(frozen=True, eq=False)
class Map:
    """A tensor map, an array for the copy engine: fetched and stored in boxes, 128-byte swizzled.

    array (..., rows, columns) uint16 (bf16) or float32, its last axis dense; box: the extents of
    one box, in the order of the axes. What of a box lies outside is read as 0 and not written; but
    where a row ends within 16 bytes, all 16 are written.
    """

    array: Any
    box: tuple[int, ...]

    def __post_init__(self) -> None:
        array, box = self.array, self.box
        size = array.dtype.itemsize
        if str(array.dtype) not in ELEMENTS:
            raise UserError(f"expected uint16 (bf16) or float32 for a map, got {array.dtype}")
        if len(box) != len(array.shape) or not 2 <= len(box) <= 5:
            raise UserError(f"a box of {box} does not fit an array of shape {array.shape}")
        if box[-1] * size > SWIZZLE or not all(1 <= extent <= BOX_ROWS for extent in box):
            raise UserError(
                f"expected a box of at most {SWIZZLE} bytes by {BOX_ROWS}, got {box}: make it "
                "smaller"
            )
        if array.strides[-1] != size or any(step % MAP_ALIGN for step in array.strides[:-1]):
            raise UserError(
                f"expected dense rows a multiple of {MAP_ALIGN} bytes apart for the copy engine, "
                f"got strides {tuple(array.strides)} for {array.dtype}: pad the rows"
            )


def require_aligned(address: int) -> None:
    """UserError unless an array with a map may begin at this address."""
    if address % MAP_ALIGN:
        raise UserError(
            f"the copy engine needs arrays to begin at multiples of {MAP_ALIGN} bytes, got address "
            f"{address:#x}: move the array"
        )


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, and the resources and shape that the machine must know before it starts.

    function: plain Python over `engines.gpu.lang.instruction`. args: its arguments' types as in
    `operands` (arrays and maps are l, an address; f[2] is an array of two axes, dense, that the
    kernel indexes). threads: of a block, one number or as many as the block has axes. shared: bytes
    of dynamic shared memory. cluster: blocks that run side by side and see each other's shared
    memory. resident: blocks of one multiprocessor that registers must suffice for. target: the
    compute capability it is compiled for. together: whether all blocks must run at once, because
    they wait for each other. early: whether it may start before the launch before it has ended;
    it waits for what that writes by itself (`griddepcontrol.wait`, Hopper).
    """

    function: Callable[..., None]
    args: str
    threads: int | tuple[int, ...]
    shared: int = 0
    cluster: int = 1
    resident: int = 1
    target: tuple = (9, 0, "a")
    together: bool = False
    early: bool = False

    @property
    def parameters(self) -> tuple[Operand, ...]:
        """The types of the arguments."""
        return operands(self.args)

    @property
    def block(self) -> tuple[int, ...]:
        """The threads of a block by its axes."""
        return self.threads if isinstance(self.threads, tuple) else (self.threads,)

    @property
    def groups(self) -> dict[str, Any]:
        """The function's parameters that are NamedTuples, by name; a field is an argument."""
        kinds = self.function.__annotations__.items()
        return {name: kind for name, kind in kinds if hasattr(kind, "_fields")}

    def names(self) -> list[str]:
        """What the function calls each argument."""
        groups, own = self.groups, inspect.signature(self.function).parameters
        return [name for one in own for name in getattr(groups.get(one), "_fields", [one])]

    def grouped(self, values: Iterable, group: Callable[[Any, list], Any] | None = None) -> list:
        """Values of the arguments, in the function's parameters.

        group(kind, fields): makes a parameter that is a NamedTuple; without it, one of that kind.
        """
        group = group or (lambda kind, fields: kind(*fields))
        rest, made = iter(values), []
        for name in inspect.signature(self.function).parameters:
            kind = self.groups.get(name)
            made.append(group(kind, list(islice(rest, len(kind._fields)))) if kind else next(rest))
        return made


# %% sec-paper-launch
def fits(operand: Operand, value: Any) -> bool:
    """Whether `value` can be the argument: l takes an array or a Map as well as a number."""
    if operand.axes:
        kind = str(getattr(value, "dtype", ""))
        return kind == operand.dtype and len(value.shape) == operand.axes
    if isinstance(value, Map) or hasattr(value, "strides"):
        return operand.letter == "l"
    return isinstance(value, float if operand.letter == "f" else int)


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its grid and its arguments: arrays, Maps, ints and floats.

    grid: the number of blocks, one to three numbers.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]

    def __post_init__(self) -> None:
        parameters = self.kernel.parameters
        name = self.kernel.function.__name__
        if len(self.args) != len(parameters):
            raise UserError(f"{name} takes {len(parameters)} arguments, but got {len(self.args)}")
        for i, (operand, value) in enumerate(zip(parameters, self.args, strict=True)):
            if not fits(operand, value):
                raise UserError(f"argument {i} of {name} is {operand.letter}, not {value!r}")
        if not 1 <= len(self.grid) <= 3 or self.grid[0] % self.kernel.cluster:
            raise UserError(f"a grid of {self.grid} does not fit clusters of {self.kernel.cluster}")
