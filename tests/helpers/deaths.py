"""Death at a chosen moment, for the tests of what a crash leaves behind."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


class Died(BaseException):
    """Stands for SIGKILL: no handler of ours may catch it."""


@contextmanager
def dying_before(owner, name, call):
    """Patch OWNER.NAME to die before its call number `call`; the dead clean nothing up."""
    original, count = getattr(owner, name), [0]

    def patched(*arguments, **named):
        count[0] += 1
        if count[0] >= call:
            raise Died
        return original(*arguments, **named)

    def cleaning(clean):
        def patched(*arguments, **named):
            if count[0] >= call:
                raise Died
            return clean(*arguments, **named)

        return patched

    with (
        mock.patch.object(shutil, "rmtree", cleaning(shutil.rmtree)),
        mock.patch.object(Path, "unlink", cleaning(Path.unlink)),
        mock.patch.object(owner, name, patched),
    ):
        yield


@contextmanager
def full_disk(name, call):
    """Patch os.NAME to fail as on a full disk, from its call number `call` on."""
    original, count = getattr(os, name), [0]

    def patched(*arguments, **named):
        count[0] += 1
        if count[0] >= call:
            raise OSError(28, "No space left on device")
        return original(*arguments, **named)

    with mock.patch.object(os, name, patched):
        yield count
