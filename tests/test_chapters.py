"""Every chapter, run again by nbval against the package of the chapters up to it alone."""

from pathlib import Path

import pytest
from rerun import environment, run

from nanoeuler.book import build

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("chapter", build.chapters(ROOT), ids=lambda path: path.stem)
def test_chapter_prints_what_is_stored(chapter):
    notebook = chapter.with_suffix(".ipynb")
    found = run(notebook, environment(notebook))
    assert found.passed and not found.failures, "\n\n".join(found.failures)
