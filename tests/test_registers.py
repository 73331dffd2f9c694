"""Every kernel compiles, to PTX and machine code, and needs what tests/registers.tsv says.

A digest of all that decides on a kernel's machine code says whether its line is of this code.
After a change `python tests/helpers/registers.py` compiles what has changed and writes it anew. To
compile unchanged code again with the same compilers is to test these: here a kernel for each GPU
shows that they are there and do what they did, and one in SHARE of each family is `long`.
"""

import ast
import importlib.util
import linecache
import math
from types import FunctionType

import pytest
import registers

from nanoeuler.engines.gpu.host.compile import assembler
from nanoeuler.files import project_root

compiles = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or assembler() is None,
    reason="numba-cuda or ptxas is missing: pip install -e '.[gpu]' on Linux",
)
# Bytes that a kernel may spill. Attention of width 128 parks sums because of 9.0, and that costs
# 8.0 two registers and 8.6 and 8.9 one (appendix L).
ALLOWED = {
    ("flash_mma", "forward 128", "8.0"): "16",
    ("flash_mma", "forward 128", "8.6"): "8",
    ("flash_mma", "forward 128", "8.9"): "8",
    # In the epilogue, where 8.9 needs all 255 registers; not of the tanh form (appendix I).
    ("gemm_mma", "NN bias and gelu_exact two stored 128x128 3 stages", "12.0"): "16",
    ("gemm_mma", "NT relu2 backward two stored sums add 128x128 3 stages", "12.0"): "24",
    # Of 128 registers, one on the diagonal, not in the steps before it (chapter 12a).
    ("flash", "documents: forward 64", "9.0a"): "8",
    # dk and dv of float32: 128 sums at width 128, and operands in three pieces (appendix M).
    ("flash_pieces", "dkdv 64, 3 pieces", "8.0"): "16",
    ("flash_pieces", "dkdv 128, 2 pieces", "8.0"): "28",
    ("flash_pieces", "dkdv 128, 2 pieces", "9.0"): "44",
    ("flash_pieces", "dkdv 128, 3 pieces", "8.0"): "108",
    ("flash_pieces", "dkdv 128, 3 pieces", "9.0"): "320",
    ("flash_pieces", "documents: dkdv 64, 3 pieces", "8.0"): "60",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "8.0"): "36",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "9.0"): "20",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "8.0"): "132",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "9.0"): "336",
    # The same on cards that people own.
    ("flash_pieces", "dkdv 128, 2 pieces", "12.0"): "124",
    ("flash_pieces", "dkdv 128, 2 pieces", "8.6"): "28",
    ("flash_pieces", "dkdv 128, 2 pieces", "8.9"): "28",
    ("flash_pieces", "dkdv 128, 3 pieces", "12.0"): "332",
    ("flash_pieces", "dkdv 128, 3 pieces", "8.6"): "108",
    ("flash_pieces", "dkdv 128, 3 pieces", "8.9"): "108",
    ("flash_pieces", "dkdv 64, 3 pieces", "8.6"): "16",
    ("flash_pieces", "dkdv 64, 3 pieces", "8.9"): "16",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "12.0"): "76",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "8.6"): "36",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "8.9"): "36",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "12.0"): "476",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "8.6"): "132",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "8.9"): "132",
    ("flash_pieces", "documents: dkdv 64, 3 pieces", "8.6"): "60",
    ("flash_pieces", "documents: dkdv 64, 3 pieces", "8.9"): "60",
}
READ = registers.read()
MAKERS = registers.makers()
FAMILIES = sorted({family for family, _ in MAKERS})
# For each GPU of the table, the kernel with the fewest registers.
SMOKE = {line[2]: line[:2] for line in sorted(READ, key=lambda line: (-int(line[3]), line))}
# Of each family one in SHARE, always the same ones, and those that spill.
AGAIN = [
    names
    for family in FAMILIES
    for i, names in enumerate(sorted(names for names in MAKERS if names[0] == family))
    if i % registers.SHARE == 0 or names in {line[:2] for line in ALLOWED}
]


@pytest.fixture(scope="module")
def digests():
    """(family, kernel) -> the digest of what it is now."""
    return {names: registers.digest(make()) for names, make in MAKERS.items()}


def test_the_table_names_every_kernel():
    rows = READ
    assert {line[:2] for line in rows} == MAKERS.keys()
    assert len({line[:3] for line in rows}) == len(rows)
    for line in rows:
        most = ALLOWED.get(line[:3], "0")
        assert line[4] == most, f"{line[:3]} spills {line[4]} bytes"


def test_every_card_that_people_own_has_a_line():
    for names, make in MAKERS.items():
        gpus = {line[2] for line in READ if line[:2] == names}
        wanted = {registers.spelled(target) for target in registers.runs_on(make())}
        assert gpus <= wanted
        assert gpus == wanted or names[0] in registers.FEWER, f"{names} lacks {wanted - gpus}"


def test_a_block_has_the_registers_that_there_are():
    """65,536 of a multiprocessor: CUDA C++ Programming Guide, for every capability."""
    for line in READ:
        warps, registers_of_one = -(-math.prod(MAKERS[line[:2]]().block) // 32), int(line[3])
        assert warps * 32 * -(-registers_of_one // 8) * 8 <= 65536, line[:3]


def test_a_gpu_that_the_table_lacks_is_compiled_alone(table, monkeypatch):
    lines, _, compiled = table
    gone = next(line for line in lines if line[2] == "8.0")
    registers.write(line for line in lines if line != gone)
    monkeypatch.setattr(registers, "lines_of", lambda wanted, workers, only=None: {
        gone[:2]: [gone[:-1]]} if only == {gone[:2]: ["8.0"]} else {})  # fmt: skip
    monkeypatch.setattr("sys.argv", ["registers.py", "turn"])
    registers.main()
    assert registers.read() == lines


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_of_this_code(family, digests):
    changed = {line[1] for line in READ
               if line[0] == family and line[-1] != digests[line[:2]]}  # fmt: skip
    assert not changed, (
        f"kernels have changed: run python tests/helpers/registers.py {family}: {sorted(changed)}"
    )


HELPERS = """
def three(x):
    return TIMES * x


def other(x):
    return x


def kernel(x):
    return three(x) + MORE


def maker(helper, n):
    def made(x):
        return helper(x) + n
    return made
"""


def source_of(tmp_path, text=HELPERS, times=3, more=1, helper="three", n=2, name="kernel"):
    """What `reached` says of a function of a module that has this text and these constants."""
    path = tmp_path / "some.py"
    path.write_text(text)
    place = {"__name__": registers.__name__, "TIMES": times, "MORE": more}
    exec(compile(text, str(path), "exec"), place)
    function = place[name]
    if name == "maker":
        function = function(place[helper], n)
    assert isinstance(function, FunctionType)
    registers.bare.cache_clear()
    linecache.checkcache(str(path))
    return registers.reached(function)


def test_a_digest_is_of_what_a_kernel_reaches_and_of_nothing_else(tmp_path):
    plain = source_of(tmp_path)
    words = HELPERS.replace("return TIMES * x", '"""Thrice."""\n    return (TIMES  * x)  # why')
    unused = HELPERS.replace("return x\n", "return -x\n")
    for same in words, unused:
        assert same != HELPERS and source_of(tmp_path, same) == plain
    deeper = HELPERS.replace("TIMES * x", "TIMES + x")
    for other in (source_of(tmp_path, deeper), source_of(tmp_path, times=4),
                  source_of(tmp_path, times=1, more=3)):  # fmt: skip
        assert other != plain
    closed = source_of(tmp_path, name="maker")
    for change in {"n": 3}, {"helper": "other"}, {"text": deeper}, {"times": 1}:
        assert source_of(tmp_path, name="maker", **change) != closed
    assert source_of(tmp_path, name="maker", more=5) == closed


@pytest.fixture
def table(tmp_path, digests, monkeypatch):
    """A table of its own of one family, two of whose digests are stale; what is compiled."""
    monkeypatch.setattr(registers, "TABLE", tmp_path / "registers.tsv")
    lines = [(*line[:-1], digests[line[:2]]) for line in READ if line[0] == "turn"]
    compiled = []
    kernels = sorted({line[:2] for line in lines})
    stale = kernels[0], kernels[-1]
    registers.write((*line[:-1], "stale" if line[:2] in stale else line[-1]) for line in lines)

    def lines_of(wanted, workers=None, only=None):
        compiled.extend(wanted)
        return {names: [line[:-1] for line in lines if line[:2] == names] for names in wanted}

    monkeypatch.setattr(registers, "lines_of", lines_of)
    return lines, stale, compiled


@pytest.mark.parametrize("same", [False, True])
def test_only_what_has_changed_is_compiled(same, table, monkeypatch):
    lines, stale, compiled = table
    monkeypatch.setattr("sys.argv", ["registers.py", "turn", *["--same"][:same]])
    registers.main()
    assert registers.read() == lines
    assert {*compiled} == ({stale[0]} if same else {*stale})


def test_what_is_said_to_be_the_same_and_is_not_is_refused(table, monkeypatch):
    lines, (first, _), _ = table
    wrong = [(*line[:3], "999", *line[4:-1]) for line in lines if line[:2] == first]
    monkeypatch.setattr(registers, "lines_of", lambda *_: {first: wrong})
    before = registers.TABLE.read_text()
    monkeypatch.setattr("sys.argv", ["registers.py", "turn", "--same"])
    with pytest.raises(RuntimeError, match="is not the same"):
        registers.main()
    assert registers.TABLE.read_text() == before


@compiles
@pytest.mark.parametrize("names", [
    *(pytest.param(names, id=" ".join(names)) for names in dict.fromkeys(SMOKE.values())),
    *(pytest.param(names, id=" ".join(names), marks=pytest.mark.long)
      for names in AGAIN if names not in SMOKE.values()),
])  # fmt: skip
def test_a_kernel_needs_what_the_table_says(names):
    known = [line[:-1] for line in READ if line[:2] == names]
    gpus = [line[2] for line in known]
    assert sorted((*names, *line) for line in registers.measure(MAKERS[names], gpus)) == known


def test_shared_memory_is_read_off_the_text():
    text = """
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 one[512];
.visible .shared .align 4 .b8 _cudapy_smem_1[4224];
    .shared .align 4 .b8 two[64];
    ld.shared.b32 %r1, [%r2+8];
"""
    assert registers.static(text) == 512 + 4224 + 64


def test_shapes_of_arrays_in_kernels_are_names():
    """numba knows how large such an array is by names and numbers, and not by module.name."""
    wrong = []
    for path in sorted((project_root() / "nanoeuler" / "engines" / "gpu").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if made and ast.unparse(node.func).endswith((".shared.array", ".local.array")):
                parts = (isinstance(x, ast.Attribute) for x in ast.walk(node.args[0]))
                wrong += [f"{path.name}:{node.lineno}"] * any(parts)
    assert not wrong
