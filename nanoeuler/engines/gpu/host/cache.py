# Made from book/i-machine-code.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-kernel-cache
"""Machine code of kernels, kept on disk from one process to the next.

Left out: compiling (`compile`), and what a GPU does with the code (`device`).
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.host import compile as compiler
from nanoeuler.engines.gpu.host.compile import Code, assembler, build_copies, machine
from nanoeuler.engines.gpu.lang import instruction
from nanoeuler.engines.gpu.lang.instruction import looked_up
from nanoeuler.engines.gpu.lang.kernel import Kernel
from nanoeuler.files import replacing
from nanoeuler.paths import data_folder

# Types whose repr says everything about a value.
PLAIN = bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype
# The compilers: pyproject.toml's extra `gpu`, and its dependencies.
DISTRIBUTIONS = "numba", "numba-cuda", "llvmlite", "nvidia-cuda-nvcc", "nvidia-nvvm"
MOST = 2000  # files: some sixty models; of more, those that were read longest ago are removed


class Unknown(Exception):
    """A kernel holds something that has no fixed description."""


@functools.cache
def compilers() -> str:
    """What every kernel's code depends on: our compiler's source, the others' versions."""
    found = [sys.version]
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    if path := assembler():
        found.append(f"{path} {os.stat(path).st_size}")
    found += [Path(module.__file__).read_text("utf-8") for module in (compiler, instruction)]
    return "\n".join(found)


class Description:
    """The parts of a kernel in words, each function once. `Unknown` for what has none."""

    def __init__(self) -> None:
        self.numbers: dict[FunctionType, int] = {}
        self.parts: list[str] = []

    def of(self, value: Any) -> str:
        """A value's description; a function's is its number among the parts."""
        value = inspect.unwrap(value) if callable(value) else value
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, PLAIN):
            return f"{name} {value!r}"
        if isinstance(value, CodeType):
            return self.code(value)
        if isinstance(value, type):
            return self.type(value)
        if isinstance(value, tuple | list):
            return f"{self.type(kind)}({', '.join(map(self.of, value))})"
        if isinstance(value, frozenset):
            return f"{name}({', '.join(sorted(map(self.of, value)))})"
        if isinstance(value, ModuleType | BuiltinFunctionType | np.ufunc):
            return f"{getattr(value, '__module__', '')}.{value.__name__}"
        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return f"{name}({', '.join(map(self.of, fields))})"
        raise Unknown(name)

    def type(self, kind: type) -> str:
        """A type's name; of a named tuple its fields too, since a kernel depends on their order."""
        fields, defaults = (getattr(kind, f"_field{end}", ()) for end in ("s", "_defaults"))
        if kind.__module__.startswith(instruction.PACKAGE) and not fields:
            raise Unknown(kind.__qualname__)
        named = [f"{name} = {self.of(value)}" for name, value in dict(defaults).items()]
        return f"{kind.__module__}.{kind.__qualname__}{fields}{named}"

    def code(self, code: CodeType) -> str:
        """A description of bytecode, without the names of files and the numbers of lines."""
        shape = code.co_argcount, code.co_flags, code.co_names, code.co_varnames, code.co_freevars
        return f"{shape} {code.co_code.hex()} {self.of(code.co_consts)}"

    def function(self, function: FunctionType) -> str:
        """A function with all that it looks up: its globals, its closure, its defaults."""
        if function not in self.numbers:
            self.numbers[function] = len(self.numbers)
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            names = looked_up(function)
            around = *names.items(), *zip(function.__code__.co_freevars, cells, strict=True)
            words = [f"{name} = {self.of(value)}" for name, value in around]
            words.append(self.of((function.__defaults__, *(function.__kwdefaults__ or {}).items())))
            number = self.numbers[function]
            self.parts.append("\n".join([f"{number}:", self.code(function.__code__), *words]))
        return f"function {self.numbers[function]}"


# %% sec-kernel-cache
def fingerprint(kernel: Kernel, target: tuple) -> str | None:
    """A digest of everything that a kernel's machine code for `target` depends on; None: unknown.
    """
    made = Description()
    try:
        made.of(kernel.function)
    except Unknown:
        return None
    shape = kernel.args, kernel.block, kernel.resident, kernel.target, target
    shape += tuple((name, made.type(kind)) for name, kind in kernel.groups.items())
    text = "\n".join([compilers(), repr(shape), *made.parts])
    return hashlib.sha256(text.encode()).hexdigest()


def folder() -> Path:
    """The folder of kept machine code: NANOEULER_KERNELS, else data/kernels."""
    return Path(os.environ.get("NANOEULER_KERNELS") or data_folder("kernels"))


def read(path: Path) -> Code | None:
    """The code in a file; None if there is none, or not a whole one."""
    try:
        checksum, _, rest = path.read_bytes().partition(b"\n")
        if checksum != hashlib.sha256(rest).hexdigest().encode():
            return None
        head, _, image = rest.partition(b"\n")
        told = json.loads(head)
        tuples = {name: tuple(told[name]) for name in ("warnings", "target")}
        code = Code(**{**told, **tuples, "image": image})
        os.utime(path)  # read now: `trim` spares it
        return code
    except (OSError, KeyError, TypeError):  # of another version: other fields
        return None


def write(path: Path, code: Code) -> None:
    """Keep code in a file, if the folder can be written."""
    told = {field.name: getattr(code, field.name) for field in dataclasses.fields(code)}
    image = told.pop("image")
    rest = json.dumps(told).encode() + b"\n" + image
    with suppress(OSError), replacing(path) as temporary:
        temporary.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def trim(paths: Iterable[Path]) -> None:
    """Keep MOST files, and remove those that were read longest ago."""
    with suppress(OSError):
        for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-MOST]:
            path.unlink(missing_ok=True)


def compiled(kernels: Sequence[Kernel], capability: tuple | None = None) -> list[Code]:
    """The code of kernels, read where it was kept and else compiled, side by side, and kept."""
    keys = [fingerprint(kernel, machine(kernel, capability)) for kernel in kernels]
    paths = [key and folder() / f"{key}.kernel" for key in keys]
    codes = [path and read(path) for path in paths]
    missing = [i for i, code in enumerate(codes) if code is None]
    if missing:
        made = build_copies([kernels[i] for i in missing], capability)
        for i, code in zip(missing, made, strict=True):
            codes[i] = code
            if paths[i]:
                write(paths[i], code)
        trim(folder().glob("*.kernel"))
    return codes
