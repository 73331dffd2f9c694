"""Every kernel compiles, to PTX and machine code, and needs what tests/registers.tsv says.

After a change of kernels `python tests/helpers/registers.py FAMILY` writes the table anew. Figures
are those of the compilers that pyproject.toml names.
"""

import importlib.util

import pytest
import registers

from nanoeuler.engines.gpu.compile import assembler

compiles = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or assembler() is None,
    reason="numba-cuda or ptxas is missing: pip install -e '.[gpu]' on Linux",
)
# Bytes that a kernel may spill. Attention of width 128 needs two registers more than there are on
# 8.0: chapter 12a says what was done about the others.
ALLOWED = {
    ("flash_mma", "forward 128", "8.0"): "16",
    # Of 128 registers, one on the diagonal, not in the steps before it (chapter 12b).
    ("flash", "documents: forward 64", "9.0a"): "8",
    # dk and dv of float32: 128 sums at width 128, and operands in three pieces (chapter 12c).
    ("flash_pieces", "dkdv 64, 3 pieces", "8.0"): "16",
    ("flash_pieces", "dkdv 128, 2 pieces", "8.0"): "28",
    ("flash_pieces", "dkdv 128, 2 pieces", "9.0"): "44",
    ("flash_pieces", "dkdv 128, 3 pieces", "8.0"): "108",
    ("flash_pieces", "dkdv 128, 3 pieces", "9.0"): "320",
}
MAKERS = registers.makers()


def test_the_table_names_every_kernel():
    rows = registers.read()
    assert {line[:2] for line in rows} == MAKERS.keys()
    assert len({line[:3] for line in rows}) == len(rows)
    for line in rows:
        most = ALLOWED.get(line[:3], "0")
        assert line[4] == most, f"{line[:3]} spills {line[4]} bytes"


@compiles
@pytest.mark.parametrize("names", MAKERS, ids=" ".join)
def test_a_kernel_needs_what_the_table_says(names):
    lines = [(*names, *line) for line in registers.measure(MAKERS[names])]
    assert lines == [line for line in registers.read() if line[:2] == names]


def test_shared_memory_is_read_off_the_text():
    text = """
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 one[512];
.visible .shared .align 4 .b8 _cudapy_smem_1[4224];
    .shared .align 4 .b8 two[64];
    ld.shared.b32 %r1, [%r2+8];
"""
    assert registers.static(text) == 512 + 4224 + 64
