# Made from book/13a-a-step-as-a-list.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-step-primitives
"""Single operations on a GPU. They do nothing at once: they write launches down.

What the model's code calls, in the order in which it does, becomes a `Program`. Arrays are
`program.Array`; matrices of weights are read from a bf16 copy that lies as the weights do. Left
out: what is fused out of several operations (engine.py), caches of keys and values.

B batch, T positions, C channels, H query heads, G key/value heads, D head width, V vocabulary,
K predicted tokens, F MLP width.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.attention import choice, float32_launch
from nanoeuler.engines.gpu.attention.documents import Documents
from nanoeuler.engines.gpu.attention.layout import padded
from nanoeuler.engines.gpu.lang.vectors import kind_of, piece
from nanoeuler.engines.gpu.rows import activations, column_sums
from nanoeuler.engines.gpu.rows.column_sums import sum_lines, sum_table_launch
from nanoeuler.engines.gpu.rows.cross_entropy import loss_launch, sums_launch
from nanoeuler.engines.gpu.rows.embedding import embed_backward_launches, embed_launch, slots_shape
from nanoeuler.engines.gpu.rows.fill import add_row_launch
from nanoeuler.engines.gpu.rows.residual_norm import NORMS, add_scaled_launch, move_norm_launch
from nanoeuler.engines.gpu.rows.residual_norm_backward import (
    form_of,
    norm_backward_blocks,
    norm_backward_launches,
)
from nanoeuler.engines.gpu.rows.rope import rope_launch
from nanoeuler.engines.gpu.step.matmul import Multiplier
from nanoeuler.engines.gpu.step.program import Array, Recording
from nanoeuler.model.layers import rope_tables

DTYPES = {"bf16": np.uint16, "float32": np.float32}  # as what a kind is stored: NumPy lacks bf16
WEIGHTS, COPIES = "weights", "copies"  # memories: float32 masters, and their bf16 copy
PARTIALS = "partials"  # the memory of partial sums that wait for the end of the way back


class Precision(NamedTuple):
    """The kinds of numbers: of activations, of the stream, of its gradient.

    pieces: of float32, how many of its pieces of bf16 are multiplied. turns: whether heads are
    turned where they are made, and rounded once, if the card can; else by RoPE's own kernels.
    kept: bytes that the inputs n of all sublayers may take and be kept; else each is made again.
    """

    kind: str = "bf16"
    stream: str = "float32"
    gradient: str = "float32"
    pieces: int = 1
    turns: bool = True
    kept: int = 2 << 30  # enough for 64 sequences of euler-116m, and a 65th of an H200's memory


BF16 = Precision(stream="bf16", gradient="bf16")  # what a GPU is fastest with
# By engine. float32 is multiplied in pieces of bf16: two are as exact as TF32 and more, three as
# float32 (chapter 11g).
PRECISIONS = {
    "cuda": BF16,
    "cuda-tf32": Precision("float32", pieces=2),
    "cuda-float32": Precision("float32", pieces=3),
}


class Texts(NamedTuple):
    """What the engine takes for `first`: rows of several texts, all of it int32.

    documents: two arrays (B, T). places (B, T): each position from its text's beginning; plan: the
    scatter plan of these. Both only where positions are learned, plan only where there is a way
    back.
    """

    documents: Documents
    places: Array | None = None
    plan: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, T)."""
        return self.documents.first.shape


def rows_of(x: Array) -> Array:
    """x (..., columns) as a matrix."""
    return x.reshape(-1, x.shape[-1])


def split(heads: Array, n_kv: int) -> tuple[Array, Array, Array]:
    """q (B, H, T, D), k and v (B, G, T, D) in heads (B, T, H + 2G, D)."""
    H = heads.shape[2] - 2 * n_kv
    parts = heads[:, :, :H], heads[:, :, H : H + n_kv], heads[:, :, H + n_kv :]
    q, k, v = (part.swapaxes(1, 2) for part in parts)
    return q, k, v


@dataclass
class Pending:
    """A norm's backward that is not written down yet: what comes next says what else it gives.

    scaled: the array for weight dx, if one was asked for.
    """

    norm: str
    arrays: tuple  # dn, x, stats, gain, dx, dgain
    before: Array | None
    dbias: Array | None
    weight: float = 1.0
    scaled: Array | None = None


class Recorder:
    """What all operations use: where arrays come from, and where launches go.

    narrow: whether activations are bf16. names: of parameters, by where they lie. stored: the
    addresses of gradients that this step has written before.
    """

    def __init__(
        self, recording: Recording, capability: tuple = (9, 0), multiprocessors: int = 132,
        multiplier: type[Multiplier] = Multiplier, precision: Precision = BF16,
    ) -> None:  # fmt: skip
        self.recording, self.precision = recording, precision
        self.narrow = precision.kind == "bf16"
        self.capability, self.multiprocessors = tuple(capability), multiprocessors
        self.multiply = multiplier(recording, capability, multiprocessors, precision.pieces)
        self.names: dict[tuple[str, int], str] = {}
        self.stored: set[int] = set()
        self.pending: Pending | None = None
        # By where they belong: sums over rows that are not added yet, and their lines of a table.
        self.owed: dict[tuple[str, int], tuple[Array, list]] = {}
        self.used = 0  # floats of the memory of partial sums

    def take(self, *shape: int, kind: str | None = None) -> Array:
        """An array of activations, or of another kind."""
        return self.recording.take(shape, DTYPES[kind or self.precision.kind])

    def copy_of(self, w: Array) -> Array:
        """The bf16 copy of weights: at half their address, since it lies as they do."""
        if not self.narrow:
            return w
        steps = tuple(step // 2 for step in w.strides)
        return Array(COPIES, w.address // 2, w.shape, np.dtype(np.uint16), steps)

    def name_of(self, w: Array) -> str:
        """What a matrix of weights is called: the last part of its name."""
        return self.names.get((w.memory, w.address), "product")


class Owing(Recorder):
    """Sums that are put down for later."""

    def owe(self, count: int, outs: list[Array]) -> Array:
        """Memory for partial sums (count, columns of all outs), which `add_up` adds to outs."""
        if any((out.memory, out.address) in self.owed for out in outs):
            self.pay()  # two lines of one table may not add to one place
        columns, first = outs[0].shape[0], self.used
        pitch = columns * len(outs)
        for i, out in enumerate(outs):
            lines = sum_lines(first + i * columns, count, pitch, out.address // 4, columns)
            self.owed[out.memory, out.address] = out, lines
        self.used += count * pitch
        whole = self.recording.whole(PARTIALS, (self.used,), np.float32)
        return whole[first:].reshape(count, pitch)

    def pay(self) -> None:
        """Write down the sums that are owed; outs are in memories that exist for the whole step."""
        for memory in sorted({memory for memory, _ in self.owed}):
            owed = [both for both in self.owed.values() if both[0].memory == memory]
            first = min(out.address for out, _ in owed)  # what lies before may be on its way (14a)
            end = max(out.address + out.nbytes for out, _ in owed)
            table = np.array([line for _, lines in owed for line in lines], np.int32)
            table[:, 3] -= first // 4
            partials = self.recording.whole(PARTIALS, (self.used,), np.float32)
            outs = self.recording.whole(memory, (end // 4,), np.float32)[first // 4 :]
            launch = sum_table_launch(self.recording.constant(table), partials, outs)
            self.recording.add("sums of norms", launch)
        self.owed, self.used = {}, 0


class Pen(Owing):
    """How launches come on the list, and what is held back."""

    def write(self, name: str, launches: Any, flops: int = 0) -> None:
        """Write launches down, behind what is pending."""
        self.settle()
        self.recording.add(name, launches, flops)

    def product(self, name: str, a: Array, b: Array, c: Array, **ends: Any) -> None:
        """Write a product down, behind what is pending."""
        self.settle()
        self.multiply(name, a, b, c, **ends)

    def settle(self, dmoved: Array | None = None) -> None:
        """Write down what is pending; dmoved: where the sums of weight dx are added."""
        if self.pending is None:
            return
        this, self.pending = self.pending, None
        dn, x, stats, gain, dx, dgain = this.arrays
        dn, x, dx = rows_of(dn), rows_of(x), rows_of(dx)
        before = None if this.before is None else dx
        copy = None if this.scaled is None else rows_of(this.scaled)
        form = form_of(this.norm, dn, x, dx, before, copy, this.dbias, dmoved)
        blocks = norm_backward_blocks(form, x.shape[0], self.multiprocessors)
        outs = [out for out in (dgain, this.dbias, dmoved) if out is not None]
        launch, _ = norm_backward_launches(
            this.norm, dn, x, stats, gain, dx, dgain, self.owe(blocks, outs), before=before,
            copy=copy, dbias=this.dbias, weight=float(this.weight), dmoved=dmoved,
            multiprocessors=self.multiprocessors,
        )  # fmt: skip
        self.recording.add("norm backward", launch)

    def add_up(self) -> None:
        """Write down that all partial sums are added to where they belong."""
        self.settle()
        self.pay()


class Sums(Pen):
    """Gradients of parameters, and what they are sums of."""

    def gradient(self, dw: Array, x: Array, dy: Array, name: str) -> None:
        """dw = x^T dy, or that is added, where the step has written dw before."""
        end = "add" if dw.address in self.stored else "store"
        self.stored.add(dw.address)
        matrix = dy if len(dy.shape) == 2 else rows_of(dy)
        self.product(f"{name}, dW", rows_of(x).T, matrix, dw, epilogue=end)

    def column_sums(self, matrix: Array, out: Array, name: str) -> None:
        """Add the sums over the rows of a matrix to out."""
        width, processors = piece(kind_of(matrix)), self.multiprocessors
        shape = column_sums.partials_shape(*matrix.shape, width, processors)
        partials = self.take(*shape, kind="float32")
        self.write(name, column_sums.columns_launches(matrix, out, partials, True, processors))


class Operands(Sums):
    """What products work on."""

    def operand(self, dy: Array, dbias: Array | None, name: str) -> Array:
        """dy as an operand of products, its sums over rows added to dbias.

        Where dy comes from a norm's backward that is pending, that gives both.
        """
        this, kind = self.pending, self.precision.kind
        if this and dy is this.scaled or this and dy is this.arrays[4] and this.weight == 1:
            if kind_of(dy) != kind:
                this.scaled = this.scaled or self.take(*dy.shape)
                dy = this.scaled
            self.settle(dbias)
            return dy
        if kind_of(dy) != kind:
            dy = self.scale(dy, 1.0)
        if dbias is not None:
            self.column_sums(rows_of(dy), dbias, f"{name}, bias gradient")
        return dy

    def scale(self, x: Array, h: float) -> Array:
        """A new array h x, of activations: from the norm's backward that made x, if it can."""
        out, this = self.take(*x.shape), self.pending
        if this and x is this.arrays[4] and this.scaled is None:
            this.scaled, this.weight = out, h
            return out
        zeros = self.recording.constant(np.zeros(rows_of(x).shape, out.dtype))
        self.write("scale", add_scaled_launch(zeros, rows_of(x), float(h), rows_of(out)))
        return out


class Linear(Operands):
    """Linear maps."""

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """As `Primitives.linear`."""
        y, ends = self.take(*x.shape[:-1], w.shape[1]), {}
        if bias is not None and self.narrow:
            ends = {"epilogue": "bias", "aux": self.copy_of(bias)}
        self.product(self.name_of(w), rows_of(x), self.copy_of(w), rows_of(y), **ends)
        if bias is not None and not self.narrow:
            self.write(f"{self.name_of(w)}, bias", add_row_launch(rows_of(y), bias))
        return y

    def back(self, dy: Array, w: Array) -> Array:
        """dx (..., I) = dy (..., O) w^T."""
        dx = self.take(*dy.shape[:-1], w.shape[0])
        name = f"{self.name_of(w)}, dX"
        self.product(name, rows_of(dy), self.copy_of(w).T, rows_of(dx))
        return dx

    def linear_backward(
        self, dy: Array, x: Array, w: Array, dw: Array, dbias: Array | None = None
    ) -> Array:
        """As `Primitives.linear_backward`."""
        dy = self.operand(dy, dbias, self.name_of(w))
        self.gradient(dw, x, dy, self.name_of(w))
        return self.back(dy, w)


class Tables(Linear):
    """The tables that tokens look up."""

    def embed(
        self, tokens: Array, table: Array, positions: Array | None = None,
        first: Texts | None = None,
    ) -> Array:  # fmt: skip
        """As `Primitives.embed`."""
        x = self.take(*tokens.shape, table.shape[1], kind=self.precision.stream)
        places = first and first.places
        launch = embed_launch(
            tokens.reshape(-1), table, rows_of(x), tokens.shape[1], positions=positions,
            places=places and places.reshape(-1),
        )  # fmt: skip
        self.write("embed", launch)
        return x

    plan: Array  # the scatter plan of the tokens; who records a step sets it

    def embed_backward(
        self, dx: Array, tokens: Array, dtable: Array, dpositions: Array | None = None,
        first: Texts | None = None,
    ) -> None:  # fmt: skip
        """As `Primitives.embed_backward`."""
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
        self.write("embed backward", launches)


class Norms(Tables):
    """The stream: what is added to it, and what reads it through a norm."""

    def add(self, x: Array, y: Array, h: float = 1.0) -> Array:
        """As `Primitives.add`."""
        out = self.take(*x.shape, kind=kind_of(x))
        self.write("add", add_scaled_launch(rows_of(x), rows_of(y), float(h), rows_of(out)))
        return out

    def add_into(self, x: Array, y: Array, h: float = 1.0) -> None:
        """As `Primitives.add_into`."""
        self.write("add", add_scaled_launch(rows_of(x), rows_of(y), float(h), rows_of(x)))

    def norm(
        self, norm: str, x: Array, gain: Array, bias: Array | None, move: dict[str, Any]
    ) -> tuple[Array, Array]:
        """n and stats of x, or of what it is moved to: see `residual_norm.move_norm_launch`."""
        n, rows = self.take(*x.shape), rows_of(x)
        stats = self.take(rows.shape[0], NORMS[norm], kind="float32")
        launch = move_norm_launch(norm, rows, rows_of(n), gain, stats, bias=bias, **move)
        self.write("move and norm" if move else "norm", launch)
        return n, stats

    def rmsnorm(self, x: Array, gain: Array) -> tuple[Array, Array]:
        """As `Primitives.rmsnorm`."""
        return self.norm("rms", x, gain, None, {})

    def layernorm(self, x: Array, gain: Array, bias: Array | None = None) -> tuple[Array, Array]:
        """As `Primitives.layernorm`."""
        return self.norm("layer", x, gain, bias, {})


class NormsBackward(Norms):
    """And the way back."""

    def norm_backward(
        self, norm: str, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None, dx: Array | None = None,
    ) -> Array:  # fmt: skip
        """dx, to which the norm's gradient is added. Written down with what comes next."""
        self.settle()
        out = self.take(*x.shape, kind=self.precision.gradient) if dx is None else dx
        self.pending = Pending(norm, (dy, x, stats, gain, out, dgain), dx, dbias)
        return out

    def rmsnorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array
    ) -> Array:
        """As `Primitives.rmsnorm_backward`."""
        return self.norm_backward("rms", dy, x, gain, stats, dgain)

    def layernorm_backward(
        self, dy: Array, x: Array, gain: Array, stats: Array, dgain: Array,
        dbias: Array | None = None,
    ) -> Array:  # fmt: skip
        """As `Primitives.layernorm_backward`."""
        return self.norm_backward("layer", dy, x, gain, stats, dgain, dbias)


class Positions(NormsBackward):
    """Heads that are turned."""

    def rope_tables(self, T: int, D: int) -> tuple[Array, Array]:
        """As `Primitives.rope_tables`."""
        cos, sin = (
            self.recording.constant(table.astype(np.float32)) for table in rope_tables(T, D)
        )
        return cos, sin

    def rope(self, heads: Array, n: int, cos: Array, sin: Array, back: bool = False) -> Array:
        """As `Primitives.rope`, in place."""
        B, T, N, D = heads.shape
        rows = heads.reshape(B * T, N * D)
        launch = rope_launch(rows, cos, sin, n, D, T, back=back)
        self.write("rope backward" if back else "rope", launch)
        return heads

    def rope_backward(self, dheads: Array, n: int, cos: Array, sin: Array) -> Array:
        """As `Primitives.rope_backward`, in place."""
        return self.rope(dheads, n, cos, sin, back=True)


class Heads(Positions):
    """Attention."""

    def attention(
        self, heads: Array, n_kv: int, first: Texts | None = None
    ) -> tuple[Array, Any]:
        """As `Primitives.attention`; the backward wants y and lse."""
        (B, T, _, D), H = heads.shape, heads.shape[2] - 2 * n_kv
        y, lse = self.take(B, T, H * D), self.take(B, H, padded(T), kind="float32")
        ends = *split(heads, n_kv), y.reshape(B, T, H, D).swapaxes(1, 2), lse
        documents = first and first.documents
        if self.narrow:
            launch = choice.forward_launch(*ends, self.capability, documents)
        else:
            launch = float32_launch.forward_launch(*ends, self.precision.pieces, documents)
        self.write("attention", launch, 2 * B * H * T * (T + 1) * D)  # two products, half of each
        return y, (y, lse)

    def attention_backward(
        self, dy: Array, heads: Array, n_kv: int, p: Any, first: Texts | None = None,
        turn: Any = None,
    ) -> Array:  # fmt: skip
        """As `Primitives.attention_backward`; turn: by what heads were, dheads is turned back."""
        (B, T, N, D), (y, lse) = heads.shape, p
        dheads, delta = self.take(*heads.shape), self.take(*lse.shape, kind="float32")
        do, o = (each.reshape(B, T, N - 2 * n_kv, D) for each in (dy, y))
        ends = do.swapaxes(1, 2), *split(heads, n_kv), o.swapaxes(1, 2), lse, delta
        ends += split(dheads, n_kv)
        documents = first and first.documents
        if self.narrow:
            launches = choice.backward_launches(*ends, self.capability, turn, documents)
        else:
            launches = float32_launch.backward_launches(*ends, self.precision.pieces, documents)
        flops = 5 * B * (N - 2 * n_kv) * T * (T + 1) * D  # five products, half of each
        self.write("attention backward", launches, flops)
        return dheads


class Gates(Heads):
    """What the MLP does between its products."""

    def swiglu(self, gate_up: Array) -> Array:
        """As `Primitives.swiglu`."""
        h = self.take(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        launch = activations.swiglu_launch(rows_of(gate_up), rows_of(h), self.multiprocessors)
        self.write("swiglu", launch)
        return h

    def gelu(self, u: Array) -> Array:
        """As `Primitives.gelu`."""
        h = self.take(*u.shape)
        count = self.multiprocessors
        launch = activations.gelu_launch(rows_of(u), rows_of(h), multiprocessors=count)
        self.write("gelu", launch)
        return h


class GatesBackward(Gates):
    """And the way back."""

    def gate_backward(
        self, gated: bool, dh: Array, u: Array, dbias: Array | None = None, again: bool = False
    ) -> tuple[Array, Array | None]:
        """du, and h again where it is wanted; du's sums over rows are added to dbias."""
        (rows, F), processors = rows_of(dh).shape, self.multiprocessors
        du, h = self.take(*u.shape), self.take(*dh.shape) if again else None
        partials = None
        if dbias is not None:
            shape = activations.partials_shape(rows, F, kind_of(dh), 1 + gated, processors)
            partials = self.take(*shape, kind="float32")
        name = "swiglu" if gated else "gelu"
        backward = getattr(activations, f"{name}_backward_launches")
        launches = backward(
            rows_of(dh), rows_of(u), rows_of(du), h=None if h is None else rows_of(h),
            dbias=dbias, partials=partials, multiprocessors=processors,
        )  # fmt: skip
        self.write("swiglu backward" if gated else "gelu backward", launches)
        return du, h

    def swiglu_backward(self, dh: Array, gate_up: Array) -> Array:
        """As `Primitives.swiglu_backward`."""
        return self.gate_backward(True, dh, gate_up)[0]

    def gelu_backward(self, dh: Array, u: Array) -> Array:
        """As `Primitives.gelu_backward`."""
        return self.gate_backward(False, dh, u)[0]


class CudaPrimitives(GatesBackward):
    """All single operations."""

    sums: Array | None = None  # where the next loss leaves its sums, float32 (K,)

    def entropy(
        self, logits: Array, targets: Array, scale: Array, losses: Array, V: int, first: int,
        gradient: bool,
    ) -> None:  # fmt: skip
        """Losses of rows `first` on, whose logits (n, K P) these are; their gradient in place."""
        if isinstance(scale, np.ndarray):
            scale = self.recording.constant(scale.astype(np.float32))
        given = logits, targets, scale, losses, V, first, gradient
        launch = loss_launch(*given, capability=self.capability)
        self.write("cross-entropy", launch)

    def sum_of(self, losses: Array) -> Array:
        """The sums (K,) of losses (rows, K)."""
        sums, self.sums = self.sums or self.take(losses.shape[1], kind="float32"), None
        self.write("sums of losses", sums_launch(losses, sums))
        return sums

    def cross_entropy(self, logits: Array, targets: Array, scale: Array) -> tuple[Array, Array]:
        """As `Primitives.cross_entropy`, in place."""
        K, V = logits.shape[-2:]
        aims = rows_of(targets)
        losses = self.take(*aims.shape, kind="float32")
        self.entropy(logits.reshape(-1, K * V), aims, scale, losses, V, 0, True)
        return self.sum_of(losses), logits

    def begin(self) -> None:
        """Nothing: an array's place returns when nobody holds it."""

    def scratch(self) -> nullcontext:
        """Nothing: an array's place returns when nobody holds it."""
        return nullcontext()
