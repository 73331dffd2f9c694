"""The CPU engine against the reference: every operation on odd sizes, memory, threads.

Compiled for this processor; test_instructions.py has the same tests compiled for older ones.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crossings import choices, crossings
from head_gains import TermsOfGains
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.dispatcher import Dispatcher
from tiers import paired

from nanoeuler import jit
from nanoeuler.engines import registry
from nanoeuler.engines.cpu import elementwise, gemm, ladder, memory, norms
from nanoeuler.engines.cpu.engine import LOSS_ROWS, CpuEngine, FusedEngine
from nanoeuler.engines.cpu.gemm import (
    BELOW,
    DEPTH,
    FULL,
    LOWER,
    ROWS,
    UPPER,
    WORK,
    multiply,
    multiply_heads,
)
from nanoeuler.engines.cpu.llvm import vector_unit
from nanoeuler.engines.cpu.memory import Arena, aligned
from nanoeuler.engines.cpu.norms import BLOCK
from nanoeuler.engines.cpu.stepper import SHARDS, CpuStepper, gradients_held, shards
from nanoeuler.engines.interface import Engine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import engine_factory, engine_name, make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS, ModelConfig
from nanoeuler.model.layers import GELU_CUBIC, GELU_SCALE
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale, loss_sums
from nanoeuler.model.weights import Weights, initialise

reference = ReferenceEngine()
U = 2.0**-24  # the largest relative error of one float32 operation
GUARD = 64  # floats around every array: more than a tile's width of AVX-512, 48
SENTINEL = np.float32(-1.2345e30)  # no operation on numbers of size 1 comes near it
drawn = settings(max_examples=60, deadline=None, derandomize=True)


def gamma(n):
    """The bound of n roundings in a row: Higham, section 3.1."""
    return n * U / (1 - n * U)


class GuardedArena(Arena):
    """Every array lies between two zones of sentinels, and starts full of NaN."""

    def __init__(self):
        super().__init__()
        self.zones = []

    def take(self, *shape):
        size = int(np.prod(shape))
        field = np.full(size + 2 * GUARD, SENTINEL, np.float32)
        field[GUARD:-GUARD] = np.nan  # an element that is not written shows in the result
        self.zones += [field[:GUARD], field[-GUARD:]]
        return field[GUARD:-GUARD].reshape(shape)

    def untouched(self):
        """Whether all sentinels are still there."""
        return all(np.all(zone == SENTINEL) for zone in self.zones)


def guarded(engine):
    """An engine of this class whose arena, and whose work space, are between sentinels."""
    made = engine()
    made.arena = GuardedArena()
    if hasattr(made, "work"):
        made.work = made.arena.take(WORK)
    return made


SIZES = {  # B, T, C, F, H, G, D, V, K
    "odd": (2, 37, 48, 344, 4, 2, 12, 517, 3),
    "one position": (3, 1, 7, 5, 3, 1, 2, 11, 1),
    "every head its own": (1, 65, 33, 17, 6, 6, 34, 50, 2),
    "one key for six": (2, 19, 40, 23, 6, 1, 16, 9, 4),
    "longer than DEPTH": (1, DEPTH + 21, 20, 9, 2, 1, 10, 5, 1),
    "the small preset": (1, 128, 128, 344, 4, 2, 32, 512, 4),
    "the smallest": (1, 1, 2, 1, 1, 1, 2, 2, 1),
}


def operations(B, T, C, F, H, G, D, V, K):
    """Name, or "name, variant" -> (arguments, longest chain of roundings from input to output)."""
    rng = np.random.default_rng(B * T + C)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    cos, sin = (table.astype(np.float32) for table in reference.rope_tables(T, D))
    x, gain, heads = draw(B, T, C), draw(C), draw(B, T, H + 2 * G, D)
    tokens = rng.integers(V, size=(B, T), dtype=np.int32)
    targets = rng.integers(-1, V, size=(B, T, K), dtype=np.int32)
    r, p = reference.rmsnorm(x, gain)[1], reference.attention(heads, G)[1]
    first = np.sort(rng.integers(T, size=(B, T), dtype=np.int32), axis=1)
    first = np.minimum(first, np.arange(T, dtype=np.int32))
    within = reference.attention(heads, G, first)[1]
    stats, sums = reference.layernorm(x, gain)[1], max(B * T, F) + 1
    into = draw(B, T, F), x, draw(C, F)
    return {
        "embed": ((tokens, draw(V, C)), 0),
        "embed, positions": ((tokens, draw(V, C), draw(T, C)), 1),
        "embed, texts": ((tokens, draw(V, C), draw(T, C), first), 1),
        "embed_backward": ((x, tokens, draw(V, C)), B * T),
        "embed_backward, positions": ((x, tokens, draw(V, C), draw(T, C)), B * T),
        "embed_backward, texts": ((x, tokens, draw(V, C), draw(T, C), first), B * T),
        "linear": ((x, draw(C, F)), C + 1),
        "linear, bias": ((x, draw(C, F), draw(F)), C + 1),
        "linear, tied": ((x, draw(F, C).T), C + 1),
        "linear_backward": ((*into, draw(C, F)), sums),
        "linear_backward, bias": ((*into, draw(C, F), draw(F)), sums),
        "linear_backward, tied": ((*into[:2], draw(F, C).T, draw(F, C).T), sums),
        "rmsnorm": ((x, gain), C),
        "rmsnorm_backward": ((draw(B, T, C), x, gain, r, draw(C)), max(B * T, C)),
        "layernorm": ((x, gain), 2 * C),
        "layernorm, bias": ((x, gain, draw(C)), 2 * C),
        "layernorm_backward": ((draw(B, T, C), x, gain, stats, draw(C)), max(B * T, C)),
        "layernorm_backward, bias": (
            (draw(B, T, C), x, gain, stats, draw(C), draw(C)), max(B * T, C),
        ),
        "rope": ((heads, H + G, cos, sin), 0),
        "rope_backward": ((heads, H, cos, sin), 0),
        "swiglu": ((draw(B, T, 2 * F),), 0),
        "swiglu_backward": ((draw(B, T, F), draw(B, T, 2 * F)), 0),
        "gelu": ((3 * draw(B, T, F),), 0),
        "gelu_backward": ((draw(B, T, F), 3 * draw(B, T, F)), 0),
        "relu2": ((3 * draw(B, T, F),), 0),
        "relu2_backward": ((draw(B, T, F), 3 * draw(B, T, F)), 0),
        "add": ((x, draw(B, T, C)), 0),
        "add, step": ((x, draw(B, T, C), 0.3), 0),
        "add_into": ((x, draw(B, T, C)), 0),
        "add_into, step": ((x, draw(B, T, C), 0.3), 0),
        "scale": ((x, 0.3), 0),
        "attention": ((heads, G), 2 * T + D),
        "attention_backward": ((draw(B, T, H * D), heads, G, p), 4 * T + D),
        "attention, texts": ((heads, G, first), 2 * T + D),
        "attention_backward, texts": ((draw(B, T, H * D), heads, G, within, first), 4 * T + D),
        "cross_entropy": ((draw(B, T, K, V), targets, draw(K)), V),
        "cross_entropy, cap": ((draw(B, T, K, V), targets, draw(K), 1.5), V),
    }  # fmt: skip


# The arguments that an operation adds to, and those that it may use up besides.
ADDS = {
    "embed_backward": (2, 3), "linear_backward": (3, 4), "rmsnorm_backward": (4,),
    "layernorm_backward": (4, 5), "add_into": (0,),
}  # fmt: skip
CHANGES = ADDS | {"rope": (0,), "rope_backward": (0,), "cross_entropy": (0,)}


def copied(x):
    """A copy of an array in the layout that it has, transposed or not; other things themselves."""
    return x.copy(order="K") if isinstance(x, np.ndarray) else x


def run(engine, name, arguments):
    """What an operation returns, and the gradients it added to, as a list; arguments are copied."""
    arguments, before = [copied(x) for x in arguments], [copied(x) for x in arguments]
    returned = getattr(engine, name)(*arguments)
    for i, (x, old) in enumerate(zip(arguments, before, strict=True)):
        assert i in CHANGES.get(name, ()) or np.array_equal(x, old), f"{name} changed argument {i}"
    returned = returned if isinstance(returned, tuple) else (returned,)
    returned = [x for x in returned if x is not None]
    return returned + [arguments[i] for i in ADDS.get(name, ()) if i < len(arguments)]


def absolute(name):
    return lambda *arguments: run(reference, name, [np.abs(x) for x in arguments])


def layernorm(x, gain, bias=0.0):
    deviation, mean = reference.layernorm(x, gain)[1][..., 1:], np.abs(x).mean(-1, keepdims=True)
    spread = (np.abs(x) + mean) / deviation  # the deviation's own relative error is below its max
    stats = np.concatenate([mean, deviation * (1 + spread.max())], axis=-1)
    return np.abs(gain) * spread * (2 + spread.max()) + np.abs(bias), stats


def layernorm_backward(dy, x, gain, stats, *added):
    mean, deviation = np.abs(stats[..., :1]), stats[..., 1:]
    x_hat, dx_hat = (np.abs(x) + mean) / deviation, np.abs(gain * dy)
    along = (dx_hat * x_hat).mean(-1, keepdims=True)
    dx = (dx_hat + dx_hat.mean(-1, keepdims=True) + x_hat * along) / deviation
    sums = (np.abs(dy) * x_hat).sum((0, 1)), np.abs(dy).sum((0, 1))
    return [dx, *(np.abs(old) + new for old, new in zip(added, sums, strict=False))]


def gelu_backward(dh, u):
    return [np.abs(dh) * (1 + np.abs(u) * GELU_SCALE * (1 + 3 * GELU_CUBIC * u * u))]


# Where terms cancel, an error is measured by what cancelled: the formula on absolute values, with
# every difference a sum and every tanh 1. Name -> of an operation's arguments, the list of results.
TERMS = {
    "linear": absolute("linear"), "linear_backward": absolute("linear_backward"),
    "layernorm": layernorm, "layernorm_backward": layernorm_backward,
    "gelu": lambda u: [np.abs(u)], "gelu_backward": gelu_backward,
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("engine", [FusedEngine, CpuEngine])
def test_operations(engine, sizes):
    engine = guarded(engine)
    for case, (arguments, n) in operations(*sizes).items():
        name = case.split(",")[0]
        wide = [np.float64(x) if getattr(x, "dtype", 0) == np.float32 else x for x in arguments]
        exact, got = run(reference, name, wide), run(engine, name, arguments)
        if not name.startswith("linear"):
            n += 30  # for the steps around the sums, an exponential or a tanh among them
        largest = [np.abs(x).max() for x in exact]
        terms = TERMS[name](*wide) if name in TERMS else largest
        for a, b, size in zip(got, exact, terms, strict=True):
            assert a.shape == b.shape, case
            assert np.all(np.abs(a - b) <= gamma(n) * size), case
        assert engine.arena.untouched(), case


ENGINES = pytest.mark.parametrize("make", [FusedEngine, CpuEngine])
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])


@ENGINES
@NORMS
@pytest.mark.parametrize("count", [0, 1, 3])
def test_move_norm(make, norm, count):
    """The sum within its roundings; then the norm of just that sum within its own."""
    rng, engine = np.random.default_rng(count), guarded(make)
    (x, *terms), (gain, bias) = (rng.standard_normal((n, 2, 19, 33), "f4") for n in (count + 1, 2))
    gain, bias = gain[0, 0], bias[0, 0] if norm == "layer" else None
    terms = [(0.3 * (i + 1), k) for i, k in enumerate(terms)]
    before = x.copy()
    moved, n, stats = engine.move_norm(replace(RAGGED, norm=norm), x, terms, gain, bias)
    assert np.array_equal(x, before) and (moved is x) == (not terms)
    wide = np.float64(x) + sum(h * np.float64(k) for h, k in terms)
    size = np.abs(x) + sum(np.abs(h * k) for h, k in terms)
    # a term is a product and a sum, and its factor was rounded
    assert np.all(np.abs(moved - wide) <= gamma(3 * count) * size)
    name, arguments = f"{norm}norm", (moved, gain) if norm == "rms" else (moved, gain, bias)
    arguments = [x if x is None else np.float64(x) for x in arguments]
    exact = run(reference, name, arguments)
    sizes = TERMS[name](*arguments) if name in TERMS else [np.abs(x).max() for x in exact]
    for a, b, size in zip((n, stats), exact, sizes, strict=True):
        assert np.all(np.abs(a - b) <= gamma(2 * 33 + 30) * size)
    assert engine.arena.untouched()


@ENGINES
@NORMS
@pytest.mark.parametrize("add", [False, True])
def test_move_norm_backward(make, norm, add):
    rng, engine, config = np.random.default_rng(1), guarded(make), replace(RAGGED, norm=norm)
    dn, x, before = rng.standard_normal((3, 2, 19, 33), "f4")
    gain, *added = rng.standard_normal((3 if norm == "layer" else 2, 33), "f4")
    stats = getattr(reference, f"{norm}norm")(x, gain)[1]
    wide = [np.float64(each) for each in (dn, x, gain, stats, *added)]
    exact = run(reference, f"{norm}norm_backward", wide)
    dx, sums = before.copy() if add else None, [*(each.copy() for each in added), None][:2]
    out = engine.move_norm_backward(config, dn, x, gain, stats, sums, dx)
    assert (out is dx) == add
    exact[0] = exact[0] + (before if add else 0)
    sizes = layernorm_backward(*wide) if norm == "layer" else [np.abs(x).max() for x in exact]
    sizes[0] = sizes[0] + add * np.abs(before)
    for a, b, size in zip((out, *sums[: len(added)]), exact, sizes, strict=True):
        assert np.all(np.abs(a - b) <= gamma(38 + 30) * size)
    assert engine.arena.untouched()


def test_loss_in_parts():
    """Logits of 256 positions at a time: the same bytes as at once, in less memory."""
    rng, (B, T, C, K, V) = np.random.default_rng(0), (3, 2 * LOSS_ROWS // 3 + 50, 24, 2, 61)
    n, W = rng.standard_normal((B, T, C), "f4"), rng.standard_normal((C, K * V), "f4")
    targets, scale = rng.integers(-1, V, size=(B, T, K)), np.array([0.7, 0.2])
    engine, dW, other = CpuEngine(), np.ones_like(W), np.ones_like(W)
    sums, dn = engine.loss(n, W, targets, scale, dW)
    parts = engine.arena.needed
    alone, nothing = engine.loss(n, W, targets, scale)
    assert nothing is None and np.array_equal(alone, sums)
    engine = CpuEngine()
    whole, dwhole = Engine.loss(engine, n, W, targets, scale, other)
    assert np.array_equal(dn, dwhole) and np.array_equal(dW, other)
    assert np.allclose(sums, whole, rtol=B * T * 2.0**-52, atol=0)  # float64 in another order
    assert parts < LOSS_ROWS * K * V + 2 * B * T * C + LOSS_ROWS * C + 64 < engine.arena.needed


@pytest.mark.parametrize("operation", ["linear_backward", "rmsnorm_backward", "layernorm_backward"])
def test_sums_over_positions_in_blocks(operation):
    """Rows of 1.5 u on a sum of 1: one after the other, each is rounded up to 2 u."""
    engine, N = CpuEngine(), 4096
    x = np.ones((1, N, 2), np.float32)
    dy, total, gain = 1.5 * U * x, np.zeros(2, np.float32), np.ones(2, np.float32)
    dy[0, 0] = 1
    if operation == "linear_backward":
        w = np.zeros((2, 2), np.float32)
        engine.linear_backward(dy, x, w, w.copy(), total)
    elif operation == "rmsnorm_backward":
        engine.rmsnorm_backward(dy, x, gain, x[..., :1], total)
    else:  # mean 0, deviation 1
        engine.layernorm_backward(dy, x, gain, np.stack([0 * x[..., 0], x[..., 0]], -1), total)
    exact = np.float64(dy[0]).sum(0)
    # BLOCK rows, N / BLOCK blocks, and the steps to a row: a number in it has so many roundings
    assert np.all(np.abs(total - exact) <= gamma(BLOCK + N // BLOCK + 4) * exact)


def views(rng, rows, columns, transposed, *around):
    """A float32 view (*around, rows, columns), itself a transpose or not, in a larger field."""
    shape = (columns, rows) if transposed else (rows, columns)
    x = rng.standard_normal((*around, shape[0] + 3, shape[1] + 2), np.float32)[..., 1:-2, 1:-1]
    return x.swapaxes(-2, -1) if transposed else x


@drawn
@given(
    st.integers(1, 100), st.integers(1, 130), st.integers(1, 2 * DEPTH + 9), st.booleans(),
    st.booleans(), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_products(M, N, P, a_transposed, b_transposed, add, seed):
    rng = np.random.default_rng(seed)
    a, b = views(rng, M, P, a_transposed), views(rng, P, N, b_transposed)
    field = np.full((M + 2 * ROWS, N + 2 * GUARD), SENTINEL, np.float32)
    c = field[ROWS:-ROWS, GUARD:-GUARD]
    c[...] = old = rng.standard_normal((M, N), np.float32)
    work = np.full(WORK + 2 * GUARD, SENTINEL, np.float32)
    multiply(a, b, c, add, work[GUARD:-GUARD])
    exact = np.float64(a) @ np.float64(b) + add * np.float64(old)
    assert np.all(np.abs(c - exact) <= gamma(P + 1) * (np.abs(a) @ np.abs(b) + add * np.abs(old)))
    c[...] = SENTINEL
    assert np.all(field == SENTINEL)
    assert np.all(work[:GUARD] == SENTINEL) and np.all(work[-GUARD:] == SENTINEL)


@pytest.mark.parametrize("rung", [ladder.three_loops, ladder.tile])
def test_the_ladders_plain_products(rung):
    rng = np.random.default_rng(0)
    for M, N, P in ((4, 4, 1), (8, 12, 37), (36, 20, 130)):
        a, b = rng.standard_normal((M, P), np.float32), rng.standard_normal((P, N), np.float32)
        field = np.full((M + 8, N), SENTINEL, np.float32)
        rung(a, b, field[4:-4])
        exact = np.float64(a) @ np.float64(b)
        assert np.all(np.abs(field[4:-4] - exact) <= gamma(P) * (np.abs(a) @ np.abs(b)))
        assert np.all(field[:4] == SENTINEL) and np.all(field[-4:] == SENTINEL)
    for a, b, c in (((4, 5), (6, 4), (4, 4)), ((4, 5), (5, 4), (8, 4)), ((4, 5), (5, 4), (4, 8))):
        with pytest.raises(ValueError, match="cannot be multiplied"):
            rung(*(np.zeros(shape, np.float32) for shape in (a, b, c)))
    odd = [np.zeros(shape, np.float32) for shape in ((6, 5), (5, 4), (6, 4))]
    if rung is ladder.tile:
        with pytest.raises(ValueError, match="multiples of 4"):
            rung(*odd)


@drawn
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40),
    st.integers(1, 2 * DEPTH + 9), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_triangles(group, G, B, D, T, seed):
    rng, H, work = np.random.default_rng(seed), group * G, aligned(WORK)
    lower = np.tril(np.ones((T, T), np.float32))

    def bounded(c, a, b):
        exact, size = np.float64(a) @ np.float64(b), np.abs(a) @ np.abs(b)
        if c.shape[1] == G:  # summed over the group
            exact, size = (x.reshape(B, G, group, *x.shape[2:]).sum(2) for x in (exact, size))
        return np.abs(c - exact) <= gamma(T + D + group) * size

    q, k = views(rng, T, D, False, B, H), views(rng, T, D, False, B, G)
    of_head = np.repeat(k, group, axis=1)
    scores = np.full((B, H, T, T), np.nan, np.float32)
    multiply_heads(q, k.swapaxes(2, 3), scores, BELOW, work)
    assert np.all(bounded(scores, q, of_head.swapaxes(2, 3))[..., lower == 1])

    p = lower * rng.standard_normal((B, H, T, T), np.float32)
    y, dk = np.full((B, H, T, D), np.nan, np.float32), np.full((B, G, T, D), np.nan, np.float32)
    multiply_heads(p, k, y, LOWER, work)
    assert np.all(bounded(y, p, of_head))
    for shape in (UPPER, FULL):
        multiply_heads(p.swapaxes(2, 3), q, dk, shape, work)
        assert np.all(bounded(dk, p.swapaxes(2, 3), q))


def problem(config, B, T, seed=0):
    """Weights, tokens, targets (some ignored) and scale."""
    rng = np.random.default_rng(seed)
    w = initialise(config, seed)
    for x in w.values():
        if x.ndim == 1:  # neither gains of 1 nor biases of 0, behind which much could hide
            x += 0.3 * rng.standard_normal(x.shape, np.float32)
    tokens = rng.integers(config.vocab_size, size=(B, T), dtype=np.int32)
    shape = (B, T, config.n_predict)
    targets = rng.integers(-1, config.vocab_size, size=shape, dtype=np.int32)
    return w, tokens, targets, loss_scale(targets, head_weights(config.n_predict))


RAGGED = ModelConfig(
    vocab_size=517, dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden=37, context=40, n_predict=3
)
GPT2 = replace(
    RAGGED, n_kv_heads=4, n_predict=1, norm="layer", position="learned", mlp="gelu", bias=True,
    tied=True,
)  # fmt: skip
MODELS = {
    "ragged": (RAGGED, 3, 37),
    "one position": (RAGGED, 2, 1),
    "one key for six": (ModelConfig(29, 60, 1, 6, 1, 11, 64, 2), 2, 50),
    "every head its own": (ModelConfig(100, 42, 3, 3, 3, 50, 20, 1), 1, 20),
    "small": (PRESETS["small"], 3, 128),
}


def compare(config, B, T, engine):
    """Assert that an engine is as near to float64 as NumPy's float32 is, in two passes."""
    w, tokens, targets, scale = problem(config, B, T)
    wide = Weights(config, np.float64, np.float64(w.flat))
    exact, yardstick = wide.zeros_like(), w.zeros_like()
    chain = {1: min(B * T, BLOCK + B * T / BLOCK)}
    heads = B * T * config.n_heads  # rows that the gain of a query's norm is summed over
    chain[config.n_heads] = min(heads, BLOCK + heads / BLOCK)
    whole = TermsOfGains()
    sums = loss_and_gradients(whole, config, wide, tokens, targets, scale, exact)
    loss_and_gradients(reference, config, w, tokens, targets, scale.astype(np.float32), yardstick)
    for _ in range(2):  # memory from NumPy, then from the slab
        dw = w.zeros_like()
        got = loss_and_gradients(engine, config, w, tokens, targets, scale, dw)
        # A mean over many logarithms of float32 logits: their errors cancel rather than add.
        assert np.abs(got - sums).max() <= 2 * U * np.abs(sums).max()
        for name in dw:
            size = np.linalg.norm(exact[name])
            allowed = np.linalg.norm(yardstick[name] - exact[name])
            # Twice NumPy's own error in float32, since two sequences of roundings are not alike;
            # and the tensor's own sum over positions, whose longest chain of independent roundings
            # amounts to its root in u (Higham and Mary 2019), for NumPy may be lucky there: of the
            # sum's size, or, of gains of heads, whose terms cancel, of theirs (head_gains.py).
            terms = whole.of(exact[name])
            longest = chain[1 if terms is None else config.n_heads]
            allowed = 2 * allowed + longest**0.5 * U * (size if terms is None else terms)
            assert np.linalg.norm(dw[name] - exact[name]) <= allowed, name


@pytest.mark.parametrize("engine", [FusedEngine, CpuEngine])
@pytest.mark.parametrize(("config", "B", "T"), MODELS.values(), ids=MODELS)
def test_model(config, B, T, engine):
    compare(config, B, T, engine())


SETTINGS = crossings("sliding_window", apart=("integrator",))


@pytest.mark.parametrize("engine", [FusedEngine, CpuEngine])
@pytest.mark.parametrize("setting", paired(SETTINGS, choices("integrator")))
def test_every_architecture(setting, engine):
    engine = engine()  # one for all three: an arena does not care whose pass it holds
    for integrator, step_size in (("euler", 1.0), ("heun", 0.7), ("rk4", 1.5)):
        changes = setting | {"n_predict": 1, "integrator": integrator, "step_size": step_size}
        compare(replace(RAGGED, **changes), 2, 37, engine)


def test_shared_blocks():
    compare(replace(RAGGED, n_layers=4, repeat=2, step_size=0.5), 2, 37, CpuEngine())


class Descent:
    """The smallest optimizer: clips at `limit`, and walks down the gradient."""

    def __init__(self, limit=np.inf):
        self.limit, self.updates = limit, []

    def clip(self, gradients):
        norm = float(np.linalg.norm(np.float64(gradients.flat)))
        if self.limit < norm < np.inf:
            gradients.flat *= self.limit / norm
        return norm

    def update(self, weights, gradients, lr, number):
        self.updates.append((lr, number))
        weights.flat -= np.float32(lr) * gradients.flat


@pytest.mark.parametrize("batch", [1, 7, 30])
@pytest.mark.parametrize("name", ["fused", "cpu"])
@pytest.mark.parametrize("config", [RAGGED, GPT2], ids=["default", "like GPT-2"])
def test_threads_change_no_byte(config, name, batch):
    w, tokens, targets, scale = problem(config, batch, 37)
    seen = set()
    for threads in (1, 2, 3, 8) if name == "cpu" else (1, 3):
        stepper = make_stepper(name, w, Descent(), threads=threads)
        for _ in range(2):
            stepper.gradients.flat[...] = np.nan  # overwritten, not added to
            sums = sum(stepper.shard_gradients(tokens, targets, scale))
            seen.add((sums.tobytes(), stepper.gradients.flat.tobytes()))
            assert np.array_equal(stepper.sums(tokens, targets), sums)
        assert 1 + len(stepper.buffers) == gradients_held(shards(batch, 37), threads)
    assert len(seen) == 1
    assert np.isfinite(stepper.gradients.flat).all()


@pytest.mark.parametrize("pieces", [1, 2, 3, 100])
def test_shards_sum_to_the_whole(pieces):
    """Thirty sequences of 37 tokens are five shards; 100 pieces are one sequence each."""
    w, tokens, targets, scale = problem(RAGGED, 30, 37)
    wide = Weights(RAGGED, np.float64, np.float64(w.flat))
    whole = wide.zeros_like()
    sums = loss_and_gradients(reference, RAGGED, wide, tokens, targets, scale, whole)
    stepper = make_stepper("reference", wide, Descent(), threads=2, pieces=pieces)
    got = sum(stepper.shard_gradients(tokens, targets, scale))
    # float64: at most one sum for each sequence instead of one, and a backward pass behind each
    assert np.abs(stepper.gradients.flat - whole.flat).max() <= 1e-13 * np.abs(whole.flat).max()
    assert np.allclose(got, sums, rtol=30 * 2.0**-50, atol=0)


@pytest.mark.parametrize("pieces", [2, 3, 100])
def test_pieces_take_less_memory(pieces):
    w, tokens, targets, scale = problem(RAGGED, 30, 37)
    seen, arenas = set(), {}
    for threads, count in ((1, pieces), (3, pieces), (1, 1)):
        stepper = make_stepper("cpu", w, Descent(), threads=threads, pieces=count)
        stepper.shard_gradients(tokens, targets, scale)
        if count == pieces:
            seen.add(stepper.gradients.flat.tobytes())
        arenas[count] = stepper.engines[0].arena.needed
    assert len(seen) == 1
    largest = -(-6 // pieces)  # of the six sequences of a shard
    assert arenas[pieces] < (largest + 0.5) / 6 * arenas[1]


def test_shards():
    assert [shards(16, 128), shards(64, 128), shards(8, 512), shards(30, 37)] == [8, 32, 8, 5]
    assert shards(1, 10**6) == shards(300, 1) - 1 == 1
    assert shards(10**6, 512) == SHARDS


def test_step():
    w, tokens, targets, scale = problem(RAGGED, 9, 37)
    old, optimizer = w.flat.copy(), Descent(limit=0.01)
    stepper = make_stepper("cpu", w, optimizer, threads=2)
    sums = sum(stepper.shard_gradients(tokens, targets, scale))
    whole = stepper.gradients.flat.copy()
    (taken,) = stepper.step(tokens, targets, lr=0.1, number=7)
    assert taken.number == 7 and np.array_equal(taken.sums, sums) and taken.finite
    assert np.isclose(taken.norm, np.linalg.norm(whole)) and taken.norm > 0.01
    assert optimizer.updates == [(0.1, 7)]
    # one rounding of the factor and two each way
    moved = (old - w.flat) - 0.1 * 0.01 / taken.norm * whole
    assert np.abs(moved).max() <= gamma(5) * np.abs(old).max()
    stepper.pull()
    stepper.push()
    assert stepper.finish() == []


@pytest.mark.parametrize("norm", [1.0, np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing(norm):
    w, tokens, targets, _ = problem(RAGGED, 9, 37)
    optimizer = Descent()
    optimizer.clip = lambda gradients: norm
    if norm == 1:  # then it is the loss that is not
        w["output"][3, 5] = np.nan
    before = w.flat.tobytes()
    (taken,) = make_stepper("cpu", w, optimizer).step(tokens, targets, 0.1, 1)
    assert not taken.finite and np.isfinite(taken.sums).all() == (norm != 1)
    assert w.flat.tobytes() == before and optimizer.updates == []


def test_a_failure_waits_for_the_other_threads():
    """Or the next step would use an engine that still works on this one."""
    w, tokens, targets, _ = problem(RAGGED, 30, 37)
    failed, ended = threading.Event(), threading.Event()

    class First(ReferenceEngine):
        def begin(self):
            failed.set()
            raise IndexError("a token outside the vocabulary")

    class Second(ReferenceEngine):
        def begin(self):
            failed.wait(10)
            time.sleep(0.3)
            ended.set()

    engines = iter([First(), Second()])
    stepper = CpuStepper(lambda: next(engines), w, Descent(), threads=2)
    with pytest.raises(IndexError):
        stepper.step(tokens, targets, 0.1, 1)
    assert ended.is_set()


def test_arena_stops_growing(monkeypatch):
    w, tokens, targets, scale = problem(RAGGED, 3, 37)
    engine, dw = CpuEngine(), w.zeros_like()

    def step(sequences):
        args = tokens[:sequences], targets[:sequences], scale, dw
        loss_and_gradients(engine, RAGGED, w, *args)

    step(3)
    step(3)
    slab = engine.arena.slab
    for name in ("aligned", "mapped"):
        monkeypatch.setattr(memory, name, lambda *shape: pytest.fail("memory taken after pass one"))
    for sequences in (3, 1, 3, 2):  # shorter ones fit into the same slab
        step(sequences)
    loss_sums(engine, RAGGED, w, tokens, targets)
    assert engine.arena.slab is slab
    assert engine.arena.needed == slab.size


def test_arena_aligns_and_separates():
    arena = Arena()
    for _ in range(2):
        arena.begin()
        arrays = [arena.take(3), arena.take(2, 5), arena.take(1)]
        assert all(x.ctypes.data % memory.ALIGNMENT == 0 for x in arrays)
        for i, x in enumerate(arrays):
            x[...] = i
        assert [x.max() for x in arrays] == [0, 1, 2]


def test_exp():
    @njit
    def all_of(x, y):
        for i in range(x.size):
            y[i] = elementwise.exp(x[i])

    x = np.concatenate([np.linspace(-87, 88, 1_000_001), [0, -0.0, 1e-30, -1e-30]]).astype("f4")
    y = np.empty_like(x)
    all_of(x, y)
    assert np.abs(y / np.exp(np.float64(x)) - 1).max() < 2 * U
    x = np.float32([np.nan, np.inf, -np.inf, 1e9])
    all_of(x, y[:4])
    assert np.isnan(y[0]) and np.isfinite(y[1:4]).all() and y[2] > 0


@given(st.lists(st.floats(width=32), min_size=1, max_size=70))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_highest(numbers):
    x = np.float32(numbers)
    x[np.isnan(x)] = np.nan  # with the sign bit clear, as arithmetic makes it
    assert np.array_equal(elementwise.highest(x), np.max(x), equal_nan=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["embedding", "block.0.wqkv", "block.1.w_up", "output"])
def test_what_is_not_finite_is_seen(bad, where):
    w, tokens, targets, _ = problem(RAGGED, 4, 37)
    w[where].reshape(-1)[int(tokens[0, 0]) * RAGGED.dim if where == "embedding" else 5] = bad
    (taken,) = make_stepper("cpu", w, Descent()).step(tokens, targets, 0.1, 1)
    assert not np.isfinite(taken.sums).all() and not taken.finite


def test_no_kernel_may_assume_finite_numbers():
    """Today's LLVM may not use the permission; the next one could, and no other test would see."""
    names = vars(ladder) | vars(elementwise) | vars(norms) | vars(gemm)
    kernels = [kernel for kernel in names.values() if isinstance(kernel, Dispatcher)]
    assert len(kernels) > 15
    for kernel in kernels:
        allowed = kernel.targetoptions.get("fastmath", set())
        assert allowed <= {"reassoc", "contract", "arcp", "nsz"}, kernel.__name__


IDS = """
import numpy as np
from nanoeuler.engines.cpu.engine import CpuEngine

def refused(function, *arguments):
    try:
        function(*arguments)
    except IndexError as error:
        return "vocabulary" in str(error)

engine, x, table = CpuEngine(), np.zeros((1, 2, 3), np.float32), np.zeros((4, 3), np.float32)
for bad in (-2, 4, 2**31 - 1, -(2**31)):
    ids = np.array([[0, bad]])
    print(refused(engine.embed, ids, table), refused(engine.embed_backward, x, ids, table),
          refused(engine.cross_entropy, x[:, :, None], ids[:, :, None], np.ones(1)))
"""

SHAPES = """
import numpy as np
from nanoeuler.engines.cpu.engine import CpuEngine
from nanoeuler.engines.cpu.gemm import FULL, WORK, multiply, multiply_heads

def f(*shape):
    return np.zeros(shape, np.float32)

engine, x, c, work = CpuEngine(), f(2, 3, 4), f(4), f(WORK)
angles, short = f(3, 2), f(2, 2)
wrong = {
    "multiply": [(f(3, 4), f(5, 6), f(3, 6), False, work), (f(3, 4), f(4, 6), f(3, 5), False, work),
                 (f(3, 4), f(4, 6), f(2, 6), False, work), (f(3, 4), f(4, 6), f(3, 6), False, f(9)),
                 (f(3, 4), f(4, 6), f(3, 12)[:, ::2], False, work),
                 (f(3, 4), f(8, 12)[::2, ::2], f(3, 6), False, work)],
    "multiply_heads": [(f(1, 2, 3, 4), f(1, 2, 5, 6), f(1, 2, 3, 6), FULL, work),
                       (f(2, 2, 3, 4), f(1, 2, 4, 6), f(2, 2, 3, 6), FULL, work),
                       (f(1, 2, 3, 4), f(1, 2, 4, 6), f(1, 2, 3, 5), FULL, work),
                       (f(1, 2, 3, 4), f(1, 2, 4, 6), f(1, 3, 3, 6), FULL, work),
                       (f(1, 2, 3, 4), f(1, 2, 4, 6), f(1, 2, 3, 6), FULL, f(9)),
                       (f(1, 2, 3, 4), f(1, 2, 4, 6), f(1, 2, 3, 12)[..., ::2], FULL, work)],
    "embed_backward": [(x, np.zeros((2, 2), int), f(5, 4)), (x, np.zeros((2, 3), int), f(5, 3))],
    "rmsnorm": [(x, f(3))], "layernorm": [(x, f(3))],
    "rmsnorm_backward": [(x, x, c, f(2, 3, 1), f(3)), (x, x, c, f(2, 2, 1), c),
                         (f(2, 2, 4), x, c, f(2, 3, 1), c), (x, x, f(3), f(2, 3, 1), c)],
    "layernorm_backward": [(x, x, c, f(2, 3, 1), c)],
    "rope": [(f(2, 3, 2, 4), 2, short, angles), (f(2, 3, 2, 4), 2, angles, short),
             (f(2, 3, 2, 4), 3, angles, angles)],
    "rope_backward": [(f(2, 3, 2, 4), 2, short, angles)],
    "swiglu_backward": [(x, x)], "gelu_backward": [(x, f(2, 3, 5))],
    "relu2_backward": [(x, f(2, 3, 5))],
    "add": [(x, f(2, 3, 3))], "add_into": [(x, f(2, 3, 3))],
    "cross_entropy": [(f(1, 2, 3, 4), np.zeros((1, 3, 3), int), np.ones(3)),
                      (f(1, 2, 3, 4), np.zeros((1, 2, 3), int), np.ones(2))],
    "linear": [(x, f(5, 2))], "linear_backward": [(f(2, 3, 6), x, f(4, 5), f(4, 5))],
    "attention_backward": [(f(2, 3, 4), f(2, 3, 4, 2), 1, f(2, 2, 3, 2))],
}
for name, cases in wrong.items():
    for arguments in cases:
        try:
            (globals().get(name) or getattr(engine, name))(*arguments)
        except ValueError:
            continue
        print(name, [np.shape(x) for x in arguments])
"""


def child(code, *options, cwd=None, **environment):
    """What a new Python prints."""
    command, environment = [sys.executable, *options, "-c", code], os.environ | environment
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["plain", "-O"])
def test_ids_outside_the_vocabulary_are_refused(options):
    """With assertions or without: compiled code would read and write memory that is not ours."""
    assert set(child(IDS, *options).split()) == {"True"}


def test_shapes_that_do_not_agree_are_refused():
    assert child(SHAPES, "-O") == ""


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="float32"):
        CpuEngine().linear(np.zeros((1, 2, 3)), np.zeros((3, 4), np.float32))


def test_kernels_compile_where_nothing_can_be_written(tmp_path):
    """A read-only install and no home: a file where a folder would be stops root as well."""
    package = Path(jit.__file__).parent
    shutil.copytree(package, tmp_path / "nanoeuler", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [tmp_path / "nanoeuler", *(tmp_path / "nanoeuler").rglob("*/")]:
        (folder / "__pycache__").write_text("in the way")
    code = "from nanoeuler.engines.cpu import elementwise; import numpy as np, os; "
    code += "from nanoeuler.jit import config; print(elementwise.__file__, config.CACHE_DIR); "
    code += "print(elementwise.highest(np.ones(3, 'f4')), os.path.isdir(config.CACHE_DIR))"
    nowhere = str(tmp_path / "nanoeuler" / "__init__.py")  # no folder either
    clean = {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONDONTWRITEBYTECODE": "1"}
    said = child(code, cwd=tmp_path, PYTHONPATH="", NUMBA_CACHE_DIR="", **clean).split()
    assert said[0].startswith(str(tmp_path)) and said[2:] == ["1.0", "True"]
    assert "nanoeuler-numba-" in said[1] and not Path(said[1]).exists()


def test_numba_told_not_to_compile():
    code = "from nanoeuler.errors import UserError\ntry: import nanoeuler.engines.cpu.elementwise\n"
    code += "except UserError as error: print(error)"
    assert "unset it" in child(code, NUMBA_DISABLE_JIT="1")


def test_engine_names(monkeypatch):
    assert engine_factory("cpu") is CpuEngine
    assert engine_factory("reference") is ReferenceEngine
    for name in "gpu", "auto", "cuda":
        with pytest.raises(UserError, match=f"'{name}'"):
            engine_factory(name)
    monkeypatch.setattr(registry, "_no_gpu", lambda: "it is away")
    assert [engine_name(x) for x in ("auto", "cpu", "fused")] == ["cpu", "cpu", "fused"]
    with pytest.raises(UserError, match="'gpu': choose auto, cpu, .*, cuda-float32"):
        engine_name("gpu")
    for name in registry.GPU_ENGINES:
        with pytest.raises(UserError, match="needs a GPU, and it is away: choose cpu, fused"):
            make_stepper(name, None, None)
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    assert [engine_name(x) for x in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_choosing_imports_no_compiler():
    code = "import sys, nanoeuler.engines.registry as c; c.engine_factory('reference'); "
    code += "c.engine_name('auto'); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_vector_unit():
    assert vector_unit("+sse2,+avx,+avx2,+fma,+avx512f,+avx512vl") == (16, 32)
    assert vector_unit("+avx2,+fma,-avx512f") == (8, 16)
    assert vector_unit("+avx2,-fma") == vector_unit("") == (4, 16)
    assert vector_unit("+fp-armv8,+neon") == (4, 32)


def test_a_cached_kernel_is_the_compiled_one(tmp_path):
    """The first start, which compiles, and the second, which does not, have the same last bits."""
    code = """
import hashlib
import numpy as np
from nanoeuler.engines.cpu import norms
rng = np.random.default_rng(1)
x, gain = rng.standard_normal((33, 40), np.float32), rng.standard_normal(40, np.float32)
y = np.empty_like(x)
for norm, columns in ((norms.rmsnorm, 1), (norms.layernorm, 2)):
    norm(x, gain, np.float32(1e-5), y, np.empty((33, columns), np.float32))
    print(hashlib.sha256(y.tobytes()).hexdigest(), sum(norm.stats.cache_hits.values()))
"""
    first, second = (child(code, NUMBA_CACHE_DIR=str(tmp_path)).split() for _ in range(2))
    assert first[1::2] == ["0", "0"] and second[1::2] == ["1", "1"]
    assert first[::2] == second[::2]
