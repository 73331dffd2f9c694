"""Tokens on a GPU (appendix Q), on paper: products of few rows, attention, whole passes.

Bounds of single kernels are roundings counted: B of bf16, U of float32, and those of a sum's
length. A whole pass in bf16 is held to what rounding at the same places costs in float64.
"""

import inspect
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from bench.card.decode import CONFIGS, LLAMA, model
from fragments import qualified, replaced
from mutants import execute
from tiers import kept, thinned

from nanoeuler.emulator import run
from nanoeuler.emulator.device import Device
from nanoeuler.engines.gpu.decode import attention, gemv, sampling
from nanoeuler.engines.gpu.decode import decoder as decoder_module
from nanoeuler.engines.gpu.decode.decoder import CudaReader, Decoding, ForwardPass, rows_for
from nanoeuler.engines.gpu.lang.bf16 import from_bf16, to_bf16
from nanoeuler.engines.gpu.lang.kernel import Launch
from nanoeuler.engines.gpu.tile.curves import LOG2_E
from nanoeuler.errors import UserError
from nanoeuler.model import layers
from nanoeuler.model.weights import initialise

B, U = {"bf16": 2.0**-9, "float32": 2.0**-24}, 2.0**-24  # half a unit in the last place
KINDS = "bf16", "float32"


def draw(shape, kind="float32", seed=0, scale=1.0):
    """Normal deviates as this kind stores them."""
    values = (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    return to_bf16(values) if kind == "bf16" else values


def real(values):
    """As float64."""
    return (from_bf16(values) if values.dtype == np.uint16 else values).astype(np.float64)


def close(got, want, bound):
    """Every number within its bound."""
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= bound).all(), float((np.abs(got - want) / bound).max())


# ---- Products of few rows


def norm_of(front, x, gain, shift):
    """The operand in float64, and how far a kernel's may be from it before it is stored."""
    if front == "plain":
        return x, 0 * x
    if front == "rms":
        n, r = layers.rmsnorm(x, gain)
        off = np.abs(n)
    else:
        n, stats = layers.layernorm(x, gain, shift)
        r = stats[:, 1:]
        off = np.abs(gain) * np.abs(x).max(axis=1, keepdims=True) / r
    return n, (x.shape[1] + 24) * U * (off + np.abs(n))


def check_product(module, kind, inputs, outputs, rows, total, front="plain", end="store", groups=1,
                  seed=None, early=False):  # fmt: skip
    """Run one product of `total` rows, `rows` at a time, and compare; returns its raw outputs."""
    heads, order = None, np.arange(outputs)
    if end == "swiglu":
        order = module.pairs(outputs, outputs // 2)
    if end == "heads":
        heads = module.Heads(3, 1, outputs // 5, 7, True, 32)
        order = module.pairs(outputs, heads.D // 2)
    shape = module.Shape(kind, inputs, outputs)
    form = module.Form(shape, rows, front, end, groups, early, heads)
    W, bias = draw((inputs, outputs), kind, 1), draw(outputs, "float32", 2)
    weights = module.pack(shape, real(W)[:, order])
    biases = np.zeros(shape.groups * 8, np.float32)
    biases[:outputs] = bias[order]
    gain, shift = draw(inputs, "float32", 3), draw(inputs, "float32", 4)
    x = draw((total, inputs), kind if front == "plain" else "float32", 5)
    given = x
    if front == "plain":
        given = np.zeros((total, shape.padded), x.dtype)
        given[:, :inputs] = x
    lines = np.stack([np.zeros(total), np.arange(total) % 7, np.arange(total) % 2, np.zeros(total)],
                     axis=1).astype(np.int32)  # fmt: skip
    lines[-1, 1] = -1  # is not there
    scale = 0.5
    y, keys, values = outputs_of(module, end, kind, total, shape, heads)
    stride = y.shape[-1]
    cos, sin = (a.astype(np.float32) for a in layers.rope_tables(7, 2 * (outputs // 10 or 1)))
    old = real(y)
    args = (weights, biases, given, gain, shift, y, stride, keys, values, cos, sin, lines, scale)
    grid = shape.groups // groups, -(-total // rows)
    run(Launch(module.few_rows_kernel(form), grid, args), seed)
    n, off = norm_of(front, real(x), real(gain), real(shift))
    off = off + (0 if front == "plain" else B[kind]) * np.abs(n)
    want = n @ real(W) + bias
    bound = off @ np.abs(real(W)) + (inputs + 16) * U * (np.abs(n) @ np.abs(real(W)) + np.abs(bias))
    judge(end, kind, want, bound, y, keys, values, old, scale, outputs, heads, cos, sin, lines)
    return y, keys, values


def outputs_of(module, end, kind, total, shape, heads):
    """y, keys and values, as they are before."""
    stored = np.uint16 if kind == "bf16" else np.float32
    cached = np.zeros((2, 1, 7, heads.D if heads else 1), stored)
    wide = {"store": shape.groups * 8, "add": shape.outputs, "gelu": shape.outputs,
            "gelu_exact": shape.outputs, "relu2": shape.outputs, "swiglu": shape.outputs // 2,
            "heads": 3 * heads.D if heads else 0}[end]  # fmt: skip
    if end == "add":
        return draw((total, wide), "float32", 9), cached, cached.copy()
    kinds = np.float32 if end in ("store", "heads") else stored
    return np.zeros((total, wide), kinds), cached, cached.copy()


def judge(end, kind, want, bound, y, keys, values, old, scale, outputs, heads, cos, sin, lines):
    """Compare what an end has made of a product with what it should make of it in float64."""
    got = real(y)
    if end == "store":
        close(got[:, :outputs], want, bound)
    elif end == "add":
        close(got, old + scale * want, scale * bound + 2 * U * (np.abs(old) + np.abs(want)))
    elif end in ("gelu", "gelu_exact"):
        h = getattr(layers, end)(want)
        close(got, h, 1.2 * bound + (B[kind] + 8 * U) * np.abs(h) + 8 * U)
    elif end == "relu2":  # (u + e)^2 - u^2
        h = np.maximum(want, 0) ** 2
        close(got, h, 2 * bound * np.abs(want) + bound**2 + (B[kind] + U) * h)
    elif end == "swiglu":
        gate, up = np.split(want, 2, axis=1)
        e_gate, e_up = np.split(bound, 2, axis=1)
        h = layers.swiglu(want)
        slack = 1.2 * e_gate * (np.abs(up) + e_up) + np.abs(gate) * e_up
        close(got, h, slack + (B[kind] + 8 * U) * np.abs(h))
    else:
        D, here = heads.D, lines[:, 1] >= 0
        at = np.maximum(lines[:, 1], 0)
        turned = layers.rope(want.reshape(1, -1, 5, D), 4, cos[at], sin[at])[0]
        e = np.maximum(*np.split(bound.reshape(-1, 5, D), 2, axis=2))
        e = 2 * np.concatenate([e, e], axis=2) + 4 * U * np.abs(turned)
        close(got.reshape(-1, 3, D), scale * turned[:, :3], e[:, :3])
        for array, i in ((keys, 3), (values, 4)):
            held, slack = np.zeros(array.shape), np.zeros(array.shape)
            held[lines[here, 2], 0, lines[here, 1]] = turned[here, i]
            slack[lines[here, 2], 0, lines[here, 1]] = (e + B[kind] * np.abs(turned))[here, i]
            assert (np.abs(real(array) - held) <= slack).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("front", ["plain", "rms", "layer"])
@pytest.mark.parametrize("inputs, outputs, rows, total", [
    (8, 5, 1, 1), (72, 40, 1, 2), (40, 20, 4, 8), (328, 11, 1, 1),
])  # fmt: skip
def test_products(kind, front, inputs, outputs, rows, total):
    check_product(gemv, kind, inputs, outputs, rows, total, front)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end, outputs", [
    ("add", 24), ("gelu", 24), ("gelu_exact", 24), ("relu2", 24), ("swiglu", 48), ("heads", 80),
])  # fmt: skip
def test_ends(kind, end, outputs):
    check_product(gemv, kind, 40, outputs, 1, 2, "rms", end)
    check_product(gemv, kind, 40, outputs, 4, 8, "layer", end, groups=2)


@pytest.mark.parametrize("rows, groups", [(8, 1), (16, 2), (16, 4)])
def test_rows_on_tensor_cores(rows, groups):
    check_product(gemv, "bf16", 72, 40, rows, rows, "layer", groups=groups)


@pytest.mark.parametrize("kind", KINDS)
def test_two_orders_of_blocks_and_warps_give_equal_bits(kind):
    made = [check_product(gemv, kind, 40, 80, 4, 4, "rms", "heads", seed=s) for s in (None, 1, 2)]
    for other in made[1:]:
        assert all((a == b).all() for a, b in zip(made[0], other, strict=True))


def test_a_row_alone_has_the_bits_it_has_among_others():
    many = check_product(gemv, "bf16", 72, 16, 16, 16, "layer")[0]
    alone = check_product(gemv, "bf16", 72, 16, 1, 16, "layer")[0]
    eights = check_product(gemv, "bf16", 72, 16, 8, 16, "layer", groups=2)[0]
    assert (many == alone).all() and (many == eights).all()


def test_what_a_product_of_few_rows_cannot_do():
    with pytest.raises(UserError, match="multiple of 8 inputs"):
        gemv.Shape("bf16", 12, 8)
    with pytest.raises(UserError, match="multiple of 8 inputs"):
        gemv.Shape("bf16", 1 << 20, 8)
    with pytest.raises(UserError, match="by fours"):
        gemv.pairs(20, 5)


# ---- Attention over a cache


def check_attention(modules, kind="bf16", H=2, G=1, D=16, context=80, ends=(0, 63, 40, -1),
                    seed=None, warps=1, window=0):  # fmt: skip
    """Attention of rows at these positions, put together by a product with the identity."""
    attending, putting = modules
    heads = putting.Heads(H, G, D, context, False, 32, window)
    rows, N = len(ends), putting.part_count(heads)
    q = draw((rows, H, D), "float32", 1, 2.0)
    keys, values = draw((rows, G, context, D), "float32", 2), draw((rows, G, context, D), kind, 3)
    keys[:, :, 256:] *= 3  # so that the largest scores come late
    keys = to_bf16(keys) if kind == "bf16" else keys
    lines = np.zeros((rows, 4), np.int32)
    lines[:, 1], lines[:, 2] = ends, np.arange(rows)[::-1]
    for array in keys, values:  # what nobody has read
        for _, end, text, _ in lines:
            array[text, :, end + 1 :] = 0x7FC0 if kind == "bf16" else np.nan
            before = max(0, end + 1 - window) if window else 0
            array[text, :, :before] = 0x7FC0 if kind == "bf16" else np.nan
    scaled = (q * (LOG2_E / np.sqrt(D))).astype(np.float32)
    out, tops, weights = (
        np.full((rows, H, N, *more), np.nan, np.float32) for more in ((D,), (), ())
    )
    kernel = attending.newest_kernel(kind, heads, warps)
    grid = putting.part_blocks(heads), G, rows
    run(Launch(kernel, grid, (scaled, keys, values, lines, out, tops, weights)), seed)
    shape = putting.Shape("float32", H * D, H * D)
    form = putting.Form(shape, 1, "parts", "add", heads=heads)
    x, zeros = np.zeros((rows, H * D), np.float32), np.zeros(shape.groups * 8, np.float32)
    args = (putting.pack(shape, np.eye(H * D)), zeros, out, tops, weights, x, H * D, 0, 0, 0, 0,
            lines, 1.0)  # fmt: skip
    run(Launch(putting.few_rows_kernel(form), (shape.groups, rows), args), seed)
    for r, (_, end, text, _) in enumerate(lines):
        for h in range(H):
            low = max(0, end + 1 - window) if window else 0
            k, v = (real(array[text, h * G // H, low : end + 1]) for array in (keys, values))
            score = k @ real(q[r, h]) / np.sqrt(D)
            p = np.exp(score - score.max(initial=-1e9))
            want = p @ v / p.sum() if end >= 0 else np.zeros(D)
            size = (np.abs(k) @ np.abs(real(q[r, h]))).max(initial=1) / np.sqrt(D)
            off = 4 * (size * (D + 4) + context) * U * np.abs(v).max(initial=1)  # of scores, sums
            close(x[r, h * D : (h + 1) * D], want, off + 16 * U)
    return x


ATTENDED = [*product(KINDS, [(2, 1, 16, 1), (3, 3, 8, 1), (4, 2, 64, 2)])]


# Wide heads by several warps in one kind: the kinds differ in how a key is read.
@pytest.mark.parametrize("kind, sizes", kept(ATTENDED, *(
    case for case in ATTENDED if case != ("float32", (4, 2, 64, 2))
)))  # fmt: skip
def test_attention(kind, sizes):
    H, G, D, warps = sizes
    warps = 1 if kind == "bf16" and D == 8 else warps
    check_attention((attention, gemv), kind, H, G, D, warps=warps)


def check_heads_norm(module, kind, H=3, G=2, D=48, turned=True):
    """QK-norm of new rows and RoPE: queries, and keys in their cache."""
    heads, rows, eps, scale = gemv.Heads(H, G, D, 9, turned, 32, 0, True), 3, 1e-3, 0.5
    raw, q = draw((rows, H + G, D)), np.full((rows, H, D), np.nan, np.float32)
    gains = [draw(D, seed=i) for i in (1, 2)]
    cos, sin = (t.astype(np.float32) for t in layers.rope_tables(9, D))
    keys = np.zeros((2, G, 9, D), np.uint16 if kind == "bf16" else np.float32)
    lines = np.array([[0, 4, 1, 0], [0, 8, 0, 0], [0, -1, 0, 0]], np.int32)
    kernel = module.heads_norm_kernel(kind, heads, eps)
    run(Launch(kernel, (-(-(H + G) // 4), rows), (raw, *gains, cos, sin, lines, q, keys, scale)))
    parts = raw[:, :H], raw[:, H:]
    y = np.concatenate([layers.rmsnorm(real(part), real(gain), eps)[0]
                        for part, gain in zip(parts, gains, strict=True)], axis=1)  # fmt: skip
    at = np.maximum(lines[:, 1], 0)
    want = layers.rope(y[None], H + G, real(cos)[at], real(sin)[at])[0] if turned else y
    sizes = np.abs(y[..., : D // 2]) + np.abs(y[..., D // 2 :])
    off = (D + 16) * U * np.concatenate([sizes, sizes], axis=-1)
    close(q, scale * want[:, :H], off[:, :H])
    held, slack = np.zeros(keys.shape), np.zeros(keys.shape)
    for row, (_, position, text, _) in enumerate(lines[:2]):
        held[text, :, position] = want[row, H:]
        slack[text, :, position] = off[row, H:] + 2 * B[kind] * np.abs(want[row, H:])
    assert (np.abs(real(keys) - held) <= slack).all()


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_new_heads(kind):
    check_heads_norm(attention, kind)
    check_heads_norm(attention, kind, 1, 1, 128, turned=False)


# A window that is less than a part, one that ends with it, one of two: each in one kind.
WINDOWS = ("bf16", 1), ("float32", 32), ("bf16", 50)


@pytest.mark.parametrize("kind, window", kept(product(KINDS, [1, 5, 32, 33, 50, 99]), *WINDOWS))
def test_attention_over_a_window(kind, window):
    check_attention((attention, gemv), kind, context=150, ends=(0, 31, 32, 149, 100, -1),
                    window=window)  # fmt: skip


def test_attention_over_many_parts():
    made = [check_attention((attention, gemv), context=330, ends=(299,), seed=s) for s in (None, 3)]
    assert (made[0] == made[1]).all()  # eleven parts, put together in eights


# ---- Passes

def reader(name, kind, texts=1, seed=None, **more):
    w = model(name, kind)[0]
    device = Device(seed=seed, multiprocessors=2)
    return CudaReader(w.config, w, device, kind, texts, **{"chunk": 32, "warps": 1, **more})


@pytest.mark.parametrize("name, kind", kept(
    product(CONFIGS, KINDS), ("like Llama", "bf16"), ("like GPT-2", "float32")
))  # fmt: skip - tests/test_switches.py has each switch in a pass
def test_logits_at_every_position_however_the_text_is_cut(name, kind):
    _, text, exact, peer = model(name, kind)
    made = []
    for cuts in ((1, 2, 5), (8,)):
        this, at, rows = reader(name, kind), 0, []
        for n in cuts:
            rows.append(this.read([text[at : at + n]], [at], rows=n)[0, :, 0])
            at += n
        made.append(np.concatenate(rows))
    # As far from float64 as the same roundings in another order of sums: twice that.
    assert np.linalg.norm(made[0] - exact) <= 2 * peer
    assert (made[0] == made[1]).all()  # and the same bits, token by token or at once


def test_texts_of_unequal_lengths():
    _, text, exact, peer = model("like Llama", "bf16")
    this = reader("like Llama", "bf16", texts=3)
    first = this.read([text[:5], text[:2], []], [0, 0, 0])
    then = this.read([text[5:6], text[2:3], text[:3]], [5, 2, 0])
    alone = reader("like Llama", "bf16")
    want = alone.read([text[:6]], [0], rows=6)[0, :, 0]
    got = {4: first[0, 0, 0], 1: first[1, 0, 0], 5: then[0, 0, 0], 2: then[2, 0, 0]}
    for position, logits in got.items():
        assert (logits == want[position]).all(), position
    assert (then[1, 0, 0] == want[2]).all()
    again = this.read([[], text[1:4]], [0, 1], rows=2)  # what was read there is forgotten
    assert (again[1, 1, 0] == want[3]).all()
    assert np.linalg.norm(want - exact[:6]) <= 2 * peer


@pytest.mark.parametrize("name, kind", thinned(
    [("like Llama", "bf16"), ("like GPT-2", "float32")], 2
))  # fmt: skip
def test_greedy_tokens_need_no_host(name, kind):
    _, text, exact, _ = model(name, kind)
    this = reader(name, kind, texts=2)
    this.read([text[:4], text[:2]], [0, 0])
    said = this.follow([text[4], text[2]], [4, 2], 2)
    other = reader(name, kind, texts=2, seed=5)  # another order of blocks, and step by step
    other.read([text[:4], text[:2]], [0, 0])
    tokens, starts, want = [text[4], text[2]], [4, 2], []
    for _ in range(2):
        logits = other.read([[token] for token in tokens], starts)[:, 0, 0]
        tokens, starts = logits.argmax(axis=1).tolist(), [start + 1 for start in starts]
        want.append(tokens)
    assert (said.T == want).all()


def test_of_equal_logits_the_first_is_picked():
    logits = np.full((2, 48), -1, np.float32)
    logits[0, [5, 20, 36]], logits[1, 36] = 2, 0
    lines = np.array([[7, 3, 0, 0], [8, 9, 1, 0]], np.int32)
    said = np.zeros((2, 10), np.int32)
    run(Launch(sampling.pick_kernel(37, 10, 64), (2,), (logits, 48, lines, said)))
    assert lines.tolist() == [[5, 4, 0, 0], [8, 9, 1, 0]]  # the second is at the context's end
    assert said[0, 4] == 5 and not said[1].any()


class Waited(Exception):
    """A kernel waits for the one before it."""


@pytest.mark.parametrize("name", thinned(["like Llama", "like GPT-2", "switched"], 2))
def test_nothing_but_weights_is_read_before_the_wait(name, monkeypatch):
    """All else may be what the kernel before, or the token before, has not written yet."""

    def stop():
        raise Waited

    monkeypatch.setattr(gemv, "wait_before", stop)
    for maker in ("few_rows_kernel", "newest_kernel", "heads_norm_kernel", "enter_kernel",
                  "pick_kernel"):  # fmt: skip
        owner = gemv if maker == "few_rows_kernel" else decoder_module
        monkeypatch.setattr(owner, maker, getattr(owner, maker).__wrapped__)
    w = model(name, "bf16")[0]
    this = Decoding(w.config, "bf16", early=True, chunk=32, warps=1)
    arrays = decoder_module.pack_ends(this, w)
    zeros = np.zeros(decoder_module.cache_shape(this), np.uint16)
    arrays |= {"keys": list(zeros), "values": list(zeros.copy())}
    blocks = [decoder_module.pack_block(this, b) for b in w.blocks]
    shapes = decoder_module.working_shapes(this, 8).items()
    work = {name: np.zeros(shape, kind) for name, (shape, kind) in shapes}
    constant = {id(a) for given in (arrays, *blocks) for a in given.values()}
    for _, launch in ForwardPass(this, 8, arrays, blocks, work).record(picks=True):
        fresh = [a for a in launch.args if isinstance(a, np.ndarray) and id(a) not in constant]
        with pytest.raises(Waited):
            run(launch, fresh=fresh)


def test_what_is_refused():
    this = reader("like Llama", "bf16")
    for pieces, starts, more, words in (
        ([[1]], [0], {"heads": 2}, "first head"), ([[1], [2]], [0, 0], {}, "more texts"),
        ([[1]], [40], {}, "positions in"), ([[19]], [0], {}, "ids from 0 to 18"),
        ([[1]], [-1], {}, "positions in"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            this.read(pieces, starts, **more)
    with pytest.raises(UserError, match="before position 40"):
        this.follow([1], [38], 2)
    refused = (({"integrator": "heun"}, "integrator euler"), ({"hidden": 20}, "in eights"),
               ({"head_width": 24}, "not 24"))  # fmt: skip - before a weight is packed
    for changes, words in refused:
        config = replace(LLAMA, **changes)
        with pytest.raises(UserError, match=words):
            CudaReader(config, initialise(config, 0), Device())


def test_rows_of_a_pass():
    assert [rows_for(n) for n in (1, 2, 8, 9, 64, 100, 256)] == [1, 8, 8, 16, 64, 128, 256]


# ---- Mistakes that are seen

MISTAKES = {
    "a key too few": (attention, "position + 1 - start", "position - start"),
    "weights of parts that are not scaled": (gemv, "total *= scale", "total *= float32(1)"),
    "a part that is not there": (gemv, "if first + i < count:  #", "if True:  #"),
    "the last warp's share": (gemv, "for warp in range(warps):", "for warp in range(warps - 1):"),
    "the other half of a tile": (gemv, "(a2, b2, a3, b3)", "(a0, b0, a1, b1)"),
    "an angle for all": (gemv, "int64(max(position, 0)) * half", "int64(1) * half"),
    "the wrong text": (attention, "((int64(text) * G + g)", "((int64(0) * G + g)"),
    "a key by the gain of queries": (attention, "gains.q if head < H", "gains.q if head < H + 1"),
    "no root": (attention, "a[j] * root *", "a[j] *"),
    "a head turned by another's place": (attention, "(int64(max(position, 0)) * half + i)",
                                         "(int64(1) * half + i)"),
    "a key before the window": (attention, "key >= low and", "key >= low - 1 and"),
    "parts of the text, not the window": (attention, "begin(position) >> log", "0"),
    "parts before the window": (gemv, "count - (begin(position) >> log)", "count"),
}


def spoiled_source(mistake):
    """The text of the module with the mistake in it."""
    module, old, new = MISTAKES[mistake]
    source = inspect.getsource(module)
    old, new = (qualified(each, source, "") for each in (old, new))
    return replaced(source, old, new, module.__name__)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_place(mistake):
    spoiled_source(mistake)


@pytest.mark.parametrize("mistake", thinned(MISTAKES, 6))
def test_mistakes_are_seen(mistake):
    module = MISTAKES[mistake][0]
    spoiled = type(module)(module.__name__)
    execute(spoiled_source(mistake), mistake, spoiled)
    modules = (spoiled, gemv) if module is attention else (attention, spoiled)
    with pytest.raises(Exception):  # noqa: B017 - a bound, or the paper's own fault
        if module is gemv:
            check_product(spoiled, "bf16", 328, 80, 1, 2, "rms", "heads")
            check_attention(modules, context=330, ends=(299,))
        check_attention(modules)
        check_attention(modules, context=150, ends=(100, 149), window=33)
        if module is attention:
            check_heads_norm(spoiled, "float32")


# ---- By an engine's name


def test_an_engine_of_a_gpu_reads_for_a_decoder(monkeypatch):
    """A decoder over the GPU's reader, here on paper, says what one over the processor's says."""
    from nanoeuler.engines import registry
    from nanoeuler.inference.backends import make_reader
    from nanoeuler.inference.decoder import Decoder

    w, text, exact, peer = model("like Llama", "float32")
    with pytest.raises(UserError, match="needs a GPU"):
        monkeypatch.setattr(registry, "_no_gpu", lambda: "there is no CUDA driver on this machine")
        make_reader(w.config, w, "cuda")
    with pytest.raises(UserError, match="auto, cpu"):
        make_reader(w.config, w, "cuda", quantize="int8")
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    monkeypatch.setattr(decoder_module, "gpu", Device)
    made = make_reader(w.config, w, "cuda-float32")
    decoder = Decoder(w.config, w, made)
    decoder.read(text[:2])
    assert np.linalg.norm(decoder.read(text[2:3]) - exact[2]) <= 2 * peer
