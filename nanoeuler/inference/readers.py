# Made from book/10a-a-token-on-a-cpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-token-equal
"""A reader by the name of an engine. Leaves out graphics cards."""

from nanoeuler.engines.choice import CPU_ENGINES, engine_factory
from nanoeuler.engines.cpu.decode import MANY, CpuReader
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import EngineReader, Reader
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights


def make_reader(
    config: ModelConfig, weights: Weights, engine: str = "auto", texts: int = 1,
    threads: int | None = None, int8: bool = False,
) -> Reader:  # fmt: skip
    """What reads `texts` texts for decoders. "auto": compiled where there are many weights.

    threads and int8 as `CpuReader` has them. UserError for an engine that does not read on a
    processor, and for int8 with another than "cpu".
    """
    if engine == "auto":
        engine = "cpu" if int8 or weights.flat.nbytes >= MANY else "reference"
    if engine not in CPU_ENGINES:
        names = ", ".join(CPU_ENGINES)
        raise UserError(f"expected an engine that generates, auto, {names}, got {engine!r}")
    if engine == "cpu" and weights.flat.dtype == "float32":
        return CpuReader(config, weights, texts, threads, int8)
    if int8:
        raise UserError(f"expected engine cpu, or auto, with int8, got {engine!r}: leave one out")
    return EngineReader(config, weights, engine_factory(engine)(), texts)
