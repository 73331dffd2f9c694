# Made from book/14a-gradients-between-gpus.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-exchange-predicted
"""What a training step over several GPUs takes: when each exchange runs, what of it is exposed.

Left out: that launches and exchanges take multiprocessors and bandwidth from each other; several
machines.
"""

from typing import NamedTuple

from nanoeuler.engines.gpu.ranks.exchange import ATTENTION, Exchange, Join, RankStepBuilder
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.program import Program
from nanoeuler.engines.gpu.step.recording import Machine
from nanoeuler.engines.registry import GPU_ENGINES
from nanoeuler.model.config import ModelConfig
from nanoeuler.planning.ranks import NVLINK, Link
from nanoeuler.planning.step import H200, RULES, Speeds, seconds


class Rank(NamedTuple):
    """A rank, as far as recording goes."""

    rank: int
    size: int
    copies: bool = False


class Span(NamedTuple):
    """Work of a list, and when it runs: seconds from the step's beginning."""

    name: str
    beside: bool  # on the stream of exchanges
    start: float
    end: float


def travels(work: Exchange, wire: Link, size: int) -> float:
    """Seconds of an exchange: all but a rank's own part of the whole comes over the wire."""
    whole = sum(max(given.nbytes, to.nbytes) for given, to in work.pairs())
    return wire.latency_s + whole * (size - 1) / size / wire.bytes_per_s


def timeline(program: Program, size: int, speeds: Speeds, wire: Link, pieces: int) -> list[Span]:
    """When everything on a rank's list runs. pieces: of float32, in what is multiplied."""
    main, side, spans = 0.0, 0.0, []
    for step in program.steps:
        work = step.launch
        if isinstance(work, Join):
            main = max(main, side)
        elif isinstance(work, Exchange):
            begin = max(main, side)
            side = begin + travels(work, wire, size)
            spans.append(Span(step.name, True, begin, side))
        else:
            end = main + seconds(step, speeds, pieces)
            spans.append(Span(step.name, False, main, end))
            main = end
    return spans


def rank_program(
    config: ModelConfig, batch_size: int, size: int, engine: str = GPU_ENGINES[0],
    when: str = ATTENTION, machine: Machine = H200.machine,
) -> Program:  # fmt: skip
    """The list of one of `size` ranks, for batch_size sequences of its own."""
    builder = RankStepBuilder(config, machine, PRECISIONS[engine], Rank(0, size), when)
    return builder.build_step(batch_size, config.context, RULES).program


class RankStepPrediction(NamedTuple):
    """Of a rank's step: seconds in all, those in which only exchanges run, bytes of memory."""

    seconds: float
    exposed: float
    memory: int


def predict_rank_step(
    config: ModelConfig, batch_size: int, size: int, engine: str = GPU_ENGINES[0],
    when: str = ATTENTION, speeds: Speeds = H200, wire: Link = NVLINK,
) -> RankStepPrediction:  # fmt: skip
    """What a step takes of each of `size` GPUs with batch_size sequences each."""
    program = rank_program(config, batch_size, size, engine, when, speeds.machine)
    spans = timeline(program, size, speeds, wire, PRECISIONS[engine].pieces)
    works = sum(span.end - span.start for span in spans if not span.beside)
    end = max(span.end for span in spans)
    return RankStepPrediction(end, end - works, sum(program.sizes.values()))
