"""Fragments of source are found however it is laid out and named, and never where they are not."""

import pytest
from fragments import qualified, replaced

SOURCE = """
    def norm(self, x, gain):
        \"\"\"Not gain * x_hat.\"\"\"
        r = np.sqrt(np.mean(x * x) + 1e-5)
        x_hat = x / r  # gain * x_hat
        for i in range(3):
            gain[i] += x_hat[i]
        return gain * x_hat
"""


def changed(source, old, new):
    """The lines of a source that a replacement changes, as they are after it."""
    wrong = replaced(source, old, new)
    pairs = zip(source.splitlines(), wrong.splitlines(), strict=True)
    return [after.strip() for before, after in pairs if before != after]


def test_comments_and_strings_are_not_code():
    assert changed(SOURCE, "gain * x_hat", "x_hat") == ["return x_hat"]


def test_layout_does_not_matter():
    apart = "return (\n            gain\n            * x_hat  # why\n)"
    wide = SOURCE.replace("return gain * x_hat", apart)
    assert "return (\n            x_hat  # why" in replaced(wide, "gain  *x_hat", "x_hat")
    assert changed(SOURCE, "np.mean( x*x )+1e-5", "0") == ["r = np.sqrt(0)"]


def test_a_local_may_be_renamed():
    """Wherever it is, and in what takes its place."""
    other = SOURCE.replace("x_hat", "unit").replace("gain", "scale")
    assert changed(other, "gain * x_hat", "x_hat * x_hat") == ["return unit * unit"]
    assert changed(other, "gain[i] += x_hat", "gain[i] = x_hat") == ["scale[i] = unit[i]"]


@pytest.mark.parametrize("old, times", [
    ("x", 4), ("/ r + 1", 0), ("x_hat *", 0), ("x /= r", 0), ("1e-6", 0), ("hat * gain", 0),
    ("np.sum(", 0), ("self.gain", 0), ("None", 0), ("min", 0), ("one + other", 0),
    ("one[i] += one[i]", 0), ("x * one", 0), ("other", 16),
])  # fmt: skip
def test_what_is_not_there_once_is_refused(old, times):
    with pytest.raises(AssertionError, match=f"is {times} times, not exactly once in norm"):
        replaced(SOURCE, old, "pass", "norm")


def test_a_name_stands_for_one_local_and_no_two_for_the_same():
    source = "def f(a, b):\n    return a * a + b * a\n"
    assert replaced(source, "p * p", "p") == "def f(a, b):\n    return a + b * a\n"
    assert replaced(source, "p * q", "p") == "def f(a, b):\n    return a * a + b\n"


def test_a_comment_says_which_place_is_meant():
    source = "def f():\n    wait()  # for readers, all\n    wait()  # for writers\n    wait()\n"
    assert replaced(source, "wait()  # for readers", "pass  # none") == source.replace(
        "wait()  # for readers, all", "pass  # none"
    )
    for old, times in (("wait()", 3), ("wait()  # for", 2), ("wait() # readers", 0)):
        with pytest.raises(AssertionError, match=f"is {times} times"):
            replaced(source, old, "pass")


def test_space_around_a_fragment_goes_with_it():
    source = "def f():\n    one()\n    two()\n"
    assert replaced(source, "    one()\n", "") == "def f():\n    two()\n"
    assert replaced(source, "one()\n    two()", "two()\n    one()") == source.replace(
        "one()\n    two()", "two()\n    one()"
    )
    assert replaced(source, " one()", " if True:\n        two()") == (
        "def f():\n    if True:\n        two()\n    two()\n"
    )


def test_a_name_of_another_module_is_written_as_its_module_writes_it():
    """Not a local of that name, not the builtin, and not what is an attribute already."""
    module = "from nanoeuler.engines.gpu.lang import ptx\nimport numpy as np\n"
    function = "def f(low):\n    ptx.wait(ptx.low(low), np.sum(low))\n"
    assert qualified("wait(low, sum(x.wait))", module + function, function) == (
        "ptx.wait(low, sum(x.wait))"
    )
