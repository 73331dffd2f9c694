# Made from book/16a-a-conversation.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-conversation-words
"""A conversation line by line: questions, commands for the program, answers that can be stopped.

Leaves out the memory and the answers themselves (chat.py), and the flags of the command.
"""

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nanoeuler.errors import UserError
from nanoeuler.inference.chat import Chat
from nanoeuler.model.config import ModelConfig, count_parameters

# What /help prints. A test checks that its commands are those of WORDS.
HELP = """\
/reset            forget what was said; the system message stays
/system TEXT      set what the model reads first; without TEXT, remove it
/temperature X    set how boldly it answers, 0: likeliest tokens only; without X, show it
/save FILE        write the conversation into a new file, as a line of JSON
/help             these lines
A question that begins with / is written with two: //like this.
Ctrl-C stops an answer, and Ctrl-D leaves."""


def _reset(chat, _):
    chat.reset()
    return "(begun anew)"


def _system(chat, text):
    chat.memory.tell(text)
    return f"(the system message is now: {text})" if text else "(no system message)"


def _temperature(chat, text):
    if text:
        try:
            chat.change(temperature=float(text))
        except ValueError:
            raise UserError(f"expected a number after /temperature, got {text!r:.60}") from None
    return f"(temperature {chat.sampling['temperature']:g})"


def _save(chat, name):
    if not name:
        raise UserError("expected the name of a file after /save")
    if not chat.memory.turns:
        raise UserError("expected something to save, but nothing has been said")
    try:
        with Path(name).expanduser().open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": chat.memory.messages()}, ensure_ascii=False) + "\n")
    except FileExistsError:
        raise UserError(f"expected a new file, but there is {name}: name another") from None
    except (OSError, RuntimeError, ValueError) as error:  # no home; a name with a zero byte
        raise UserError(f"{name} cannot be written ({error}): name another") from None
    return f"(saved in {name})"


WORDS: dict[str, Callable[[Chat, str], str]] = {
    "/reset": _reset, "/system": _system, "/temperature": _temperature, "/save": _save,
    "/help": lambda *_: HELP,
}  # fmt: skip


def answers(chat: Chat, line: str) -> Iterator[str]:
    """The reply to a line, piece by piece: an answer, or what a command of WORDS has done.

    UserError for an unknown or misused command, or if `Chat.reply` raises it.
    """
    if not line.startswith("/") or line.startswith("//"):
        yield from chat.reply(line.removeprefix("/"))
        return
    word, _, rest = line.partition(" ")
    if word not in WORDS:
        known = " ".join(WORDS)
        raise UserError(f"expected one of {known}, got {word:.60}: "
                        "if it's a question, begin it with //")  # fmt: skip
    yield WORDS[word](chat, rest.strip())


# %% sec-conversation-stop
@contextlib.contextmanager
def noticing() -> Iterator[threading.Event]:
    """Within it, Ctrl-C only sets the event that this yields. In the main thread only."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def converse(
    chat: Chat, lines: Iterable[str], show: Callable[[str], object], stoppable: bool = False
) -> None:
    """Answer each of `lines`, a question or a command; `show(text)` shows pieces.

    stoppable: Ctrl-C ends an answer, not the conversation. Else it raises KeyboardInterrupt.
    """
    for line in filter(None, map(str.strip, lines)):
        with noticing() if stoppable else contextlib.nullcontext(threading.Event()) as pressed:
            try:
                with contextlib.closing(answers(chat, line)) as pieces:
                    for piece in pieces:
                        show(piece)
                        if pressed.is_set():
                            show(" (stopped)")
                            break
            except UserError as error:  # a chat goes on after a question that was too long
                show(f"({error})")
            show("\n")


# %% sec-conversation-terminal
def typed() -> Iterator[str]:
    """Lines that somebody types at the terminal, until Ctrl-D or until Ctrl-C is pressed twice."""
    with contextlib.suppress(ImportError):  # where readline exists: arrow keys, and earlier lines
        import readline  # noqa: F401
    mark, warned = "> " if sys.stdout.isatty() else "", False
    while True:
        try:
            line = input(mark)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            print("\n(Ctrl-C once more leaves, and so does Ctrl-D)")
        else:
            warned = False
            yield line


GPT3 = 175e9  # parameters; Brown and others (2020), table 2.1


def introduction(config: ModelConfig) -> str:
    """What somebody should know who is about to ask this model something."""
    size = count_parameters(config)
    return (
        f"This is a model of {size:,} parameters; GPT-3 had {GPT3 / size:,.0f} times as many.\n"
        "It has learned what an answer looks like. Do not believe what it says.\n"
        f"It sees {config.context:,} tokens at once, half of them kept for its answer.\n"
        "/help lists what else one can type. Ctrl-C stops an answer, and Ctrl-D leaves."
    )
