"""Measure guessing ahead with a trained model: `python tests/bench/ahead.py RUN NAME`.

RUN is a run directory (or its best/), NAME what the rows call the model. Prompts are of the
held-out side of --data, a prepared folder: RUN/data if nothing is said. Each text is written
plainly and with 1, 2, ... guesses a round, in turn, at temperature 0 and 1: how many tokens a pass
yields, how many guesses of each head are kept, how much faster it is. And what a pass over several
tokens takes beside one over a single token. All on this machine's processor, by `CpuReader`.

Rows of data/measurements/talking.json, and of $OUT/ahead-NAME.json where that is set.
--commit, --device: what rows say where git cannot, or where that is another machine.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from nanoeuler import measurements
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.shards import windows
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Decoder, generate
from nanoeuler.inference.speculative import Count, generate_ahead, new_count
from nanoeuler.training.checkpoint import load_model

PROMPT = 32  # tokens
TEMPERATURES = 0.0, 1.0  # greedy, and what the model itself says
PASSES = 15  # of each number of tokens, timed in turn
Told = tuple[str, str, float, str, str | None, float | None]  # what, case, value, unit, peer


class Seen(NamedTuple):
    """What became of texts with so many guesses a round."""

    count: Count
    plain: float  # tokens a second
    ahead: float


def prompts_of(tokens: np.ndarray, count: int) -> list[list[int]]:
    """So many beginnings of PROMPT tokens, spread over a text."""
    starts = np.linspace(0, len(tokens) - PROMPT, count).astype(np.int64)
    return [row.tolist() for row in windows(tokens, starts, PROMPT)]


def written(reader: CpuReader, weights, prompts, n, guesses, temperature, rounds) -> Seen:
    """Write `n` tokens after each prompt, plainly and guessing; the fastest of the rounds counts.

    What else a machine does can only add to a time.
    """
    count, seconds, tokens = new_count(reader.config.n_predict - 1), [0.0, 0.0], [0, 0]
    for seed, prompt in enumerate(prompts):
        sampling = {"temperature": temperature, "top_p": 1.0, "seed": seed}
        times = [[], []]
        for again in range(rounds):
            counted = count if not again else None
            ways = (
                generate(Decoder(reader.config, weights, reader), prompt, n, **sampling),
                generate_ahead(Decoder(reader.config, weights, reader), prompt, n, count=counted,
                               guesses=guesses, **sampling),
            )  # fmt: skip
            for i, way in enumerate(ways):
                next(way)  # reads the prompt, whose time is not counted
                began = time.perf_counter()
                new = len(list(way))
                times[i].append(time.perf_counter() - began)
                tokens[i] += new if not again else 0
        seconds = [s + min(each) for s, each in zip(seconds, times, strict=True)]
    return Seen(count, *(t / s for t, s in zip(tokens, seconds, strict=True)))


def passes(reader: CpuReader, ids: list[int]) -> list[float]:
    """Seconds of a pass over 1, 2, ... K tokens, all behind a PROMPT."""
    sizes = range(1, reader.config.n_predict + 1)
    seconds = {size: [] for size in sizes}
    reader.read([ids[:PROMPT]], [0])
    for _ in range(PASSES):
        for size in sizes:
            began = time.perf_counter()
            reader.read([ids[:size]], [PROMPT], rows=size, heads=size)
            seconds[size].append(time.perf_counter() - began)
    return [min(each) for each in seconds.values()]


def told(name: str, reader: CpuReader, weights, prompts, n, rounds) -> Iterator[Told]:
    """What is known of a model, as it becomes known."""
    most = reader.config.n_predict - 1
    one, *more = passes(reader, prompts[0])
    yield "pass", f"{name}, 1 token", 1e3 * one, "ms", None, None
    for size, seconds in enumerate(more, 2):
        yield "pass", f"{name}, {size} tokens", 1e3 * seconds, "ms", "1 token", 1e3 * one
    for temperature in TEMPERATURES:
        case = f"{name}, temperature {temperature:g}"
        for guesses in range(1, most + 1):
            seen = written(reader, weights, prompts, n, guesses, temperature, rounds)
            this, count = f"{case}, {guesses} guessed", seen.count
            yield "guessing ahead", this, seen.ahead, "tokens/s", "plain", seen.plain
            # a text's first token needs no pass but the prompt's
            rate = (count.tokens - len(prompts)) / count.passes
            yield "tokens a pass", this, rate, "tokens", None, None
        for head, (made, kept) in enumerate(zip(count.made, count.kept, strict=True), 1):
            yield "guesses kept", f"{case}, head {head}", kept / max(1, made), "share", None, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, help="a prepared folder, if not RUN/data")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--rounds", type=int, default=3, help="of each text, of which one counts")
    parser.add_argument("--threads", type=int, help="as many as the package takes, if not given")
    commit = measurements.commit() if shutil.which("git") else ""
    parser.add_argument("--commit", default=commit)
    parser.add_argument("--device", default=measurements.device())
    options = parser.parse_args()
    config, tokenizer, weights = load_model(options.run)
    books = Prepared(options.data or options.run / "data")
    if books.tokenizer.hash != tokenizer.hash:
        raise UserError(f"expected data in the tokens of {options.run}, got others: name its own")
    reader = CpuReader(config, weights, threads=options.threads)
    prompts = prompts_of(books.held_out, options.texts)
    for warm in generate, generate_ahead:  # what is compiled, is so before it is timed
        list(islice(warm(Decoder(config, weights, reader), prompts[0], 8), 8))
    rows = []
    for what, case, *numbers in told(
        options.name, reader, weights, prompts, options.tokens, options.rounds
    ):
        print(f"{what}, {case}: {numbers[0]:.4g} {numbers[1]}", flush=True)
        rows.append(row(options, what, case, *numbers))
        save(rows, options.name)


def row(options, what, case, value, unit, peer, peer_value) -> measurements.Row:
    """A row of the book; it must not ask git, which a lent machine may lack."""
    versions = {"python": platform.python_version(), "numpy": np.__version__,
                "numba": numba.__version__}  # fmt: skip
    return {
        "what": what, "case": case, "engine": "cpu", "value": float(f"{value:.4g}"), "unit": unit,
        "peer": peer, "peer_value": peer_value and float(f"{peer_value:.4g}"),
        "device": options.device, "versions": versions, "commit": options.commit,
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def save(rows: list[measurements.Row], name: str) -> None:
    """Put rows where they belong, and where $OUT says."""
    if os.environ.get("OUT"):
        path = Path(os.environ["OUT"]) / f"ahead-{name}.json"
        path.write_text(json.dumps(rows, indent=0), encoding="utf-8")
    try:
        measurements.update("talking", rows)
    except UserError as error:  # a copy without the book has no place for them
        print(error)


if __name__ == "__main__":
    sys.exit(main())
