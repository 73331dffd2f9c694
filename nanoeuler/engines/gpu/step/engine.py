# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-primitives
"""The engine of a GPU. It does nothing at once: it records launches.

What the model's code calls, in the order in which it does, becomes a `Program`. Arrays are
`program.Array`; products read weights from a bf16 copy that lies as the masters do. Single
operations come first, then what is fused out of several. Left out: the update (recording.py),
caches of keys and values.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.attention import choice, float32_launch, layout, mma_launch
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.gemm.float32 import eights
from nanoeuler.engines.gpu.lang.card import L2
from nanoeuler.engines.gpu.lang.kernel import cover
from nanoeuler.engines.gpu.lang.vectors import kind_of, piece
from nanoeuler.engines.gpu.rows import activations, column_sums, residual_norm
from nanoeuler.engines.gpu.rows import residual_norm_backward as norms_back
from nanoeuler.engines.gpu.rows import rope as rotary
from nanoeuler.engines.gpu.rows.cross_entropy import form_for, loss_launch, sums_launch
from nanoeuler.engines.gpu.rows.embedding import embed_backward_launches, embed_launch, slots_shape
from nanoeuler.engines.gpu.rows.fill import add_row_launch
from nanoeuler.engines.gpu.rows.residual_norm import Add, Norm, add_scaled_launch
from nanoeuler.engines.gpu.rows.rope import HeadNorm
from nanoeuler.engines.gpu.rows.soft_cap import cap_launch, slopes_launch
from nanoeuler.engines.gpu.tile.rope import Turning

# isort: split


from nanoeuler.engines.gpu.step.matmul import STORE, Epilogue, Multiplier
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, DTYPES, Precision
from nanoeuler.engines.gpu.step.program import NOWHERE, Array, Recording
from nanoeuler.engines.interface import Cache, Engine, SavedAttention
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, first_keys
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, Angles, rope_tables
from nanoeuler.model.weights import Block

# Rows whose logits are held at a time. With each such part, a product adds to the gradient of the
# output matrix, which it reads and writes: with 2048 rows of gpt2-124m the product takes 0.25 ms,
# of which these 2 x 154 MB take 0.07. LOSS_BYTES: a part has fewer rows if 4096 took more, which
# begins at 131,073 bf16 logits a row; no preset has them. LOSS_UNIT: rows are a multiple of it.
LOSS_ROWS, LOSS_BYTES, LOSS_UNIT = 4096, 1 << 30, 256
# Hidden channels come in multiples of it where a product stores gates (`wgmma_launch.sizes`).
GATES = 64
# Columns from which on a norm's output is made again and not kept: a layer's products grow with
# the square of them, and the norms' kernels with the columns: 0.4 % of llama-1b's step.
WIDE = 2048
LOGITS = "logits"  # the memory for those with padding: zero before the first step
PITCH = 64  # a row's logits of one predicted token, with padding, are a multiple of it
PARTIALS = "partials"  # the memory of partial sums that are reduced at the end of the backward pass

SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "bias": (False, True), "tied": (False, True),
    "logit_cap": (0.0, 2.0), "init": ("scaled", "zero"),
    "integrator": ("euler", "heun", "rk4"), "window_pattern": ("S", "SL"),
    "sliding_window": (0, 2), "norm_eps": (1e-5, 0.1), "rope_base": (10000.0, 100.0),
    "rope_scaling": ("none", "linear", "llama3"), "head_width": (0, 16), "qkv_bias": (False, True),
    "qk_norm": (False, True),
}  # fmt: skip


class PackedRows(NamedTuple):
    """What the engine takes for `first`: rows of several texts, all of it int32.

    documents: two arrays (B, T), of the keys that are seen. places (B, T): each position from its
    text's beginning; plan: the scatter plan of these. Both only where positions are learned, plan
    only where there is a way back. pairs: of a query and a key, by which a row's FLOPs are counted,
    as if it held one text; None: T (T + 1) / 2. windows: the documents of
    layers with each window, where several texts are in a row.
    """

    documents: Documents
    places: Array | None = None
    plan: Array | None = None
    pairs: int | None = None
    windows: dict[int, Documents] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T)."""
        return self.documents.first.shape


def rows_of(x: Array) -> Array:
    """x (..., columns) as a matrix."""
    return x.reshape(-1, x.shape[-1])


def pairs(T: int, first: PackedRows | None) -> int:
    """The pairs of a query and a key that are counted, of a head and a row of T positions."""
    return first and first.pairs or T * (T + 1) // 2


def split(heads: Array, n_kv: int) -> tuple[Array, Array, Array]:
    """q (B, H, T, D), k and v (B, G, T, D) in heads (B, T, H + 2G, D)."""
    H = heads.shape[2] - 2 * n_kv
    parts = heads[:, :, :H], heads[:, :, H : H + n_kv], heads[:, :, H + n_kv :]
    q, k, v = (part.swapaxes(1, 2) for part in parts)
    return q, k, v


class CudaEngine(Engine):
    """Records a pass of the model into `recording`, for a card of this capability.

    bf16: whether activations are. names: of parameters, by where they lie. stored: the addresses
    of gradients that this step has written before. plan: the scatter plan of the tokens, and sums:
    where the next loss leaves its sums, float32 (K,); whoever records a step sets both. fresh: the
    addresses of norms' gradients, whose first sums are stored; lendable: by block, the gradients
    that lend their memory, see `lend_gradients`; a step sets both.
    fused_swiglu_backward: whether a product ends in SwiGLU's backward where it can; a kernel of
    rows does it otherwise. wide: the columns from which on norms' outputs are made again.
    """

    supports = SUPPORTS
    fused_swiglu_backward = True
    wide: float = WIDE
    plan: Array
    sums: Array | None = None

    def __init__(
        self, recording: Recording, capability: tuple = (9, 0), multiprocessors: int = 132,
        multiplier: type[Multiplier] = Multiplier, l2: int = L2, precision: Precision = BF16,
    ) -> None:  # fmt: skip
        self.recording, self.precision = recording, precision
        self.bf16, self.recompute = precision.kind == "bf16", precision.recompute
        self.capability, self.multiprocessors = tuple(capability), multiprocessors
        self.l2 = l2
        self.multiply = multiplier(recording, capability, multiprocessors, precision.pieces)
        self.names: dict[tuple[str, int], str] = {}
        self.stored: set[int] = set()
        self.fresh: set[int] = set()
        self.lendable: dict[int, list[tuple[str, int, int]]] = {}
        self.lent: dict[int, list[tuple[str, int, int]]] = {}  # of blocks that lend now
        self.pending: norms_back.NormBackward | None = None
        # By where they belong: sums over rows that are not added yet, and their lines of a table.
        self.deferred: dict[tuple[str, int], tuple[Array, list]] = {}
        self.used = 0  # floats of the memory of partial sums

    def take(self, *shape: int, kind: str | None = None) -> Array:
        """An array of activations, or of another kind."""
        return self.recording.take(shape, DTYPES[kind or self.precision.kind])

    def copy_of(self, w: Array) -> Array:
        """The bf16 copy of weights: at half their address, since it lies as they do."""
        if not self.bf16:
            return w
        steps = tuple(step // 2 for step in w.strides)
        return Array(COPIES, w.address // 2, w.shape, np.dtype(np.uint16), steps)

    def name_of(self, w: Array) -> str:
        """The name of a matrix of weights, such as block.0.wqkv."""
        return self.names.get((w.memory, w.address), "product")

    def defer_sums(self, count: int, outs: list[Array]) -> Array:
        """Memory for partial sums (count, columns of all outs), which `flush` adds to outs."""
        if any((out.memory, out.address) in self.deferred for out in outs):
            self.reduce_deferred()  # two lines of one table may not add to one place
        columns, first = outs[0].shape[0], self.used
        pitch = columns * len(outs)
        for i, out in enumerate(outs):
            place = first + i * columns, count, pitch, out.address // 4
            lines = column_sums.sum_lines(*place, columns, store=out.address in self.fresh)
            self.fresh.discard(out.address)
            self.deferred[out.memory, out.address] = out, lines
        self.used += count * pitch
        whole = self.recording.whole(PARTIALS, (self.used,), np.float32)
        return whole[first:].reshape(count, pitch)

    def reduce_deferred(self) -> None:
        """Write down the sums that are owed; outs are in memories that exist for the whole step."""
        for memory in sorted({memory for memory, _ in self.deferred}):
            owed = [both for both in self.deferred.values() if both[0].memory == memory]
            first = min(out.address for out, _ in owed)  # the rest may be in an exchange (14a)
            end = max(out.address + out.nbytes for out, _ in owed)
            table = np.array([line for _, lines in owed for line in lines], np.int32)
            table[:, 3] -= first // 4
            for out, _ in owed:
                self.recording.reclaim(out.address)
            partials = self.recording.whole(PARTIALS, (self.used,), np.float32)
            outs = self.recording.whole(memory, (end // 4,), np.float32)[first // 4 :]
            launch = column_sums.sum_table_launch(self.recording.constant(table), partials, outs)
            self.recording.add("sums of norms", launch)
        self.deferred, self.used = {}, 0

    def record(self, name: str, launches: Any, flops: int = 0) -> None:
        """Write launches down, behind what is pending."""
        self.flush_norm()
        self.recording.add(name, launches, flops)

    def matmul(self, name: str, a: Array, b: Array, c: Array, end: Epilogue = STORE) -> None:
        """Record a product C = A B, behind what is pending."""
        self.flush_norm()
        self.multiply(name, a, b, c, end)

    def flush_norm(self, dmoved: Array | None = None) -> None:
        """Write down what is pending; dmoved: where the sums of h dx go, a bias's gradient."""
        if self.pending is None:
            return
        this, self.pending = self.pending, None
        dn, x, dx = map(rows_of, (this.dn, this.x, this.dx))
        this = this._replace(
            dn=dn, x=x, dx=dx, before=None if this.before is None else dx,
            copy=None if this.copy is None else rows_of(this.copy), dmoved=dmoved,
        )  # fmt: skip
        blocks = norms_back.norm_backward_blocks(this.form, x.shape[0], self.multiprocessors)
        partials = self.defer_sums(blocks, list(this.sums))
        launch, _ = norms_back.norm_backward_launches(this, partials, self.multiprocessors)
        self.recording.add("norm backward", launch)

    def flush(self) -> None:
        """Write down that all partial sums are added to where they belong."""
        self.flush_norm()
        self.reduce_deferred()

    def ending(self, out: Array) -> str:
        """What the next product for a gradient ends in: "store", and after the first time "add"."""
        end = "add" if out.address in self.stored else "store"
        self.stored.add(out.address)
        return end

    def weight_gradient(self, dw: Array, x: Array, dy: Array, name: str) -> None:
        """dw = x^T dy, or that is added, where the step has written dw before."""
        self.recording.reclaim(dw.address)
        matrix = dy if len(dy.shape) == 2 else rows_of(dy)
        self.matmul(f"{name}, dW", rows_of(x).T, matrix, dw, Epilogue(self.ending(dw)))

    def column_sums(self, matrix: Array, out: Array, name: str) -> None:
        """Add the sums over the rows of a matrix to out."""
        width, processors = piece(kind_of(matrix)), self.multiprocessors
        shape = column_sums.partials_shape(*matrix.shape, width, processors)
        partials = self.take(*shape, kind="float32")
        self.record(name, column_sums.columns_launches(matrix, out, partials, True, processors))

    def operand(self, dy: Array, dbias: Array | None, name: str) -> Array:
        """dy as an operand of products, its sums over rows added to dbias.

        Where dy comes from a norm's backward that is pending, that gives both.
        """
        this, kind = self.pending, self.precision.kind
        if this and (dy is this.copy or dy is this.dx and this.weight == 1):
            if kind_of(dy) != kind:
                dy = this.copy or self.take(*dy.shape)
                self.pending = this._replace(copy=dy)
            self.flush_norm(dbias)
            return dy
        if kind_of(dy) != kind:
            dy = self.scale(dy, 1.0)
        if dbias is not None:
            self.column_sums(rows_of(dy), dbias, f"{name}, bias gradient")
        return dy

    def scale(self, x: Array, h: float) -> Array:
        """A new array h x: from the norm's backward that made x, if still pending, else 0 + h x."""
        out, this = self.take(*x.shape), self.pending
        if this and x is this.dx and this.copy is None:
            self.pending = this._replace(copy=out, weight=float(h))
            return out
        zeros = self.recording.constant(np.zeros(rows_of(x).shape, out.dtype))
        self.record("scale", add_scaled_launch(zeros, rows_of(x), float(h), rows_of(out)))
        return out

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        y, end = self.take(*x.shape[:-1], w.shape[1]), STORE
        if bias is not None and self.bf16:
            end = Epilogue("bias", self.copy_of(bias))
        self.matmul(self.name_of(w), rows_of(x), self.copy_of(w), rows_of(y), end)
        if bias is not None and not self.bf16:
            self.record(f"{self.name_of(w)}, bias", add_row_launch(rows_of(y), bias))
        return y

    def linear_dx(self, dy: Array, w: Array) -> Array:
        """dx (..., I) = dy (..., O) w^T."""
        dx = self.take(*dy.shape[:-1], w.shape[0])
        name = f"{self.name_of(w)}, dX"
        self.matmul(name, rows_of(dy), self.copy_of(w).T, rows_of(dx))
        return dx

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        dy = self.operand(dy, dbias, self.name_of(w))
        self.weight_gradient(dw, x, dy, self.name_of(w))
        return self.linear_dx(dy, w)

    def embed(
        self, tokens: Array, table: Array, positions: Array | None = None,
        first: PackedRows | None = None,
    ) -> Array:  # fmt: skip
        x = self.take(*tokens.shape, table.shape[1], kind=self.precision.stream)
        table = self.copy_of(table) if table.memory == NOWHERE else table  # masters in halves
        places = first and first.places
        launch = embed_launch(
            tokens.reshape(-1), table, rows_of(x), tokens.shape[1], positions=positions,
            places=places and places.reshape(-1),
        )  # fmt: skip
        self.record("embed", launch)
        return x

    def embed_backward(
        self, dx: Array, tokens: Array, dtable: Array, dpositions: Array | None = None,
        first: PackedRows | None = None,
    ) -> None:  # fmt: skip
        if first is None or dpositions is None:
            self.scatter(dx, self.plan, dtable, T=tokens.shape[1], dpositions=dpositions)
        else:
            self.scatter(dx, self.plan, dtable)
            self.scatter(dx, first.plan, dpositions)

    def scatter(self, dx: Array, plan: Array, dtable: Array, **more: Any) -> None:
        """Add the rows of dx to those of dtable that the plan says."""
        rows = rows_of(dx)
        slots = self.take(*slots_shape(rows.shape[0], *dtable.shape), kind="float32")
        launches = embed_backward_launches(
            rows, plan, dtable, slots, multiprocessors=self.multiprocessors, **more
        )
        self.record("embed backward", launches)

    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        out = self.take(*x.shape, kind=kind_of(x))
        self.record("add", add_scaled_launch(rows_of(x), rows_of(y), float(h), rows_of(out)))
        return out

    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        self.record("add", add_scaled_launch(rows_of(x), rows_of(y), float(h), rows_of(x)))

    def norm(
        self, norm: Norm, x: Array, gain: Array, bias: Array | None = None, add: Add | None = None
    ) -> tuple[Array, Array]:
        """n and stats of x, or of the residual stream that `add` makes of it."""
        n, rows = self.take(*x.shape), rows_of(x)
        stats = self.take(rows.shape[0], residual_norm.NORMS[norm.kind], kind="float32")
        launch = residual_norm.move_norm_launch(norm, rows, rows_of(n), gain, stats, bias, add)
        self.record("move and norm" if add else "norm", launch)
        return n, stats

    def rmsnorm(self, x: Array, gain: Array, eps: float = RMSNORM_EPS) -> tuple[Array, Array]:
        return self.norm(Norm("rms", eps), x, gain)

    def layernorm(
        self, x: Array, gain: Array, bias: Array | None = None, eps: float = LAYERNORM_EPS
    ) -> tuple[Array, Array]:
        return self.norm(Norm("layer", eps), x, gain, bias)

    def norm_backward(
        self, norm: str, given: tuple, dgain: Array, dbias: Array | None = None,
        dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx, to which the norm's gradient is added; given: dy, x, stats, gain.

        Written down with what comes next.
        """
        self.flush_norm()
        out = self.take(*given[1].shape, kind=self.precision.gradient) if dx is None else dx
        self.pending = norms_back.NormBackward(norm, *given, out, dgain, dx, dbias)
        return out

    def rmsnorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array
    ) -> Array:
        return self.norm_backward("rms", (dy, x, stats, gain), dgain)

    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        return self.norm_backward("layer", (dy, x, stats, gain), dgain, dbias)

    def rope_tables(
        self, T: int, D: int, angles: Angles = Angles()  # noqa: B008 it's immutable
    ) -> tuple[Array, Array]:
        tables = rope_tables(T, D, angles)
        cos, sin = (self.recording.constant(table.astype(np.float32)) for table in tables)
        return cos, sin

    def rope(self, heads: Array, n: int, cos: Array, sin: Array, back: bool = False) -> Array:
        """heads (B, T, N, D) of activations, the first n turned in place by cos, sin (T, D/2).

        back: turned back, which is the backward pass. Returns heads.
        """
        B, T, N, D = heads.shape
        rows = heads.reshape(B * T, N * D)
        launch = rotary.rope_launch(rows, cos, sin, n, T, back=back)
        self.record("rope backward" if back else "rope", launch)
        return heads

    def rope_backward(self, dheads: Array, n: int, cos: Array, sin: Array) -> Array:
        """dheads (B, T, N, D) of activations, the first n turned back in place; returned."""
        return self.rope(dheads, n, cos, sin, back=True)

    def attention(
        self, heads: Array, n_kv: int, first: PackedRows | None = None
    ) -> tuple[Array, Any]:
        """heads (B, T, H+2G, D), n_kv = G -> y (B, T, H*D), both of activations; y and lse, kept.

        lse float32 (B, H, `padded(T)`): the log of each row's sum of exponentials. first: see
        `PackedRows`. UserError for a head width or a card that no kernel serves.
        """
        (B, T, _, D), H = heads.shape, heads.shape[2] - 2 * n_kv
        y, lse = self.take(B, T, H * D), self.take(B, H, layout.padded(T), kind="float32")
        ends = *split(heads, n_kv), y.reshape(B, T, H, D).swapaxes(1, 2), lse
        documents = first and first.documents
        if self.bf16:
            launch = choice.forward_launch(*ends, self.capability, documents)
        else:
            launch = float32_launch.forward_launch(*ends, self.precision.pieces, documents)
        if not self.bf16 or choice.family(self.capability, D) is mma_launch:
            # Only so many heads at a time that their K and V fit into this part of L2 (appendix L).
            (launch,) = layout.in_cache(ends[0], ends[1], [launch], self.l2 * layout.FORWARD_PART)
        self.record("attention", launch, 4 * B * H * D * pairs(T, first))  # two products
        return y, (y, lse)

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Any, first: PackedRows | None = None,
        rope: Any = None,
    ) -> Array:  # fmt: skip
        """dy (B, T, H*D) -> dheads (B, T, H+2G, D), both of activations.

        p: y and lse, which `attention` kept. rope: the `Turning` in which the product that made the
        heads ended, undone in dheads; None: the caller does that.
        """
        (B, T, N, D), (y, lse) = heads.shape, p
        dheads, delta = self.take(*heads.shape), self.take(*lse.shape, kind="float32")
        do, o = (each.reshape(B, T, N - 2 * n_kv, D) for each in (dy, y))
        given = do.swapaxes(1, 2), *split(heads, n_kv), o.swapaxes(1, 2), lse, delta
        ends = layout.Backward(*given, *split(dheads, n_kv))
        documents = first and first.documents
        if self.bf16:
            launches = choice.backward_launches(ends, self.capability, rope, documents)
        else:
            launches = float32_launch.backward_launches(ends, self.precision.pieces, documents)
        if not self.bf16 or choice.family(self.capability, D) is mma_launch:
            launches = layout.in_cache(ends.q, ends.k, launches, self.l2 * layout.BACKWARD_PART)
        flops = 10 * B * (N - 2 * n_kv) * D * pairs(T, first)  # five products
        self.record("attention backward", launches, flops)
        return dheads

    def swiglu(self, gate_up: Array) -> Array:
        h = self.take(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        given = "swiglu", rows_of(gate_up), rows_of(h), self.multiprocessors
        self.record("swiglu", activations.activation_launch(*given))
        return h

    def gelu(self, u: Array, name: str = "gelu") -> Array:
        h = self.take(*u.shape)
        given = name, rows_of(u), rows_of(h), self.multiprocessors
        self.record(name, activations.activation_launch(*given))
        return h

    def gelu_exact(self, u: Array) -> Array:
        """u (..., F) of activations -> u Phi(u), a new array. Equation eq-layers-gelu."""
        return self.gelu(u, "gelu_exact")

    def activation_backward(
        self, name: str, dh: Array, u: Array, dbias: Array | None = None, again: bool = False
    ) -> tuple[Array, Array | None]:
        """du, and h again where it is wanted; du's sums over rows are added to dbias."""
        (rows, F), processors = rows_of(dh).shape, self.multiprocessors
        du, h = self.take(*u.shape), self.take(*dh.shape) if again else None
        sums = None
        if dbias is not None:
            wide = 2 if name == "swiglu" else 1
            shape = activations.partials_shape(rows, F, kind_of(dh), wide, processors)
            sums = dbias, self.take(*shape, kind="float32")
        launches = activations.activation_backward_launches(
            name, rows_of(dh), rows_of(u), rows_of(du), h=None if h is None else rows_of(h),
            sums=sums, multiprocessors=processors,
        )  # fmt: skip
        self.record(f"{name} backward", launches)
        return du, h

    def swiglu_backward(self, dh: Array, gate_up: Array) -> Array:
        return self.activation_backward("swiglu", dh, gate_up)[0]

    def gelu_backward(self, dh: Array, u: Array) -> Array:
        return self.activation_backward("gelu", dh, u)[0]

    def gelu_exact_backward(self, dh: Array, u: Array) -> Array:
        """dh and u (..., F) of activations -> du, a new array. Equation eq-backprop-gelu-exact."""
        return self.activation_backward("gelu_exact", dh, u)[0]

    def relu2(self, u: Array) -> Array:
        """u (..., F) of activations -> its positive part squared, a new array. eq-modern-relu2."""
        return self.gelu(u, "relu2")

    def relu2_backward(self, dh: Array, u: Array) -> Array:
        """dh and u (..., F) of activations -> du, a new array. Equation eq-modern-relu2."""
        return self.activation_backward("relu2", dh, u)[0]

    def loss_rows(
        self, logits: Array, targets: Array, scale: Array, losses: Array, V: int, first: int,
        gradient: bool,
    ) -> None:  # fmt: skip
        """Losses of rows `first` on, of logits (n, K P), P: V padded; their gradient in place."""
        if isinstance(scale, np.ndarray):
            scale = self.recording.constant(scale.astype(np.float32))
        columns = logits.shape[1] // targets.shape[1]
        form = form_for(columns, not self.bf16, gradient, self.capability)
        launch = loss_launch(logits, targets, scale, losses, V, first, form)
        self.record("cross-entropy", launch)

    def loss_total(self, losses: Array) -> Array:
        """The sums (K,) of losses (rows, K)."""
        sums, self.sums = self.sums or self.take(losses.shape[1], kind="float32"), None
        self.record("sums of losses", sums_launch(losses, sums))
        return sums

    def cross_entropy(self, logits: Array, targets: Array, scale: Array) -> tuple[Array, Array]:
        """logits (B, T, K, V), targets int32 (B, T, K), scale (K,) -> float32 sums (K,); dlogits.

        The sums are of -log p in nats, before they are scaled; dlogits is written over logits.
        """
        K, V = logits.shape[-2:]
        aims = rows_of(targets)
        losses = self.take(*aims.shape, kind="float32")
        self.loss_rows(logits.reshape(-1, K * V), aims, scale, losses, V, 0, True)
        return self.loss_total(losses), logits

    def begin(self) -> None:
        """Nothing: an array's place returns when nobody holds it."""

    def scratch(self) -> nullcontext:
        """Nothing: an array's place returns when nobody holds it."""
        return nullcontext()

    # %% sec-step-engine
    def move_norm(
        self, config: ModelConfig, x: Array, terms: Sequence[tuple[float, Array]], gain: Array,
        bias: Array | None,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """x + the sum of weight * k over terms (weight, k); its norm n; what the backward wants.

        x and each k (B, T, C) of the stream's dtype, n of activations, gain and bias float32 (C,).
        The last term is added by the kernel that norms the sum; without terms x is returned.
        """
        self.recording.lending = False
        if not terms:
            return x, *self.norm(Norm(config.norm, config.norm_eps), x, gain, bias)
        *others, (weight, k) = terms
        for each, velocity in others:
            x = self.add(x, velocity, each)
        moved = self.take(*x.shape, kind=self.precision.stream)
        add = Add(rows_of(k), float(weight), rows_of(moved))
        return moved, *self.norm(Norm(config.norm, config.norm_eps), x, gain, bias, add)

    def move_norm_backward(
        self, config: ModelConfig, dn: Array, x: Array, gain: Array, stats: Array,
        dnorm: tuple[Array, Array | None], dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx (B, T, C) plus the norm's gradient, added where that is computed; None: that alone.

        dn (B, T, C), x: the stream that was normed, stats: what the norm kept. Adds to dnorm, the
        gradients of gain and bias, float32 (C,), at the end of the backward pass.
        """
        return self.norm_backward(config.norm, (dn, x, stats, gain), *dnorm, dx)

    def saved_norm(self, config: ModelConfig, n: Array) -> Array | None:
        """n, where those of all sublayers may be kept (`wide`, `Precision.kept`); else None.

        Where layers are run again only one of them has its arrays at a time, and those may stay.
        """
        sublayers = 2 * config.n_layers * len(INTEGRATORS[config.integrator].b)
        may = config.dim < self.wide and sublayers * n.nbytes <= self.precision.kept
        return n if may or self.recompute else None

    def lend_gradients(self, b: Block) -> None:
        """From now on arrays may lie where gradients of blocks before b will be stored (why: 13a,
        "Gradients lend their memory"), not where b's own will: if b runs again, they come next."""
        if self.lendable:
            here = int(self.name_of(b.wqkv).split(".")[1])
            for i in [i for i in self.lendable if i < here]:
                self.lent[i] = self.lendable.pop(i)
                for span in self.lent[i]:
                    self.recording.lend(*span)
            for _, start, _ in self.lent.pop(here, []):
                self.recording.reclaim(start)
        self.recording.lending = True

    def fused_rope(self, config: ModelConfig, T: int, start: int = 0) -> Turning | None:
        """RoPE for the product that makes heads; None: there is none, or it has its own kernels."""
        D = config.head_dim
        able = self.precision.fused_rope and D in self.multiply.turned
        if config.position != "rope" or config.qk_norm or not able:
            return None
        tables = self.rope_tables(config.context, D, config.angles)
        cos, sin = (x[start : start + T] for x in tables)
        return Turning(cos, sin, T, (config.n_heads + config.n_kv_heads) * D)

    def first_keys(
        self, config: ModelConfig, B: int, T: int, first: PackedRows | None = None
    ) -> PackedRows | None:
        """The first key of each query and the last query of each key, for the layer's window.

        None: a query sees all keys up to its own. In packed rows the window is in `first` already,
        since `fill_batch` writes it there.
        """
        seen = first_keys(config, T)
        if first is not None and first.windows:
            first = first._replace(documents=first.windows[config.sliding_window])
        if seen is None:
            return first
        if first is None:
            lines = Documents.window(T, config.sliding_window, B)
            first = PackedRows(Documents(*map(self.recording.constant, lines)))
        return first._replace(pairs=int((np.arange(T) + 1 - seen).sum()))

    def attend(
        self, config: ModelConfig, b: Block, n: Array, start: int = 0, cache: Cache | None = None,
        first: PackedRows | None = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Attention's addition (B, T, C) for n (B, T, C) of activations; what its backward wants.

        start: the position of n's first; cache: whoever keeps keys and values, in training nobody.
        The product that makes heads ends in RoPE, if it can. first: see `PackedRows`.
        """
        self.lend_gradients(b)
        B, T, _ = n.shape
        rope, raw = self.fused_rope(config, T, start), None
        if config.qk_norm:
            heads, raw = self.normed_heads(config, b, n)
        elif rope is None or b.wqkv_bias is not None or cache is not None:
            out, saved = Engine.attend(self, config, b, n, start, cache, first)
            return out, saved._replace(n=self.saved_norm(config, n))
        else:
            heads = self.take(B * T, b.wqkv.shape[1])
            end = Epilogue(f"rope {config.head_dim}", rope=rope)
            self.matmul("wqkv, RoPE", rows_of(n), self.copy_of(b.wqkv), heads, end)
        heads = heads.reshape(B, T, -1, config.head_dim)
        first = self.first_keys(config, B, T, first)
        y, p = self.attention(heads, config.n_kv_heads, first)
        kept = self.saved_norm(config, n)
        return self.linear(y, b.wo, b.wo_bias), SavedAttention(kept, heads, p, y, first, raw)

    def attend_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        dy = self.linear_backward(dout, saved.y, b.wo, db.wo, db.wo_bias)
        T, G = dout.shape[1], config.n_kv_heads
        rope = self.fused_rope(config, T)
        if rope and choice.family(self.capability, config.head_dim) is mma_launch:
            rope = None  # RoPE is not undone there
        dheads = self.attention_backward(dy, saved.heads, G, saved.p, saved.first, rope)
        del dy
        if config.qk_norm:
            self.head_norm_backward(config, b, db, dheads, saved.raw)
        elif config.position == "rope" and rope is None:
            cos, sin = self.rope_tables(config.context, config.head_dim, config.angles)
            self.rope_backward(dheads, config.n_heads + G, cos[:T], sin[:T])
        drows = dheads.reshape(*dout.shape[:2], -1)
        return self.linear_backward(drows, saved.n or again(), b.wqkv, db.wqkv, db.wqkv_bias)

    def head_norm(self, config: ModelConfig, b: Block) -> HeadNorm:
        """QK-norm, and RoPE where there is one, as kernels of rows want them."""
        tables = None, None
        if config.position == "rope":
            tables = self.rope_tables(config.context, config.head_dim, config.angles)
        return HeadNorm(config.n_heads, b.q_norm, b.k_norm, config.norm_eps, *tables)

    def normed_heads(self, config: ModelConfig, b: Block, n: Array) -> tuple[Array, Array]:
        """Heads (B, T, (H+2G) D) from position 0 with QK-norm; queries and keys as they were."""
        (B, T, _), count = n.shape, config.n_heads + config.n_kv_heads
        heads, raw = self.linear(n, b.wqkv, b.wqkv_bias), self.take(B * T, count * config.head_dim)
        launch = rotary.head_norm_launch(rows_of(heads), raw, self.head_norm(config, b), T)
        self.record("norm of heads", launch)
        return heads, raw

    def head_norm_backward(
        self, config: ModelConfig, b: Block, db: Block, dheads: Array, raw: Array
    ) -> None:
        """From the gradient after QK-norm and RoPE to that before, in place; adds to the gains'."""
        self.flush_norm()
        T, rows = dheads.shape[1], raw.shape[0]
        blocks = rotary.head_norm_blocks(rows, self.multiprocessors)
        partials = self.defer_sums(blocks, [db.q_norm, db.k_norm])
        given = dheads.reshape(rows, -1), raw, self.head_norm(config, b), partials, T
        self.record("norm of heads, backward", rotary.head_norm_backward_launch(*given))

    def mlp(self, config: ModelConfig, b: Block, n: Array) -> tuple[Array, Any]:
        u, h = self.hidden(config, b, n)
        h = self.activation(config, u) if h is None else h
        return self.linear(h, b.w_down, b.w_down_bias), (self.saved_norm(config, n), u)

    def mlp_again(self, config: ModelConfig, b: Block, n: Array) -> Any:
        return self.saved_norm(config, n), self.hidden(config, b, n)[0]

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """A layer's forward inside the backward pass, whose pending work waits for what comes next.

        After it gradients lend nothing: arrays of the backward pass may outlive their layer.
        """
        waiting, self.pending = self.pending, None
        yield
        self.pending, self.recording.lending = waiting, False

    def hidden(self, config: ModelConfig, b: Block, n: Array) -> tuple[Array, Array | None]:
        """The MLP's u for n (B, T, C); its h, where the product that makes u makes that as well."""
        self.lend_gradients(b)
        if self.multiply.fused and config.mlp != "swiglu":
            return self.linear_gelu(config.mlp, n, b.w_up, b.w_up_bias)
        if self.multiply.fused and b.w_up_bias is None and config.hidden % GATES == 0:
            return self.linear_swiglu(n, b.w_up)
        return self.linear(n, b.w_up, b.w_up_bias), None

    def activation(self, config: ModelConfig, u: Array) -> Array:
        """h of u by a kernel of rows."""
        return self.swiglu(u) if config.mlp == "swiglu" else self.gelu(u, config.mlp)

    def linear_swiglu(self, n: Array, w: Array) -> tuple[Array, Array]:
        """u = n w, gate and up, and silu(gate) up, by one product."""
        u, h = self.take(*n.shape[:-1], w.shape[1]), self.take(*n.shape[:-1], w.shape[1] // 2)
        end = Epilogue("swiglu", second=rows_of(u))
        self.matmul("w_up, SwiGLU", rows_of(n), self.copy_of(w), rows_of(h), end)
        return u, h

    def linear_gelu(
        self, which: str, n: Array, w: Array, bias: Array | None
    ) -> tuple[Array, Array]:
        """u = n w + bias and an activation of u ("gelu", "gelu_exact", "relu2"), by one product."""
        u, h = (self.take(*n.shape[:-1], w.shape[1]) for _ in "uh")
        none = np.zeros(w.shape[1], np.uint16)
        aux = self.recording.constant(none) if bias is None else self.copy_of(bias)
        end = Epilogue(f"bias and {which}", aux, rows_of(u))
        self.matmul("w_up, GELU", rows_of(n), self.copy_of(w), rows_of(h), end)
        return u, h

    def linear_gelu_backward(
        self, which: str, dout: Array, w: Array, u: Array, dbias: Array | None
    ) -> tuple[Array, Array]:
        """du = dout w^T times the activation's slope at u, and its value over u, by one product."""
        du = self.take(*u.shape)
        end = Epilogue(f"{which} backward", rows_of(u), rows_of(u), dbias)
        a, b = rows_of(dout), self.copy_of(w).T
        self.matmul("w_down, dX, GELU", a, b, rows_of(du), end)
        return du, u

    def linear_swiglu_backward(self, dout: Array, w: Array, u: Array) -> tuple[Array, Array]:
        """du over u, and h = silu(gate) up, by one product dout w^T, which is not stored."""
        h = self.take(*u.shape[:-1], w.shape[0])
        halves = u.reshape(1, -1, 2, w.shape[0]).swapaxes(1, 2)
        end = Epilogue("swiglu backward", halves, halves)
        a, b = rows_of(dout), self.copy_of(w).T
        self.matmul("w_down, dX, SwiGLU", a, b, rows_of(h), end)
        return u, h

    def mlp_backward(
        self, config: ModelConfig, b: Block, db: Block, saved: Any, dout: Array,
        again: Callable[[], Array],
    ) -> Array:  # fmt: skip
        dout, (n, u) = self.operand(dout, db.w_down_bias, "w_down"), saved
        if config.mlp != "swiglu" and self.multiply.fused:
            du, h = self.linear_gelu_backward(config.mlp, dout, b.w_down, u, db.w_up_bias)
        elif self.fused_swiglu_backward and self.multiply.fused and db.w_up_bias is None:
            du, h = self.linear_swiglu_backward(dout, b.w_down, u)
        else:
            dh = self.linear_dx(dout, b.w_down)
            du, h = self.activation_backward(config.mlp, dh, u, db.w_up_bias, again=True)
            del dh
        self.weight_gradient(db.w_down, h, dout, "w_down")
        del h
        self.weight_gradient(db.w_up, n or again(), du, "w_up")
        return self.linear_dx(du, b.w_up)

    def padded_logits(self, logits: Array, W: Array) -> tuple[Array, Array]:
        """dlogits and W^T (K V, C) with as many columns, and rows, as a product of float32 wants.

        The columns that are added are zero, and the rows are the weights that follow a tied W's.
        """
        width = W.shape[0] if self.bf16 else eights(W.shape[0])
        return logits[:, :width], replace(W, shape=(width, W.shape[1]))

    def cap_logits(self, logits: Array, cap: float, gradient: bool) -> Array | None:
        """Cap logits (rows, columns) in place; the slopes, where a gradient will need them."""
        slopes = self.take(*logits.shape) if gradient else None
        self.record("cap of logits", cap_launch(logits, slopes, cap))
        return slopes

    def take_logits(self, rows: int, columns: int, full: bool) -> Array:
        """Memory for logits. No product fills the padding, which cross-entropy reads."""
        if full:
            return self.take(rows, columns)
        return self.recording.whole(LOGITS, (rows, columns), DTYPES[self.precision.kind])

    def loss(
        self, n: Array, W: Array, targets: Array, scale: Array, dW: Array | None = None,
        cap: float = 0.0,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """The losses' sums (K,) in float32 nats, and dn (B, T, C), None where dW is.

        n (B, T, C) of activations, W (C, K V), targets int32 (B, T, K), scale (K,). Adds to dW.
        Holds the logits of `rows_at_once` positions; cap: of these, 0: none. V: see `expect_sizes`.
        """
        rows, aims = rows_of(n), rows_of(targets)
        K = aims.shape[1]
        V = W.shape[1] // K
        pitch = -(-V // PITCH) * PITCH
        losses, copy = self.take(*aims.shape, kind="float32"), self.copy_of(W)
        dn = None if dW is None else self.take(*n.shape)
        most = rows_at_once(rows.shape[0], K * pitch * rows.dtype.itemsize)
        for first in range(0, rows.shape[0], most):
            part = rows[first : first + most]
            logits = self.take_logits(part.shape[0], K * pitch, pitch == V)
            used = logits[:, : K * V]
            self.matmul("logits", part, copy, used)
            slopes = self.cap_logits(logits, cap, dW is not None) if cap else None
            self.loss_rows(logits, aims, scale, losses, V, first, dW is not None)
            if slopes is not None:
                self.record("slopes of the cap", slopes_launch(logits, slopes))
            if dW is not None:
                dpart = rows_of(dn)[first : first + most]
                self.matmul("logits, dX", *self.padded_logits(logits, copy.T), dpart)
                self.weight_gradient(dW, part, used, "logits")
            del logits, used, slopes
        return self.loss_total(losses), dn


# %% sec-step-engine
def rows_at_once(rows: int, size: int) -> int:
    """How many of `rows` positions have logits at a time, if a row of them takes `size` bytes."""
    parts = max(-(-rows // LOSS_ROWS), -(-rows * size // LOSS_BYTES))
    unit = min(LOSS_UNIT, LOSS_ROWS)
    return -(-rows // (parts * unit)) * unit


def expect_sizes(config: ModelConfig) -> None:
    """UserError for a model with a matrix whose rows aren't dense multiples of 16 bytes of bf16.

    Where several tokens are predicted, each one's logits have a multiple of PITCH columns.
    """
    wanted = {"dim": (config.dim, 8), "hidden": (config.hidden, 8)}
    if not config.tied:
        wanted["vocab_size"] = config.vocab_size, PITCH if config.n_predict > 1 else 8
    for name, (value, unit) in wanted.items():
        if value % unit:
            above = cover(value, unit) * unit
            near = f"{above - unit} or {above}" if above > unit else f"{above}"
            raise UserError(
                f"expected a {name} that's a multiple of {unit}, as a GPU multiplies, got {value}: "
                f"choose {near}, or the engine cpu"
            )
