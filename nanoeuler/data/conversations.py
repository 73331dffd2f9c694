# Made from book/16-fine-tuning.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-chat-batches
"""Conversations to learn from, and the files that hold them: pairs, Alpaca's form, and chats.

Leaves out their tokens (chat_template.py, of the tokenizer) and their batches (sft.py).
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanoeuler.data.documents import NO_OUTPUT
from nanoeuler.errors import UserError, quoted
from nanoeuler.files import json_lines

Pair = tuple[str, str]  # a question and its answer


class Conversation(NamedTuple):
    """A conversation of several turns, or one with a system message."""

    turns: list[Pair]
    system: str | None = None


def turns_of(talk: Pair | Conversation) -> list[Pair]:
    """The turns of a conversation; a pair is one."""
    return talk.turns if isinstance(talk, Conversation) else [talk]


# %% sec-chat-files
_SHOWN = 8  # places that a report names: more would not be read


def numbers(places: list[int]) -> str:
    """The first of the places as text, and how many more there are.

    >>> numbers([3, 8])
    '3, 8'
    """
    more = len(places) - _SHOWN
    return ", ".join(map(str, places[:_SHOWN])) + (f" and {more:,} more" if more > 0 else "")


def _talk(record: Any) -> Pair | Conversation:
    """The conversation that a record holds; if it holds none, an exception of one of many kinds."""
    match record:
        case {"question": question, "answer": answer}:
            talk: Pair | Conversation = question, answer
        case {"instruction": task, "output": answer}:
            detail = record.get("input") or ""
            talk = f"{task}\n{detail}" if detail else task, answer
            "".join([task, detail])  # fails if one isn't a text
        case {"messages": messages}:
            roles, texts = ([each[name] for each in messages] for name in ("role", "content"))
            system = texts.pop(0) if roles[0] == "system" else None
            turns = list(zip(texts[::2], texts[1::2], strict=True))
            if roles[-len(texts) :] != ["user", "assistant"] * len(turns):
                raise ValueError("expected user and assistant in turns")
            talk = Conversation(turns, system) if system or len(turns) > 1 else turns[0]
        case _:
            raise ValueError("expected a form that is known")
    said = [text for turn in turns_of(talk) for text in turn]
    system = talk.system if isinstance(talk, Conversation) else None
    "".join([*said, system or ""]).encode()  # fails on half a character, such as JSON's "\ud800"
    return talk


def _records(text: str) -> Iterator[tuple[int, str, Any]]:
    """Number, text and value of each line, or of each entry of a list; value None: not JSON."""
    if text.lstrip().startswith("["):
        for number, entry in enumerate(json.loads(text), start=1):
            yield number, json.dumps(entry), entry
        return
    yield from json_lines(text)


def _teaches(talk: Pair | Conversation) -> bool:
    """False if a question or an answer is empty, or an answer begins with Alpaca's `<nooutput>`."""
    said = [text.strip() for turn in turns_of(talk) for text in turn]
    return all(said) and not any(text.startswith(NO_OUTPUT) for text in said[1::2])


def read_pairs(path: Path) -> list[Pair | Conversation]:
    """The conversations in a file: JSON lines, or a list in JSON, in any of the three forms.

    Those with nothing to learn are left out, and stderr says which. UserError if a record has none
    of the forms: it names the first such place, and counts them all.
    """
    # Without the mark that some editors put first. A byte that isn't UTF-8 becomes half a
    # character (a surrogate), so that `_talk` refuses its record and no other.
    text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    place = "entry" if text.lstrip().startswith("[") else "line"
    talks, empty, wrong = [], [], []
    try:
        for number, begins, record in _records(text):
            try:
                talk = _talk(record)
            except (ValueError, TypeError, KeyError, IndexError):
                wrong.append((number, begins))
                continue
            if _teaches(talk):
                talks.append(talk)
            else:
                empty.append(number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"expected JSON in {path}, but {quoted(error)}") from None
    if wrong:
        (number, begins), many = wrong[0], f"; {len(wrong):,} are wrong" if wrong[1:] else ""
        raise UserError(
            f"{place} {number} of {path}: expected instruction, input and output, or messages of "
            'user and assistant in turns, or {"question": TEXT, "answer": TEXT}, but it '
            f"begins with {quoted(begins[:40])!r}{many}"
        )
    if empty and not talks:
        raise UserError(f"expected conversations in {path}, but in all {len(empty):,} a "
                        "question or answer is empty or <nooutput>")  # fmt: skip
    if empty:
        print(f"{path}: {len(empty):,} left out, empty or <nooutput>, {place} "
              f"{numbers(empty)}", file=sys.stderr)  # fmt: skip
    return talks
