# Made from book/13b-muon-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-muon-gpu-step
"""Muon's part of a recorded step, and the stepper of runs that train with it on one GPU.

Matrices of one shape go through Newton-Schulz together, in bf16: on Hopper three launches a round,
on other cards a product of each matrix. Left out: several GPUs, which are `ranks.muon`'s.
"""

from functools import partial
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm import wgmma_batch
from nanoeuler.engines.gpu.gemm.choice import HOPPER
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.engines.gpu.rows import adamw, muon
from nanoeuler.engines.gpu.step.matmul import STORE
from nanoeuler.engines.gpu.step.precision import Precision
from nanoeuler.engines.gpu.step.program import Array
from nanoeuler.engines.gpu.step.recording import HalvesBuilder, Machine, ProgramBuilder, Rules
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.engines.interface import Optimizer
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights


def newton_schulz(
    recording: Any, x: Any, scales: tuple[Any, Any], rules: muon.MuonRules, blocks: int
) -> Any:
    """Record the rounds on Hopper; x uint16 (1, count, r, c).

    scales: float32 (count,) of squares of X and of X itself. Returns the array that holds the
    directions then; x is overwritten.
    """
    _, count, r, c = x.shape
    make = [recording.take((1, count, r, n), np.uint16) for n in (r, r, c)]
    gram, polynomial, other = make
    ones = recording.constant(np.ones(count, np.float32))
    of_gram, of_x = scales
    half, how = count * r * (r + 1), dict(place=recording.constant, blocks=blocks)

    def add(name: str, batch: wgmma_batch.Batch, flops: int, *of: Any, by=(0, 0, 0)) -> None:
        launch = wgmma_batch.batch_launch(batch, wgmma_batch.Operands(*of), by, **how)
        recording.add(name, launch, flops)

    for _ in range(rules.steps):
        add("X X^T", wgmma_batch.GRAM, half * c, x, x, gram, of_gram)
        add("polynomial", wgmma_batch.POLYNOMIAL, half * r, gram, gram, polynomial, gram,
            by=rules.coefficients)  # fmt: skip
        add("P X", wgmma_batch.APPLY, 2 * count * r * r * c, polynomial, x, other, of_x)
        x, other, of_gram, of_x = other, x, ones, ones
    return x


def newton_schulz_each(
    engine: Any, x: Array, scales: tuple[Array, Array], rules: muon.MuonRules
) -> Array:
    """The same on any card: a product of each matrix, and what is between them for all at once."""
    recording, (_, count, r, c) = engine.recording, x.shape
    gram, polynomial, other = (recording.take((1, count, r, n), np.uint16) for n in (r, r, c))
    squares, fours = recording.take((1, count, r, r), np.float32), r * c // 4
    grid = cover(fours, muon.THREADS), count
    recording.add("normalise", Launch(muon.NORMALISE, grid, (x, scales[1], fours)))
    fours = count * r * r // 4
    for _ in range(rules.steps):
        product_of_each(engine, "X X^T", "NT", x, x, gram)
        product_of_each(engine, "A A^T", "NT", gram, gram, squares)
        args = squares, gram, polynomial, r, fours, *map(float, rules.coefficients)
        launch = Launch(muon.POLYNOMIAL, (cover(fours, muon.THREADS),), args)
        recording.add("polynomial", launch)
        product_of_each(engine, "P X", "NN", polynomial, x, other)
        x, other = other, x
    return x


def product_of_each(engine: Any, name: str, layout: str, a: Array, b: Array, c: Array) -> None:
    """Record C = op(A) op(B) of each matrix of a batch, bf16."""
    multiply = engine.multiply
    for i in range(a.shape[1]):
        x, y, z = (of[0, i] for of in (a, b, c))
        if multiply.pieces == 1:
            multiply(name, x, y.T if layout == "NT" else y, z)
        else:  # of a step in float32: Newton-Schulz is in bf16 all the same
            flops = 2 * x.shape[0] * x.shape[1] * z.shape[1]
            engine.recording.add(name, multiply.bf16(layout, x, y, z, STORE), flops)


def orthogonal(engine: Any, x: Array, scales: tuple[Array, Array], rules: muon.MuonRules) -> Array:
    """Record the rounds of a batch as this card has them; the array that holds the directions."""
    if engine.capability == HOPPER:
        return newton_schulz(engine.recording, x, scales, rules, engine.multiprocessors)
    return newton_schulz_each(engine, x, scales, rules)


def record_matrices(
    builder: ProgramBuilder, rules: muon.MuonRules, buffers: adamw.Buffers, decision: Array
) -> None:
    """Record Muon's step of all its matrices, a batch of one shape after the other."""
    recording, engine = builder.recording, builder.engine
    take = muon.Take(recording.constant, recording.take)
    for (r, c), these in muon.shapes(rules.matrices).items():
        x = recording.take((1, len(these), r, c), np.uint16)
        scales = recording.take(muon.scales_shape(len(these)), np.float32)
        launches = muon.momentum_launches(rules, these, buffers, decision, x, scales, take)
        recording.add("momentum", launches)
        pair = scales[0, : len(these)], scales[1, : len(these)]
        x = orthogonal(engine, x, pair, rules)
        recording.add("Muon", muon.move_launch(rules, these, buffers, decision, x, take))


def left(tiles: np.ndarray, rules: muon.MuonRules) -> np.ndarray:
    """The tiles of parameters that are AdamW's: those that begin in no matrix of Muon's."""
    spans = sorted((one.start, one.start + (one.rows - 1) * one.pitch + one.columns)
                   for one in rules.matrices)  # fmt: skip
    starts, ends = np.array(spans).T
    ends, first = np.maximum.accumulate(ends), tiles[:, 0]
    before = np.searchsorted(starts, first, "right")  # how many begin there or before
    return tiles[(before == 0) | (first >= ends[before - 1])]


class MuonDescent:
    """A step's end of a builder with Muon, after the builder's own; `muon`: its rules."""

    muon: muon.MuonRules

    def descend(
        self, tiles: np.ndarray, buffers: adamw.Buffers, losses: Array, rules: Rules
    ) -> None:
        """AdamW's end for what is left to it, then Muon's for the matrices."""
        super().descend(left(tiles, self.muon), buffers, losses, rules)
        record_matrices(self, self.muon, buffers, self.result("decision", (8,)))


class MuonBuilder(MuonDescent, ProgramBuilder):
    """Records steps with Muon of a model whose masters are float32."""


class MuonHalvesBuilder(MuonDescent, HalvesBuilder):
    """The same of masters in two halves."""


def rules_of(optimizer: Any, weights: Weights) -> muon.MuonRules:
    """What a run's optimizer does with the matrices of these weights: `training.muon.Muon`."""
    found = []
    for each in optimizer.matrices(weights):
        (rows, pitch), columns = weights[each.name].shape, each.columns
        start, scale = weights.starts[each.name] + each.start, optimizer.scale(rows, columns)
        found.append(muon.Matrix(start, pitch, rows, columns, scale))
    ratio = optimizer.rate(1.0, weights.config.dim)
    return muon.MuonRules(
        tuple(found), ratio, optimizer.momentum, optimizer.steps, optimizer.coefficients
    )


def muon_builder(
    config: ModelConfig, machine: Machine, precision: Precision, rules: muon.MuonRules
) -> ProgramBuilder:
    """What records steps with Muon on a single GPU."""
    kind = MuonHalvesBuilder if precision.kind == "bf16" else MuonBuilder
    made = kind(config, machine, precision)
    made.muon = rules
    return made


class MuonStepper(CudaStepper):
    """Training steps with Muon: `CudaStepper` with another end of the step.

    m is AdamW's first moment and the matrices' momentum, as in `training.muon.Muon`.
    """

    optimizers = ("Muon",)

    def __init__(self, weights: Weights, optimizer: Optimizer, device: Any, **how: Any) -> None:
        super().__init__(weights, optimizer, device, **how)
        self.step_builder = partial(muon_builder, rules=rules_of(optimizer, weights))
