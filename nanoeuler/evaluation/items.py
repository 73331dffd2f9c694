# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-items
"""Items of a task: contexts, continuations, and which is right; one function for each kind of file.

Leaves out how a model scores them (likelihood.py) and which tasks there are (tasks.py).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nanoeuler.errors import UserError


class Item(NamedTuple):
    """What a model is asked: `gold` is the number of the right pair."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]  # each begins with the delimiter
    gold: int
    sizes: tuple[int, ...]          # characters of each continuation without its delimiter
    group: str = ""                 # of which an average is taken first: a paradigm of BLiMP


def _made(contexts, texts, gold, delimiter, group=""):
    contexts = tuple(context.rstrip() for context in contexts)
    sizes = tuple(max(1, len(text)) for text in texts)
    return Item(contexts, tuple(delimiter + text for text in texts), gold, sizes, group)


def choice(record: Mapping[str, Any], delimiter: str) -> Item:
    """Of {"query", "choices", "gold"}: one context, several continuations."""
    choices = record["choices"]
    return _made([record["query"]] * len(choices), choices, record["gold"], delimiter)


def schema(record: Mapping[str, Any], delimiter: str) -> Item:
    """Of {"context_options", "continuation", "gold"}: several contexts, one continuation."""
    contexts = record["context_options"]
    texts = [record["continuation"]] * len(contexts)
    return _made(contexts, texts, record["gold"], delimiter)


def word(record: Mapping[str, Any], delimiter: str) -> Item:
    """Of {"context", "continuation"}: a continuation that the model should write."""
    return _made([record["context"]], [record["continuation"]], 0, delimiter)


def pair(record: Mapping[str, Any], delimiter: str) -> Item:
    """Of {"good", "bad", "uid"}: two sentences without a context. The delimiter plays no part."""
    return _made(["", ""], [record["good"], record["bad"]], 0, "", record["uid"])


# The fields that llm-foundry's files have, and BLiMP's.
KINDS: dict[str, tuple[Callable[..., Item], dict[str, type]]] = {
    "choice": (choice, {"query": str, "choices": list, "gold": int}),
    "schema": (schema, {"context_options": list, "continuation": str, "gold": int}),
    "word": (word, {"context": str, "continuation": str}),
    "pair": (pair, {"good": str, "bad": str, "uid": str}),
}
OTHER_NAMES = {"sentence_good": "good", "sentence_bad": "bad", "UID": "uid"}  # BLiMP's own


def _is(value, kind):
    if kind is list:  # of texts, at least two of them
        return isinstance(value, list) and len(value) > 1 and all(isinstance(x, str) for x in value)
    return isinstance(value, kind) and not isinstance(value, bool)


def item(kind: str, record: object, delimiter: str, where: str) -> Item:
    """The `Item` of a record of a file of this kind; UserError, which names `where`, for another.

    A continuation must have a character, and a right answer must be one of the choices.
    """
    make, fields = KINDS[kind]
    record = record if isinstance(record, dict) else {}
    record = {OTHER_NAMES.get(name, name): value for name, value in record.items()}
    for name, type_ in fields.items():
        if not _is(record.get(name), type_):
            what = {str: "a text", int: "a whole number", list: "a list of two texts or more"}
            raise UserError(f"{where}: expected {name!r} to be {what[type_]}, got "
                            f"{record.get(name)!r:.60}: is it a task of the kind {kind!r}?"
                            )  # fmt: skip
    made = make(record, delimiter)
    if not 0 <= made.gold < len(made.contexts):
        raise UserError(f"{where}: expected 'gold' to be from 0 to {len(made.contexts) - 1}, got "
                        f"{made.gold}: check the file")  # fmt: skip
    if not all(text.strip() for text in made.continuations):
        raise UserError(f"{where}: expected every answer to have a character, got an empty one: "
                        "check the file")  # fmt: skip
    return made
