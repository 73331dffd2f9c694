# Made from book/b-a-tokenizer-at-full-speed.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-tokenizer-compiler
"""Numba's compiler, ready for use: all compiled code of the package imports `njit` from here."""

import tempfile

from numba import config, njit

from nanoeuler.errors import UserError

if config.DISABLE_JIT:
    raise UserError(
        "expected numba to compile, but NUMBA_DISABLE_JIT is set in the environment: unset it"
    )


def _probe():
    """Never called: decorating it tells whether numba finds a folder for its cache."""


try:
    njit(_probe, cache=True)
except RuntimeError:  # "no locator available": neither can be written
    _folder = tempfile.TemporaryDirectory(prefix="nanoeuler-numba-")  # removed when Python ends
    config.CACHE_DIR = _folder.name
