# Made from book/16-fine-tuning.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-template
"""The chat template: the one place where a conversation becomes token ids.

One question and one answer, and what a system message says before them; several in a row are a
longer conversation. Leaves out tools.
"""

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

# The marks of the template; the first special token, the end of a document, is not one of them.
_, USER, ASSISTANT, END = SPECIAL_TOKENS


def prompt(tokenizer: Tokenizer, question: str, system: str | None = None) -> list[int]:
    """The ids of a question in the template, up to where the answer begins.

    `system` is a message that stands before it. UserError if the tokenizer lacks one of the marks.
    """
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
    before = prompt(tokenizer, question, system)
    after = [*tokenizer.encode(answer).tolist(), tokenizer.special[END]]
    return before + after, [False] * len(before) + [True] * len(after)
