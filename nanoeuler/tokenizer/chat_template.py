# Made from book/16-fine-tuning.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-template
"""The chat template: the one place where a conversation becomes token ids.

A conversation is questions with their answers, and a system message before them if there is one.
Leaves out calls of tools, which are functions that a model may ask for, such as a search.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.jinja import ChatTemplate
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

# The marks of the template; the first special token, the end of a document, is not one of them.
_, USER, ASSISTANT, END = SPECIAL_TOKENS

template_of = lru_cache(maxsize=4)(ChatTemplate)  # of a tokenizer from elsewhere, compiled once


def prompt(tokenizer: Tokenizer, question: str, system: str | None = None) -> list[int]:
    """The ids of a question in the template, up to where the answer begins.

    `system` is a message that comes before it. An imported tokenizer with its own template uses
    that one. UserError if the tokenizer lacks one of the marks.
    """
    if tokenizer.template:
        return template_of(tokenizer).prompt(messages_of([(question, None)], system))
    if missing := [name for name in (USER, ASSISTANT, END) if name not in tokenizer.special]:
        raise UserError(
            f"expected a tokenizer with the special tokens of a chat, but it has no {missing[0]}: "
            "train the model with a tokenizer that nanoeuler has made"
        )
    said, asked = (tokenizer.encode(text or "").tolist() for text in (system, question))
    return [*said, tokenizer.special[USER], *asked, tokenizer.special[ASSISTANT]]


def conversation(
    tokenizer: Tokenizer, question: str, answer: str, system: str | None = None
) -> tuple[list[int], list[bool]]:
    """The ids of a question and its answer, and for each id whether the loss counts it."""
    if tokenizer.template:
        return template_of(tokenizer).conversation(messages_of([(question, answer)], system))
    before = prompt(tokenizer, question, system)
    after = [*tokenizer.encode(answer).tolist(), tokenizer.special[END]]
    return before + after, [False] * len(before) + [True] * len(after)


def messages_of(
    turns: Iterable[tuple[str, str | None]], system: str | None = None
) -> list[dict[str, Any]]:
    """Questions and their answers as messages; an answer that is still to come is None."""
    said = [("system", system or None)]
    for question, answer in turns:
        said += [("user", question), ("assistant", answer)]
    return [{"role": role, "content": text} for role, text in said if text is not None]


def dialogue(
    tokenizer: Tokenizer, turns: Iterable[tuple[str, str]], system: str | None = None
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation of several turns, and for each whether the loss counts it."""
    if tokenizer.template:
        return template_of(tokenizer).conversation(messages_of(turns, system))
    ids, counted = list[int](), list[bool]()
    for question, answer in turns:
        more, which = conversation(tokenizer, question, answer, system)
        ids, counted, system = ids + more, counted + which, None  # system comes once
    return ids, counted


def end_of(tokenizer: Tokenizer) -> int:
    """The id that ends an answer. UserError if the tokenizer's template has none."""
    if not tokenizer.template:
        return tokenizer.special[END]
    if not (stops := template_of(tokenizer).stops):
        raise UserError("expected a chat template that ends an answer with a special token, but "
                        "this one ends it with none: the model would never stop")  # fmt: skip
    return stops[0]
