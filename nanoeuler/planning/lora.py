# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-memory
"""What training adapters takes, beforehand: the memory of a processor, and a step of a GPU.

Leaves out the time of a step on a processor, which is all but that of the products for the
gradients of the matrices.
"""

import math
from functools import partial

from nanoeuler.engines.cpu.stepper import cores, shards
from nanoeuler.engines.registry import expect_adapter_engine
from nanoeuler.model.config import ModelConfig, count_parameters, parameter_shapes
from nanoeuler.model.lora import Lora, adapted, adapter_shapes, count_adapters
from nanoeuler.model.weights import PADDING
from nanoeuler.planning.counts import MASTER_BYTES, memory
from nanoeuler.planning.plan import PROCESS_BYTES, cpu_memory


def lora_memory(
    config: ModelConfig, lora: Lora, batch_size: int, accumulate: int = 1,
    threads: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes that a step holds by name, as `cpu_memory` has them; `lora` is settled."""
    sizes, whole = cpu_memory(config, batch_size, accumulate, threads), parameter_shapes(config)
    shapes = adapter_shapes(config, lora).values()
    learn = MASTER_BYTES * sum(-(-math.prod(shape) // PADDING) * PADDING for shape in shapes)
    copied = sum(whole[tensor][0] * (columns.stop - columns.start)
                 for _, tensor, columns in adapted(config, lora))  # fmt: skip
    held = sizes["gradients"] // memory(config, 1, MASTER_BYTES)["gradients"]
    return {
        "weights": sizes["weights"], "copy": MASTER_BYTES * copied, "adapters": learn,
        "gradients": held * learn, "moments": 2 * learn, "activations": sizes["activations"],
    }  # fmt: skip


def learning(config: ModelConfig, lora: Lora) -> str:
    """What learns, in a line; `lora` is settled."""
    share = count_adapters(config, lora) / count_parameters(config)
    return (f"{count_adapters(config, lora):,} numbers learn, {share:.2%} of the model's "
            f"{count_parameters(config):,}: rank {lora.rank} on {','.join(lora.targets or ())}")


def lora_lines(
    config: ModelConfig, lora: Lora, batch_size: int, accumulate: int = 1,
    threads: int | None = None,
) -> str:  # fmt: skip
    """What learns, and the memory of a step on this processor, besides that of all: two lines."""
    lora = lora.settled(config)
    threads = min(threads or cores(), shards(batch_size, config.context))
    sizes = lora_memory(config, lora, batch_size, accumulate, threads)
    total, full = (PROCESS_BYTES + sum(each.values()) for each in
                   (sizes, cpu_memory(config, batch_size, accumulate, threads)))  # fmt: skip
    rest = sum(sizes[name] for name in ("adapters", "gradients", "moments"))
    return (
        f"{learning(config, lora)}\n"
        f"memory  {total / 1e9:.2f} GB, where all weights need {full / 1e9:.2f}: "
        f"{sizes['weights'] / 1e9:.2f} merged weights, {sizes['copy'] / 1e9:.2f} of them without "
        f"adapters, {rest / 1e9:.2f} adapters, their gradients and moments, "
        f"{sizes['activations'] / 1e9:.2f} activations, {PROCESS_BYTES / 1e9:.2f} Python"
    )


# %% sec-lora-gpu-step
def lora_host_bytes(config: ModelConfig, lora: Lora) -> int:
    """The bytes of this machine's memory that training adapters on its GPU takes.

    The merged weights, the adapted ones without adapters, adapters with gradients and moments, and
    the weights once more on their way to the card. `lora` is settled.
    """
    sizes = lora_memory(config, lora, 1, threads=1)
    kept = sum(sizes[name] for name in ("copy", "adapters", "gradients", "moments"))
    return 2 * sizes["weights"] + kept


def lora_on_cards(
    config: ModelConfig, lora: Lora, batch_size: int, engine: str, recompute: bool = False
) -> str:
    """What learns, and a line for each GPU that we know: what a step takes of it, estimated.

    UserError for an engine that trains no adapters.
    """
    from nanoeuler.engines.gpu.step.lora import record_lora_step  # all of the GPU's modules
    from nanoeuler.planning.step import on_cards

    expect_adapter_engine(engine)
    lora = lora.settled(config)
    record = partial(record_lora_step, lora)
    return f"{learning(config, lora)}\n{on_cards(config, batch_size, engine, record, recompute)}"
