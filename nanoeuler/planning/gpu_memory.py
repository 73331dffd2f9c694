# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""How much GPU memory a training run takes on this machine, and whether it fits.

Leaves out the driver's own memory, and how long a step takes: a run times its first steps.
"""

import math
from functools import cache, partial

from nanoeuler.engines.gpu.host.device import Device, check
from nanoeuler.engines.gpu.lang.card import PRETENDED, in_words
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.step import backends, stepper
from nanoeuler.engines.gpu.step.lora import record_lora_step
from nanoeuler.engines.gpu.step.precision import PRECISIONS, Precision
from nanoeuler.engines.gpu.step.recording import Machine, record_step
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.lora import Lora
from nanoeuler.planning.cards import INSTEAD, OLDEST
from nanoeuler.planning.lora import lora_host_bytes
from nanoeuler.planning.step import RULES

# Bytes of host memory per parameter: its weight and two moments in float32, twice: once in the
# run, and once on the way from the card.
HOST_BYTES = 2 * 3 * 4
# Bytes of GPU memory for what no launch sequence lists, the code of kernels and library: a guess.
SPARE = 200e6


def step_bytes(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None,
    recompute: bool = False,
) -> int:  # fmt: skip
    """The bytes that a step takes on this machine's GPU, by an engine of `registry.GPU_ENGINES`.

    lora: a settled `Lora`, if only adapters are trained. recompute: whether the backward pass runs
    each block again. UserError if the engine does not support the model.
    """
    card = stepper.gpu().card
    machine = Machine(*card[:2], backends.multiplier(), card.l2)
    precision = PRECISIONS[engine]._replace(recompute=recompute)
    return program_bytes(config, batch_size, accumulate, precision, lora, machine)


@cache
def program_bytes(
    config: ModelConfig, batch_size: int, accumulate: int, precision: Precision, lora: Lora | None,
    machine: Machine,
) -> int:  # fmt: skip
    """The same on any card. A run asks twice: whether a step fits, and when it says its plan."""
    record = partial(record_lora_step, lora) if lora else record_step
    program = record(config, batch_size, config.context, machine, precision, RULES,
                     accumulate).program  # fmt: skip
    return sum(program.sizes.values())


def in_parts(
    config: ModelConfig, batch_size: int, parts: int, engine: str, lora: Lora | None = None,
    recompute: bool = False,
) -> int:  # fmt: skip
    """`step_bytes` of a batch in parts, without the tokens of the third and later ones.

    Those reuse the memory of the second, and recording very many parts would take long.
    """
    few = min(parts, 2)
    return step_bytes(config, few * cover(batch_size, parts), few, engine, lora, recompute)


def fitting(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None,
    recompute: bool = False,
) -> tuple[int, bool]:  # fmt: skip
    """In how many parts, at least `accumulate`, a batch fits into the GPU's free memory.

    And whether the backward pass runs each block again: if it's asked for (`recompute`), or if a
    single sequence doesn't fit otherwise, since parts cost less time (chapter 13a). Doubles the
    parts until they fit, down to a sequence each; UserError if that doesn't fit either way.
    """
    card = stepper.gpu()
    free, whole = check(card.driver.cuMemGetInfo())
    for again in [True] if recompute else [False, True]:
        parts, size = accumulate, math.inf
        while (size := in_parts(config, batch_size, parts, engine, lora, again)) > free - SPARE:
            if parts >= batch_size:
                break
            parts = min(2 * parts, batch_size)
        else:
            return parts, again
    raise UserError(
        f"a step of {batch_size} x {config.context} tokens, one sequence at a time and with "
        f"--recompute, takes {size / 1e9:.2f} GB of the GPU's memory, and {card.name} has "
        f"{free / 1e9:.2f} of its {whole / 1e9:.2f} GB free: choose a smaller model or a shorter "
        "context"
    )


def host_bytes(config: ModelConfig, lora: Lora | None = None) -> int:
    """The bytes of this machine's memory that a run on its GPU takes; lora: settled."""
    if lora:
        return lora_host_bytes(config, lora)
    return HOST_BYTES * count_parameters(config)


def disguise(card: Device) -> str:
    """Which other card a GPU pretends to be, as the end of a line; "" if it doesn't."""
    if card.card == card.real:
        return ""
    return f"; {PRETENDED} has it pretend to be a card of {in_words(card.card)}"


def words(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None,
    recompute: bool = False,
) -> str:  # fmt: skip
    """The memory that a run takes on the GPU and on this machine, for a line of its plan."""
    size = step_bytes(config, batch_size, accumulate, engine, lora, recompute)
    host = host_bytes(config, lora)
    card = stepper.gpu()
    rooms = f"{size / 1e9:.2f} GB of the {card.name}, {host / 1e9:.2f} of this machine"
    if accumulate > 1:
        rooms += f", each batch in {accumulate} parts"
    rooms += ", blocks run again in the backward pass" * recompute
    return f"{rooms}; {backends.multiplier().words}{disguise(card)}"


def found() -> str:
    """The GPU of this machine and its limits in words, for the doctor."""
    card = stepper.gpu()
    free, whole = check(card.driver.cuMemGetInfo())
    major, minor = card.real.capability
    text = f"{card.name}, compute capability {major}.{minor}, {free / 1e9:.1f} of "
    text += f"{whole / 1e9:.1f} GB free"
    if others := [f"{n} is {name}" for n, name in card.others().items()]:
        text += f" ({card.number} of several, {', '.join(others)}: {stepper.NUMBER} selects one)"
    if (major, minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{text}; too old for our engines, which need {oldest}: {INSTEAD}"
    return f"{text}; --engine cuda trains on it, {backends.multiplier().words}{disguise(card)}"
