"""How long work takes on a GPU: CUDA graphs, each contestant alone at full load, then all in turn.

Alone, a contestant runs for some tenths of a second by itself, so that its own use of energy sets
the card's clock; in turn all share one clock, which flatters hungry kernels.
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

Calls = list[Callable[[], Any]]  # one for each set of operands; each puts work on torch's stream

SECONDS, ROUNDS = 0.5, 5  # of each contestant alone, each time; the first half of it warms up
TURNS, GRAPH_MS = 11, 10  # graphs of each contestant in turn, and what one takes
MOST = 200  # calls in a graph


def replay(torch: Any, work: Callable[[], Any]) -> float:
    """Milliseconds that work takes on torch's stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def graph(torch: Any, calls: Calls, count: int) -> Any:
    """A CUDA graph of `count` calls, one after the other over the sets of operands."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, capture_error_mode="relaxed"):
        for i in range(count):
            calls[i % len(calls)]()
    return made


def alone(torch: Any, made: Any, sensor: Callable, seconds: float) -> tuple[float, list[float]]:
    """Median milliseconds of a graph by itself at full load; and clock in MHz, power in W."""
    times, state, begin = [], [], time.perf_counter()
    while time.perf_counter() - begin < seconds:
        times.append(replay(torch, made.replay))
        state.append(sensor())
    half = len(times) // 2
    return median(times[half:]), [median(column) for column in zip(*state[half:], strict=True)]


def make_sensor() -> Callable[[], tuple[float, float]]:
    """A function that returns clock (MHz) and power (W) of the first card that CUDA may see."""
    import pynvml

    pynvml.nvmlInit()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # which NVML doesn't heed
    if seen.isdigit():
        card = pynvml.nvmlDeviceGetHandleByIndex(int(seen))
    else:
        card = pynvml.nvmlDeviceGetHandleByUUID(seen)
    return lambda: (
        pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(card) / 1000,
    )


def count_of(torch: Any, field: dict[str, Calls]) -> int:
    """How many calls a graph has: GRAPH_MS of the first contestant's, and every set of operands."""
    calls = next(iter(field.values()))
    replay(torch, calls[0])
    one = min(replay(torch, calls[0]) for _ in range(3))
    return max(2, len(calls), min(MOST, round(GRAPH_MS / one)))


def times(
    torch: Any, field: dict[str, Calls], seconds: float = SECONDS, rounds: int = ROUNDS,
    beat: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Milliseconds of a call, "alone" and "in turn", for each name of `field`; "MHz" and "W".

    beat: called before each contestant's turn alone, so that a long contest is not taken for dead.
    """
    count = count_of(torch, field)
    graphs = {who: graph(torch, calls, count) for who, calls in field.items()}
    sensor, by_self, in_turn = make_sensor(), {}, {}
    for _ in range(rounds):
        for who, made in graphs.items():
            beat()
            by_self.setdefault(who, []).append(alone(torch, made, sensor, seconds))
    for _ in range(TURNS):
        for who, made in graphs.items():
            in_turn.setdefault(who, []).append(replay(torch, made.replay))
    return {
        who: {
            "alone": median(ms for ms, _ in by_self[who]) / count,
            "in turn": median(in_turn[who]) / count,
            "MHz": by_self[who][-1][1][0],
            "W": by_self[who][-1][1][1],
        }
        for who in graphs
    }
