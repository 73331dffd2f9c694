"""Every kernel compiles, to PTX and machine code, and needs what tests/registers.tsv says.

After a change of kernels `python tests/helpers/registers.py FAMILY` compiles all of a family and
writes its lines anew: a digest of the code says when. That takes minutes, so here one kernel in
SHARE is compiled again. Figures are those of the compilers that pyproject.toml names.
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
    ("flash_pieces", "documents: dkdv 64, 3 pieces", "8.0"): "60",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "8.0"): "36",
    ("flash_pieces", "documents: dkdv 128, 2 pieces", "9.0"): "20",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "8.0"): "132",
    ("flash_pieces", "documents: dkdv 128, 3 pieces", "9.0"): "336",
}
MAKERS = registers.makers()
SHARE = 8
FAMILIES = sorted({family for family, _ in MAKERS})
# Of each family one in SHARE, always the same ones, and those that spill.
AGAIN = [
    names
    for family in FAMILIES
    for i, names in enumerate(sorted(names for names in MAKERS if names[0] == family))
    if i % SHARE == 0 or names in {line[:2] for line in ALLOWED}
]


def test_the_table_names_every_kernel():
    rows = registers.read()
    assert {line[:2] for line in rows} == MAKERS.keys()
    assert len({line[:3] for line in rows}) == len(rows)
    for line in rows:
        most = ALLOWED.get(line[:3], "0")
        assert line[4] == most, f"{line[:3]} spills {line[4]} bytes"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_of_this_code(family):
    of = registers.digest(family)
    assert registers.digests().get(family) == of, (
        f"the kernels of {family} have changed: run python tests/helpers/registers.py {family}"
    )


def test_a_digest_is_of_code_not_of_words(tmp_path):
    path = tmp_path / "one.py"
    texts = (
        '"""Some."""\n\ndef double(x):\n    """Twice."""\n    return 2 * x  # why\n',
        "def double(x):\n    return 2 * x\n",
        "def double(x):\n    return 3 * x\n",
    )
    seen = []
    for text in texts:
        path.write_text(text)
        seen.append(registers.bare(path))
    assert seen[0] == seen[1] != seen[2]


@compiles
@pytest.mark.parametrize("names", AGAIN, ids=" ".join)
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
