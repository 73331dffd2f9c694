"""A sample of the mistakes that helpers/kernel_mutants.py plants in kernels: most must be seen.

All of them: `python tests/helpers/kernel_mutants.py`. What survives is mostly equal: a comparison
with a bound that is never met, a step of a loop past its end.
"""

import kernel_mutants
import pytest
from kernel_mutants import killed, variants
from tiers import kept

SAMPLE = {
    "rows.rope": 8, "rows.residual_norm": 8, "rows.activations": 5, "rows.embedding": 5,
    "rows.gradient_norm": 4,
}  # some seconds each; fmt: skip
SEEN = 3 / 4  # of all variants of a module nine tenths are, as a run of all said

SOURCE = '''
LIMIT = 3

def launch(x):
    return x + 1

def kernel(x, n: int) -> int:
    """Adds 7."""
    def inner(a):
        cuda.syncthreads()
        if a < n:
            return min(x[a, n], 5) * 2
        raise ValueError(4 + 4)
    return inner
'''


def test_variants_are_small_changes_of_what_runs_on_a_gpu():
    made = {(v.function, v.line, v.old, v.new) for v in variants(SOURCE)}
    assert {function for function, *_ in made} == {"kernel"}
    assert {(line, old, new) for _, line, old, new in made} == {
        (10, "cuda.syncthreads()", "pass"), (11, "a < n", "a <= n"),
        (12, "min(x[a, n], 5) * 2", "min(x[a, n], 5) + 2"),
        (12, "min(x[a, n], 5)", "max(x[a, n], 5)"), (12, "x[a, n]", "x[n, a]"),
        (12, "5", "6"), (12, "5", "4"), (12, "2", "3"), (12, "2", "1"),
    }  # fmt: skip
    for variant in variants(SOURCE):
        assert variant.source != SOURCE and "def inner(a)" in variant.source


def test_a_check_that_fails_hangs_or_passes(monkeypatch):
    monkeypatch.setattr(kernel_mutants, "LIMIT", 1)
    variant = next(variants(SOURCE))

    def hang(module):
        while True:
            pass

    def fail(module):
        assert module.LIMIT == 4

    assert killed(variant, "x", hang) and killed(variant, "x", fail)
    assert not killed(variant, "x", lambda module: None)


# Each module has mistakes of its own in tests/test_rows.py.
@pytest.mark.parametrize("name", kept(SAMPLE, "rows.residual_norm", "rows.gradient_norm"))
def test_most_mistakes_in_kernels_are_seen(name):
    left, count = kernel_mutants.survivors(name, kernel_mutants.CHECKS[name], SAMPLE[name])
    assert count == SAMPLE[name]
    assert count - len(left) >= SEEN * count, [str(variant) for variant in left]
