# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-compile
"""Kernels to machine code, without a GPU: numba makes PTX of them, ptxas the code and a report.

Left out: running it (`device`). numba's CUDA target comes from `libraries`.
"""

import importlib.util
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

from nanoeuler.engines.gpu.host import libraries
from nanoeuler.engines.gpu.lang.instruction import Instruction, Name, Operand, rebind
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.errors import UserError

TYPES = {"r": "int32", "l": "int64", "f": "float32", "p": "int64"}  # numba's, by the letter
# LLVM's types of the same; an address is an integer.
LLVM = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType(), "p": ir.IntType(64)}
# PTX ISA, release notes: the oldest version with all that `ptx` and `hopper` use. Drivers read no
# newer version than their own, and numba's compiler may be newer than the driver, so it is written
# down.
PTX_VERSION = "8.3"


def pointers(context: Any, builder: Any, kind: Any, array: Any, count: int) -> list[Any]:
    """The pointer to an array's memory if count is 0, else those to its first `count` elements."""
    data = context.make_array(kind)(context, builder, array).data
    steps = [ir.Constant(ir.IntType(64), i) for i in range(count)]
    return [builder.gep(data, [step], inbounds=True) for step in steps] if count else [data]


@dataclass
class Call:
    """One call of an instruction, as inline assembly of LLVM counts its operands.

    results: letters; of arrays that are written, one for each register. constraints: of results,
    then of inputs. names: what the text calls the operands. written: where array results go.
    """

    results: list[str]
    constraints: list[str]
    names: list[Any]
    inputs: list[Any] = field(default_factory=list)
    written: list[Any] = field(default_factory=list)


def lay_out(
    context: Any, builder: Any, instruction: Instruction, kinds: Iterable, values: Iterable
) -> Call:
    """The call with arguments `values` of numba types `kinds`."""
    # Results are "=f", not "=&f", though a text of several lines may write one before it has read
    # all inputs: PTX has as many registers as one likes, so LLVM gives each result a register of
    # its own, unless the kernel makes a result the next value of an input. None of ours does.
    count = len(instruction.ret)
    results = [operand.letter for operand in instruction.ret]
    written = [operand for operand in instruction.args if operand.written]
    results += [operand.letter for operand in written for _ in range(operand.count)]
    call = Call(results, ["=" + letter for letter in results], [f"${i}" for i in range(count)])
    tied = count  # the next result that belongs to an array
    for operand, kind, value in zip(instruction.args, kinds, values, strict=True):
        place = len(results) + len(call.inputs)
        if operand.count:
            places = pointers(context, builder, kind, value, operand.count)
            first = tied if operand.written else place
            numbers = range(first, first + operand.count)
            call.names.append([f"${n}" for n in numbers])
            if operand.read:
                call.inputs += [builder.load(pointer) for pointer in places]
                call.constraints += [str(n) if operand.written else operand.letter for n in numbers]
            if operand.written:
                call.written += places
                tied += operand.count
            continue
        if operand.letter == "p":
            (pointer,) = pointers(context, builder, kind, value, 0)
            value = builder.ptrtoint(pointer, LLVM["p"])
        call.inputs.append(value)
        call.names.append(f"${place}")
        call.constraints.append("l" if operand.letter == "p" else operand.letter)
    return call


def emit(builder: Any, instruction: Instruction, call: Call) -> list[Any]:
    """Write the call; return the instruction's results, once its arrays have theirs."""
    pure, parts = instruction.pure, [LLVM[letter] for letter in call.results]
    kind = ir.VoidType() if not parts else ir.LiteralStructType(parts)
    if len(parts) == 1:
        kind = parts[0]
    constraints = call.constraints + ([] if pure else ["~{memory}"])
    function = ir.FunctionType(kind, [value.type for value in call.inputs])
    text = instruction.fill(call.names)
    assembly = ir.InlineAsm(function, text, ",".join(constraints), side_effect=not pure)
    value = builder.call(assembly, call.inputs, attrs=() if pure else ("convergent",))
    values = [value][: len(parts)]
    if len(parts) > 1:
        values = [builder.extract_value(value, i) for i in range(len(parts))]
    count = len(instruction.ret)
    for pointer, result in zip(call.written, values[count:], strict=True):
        builder.store(result, pointer)
    return values[:count]


def intrinsic(cuda: Any, instruction: Instruction) -> Any:
    """The instruction as a function that numba's compiler writes in place.

    It is convergent unless pure: a warp's threads stay together for it.
    """
    types = cuda.types

    def declare(typing: Any, *kinds: Any) -> Any:
        fixed = [getattr(types, TYPES[operand.letter]) for operand in instruction.args]
        arguments = [
            kind if operand.count or operand.letter == "p" else own
            for operand, kind, own in zip(instruction.args, kinds, fixed, strict=True)
        ]
        results = [getattr(types, TYPES[operand.letter]) for operand in instruction.ret]
        kind = types.Tuple(results) if len(results) > 1 else (*results, types.void)[0]

        def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            call = lay_out(context, builder, instruction, signature.args, values)
            outcome = emit(builder, instruction, call)
            if len(outcome) > 1:
                return context.make_tuple(builder, signature.return_type, outcome)
            return outcome[0] if outcome else context.get_dummy_value()

        return kind(*arguments), write

    names = ["typing", *(f"operand_{i}" for i in range(len(instruction.args)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    declare.__signature__ = Signature(parameters)  # numba asks for the names of arguments
    return cuda.extending.intrinsic(declare)


def argument(types: Any, operand: Operand) -> Any:
    """numba's type of a kernel's parameter: a number, or an array that the kernel indexes."""
    if operand.axes:
        return types.Array(getattr(types, operand.dtype), operand.axes, "C")
    return getattr(types, TYPES[operand.letter])


@contextmanager
def uncopied(cuda: Any) -> Iterator[None]:
    """numba's inliner changes what it has just read of a helper, and keeps no copy of it."""
    inliner = cuda.core.inline_closurecall
    module = inliner.copy
    inliner.copy = SimpleNamespace(copy=module.copy, deepcopy=lambda block: block)
    try:
        yield
    finally:
        inliner.copy = module


def to_ptx(kernel: Kernel) -> str:
    """The PTX of a kernel. Needs numba-cuda, no GPU, and a process that does not simulate one."""
    cuda = libraries.compiler()

    def replace(value: Any) -> Any:
        if isinstance(value, Instruction):
            return intrinsic(cuda, value)
        if isinstance(value, Name):
            return cuda if value.name == "cuda" else getattr(cuda.types, value.name)
        return value

    function = rebind(kernel.function, replace, cuda.jit(device=True, inline="always"))
    values = [argument(cuda.types, operand) for operand in kernel.parameters]
    arguments = kernel.grouped(values, lambda kind, fields: cuda.types.NamedTuple(fields, kind))
    with uncopied(cuda):
        text, _ = cuda.compile_ptx(
            function, cuda.types.void(*arguments), cc=kernel.target,
            launch_bounds=(math.prod(kernel.block), kernel.resident),
        )  # fmt: skip
    return re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", text)


def entry(text: str) -> str:
    """The name of the kernel in its PTX."""
    return re.search(r"\.entry\s+(\w+)", text)[1]


@dataclass(frozen=True)
class Code:
    """A compiled kernel: PTX, machine code (b"" without ptxas) and ptxas's report.

    registers: of a thread. spills: bytes stored to and loaded from local memory for want of
    registers; stack: bytes of local memory in all. warnings: ptxas's own lines, such as C7510,
    which says that wgmma was made to wait for itself, and is silent otherwise. target: what the
    machine code is for, as (9, 0) or (9, 0, "a").
    """

    text: str
    image: bytes = b""
    registers: int = 0
    spills: int = 0
    stack: int = 0
    warnings: tuple[str, ...] = ()
    target: tuple = ()


def assembler() -> str | None:
    """The path of ptxas, of NVIDIA's wheel nvidia-cuda-nvcc or on the PATH; None without one."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    wheels = [Path(place) / "cu13" / "bin" / "ptxas" for place in places]
    return next((str(path) for path in wheels if path.exists()), None) or shutil.which("ptxas")


def assemble(text: str, target: tuple) -> Code:
    """Machine code for `target` of PTX, and its use of registers and local memory."""
    path = assembler()
    if path is None:
        return Code(text)
    with tempfile.TemporaryDirectory() as folder:
        source, image = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        arch = "sm_" + "".join(map(str, target))
        done = subprocess.run(
            [path, f"-arch={arch}", "-v", str(source), "-o", str(image)],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"ptxas refuses {entry(text)[:40]}: {done.stderr.strip()[:400]}")
        says = done.stdout + done.stderr

        def number(pattern: str) -> int:
            return sum(int(count) for count in re.findall(pattern, says))

        return Code(
            text, image.read_bytes(), registers=number(r"Used (\d+) registers"),
            spills=number(r"(\d+) bytes spill"), stack=number(r"(\d+) bytes stack frame"),
            warnings=tuple(re.findall(r"(?m)^.*(?:C7\d\d\d|warning).*$", says)), target=target,
        )  # fmt: skip


def machine(kernel: Kernel, capability: tuple | None = None) -> tuple:
    """The target of a kernel's machine code, on a GPU of this capability, or on its oldest.

    A target with a letter is one machine's. PTX for any other runs on that and on all newer ones.
    """
    target = kernel.target
    if capability is None or tuple(capability) == target[:2]:
        return target
    if len(target) > 2 or tuple(capability) < target:
        name, needs = kernel.function.__name__, ".".join(map(str, target[:2]))
        more = "" if len(target) > 2 else " or newer"
        raise UserError(f"{name} is for GPUs of capability {needs}{more}, not {tuple(capability)}")
    return tuple(capability)


def build(make: Callable[[], Kernel], capability: tuple | None = None) -> Code:
    """Compile what `make` makes, for a GPU of this capability or for the oldest that can run it."""
    kernel = make()
    return assemble(to_ptx(kernel), machine(kernel, capability))


def build_all(
    makers: Mapping[str, Callable[[], Kernel]], workers: int | None = None,
    capability: tuple | None = None,
) -> dict[str, Code | Exception]:  # fmt: skip
    """Compile many kernels in `workers` processes: name -> code, or what went wrong.

    makers: name -> a function that makes the kernel, importable, or a functools.partial of one.
    capability: of the GPU they are for; without one, each for the oldest that can run it.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(build, make, capability) for name, make in makers.items()}
        return {name: job.exception() or job.result() for name, job in jobs.items()}


AT_HAND: list[Kernel] = []  # what copies of this process compile, by its number


def build_number(number: int, capability: tuple | None) -> Code:
    """Compile one of the kernels at hand."""
    return build(lambda: AT_HAND[number], capability)


def build_copies(
    kernels: Sequence[Kernel], capability: tuple | None = None, workers: int | None = None
) -> list[Code]:
    """Compile kernels as they are, in copies of this process, or in itself where it has none.

    What fails in a copy is compiled again here, where it can say why.
    """
    if len(kernels) < 2 or "fork" not in get_all_start_methods():
        return [build(lambda kernel=kernel: kernel, capability) for kernel in kernels]
    AT_HAND[:] = kernels
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        jobs = [pool.submit(build_number, n, capability) for n in range(len(kernels))]
        return [
            build_number(n, capability) if job.exception() else job.result()
            for n, job in enumerate(jobs)
        ]
