"""A conversation: what it remembers, what is typed between, and how a program holds one."""

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.cli.main import main
from nanoeuler.errors import UserError
from nanoeuler.inference import repl
from nanoeuler.inference.chat import TEMPERATURE, Chat, Memory, Turn
from nanoeuler.inference.decoder import Decoder, EngineReader, generate
from nanoeuler.inference.repl import HELP, WORDS, converse, introduction
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.chat_template import ASSISTANT, END, USER, conversation, prompt
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import save
from nanoeuler.training.run import Run, Settings

TOKENIZER = Tokenizer(np.zeros((0, 2)))  # bytes and the special tokens
MARKS = {name: TOKENIZER.special[name] for name in (USER, ASSISTANT, END)}
TINY = ModelConfig(vocab_size=TOKENIZER.vocab_size, dim=16, n_layers=1, n_heads=2, n_kv_heads=1,
                   hidden=24, context=64, n_predict=2)
WEIGHTS = initialise(TINY, seed=0)


class Counting:
    """A reader that notes how many tokens it has read."""

    def __init__(self, reader):
        self.reader, self.count = reader, 0

    def read(self, pieces, *how, **more):
        self.count += sum(map(len, pieces))
        return self.reader.read(pieces, *how, **more)


def ids_of(text):
    return TOKENIZER.encode(text).tolist()


def turn(n):
    return Turn("", "", [n % 256] * n)


def test_a_memory_by_hand():
    memory = Memory(TOKENIZER, context=20)
    memory.tell("ab")
    memory.turns = [turn(1), turn(4), turn(3)]
    assert memory.sees("c") == ([*ids_of("ab"), 3, 3, 3], prompt(TOKENIZER, "c"))


@given(st.lists(st.integers(2, 40), max_size=8), st.integers(0, 40), st.integers(0, 16))
@settings(deadline=None)
def test_the_newest_turns_are_remembered_whole_as_many_as_fit(turns, question, system):
    memory = Memory(TOKENIZER, context=64)
    memory.tell("s" * system)
    memory.turns = [turn(n) for n in turns]
    if question + 2 + system > 32:
        with pytest.raises(UserError, match=f"at most {30 - system} tokens, got {question}"):
            memory.sees("q" * question)
        return
    before, ids = memory.sees("q" * question)
    assert ids == prompt(TOKENIZER, "q" * question) and before[:system] == ids_of("s" * system)
    fit = max(k for k in range(len(turns) + 1)
              if system + sum(turns[len(turns) - k :]) + len(ids) <= 32)  # fmt: skip
    newest = turns[len(turns) - fit :]
    assert before[system:] == list(itertools.chain(*([n] * n for n in newest)))


def test_a_turn_out_of_sight_is_kept_and_may_come_back():
    memory = Memory(TOKENIZER, context=64)
    memory.turns = [Turn("a", "b", [1] * 20)]
    assert memory.sees("q" * 20)[0] == [] and memory.sees("q")[0] == [1] * 20
    assert [each["role"] for each in memory.messages()] == ["user", "assistant"]


def test_a_chat_drops_whole_turns_and_never_overfills_the_context():
    chat = Chat(TINY, TOKENIZER, WEIGHTS, seed=1)
    for i in range(12):
        list(chat.reply(f"Question {i}?"))
        asked, ids = prompt(TOKENIZER, f"Question {i}?"), chat.memory.turns[-1].ids
        assert ids[: len(asked)] == asked
        assert ids[0] == MARKS[USER] and ids[-1] == MARKS[END]
        assert not set(ids[1:-1]) & {MARKS[USER], MARKS[END]}
        assert len(chat.decoder.tokens) <= TINY.context
    again = Chat(TINY, TOKENIZER, WEIGHTS, seed=1)
    for i in range(12):
        list(again.reply(f"Question {i}?"))
    assert again.memory.turns == chat.memory.turns  # the same seed, the same conversation
    again.reset()
    for i in range(12):
        list(again.reply(f"Question {i}?"))
    assert again.memory.turns == chat.memory.turns  # and once more, begun anew


def test_an_answer_has_at_most_so_many_tokens():
    asked = len(prompt(TOKENIZER, "a"))
    for seed in range(10):
        whole, short = (Chat(TINY, TOKENIZER, WEIGHTS, seed, tokens=n) for n in (60, 3))
        for chat in (whole, short):
            list(chat.reply("a"))
        ids, cut = (chat.memory.turns[0].ids for chat in (whole, short))
        assert cut == ids or cut[:-1] == ids[: asked + 3] and cut[-1] == MARKS[END]
        if cut != ids:
            return
    raise AssertionError("no answer of more than three tokens in ten: nothing was cut")


def test_a_chat_that_cannot_be_is_refused_before_the_first_question():
    for knob in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0},
                 {"seed": -1}, {"seed": "a"}, {"seed": None}, {"temperature": "hot"},
                 {"tokens": 0}, {"tokens": 1.5}, {"tokens": True}):  # fmt: skip
        with pytest.raises(UserError, match=f"expected {[*knob][0]}.* to be "):
            Chat(TINY, TOKENIZER, WEIGHTS, **knob)
    gpt2 = Tokenizer(np.zeros((0, 2)), ("<|endoftext|>",))
    with pytest.raises(UserError, match=r"has no <\|user\|>"):
        Chat(TINY, gpt2, WEIGHTS)
    with pytest.raises(UserError, match="system message of at most 16 tokens, got 17: shorten"):
        Chat(TINY, TOKENIZER, WEIGHTS, system="s" * 17)
    with pytest.raises(UserError, match="expected an engine that generates"):
        Chat(TINY, TOKENIZER, WEIGHTS, engine="steam")


def test_what_is_asked_of_the_model(monkeypatch):
    asked = []

    def fake(decoder, tokens, n, **sampling):
        asked.append((list(decoder.tokens), tokens, n))
        assert sampling["temperature"] == TEMPERATURE  # where nobody says another
        return iter(ids_of("ok"))

    monkeypatch.setattr("nanoeuler.inference.chat.generate", fake)
    chat = Chat(TINY, TOKENIZER, WEIGHTS)
    assert "".join(chat.reply("one?")) == "ok"
    assert "".join(chat.reply("two?")) == "ok"
    held, tokens, n = asked[1]  # the penalty sees the question alone, the model all of it
    assert held == conversation(TOKENIZER, "one?", "ok")[0] and tokens == prompt(TOKENIZER, "two?")
    assert len(held) + len(tokens) + n == TINY.context
    list(chat.reply("x" * 30))  # fills its half: there is no room for what was said before
    assert asked[2][:2] == ([], prompt(TOKENIZER, "x" * 30))


@pytest.mark.parametrize("stopped", range(0, 7, 2))
def test_what_is_held_already_is_what_would_be_read(stopped):
    """Every answer is that of a decoder which reads everything anew, also after one was stopped."""
    chat = Chat(TINY, TOKENIZER, WEIGHTS, temperature=1.0, seed=3, system="be")
    said = 0
    for i, question in enumerate(("abc", "de", "fghij", "k", "lmn", "abc")):
        before, ids = chat.memory.sees(question)
        fresh = Decoder(TINY, WEIGHTS, EngineReader(TINY, WEIGHTS))
        wanted = list(generate(fresh, before + ids, TINY.context - len(before + ids),
                               stop=TOKENIZER.special.values(), temperature=1.0,
                               seed=(3, chat.asked + 1)))  # fmt: skip
        pieces, most = chat.reply(question), stopped if i % 2 else TINY.context
        answer = list(itertools.islice(pieces, most + 1 if most == TINY.context else most))
        pieces.close()
        taken = wanted[:most]
        assert len(answer) >= len(taken)
        if taken:
            assert chat.memory.turns[-1].ids == [*ids, *taken, MARKS[END]]
        said += len(taken)
    assert said > 20


def test_a_question_that_follows_reads_itself_and_what_ended_the_answer_before():
    chat = Chat(TINY, TOKENIZER, WEIGHTS, temperature=1.0, system="be")
    chat.decoder.reader = counting = Counting(chat.decoder.reader)
    next(chat.reply("abc"))  # and stopped
    assert counting.count == len("be") + 5 and len(chat.memory.turns) == 1
    counting.count = 0
    next(chat.reply("d"))
    assert counting.count == 2 + 3  # the letter that was drawn, its <|end|>, and the question


def test_a_question_nobody_waited_for_was_never_asked():
    chat = Chat(TINY, TOKENIZER, WEIGHTS)
    pieces = chat.reply("a")
    pieces.close()
    assert chat.memory.turns == [] and chat.asked == 0


def said_to(chat, *lines):
    shown = []
    converse(chat, lines, shown.append)
    return "".join(shown).splitlines()


def test_a_question_that_is_too_long_is_told_and_the_chat_goes_on():
    chat = Chat(TINY, TOKENIZER, WEIGHTS)
    with pytest.raises(UserError, match="at most 30 tokens, got 31"):
        list(chat.reply("x" * 31))
    said = said_to(chat, "x" * 31 + "\n", "  \n", "why?\n")
    assert said[0] == "(expected a question of at most 30 tokens, got 31: shorten it)"
    assert len(chat.memory.turns) == 1


def test_the_words_are_those_of_the_help():
    assert [line.split()[0] for line in HELP.splitlines() if line.startswith("/")] == [*WORDS]
    assert all(f"`{word}" in Path("book/16a-a-conversation.md").read_text() for word in WORDS)


def test_words_do_what_they_say(tmp_path):
    chat = Chat(TINY, TOKENIZER, WEIGHTS)
    assert said_to(chat, "/temperature", "/temperature 0", "/system be kind") == [
        "(temperature 0.5)", "(temperature 0)", "(the system message is now: be kind)"
    ]  # fmt: skip
    assert chat.sampling["temperature"] == 0 and chat.memory.sees("a")[0] == ids_of("be kind")
    said_to(chat, "a", "//help")  # a question with a slash, in a conversation of two
    assert [t.question for t in chat.memory.turns] == ["a", "/help"]
    path = tmp_path / "talk of us.jsonl"
    assert said_to(chat, f"/save {path}") == [f"(saved in {path})"]
    (line,) = path.read_text().splitlines()
    first, second = chat.memory.turns
    assert json.loads(line) == {"messages": [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": first.answer}, {"role": "user", "content": "/help"},
        {"role": "assistant", "content": second.answer},
    ]}  # fmt: skip
    assert said_to(chat, "/system", "/reset", "/help") == [
        "(no system message)", "(begun anew)", *HELP.splitlines()
    ]  # fmt: skip
    assert chat.memory.turns == [] and chat.memory.system == "" and chat.asked == 0
    assert chat.sampling["temperature"] == 0


def test_a_word_used_wrongly_is_told_and_changes_nothing(tmp_path):
    chat = Chat(TINY, TOKENIZER, WEIGHTS, system="be kind")
    assert said_to(chat, "/save nothing")[0].startswith("(expected something to save, but nothing")
    (tmp_path / "there").write_text("precious")
    list(chat.reply("a"))
    turns = [*chat.memory.turns]
    for line, wrong in {
        "/temperature hot": "expected a number after /temperature, got 'hot'",
        "/temperature -1": "expected temperature to be a number from 0",
        "/temperature nan": "expected temperature to be a number from 0",
        "/system " + "s" * 17: "expected a system message of at most 16 tokens, got 17",
        "/rest": "expected one of /reset /system /temperature /save /help, got /rest",
        "/": "expected one of /reset",
        "/RESET": "expected one of /reset",
        "/save": "expected the name of a file after /save",
        f"/save {tmp_path / 'there'}": "expected a new file, but there is",
        f"/save {tmp_path}": "expected a new file, but there is",
        f"/save {tmp_path / 'no' / 'where'}": "cannot be written",
        "/save ~nobody-of-that-name/x": "cannot be written",
        "/save a\0b": "cannot be written",
    }.items():
        (said,) = said_to(chat, line)
        assert said.startswith("(") and wrong in said and said.endswith(")"), (line, said)
    assert chat.sampling == {"temperature": TEMPERATURE} and chat.memory.system == "be kind"
    assert chat.memory.turns == turns and (tmp_path / "there").read_text() == "precious"


def test_the_key_stops_an_answer_and_not_the_conversation():
    chat, shown = Chat(TINY, TOKENIZER, WEIGHTS), []
    before = signal.getsignal(signal.SIGINT)

    def show(piece):
        shown.append(piece)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # by somebody impatient

    converse(chat, ["abc", "/temperature", "d"], show, stoppable=True)
    assert "".join(shown[3:6]) == " (stopped)\n(temperature 0.5)"
    assert len(chat.memory.turns[0].ids) == len(prompt(TOKENIZER, "abc")) + 3 + 1
    assert [t.question for t in chat.memory.turns] == ["abc", "d"]
    assert signal.getsignal(signal.SIGINT) is before


def test_in_a_pipe_the_key_ends_the_program():
    def show(piece):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        converse(Chat(TINY, TOKENIZER, WEIGHTS), ["abc", "d"], show)


def test_the_key_is_given_back_when_something_fails():
    before = signal.getsignal(signal.SIGINT)

    def show(piece):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        converse(Chat(TINY, TOKENIZER, WEIGHTS), ["abc"], show, stoppable=True)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_thread_waits_for_one_that_was_stopped():
    """At any moment: passes by several threads wait for each other, and must not be cut."""
    chat, shown = Chat(TINY, TOKENIZER, WEIGHTS, engine="cpu", temperature=0), []
    chat.decoder.reader = type(chat.decoder.reader)(TINY, WEIGHTS, threads=2)
    list(chat.reply("warm"))
    for wait in np.linspace(0.0005, 0.02, 12):
        timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))

        def lines(timer=timer):
            timer.start()  # within an answer or after all of them: noticed in either case
            yield from ["abcdef"] * 3
            with repl.noticing():
                timer.join()

        with repl.noticing():  # where the key comes between two answers
            converse(chat, lines(), shown.append, stoppable=True)
    shown.clear()

    def show(piece):  # on a busy machine all of these may have come late: this one doesn't
        shown.append(piece)
        if len(shown) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    converse(chat, ["abcdef"], show, stoppable=True)
    chat.reset()
    list(chat.reply("warm"))
    fresh = Chat(TINY, TOKENIZER, WEIGHTS, engine="cpu", temperature=0)
    list(fresh.reply("warm"))
    assert chat.memory.turns == fresh.memory.turns
    assert "(stopped)" in "".join(shown)


def test_people_are_told_how_small_it_is():
    told = introduction(PRESETS["small"])
    assert "1,053,824 parameters" in told and "166,062 times" in told
    assert "128 tokens" in told and all(len(line) < 80 for line in told.splitlines())


SLOW = """
import sys, time
from nanoeuler.cli.main import main
from nanoeuler.inference import chat

def slow(decoder, tokens, n, **how):
    for letter in b"abcdefghijklmnopqrstuvwxyz" * 40:
        time.sleep(0.02)
        yield letter - ord("!")  # the first of the bytes' ids

if sys.argv[1] == "slow":
    chat.generate = slow
sys.exit(main(["chat", *sys.argv[2:]]))
"""


class Terminal:
    """A program at a terminal of its own: what is typed there, and what is seen."""

    def __init__(self, *words, stdout=None):
        self.ours, theirs = pty.openpty()
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self.seen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SLOW, *words], stdin=theirs, stdout=stdout or theirs,
            stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "dumb"},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def type(self, text):
        os.write(self.ours, text.encode())

    def wait(self, text, seconds=60):
        """Until `text` is seen; what stood before it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            self._read(end)
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self, text):
        """Ctrl-C, and again every ten seconds until `text` is seen; what stood before it.

        Between a prompt and the wait for a key there is an instant in which Python's readline notes
        Ctrl-C but does not see it before the next key.
        """
        for _ in range(6):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                return self.wait(text, seconds=10)
        raise AssertionError(f"Ctrl-C has no effect: {self.seen!r}")

    def _read(self, end):
        ready, _, _ = select.select([self.ours], [], [], max(0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"it waits, after {self.seen!r}")
        try:
            part = os.read(self.ours, 1 << 16)
        except OSError:  # nobody has it open any more
            raise AssertionError(f"it has ended: {self.seen!r}") from None
        self.seen += part.decode().replace("\r\n", "\n")

    def end(self):
        """Its exit status, and what was seen last."""
        end = time.monotonic() + 60
        with contextlib.suppress(AssertionError):
            while True:
                self._read(end)
        os.close(self.ours)
        return self.process.wait(timeout=60), self.seen


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that has learned nothing."""
    folder = tmp_path_factory.mktemp("run")
    save(folder, Run.begin(TINY, Settings(steps=1), TOKENIZER, "data"))
    return str(folder)


def test_at_a_terminal(run):
    terminal = Terminal("quick", "--from", run, "--system", "be")
    told = terminal.wait("> ")
    assert told.strip() == introduction(TINY)
    terminal.type("What is 3?\n")
    assert terminal.wait("\n> ")
    terminal.type("/help\n")
    assert terminal.wait("\n> ").endswith(HELP)
    terminal.type("/temperature 7 up\n")
    assert terminal.wait("\n> ").endswith("(expected a number after /temperature, got '7 up')")
    terminal.type("\x04")
    code, rest = terminal.end()
    assert code == 0 and rest.strip() == ""


def test_ctrl_c_in_the_middle_of_an_answer(run, tmp_path):
    terminal = Terminal("slow", "--from", run)
    terminal.wait("> ")
    terminal.type("one\n")
    terminal.wait("abcdef")
    terminal.type("\x03")
    assert len(terminal.wait(" (stopped)\n> ")) < 100
    terminal.type("two\n")
    terminal.wait("abcdef")
    terminal.type("\x03\x03\x03")
    terminal.wait(" (stopped)\n> ")
    path = tmp_path / "talk"
    terminal.type(f"/save {path}\n")
    terminal.wait("(saved in")
    terminal.wait("\n> ")
    terminal.type("\x04")
    assert terminal.end()[0] == 0
    said = json.loads(path.read_text())["messages"]
    assert [each["content"] for each in said if each["role"] == "user"] == ["one", "two"]
    for each in said[1::2]:
        assert "abcdef" in each["content"] and len(each["content"]) < 1000


def test_ctrl_c_where_nothing_is_said_warns_once_and_then_leaves(run):
    terminal = Terminal("quick", "--from", run)
    warning = "(Ctrl-C once more leaves, and so does Ctrl-D)\n> "
    terminal.wait("> ")
    for _ in range(2):  # a line between two of them: it warns again
        terminal.interrupt(warning)
        terminal.type("/temperature\n")
        terminal.wait("(temperature 0.5)\n> ")
    terminal.interrupt(warning)
    terminal.interrupt("nanoeuler: interrupted")
    code, rest = terminal.end()
    assert code == 2 and rest.strip() == ""


def test_answers_may_go_elsewhere(run, tmp_path):
    """With a terminal to type at and a file for the answers, the file has the answers alone."""
    with (tmp_path / "answers").open("w") as file:
        terminal = Terminal("quick", "--from", run, "--temperature", "0", stdout=file)
        terminal.wait("Ctrl-D leaves.")
        terminal.type("/temperature\n/system be kind\n\x04")
        code, _ = terminal.end()
    said = (tmp_path / "answers").read_text()
    assert code == 0
    assert said == "(temperature 0)\n(the system message is now: be kind)\n\n"


@pytest.fixture
def piped(run, monkeypatch, capfd):
    """Run `chat` with bytes on its stdin: (exit code, stdout, stderr)."""

    def chat(data, *flags):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = main(["chat", "--from", run, *flags])
        return code, *capfd.readouterr()

    return chat


def test_a_pipe_gets_answers_and_nothing_else(piped):
    code, out, err = piped(b"/temperature\n\nWhat?\n/system be kind", "--temperature", "0")
    first, *_, last = out.splitlines()
    assert code == 0 and err == ""
    assert first == "(temperature 0)" and last == "(the system message is now: be kind)"


@pytest.mark.parametrize("flags, wrong", [
    (["--engine", "steam"], "expected an engine that generates"),
    (["--system", "s" * 17], "expected a system message of at most 16 tokens"),
    (["--engine", "reference", "--quantize", "int8"], "int8"),
])  # fmt: skip
def test_wrong_flags_are_a_line(piped, flags, wrong):
    code, out, err = piped(b"", *flags)
    assert code == 2 and out == ""
    assert wrong in err and err.count("\n") == 1
