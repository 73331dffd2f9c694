# Made from book/p-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-equal
"""A reader by the name of an engine."""

from importlib import import_module

from nanoeuler.engines.cpu.decode import MANY, QUANTIZE, CpuReader
from nanoeuler.engines.registry import CPU_ENGINES, GPU_ENGINES, engine_factory, engine_name
from nanoeuler.errors import UserError, quoted
from nanoeuler.inference.decoder import EngineReader, Reader
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.stored import StoredWeights
from nanoeuler.model.weights import Weights, flat_size


def make_reader(
    config: ModelConfig, weights: Weights, engine: str = "auto", texts: int = 1,
    threads: int | None = None, quantize: str = "none",
) -> Reader:  # fmt: skip
    """What reads `texts` texts for decoders. "auto": compiled for many weights, or to quantize.

    threads and quantize as `CpuReader` has them. UserError for an engine that there is not, for one
    of a GPU where there is none, and for quantized matrices with another than "cpu".
    """
    if quantize not in QUANTIZE:
        raise UserError(f"expected quantize to be {', '.join(QUANTIZE)}, got {quoted(quantize)!r}: "
                        "choose one of them")  # fmt: skip
    small = quantize != "none"
    if engine == "auto":
        engine = "cpu" if small or 4 * flat_size(config) >= MANY else "reference"
    if engine in GPU_ENGINES and not small:
        # Named only: appendix Q builds it.
        room = import_module("nanoeuler.engines.gpu.decode.decoder")
        return room.cuda_reader(engine_name(engine), config, weights, texts)
    if engine not in CPU_ENGINES:
        names = ", ".join(CPU_ENGINES if small else (*CPU_ENGINES, *GPU_ENGINES))
        raise UserError(f"expected an engine that generates, auto, {names}, got {engine!r}")
    # Stored weights become float32 as soon as somebody asks for them.
    if engine == "cpu" and (
        isinstance(weights, StoredWeights) or weights.flat.dtype == "float32"
    ):
        try:
            return CpuReader(config, weights, texts, threads, quantize)
        except OverflowError as error:
            raise UserError(str(error)) from None
    if small and engine == "cpu":
        raise UserError(f"expected float32 weights with quantize {quantize}, got "
                        f"{weights.flat.dtype}: convert them, or leave quantize out")  # fmt: skip
    if small:
        raise UserError(f"expected engine cpu, or auto, with quantize {quantize}, got {engine!r}: "
                        "leave one out")  # fmt: skip
    return EngineReader(config, weights, engine_factory(engine)(), texts)
