"""Attempts at a faster forward pass (bench/card/flash_tries.py) on paper, and faults in them.

Those that change only the order of things give the bits of the kernel that is, for which
test_flash_tensor.py holds bounds; the lazy one is held to the same bounds.
"""

import inspect
from functools import partial
from types import ModuleType

import flash_attempts
import numpy as np
import pytest
from bench.card import flash_tries
from test_flash_tensor import U, exact_and_bounds, forward, inputs, worst

from nanoeuler.engines.gpu.paper import Fault, run

NAMES = flash_tries.NAMES
SAME = {
    "early": flash_tries.early,
    "pairs": partial(flash_tries.chains, most=1 << 30),
    "one chain": partial(flash_tries.chains, most=1),
    "two chains": partial(flash_tries.chains, most=2),
}


def outcome(launch, shape, seed=None, scale=1.0):
    """The arrays after a launch on paper."""
    a = inputs(*shape, scale=scale)
    run(launch(*(a[name] for name in NAMES)), seed)
    return a


@pytest.mark.parametrize(
    "way, shape, seed",
    [
        ("early", (1, 1, 1, 300, 64), 1),       # three stages
        ("early", (2, 2, 1, 1, 64), None),      # heads that share keys, two sequences
        ("pairs", (1, 1, 1, 130, 64), None),    # a pair of two tiles
        ("one chain", (1, 1, 1, 300, 64), 2),   # a pair, then the tile in the middle
        ("one chain", (1, 2, 1, 140, 64), None),
        ("two chains", (3, 1, 1, 70, 64), 3),   # a chain of two sequences, and of one
    ],
)  # fmt: skip
def test_another_order_gives_the_same_bits(way, shape, seed):
    a, b = outcome(SAME[way], shape, seed), inputs(*shape)
    run(forward(b))
    for name in ("o", "lse"):
        assert np.array_equal(a[name], b[name]), name


LAZY = partial(flash_tries.chains, most=1, lazy=True)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_lazy_one_is_as_exact(scale):
    """Scores that do not rise by 8 after the first tile, and scores that often do."""
    T = 300
    a = outcome(LAZY, (1, 1, 1, T, 64), 1, scale)
    assert worst(a, ["o"]) < 1
    _, lse, of_p = exact_and_bounds(a)
    assert np.abs(a["lse"][..., :T] - lse).max() < of_p / np.log(2) + 8 * U * np.abs(lse).max()


WRONG = [
    ("early", "no barrier", "    cuda.syncthreads()  # nobody", "    pass  # nobody"),
    ("early", "the first stage twice", "range(1, min(int32(STAGES)", "range(0, min(int32(STAGES)"),
    ("chain", "the same pair again", "int32(now.pair + cuda.gridDim.x)", "now.pair"),
    ("chain", "the long tile's keys", "        end = now.long", "        pass"),
    ("chain", "the barrier's other phase", "int32(item >> 1 & 1)", "int32(item & 1)"),
    ("chain", "output overwritten", "bulk_wait_read_all()\n        if part", "if part"),
    ("chain", "gone too early", "    bulk_wait_read_all()\n\n    types", "    pass\n\n    types"),
    ("lazy", "o not corrected", "        correct(rows, 64)\n\n", "        pass\n\n"),
    ("lazy", "total not corrected", "        rows.total[0] *= alpha[0]", "        pass"),
    ("lazy", "one lane's maximum", "larger(a0, shuffle_xor(a0, int32(2)))", "a0"),
]


@pytest.mark.parametrize("kernel, what, old, new", WRONG, ids=[row[1] for row in WRONG])
def test_mistakes_are_seen(kernel, what, old, new, monkeypatch):
    source, wrong = inspect.getsource(flash_attempts), ModuleType("wrong")
    assert source.count(old) >= 1, what
    exec(compile(source.replace(old, new, 1), "wrong", "exec"), vars(wrong))
    for name in ("early_kernel", "chain_kernel"):
        monkeypatch.setattr(flash_tries, name, getattr(wrong, name))
    way = {"early": SAME["early"], "chain": SAME["one chain"], "lazy": LAZY}[kernel]
    shape, scale = (1, 1, 1, 300, 64), 3.0 if kernel == "lazy" else 1.0
    try:
        a = outcome(way, shape, scale=scale)
    except Fault:
        return
    assert not worst(a, ["o"]) < 1
