"""Every chapter, run again by nbval against the package of the chapters up to it alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanoeuler import book

ROOT = Path(__file__).parents[1]
# pytest with nbval and no other plugin. jsonschema, which reads notebooks, does without the package
# for internet addresses, whose import builds a grammar for longer than most chapters take.
NBVAL = """
import sys
sys.modules["rfc3987_syntax"] = None
import pytest
sys.exit(pytest.main(["-p", "nbval.plugin", "--nbval", "--nbval-current-env", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("chapter", book.chapters(ROOT), ids=lambda path: path.stem)
def test_chapter_prints_what_is_stored(chapter):
    # a dead kernel ends in 300 s
    flags = ["-p", "no:cacheprovider", "--nbval-cell-timeout=300"]
    done = subprocess.run(
        [sys.executable, "-c", NBVAL, *flags, chapter.with_suffix(".ipynb")],
        env={**book.environment(ROOT, chapter), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
