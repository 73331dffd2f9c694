# Made from book/q-token-on-a-gpu.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-gputoken-pass
"""Reading tokens on a GPU: a pass over a few rows is one graph, and no host is in it.

A row is a token of some text at some position. One row is a step of one text, several are steps of
several texts, or pieces of one that is read for the first time: the same kernels. Weights are
packed once, keys and values stay on the device. Left out: integrators other than Euler's, heads of
prediction other than the first.

R rows, C channels, H query heads, G key/value heads, D head width, V vocabulary, N parts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nanoeuler.engines.gpu.decode import gemv
from nanoeuler.engines.gpu.decode.attention import (
    NORM_WARPS,
    heads_norm_kernel,
    lanes_of,
    newest_kernel,
)
from nanoeuler.engines.gpu.decode.sampling import PICK_THREADS, enter_kernel, pick_kernel
from nanoeuler.engines.gpu.lang.kernel import Launch, cover
from nanoeuler.engines.gpu.lang.vectors import LANES, SIZES
from nanoeuler.engines.gpu.step.precision import DTYPES, PRECISIONS
from nanoeuler.engines.gpu.step.stepper import gpu
from nanoeuler.engines.gpu.tile.curves import LOG2_E
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig, require
from nanoeuler.model.layers import rope_tables
from nanoeuler.model.modern import soft_cap
from nanoeuler.model.weights import Block, Weights


def tile_rows(kind: str, rows: int) -> int:
    """The rows that a block has of R: 1, 8 or 16; 1 or 4 of float32, without tensor cores."""
    if rows == 1 or kind == "float32":
        return min(rows, 4)
    return 8 if rows == 8 else 16


def rows_for(count: int) -> int:
    """R of the pass that reads `count` rows at once: 1, or 8 doubled as often as needed."""
    return 1 if count == 1 else max(8, 1 << (count - 1).bit_length())


MOST_ROWS = 256  # of a pass of `read`, at most
CHUNK = 128      # positions of a block of attention, at most


class Decoding(NamedTuple):
    """What passes are made for. kind: of weights and caches. texts: how many there is room for.

    early: whether kernels may start before the one before has ended (Hopper). chunk, warps: of
    attention.
    """

    config: ModelConfig
    kind: str = "bf16"
    texts: int = 1
    early: bool = False
    chunk: int = CHUNK
    warps: int = 4

    @property
    def heads(self) -> gemv.Heads:
        """Attention's sizes; a block's positions are such that a lane has eight keys, or fewer."""
        c, width = self.config, 16 // SIZES[self.kind]
        chunk = min(self.chunk, 1024 // max(1, c.head_dim // width))
        return gemv.Heads(
            c.n_heads, c.n_kv_heads, c.head_dim, c.context, c.position == "rope", chunk,
            c.sliding_window, c.qk_norm,
        )

    def in_layer(self, i: int) -> "Decoding":
        """The same for layer i alone, which may have a window of its own."""
        return self._replace(config=self.config.in_layer(i))

    @property
    def shapes(self) -> dict[str, gemv.Shape]:
        """Name -> how each of a block's matrices, and the embedding and the output, is packed."""
        c, D = self.config, self.config.head_dim
        up = 2 * c.hidden if c.mlp == "swiglu" else c.hidden
        sizes = {
            "wqkv": (c.dim, (c.n_heads + 2 * c.n_kv_heads) * D), "wo": (c.n_heads * D, c.dim),
            "w_up": (c.dim, up), "w_down": (c.hidden, c.dim), "output": (c.dim, c.vocab_size),
        }  # fmt: skip
        return {name: gemv.Shape(self.kind, *size) for name, size in sizes.items()}


SUPPORTS = {
    "norm": ("rms", "layer"), "position": ("rope", "learned"),
    "mlp": ("swiglu", "gelu", "gelu_exact", "relu2"), "bias": (False, True), "tied": (False, True),
    "logit_cap": (0.0, 2.0), "init": ("scaled", "zero"),
    "integrator": ("euler",), "sliding_window": (0, 2), "window_pattern": ("S", "SL"),
    "norm_eps": (1e-5, 0.1), "rope_base": (10000.0, 100.0), "head_width": (0, 16),
    "rope_scaling": ("none", "linear", "llama3"), "qkv_bias": (False, True),
    "qk_norm": (False, True),
}  # fmt: skip


def check_model(this: Decoding) -> None:
    """UserError for a model that cannot be decoded here."""
    c = this.config
    require(c, SUPPORTS, "decoding on a GPU")
    if c.dim % gemv.OUT or c.hidden % gemv.OUT or c.head_dim % gemv.OUT:
        raise UserError(
            f"decoding on a GPU wants dim, hidden and the width of heads in eights, not "
            f"{c.dim}, {c.hidden} and {c.head_dim}: choose the engine cpu")
    _ = this.shapes, lanes_of(this.kind, this.heads, this.warps)


ENOUGH = 1024  # blocks that keep a large GPU busy, about eight for each multiprocessor


def form_of(this: Decoding, name: str, rows: int) -> gemv.Form:
    """The form of one of the products of a pass over R rows.

    A block takes one group of eight outputs, or up to four where there are many.
    """
    config, shape, tile = this.config, this.shapes[name], tile_rows(this.kind, rows)
    norm = config.norm
    front = {"wo": "parts", "w_down": "plain"}.get(name, norm)
    ends = {"wqkv": "heads", "w_up": config.mlp, "output": "store"}
    most = 1 if shape.groups * cover(rows, tile) <= ENOUGH else gemv.PAD if rows == 1 else 2
    groups = max(
        n for n in (1, 2, gemv.PAD) if n == 1 or n <= most and n * shape.tiles <= gemv.MOST_TILES
    )
    heads = this.heads if name in ("wqkv", "wo") else None
    if name == "wqkv":
        heads = replace(heads, window=0)  # which doesn't matter there
    end = ends.get(name, "add")
    return gemv.Form(shape, tile, front, end, groups, this.early, heads, config.norm_eps)


def pack_block(this: Decoding, block: Block) -> dict[str, np.ndarray]:
    """Name -> array of one block: matrices packed, vectors float32; zeros for what it lacks."""
    config, made = this.config, {}
    orders = {"wqkv": config.head_dim // 2}
    if config.mlp == "swiglu":
        orders["w_up"] = config.hidden
    for name in ("wqkv", "wo", "w_up", "w_down"):
        matrix, bias = getattr(block, name), getattr(block, f"{name}_bias")
        shape = this.shapes[name]
        order = np.arange(shape.outputs)
        if name in orders:
            order = gemv.pairs(shape.outputs, orders[name])
        made[name] = gemv.pack(shape, matrix[:, order])
        made[f"{name}_bias"] = np.zeros(shape.groups * gemv.OUT, np.float32)
        if bias is not None:
            made[f"{name}_bias"][: shape.outputs] = bias[order]
    if config.qk_norm:
        made |= {"q_norm": block.q_norm, "k_norm": block.k_norm}
    for name in ("norm1", "norm2"):
        gain, bias = getattr(block, name), getattr(block, f"{name}_bias")
        made[name] = gain.astype(np.float32)
        made[f"{name}_bias"] = np.zeros(gain.shape, np.float32) if bias is None else bias
    return {name: np.asarray(a, a.dtype if a.dtype == np.uint16 else np.float32)
            for name, a in made.items()}  # fmt: skip


def pack_ends(this: Decoding, w: Weights) -> dict[str, np.ndarray]:
    """Name -> array of the weights outside the layers."""
    config, shape = this.config, this.shapes["output"]
    gain, bias = w["norm"], w.get("norm_bias")
    made = {"norm": gain, "norm_bias": np.zeros(gain.shape) if bias is None else bias}
    made["positions"] = w.get("positions", np.zeros((1, 4)))
    made["cos"], made["sin"] = rope_tables(config.context, config.head_dim, config.angles)
    made["output_bias"] = np.zeros(shape.groups * gemv.OUT)
    arrays = {name: np.ascontiguousarray(a, np.float32) for name, a in made.items()}
    arrays["embedding"] = gemv.pack(shape, w["embedding"].T)
    if not config.tied:
        arrays["output"] = gemv.pack(shape, w["output"][:, : config.vocab_size])
    return arrays


def working_shapes(this: Decoding, rows: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Name -> shape and dtype of what a pass over R rows works in."""
    config, heads = this.config, this.heads
    H, D, N = heads.H, heads.D, gemv.part_count(heads)
    return {
        "lines": ((rows, 4), np.int32), "x": ((rows, config.dim), np.float32),
        "q": ((rows, H, D), np.float32),
        "raw": ((rows, (H + heads.G) * heads.normed, D), np.float32),
        "parts": ((rows, H, N, D), np.float32),
        "tops": ((rows, H, N), np.float32), "weights": ((rows, H, N), np.float32),
        "h": ((rows, this.shapes["w_down"].padded), DTYPES[this.kind]),
        "logits": ((rows, this.shapes["output"].groups * gemv.OUT), np.float32),
        "said": ((rows, config.context), np.int32),
    }  # fmt: skip


def cache_shape(this: Decoding) -> tuple[int, ...]:
    """Of the keys, and of the values, of all layers: (L, texts, G, context, D)."""
    heads = this.heads
    return this.config.n_layers, this.texts, heads.G, heads.context, heads.D


class ForwardPass:
    """The launches of a pass over R rows, written down one by one.

    arrays: those of the ends, and "keys" and "values", a list of a layer's each; blocks: those of
    each block; work: those of `working_shapes`.
    """

    def __init__(
        self, this: Decoding, rows: int, arrays: dict[str, Any], blocks: Sequence[dict[str, Any]],
        work: dict[str, Any],
    ) -> None:  # fmt: skip
        self.this, self.rows, self.arrays, self.blocks, self.work = this, rows, arrays, blocks, work
        self.own = this  # the same for the layer that is written down
        self.launches: list[tuple[str, Launch]] = []

    def product(
        self, name: str, given: dict[str, Any], reads: tuple[Any, Any, Any], y: Any, stride: int,
        cache: tuple[Any, Any] = (0, 0), scale: float = 0.0,
    ) -> None:  # fmt: skip
        """A product of few rows, with the weights of this name in `given`.

        reads: x, and the gain and bias of the norm before, or what attention's parts need; y: where
        rows of `stride` go; cache: keys and values of the layer.
        """
        form = form_of(self.own, name, self.rows)
        kernel = gemv.few_rows_kernel(form)
        grid = form.shape.groups // form.groups, cover(self.rows, form.rows)
        args = (
            given[name], given[f"{name}_bias"], *reads, y, stride, *cache,
            self.arrays["cos"], self.arrays["sin"], self.work["lines"], float(scale),
        )  # fmt: skip
        self.launches.append((name, Launch(kernel, grid, args)))

    def attention(self, layer: int, b: dict[str, Any]) -> None:
        """The half of a layer that looks at other positions."""
        this = self.own = self.this.in_layer(layer)
        work, heads = self.work, this.heads
        keys, values = self.arrays["keys"][layer], self.arrays["values"][layer]
        scale = LOG2_E / math.sqrt(heads.D)
        reads = work["x"], b["norm1"], b["norm1_bias"]
        raw = work["raw"] if heads.normed else work["q"]
        self.product("wqkv", b, reads, raw, 0, (keys, values), scale)
        if heads.normed:
            kernel = heads_norm_kernel(this.kind, replace(heads, window=0), this.config.norm_eps,
                                       this.early)  # fmt: skip
            tables = self.arrays["cos"], self.arrays["sin"]
            args = raw, b["q_norm"], b["k_norm"], *tables, work["lines"], work["q"], keys, scale
            grid = cover(heads.H + heads.G, NORM_WARPS), self.rows
            self.launches.append(("norm of heads", Launch(kernel, grid, args)))
        kernel = newest_kernel(this.kind, heads, this.warps, this.early)
        grid = gemv.part_blocks(heads), heads.G, self.rows
        parts = work["parts"], work["tops"], work["weights"]
        args = work["q"], keys, values, work["lines"], *parts
        self.launches.append(("attention", Launch(kernel, grid, args)))
        self.product("wo", b, parts, work["x"], this.config.dim, scale=this.config.step_size)

    def mlp(self, b: dict[str, Any]) -> None:
        """The half that looks at its own."""
        this, work = self.this, self.work
        x, h, wide = work["x"], work["h"], work["h"].shape[1]
        self.product("w_up", b, (x, b["norm2"], b["norm2_bias"]), h, wide)
        self.product("w_down", b, (h, 0, 0), x, this.config.dim, scale=this.config.step_size)

    def record(self, picks: bool) -> list[tuple[str, Launch]]:
        """The whole pass, as (name, launch). picks: whether it ends in the choice of tokens."""
        this, config, work, a = self.this, self.this.config, self.work, self.arrays
        shape, learned, V = this.shapes["output"], config.position == "learned", config.vocab_size
        kernel = enter_kernel(shape, learned, this.early)
        args = a["embedding"], a["positions"], work["lines"], work["x"]
        self.launches.append(("enter", Launch(kernel, (self.rows,), args)))
        for layer in range(config.n_layers):
            b = self.blocks[layer // config.repeat]
            self.attention(layer, b)
            self.mlp(b)
        logits = work["logits"]
        given = a if not config.tied else {**a, "output": a["embedding"]}
        reads = work["x"], a["norm"], a["norm_bias"]
        self.product("output", given, reads, logits, logits.shape[1])
        if picks:
            threads = min(PICK_THREADS, LANES * cover(V, 4 * LANES))
            kernel = pick_kernel(V, config.context, threads, this.early)
            args = logits, logits.shape[1], work["lines"], work["said"]
            self.launches.append(("pick", Launch(kernel, (self.rows,), args)))
        return self.launches


# %% sec-gputoken-pass
class Loaded(NamedTuple):
    """A pass on the device."""

    graph: Any
    work: dict[str, Any]
    launches: list[tuple[str, Launch]]


class CudaReader:
    """Reads pieces of texts on a device, and can go on by itself: an `inference.decoder.Reader`.

    texts: how many are kept. more: fields of `Decoding`. An emulated device works, too. arrays,
    blocks: the packed weights, and the caches of keys and values. passes: a graph for each number
    of rows, and whether it ends in a choice of tokens.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, device: Any, kind: str = "bf16",
        texts: int = 1, **more: Any,
    ) -> None:  # fmt: skip
        early = tuple(device.capability) >= (9, 0)
        this = self.this = Decoding(config, kind, texts, **{"early": early, **more})
        check_model(this)
        self.config, self.texts, self.device = config, texts, device
        put = device.array
        self.arrays = {name: put(a) for name, a in pack_ends(this, weights).items()}
        self.blocks = [
            {name: put(a) for name, a in pack_block(this, b).items()} for b in weights.blocks
        ]
        shape, stored = cache_shape(this), np.dtype(DTYPES[kind])
        size = math.prod(shape[1:]) * stored.itemsize
        for name in ("keys", "values"):
            whole = device.empty(shape, stored)  # where nobody has read, nobody looks
            parts = [device.part(whole, i * size, shape[1:], stored) for i in range(shape[0])]
            self.arrays[name] = parts
        self.passes: dict[tuple[int, bool], Loaded] = {}

    def loaded(self, rows: int, picks: bool) -> Loaded:
        """The graph of a pass over R rows; captured when it is first asked for."""
        if (rows, picks) not in self.passes:
            other = self.passes.get((rows, not picks))
            work = other.work if other else {
                name: self.device.array(np.zeros(shape, kind))
                for name, (shape, kind) in working_shapes(self.this, rows).items()
            }  # fmt: skip
            launches = ForwardPass(self.this, rows, self.arrays, self.blocks, work).record(picks)
            self.device.load_all(launch.kernel for _, launch in launches)
            starts = [self.device.prepare(launch) for _, launch in launches]
            graph = self.device.capture(starts)
            self.passes[rows, picks] = Loaded(graph, work, launches)
        return self.passes[rows, picks]

    def _read_rows(self, lines, first, wanted, logits):
        """Read up to MOST_ROWS rows, and take home what is wanted of their logits."""
        loaded = self.loaded(rows_for(len(lines)), picks=False)
        self.begin(loaded, lines)
        loaded.graph.launch()
        there, V = loaded.work["logits"], self.this.config.vocab_size
        for row in range(len(lines)):
            if first + row in wanted:
                text, k = wanted[first + row]
                at = row * there.strides[0]
                logits[text, k, 0] = self.device.host(
                    self.device.part(there, at, (V,), np.float32))

    def begin(self, loaded: Loaded, lines: Sequence[tuple[int, ...]]) -> None:
        """Say what the rows of the next pass are; those that are left over are not there."""
        there = loaded.work["lines"]
        idle = [(0, -1, 0, 0)] * (there.shape[0] - len(lines))
        self.device.fill(there, np.array([*lines, *idle], np.int32))

    def read(
        self, pieces: Sequence[Sequence[int]], starts: Sequence[int], rows: int = 1, heads: int = 1
    ) -> np.ndarray:
        """Logits (B, rows, 1, V) float32 after the last `rows` tokens of each of B pieces.

        Piece i, ids of text i, is at positions from starts[i] on; one of none is not read, and
        its logits mean nothing. UserError for more heads than the first, texts, or positions.
        """
        if heads != 1:
            raise UserError("on a GPU the first head alone is decoded: choose the engine cpu")
        check_pieces(self.this, pieces, starts)
        lines, wanted = lines_of(pieces, starts), wanted_of(pieces, rows)
        logits = np.zeros((len(pieces), rows, 1, self.config.vocab_size), np.float32)
        for first in range(0, len(lines), MOST_ROWS):
            self._read_rows(lines[first : first + MOST_ROWS], first, wanted, logits)
        cap = self.config.logit_cap
        return soft_cap(logits, cap) if cap else logits

    def follow(
        self, tokens: Sequence[int], starts: Sequence[int], count: int
    ) -> np.ndarray:
        """The `count` most probable tokens after each of B texts, one by one: (B, count) int32.

        Text i has been read up to position starts[i], where tokens[i] is, which has not. No
        host is in between. UserError where a text would go beyond the context.
        """
        check_pieces(self.this, [[token] for token in tokens], starts)
        check_room(self.this, max(starts), count)
        loaded = self.loaded(rows_for(len(tokens)), picks=True)
        named = enumerate(zip(tokens, starts, strict=True))
        self.begin(loaded, [(int(token), int(start), i, 0) for i, (token, start) in named])
        for _ in range(count):
            loaded.graph.launch()  # its kernels find the token and the position where they left it
        said = self.device.host(loaded.work["said"])
        return np.stack([said[i, s + 1 : s + 1 + count] for i, s in enumerate(starts)])


# %% sec-gputoken-pass
def lines_of(
    pieces: Sequence[Sequence[int]], starts: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """The line of each row: token, position, text, and a zero; piece after piece."""
    return [
        (token, start + k, text, 0)
        for text, (ids, start) in enumerate(zip(pieces, starts, strict=True))
        for k, token in enumerate(ids)
    ]


def wanted_of(pieces: Sequence[Sequence[int]], rows: int) -> dict[int, tuple[int, int]]:
    """Number of a row -> (text, k): whose logits are wanted, as which of the last `rows`."""
    ends = np.cumsum([len(ids) for ids in pieces])
    return {
        end - rows + k: (text, k)
        for text, (ids, end) in enumerate(zip(pieces, ends, strict=True))
        for k in range(max(0, rows - len(ids)), rows)
    }


def check_room(this: Decoding, start: int, count: int) -> None:
    """UserError where `count` tokens from `start` on would go beyond the context."""
    if start + count >= this.config.context:
        raise UserError(
            f"expected to end before position {this.config.context}, the context, got "
            f"{start} and {count} more: read the newest part again")


def check_pieces(
    this: Decoding, pieces: Sequence[Sequence[int]], starts: Sequence[int]
) -> None:
    """UserError for tokens, positions or texts that there is no room for."""
    config = this.config
    if len(pieces) > this.texts or len(pieces) != len(starts):
        raise UserError(f"expected up to {this.texts} texts and a start of each, got {len(pieces)} "
                        f"and {len(starts)}: make a reader of more texts")
    for ids, start in zip(pieces, starts, strict=True):
        if start < 0 or start + len(ids) > config.context:
            raise UserError(f"expected positions in [0, {config.context}), got {start} and "
                            f"{len(ids)} tokens from there on: cut some off")
        if len(ids) and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise UserError(f"expected ids from 0 to {config.vocab_size - 1}, as the model has")


# %% sec-gputoken-time
BYTES_A_US = 4.3e6  # bytes of memory in a microsecond: an H200's copy reaches 4.2e6
LAUNCH = 1.2    # microseconds of a kernel in a graph that does next to nothing: see appendix G
FIRST = 0.5     # until the first bytes have come from memory: a guess
HANDOVER = 0.8  # from a kernel's end to the wait of one that is there already: a guess
WORK = 0.7      # X from L2, its norm, the products, the sums, the store: a guess


def predict(this: Decoding, position: int) -> dict[str, tuple[int, float]]:
    """Name -> (how many, microseconds of one) of the kernels of a token at this position.

    A kernel that waits starts, loads, works; one that is there early has loaded meanwhile.
    """
    config, heads, size = this.config, this.heads, SIZES[this.kind]
    moved = {name: s.inputs * s.outputs * size for name, s in this.shapes.items()}
    own = [config.in_layer(i).sliding_window or position + 1 for i in range(config.n_layers)]
    keys = sum(min(window, position + 1) for window in own) / config.n_layers
    moved |= {"attention": 2 * heads.G * keys * heads.D * size, "enter": 0, "pick": 0}
    moved |= {"norm of heads": 0} if heads.normed else {}
    counts = dict.fromkeys(moved, config.n_layers) | {"output": 1, "enter": 1, "pick": 1}

    def one(name: str) -> float:
        load = moved[name] / BYTES_A_US
        if not this.early:
            return LAUNCH + FIRST + load + WORK
        if name not in this.shapes:  # what these load is not there before
            return HANDOVER + FIRST + load + WORK
        return max(HANDOVER + WORK, load)

    return {name: (counts[name], one(name)) for name in counts}


def cuda_reader(
    engine: str, config: ModelConfig, weights: Weights, texts: int = 1
) -> CudaReader:
    """The reader of one of `registry.GPU_ENGINES`: of "cuda" in bf16, of the others in float32.

    UserError for a model that cannot be decoded here, MemoryError where it does not fit the GPU.
    """
    return CudaReader(config, weights, gpu(), PRECISIONS[engine].kind, texts)
