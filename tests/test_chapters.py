"""Every chapter, run again by nbval against the package as exported by chapters 0 to it alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanoeuler import book

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("chapter", book.chapters(ROOT), ids=lambda path: path.stem)
def test_chapter_prints_what_is_stored(chapter):
    nbval = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:xdist"]
    nbval += ["--nbval-cell-timeout=300", "-p", "no:cacheprovider"]  # a dead kernel ends in 300 s
    done = subprocess.run(
        [*nbval, chapter.with_suffix(".ipynb")],
        env=book.environment(ROOT, chapter),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
