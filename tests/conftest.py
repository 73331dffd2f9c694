"""What all tests share: hypothesis draws the same examples every time, and does not time them."""

from hypothesis import settings

settings.register_profile("nanoeuler", deadline=None, derandomize=True)
settings.load_profile("nanoeuler")
