# Made from book/a-how-this-book-works.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-book-export
"""A method in its own cell, outside of its class: `@method(Class)` above a function.

The exporter writes such a method into the class, so no module uses this decorator. Leaves out
`super()` without arguments, which Python resolves only inside a class.
"""

from collections.abc import Callable
from typing import Any


def method(owner: type) -> Callable[[Any], Any]:
    """Add the decorated function or property to the class `owner`, under its name."""

    def put(member: Any) -> Any:
        inner = getattr(member, "fget", None) or getattr(member, "func", None) or member
        setattr(owner, inner.__name__, member)
        if hasattr(member, "__set_name__"):
            member.__set_name__(owner, inner.__name__)
        return member

    return put
