# Made from book/19d-lora.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-lora-memory
"""The memory of training adapters on a processor, beforehand.

Leaves out graphics cards, on which adapters are not trained yet, and time: a step needs all but
the products for the gradients of the matrices.
"""

import math

from nanoeuler.engines.cpu.stepper import cores, shards
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
    share = count_adapters(config, lora) / count_parameters(config)
    return (
        f"{count_adapters(config, lora):,} numbers learn, {share:.2%} of the model's "
        f"{count_parameters(config):,}: rank {lora.rank} on {','.join(lora.targets or ())}\n"
        f"memory  {total / 1e9:.2f} GB, where all weights need {full / 1e9:.2f}: "
        f"{sizes['weights'] / 1e9:.2f} merged weights, {sizes['copy'] / 1e9:.2f} of them without "
        f"adapters, {rest / 1e9:.2f} adapters, their gradients and moments, "
        f"{sizes['activations'] / 1e9:.2f} activations, {PROCESS_BYTES / 1e9:.2f} Python"
    )
