# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-llvm
"""The words in which the products are written: vectors and masks in LLVM's intermediate code.

Each function appends instructions to what `build` builds, and returns the value that they make.
LANES float32 in a vector. Leaves out the rest of LLVM: llvmlite's `build` has it.
"""

from llvmlite import ir
from numba.core.registry import cpu_target

Builder = ir.IRBuilder  # where instructions are appended
Value = ir.Value  # what an instruction makes, or a constant


def vector_unit(features: str) -> tuple[int, int]:
    """(lanes of float32 in a vector register, number of registers), from LLVM's list of features.

    `features` is a string like "+avx2,+fma,-avx512f". x86-64 promises 16 registers of 4 lanes.
    """
    on = features.split(",")
    if "+avx512f" in on:
        return 16, 32
    if "+avx2" in on and "+fma" in on:
        return 8, 16
    return (4, 32) if "+neon" in on else (4, 16)


# What numba compiles for: this processor, or the one that NUMBA_CPU_FEATURES names.
LANES, REGISTERS = vector_unit(cpu_target.target_context.codegen().magic_tuple()[2])


INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()  # types of LLVM
VECTOR, MASK = ir.VectorType(FLOAT, LANES), ir.VectorType(ir.IntType(1), LANES)  # floats; bits
ZEROS = ir.Constant(VECTOR, None)  # in all lanes
ALL, NONE = (ir.Constant(MASK, [on] * LANES) for on in (1, 0))  # of the lanes


def number(n: int) -> Value:
    """An integer, known when the code is written."""
    return ir.Constant(INT64, n)


def at(build: Builder, base: Value, stride: Value, n: int) -> Value:
    """The address n strides after `base`."""
    return build.add(base, build.mul(stride, number(n)))


def shuffle(build: Builder, x: Value, y: Value, lanes: list[int]) -> Value:
    """The vector of the lanes of x (0 .. LANES - 1) and y (from LANES on) that `lanes` lists."""
    return build.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, LANES), lanes))


def spread(build: Builder, scalar: Value) -> Value:
    """A vector with `scalar` in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    one = build.insert_element(empty, scalar, ir.Constant(INT32, 0))
    return shuffle(build, one, one, [0] * LANES)


def below(build: Builder, count: Value) -> Value:
    """The mask of the lanes 0 .. count - 1; all if count is large, none if it is negative."""
    lanes = ir.Constant(ir.VectorType(INT32, LANES), list(range(LANES)))
    return build.icmp_signed("<", lanes, spread(build, build.trunc(count, INT32)))


def _call(build, name, result, *arguments):
    kind = ir.FunctionType(result, [x.type for x in arguments])
    function = build.module.globals.get(name) or ir.Function(build.module, kind, name)
    return build.call(function, arguments)


def load(build: Builder, address: Value, mask: Value) -> Value:
    """LANES floats from `address`; those outside the mask are 0, and their memory not touched."""
    pointer, alignment = build.inttoptr(address, VECTOR.as_pointer()), ir.Constant(INT32, 4)
    name = f"llvm.masked.load.v{LANES}f32.p0"
    return _call(build, name, VECTOR, pointer, alignment, mask, ZEROS)


def store(build: Builder, value: Value, address: Value, mask: Value) -> None:
    """Write the lanes of the mask to `address`."""
    pointer, alignment = build.inttoptr(address, VECTOR.as_pointer()), ir.Constant(INT32, 4)
    name = f"llvm.masked.store.v{LANES}f32.p0"
    _call(build, name, ir.VoidType(), value, pointer, alignment, mask)


def prefetch(build: Builder, address: Value, write: int) -> None:
    """Ask for the cache line at `address`, to be written if `write` is 1: only a hint."""
    pointer = build.inttoptr(address, FLOAT.as_pointer())
    hints = [ir.Constant(INT32, n) for n in (write, 3, 1)]  # 3: keep it close; 1: data, not code
    _call(build, "llvm.prefetch.p0", ir.VoidType(), pointer, *hints)
