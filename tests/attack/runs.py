"""Folders of runs: damaged, forged, on a full disk, shared by two programs, killed, gone on with.

A damaged run may be refused, or loaded as what it was. A killed one ends in the same bytes as one
that was never interrupted.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness import ROOT, Attack, Child, Outcome, forked, program

RIVER = (ROOT / "data" / "river.txt").read_bytes()
TINY = (
    "--dim 8 --layers 1 --heads 2 --kv-heads 1 --context 64 --vocab-size 264 --batch-size 2 "
    "--threads 1 --engine cpu"
).split()
HOW = "--batch-size 2 --threads 1 --engine cpu".split()
OFTEN = ["--steps", 24, "--save-every", 5]
SAVE = "step-00000024"
LARGE = f"{SAVE}/model.safetensors", f"{SAVE}/optimizer.safetensors"
FILES = (*LARGE, f"{SAVE}/state.json", "config.json", "tokenizer.json", "metrics.jsonl")
GONE = object()
VALUES = [
    GONE, None, True, -1, 0, 1, 1.5, 10**18, 10**400, float("nan"), "", "1", "x" * 9000, "\x1b[2J",
    [], {}, [[1]],
]  # fmt: skip
ENDS = {0, 2, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}  # of a program that is killed


def attack(attack: Attack, seed: int) -> None:
    """Everything that may happen to the folder of a run."""
    rng, folder = random.Random(seed), attack.folder
    (folder / "t.txt").write_bytes(RIVER[:6000])
    words = [f"word{i}" for i in range(40)]
    pairs = [{"question": f"What is {a}?", "answer": f"It is {a}."} for a in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    better = [{"question": f"{a}?", "chosen": a, "rejected": f"no {a}"} for a in words]
    (folder / "better.jsonl").write_text("".join(json.dumps(each) + "\n" for each in better))
    for name, more in ("run", []), ("other", ["--seed", 9]):
        attack.command("good runs", "train", "--data", "t.txt", "--out", name, *TINY, *more, *OFTEN)
    damage(attack, rng)
    forge(attack)
    replace(attack)
    fill_the_disk(attack)
    share(attack, rng)
    kill(attack, rng)


def facts(out: Path) -> str:
    """What a run is, to the last bit; and whether it can be used."""
    from nanoeuler.training.checkpoint import load, load_model
    from nanoeuler.training.folder import read_metrics

    run, whole = load(out), hashlib.sha256()
    for flat in (run.weights.flat, run.optimizer.m.flat, run.optimizer.v.flat):
        assert np.isfinite(flat).all()
        whole.update(flat.tobytes())
    assert (load_model(out)[2].flat == run.weights.flat).all()
    read_metrics(out)
    settings = dataclasses.replace(run.settings, minutes=1.0, recompute=False)  # change no bit
    # 1 is as good as 1.0
    same = [[value + 0.0 if isinstance(value, int | float) and value < 2**53 else value
             for value in dataclasses.astuple(each)] for each in (run.config, settings)]
    return f"{run.step} {same} {run.tokenizer.hash} {whole.hexdigest()}"


def look(attack: Attack, kind: str, what: str, harm: Callable[[Path], None], same: bool) -> None:
    """Load a copy of the run to which `harm` was done; `same`: it is refused, or what it was."""
    out = attack.folder / "damaged"
    shutil.copytree(attack.folder / "run", out, symlinks=True)
    harm(out)
    outcome = attack.run_act(lambda: facts(out))
    fault = outcome.fault
    if same and not fault and not outcome.code and outcome.out != _whole(attack).out:
        fault = "taken for another run"
    attack.count(kind, what, fault)
    for path in out.rglob("*"):  # of no use to remove what it leads to
        path.is_symlink() and path.unlink()
    shutil.rmtree(out)


def _whole(attack: Attack) -> Outcome:
    """What the run is, before anything is done to it."""
    if "run" not in WHOLE:
        WHOLE["run"] = attack.run_act(lambda: facts(attack.folder / "run"))
        assert not WHOLE["run"].code, WHOLE["run"]
    return WHOLE["run"]


WHOLE: dict[str, Outcome] = {}


def sign(out: Path) -> None:
    """Make state.json agree with the files as they are, as somebody would who means harm."""
    from nanoeuler.training.run import identity

    path = out / SAVE / "state.json"
    state = json.loads(path.read_text())
    for name in LARGE:
        state["sha256"][Path(name).name] = hashlib.sha256((out / name).read_bytes()).hexdigest()
    try:
        state["run"] = identity(json.loads((out / "config.json").read_text()))
    except (KeyError, TypeError, AttributeError, ValueError):
        pass  # whoever reads it meets the same
    path.write_text(json.dumps(state))


def _write(out: Path, name: str, data: bytes) -> None:
    (out / name).write_bytes(data)


def damage(attack: Attack, rng: random.Random) -> None:
    """Files that are cut short, and files with bits flipped; with the digests of these, too."""
    whole = {name: (attack.folder / "run" / name).read_bytes() for name in FILES}
    for name, data in whole.items():
        for number in range(60):
            at = number if number < 20 else rng.randrange(len(data))
            look(attack, "truncated", f"{name} at {at}",
                 lambda out, n=name, a=at: os.truncate(out / n, a), same=True)  # fmt: skip
        for number in range(160 if name in LARGE else 80):
            signed = name in LARGE and number % 2 == 0
            # half of them in the header, which is what decides most
            places = [rng.randrange(min(len(data), 900) if number % 4 < 2 else len(data))
                      for _ in range(rng.choice((1, 1, 4)))]  # fmt: skip
            bits = [1 << rng.randrange(8) for _ in places]

            def flip(out, name=name, places=places, bits=bits, signed=signed):
                changed = bytearray(whole[name])
                for place, bit in zip(places, bits, strict=True):
                    changed[place] ^= bit
                (out / name).write_bytes(changed)
                if signed:
                    sign(out)

            look(attack, "signed bit flips" if signed else "bit flips", f"{name} {places} {bits}",
                 flip, same=not signed)  # fmt: skip


def places(value: object, most: int = 2) -> Iterator[tuple]:
    """The paths to everything in a JSON value, down to a depth of `most`."""
    if isinstance(value, dict) and most:
        for name in value if len(value) < 40 else list(value)[:3]:
            yield (name,)
            yield from ((name, *rest) for rest in places(value[name], most - 1))


def changed(record: dict, path: tuple, value: object) -> dict:
    """The record with another value there, or with none."""
    record = copy.deepcopy(record)
    *above, last = path
    inner = record
    for name in above:
        inner = inner[name]
    inner[last] = value
    if value is GONE:
        del inner[last]
    return record


def forge(attack: Attack) -> None:
    """Each field of each record removed, of another type, and far too large."""
    for name in ("config.json", f"{SAVE}/state.json", "tokenizer.json"):
        record = json.loads((attack.folder / "run" / name).read_text())
        for path in places(record):
            for value in VALUES:
                text = json.dumps(changed(record, path, value))
                what = f"{name} {path} {'removed' if value is GONE else repr(value)[:20]}"
                for signed in (False, True) if name == "config.json" else (False,):
                    def write(out, name=name, text=text, signed=signed):
                        (out / name).write_text(text)
                        if signed:
                            sign(out)

                    look(attack, "signed fields" if signed else "fields", what, write,
                         same=not signed)  # fmt: skip
    line = json.dumps({"step": 3, "loss": 1.0})
    for value in [repr(each) for each in VALUES[1:]] + ["{" * 9000, line, f"{line}{line}", "\0"]:
        fields = ", ".join(f'"{name}": {value}' for name in ("step", "loss", "bits_per_byte"))
        text = f"{{{fields}}}\n{line}\n{value}\n".encode("utf-8", "replace")
        write = functools.partial(_write, name="metrics.jsonl", data=text)
        look(attack, "metrics", value[:60], write, same=True)


def replace(attack: Attack) -> None:
    """Files missing, of another save, of another run, and things that are no files."""
    run, other = attack.folder / "run", attack.folder / "other"
    earlier = sorted(each.name for each in run.glob("step-*"))[0]
    for name in FILES:
        look(attack, "missing", name, lambda out, n=name: (out / n).unlink(), same=True)
        for what, source in (
            ("of another run", other / name),
            ("of an earlier save", run / earlier / Path(name).name),
            ("another file", run / FILES[FILES.index(name) - 1]),
        ):
            if source.exists():
                look(attack, "swapped", f"{name} {what}",
                     lambda out, n=name, s=source: shutil.copy(s, out / n), same=True)  # fmt: skip
        for what in ("/dev/zero", "/dev/urandom", "/dev/null", "/dev/full", "/nothing", "/",
                     "/etc/passwd", "/proc/self/mem", str(run / name), Path(name).name):
            def link(out, name=name, what=what):
                (out / name).unlink()
                (out / name).symlink_to(what)

            look(attack, "links", f"{name} -> {what}", link, same=True)
        for make in (os.mkfifo, os.mkdir):
            look(attack, "no files", f"{name}: {make.__name__}", lambda out, n=name, m=make:
                 ((out / n).unlink(), m(out / n)), same=True)  # fmt: skip
    for what in (SAVE, earlier, "best", "data"):
        look(attack, "missing", what, lambda out, w=what: shutil.rmtree(out / w), same=False)
        look(attack, "links", f"{what} -> itself", lambda out, w=what:
             (shutil.rmtree(out / w), (out / w).symlink_to(w)), same=False)  # fmt: skip
    for name in ("step-99999999", "step-00000099x", "step-00000001", ".step-00000030.part"):
        look(attack, "more saves", name, lambda out, n=name: (out / n).mkdir(exist_ok=True),
             same=False)  # fmt: skip


def contents(out: Path) -> dict[str, object]:
    """The bytes of all files of a run, but for times, the lock, and saves before the last.

    A signal leaves a save of its own step, which is then the last but one.
    """
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name, above = str(path.relative_to(out)), path.parent
        if above.name.startswith("step-") and above != max(above.parent.glob("step-*")):
            continue
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in each.items() if k != "seconds"} for each in lines]
        elif path.is_file() and path.name not in (".lock", "commands.txt"):
            found[name] = path.read_bytes()
    return found


def unequal(out: Path, whole: dict[str, object]) -> str | None:
    """What of a run is not what it should be.

    Its picture may be missing, or be that of an earlier stop: it comes after the last save, and
    `all` passes by what has that.
    """
    found = contents(out)
    wrong = [name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name)]
    wrong = [name for name in wrong if "loss.png" not in name]  # nor what it was to be
    return f"not the bytes of an uninterrupted run: {sorted(wrong)[:4]}" if wrong else None


def fill_the_disk(attack: Attack) -> None:
    """A limit on the size of a file, and a disk of a few kilobytes; then there is room again."""
    command = ["train", "--data", "t.txt", *TINY, *OFTEN]
    attack.command("good runs", *command, "--out", "roomy")
    whole = contents(attack.folder / "roomy")

    def limited(size, args):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return program(args)

    def go_on(out, kind, what, outcome):
        fault = outcome.fault
        more = ["--resume"] if (out / ".lock").exists() else []
        if not fault and attack.run(*command, "--out", out, *more).code:
            fault = "it does not go on when there is room"
        attack.count(kind, what, fault or unequal(out, whole))
        shutil.rmtree(out, ignore_errors=True)

    for size in (4000, 5000, 6000, 7000, 9000, 12_000, 14_000, 20_000, 30_000, 60_000):
        out = attack.folder / "full"
        args = [str(each) for each in (*command, "--out", out)]
        outcome = forked(lambda s=size, a=args: limited(s, a), attack.folder, b"", 60)
        go_on(out, "a limit on files", f"{size} bytes", outcome)
    (disk := attack.folder / "disk").mkdir()
    for size in ("40k", "80k", "120k", "160k", "200k"):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            print("  left out: a small disk, which this user may not mount")
            break
        try:
            outcome = attack.run(*command, "--out", disk / "run")
            subprocess.run(["mount", "-o", "remount,size=90m", str(disk)], check=True)
            go_on(disk / "run", "a full disk", size, outcome)
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def share(attack: Attack, rng: random.Random) -> None:
    """Two programs train in one folder at once: one does, and the other is told so."""
    command = ["train", "--data", "t.txt", *TINY, *OFTEN]
    whole = contents(attack.folder / "roomy")
    for number in range(6):
        out = attack.folder / f"shared-{number}"
        first = attack.begin(*command, "--out", out)
        time.sleep(rng.random() * 0.4)
        second = attack.begin(*command, "--out", out)
        ended = first.wait(60), second.wait(60)
        fault = ended[0].fault or ended[1].fault or unequal(out, whole)
        if not fault and sorted(each.code for each in ended) != [0, 2]:
            fault = f"they ended with {[each.code for each in ended]}"
        attack.count("two at once", f"pair {number}", fault)


def kill(attack: Attack, rng: random.Random) -> None:
    """Programs that train, ended at random moments; each goes on, to the same bytes."""
    kinds = {
        "train": (7, ["train", "--data", "t.txt", *TINY, *OFTEN, "--out"]),
        "sft": (5, ["sft", "--from", "run", "--data", "pairs.jsonl", *HOW, *OFTEN, "--out"]),
        "prefer": (5, ["prefer", "--from", "run", "--data", "better.jsonl", *HOW, *OFTEN, "--out"]),
        "all": (3, ["all", "--size", "try", "--data", "t.txt", "--pairs", "pairs.jsonl",
                    "--comparisons", "better.jsonl", "--engine", "cpu", "--out"]),
    }  # fmt: skip
    for kind, (times, command) in kinds.items():
        straight = attack.run(*command, f"{kind}-whole", seconds=120)
        attack.count("good runs", kind, straight.fault)
        whole = contents(attack.folder / f"{kind}-whole")
        for number in range(times):
            out = attack.folder / f"{kind}-{number}"
            what, fault = f"{kind} {number}:", None
            for _ in range(rng.randint(1, 3)):
                signals = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
                name, after = rng.choice(signals), rng.random() * straight.seconds
                what += f" {name.name} after {after:.2f} s"
                fault = fault or _killed(_further(attack, command, kind, out), name, after)
            last = _further(attack, command, kind, out).wait(120)
            fault = fault or last.fault or (last.code and f"it does not go on: {last.err[-200:]}")
            attack.count("killed", what, fault or unequal(out, whole))
            shutil.rmtree(out, ignore_errors=True)


def _further(attack: Attack, command: list, kind: str, out: Path) -> Child:
    """The command, begun; or gone on with, where it has begun before."""
    more = ["--resume"] if kind != "all" and (out / ".lock").exists() else []
    return attack.begin(*command, out, *more)


def _killed(child: Child, name: signal.Signals, after: float) -> str | None:
    """End a program with this signal after so many seconds; what was wrong with its end."""
    time.sleep(0.05 + after)  # before that a child is no program yet, but a fork of the attack
    os.kill(child.pid, name)
    ended = child.wait(60)
    if name is signal.SIGINT and "Exception ignored in" in ended.err:
        return None  # Python drops an interrupt that comes in a weak reference's callback
    if ended.code not in ENDS or "Traceback" in ended.err:
        return f"{name.name}: code {ended.code}: {ended.err.strip()[-200:]}"
    return None
