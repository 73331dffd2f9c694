# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face
"""What a training run takes of the GPU of this machine, and whether there is room for it.

Leaves out the driver's own memory, and how long a step takes: a run's first steps tell.
"""

from functools import partial

from nanoeuler.engines.gpu.host.device import Device, check
from nanoeuler.engines.gpu.lang.card import PRETENDED, in_words
from nanoeuler.engines.gpu.step import backends, stepper
from nanoeuler.engines.gpu.step.lora import record_lora_step
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.recording import Machine, record_step
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.lora import Lora
from nanoeuler.planning.cards import INSTEAD, OLDEST
from nanoeuler.planning.lora import lora_host_bytes
from nanoeuler.planning.step import RULES

# Of the host's memory, for a parameter: its weight and two moments in float32, twice: the run's,
# and what is on its way from the card.
HOST_BYTES = 2 * 3 * 4


def step_bytes(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None
) -> int:
    """The bytes that a step of an engine of `registry.GPU_ENGINES` takes of this machine's GPU.

    lora: of adapters alone, settled. UserError where that engine cannot take it.
    """
    card, shape = stepper.gpu(), (batch_size, config.context)
    machine = Machine(*card.card[:2], backends.multiplier(), card.card.l2)
    record = partial(record_lora_step, lora) if lora else record_step
    program = record(config, *shape, machine, PRECISIONS[engine], RULES, accumulate).program
    return sum(program.sizes.values())


def check_room(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None
) -> None:
    """UserError, naming the largest batch that fits, if a step does not fit into the GPU."""
    card = stepper.gpu()
    free, whole = check(card.driver.cuMemGetInfo())
    size = step_bytes(config, batch_size, accumulate, engine, lora)
    if size <= free:
        return
    fits, above = 0, batch_size
    while above - fits > 1:
        middle = (fits + above) // 2
        if step_bytes(config, middle, accumulate, engine, lora) <= free:
            fits = middle
        else:
            above = middle
    cure = f"a batch_size of at most {fits}, or a larger accumulate" if fits else "a smaller model"
    raise UserError(
        f"a step of {batch_size} x {config.context} tokens takes {size / 1e9:.2f} GB of the GPU's "
        f"memory, and {card.name} has {free / 1e9:.2f} of its {whole / 1e9:.2f} GB free: choose "
        f"{cure}"
    )


def host_bytes(config: ModelConfig, lora: Lora | None = None) -> int:
    """The bytes of this machine's memory that a run on its GPU takes; lora: settled."""
    if lora:
        return lora_host_bytes(config, lora)
    return HOST_BYTES * count_parameters(config)


def disguise(card: Device) -> str:
    """Which other card a GPU pretends to be, as the end of a line; "" if none."""
    if card.card == card.real:
        return ""
    return f"; {PRETENDED} has it pretend to be a card of {in_words(card.card)}"


def words(
    config: ModelConfig, batch_size: int, accumulate: int, engine: str, lora: Lora | None = None
) -> str:
    """The memory that a run takes, of the GPU and of this machine, for a line of its plan."""
    size = step_bytes(config, batch_size, accumulate, engine, lora)
    host = host_bytes(config, lora)
    card = stepper.gpu()
    rooms = f"{size / 1e9:.2f} GB of the {card.name}, {host / 1e9:.2f} of this machine"
    return f"{rooms}; {backends.multiplier().words}{disguise(card)}"


def found() -> str:
    """The GPU of this machine in words, for the doctor, and what it cannot do."""
    card = stepper.gpu()
    free, whole = check(card.driver.cuMemGetInfo())
    major, minor = card.real.capability
    text = f"{card.name}, compute capability {major}.{minor}, {free / 1e9:.1f} of "
    text += f"{whole / 1e9:.1f} GB free"
    if others := [f"{n} is {name}" for n, name in card.others().items()]:
        text += f" ({card.number} of several, {', '.join(others)}: {stepper.NUMBER} takes another)"
    if (major, minor) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{text}; too old for our engines, which need {oldest}: {INSTEAD}"
    return f"{text}; --engine cuda trains on it, {backends.multiplier().words}{disguise(card)}"
