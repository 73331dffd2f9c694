"""Every kernel compiles, to PTX and machine code, and needs what tests/registers.tsv says.

After a change of kernels `python tests/helpers/registers.py FAMILY` writes the table anew. Figures
are those of the compilers that pyproject.toml names.
"""

import importlib.util

import pytest
import registers

from nanoeuler.engines.gpu.compile import assembler

CHUNK = 6  # kernels that one process compiles: half a minute at most
compiles = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None or assembler() is None,
    reason="numba-cuda or ptxas is missing: pip install -e '.[gpu]' on Linux",
)
# Bytes that a kernel may spill. Attention of width 128 needs two registers more than there are on
# 8.0: chapter 8a says what was done about the others.
ALLOWED = {("flash_mma", "forward 128", "8.0"): "16"}
NAMES = sorted(registers.makers())
PARTS = [NAMES[i : i + CHUNK] for i in range(0, len(NAMES), CHUNK)]


def test_the_table_names_every_kernel():
    rows = registers.read()
    assert {line[:2] for line in rows} == {*NAMES}
    assert len({line[:3] for line in rows}) == len(rows)
    for line in rows:
        most = ALLOWED.get(line[:3], "0")
        assert line[4] == most, f"{line[:3]} spills {line[4]} bytes"


@compiles
@pytest.mark.parametrize("part", PARTS, ids=lambda part: " ".join(part[0]))
def test_kernels_need_what_the_table_says(part):
    makers = registers.makers()
    lines = registers.lines_of({names: makers[names] for names in part}, 1)
    assert sorted(lines) == sorted(line for line in registers.read() if line[:2] in part)


def test_shared_memory_is_read_off_the_text():
    text = """
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 one[512];
.visible .shared .align 4 .b8 _cudapy_smem_1[4224];
    .shared .align 4 .b8 two[64];
    ld.shared.b32 %r1, [%r2+8];
"""
    assert registers.static(text) == 512 + 4224 + 64
