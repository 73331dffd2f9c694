"""Jobs in a child process with a watch-dog: what breaks the child, or hangs, is named and left out.

A job is a string, and strings that differ are jobs that differ. `watch` starts a command, hands it
the jobs, and starts it anew for the rest where one took it along; that command calls `serve`.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

SILENCE = 40  # seconds without a line after which a child hangs
MARK = "\x1e"  # begins a line that is meant for the watch-dog; the others are printed


def say(**words: object) -> None:
    """A line for the watch-dog."""
    print(MARK + json.dumps(words), flush=True)


def alive() -> None:
    """In the child: a job that takes long says now and then that it does not hang."""
    say(alive=True)


def serve(do: Callable[[str], dict]) -> None:
    """In the child: do each job of standard input; its outcome is a dict of plain values.

    What raises has failed. After a RuntimeError, CUDA's, the child is of no more use and ends.
    """
    for job in json.load(sys.stdin):
        say(begin=job)
        try:
            outcome, over = do(job), False
        except Exception as error:
            outcome = {"failed": f"{type(error).__name__}: {error}"}
            over = isinstance(error, RuntimeError)
            if not isinstance(error, ValueError):  # that one says enough
                traceback.print_exc(file=sys.stdout)
        say(end=job, outcome=outcome)
        if over:
            sys.exit(1)


def lines_of(child: subprocess.Popen, silence: float) -> Iterator[str]:
    """Lines of a child's output, until it ends; TimeoutError where it is silent for too long."""
    lines = queue.Queue()

    def read():
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=silence)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def attempt(command: Sequence[str], jobs: list, tell: Callable, silence: float) -> dict:
    """Outcomes of as many of `jobs` as one child lives for; of none, if it never begins one."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with contextlib.suppress(BrokenPipeError), child.stdin:  # it may have died already
        child.stdin.write(json.dumps(jobs))
    outcomes, current, end = {}, None, "ended"
    try:
        for line in lines_of(child, silence):
            if not line.startswith(MARK):
                print(line, end="", flush=True)
                continue
            word = json.loads(line[1:])
            current = word.get("begin", current)
            if "end" in word:
                outcomes[word["end"]], current = word["outcome"], None
                tell(word["end"], word["outcome"])
    except TimeoutError:
        end = f"was silent for {silence} s"
    except BaseException:  # whoever watches is ended: nobody would hear the child
        child.kill()
        raise
    if end != "ended":
        child.kill()
    child.wait()
    if current is not None:
        outcomes[current] = {"failed": f"the process {end}, code {child.returncode}"}
        tell(current, outcomes[current])
    return outcomes


def watch(
    command: Sequence[str], jobs: Sequence[str], tell: Callable, silence: float = SILENCE
) -> dict[str, dict]:
    """Job -> outcome of every job; `tell(job, outcome)` as soon as there is one.

    An outcome is what `serve`'s function returns, or {"failed": why}.
    """
    outcomes, rest = {}, list(jobs)
    while rest:
        new = attempt(command, rest, tell, silence)
        if not new:
            new = {job: {"failed": "the process ended before it began a job"} for job in rest}
            tell(rest[0], new[rest[0]])
        outcomes |= new
        rest = [job for job in rest if job not in outcomes]
    return outcomes
