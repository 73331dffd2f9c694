# Made from book/07c-tensor-cores.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gemm-compile
"""Kernels to machine code, without a GPU: numba makes PTX of them, ptxas the code and a report.

Left out: running it (`device`). numba's CUDA target comes from the door.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from inspect import Parameter, Signature
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from llvmlite import ir

from nanoeuler.engines.gpu import door
from nanoeuler.engines.gpu.instruction import Instruction, Name, rebind
from nanoeuler.engines.gpu.kernel import Kernel
from nanoeuler.errors import UserError

TYPES = {"r": "int32", "l": "int64", "f": "float32", "p": "int64"}  # numba's, by the letter
# LLVM's types of the same; an address is an integer.
LLVM = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType(), "p": ir.IntType(64)}
# PTX ISA, release notes: the oldest version with all that `ptx` uses. Drivers read no newer version
# than their own, and numba's compiler may be newer than the driver, so it is written down.
PTX_VERSION = "8.3"


class Lowering:
    """The operands of one call of an instruction, as inline assembly of LLVM counts them.

    LLVM wants results first, and of an array that is written each register twice: as a result, and
    as an input tied to it. `names` are what the text calls the instruction's operands.
    """

    def __init__(self, context: Any, builder: Any, instruction: Instruction):
        self.context, self.builder, self.instruction = context, builder, instruction
        self.results = [LLVM[operand.letter] for operand in instruction.ret]
        self.constraints = ["=" + operand.letter for operand in instruction.ret]
        self.names: list[Any] = [f"${i}" for i in range(len(self.results))]
        self.inputs: list[Any] = []
        self.written: list[Any] = []

    def pointers(self, kind: Any, array: Any, count: int) -> list[Any]:
        """Pointers to the first `count` elements of a local array."""
        data = self.data(kind, array)
        return [
            self.builder.gep(data, [ir.Constant(ir.IntType(64), i)], inbounds=True)
            for i in range(count)
        ]

    def data(self, kind: Any, array: Any) -> Any:
        """The pointer to an array's memory."""
        return self.context.make_array(kind)(self.context, self.builder, array).data

    def take(self, kinds: Iterable[Any], values: Iterable[Any]) -> None:
        """Lay out the arguments, `values` of types `kinds`: written arrays are results too."""
        arrays = list(zip(self.instruction.args, kinds, values, strict=True))
        for operand, kind, value in arrays:
            if operand.written:
                self.written += self.pointers(kind, value, operand.count)
                self.results += [LLVM[operand.letter]] * operand.count
                self.constraints += ["=" + operand.letter] * operand.count
        tied = len(self.instruction.ret)
        for operand, kind, value in arrays:
            tied = self.argument(operand, kind, value, tied)


    def argument(self, operand: Any, kind: Any, value: Any, tied: int) -> int:
        """Add one argument; return the number of the result that the next written array has."""
        place = len(self.results) + len(self.inputs)
        if not operand.count:
            letter = operand.letter
            if letter == "p":
                letter, pointer = "l", self.data(kind, value)
                value = self.builder.ptrtoint(pointer, LLVM["p"])
            self.names.append(f"${place}")
            self.constraints.append(letter)
            self.inputs.append(value)
            return tied
        pointers = self.pointers(kind, value, operand.count)
        self.inputs += [self.builder.load(pointer) for pointer in pointers]
        first = tied if operand.written else place
        numbers = range(first, first + operand.count)
        self.names.append([f"${n}" for n in numbers])
        self.constraints += [str(n) if operand.written else operand.letter for n in numbers]
        return tied + operand.count * operand.written

    def emit(self) -> list[Any]:
        """Write the call; return the instruction's results, once its arrays have theirs."""
        pure, builder, results = self.instruction.pure, self.builder, self.results
        kind = ir.VoidType() if not results else ir.LiteralStructType(results)
        if len(results) == 1:
            kind = results[0]
        constraints = self.constraints + ([] if pure else ["~{memory}"])
        assembly = ir.InlineAsm(
            ir.FunctionType(kind, [value.type for value in self.inputs]),
            self.instruction.fill(self.names), ",".join(constraints), side_effect=not pure,
        )  # fmt: skip
        value = builder.call(assembly, self.inputs, attrs=() if pure else ("convergent",))
        values = [value][: len(results)]
        if len(results) > 1:
            values = [builder.extract_value(value, i) for i in range(len(results))]
        count = len(self.instruction.ret)
        for pointer, result in zip(self.written, values[count:], strict=True):
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
            call = Lowering(context, builder, instruction)
            call.take(signature.args, values)
            outcome = call.emit()
            if len(outcome) > 1:
                return context.make_tuple(builder, signature.return_type, outcome)
            return outcome[0] if outcome else context.get_dummy_value()

        return kind(*arguments), write

    names = ["typing", *(f"operand_{i}" for i in range(len(instruction.args)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    declare.__signature__ = Signature(parameters)  # numba asks for the names of arguments
    return cuda.extending.intrinsic(declare)


def to_ptx(kernel: Kernel) -> str:
    """The PTX of a kernel. Needs numba-cuda, no GPU, and a process that does not simulate one."""
    cuda = door.compiler()

    def replace(value: Any) -> Any:
        if isinstance(value, Instruction):
            return intrinsic(cuda, value)
        if isinstance(value, Name):
            return cuda if value.name == "cuda" else getattr(cuda.types, value.name)
        return value

    function = rebind(kernel.function, replace, cuda.jit(device=True, inline="always"))
    arguments = [getattr(cuda.types, TYPES[operand.letter]) for operand in kernel.parameters]
    text, _ = cuda.compile_ptx(
        function, cuda.types.void(*arguments), cc=kernel.target,
        launch_bounds=(kernel.threads, kernel.resident),
    )  # fmt: skip
    return re.sub(r"(?m)^\.version .*$", f".version {PTX_VERSION}", text)


def entry(text: str) -> str:
    """The name of the kernel in its PTX."""
    return re.search(r"\.entry\s+(\w+)", text)[1]


@dataclass(frozen=True)
class Code:
    """A compiled kernel: PTX, machine code (b"" without ptxas) and what ptxas says of it.

    registers: of a thread. spills: bytes stored to and loaded from local memory for want of
    registers; stack: bytes of local memory in all. warnings: ptxas's own lines, such as C7510,
    which says that wgmma was made to wait for itself, and is silent otherwise.
    """

    text: str
    image: bytes = b""
    registers: int = 0
    spills: int = 0
    stack: int = 0
    warnings: tuple[str, ...] = ()


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
            warnings=tuple(re.findall(r"(?m)^.*(?:C7\d\d\d|warning).*$", says)),
        )  # fmt: skip


def build(make: Callable[[], Kernel]) -> Code:
    """Compile what `make` makes. In a process of its own it must not simulate a GPU."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"
    door.config.ENABLE_CUDASIM = 0
    kernel = make()
    return assemble(to_ptx(kernel), kernel.target)


def build_all(
    makers: Mapping[str, Callable[[], Kernel]], workers: int | None = None
) -> dict[str, Code | Exception]:
    """Compile many kernels, each in one of `workers` processes: name -> code, or what went wrong.

    makers: name -> a function that makes the kernel, importable, or a functools.partial of one.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {name: pool.submit(build, make) for name, make in makers.items()}
        return {name: job.exception() or job.result() for name, job in jobs.items()}
