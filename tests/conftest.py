"""What all tests share: the same examples every time, and an order that keeps workers busy."""

import pytest
from hypothesis import settings

settings.register_profile("nanoeuler", deadline=None, derandomize=True)
settings.load_profile("nanoeuler")


def pytest_collection_modifyitems(items):
    """For --dist loadgroup: each chapter by itself, each other file in one piece; long ones first.

    A file in one piece makes its fixtures once. What chapters compile, the others find compiled.
    """
    items.sort(key=lambda item: (item.path.stem != "test_chapters", -item.path.stat().st_size))
    for item in items:
        if item.path.stem != "test_chapters":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
