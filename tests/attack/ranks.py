"""Runs of several ranks whose processes die, or stand still: all end, and the run can go on.

Each is a chain of processes: the program that was typed, MPI's launcher, its proxy, two ranks. They
are programs of their own, since MPI begins anew in each; where it is missing, they are left out.
"""

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from harness import ROOT, Attack

TINY = (
    "--dim 16 --layers 1 --heads 2 --kv-heads 1 --context 32 --vocab-size 270 --batch-size 32 "
    "--threads 1 --engine cpu"
).split()
BEGUN, ENDED = 120.0, 60.0  # seconds: of a machine that may be busy, and ranks import all anew
# Who gets which signal, and whether all end by it.
ENDS = [
    ("program", "KILL"), ("launcher", "KILL"), ("proxy", "KILL"), ("rank 0", "KILL"),
    ("rank 1", "KILL"), ("program", "TERM"), ("program", "INT"), ("rank 0", "TERM"),
]  # fmt: skip
GOES_ON = [("program", "STOP"), ("proxy", "STOP"), ("rank 0", "STOP"), ("rank 1", "STOP")]


def attack(attack: Attack, seed: int) -> None:
    """Each process of the chain, killed or stopped."""
    from nanoeuler.engines.ranks.launch import launcher

    if find_spec("mpi4py") is None or launcher() is None:
        print("  left out: ranks, since there is no mpi4py or no launcher of MPI here")
        return
    (attack.folder / "t.txt").write_bytes((ROOT / "data" / "river.txt").read_bytes()[:6000])
    for number, (who, name) in enumerate(ENDS):
        out = attack.folder / f"ends-{number}"
        with Chain(out) as chain:
            fault = chain.signalled(who, name) or chain.all_end() or chain.goes_on()
        attack.count("all end", f"SIG{name} to the {who}", fault)
    out = attack.folder / "stopped"
    with Chain(out) as chain:  # one chain is stopped at every link, and goes on each time
        for who, name in GOES_ON:
            attack.count("all wait", f"SIG{name} to the {who}", chain.stopped(who))
        fault = chain.signalled("program", "TERM") or chain.all_end() or chain.goes_on()
    attack.count("all end", "SIGTERM after all that", fault)


class Chain:
    """A run of two ranks in the folder `out`, and the processes that it is."""

    def __init__(self, out: Path) -> None:
        self.out, self.log = out, open(f"{out}.log", "wb")
        begin = ["train", "--data", "t.txt", "--out", out, "--ranks", 2, "--steps", 1_000_000]
        self.program = self.begin(*begin, *TINY)
        self.steps_after(12, BEGUN)
        links = {"program": self.program.pid}
        for name, above in (("launcher", "program"), ("proxy", "launcher")):
            links[name] = children(links[above])[0]
        ranks = children(links["proxy"])
        self.links = links | {f"rank {number}": rank for number, rank in enumerate(ranks)}

    def begin(self, *args: object) -> subprocess.Popen:
        """The command line, in a process and a session of its own."""
        command = [sys.executable, "-m", "nanoeuler", *map(str, args)]
        return subprocess.Popen(command, cwd=self.out.parent, stdout=self.log, stderr=self.log,
                                start_new_session=True)  # fmt: skip

    def __enter__(self) -> "Chain":
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.links.values():
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)
        self.program.wait()
        self.log.close()

    def steps_after(self, count: int, seconds: float) -> bool:
        """Whether so many steps are taken within so many seconds."""
        before, until = self.steps(), time.monotonic() + seconds
        while self.steps() < before + count:
            if time.monotonic() > until or self.program.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def steps(self) -> int:
        """How many are in the metrics."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def signalled(self, who: str, name: str) -> str | None:
        """Send the signal; a fault if the chain was not there."""
        if len(self.links) != 5 or not all(map(is_there, self.links.values())):
            return f"it did not begin: {self.said()}"
        os.kill(self.links[who], signal.Signals[f"SIG{name}"])
        return None

    def all_end(self) -> str | None:
        """A fault if somebody is left, or the program says nothing, or too much."""
        until = time.monotonic() + ENDED
        while left := [name for name, pid in self.links.items() if is_there(pid)]:
            self.program.poll()
            if time.monotonic() > until:
                return f"{left} live on: {self.said()}"
            time.sleep(0.1)
        if "Traceback" in self.said():
            return f"traceback: {self.said()}"
        return None

    def goes_on(self) -> str | None:
        """A fault if one process cannot go on with the run, take steps, and save it."""
        self.program = self.begin("train", "--out", self.out, "--resume", "--engine", "cpu")
        self.links = {"program": self.program.pid}
        before, until = Path(self.log.name).stat().st_size, time.monotonic() + BEGUN
        while b"the run makes" not in Path(self.log.name).read_bytes()[before:]:
            if time.monotonic() > until or self.program.poll() is not None:
                return f"it does not go on: {self.said()}"
            time.sleep(0.05)
        self.program.terminate()
        self.program.wait(ENDED)
        return None if "is saved in" in self.said() else f"it is not saved: {self.said()}"

    def stopped(self, who: str) -> str | None:
        """Stop a process for a while: all wait, and go on with it."""
        if fault := self.signalled(who, "STOP"):
            return fault
        time.sleep(2.0)
        os.kill(self.links[who], signal.SIGCONT)
        return None if self.steps_after(3, ENDED) else f"it does not go on: {self.said()}"

    def said(self) -> str:
        """The end of what the program printed."""
        return Path(self.log.name).read_bytes()[-400:].decode("utf-8", "replace")


def children(pid: int) -> list[int]:
    """The processes that this one has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(each) for each in found.stdout.split()]


def is_there(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip()[:1] not in ("", "Z")
