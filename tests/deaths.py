"""Death at a chosen moment, for the tests of what a crash leaves behind."""

from unittest import mock


class Died(BaseException):
    """Stands for SIGKILL: no handler of ours may catch it."""


def dying_before(owner, name, call):
    """Patch OWNER.NAME to die before its call number `call`."""
    original, count = getattr(owner, name), [0]

    def patched(*arguments, **named):
        count[0] += 1
        if count[0] == call:
            raise Died
        return original(*arguments, **named)

    return mock.patch.object(owner, name, patched)
