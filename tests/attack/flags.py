"""Every flag and argument of every command: odd numbers, texts and paths, repeats, and pairs.

The commands are found by walking the program, so that a new flag is attacked without being named
here. What a command needs in order to be cheap is in BASE; where it has none it runs as it is.
"""

import contextlib
import functools
import io
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Attack, Outcome, program

LONG = "9" * 400  # no float is so large
NUMBERS = ["0", "1", "-1", "0.5", "1e3", "1e999", "1e-320", "nan", "inf", "-inf", "1e38",
           "9223372036854775807", "9223372036854775808", LONG, "9" * 5000, "-" + LONG, "٣", "１２",
           "²", "1_0", "0x10", "0b1", "1e", "--1", "1,5", "0.0", "many", " 1", "", " ", "-"]
TEXTS = ["", " ", "-", "--", "x", "\x1b[31mred\x07", "line\nline", "tab\there", "\udcff", "é" * 300,
         "x" * 100_000, "🦆", "\u202etxt", "%s%n{}", "$HOME", "*", "--help", LONG]
PATHS = [".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "loop", "dangling", "nowhere",
         "nowhere/deeper", "locked", "locked/inside", "folder", "text.txt", "text.txt/inside",
         "link", "base", "chat", "base/best", "prepared", "pairs.jsonl", "socket", "n" * 300, "~",
         "odd\nname"]
TINY = "--dim 16 --layers 1 --heads 2 --kv-heads 1 --context 32 --vocab-size 300".split()
STEPS = "--steps 1 --batch-size 2 --engine cpu --threads 1".split()
# What makes a command cheap, and OUT a new folder each time. A server only ever refuses.
BASE = {
    "train": ["--data", "text.txt", "--out", "OUT", *STEPS, *TINY],
    "sft": ["--from", "base", "--data", "pairs.jsonl", "--out", "OUT", *STEPS],
    "prefer": ["--from", "chat", "--data", "better.jsonl", "--out", "OUT", *STEPS],
    "serve": ["--from", "no-run"],
    "generate": ["--from", "base", "--tokens", "2"],
    "chat": ["--from", "chat"],
    "eval": ["base", "--engine", "cpu"],
    "all": ["--size", "try", "--data", "text.txt", "--pairs", "pairs.jsonl", "--out", "OUT",
            "--comparisons", "better.jsonl", "--engine", "cpu", "--plan"],
    "data fetch": ["nothing"],
    "data prepare": ["text.txt", "--vocab-size", "300", "--out", "OUT"],
    "data show": ["prepared"],
    "tokenizer train": ["text.txt", "--vocab-size", "300", "--out", "OUT"],
    "tokenizer encode": ["text", "--tokenizer", "base"],
    "tokenizer decode": ["1", "2", "--tokenizer", "base"],
    "tokenizer show": ["text", "--tokenizer", "base"],
}  # fmt: skip
# Flags whose large values are a long job and no mistake.
LASTS = {("train", "steps"), ("sft", "steps"), ("prefer", "steps"), ("generate", "tokens")}
PROVES = "check"  # proves the gradients for a minute, whatever is typed: it has no flags
DRAWN = 500  # pairs of flags
FAULTY = re.compile(r"[^\S\n ]|[^\n -~\u00a0-\U0010ffff]")  # a control character in a message


class Flag(NamedTuple):
    """A flag or an argument of a command. words: the flag as it is typed, none for an argument."""

    name: str
    words: list[str]
    metavar: str
    alone: bool  # it takes no value

    def values(self) -> list[str]:
        """What to give it."""
        if self.metavar in ("N", "X"):
            return NUMBERS
        if "TEXT" in self.metavar:
            return TEXTS + NUMBERS[:4]
        odd = TEXTS if "FILE" not in self.metavar and "DIR" not in self.metavar else TEXTS[:12]
        return odd + PATHS


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Flag]]]:
    """Each command of the program with its flags and arguments."""
    for name, command in group.commands.items():
        words = (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, words)
            continue
        found = []
        for each in command.params:
            typed = each.opts[:1] if each.param_type_name == "option" else []
            alone = bool(typed and each.is_flag)
            found.append(Flag(each.name, typed, each.metavar or "TEXT", alone))
        yield " ".join(words), found


def furnish(attack: Attack) -> None:
    """Make in the attack's folder what the commands read: texts, pairs, runs, and odd paths."""
    folder = attack.folder
    story = (ROOT / "data" / "river.txt").read_text(encoding="utf-8")
    (folder / "text.txt").write_text(story[:4000], encoding="utf-8")
    asked = [(f"What is {i}?", f"The number {i}.", f"{i} is not.") for i in range(24)]
    lines = [json.dumps({"question": q, "answer": a}) for q, a, _ in asked]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    lines = [json.dumps({"question": q, "chosen": a, "rejected": b}) for q, a, b in asked]
    (folder / "better.jsonl").write_text("\n".join(lines))
    for command, out in (("train", "base"), ("sft", "chat"), ("data prepare", "prepared")):
        words = [out if word == "OUT" else word for word in BASE[command]]
        done = attack.run(*command.split(), *words, seconds=300)  # may compile
        assert done.code == 0, done.err
    attack.run("generate", *BASE["generate"], "--quantize", "int8", seconds=300)  # compiles, too
    (folder / "folder").mkdir()
    (folder / "locked").mkdir(mode=0)
    for name, target in (("loop", "loop"), ("dangling", "nowhere"), ("link", "text.txt")):
        os.symlink(target, folder / name)
    os.mkfifo(folder / "socket")


def warm() -> None:
    """Import what commands import, and load the compiled kernels, once and without a thread."""
    import matplotlib.figure  # noqa: F401
    import numpy as np
    import typer.main

    import nanoeuler.__main__  # noqa: F401
    import nanoeuler.api
    import nanoeuler.planning.doctor
    import nanoeuler.planning.step
    import nanoeuler.serve.web  # noqa: F401
    import nanoeuler.training.dpo  # noqa: F401
    from nanoeuler.engines.cpu.engine import CpuEngine
    from nanoeuler.model.config import PRESETS
    from nanoeuler.model.sizes import resized
    from nanoeuler.model.transformer import loss_and_gradients
    from nanoeuler.model.weights import initialise

    typer.main.get_command = functools.cache(typer.main.get_command)  # else made for each input
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for words in ["plan", "--help"], ["plan", "--hidden", "0"], ["plan", "--preset", "none"]:
            program(words)  # so that typer has what it imports when it parses, and when it refuses
    config = resized(PRESETS["small"], dim=16, n_layers=1, n_heads=2, n_kv_heads=1, context=8,
                     vocab_size=300)  # fmt: skip
    w, tokens = initialise(config, seed=0), np.zeros((1, 8), np.int32)
    targets = np.zeros((1, 8, config.n_predict), np.int32)
    scale = np.ones(config.n_predict)
    loss_and_gradients(CpuEngine(), config, w, tokens, targets, scale, w.zeros_like())


def fault_of(done: Outcome) -> str | None:
    """What was wrong with an outcome: what is wrong with any, and errors that are not a line."""
    if done.fault or done.code != 2:
        return done.fault
    last = done.err.rstrip("\n").split("\n")[-1]
    if not last.startswith("nanoeuler: "):
        return f"refused by {last[:80]!r}"
    if len(last) > 2000 or FAULTY.search(done.err):
        return f"an error of {len(last)} characters or with control characters: {last[:80]!r}"
    return None


class Send:
    """Runs a command with words of its own added, each time in a folder that nobody has used."""

    def __init__(self, attack: Attack) -> None:
        self.attack, self.number, self.kept = attack, 0, {*attack.folder.iterdir()}

    def __call__(self, kind: str, command: str, *more: str) -> None:
        """Run `command` with the words `more` after what it has anyway; count it."""
        self.typed(kind, [*command.split(), *self.base(command), *more])

    def argument(self, kind: str, command: str, value: str) -> None:
        """Run `command` with `value` in place of its arguments, and the flags it has anyway."""
        base = self.base(command)
        flags = next((i for i, word in enumerate(base) if word.startswith("--")), len(base))
        self.typed(kind, [*command.split(), *base[flags:], value])

    def base(self, command: str) -> list[str]:
        """What makes `command` cheap, with a new folder for what it writes."""
        self.number += 1
        out = str(self.attack.folder / f"out-{self.number}")
        return [out if word == "OUT" else word for word in BASE.get(command, [])]

    def typed(self, kind: str, words: list[str]) -> None:
        """Run exactly these words; count them, and take away what they have made."""
        done = self.attack.run(*words)
        self.attack.count(kind, repr([word[:60] for word in words]), fault_of(done))
        for path in {*self.attack.folder.iterdir()} - self.kept:
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def skipped(command: str, flag: Flag, value: str) -> bool:
    """Whether this is no mistake but a long job, a server, or a reader of a pipe."""
    large = re.fullmatch(r"\d{3,19}|1e3", value) and not value.startswith("99")
    reads = value == "socket" and not flag.name.startswith("out")
    serves = command == "serve" and flag.words == ["--from"]
    harvests = command == "tokenizer train" and value == "--"  # that is no file: the corpus
    return bool(reads or serves or harvests or (large and (command, flag.name) in LASTS))


def attack(attack: Attack, seed: int) -> None:
    """Every flag of every command with every odd value; then pairs that are drawn."""
    import typer

    warm()
    furnish(attack)
    from nanoeuler.cli.main import app

    found, send = dict(commands(typer.main.get_command(app))), Send(attack)
    found.pop(PROVES)
    for command, known in found.items():
        send("as it is", command)
        send.typed("help", [*command.split(), "--help"])
        send("unknown", command, "--no-such-flag")
        for flag in known:
            if flag.alone:
                send("repeated", command, *flag.words, *flag.words)
                continue
            send("no value", command, *flag.words)
            for value in flag.values():
                if skipped(command, flag, value):
                    continue
                if flag.words:
                    send(f"{flag.metavar} of a flag", command, *flag.words, value)
                else:
                    send.argument(f"{flag.metavar} alone", command, value)
    draws = random.Random(seed)
    flags = {
        name: [flag for flag in known if flag.words and not skipped(name, flag, "x")]
        for name, known in found.items()
    }
    for _ in range(DRAWN):
        command, words = draws.choice([name for name, known in flags.items() if known]), []
        for flag in draws.choices(flags[command], k=2):  # the same twice, now and then
            values = [each for each in flag.values() if not skipped(command, flag, each)]
            words += flag.words if flag.alone else [*flag.words, draws.choice(values)]
        send("pairs", command, *words)
    Path(attack.folder / "locked").chmod(0o700)
