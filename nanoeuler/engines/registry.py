# Made from book/10-cpu-engine.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cpu-shards
"""Engines and steppers by name. An engine's modules are imported when it is asked for."""

from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec

from nanoeuler.engines.interface import Engine, Optimizer, Stepper
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights

CPU_ENGINES = ("cpu", "fused", "reference")  # the fastest first
# The fastest first; they differ in the number format of their products: part III.
GPU_ENGINES = ("cuda", "cuda-tf32", "cuda-float32")
# Modules for GPUs, by name, so that nothing of them is imported before it is needed.
DOOR = "nanoeuler.engines.gpu.host.libraries"  # to the driver
STEPPER = "nanoeuler.engines.gpu.step.stepper"  # a later chapter builds it
ADAPTER_STEPPER = "nanoeuler.engines.gpu.step.lora"  # the same of weights with adapters
# What makes steppers instead, while this process leads others through a run: chapter 14 says.
LEAD: ContextVar[Callable[..., Stepper] | None] = ContextVar("LEAD", default=None)


def _no_gpu() -> str:
    """Why no engine for a GPU can be used, in words; "" if one can."""
    for room in "nanoeuler.engines.gpu", STEPPER:
        if find_spec(room) is None:
            return "the chapter that builds it, 13a, is still to come"
    return import_module(DOOR).no_gpu()


def warm_up(name: str) -> None:
    """Have a GPU's driver start while others import, if the engine of this name may need it."""
    if name in ("auto", *GPU_ENGINES) and find_spec("nanoeuler.engines.gpu"):
        import_module(DOOR).start()


def engine_name(name: str) -> str:
    """The name of the engine that `name` stands for; "auto" is the fastest of this machine.

    UserError for a name that no engine has, and for an engine that finds no GPU.
    """
    if name == "auto":
        return CPU_ENGINES[0] if _no_gpu() else GPU_ENGINES[0]
    if name not in (*CPU_ENGINES, *GPU_ENGINES):
        names = ", ".join((*CPU_ENGINES, *GPU_ENGINES))
        raise UserError(f"unknown engine {name!r}: choose auto, {names}")
    if name in GPU_ENGINES and (reason := _no_gpu()):
        names = ", ".join(CPU_ENGINES)
        raise UserError(f"engine {name!r} needs a GPU, and {reason}: choose {names}")
    return name


def engine_factory(name: str) -> Callable[[], Engine]:
    """The function that makes engines of this name, one of those for a CPU; UserError if none."""
    if name not in CPU_ENGINES:
        raise UserError(f"expected one of the engines {', '.join(CPU_ENGINES)}, got {name!r}")
    if name == "reference":
        from nanoeuler.engines.reference import ReferenceEngine

        return ReferenceEngine
    from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine

    return {"cpu": CpuEngine, "fused": FusedEngine}[name]


def expect_adapter_engine(name: str) -> None:
    """UserError for an engine, and for ranks, by which LoRA adapters are not trained."""
    if name in GPU_ENGINES[1:] or LEAD.get():
        what = "several ranks" if LEAD.get() else f"the engine {name}"
        raise UserError(f"LoRA adapters are not trained by {what} yet: choose --engine cpu or "
                        "cuda, without --ranks")  # fmt: skip


def _for_adapters(name, weights, optimizer, threads, pieces, recompute):
    """`make_stepper` for weights with adapters, which one process trains."""
    expect_adapter_engine(name)
    if name in GPU_ENGINES:
        return import_module(ADAPTER_STEPPER).lora_stepper(weights, optimizer, pieces, recompute)
    from nanoeuler.engines.cpu.stepper import CpuStepper

    make = engine_factory(name)
    return CpuStepper(lambda: weights.engine(make()), weights, optimizer, threads, pieces)


def make_stepper(
    engine: str,
    weights: Weights,
    optimizer: Optimizer | None,
    *,
    threads: int | None = None,
    pieces: int = 1,
    recompute: bool = False,
) -> Stepper:
    """A stepper that trains `weights` with the engine of this name; UserError if there is none.

    `optimizer` clips the gradients and updates the weights, or says how; None: no step is taken,
    and `sums` alone is used. threads: of a CPU, how many (None: one per core); pieces: in how many
    parts a shard of the batch goes through memory; recompute: of a GPU, whether the backward pass
    runs each block again, of which only the input is kept.
    Threads and recompute change no bit of a result; engines that compute in float32 differ in
    rounding alone.
    """
    name, lead = engine_name(engine), LEAD.get()
    if hasattr(weights, "adapters"):  # of chapter 19d
        return _for_adapters(name, weights, optimizer, threads, pieces, recompute)
    if lead and recompute:
        raise UserError("several ranks keep what a step computes: leave out --recompute or --ranks")
    if lead:
        return lead(name, weights, optimizer, threads, pieces)
    if name in GPU_ENGINES:
        return import_module(STEPPER).cuda_stepper(name, weights, optimizer, pieces, recompute)
    from nanoeuler.engines.cpu.stepper import CpuStepper

    return CpuStepper(engine_factory(name), weights, optimizer, threads, pieces)
