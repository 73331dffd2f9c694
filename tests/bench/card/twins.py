"""PTX instructions on the GPU against their twins on paper, on random input (helpers/twins.py)."""

from functools import partial

import numpy as np
from twins import TWINS, compare

from nanoeuler import emulator

SEEDS = 3  # inputs of each twin
EDGE, ROW = 61, 72  # columns of a map whose rows end within 16 bytes, and of the array behind it
UNITS = {"bits": "words that differ from the paper's", "absolute": "absolute, from the paper's",
         "relative": "relative, to the paper's"}  # fmt: skip


def kernels():
    """Name -> maker of each kernel."""
    return {name: twin.make for name, twin in TWINS.items()}


def on_card(bench, twin, arrays):
    """The arrays after the launch on the GPU."""
    placed = {name: bench.device.array(array) for name, array in arrays.items()}
    bench.device.run(twin.launch(placed))
    return {name: bench.device.host(array) for name, array in placed.items()}


def check(bench, name):
    """By instruction, how far the GPU is from the paper at most."""
    twin, worst = TWINS[name], {}
    for seed in range(SEEDS):
        arrays = twin.inputs(np.random.default_rng(seed))
        before = {what: array.copy() for what, array in arrays.items()}
        emulator.run(twin.launch(arrays))
        first, again = (on_card(bench, twin, before) for _ in range(2))
        for what in before:
            if (first[what] != again[what]).any():
                raise ValueError(f"two runs differ in {what}")
        for what, seen in compare(twin, first, before, arrays).items():
            if what not in worst or seen.distance > worst[what]["error"]:
                worst[what] = {
                    "error": seen.distance, "least": seen.bound.size / 2,
                    "unit": UNITS[seen.bound.kind],
                }  # fmt: skip
    return worst


def check_edge(bench):
    """How many elements a store leaves otherwise than told: whole 16 bytes of a row, no more.

    There is no twin of this: it asks what lies beyond the store's own elements.
    """
    torch, twin = bench.torch, TWINS["the copy engine"]
    arrays = twin.inputs(np.random.default_rng(0))
    box = torch.from_numpy(arrays["two"][8:12].view(np.int16)).cuda()
    placed = {name: bench.device.array(array) for name, array in arrays.items()}
    whole = torch.full((8, ROW), -1, device="cuda", dtype=torch.int16)
    placed["to_two"] = bench.view(whole.view(torch.bfloat16)[:, :EDGE])
    bench.device.run(twin.launch(placed))
    bench.device.synchronize()
    want = torch.full_like(whole, -1)
    want[4:, :64] = box  # 64: the next multiple of 16 bytes
    return {"error": int((whole != want).sum()), "least": 0.5, "unit": UNITS["bits"]}


def checks(bench):
    """Name -> check."""
    made = {name: partial(check, bench, name) for name in TWINS}
    return made | {"a row that ends within 16 bytes": partial(check_edge, bench)}


def contests(bench):
    """Nothing is timed."""
    return []


def plans():
    """Name -> launch."""
    made = {name: twin.inputs(np.random.default_rng(0)) for name, twin in TWINS.items()}
    return {name: [twin.launch(made[name])] for name, twin in TWINS.items()}
