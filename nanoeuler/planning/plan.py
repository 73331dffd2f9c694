# Made from book/13-training-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-plan-cards
"""Before training: hours and memory, on a device by its datasheet, or on this processor.

Left out: the time to launch kernels, to move data between devices, and to load the text. Letters
as in counts.py, which counts what is timed here.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import NamedTuple

from nanoeuler.engines.cpu.memory import aligned
from nanoeuler.engines.cpu.options import LOSS_ROWS
from nanoeuler.engines.cpu.stepper import cores, gradients_held, shards
from nanoeuler.engines.gpu.lang.card import PRETENDED, in_words, pretended
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.planning.cards import CARDS, unsupported
from nanoeuler.planning.counts import (
    MASTER_BYTES,
    Operation,
    flops_per_token,
    memory,
    operations,
    stages,
)

LARGEST = 2**63 - 1  # sequences or tokens that are counted: what 64 bits with a sign hold
YEAR = 365.25 * 86400  # seconds


class Device(NamedTuple):
    """A processor as its datasheet has it: peaks that a program approaches and never reaches."""

    flops_per_s: float   # dense matrix products in the format of value_bytes, summed in float32
    bytes_per_s: float   # between the processor and its memory
    memory_bytes: float
    value_bytes: int     # 2: bfloat16 on tensor cores, 4: float32


# Two cores, 3 GHz, two fused multiply-adds of 8 float32 a cycle (AVX2): the chapter's opening has
# the same. Two channels of DDR4-3200.
LAPTOP = Device(2 * 3e9 * 2 * 8 * 2, 2 * 8 * 3.2e9, 16e9, 4)
# It, and every card on which our engines run.
DEVICES = {"laptop": LAPTOP} | {
    key: Device(card.flops_per_s, card.bytes_per_s, card.memory_bytes, 2)
    for key, card in CARDS.items() if card.supported
}  # fmt: skip


def floor_seconds(operation: Operation, device: Device) -> float:
    """The least time (s) the datasheet allows for an operation. Equation eq-plan-roofline."""
    return max(operation.flops / device.flops_per_s, operation.bytes / device.bytes_per_s)


# %% sec-plan-hours
# Training tokens per parameter: near the optimum found by Hoffmann and others (2022, table 3).
TOKENS_PER_PARAMETER = 20
# Assumed for every card, measured or not: Llama 3 405B reached 38 to 43 % (Llama Team, 2024,
# table 4).
UTILISATION = 0.4
BATCH_SIZE = 16  # sequences in a step: the default of a run


class Estimate(NamedTuple):
    """What training a configuration on a device takes, by `estimate`."""

    memory_bytes: float
    fits: bool
    floor_s: float        # every operation at its roofline, and none fused, which could save some
    step_s: float         # predicted, at the given utilisation
    tokens_per_s: float
    hours: float          # for all the tokens


def estimate(
    config: ModelConfig, device: str, batch_size: int = BATCH_SIZE, tokens: int | None = None,
    utilisation: float = UTILISATION,
) -> Estimate:  # fmt: skip
    """Predict training on DEVICES[device].

    `tokens` defaults to 20 per parameter. `utilisation` is the MFU assumed for the whole step:
    its products' FLOPs over its time and the peak. No step is predicted to beat its floor.
    UserError for an unknown device, and for numbers that cannot be.
    """
    if device not in DEVICES:
        raise UserError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    if not 0 < utilisation <= 1:
        raise UserError(f"expected a utilisation above 0 and at most 1, got {utilisation}")
    if batch_size < 1 or (tokens is not None and tokens < 1):
        raise UserError(f"expected at least 1 sequence and 1 token, got {batch_size} and {tokens}")
    if max(batch_size, tokens or 1) > LARGEST:  # which may have too many digits to be printed
        raise UserError(f"expected at most {LARGEST} sequences and tokens, got more: choose fewer")
    tokens = TOKENS_PER_PARAMETER * count_parameters(config) if tokens is None else tokens
    d, step_tokens = DEVICES[device], batch_size * config.context
    needed = sum(memory(config, batch_size, d.value_bytes).values())
    floor_s = sum(floor_seconds(op, d) for op in operations(config, batch_size, d.value_bytes))
    products_s = step_tokens * flops_per_token(config) / d.flops_per_s
    step_s = max(floor_s, products_s / utilisation)
    speed = step_tokens / step_s
    return Estimate(needed, needed <= d.memory_bytes, floor_s, step_s, speed, tokens / speed / 3600)


def report(
    config: ModelConfig, batch_size: int = BATCH_SIZE, tokens: int | None = None,
    utilisation: float = UTILISATION,
) -> str:  # fmt: skip
    """The plan of a configuration as text: FLOPs, memory, and a line for each device.

    All times are estimates: the roofline's floor, and the whole step at an MFU of `utilisation`.
    """
    rows = [(name, estimate(config, name, batch_size, tokens, utilisation)) for name in DEVICES]
    n, step_tokens = count_parameters(config), batch_size * config.context
    tokens = TOKENS_PER_PARAMETER * n if tokens is None else tokens
    per_token = flops_per_token(config)
    lines = [
        f"parameters      {n:,}",
        f"a step          {batch_size} x {config.context} tokens, "
        f"{step_tokens * per_token / 1e12:,.3f} TFLOP ({per_token / 1e6:,.1f} MFLOP a token)",
        f"training        {tokens:,} tokens, {tokens * per_token:.2e} FLOPs",
        "",
        f"{'memory of a step, GB':30} {'bfloat16':>10} {'float32':>10}",
    ]
    sizes = [memory(config, batch_size, value_bytes) for value_bytes in (2, 4)]
    for name in sizes[0]:
        lines.append(f"  {name:24} {sizes[0][name] / 1e9:14.3f} {sizes[1][name] / 1e9:10.3f}")
    title = f"at {utilisation:.0%} ms"
    lines += ["", f"estimated   fits   floor ms {title:>12}    tokens/s        in all"]
    for name, e in rows:
        fits = "yes" if e.fits else "no"
        lines.append(f"{name:11} {fits:>4} {e.floor_s * 1e3:10,.2f} {e.step_s * 1e3:12,.2f} "
                     f"{e.tokens_per_s:11,.0f} {duration(3600 * e.hours):>13}")
    lines += [f"{key:11} {unsupported(card)}" for key, card in CARDS.items() if not card.supported]
    if card := pretended():
        told = f"has this machine's GPU pretend to be a card of {in_words(card)}"
        lines += ["", f"{PRETENDED} {told}"]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """A time in the largest unit of which there is one: "3.7 hours"."""
    if seconds >= 1e4 * YEAR:
        return "10,000 years or more"
    for unit, size in (("years", YEAR), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


# %% sec-plan-here
def arena_bytes(config: ModelConfig, sequences: int) -> int:
    """The size of a cpu engine's arena for so many sequences, up to padding to cache lines."""
    s, T = stages(config), config.context
    C, D, H, G = config.dim, config.head_dim, config.n_heads, config.n_kv_heads
    u = 2 * config.hidden if config.mlp == "swiglu" else config.hidden
    a, b = INTEGRATORS[config.integrator]
    entries = sum(x != 0 for row in (*a, b) for x in row)
    backward = 2 * C + s * (config.hidden + u + 4 * C + (2 * H + 2 * G) * D)  # (2), (3)
    backward += 2 * C * (s - (config.step_size * b[-1] == 1)) + H * T - 3 * C  # (3)
    rows = min(sequences * T, LOSS_ROWS)
    logits = config.n_predict * config.vocab_size * (2 if config.logit_cap else 1)
    loss = sequences * T * C + rows * (logits + C)  # (4)
    numbers = sequences * T * 2 * config.n_layers * C * entries                  # (1)
    numbers += max(sequences * T * backward, loss)
    kept = memory(config, sequences, MASTER_BYTES, flash=False)["activations"]
    return kept + MASTER_BYTES * numbers


def cpu_memory(
    config: ModelConfig, batch_size: int, accumulate: int = 1, threads: int | None = None,
    ranks: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Bytes that a training step holds on the cpu engine, by name; `CpuStepper` has the arguments.

    `activations` is the arenas' size up to the padding of arrays to cache lines. Of several ranks
    this is the first, which gathers all moments to save them; the others hold their part of these.
    """
    parts, threads = shards(batch_size, config.context), threads or max(1, cores() // ranks)
    sequences = ceil(ceil(batch_size / parts) / accumulate)  # of the largest piece
    parts = ceil(parts / ranks)
    sizes = memory(config, sequences, MASTER_BYTES)
    return {
        "weights": sizes["weights"],
        "gradients": gradients_held(parts, threads) * sizes["gradients"],
        "moments": sizes["moments"],
        "activations": min(threads, parts) * arena_bytes(config, sequences),
    }


# Measured: the peak of a process that trains less its arrays (tests/test_plan.py measures it anew),
# and the share of the products' rate that a training step reaches (data/measurements/cpu.json).
PROCESS_BYTES, CPU_SHARE = 170e6, 0.65
PRODUCT = 256  # rows = columns = depth of the products timed: three such matrices fit a cache


def product_rate(threads: int, seconds: float = 0.1) -> float:
    """FLOPs a second of matrix products on `threads` threads at once, timed for so long."""

    from nanoeuler.engines.cpu.gemm import WORK, multiply  # a compiler, if a rate is asked for

    def until(end):
        a, b, c, work = (aligned(*shape) for shape in [(PRODUCT, PRODUCT)] * 3 + [(WORK,)])
        a[...] = b[...] = 1
        multiply(a, b, c, False, work)  # the first call loads the kernel, or compiles it
        n, start = 0, time.perf_counter()
        while time.perf_counter() < max(end, start + seconds):
            multiply(a, b, c, False, work)
            n += 1
        return 2 * PRODUCT**3 * n / (time.perf_counter() - start)

    until(0)  # so that all threads begin with a loaded kernel, at the same time
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(until, [time.perf_counter() + seconds] * threads))


def _whole(number):
    """A whole number in digits, or if these are more than a line is for, in a power of ten."""
    return f"{number:,}" if number < 1e15 else f"{float(number):.2e}"


def _flops(config, batch_size, steps):
    """FLOPs of the matrix products of so many training steps."""
    return steps * batch_size * config.context * flops_per_token(config)


def size_lines(
    config: ModelConfig, batch_size: int, steps: int, *, accumulate: int = 1,
    threads: int | None = None, memory: str | None = None, ranks: int = 1,
) -> str:  # fmt: skip
    """Parameters, FLOPs and memory of `steps` training steps on this processor: two lines of text.

    memory: the second line's text, if another device takes the steps. ranks: processes that take
    them together.
    """
    threads = min(threads or max(1, cores() // ranks), shards(batch_size, config.context))
    sizes = cpu_memory(config, batch_size, accumulate, threads, ranks)
    total = PROCESS_BYTES + sum(sizes.values())
    state = sum(sizes.values()) - sizes["activations"]
    here = (
        f"{total / 1e9:.2f} GB: {state / 1e9:.2f} weights, gradients and moments, "
        f"{sizes['activations'] / 1e9:.2f} activations, {PROCESS_BYTES / 1e9:.2f} Python"
    )
    if ranks > 1:
        here += f"; the most that one of {ranks} ranks takes"
    return (
        f"{count_parameters(config):,} parameters; {_whole(steps)} steps of {batch_size} x "
        f"{config.context} tokens are {_flops(config, batch_size, steps):.2e} FLOPs\n"
        f"memory  {memory or here}"
    )


def time_line(steps: int, seconds_per_step: float) -> str:
    """The time of the `steps` that are left, where the first ones took so long: a line of text."""
    took, pace = duration(steps * seconds_per_step), f"{seconds_per_step * 1e3:.3g} ms each"
    return f"time    about {took} for {_whole(steps)} more steps: the first ones took {pace}"


def summary(
    config: ModelConfig, batch_size: int, steps: int, *, threads: int | None = None,
    rate: float | None = None,
) -> str:  # fmt: skip
    """FLOPs, memory and time of `steps` training steps on this processor, none taken yet, as text.

    The time follows from the `rate` of `product_rate`, which is measured if it is not given.
    """
    threads = min(threads or max(1, cores()), shards(batch_size, config.context))
    rate = product_rate(threads) if rate is None else rate
    seconds = _flops(config, batch_size, steps) / (CPU_SHARE * rate)
    return (
        f"{size_lines(config, batch_size, steps, threads=threads)}\n"
        f"time    about {duration(seconds)}: matrix products run at "
        f"{rate / 1e9:.0f} GFLOP/s on {threads} thread{'s' * (threads > 1)}, and training at "
        f"{CPU_SHARE:.0%} of that"
    )


def here(config: ModelConfig, batch_size: int, tokens: int | None, engine: str) -> str:
    """What training on so many tokens takes on this processor, which is timed.

    tokens None: 20 for each parameter.
    """
    tokens = TOKENS_PER_PARAMETER * count_parameters(config) if tokens is None else tokens
    text = summary(config, batch_size, ceil(tokens / (batch_size * config.context)))
    if engine == "cpu":
        return text
    return f"{text}\n        by the engine cpu; {engine} is slower, and train says by how much"
