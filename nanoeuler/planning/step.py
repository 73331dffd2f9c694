# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-prediction
"""What the list of a training step takes on a GPU: its memory, exactly, and its time, predicted.

Left out: the driver's own memory, the host's time (which runs beside the device's).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from nanoeuler import measurements
from nanoeuler.engines.gpu.gemm.float32 import PAIRS
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.step.precision import PRECISIONS, Precision
from nanoeuler.engines.gpu.step.program import Program, Step
from nanoeuler.engines.gpu.step.recording import Machine, Recorded, Rules, record_step
from nanoeuler.engines.registry import GPU_ENGINES
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.planning.cards import CARDS, Card, known, unsupported

MOST_LAYERS = 200  # a list is written in seconds, in float32 in half a minute
MOST_TOKENS = 1 << 24  # of a step: its tables of tiles grow with them. GPT-3's had 3.2 million
RULES = Rules(1.0, 0.9, 0.98, 1e-8)  # those of chapter 7; a step costs the same with others


class Speeds(NamedTuple):
    """How fast a GPU's kernels were measured to be, each alone."""

    machine: Machine
    products: dict[str, float]   # FLOPs a second, by what is multiplied
    attention: dict[int, float]  # of its products, forward and backward together, by pieces
    bytes: float                 # a second, of kernels that do little else than move them
    launch: float                # seconds, in a graph, of a kernel that does next to nothing


# Rows of data/measurements, rounded: products of a step's shapes reach 370 to 650 TFLOP/s alone,
# attention 245 to 320, a copy 4.2 TB/s. From no row of them: 1.2 us a launch in a graph; attention
# in two pieces, and half as fast in three; the library's tf32 and float32, which have the data
# sheet's dense peaks, times the share of its peak that bf16 reaches.
H200 = Speeds(
    Machine((9, 0), 132, l2=int(CARDS["h200"].l2_bytes)),
    {"bf16": 600e12, "tf32": 300e12, "float32": 40e12},
    {1: 270e12, 2: 60e12, 3: 30e12}, 4.2e12, 1.2e-6,
)  # fmt: skip
# How often a launch moves the bytes that `nbytes` counts, where it is not once. AdamW reads and
# writes all but the gradient: 28 bytes of 16. Cross-entropy reads logits twice and writes them,
# partly from the L2 cache: measured. Of euler-116m's 20 heads RoPE reads and writes 16; norms of
# heads move 16 three times, where 20 + 16 are counted. The clears and sums name a long buffer and
# touch little of it.
PASSES = {
    "AdamW": 28 / 16, "cross-entropy": 2.3, "rope": 1.6, "rope backward": 1.6, "clear": 0.0,
    "sums of norms": 0.1, "norm of heads": 4 / 3, "norm of heads, backward": 4 / 3,
}  # fmt: skip


def seconds(step: Step, speeds: Speeds, pieces: int = 1) -> float:
    """What a launch takes: its products or its bytes, whichever is longer.

    pieces: of float32, in what is multiplied (`precision.Precision`).
    """
    name, theirs = step.name.split(".")[-1], getattr(step.launch, "compute", "")
    if name.startswith("attention"):
        rate = speeds.attention[pieces]
    elif theirs:  # the library's
        rate = speeds.products[theirs]
    else:
        rate = speeds.products["bf16"] / len(PAIRS[pieces])
    passes = PASSES.get(name, 1.0)
    return max(step.flops / rate, passes * step.nbytes / speeds.bytes) + speeds.launch


def table(program: Program, speeds: Speeds, pieces: int = 1) -> list[tuple[str, int, float]]:
    """(name, launches, seconds) of what a list does, the longest first."""
    rows: dict[str, tuple[int, float]] = {}
    for step in program.steps:
        name = step.name.split(".")[-1]
        count, spent = rows.get(name, (0, 0.0))
        rows[name] = count + 1, spent + seconds(step, speeds, pieces)
    made = [(name, count, spent) for name, (count, spent) in rows.items()]
    return sorted(made, key=lambda row: -row[2])


class StepPrediction(NamedTuple):
    """Of a training step: launches, seconds, and bytes of the device's memory."""

    launches: int
    seconds: float
    bytes: int


def predict_step(
    config: ModelConfig, batch_size: int, engine: str, speeds: Speeds = H200,
    record: Callable[..., Recorded] = record_step,
) -> StepPrediction:  # fmt: skip
    """What a step of an engine takes, by its list; UserError where the engine cannot make it.

    record: what writes the list.
    """
    kind = PRECISIONS[engine]
    given = config, batch_size, config.context, speeds.machine, kind, RULES
    program = record(*given).program
    took = sum(seconds(step, speeds, kind.pieces) for step in program.steps)
    return StepPrediction(len(program.steps), took, sum(program.sizes.values()))


def too_long(config: ModelConfig, batch_size: int) -> str:
    """Why no list is written for a step, in words; "" if one is."""
    if config.n_layers > MOST_LAYERS:
        return f"the lists of more than {MOST_LAYERS} layers are long: none was written"
    if batch_size * config.context > MOST_TOKENS:
        return f"the lists of more than {MOST_TOKENS:,} tokens a step are long: none was written"
    return ""


def report(config: ModelConfig, batch_size: int, speeds: Speeds = H200) -> str:
    """A line for each engine of a GPU: launches, memory, time. Says where an engine cannot."""
    if reason := too_long(config, batch_size):
        return reason
    lines = []
    for engine in GPU_ENGINES:
        try:
            made = predict_step(config, batch_size, engine, speeds)
        except UserError as error:
            lines.append(f"{engine:13} {error}")
            continue
        figures = f"{made.launches:8,} {made.bytes / 1e9:10.3f} {1e3 * made.seconds:13,.2f}"
        lines.append(f"{engine:13} {figures}")
    return "\n".join(["engine        launches  memory GB    h200, ms", *lines])


# %% sec-step-cards
def speeds_of(card: Card) -> Speeds:
    """A card's speeds: of its peaks the shares that an H200 reaches of its own."""
    h200 = CARDS["h200"]
    faster, wider = card.flops_per_s / h200.flops_per_s, card.bytes_per_s / h200.bytes_per_s
    return Speeds(
        Machine(card.capability, card.multiprocessors, l2=int(card.l2_bytes)),
        {kind: rate * faster for kind, rate in H200.products.items()},
        {pieces: rate * faster for pieces, rate in H200.attention.items()},
        H200.bytes * wider, H200.launch,
    )  # fmt: skip


# What the rows of data/measurements call the engines, and steps with no product of a library.
KINDS = dict(zip(GPU_ENGINES, ("bf16", "TF32", "float32"), strict=True))
OWN = "cuda, own products"  # as tests/bench/step.py names them


def measured(key: str, config: ModelConfig, batch_size: int, engine: str) -> float | None:
    """The seconds of this very step as they were measured on CARDS[key]; None if they were not."""
    preset = next((name for name, each in PRESETS.items() if each == config), None)
    case = f"{preset} {batch_size}x{config.context} {KINDS[engine]}"
    wanted = ("training step", case, OWN, None, f"NVIDIA {CARDS[key].name}")
    try:
        rows = measurements.load("gpu")
    except UserError:  # not in a checkout
        return None
    fields = ("what", "case", "engine", "peer", "device")
    found = (row["value"] / 1e3 for row in rows if tuple(map(row.get, fields)) == wanted)
    return next(found, None)


def bytes_in_parts(
    config: ModelConfig, batch_size: int, engine: str, record: Callable[..., Recorded] = record_step
) -> Callable[[int], int]:
    """A function: in how many parts, two or more, a batch goes through memory -> bytes it takes.

    Recorded for an H200; other cards differ by a few per cent. From the second part on all use the
    same memory, so a list of two parts is as large as one of many.
    """

    @cache
    def size(parts: int) -> int:
        shape = 2 * cover(batch_size, parts), config.context
        program = record(config, *shape, H200.machine, PRECISIONS[engine], RULES, 2).program
        return sum(program.sizes.values())

    return size


def parts_for(batch_size: int, size: Callable[[int], int], room: float) -> int | None:
    """The fewest of 2, 4, ... parts of a batch, one a sequence at most, that fit `room` bytes."""
    parts = 1
    while parts < batch_size:
        parts = min(2 * parts, batch_size)
        if size(parts) <= room:
            return parts
    return None


def run_again(record: Callable[..., Recorded]) -> Callable[..., Recorded]:
    """The same that writes a list in which the backward pass runs each block again."""

    def write(
        config: ModelConfig, B: int, T: int, machine: Machine, precision: Precision, *rest: Any
    ) -> Recorded:
        return record(config, B, T, machine, precision._replace(recompute=True), *rest)

    return write


class _Way(NamedTuple):
    record: Callable[..., Recorded]
    size: Callable[[int], int]  # `bytes_in_parts`
    how: str                    # in words

    @classmethod
    def of(
        cls, config: ModelConfig, batch_size: int, engine: str, record: Callable[..., Recorded],
        how: str = "",
    ) -> "_Way":  # fmt: skip
        return cls(record, bytes_in_parts(config, batch_size, engine, record), how)


def _line(key: str, config: ModelConfig, batch_size: int, engine: str, ways: list[_Way]) -> str:
    """What a step takes on CARDS[key], in a line, by the first of these ways that fits there."""
    card = CARDS[key]
    if not card.supported:
        return f"{key:12} {unsupported(card)}"
    found = []
    for way in ways:
        try:
            made = predict_step(config, batch_size, engine, speeds_of(card), way.record)
        except UserError as error:
            return f"{key:12} {error}"
        room = card.memory_bytes
        parts = 1 if made.bytes <= room else parts_for(batch_size, way.size, room)
        found.append((made, way, parts))
        if parts:
            break
    made, way, parts = found[-1] if parts else found[0]
    timed = measured(key, config, batch_size, engine) if way.record is record_step else None
    seconds, how = (timed, known(key)) if timed else (made.seconds, "estimated")
    fits = {None: "no", 1: "yes"}.get(parts, f"in {parts}")
    speed = batch_size * config.context / seconds
    return (f"{key:12} {made.launches:8,} {made.bytes / 1e9:10.3f} {fits:>5} "
            f"{1e3 * seconds:10,.2f} {speed:11,.0f}  {how}{way.how}")  # fmt: skip


def on_cards(
    config: ModelConfig, batch_size: int, engine: str,
    record: Callable[..., Recorded] = record_step, recompute: bool = False,
) -> str:  # fmt: skip
    """A line for each of CARDS: what a step by an engine of a GPU takes, and how that is known.

    Memory is that of a whole batch. Where it doesn't fit, the line says in how many parts it does.
    If not even a sequence does, or with `recompute`, it's of a step that runs blocks again.
    """
    if reason := too_long(config, batch_size):
        return reason
    title = f"{engine:12} launches  memory GB  fits    step ms    tokens/s"
    given = config, batch_size, engine
    ways = [_Way.of(*given, record), _Way.of(*given, run_again(record), ", --recompute")]
    lines = (_line(key, *given, ways[recompute:]) for key in CARDS)
    return "\n".join([title, *lines])
