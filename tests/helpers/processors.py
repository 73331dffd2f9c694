"""Chapters and tests on processors that this machine is not: python tests/helpers/processors.py 08

    processors.py [CHAPTER or tests/test_NAME.py ...] [--processors haswell ...] [--threads 1 2 4]
                  [--workers 1]

Without names, every chapter and every file of tests. A processor is emulated by what its programs
are made of: LLVM compiles numba's loops for it, NumPy uses no loops of later ones, and OpenBLAS
takes its kernels. A look into a program that runs so says whether all three took hold. Each
processor compiles into a folder of its own. The table has cells and tests that passed and failed,
and minutes; what failed is shown below it, and then the exit status is 1.

Leaves out what no variable can change: the C library's mathematical functions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from llvmlite import binding
from numpy._core import _multiarray_umath as numpy_core
from rerun import ROOT, Outcome, changed, environment, run, target_of

from nanoeuler.book import build
from nanoeuler.errors import UserError

AVX = "avx popcnt sse3 ssse3 sse4.1 sse4.2"
AVX2 = f"{AVX} avx2 bmi bmi2 f16c fma lzcnt movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


class Processor(NamedTuple):
    """What a processor is to programs: LLVM's name and features, NumPy's, and OpenBLAS's kernels.

    llvm None: this machine, as it is.
    """

    llvm: str | None
    features: str = ""
    numpy: str = ""
    blas: str | None = None

    def lacking(self) -> list[str]:
        """The features that this machine would need to run it, and has not."""
        here = binding.get_host_cpu_features()
        return [name for name in self.features.split() if not here.get(name)]

    def variables(self, threads: int, folder: Path) -> dict[str, str | None]:
        """Environment variables, None: unset, for programs that compile into `folder`."""
        found: dict[str, str | None] = dict.fromkeys(VARIABLES)
        found |= {name: str(threads) for name in COUNTS}
        found |= {"NUMBA_CACHE_DIR": str(folder)}
        if self.llvm:
            # A name promises LLVM more than the features that decide here: what is not in this
            # machine is taken off.
            here = binding.get_host_cpu_features()
            on = [f"+{name}" for name in self.features.split()]
            off = [f"-{name}" for name, there in here.items() if not there]
            found |= {"NUMBA_CPU_NAME": self.llvm, "NUMBA_CPU_FEATURES": ",".join(on + off)}
            found |= {"NPY_DISABLE_CPU_FEATURES": " ".join(self.numpy_lacks()) or None}
            found |= {"OPENBLAS_CORETYPE": self.blas}
        return found

    def numpy_lacks(self) -> list[str]:
        """The groups of loops that NumPy has for this machine and not for this processor."""
        here = numpy_core.__cpu_features__
        return [name for name in numpy_core.__cpu_dispatch__
                if here.get(name) and name not in self.numpy.split()]  # fmt: skip


VARIABLES = (  # each makes a program slower or other than this machine
    "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES", "NUMBA_DISABLE_JIT", "NUMBA_OPT", "OMP_NUM_THREADS",
)  # fmt: skip
COUNTS = "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "EMULATED_CORES"
PROCESSORS = {
    "this machine": Processor(None),
    "x86-64": Processor("x86-64", "sse2", "", "Prescott"),
    "sandybridge": Processor("sandybridge", AVX, "", "Sandybridge"),
    "haswell": Processor("haswell", AVX2, "X86_V3", "Haswell"),
    "znver3": Processor("znver3", AVX2, "X86_V3", "Zen"),
    "skylake-avx512": Processor("skylake-avx512", AVX512, "X86_V3 X86_V4", "SkylakeX"),
    "znver4": Processor("znver4", f"{AVX512} avx512bf16 avx512vnni avx512vbmi2",
                        "X86_V3 X86_V4 AVX512_ICL", "SkylakeX"),
    "sapphirerapids": Processor("sapphirerapids", f"{AVX512} avx512bf16 avx512vnni avx512vbmi2",
                                "X86_V3 X86_V4 AVX512_ICL AVX512_SPR", "SkylakeX"),
}  # fmt: skip

# OpenBLAS names kernels that several processors share after one of them, in some builds.
SHARED = {"Prescott": "Katmai", "Zen": "Haswell"}

# What a program finds itself to be.
LOOK = """
import ctypes, json, os, re
import numpy
from numba import config
from numba.core.registry import cpu_target
from numpy._core._multiarray_umath import __cpu_features__
from nanoeuler.measurements import cores

blas = None, 0
for path in sorted(set(re.findall(r"/\\S*openblas\\S*", open("/proc/self/maps").read()))):
    library = ctypes.CDLL(path)
    for before in ("scipy_", ""):
        for after in ("64_", "_64", ""):
            core = getattr(library, f"{before}openblas_get_corename{after}", None)
            count = getattr(library, f"{before}openblas_get_num_threads{after}", None)
            if core and count:
                core.restype = ctypes.c_char_p
                blas = core().decode(), count()
_, name, features = cpu_target.target_context.codegen().magic_tuple()
on = [name for name, there in __cpu_features__.items() if there]
print(json.dumps([name, features, on, *blas, cores(), config.NUMBA_NUM_THREADS]))
"""


def doubts(processor: Processor, threads: int, folder: Path) -> list[str]:
    """What a program that runs as `processor` shows not to be so: empty if all took hold."""
    variables = changed(environment(ROOT / "tests"), processor.variables(threads, folder))
    done = subprocess.run([sys.executable, "-c", LOOK], env=variables, cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    if done.returncode:
        return [f"a program ended with {done.returncode}: {done.stderr[-1000:]}"]
    name, features, on, core, blas_threads, cores, numba_threads = json.loads(done.stdout)
    found = []
    if (cores, numba_threads) != (threads, threads):
        found.append(f"{cores} cores, numba on {numba_threads} threads, and not on {threads}")
    # OpenBLAS starts no more threads than this process has cores.
    if blas_threads != min(threads, len(os.sched_getaffinity(0))):
        found.append(f"OpenBLAS runs on {blas_threads} threads")
    if processor.llvm:
        if name != processor.llvm:
            found.append(f"numba compiles for {name}")
        compiled = features.split(",")
        found += [f"numba does not use {each}" for each in processor.features.split()
                  if f"+{each}" not in compiled]  # fmt: skip
        found += [f"NumPy uses {each}" for each in processor.numpy_lacks() if each in on]
        if core not in (processor.blas, SHARED.get(processor.blas)):
            found.append(f"OpenBLAS has the kernels of {core}")
    return found


Case = tuple[str, int, Path]  # processor, threads, chapter or file of tests


def outcomes(cases: Sequence[Case], workers: int, folder: Path) -> dict[Case, Outcome]:
    """Run all cases, so many at a time."""
    made = {target: environment(target) for target in {target for *_, target in cases}}

    def one(case: Case) -> Outcome:
        name, threads, target = case
        changes = PROCESSORS[name].variables(threads, folder / name.replace(" ", "-"))
        found = run(target, changed(made[target], changes))
        print(f"{name}, {threads} threads, {target.stem}: {found.passed} passed, "
              f"{len(found.failures)} failed", file=sys.stderr)  # fmt: skip
        return found

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(cases, pool.map(one, cases), strict=True))


def table(found: dict[Case, Outcome], notes: dict[str, str], counts: Sequence[int]) -> str:
    """Rows: processors. Columns: threads, chapters and tests. passed/failed minutes."""
    there = {(count, target.suffix) for _, count, target in found}
    groups = [(count, kind) for count in counts for kind in (".ipynb", ".py")
              if (count, kind) in there]  # fmt: skip
    heads = [f"{'chapters' if kind == '.ipynb' else 'tests'} x {n}" for n, kind in groups]
    lines = [f"{'':16}" + "".join(f"{head:>20}" for head in heads)]
    for name in dict.fromkeys([case[0] for case in found] + list(notes)):
        line = f"{name:16}"
        for count, kind in groups:
            mine = [outcome for (who, n, target), outcome in found.items()
                    if (who, n, target.suffix) == (name, count, kind)]  # fmt: skip
            failed, spent = sum(len(x.failures) for x in mine), sum(x.minutes for x in mine)
            cell = f"{sum(x.passed for x in mine)}/{failed} {spent:6.1f}" if mine else "-"
            line += f"{cell:>20}"
        lines.append(f"{line}  {notes.get(name, '')}".rstrip())
    return "\n".join(lines)


def everything() -> list[Path]:
    """All chapters, and all files of tests but the one that runs the chapters."""
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    chapters = [path.with_suffix(".ipynb") for path in build.chapters(ROOT)]
    return chapters + [path for path in tests if path.stem != "test_chapters"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The tool, given the words of its command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", help="chapters (08, 09a), files of tests")
    parser.add_argument("--processors", nargs="+", default=list(PROCESSORS), choices=PROCESSORS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args(arguments)
    targets = [target_of(name) for name in asked.targets] or everything()
    notes, cases = {}, []
    with tempfile.TemporaryDirectory(prefix="processors-") as folder:
        for name in asked.processors:
            if lacking := PROCESSORS[name].lacking():
                notes[name] = f"this machine can't run it: it has no {', '.join(lacking)}"
                continue
            for threads in asked.threads:
                if wrong := doubts(PROCESSORS[name], threads, Path(folder, "look")):
                    notes[name] = f"did not take hold: {'; '.join(wrong)}"
                    break
            else:
                cases += [(name, n, target) for n in asked.threads for target in targets]
        found = outcomes(cases, asked.workers, Path(folder))
    print(table(found, notes, asked.threads))
    failed = {case: outcome.failures for case, outcome in found.items() if outcome.failures}
    for (name, threads, target), failures in failed.items():
        for failure in failures:
            print(f"\n=== {name}, {threads} threads, {target.name}: {failure}")
    return int(bool(failed) or any("did not" in note for note in notes.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"processors.py: {error}")
