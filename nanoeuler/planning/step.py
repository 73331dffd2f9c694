# Made from book/09b-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-prediction
"""What the list of a training step takes on a GPU: its memory, exactly, and its time, predicted.

Left out: the driver's own memory, the host's time (which runs beside the device's).
"""

from typing import NamedTuple

from nanoeuler.engines.choice import GPU_ENGINES
from nanoeuler.engines.gpu.primitives import PRECISIONS
from nanoeuler.engines.gpu.program import Program, Step
from nanoeuler.engines.gpu.step import Machine, Rules, record_step
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig

MOST_LAYERS = 200  # a list is written in about a second
RULES = Rules(1.0, 0.9, 0.98, 1e-8)  # those of chapter 6d; a step costs the same with others


class Speeds(NamedTuple):
    """How fast a GPU's kernels were measured to be, each alone."""

    machine: Machine
    products: float   # FLOPs a second, of bf16
    attention: float  # of its products, forward and backward together
    scalar: float     # of the same in float32, without tensor cores
    bytes: float      # a second, of kernels that do little else than move them
    launch: float     # seconds from the end of one to the beginning of the next, in a graph


# Rows of data/measurements/kernels.json, rounded: products of a step's shapes reach 460 to 670
# TFLOP/s, attention 250 to 330, its float32 kernels 1 to 1.4, a copy 4.3 TB/s; and 1.2 us a launch
# in a graph.
H200 = Speeds(Machine((9, 0), 132), 600e12, 270e12, 1.2e12, 4.2e12, 1.2e-6)


def seconds(step: Step, speeds: Speeds) -> float:
    """What a launch takes: its products or its bytes, whichever is longer."""
    rate = speeds.products
    if step.name.startswith("attention"):
        narrow = not step.launch.kernel.function.__module__.endswith(".flash")
        rate = speeds.attention if narrow else speeds.scalar
    return max(step.flops / rate, step.nbytes / speeds.bytes) + speeds.launch


def table(program: Program, speeds: Speeds) -> list[tuple[str, int, float]]:
    """(name, launches, seconds) of what a list does, the longest first."""
    rows: dict[str, tuple[int, float]] = {}
    for step in program.steps:
        name = step.name.split(".")[-1]
        count, spent = rows.get(name, (0, 0.0))
        rows[name] = count + 1, spent + seconds(step, speeds)
    made = [(name, count, spent) for name, (count, spent) in rows.items()]
    return sorted(made, key=lambda row: -row[2])


def report(config: ModelConfig, batch_size: int, speeds: Speeds = H200) -> str:
    """A line for each engine of a GPU: launches, memory, time. Says where an engine cannot."""
    if config.n_layers > MOST_LAYERS:
        return f"the lists of more than {MOST_LAYERS} layers are long: none was written"
    lines, sizes = [], (config, batch_size, config.context, speeds.machine)
    for engine in GPU_ENGINES:
        try:
            program = record_step(*sizes, PRECISIONS[engine], RULES).program
        except UserError as error:
            lines.append(f"{engine:13} {error}")
            continue
        size = sum(program.sizes.values()) / 1e9
        took = sum(seconds(step, speeds) for step in program.steps)
        lines.append(f"{engine:13} {len(program.steps):8,} {size:10.3f} {1e3 * took:13,.2f}")
    return "\n".join(["engine        launches  memory GB    h200, ms", *lines])
