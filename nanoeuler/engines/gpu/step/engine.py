# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-engine
"""The engine of a GPU: where it fuses what the model's code calls one by one.

Left out: the update (stepper.py), caches of keys and values. Letters as in primitives.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanoeuler.engines.gpu.gemm.float32 import eights
from nanoeuler.engines.gpu.gemm.wgmma_form import EPILOGUES
from nanoeuler.engines.gpu.gemm.wgmma_rope import Turning
from nanoeuler.engines.gpu.step.primitives import DTYPES, CudaPrimitives, Texts, rows_of
from nanoeuler.engines.gpu.step.program import Array
from nanoeuler.engines.interface import Cache, Engine, SavedAttention
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.weights import Block

# Rows whose logits are held at a time. Each part adds to the gradient of the output matrix, which
# is read and written for it: 2048 rows of gpt2-124m took 0.25 ms, of which 0.07 for that.
LOSS_ROWS = 4096
# Hidden channels come in multiples of it where a product stores gates (`wgmma_launch.sizes`).
GATES = 64
LOGITS = "logits"  # the memory for those with padding: zero before the first step
PITCH = 64  # columns: a row of one head's logits is a multiple of it long


class Moves(CudaPrimitives, Engine):
    """The stream's moves, each with its norm, and whether what the norm gives is kept."""

    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """As `Engine.move_norm`: the last term is added where the sum is normed."""
        if not terms:
            return x, *self.norm(config.norm, x, gain, bias, {})
        *others, (weight, k) = terms
        for each, velocity in others:
            x = self.add(x, velocity, each)
        moved = self.take(*x.shape, kind=self.precision.stream)
        move = {"t": rows_of(k), "weight": float(weight), "moved": rows_of(moved)}
        return moved, *self.norm(config.norm, x, gain, bias, move)

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None, dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """As `Engine.move_norm_backward`: added where it is computed."""
        return self.norm_backward(config.norm, dn, x, gain, stats, dgain, dbias, dx)

    def kept(self, config: ModelConfig, n: Array) -> Array | None:
        """n, where those of all sublayers may be kept (`Precision.kept`); else None."""
        sublayers = 2 * config.n_layers * len(INTEGRATORS[config.integrator].b)
        return n if sublayers * n.nbytes <= self.precision.kept else None


class Turns(Moves):
    """Where heads are turned."""

    def turning(self, config: ModelConfig, T: int, start: int = 0) -> Turning | None:
        """By what heads are turned where they are made; None: nowhere, or by RoPE's own kernels."""
        D, able = config.head_dim, self.multiply.fused and self.precision.turns
        if config.position != "rope" or not able or f"rope {D}" not in EPILOGUES:
            return None
        cos, sin = (x[start : start + T] for x in self.rope_tables(config.context, D))
        return Turning(cos, sin, T, (config.n_heads + config.n_kv_heads) * D)


class Attends(Turns):
    """Attention's sublayer."""

    def attend(
        self, config: ModelConfig, b: Block, n: Array, start: int = 0, cache: Cache | None = None,
        first: Texts | None = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """As `Sublayers.attend`; heads are turned by the product that makes them, if it can."""
        (B, T, _), D, G = n.shape, config.head_dim, config.n_kv_heads
        by = self.turning(config, T, start)
        if by is None or b.wqkv_bias is not None or cache is not None:
            out, saved = super().attend(config, b, n, start, cache, first)
            return out, saved._replace(n=self.kept(config, n))
        heads = self.take(B * T, b.wqkv.shape[1])
        ends = {"epilogue": f"rope {D}", "turn": by}
        self.product("wqkv, RoPE", rows_of(n), self.copy_of(b.wqkv), heads, **ends)
        heads = heads.reshape(B, T, -1, D)
        y, p = self.attention(heads, G, first)
        kept = self.kept(config, n)
        return self.linear(y, b.wo, b.wo_bias), SavedAttention(kept, heads, p, y, first)

    def attend_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        """As `Sublayers.attend_backward`."""
        dy = self.linear_backward(dout, saved.y, b.wo, db.wo, db.wo_bias)
        T, G = dout.shape[1], config.n_kv_heads
        by = self.turning(config, T)
        dheads = self.attention_backward(dy, saved.heads, G, saved.p, saved.first, by)
        del dy
        if config.position == "rope" and by is None:
            cos, sin = self.rope_tables(config.context, config.head_dim)
            self.rope_backward(dheads, config.n_heads + G, cos[:T], sin[:T])
        drows = dheads.reshape(*dout.shape[:2], -1)
        return self.linear_backward(drows, saved.n or again(), b.wqkv, db.wqkv, db.wqkv_bias)


class Mlps(Attends):
    """The MLP's sublayer; h is not kept."""

    def mlp(self, config: ModelConfig, b: Block, n: Array) -> tuple[Array, Any]:
        """As `Sublayers.mlp`."""
        gated = config.mlp == "swiglu"
        if self.multiply.fused and not gated:
            u, h = self._up_gelu(n, b.w_up, b.w_up_bias)
        elif self.multiply.fused and b.w_up_bias is None and config.hidden % GATES == 0:
            u, h = self._up_swiglu(n, b.w_up)
        else:
            u = self.linear(n, b.w_up, b.w_up_bias)
            h = self.swiglu(u) if gated else self.gelu(u)
        return self.linear(h, b.w_down, b.w_down_bias), (self.kept(config, n), u)

    def _up_swiglu(self, n: Array, w: Array) -> tuple[Array, Array]:
        """u = n w, gate and up, and silu(gate) up, by one product."""
        u, h = self.take(*n.shape[:-1], w.shape[1]), self.take(*n.shape[:-1], w.shape[1] // 2)
        ends = {"epilogue": "swiglu", "second": rows_of(u)}
        self.product("w_up, SwiGLU", rows_of(n), self.copy_of(w), rows_of(h), **ends)
        return u, h

    def _up_gelu(self, n: Array, w: Array, bias: Array | None) -> tuple[Array, Array]:
        """u = n w + bias and GELU(u), by one product."""
        u, h = (self.take(*n.shape[:-1], w.shape[1]) for _ in "uh")
        none = np.zeros(w.shape[1], np.uint16)
        aux = self.recording.constant(none) if bias is None else self.copy_of(bias)
        ends = {"epilogue": "bias and gelu", "aux": aux, "second": rows_of(u)}
        self.product("w_up, GELU", rows_of(n), self.copy_of(w), rows_of(h), **ends)
        return u, h


class Bends(Mlps):
    """Products that end in a gate's backward."""

    def _down_gelu(
        self, dout: Array, w: Array, u: Array, dbias: Array | None
    ) -> tuple[Array, Array]:
        """du = dout w^T GELU'(u), and GELU(u) over u, by one product."""
        du = self.take(*u.shape)
        ends = {"epilogue": "gelu backward", "aux": rows_of(u), "second": rows_of(u)}
        a, b = rows_of(dout), self.copy_of(w).T
        self.product("w_down, dX, GELU", a, b, rows_of(du), sums=dbias, **ends)
        return du, u

    def _down_swiglu(self, dout: Array, w: Array, u: Array) -> tuple[Array, Array]:
        """du over u, and h = silu(gate) up, by one product dout w^T, which is not stored."""
        h = self.take(*u.shape[:-1], w.shape[0])
        halves = u.reshape(1, -1, 2, w.shape[0]).swapaxes(1, 2)
        ends = {"epilogue": "swiglu backward", "aux": halves, "second": halves}
        a, b = rows_of(dout), self.copy_of(w).T
        self.product("w_down, dX, SwiGLU", a, b, rows_of(h), **ends)
        return u, h


class MlpsBackward(Bends):
    """And the way back.

    bends_gates: whether a product ends in SwiGLU's backward where it can; a kernel of rows does it
    otherwise.
    """

    bends_gates = True

    def mlp_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        """As `Sublayers.mlp_backward`."""
        dout, (n, u) = self.operand(dout, db.w_down_bias, "w_down"), saved
        if config.mlp == "gelu" and self.multiply.fused:
            du, h = self._down_gelu(dout, b.w_down, u, db.w_up_bias)
        elif self.bends_gates and self.multiply.fused and db.w_up_bias is None:
            du, h = self._down_swiglu(dout, b.w_down, u)
        else:
            dh, gated = self.back(dout, b.w_down), config.mlp == "swiglu"
            du, h = self.gate_backward(gated, dh, u, db.w_up_bias, again=True)
            del dh
        self.gradient(db.w_down, h, dout, "w_down")
        del h
        self.gradient(db.w_up, n or again(), du, "w_up")
        return self.back(du, b.w_up)


class Logits(MlpsBackward):
    """The memory of logits, and their form in products."""

    def _eights(self, logits: Array, W: Array) -> tuple[Array, Array]:
        """dlogits and W^T (K V, C) with as many columns, and rows, as a product of float32 wants.

        The columns that are added are zero, and the rows are the weights that follow W's.
        """
        width = W.shape[0] if self.narrow else eights(W.shape[0])
        return logits[:, :width], replace(W, shape=(width, W.shape[1]))

    def _logits(self, rows: int, columns: int, full: bool) -> Array:
        """Memory for logits. Padding is nobody's to write before cross-entropy, which reads it."""
        if full:
            return self.take(rows, columns)
        memory = self.recording.whole(LOGITS, (LOSS_ROWS, columns), DTYPES[self.precision.kind])
        return memory[:rows]


SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"), "mlp": ("swiglu", "gelu"),
    "bias": (False, True), "tied": (False, True), "integrator": ("euler", "heun", "rk4"),
}  # fmt: skip


class CudaEngine(Logits):
    """Records a pass of the model into `recording`, for a card of this capability."""

    supports = SUPPORTS

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None
    ) -> tuple[Array, Array | None]:
        """As `Engine.loss`: the logits of LOSS_ROWS positions at a time."""
        rows, aims = rows_of(n), rows_of(targets)
        K = aims.shape[1]
        V = W.shape[1] // K
        pitch = -(-V // PITCH) * PITCH
        if K > 1 and pitch != V:
            raise UserError(
                "the cuda engine predicts several tokens where the vocabulary is a multiple of "
                f"{PITCH}, and {V} is none: choose another vocabulary, or another engine"
            )
        losses, copy = self.take(*aims.shape, kind="float32"), self.copy_of(W)
        dn = None if dW is None else self.take(*n.shape)
        for first in range(0, rows.shape[0], LOSS_ROWS):
            part = rows[first : first + LOSS_ROWS]
            logits = self._logits(part.shape[0], K * pitch, pitch == V)
            used = logits[:, : K * V]
            self.product("logits", part, copy, used)
            self.entropy(logits, aims, scale, losses, V, first, dW is not None)
            if dW is not None:
                dpart = rows_of(dn)[first : first + LOSS_ROWS]
                self.product("logits, dX", *self._eights(logits, copy.T), dpart)
                self.gradient(dW, part, used, "logits")
            del logits, used
        return self.sum_of(losses), dn
