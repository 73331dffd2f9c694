# Made from book/20-is-it-any-good.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-eval-gpu
"""How likely a GPU finds each token of a batch, and whether it finds it the likeliest.

A forward pass as a recorded program, its logits in float32. Left out: rows of several texts, and
tokens after the next, of models that predict several.

B batch, T positions, V vocabulary.
"""

from importlib import import_module

import numpy as np

from nanoeuler.engines.gpu.rows.cross_entropy import form_for, loss_launch, sums_launch
from nanoeuler.engines.gpu.rows.likeliest import likeliest_launch
from nanoeuler.engines.gpu.rows.soft_cap import cap_launch
from nanoeuler.engines.gpu.step.engine import LOSS_ROWS, PITCH, rows_of
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.program import Array
from nanoeuler.engines.gpu.step.recording import ProgramBuilder, Recorded
from nanoeuler.engines.gpu.step.stepper import CHOICE, CudaStepper, gpu
from nanoeuler.model.transformer import output_matrix, stream
from nanoeuler.model.weights import Weights

SCORE_LOGITS = "logits of scores"  # a memory of float32; columns of padding are never read


class ScoreBuilder(ProgramBuilder):
    """Records a forward pass; results: losses and flags (B T, 1) float32, and the losses' sum."""

    def build_sums(self, B: int, T: int, packed: bool = False) -> Recorded:
        """A forward pass on B sequences of T, with losses and flags of each position as results."""
        assert not packed
        tokens = self.input("tokens 0", (B, T), np.int32)
        targets = self.input("targets 0", (B, T, 1), np.int32)
        self.engine.begin()
        self.engine.forward_only = True
        n, saved = stream(self.engine, self.config, self.weights, tokens)
        del saved
        self.ends(rows_of(n), rows_of(targets))
        return Recorded(self.recording.end(), self.inputs, self.results)

    def ends(self, n: Array, targets: Array) -> None:
        """What follows the stream n (B T, C), LOSS_ROWS of its rows at a time."""
        engine, V = self.engine, self.config.vocab_size
        W = engine.copy_of(output_matrix(self.config, self.weights)[:, :V])
        losses, flags = (self.result(name, targets.shape) for name in ("losses", "flags"))
        scale, width = self.recording.constant(np.ones(1, np.float32)), -(-V // PITCH) * PITCH
        most = min(LOSS_ROWS, n.shape[0])
        whole = self.recording.whole(SCORE_LOGITS, (most, width), np.float32)
        form = form_for(width, True, False, engine.capability)
        for first in range(0, n.shape[0], most):
            part = n[first : first + most]
            logits = whole[: part.shape[0]]
            engine.matmul("logits", part, W, logits[:, :V])
            if self.config.logit_cap:
                engine.record("cap of logits", cap_launch(logits, None, self.config.logit_cap))
            launch = loss_launch(logits, targets, scale, losses, V, first, form)
            engine.record("cross-entropy", launch)
            engine.record("likeliest", likeliest_launch(logits, targets, flags, V, first))
        engine.record("sum of losses", sums_launch(losses, self.loss_sums(1)[0, :1]))


class CudaScorer(CudaStepper):
    """A stepper without an optimizer that says of each token how likely it is."""

    sums_builder = ScoreBuilder

    def scores(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log p (B, T) in nats of targets (B, T) after tokens (B, T), and which are the likeliest.

        Where a target is IGNORE, log p is 0 and the flag is False. A program is recorded for each
        shape.
        """
        this = self.program_for("sums", *tokens.shape)
        page = this.inbox.page()
        page["tokens 0"][...], page["targets 0"][...] = tokens, targets[..., None]
        self.launch(this)
        found = this.outbox.read()
        losses, flags = (found[name].reshape(targets.shape) for name in ("losses", "flags"))
        return -losses.astype(np.float64), flags == 1


def cuda_scorer(engine: str, weights: Weights) -> CudaScorer:
    """One on the GPU, for one of `registry.GPU_ENGINES`."""
    return CudaScorer(weights, None, gpu(), precision=PRECISIONS[engine],
                      multiplier=import_module(CHOICE).multiplier())  # fmt: skip
