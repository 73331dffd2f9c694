"""The ladder's kernels, a rung beside the next, float32 throughout.

Checks are against float64, of ragged sizes and of those that are timed. Contests show all rungs of
one task together; the last one is "ours". "in flight" times copies by as many blocks as have a
place on the card at once, so that the bytes on their way are known.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from bench.card import Bench, Contest, ghost

from nanoeuler.engines.gpu import ladder
from nanoeuler.engines.gpu.lang.kernel import Kernel, Launch

F32 = np.float32
COPY = 1 << 26  # numbers: 256 MiB
SQUARE = 8192, 8192  # transposed
ROWS = 16384, 1024  # softmax
CUBE = 4096, 4096, 4096  # M, N, K
APART = 1 << 21, 32  # the copied numbers as lines of 128 bytes
CROWDS = {"4 bytes": (1, 2, 4, 8), "16 bytes": (1, 2, 4), "4 x 16 bytes": (1, 2)}
LEAST = 2.0**-24  # a rounding of float32


def rungs() -> dict[str, dict[str, Callable[..., tuple[Launch, ...]]]]:
    """Task -> rung -> its launches on inputs, then outputs; the last rung is the highest."""
    return {
        "copy": {
            "far apart": lambda x, y: (ladder.copy_apart(x, y),),
            "4 bytes": lambda x, y: (ladder.copy(x, y),),
            "16 bytes": lambda x, y: (ladder.copy_wide(x, y, 1),),
            "4 x 16 bytes": lambda x, y: (ladder.copy_wide(x, y),),
        },
        "transpose": {
            "straight": lambda x, y: (ladder.transpose_plain(x, y),),
            "tile": lambda x, y: (ladder.transpose(x, y, ladder.TILE),),
            "padded tile": lambda x, y: (ladder.transpose(x, y),),
        },
        "sum": {
            "tree": lambda x, parts, y: ladder.sums(x, parts, y, wide=False),
            "shuffles": ladder.sums,
        },
        "softmax": {
            "tree": lambda x, y: (ladder.softmax_tree(x, y),),
            "registers": lambda x, y: (ladder.softmax(x, y),),
        },
        "matmul": {
            "naive": lambda a, b, c: (ladder.matmul_plain(a, b, c, coalesced=False),),
            "coalesced": lambda a, b, c: (ladder.matmul_plain(a, b, c),),
            "tiles": lambda a, b, c: (ladder.matmul_tiles(a, b, c),),
            "registers": lambda a, b, c: (ladder.matmul_registers(a, b, c),),
        },
    }


CASES = {  # task -> ragged shapes, and the shape that is timed
    "copy": ([(1_000_004,)], (COPY,)),
    "transpose": ([(1, 1), (1000, 777)], SQUARE),
    "sum": ([(4,), (1_000_004,)], (COPY,)),
    "softmax": ([(1, 4), (1001, 1000), (9, 2048)], ROWS),
    "matmul": ([(4, 4, 4), (1001, 516, 204)], CUBE),
}
TITLES = {
    "copy": "256 MiB float32", "transpose": "8192x8192 float32", "sum": "256 MiB float32",
    "softmax": "16384x1024 float32", "matmul": "4096x4096x4096 float32",
}  # fmt: skip


def kernels() -> dict[str, Callable[[], Kernel]]:
    """All kernels of all cases."""
    widths = {shape[1] for shapes, last in (CASES["softmax"],) for shape in (*shapes, last)}
    return {
        "copy": ladder.copy_kernel, "copy apart": ladder.copy_apart_kernel,
        "copy 16 bytes": partial(ladder.copy_wide_kernel, 1),
        "copy 4 x 16 bytes": partial(ladder.copy_wide_kernel, 4),
        "transpose straight": ladder.transpose_plain_kernel,
        "transpose tile": partial(ladder.transpose_kernel, ladder.TILE),
        "transpose padded": partial(ladder.transpose_kernel, ladder.TILE + 1),
        "sum tree": partial(ladder.sum_kernel, False), "sum": partial(ladder.sum_kernel, True),
        "softmax tree": ladder.softmax_tree_kernel,
        **{f"softmax {n}": partial(ladder.softmax_kernel, n) for n in sorted(widths)},
        "matmul naive": partial(ladder.matmul_plain_kernel, False),
        "matmul coalesced": partial(ladder.matmul_plain_kernel, True),
        "matmul tiles": partial(ladder.matmul_tiles_kernel, ladder.TILE),
        "matmul registers": ladder.matmul_registers_kernel,
    }  # fmt: skip


def arrays(task: str, shape: tuple[int, ...]) -> tuple[list[tuple], list[tuple]]:
    """The shapes of a task's inputs and of what it writes."""
    if task == "matmul":
        M, N, K = shape
        return [(M, K), (K, N)], [(M, N)]
    if task == "sum":
        return [shape], [(ladder.parts_size(shape[0]),), (1,)]
    return [shape], [shape[::-1] if task == "transpose" else shape]


def fits(rung: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as a rung takes it: what is copied far apart is in lines."""
    return (shape[0] // APART[1], APART[1]) if rung == "far apart" else shape


def plans() -> dict[str, tuple[Launch, ...]]:
    """The launches of all checks and contests, on stand-ins."""
    made = {}
    for task, steps in rungs().items():
        for rung, plan in steps.items():
            for shape in (*CASES[task][0], CASES[task][1]):
                inputs, outputs = arrays(task, fits(rung, shape))
                ghosts = [ghost(each, F32) for each in (*inputs, *outputs)]
                made[f"{task} {rung} {shape}"] = plan(*ghosts)
    return made


# ---- Checks


def library(bench: Bench, task: str, *inputs):
    """What PyTorch makes of a task, in the type of the inputs."""
    if task == "softmax":
        return bench.torch.softmax(inputs[0], -1)
    if task == "matmul":
        return inputs[0] @ inputs[1]
    if task == "transpose":
        return inputs[0].t().contiguous()
    return inputs[0].sum() if task == "sum" else inputs[0].clone()


def check(bench: Bench, task: str, rung: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Errors of one rung and of PyTorch on positive numbers, where sums do not cancel."""
    torch = bench.torch
    inputs, outputs = arrays(task, fits(rung, shape))
    inputs = [bench.random(*each, dtype=torch.float32).abs() for each in inputs]
    outputs = [bench.output(*each, dtype=torch.float32) for each in outputs]
    call = bench.call(rungs()[task][rung](*(bench.view(x) for x in (*inputs, *outputs))))
    first = bench.repeat(call, {str(n): x for n, x in enumerate(outputs)})
    ours = first[str(len(outputs) - 1)]
    exact = library(bench, task, *(x.double() for x in inputs))
    exact = exact.view(ours.shape)
    peer = library(bench, task, *inputs).view(ours.shape)
    errors = {"error": bench.error(ours, exact), "peer": bench.error(peer, exact)}
    return errors | ({"least": LEAST} if task in ("sum", "softmax", "matmul") else {})


def checks(bench: Bench) -> dict[str, Callable[[], dict]]:
    """Every rung on ragged shapes and on the one that is timed."""
    return {
        f"{task}, {rung}: {'x'.join(map(str, shape))}": partial(check, bench, task, rung, shape)
        for task, steps in rungs().items()
        for rung in steps
        for shape in (*CASES[task][0], CASES[task][1])
    }


# ---- Contests


def peer(bench: Bench, task: str, inputs: list, outputs: list) -> Callable[[], None]:
    """A function that does the task with PyTorch; its matmul is cuBLAS's, without TF32."""
    torch, x, y = bench.torch, inputs[0], outputs[-1]
    torch.backends.cuda.matmul.allow_tf32 = False
    return {
        "copy": lambda: y.copy_(x),
        "transpose": lambda: y.copy_(x.t()),
        "sum": lambda: torch.sum(x, 0, out=y.view(())),
        "softmax": lambda: torch.softmax(x, -1),
        "matmul": lambda: torch.mm(x, inputs[-1], out=y),
    }[task]


def entrants(bench: Bench, task: str) -> dict[str, list[Callable[[], None]]]:
    """All rungs of a task and PyTorch, on the same arrays, which overflow the L2 cache."""
    torch, shape = bench.torch, CASES[task][1]
    inputs, outputs = arrays(task, shape)
    inputs = [bench.random(*each, dtype=torch.float32) for each in inputs]
    outputs = [torch.empty(*each, device="cuda") for each in outputs]
    made = {}
    for rung, plan in rungs()[task].items():
        tensors = [x.view(fits(rung, x.shape)) for x in (*inputs, *outputs)]
        made[rung] = [bench.call(plan(*(bench.view(x) for x in tensors)))]
    return made | {"torch": [peer(bench, task, inputs, outputs)]}


def in_flight(bench: Bench) -> dict[str, list[Callable[[], None]]]:
    """Copies by a few blocks on each multiprocessor, that go on until all is copied."""
    torch = bench.torch
    x, y = (bench.view(torch.zeros(COPY, device="cuda")) for _ in range(2))
    plan = {
        "4 bytes": ladder.copy,
        "16 bytes": partial(ladder.copy_wide, loads=1),
        "4 x 16 bytes": partial(ladder.copy_wide, loads=4),
    }
    return {
        f"{way}, {crowd} blocks": [
            bench.call(plan[way](x, y, grid=crowd * bench.device.multiprocessors))
        ]
        for way, crowds in CROWDS.items()
        for crowd in crowds
    }


def contests(bench: Bench) -> list[Contest]:
    """A contest for each task, and one of copies by how much is on its way."""
    made = [
        Contest(f"ladder: {task}", TITLES[task], partial(entrants, bench, task),
                ours=list(steps)[-1])
        for task, steps in rungs().items()
    ]  # fmt: skip
    flight = Contest("ladder: in flight", TITLES["copy"], partial(in_flight, bench), "", ())
    return [*made, flight]
