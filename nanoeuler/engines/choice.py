# Made from book/06a-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""Engines and steppers by name. An engine's modules are imported when it is asked for."""

from collections.abc import Callable

from nanoeuler.engines.interface import Engine, Optimizer, Stepper
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights

# "auto" is the first of them: the fastest that runs everywhere.
ENGINES = ("cpu", "fused", "reference")


def engine_name(name: str) -> str:
    """The name of the engine that `name`, which may be "auto", stands for; UserError if none."""
    if name in ("auto", *ENGINES):
        return ENGINES[0] if name == "auto" else name
    names = f"auto, {', '.join(ENGINES)}"
    if name == "cuda":
        raise UserError(f"engine 'cuda': this version trains on a CPU; choose {names}")
    raise UserError(f"unknown engine {name!r}: choose {names}")


def engine_factory(name: str) -> Callable[[], Engine]:
    """The function that makes engines of this name; UserError if there is none."""
    name = engine_name(name)
    if name == "reference":
        from nanoeuler.engines.reference import ReferenceEngine

        return ReferenceEngine
    from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine

    return {"cpu": CpuEngine, "fused": FusedEngine}[name]


def make_stepper(
    engine: str,
    weights: Weights,
    optimizer: Optimizer,
    *,
    threads: int | None = None,
    pieces: int = 1,
) -> Stepper:
    """A stepper that trains `weights` with the engine of this name; UserError if there is none.

    `optimizer` clips the gradients and updates the weights. threads: how many (None: one per core);
    pieces: in how many parts a shard of the batch goes through memory. Neither threads nor engines
    change more than a result's last bits, and threads not even those.
    """
    make_engine = engine_factory(engine)
    from nanoeuler.engines.cpu.stepper import CpuStepper

    return CpuStepper(make_engine, weights, optimizer, threads, pieces)
