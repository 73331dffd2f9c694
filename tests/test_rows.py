"""Kernels between two products, on paper: against float64, in bytes, in any order of blocks.

Bounds of errors. U is the unit roundoff of float32 (2^-24) and B of bf16 (2^-8; 0 where float32 is
stored). A sum of n terms, in any order, is off by at most n U times the sum of absolute values; a
number that is stored as bf16 by B of itself. Reciprocals and roots are approximate to 4 U.
"""

import math
from pathlib import Path
from types import FunctionType, ModuleType
from unittest import mock

import numpy as np
import pytest
from mutants import Mutant, execute, load, source
from tiers import thinned

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.lang.vectors import STORED, Layout, piece
from nanoeuler.engines.gpu.rows import (
    activations,
    embedding,
    residual_norm,
    residual_norm_backward,
    rope,
    soft_cap,
)
from nanoeuler.engines.gpu.rows import column_sums as columns_module
from nanoeuler.errors import UserError
from nanoeuler.model import backward, layers, modern

U, B = 2.0**-24, {"bf16": 2.0**-8, "float32": 0.0}
CORES = 2  # multiprocessors, on paper


def draw(shape, kind="bf16", scale=1.0, seed=0):
    """Normal deviates as they are stored."""
    rng = np.random.default_rng([seed, *shape])
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    return to_bf16(values) if kind == "bf16" else values


def real(array):
    """What is stored, as float64."""
    return (from_bf16(array) if array.dtype == np.uint16 else array).astype(np.float64)


def blank(shape, kind="bf16"):
    """Room for an output: NaN until it is written."""
    return np.full(shape, 0x7FC0 if kind == "bf16" else np.nan, STORED[kind])


def play(launches, fresh=(), seed=None):
    """Run launches, one after the other; their reports. fresh: what the first alone may write."""
    launches = launches if isinstance(launches, (list, tuple)) else [launches]
    return [run(launch, seed, () if i else fresh) for i, launch in enumerate(launches)]


def close(values, want, bound):
    """Assert that values are within a bound, element by element, and that all are numbers."""
    off = np.abs(real(values) - want)
    assert np.isfinite(real(values)).all() and (off <= bound).all(), (off - bound).max()


def chain(layout):
    """The most additions behind a sum over a row: a lane's own, five of a warp, the warps'."""
    return layout.pieces * layout.width + 5 + layout.lanes // 32


# ---- Move and norm


def norm_of(norm, x, gain, bias):
    """y and what the kernels keep, in float64."""
    if norm == "rms":
        y, r = layers.rmsnorm(x, gain)
        return y, 1 / r
    y, stats = layers.layernorm(x, gain, bias)
    return y, np.concatenate([stats[:, :1], 1 / stats[:, 1:]], axis=1)


def check_move_norm(
    module, rows, columns, norm="rms", kind="bf16", out="bf16", scale=1.0, weight=0.5, seed=None
):
    """Run move-and-norm and compare; returns its report and its outputs."""
    x, t = draw((rows, columns), kind, scale), draw((rows, columns), out, scale, seed=1)
    gain, bias = draw((columns,), "float32"), draw((columns,), "float32", seed=1)
    bias = bias if norm == "layer" else None
    moved, n = blank((rows, columns), kind), blank((rows, columns), out)
    stats = blank((rows, module.NORMS[norm]), "float32")
    launch = module.move_norm_launch(norm, x, n, gain, stats, bias, module.Add(t, weight, moved))
    (report,) = play(launch, (moved, n, stats), seed)
    want = real(x) + weight * real(t)
    close(moved, want, (B[kind] + 2 * U) * (np.abs(real(x)) + weight * np.abs(real(t))))

    m, gain = real(moved), real(gain)
    length = chain(Layout(columns, piece(kind, out), residual_norm.MOST))
    y, kept = norm_of(norm, m, gain, None if bias is None else real(bias))
    inverse, largest = kept[:, -1:], np.abs(m).max(axis=1, keepdims=True)
    off = (length + 12) * U * inverse * (largest if norm == "layer" else np.abs(m))
    close(n, y, (B[out] + U) * np.abs(y) + np.abs(gain) * off + (0 if bias is None else 2 * U))
    shift = (length + 12) * U * (1 + (inverse * largest) ** 2 * (norm == "layer"))
    close(stats[:, -1:], inverse, shift * inverse)
    if norm == "layer":
        close(stats[:, :1], kept[:, :1], length * U * largest)
    return report, (moved, n, stats)


SHAPES = [(1, 8), (3, 64), (17, 776), (3, 1032)]


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("float32", "bf16"), ("float32", "float32")])
def test_move_and_norm(rows, columns, norm, kinds):
    check_move_norm(residual_norm, rows, columns, norm, *kinds)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_alone_gives_what_the_moved_stream_gave(norm):
    """So that n can be made anew from the stream, for a backward that did not keep it."""
    _, (moved, n, stats) = check_move_norm(residual_norm, 3, 72, norm)
    gain, bias = draw((72,), "float32"), draw((72,), "float32", seed=1)
    again, kept = blank(n.shape), blank(stats.shape, "float32")
    bias = bias if norm == "layer" else None
    play(residual_norm.move_norm_launch(norm, moved, again, gain, kept, bias=bias), (again, kept))
    assert (again == n).all() and (kept == stats).all()


def test_the_stream_may_move_in_place():
    x, t, gain = draw((3, 72)), draw((3, 72), seed=1), draw((72,), "float32")
    stats = blank((3, 1), "float32")
    moved, n, again = blank(x.shape), blank(x.shape), blank(x.shape)
    for out, stream in (n, moved), (again, x):
        add = residual_norm.Add(t, 1.0, stream)
        play(residual_norm.move_norm_launch("rms", x, out, gain, stats, add=add))
    assert (x == moved).all() and (n == again).all()


@pytest.mark.parametrize("scale", [1e-18, 1e4, 1e15])
def test_move_and_norm_of_small_and_large(scale):
    """Squares of 1e15 are still float32; of 1e-18 the root is that of eps, and all is zero."""
    check_move_norm(residual_norm, 3, 64, "rms", scale=scale)
    check_move_norm(residual_norm, 3, 64, "layer", "float32", scale=scale)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bytes_of_move_and_norm(norm):
    """x, t, x', n once; gain (and bias), which the cache keeps, once a row; stats."""
    rows, columns = 6, 256
    report, _ = check_move_norm(residual_norm, rows, columns, norm)
    kept = residual_norm.NORMS[norm]
    parameters = rows * columns * 4 * kept  # "layer" has a bias, "rms" has none
    assert report["global loads bytes"] == 2 * rows * columns * 2 + parameters
    assert report["global stores bytes"] == 2 * rows * columns * 2 + rows * kept * 4
    # Two loads of 16 bytes, 32 apart, touch every sector of float32 twice.
    assert report["global loads sectors"] == (2 * rows * columns * 2 + 2 * parameters) // 32
    assert report["global stores sectors"] == 2 * rows * columns * 2 // 32 + rows * kept


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("float32", "bf16"), ("bf16", "float32")])
@pytest.mark.parametrize("rows, columns", [(1, 8), (17, 136)])
def test_adding_alone(kinds, rows, columns):
    x, t = draw((rows, columns), kinds[0]), draw((rows, columns), kinds[1], seed=1)
    out, want = blank(x.shape, kinds[0]), real(x) - 0.3 * real(t)
    (report,) = play(residual_norm.add_scaled_launch(x, t, -0.3, out), (out,))
    close(out, want, (B[kinds[0]] + 2 * U) * (np.abs(real(x)) + np.abs(real(t))))
    assert report["global loads bytes"] == x.nbytes + t.nbytes
    assert report["global stores bytes"] == out.nbytes
    play(residual_norm.add_scaled_launch(x, t, -0.3, x))
    assert (x == out).all()


# ---- ... backward


def check_backward(
    module, rows, columns, norm="rms", kinds=("bf16", "bf16", "bf16"), copied=True, moved=True,
    added=True, scale=1.0, seed=None, cores=CORES,
):  # fmt: skip
    """Run the backward and compare; kinds of the stream, of dn and of dx. Returns all outputs."""
    kind, out, gradient = kinds
    x, dn = draw((rows, columns), kind), draw((rows, columns), out, scale, seed=1)
    gain, weight = draw((columns,), "float32"), 0.5
    stats = norm_of(norm, real(x), real(gain), None)[1].astype(np.float32)
    before = draw((rows, columns), gradient, scale, seed=2)
    dx = before.copy() if added else blank(before.shape, gradient)
    copy = blank(dx.shape, out) if copied else None
    names = ["dgain"] + ["dbias"] * (norm == "layer") + ["dmoved"] * moved
    sums = {name: draw((columns,), "float32", seed=i) for i, name in enumerate(names)}
    start = {name: real(array) for name, array in sums.items()}
    optional = {"copy": copy, "dbias": sums.get("dbias"), "dmoved": sums.get("dmoved")}
    this = module.NormBackward(
        norm, dn, x, stats, gain, dx, sums["dgain"], before=dx if added else None, weight=weight,
        **optional,
    )  # fmt: skip
    form = this.form
    blocks = module.norm_backward_blocks(form, rows, cores)
    partials = blank((blocks, form.sums * columns), "float32")
    launches = module.norm_backward_launches(this, partials, cores)
    fresh = (partials, *([copy] if copied else []), *([] if added else [dx]))
    play(launches, fresh, seed)

    gains, biases = np.zeros(columns), np.zeros(columns)
    g, m = real(dn), real(x)
    inverse = real(stats[:, -1:])
    if norm == "rms":
        slope = backward.rmsnorm_backward(g, m, real(gain), 1 / inverse, gains)
        x_hat = m * inverse
    else:
        both = np.concatenate([real(stats[:, :1]), 1 / inverse], axis=1)
        slope = backward.layernorm_backward(g, m, real(gain), both, gains, biases)
        x_hat = (m - both[:, :1]) * inverse
    old = real(before) if added else 0 * g
    length, h = chain(form.layout), np.abs(g * real(gain))
    mean = h.mean(axis=1, keepdims=True) + (h * np.abs(x_hat)).mean(axis=1, keepdims=True)
    off = U * inverse * (6 * h + (length + 8) * (1 + np.abs(x_hat)) * mean)
    close(dx, old + slope, off + (B[gradient] + 2 * U) * np.abs(old + slope) + U * np.abs(old))

    scaled = weight * real(dx)  # from here on of what is stored
    if copied:
        close(copy, scaled, (B[out] + U) * np.abs(scaled))
    terms = {"dgain": g * x_hat, "dbias": g, "dmoved": scaled}
    for name, array in sums.items():
        size = np.abs(terms[name]).sum(axis=0) + np.abs(start[name])
        close(array, start[name] + terms[name].sum(axis=0), (rows + blocks + 20) * U * size)
    return [dx, *([copy] if copied else []), *sums.values()]


@pytest.mark.parametrize("rows, columns", [(1, 8), (3, 64), (17, 72)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_backward(rows, columns, norm):
    check_backward(residual_norm_backward, rows, columns, norm)
    kinds = "bf16", "bf16", "float32"
    check_backward(residual_norm_backward, rows, columns, norm, kinds, moved=False)


@pytest.mark.parametrize("columns", [776, 1032])
def test_norm_backward_of_wide_rows(columns):
    check_backward(residual_norm_backward, 5, columns, "rms", moved=False, cores=1)


def test_norm_backward_of_float32_alone_and_without_what_is_not_wanted():
    check_backward(residual_norm_backward, 3, 64, "layer", ("float32",) * 3)
    plain = dict(copied=False, moved=False, added=False)
    check_backward(residual_norm_backward, 3, 64, "rms", **plain)
    check_backward(residual_norm_backward, 3, 64, "layer", scale=1e15, **plain)


# ---- Sums down the columns


def check_columns(module, rows, columns, kind, add=True, scale=1.0, seed=None, cores=CORES):
    """Sum the columns of a matrix and compare; returns the reports and the sums."""
    matrix, out = draw((rows, columns), kind, scale), draw((columns,), "float32")
    before = real(out) if add else np.zeros(columns)
    shape = module.partials_shape(rows, columns, piece(kind), cores)
    partials = blank(shape, "float32")
    launches = module.columns_launches(matrix, out, partials, add, cores)
    reports = play(launches, (partials,), seed)
    size = np.abs(real(matrix)).sum(axis=0) + np.abs(before)
    close(out, before + real(matrix).sum(axis=0), (rows + len(partials) + 2) * U * size)
    return reports, [out]


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("rows, columns", [(1, 8), (3, 64), (70, 136)])
def test_column_sums(rows, columns, kind):
    check_columns(columns_module, rows, columns, kind, cores=1)
    check_columns(columns_module, rows, columns, kind, add=False, scale=1e30, cores=1)


def test_column_sums_of_several_strips():
    assert columns_module.Walk(3, 520, 4, columns_module.SUMMING).strips == 2
    check_columns(columns_module, 3, 520, "float32", cores=1)


def test_bytes_of_column_sums():
    rows, columns = 70, 136
    (first, second), _ = check_columns(columns_module, rows, columns, "bf16", cores=1)
    slabs = columns_module.partials_shape(rows, columns, 8, 1)[0]
    assert slabs == 16 and first["global loads bytes"] == rows * columns * 2
    assert first["global stores bytes"] == slabs * columns * 4
    # Each of 16 warps has a row; it loads eight, the last again where there are no more.
    assert second["global loads bytes"] == (slabs * 8 * columns + columns) * 4
    assert second["global stores bytes"] == columns * 4


# ---- Gates


def sigma_bound(x):
    """The relative error of sigmoid(x): of the product in the power, the power and the quotient."""
    return (np.abs(x) + 10) * U


def normal_bound(x):
    """The relative error of the share of the exact GELU: equation eq-tile-gelu-exact."""
    return (1.5 * x * x + 24) * U + 1.7e-8


def check_gates(
    module, what, rows, F, kind="bf16", forward=True, again=True, summed=True, scale=1.0,
    seed=None, cores=CORES, place=False,
):  # fmt: skip
    """Run a gate and compare; place: du over u. Returns the reports and the outputs."""
    wide = 2 if what == "swiglu" else 1
    u, dh = draw((rows, wide * F), kind, scale), draw((rows, F), kind, seed=1)
    h, x = blank((rows, F), kind), real(u)
    if what == "swiglu":
        gate, up = x[:, :F], x[:, F:]
        want, share = layers.swiglu(x), sigma_bound(gate)
    else:
        shares = {"gelu": sigma_bound(2 * x * (1 + x * x)), "gelu_exact": normal_bound(x),
                  "relu2": U}  # of which a square is rounded once
        want, share = getattr(modern if what == "relu2" else layers, what)(x), shares[what]
    tiny = 2.0**-50 * np.abs(x).max() ** 2  # what float64's 1 + tanh leaves of a share of 1e-16
    bound = (B[kind] + 2 * share) * np.abs(want) + tiny
    if forward:
        reports = play(module.activation_launch(what, u, h, multiprocessors=cores), (h,), seed)
        close(h, want, bound)
        return reports, [h]

    du = u if place else blank(u.shape, kind)
    dbias = draw((wide * F,), "float32") if summed else None
    start = real(dbias) if summed else 0
    shape = module.partials_shape(rows, F, kind, wide, cores)
    partials = blank(shape, "float32") if summed else None
    optional = {"h": h if again else None, "sums": (dbias, partials) if summed else None}
    made = module.activation_backward_launches
    fresh = [a for a in (h if again else None, partials, None if place else du) if a is not None]
    reports = play(made(what, dh, u, du, multiprocessors=cores, **optional), fresh, seed)
    g = real(dh)
    if what == "swiglu":
        exact = backward.swiglu_backward(g, x)
        parts = np.abs(g * up) * (1 + np.abs(gate)), np.abs(g * gate)
        off = np.concatenate([3 * share * part for part in parts], axis=1)
    elif what == "gelu":
        exact = backward.gelu_backward(g, x)
        off = 4 * share * np.abs(g) * (1 + np.abs(x) * (1 + x * x))
    elif what == "relu2":
        exact = modern.relu2_backward(g, x)
        off = U * np.abs(exact)
    else:
        exact = backward.gelu_exact_backward(g, x)
        density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
        below = np.abs(exact - g * x * density)  # g Phi(x), in which 1 - Phi(-x) has a rounding
        off = (share + 3 * U) * (below + np.abs(g * x) * density)
    close(du, exact, off + B[kind] * np.abs(exact) + tiny * np.abs(g).max())
    if again:
        close(h, want, bound)
    if summed:  # sums are of what was not rounded yet
        size = np.abs(exact).sum(axis=0) + np.abs(start)
        many = rows + len(partials) + 2
        close(dbias, start + exact.sum(axis=0), off.sum(axis=0) + many * U * size)
    return reports, [du, *(a for a in (h if again else None, dbias) if a is not None)]


@pytest.mark.parametrize("what", ["swiglu", "gelu", "gelu_exact", "relu2"])
@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("rows, F", [(1, 8), (17, 72), (3, 776)])
def test_gates(what, kind, rows, F):
    check_gates(activations, what, rows, F, kind, cores=1)
    check_gates(activations, what, rows, F, kind, scale=30.0, cores=1)


@pytest.mark.parametrize("what", ["swiglu", "gelu", "gelu_exact", "relu2"])
@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("rows, F", [(1, 8), (17, 72)])
def test_gates_backward(what, kind, rows, F):
    check_gates(activations, what, rows, F, kind, forward=False, cores=1)
    check_gates(activations, what, rows, F, kind, forward=False, scale=30.0, place=True, cores=1)
    check_gates(activations, what, rows, F, kind, forward=False, again=False, summed=False)


def test_the_share_of_the_exact_gelu_is_within_its_bound():
    """At 30,000 places, where a share of float32 is no denormal number."""
    x = np.linspace(-13, 13, 30000, dtype=np.float32).reshape(3, -1)
    h = blank(x.shape, "float32")
    play(activations.activation_launch("gelu_exact", x, h), (h,))
    share = np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2)(real(x))
    off = np.abs(real(h) - real(x) * share) / np.maximum(np.abs(real(x) * share), 1e-300)
    assert (off <= normal_bound(real(x)) + U).all()
    assert off.max() > 30 * U  # in the tail; so the bound is no empty one


def test_gates_of_numbers_whose_powers_overflow():
    """sigmoid(-1000) is 1 / infinity, sigmoid(1000) one: no NaN comes of it."""
    u = to_bf16(np.float32([[-1000.0, 1000.0] * 4 + [1.0] * 8]))
    h, du, dh = blank((1, 8)), blank((1, 16)), to_bf16(np.ones((1, 8), np.float32))
    play(activations.activation_launch("swiglu", u, h))
    assert real(h).tolist() == [[0.0, 1000.0] * 4]
    play(activations.activation_backward_launches("swiglu", dh, u, du))
    assert real(du).tolist() == [[0.0, 1.0] * 4 + [0.0, 1000.0] * 4]
    play(activations.activation_backward_launches("gelu", dh, u[:, :8].copy(), h))
    assert real(h).tolist() == [[0.0, 1.0] * 4]
    far = np.float32([[-1e30, 1e30] * 4])  # whose squares are infinite
    made, du, ones = blank((1, 8), "float32"), blank((1, 8), "float32"), np.float32([[1.0] * 8])
    play(activations.activation_backward_launches("gelu_exact", ones, far, du, h=made))
    assert du.tolist() == [[0.0, 1.0] * 4] and (made == np.maximum(far, 0)).all()


def test_bytes_of_gates():
    rows, F = 6, 256
    element, out = rows * F * 2, 2 * F * 4
    (first,), _ = check_gates(activations, "swiglu", rows, F)
    assert (first["global loads bytes"], first["global stores bytes"]) == (2 * element, element)
    assert first["global loads sectors"] == 2 * element // 32
    (first, _), _ = check_gates(activations, "swiglu", rows, F, forward=False, cores=1)
    assert first["global loads bytes"] == 3 * element
    assert first["global stores bytes"] == 3 * element + rows * out  # a slab each, and h again
    no = dict.fromkeys(("forward", "again", "summed"), False)
    (first,), _ = check_gates(activations, "gelu", rows, F, **no)
    assert (first["global loads bytes"], first["global stores bytes"]) == (2 * element, element)


# ---- logits with a cap


def check_cap(module, rows, columns, kind="bf16", cap=2.0, scale=1.0):
    """Cap logits, and multiply gradients by the slopes, in place; compare with float64."""
    z, slopes = draw((rows, columns), kind, scale), blank((rows, columns), kind)
    x, want = real(z), modern.soft_cap(real(z), cap)
    slope = 1 - (want / cap) ** 2
    # Of tanh x = 2 sigma - 1: sigma is at most 1, off by `sigma_bound`; the difference is rounded.
    off = 2 * sigma_bound(2 * x / cap) + U
    play(module.cap_launch(z, slopes, cap), (slopes,))
    close(z, want, cap * off + (B[kind] + U) * np.abs(want))
    close(slopes, slope, 2 * off + 2 * U + B[kind] * slope)
    dz = draw((rows, columns), kind, seed=1)
    product, held = real(dz) * real(slopes), slopes.copy()
    play(module.slopes_launch(dz, slopes), ())
    close(dz, product, (B[kind] + U) * np.abs(product))
    assert (slopes == held).all()


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("rows, columns", [(1, 8), (17, 72)])
def test_caps(kind, rows, columns):
    check_cap(soft_cap, rows, columns, kind)
    check_cap(soft_cap, rows, columns, kind, cap=15.0, scale=10.0)


def test_logits_far_out_are_at_the_cap():
    z = np.float32([[-1e4, 1e4, 0.0, -0.0] * 2])
    slopes = blank((1, 8), "float32")
    play(soft_cap.cap_launch(z, slopes, 3.0), (slopes,))
    assert z.tolist() == [[-3, 3, 0, 0] * 2] and slopes.tolist() == [[0, 0, 1, 1] * 2]


def test_logits_that_cannot_be_capped_are_refused():
    z = np.zeros((2, 8), np.float32)
    with pytest.raises(UserError, match="come in eights, not 7"):
        soft_cap.cap_launch(z[:, :7].copy(), None, 2.0)
    with pytest.raises(UserError, match="slopes"):
        soft_cap.slopes_launch(z, np.zeros((1, 8), np.float32))


# ---- RoPE


def check_rope(module, B_, T, n, N, D, kind="bf16", start=0, seed=None, scale=1.0):
    """Turn heads and turn them back, and compare; returns the first report and the heads."""
    cos, sin = (table.astype(np.float32) for table in layers.rope_tables(start + T + 2, D))
    heads = draw((B_ * T, N * D), kind, scale)
    shape = (B_, T, N, D)
    outcomes, reports = [], []
    for back in (False, True):
        x = real(heads).reshape(shape)
        turn = layers.rope if not back else backward.rope_backward
        want = turn(x, n, real(cos)[start : start + T], real(sin)[start : start + T])
        launch = module.rope_launch(heads, cos, sin, n, T, start=start, back=back)
        reports += play(launch, seed=seed)
        pairs = np.abs(x[..., : D // 2]) + np.abs(x[..., D // 2 :])
        both = np.concatenate([pairs, pairs], axis=-1)
        turned = (B[kind] * np.abs(want) + 3 * U * both) * (np.arange(N) < n)[:, None]
        close(heads, want.reshape(heads.shape), turned.reshape(heads.shape) + 1e-37)
        outcomes.append(heads.copy())
    return reports[0], outcomes


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("n, N, D", [(1, 3, 16), (4, 6, 48), (2, 2, 128), (0, 2, 16)])
def test_rope(kind, n, N, D):
    check_rope(rope, 2, 3, n, N, D, kind)
    check_rope(rope, 1, 1, n, N, D, kind, start=5, scale=1e30)


def test_bytes_of_rope():
    rows, n, D = 6, 4, 64
    report, _ = check_rope(rope, 2, 3, n, 6, D)
    turned, angles = rows * n * D * 2, rows * n * D * 4
    assert report["global stores bytes"] == turned
    assert report["global loads bytes"] == turned + angles
    assert report["global stores sectors"] == turned // 32


def check_head_norm(module, rows=6, H=2, G=1, D=16, kind="bf16", turned=True, seed=None, start=0):
    """Norm heads and turn them, and their way back, and compare; returns reports and outputs.

    A root has a sum of D squares in D + 8 roundings, half of which it halves; four products follow.
    """
    n, N, T, eps, half = H + G, H + 2 * G, rows // 2 or 1, 1e-3, D // 2
    tables = [t.astype(np.float32) for t in layers.rope_tables(start + T + 2, D)]
    gains = [draw((D,), "float32", seed=i) for i in range(2)]
    norm = module.HeadNorm(H, *gains, eps, *(tables if turned else ()))
    heads, raw = draw((rows, N * D), kind), blank((rows, n * D), kind)
    x, before = real(heads).reshape(1, rows, N, D), heads.copy()
    reports = play(module.head_norm_launch(heads, raw, norm, T, start=start), (raw,), seed)
    assert (raw == before[:, : n * D]).all() and (heads[:, n * D :] == before[:, n * D :]).all()

    def turn(y, way, m):
        cos, sin = (np.tile(real(t)[start : start + T], (rows // T, 1)) for t in tables)
        return way(y, m, cos, sin) if turned else y

    parts = slice(0, H), slice(H, n)
    made = [layers.rmsnorm(x[:, :, part], real(gain), eps)
            for part, gain in zip(parts, gains, strict=True)]  # fmt: skip
    y = np.concatenate([y for y, _ in made], axis=2)
    want = turn(y, layers.rope, n)
    pairs = np.abs(y[..., :half]) + np.abs(y[..., half:])
    size = np.concatenate([pairs, pairs], axis=-1)
    off = B[kind] * np.abs(want) + (D + 16) * U * size
    close(heads[:, : n * D], want.reshape(rows, -1), off.reshape(rows, -1))

    d = draw((rows, N * D), kind, seed=3)
    g, untouched = real(d).reshape(1, rows, N, D), d[:, n * D :].copy()
    back = turn(g[:, :, :n], backward.rope_backward, n) if start == 0 else None
    if back is None:
        return reports, [heads, raw]
    blocks = module.head_norm_blocks(rows, 1)
    partials = blank((blocks, 2 * D), "float32")
    reports += play(module.head_norm_backward_launch(d, raw, norm, partials, T), (partials,), seed)
    assert (d[:, n * D :] == untouched).all()
    for i, (part, gain, (_, stats)) in enumerate(zip(parts, gains, made, strict=True)):
        dgain, dn, u = np.zeros(D), np.ascontiguousarray(back[:, :, part]), x[:, :, part]
        want = backward.rmsnorm_backward(dn, u, real(gain), stats, dgain)
        x_hat, sizes = np.abs(u / stats), np.abs(g[..., :half]) + np.abs(g[..., half:])
        sizes = np.concatenate([sizes, sizes], axis=-1)[:, :, part]
        h = np.abs(real(gain)) * sizes
        off = (h + x_hat * (h * x_hat).mean(axis=-1, keepdims=True)) / stats * (2 * D + 40) * U
        got = d.reshape(1, rows, N, D)[:, :, part]
        close(got, want, off + B[kind] * np.abs(want))
        many = (rows * n + D + 20) * U * (sizes * x_hat).sum(axis=(0, 1, 2))
        assert (np.abs(real(partials).sum(axis=0)[i * D : (i + 1) * D] - dgain) <= many).all()
    return reports, [heads, raw, d, partials]


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("H, G, D", [(1, 1, 16), (3, 2, 64), (5, 1, 128)])
def test_norms_of_heads(kind, H, G, D):
    check_head_norm(rope, 6, H, G, D, kind)
    check_head_norm(rope, 26, H, G, D, kind, turned=False)  # rows of a warp follow each other


def test_norms_of_heads_from_a_position_on():
    check_head_norm(rope, start=5)


def test_norms_of_heads_in_any_order_have_equal_bits():
    made = [check_head_norm(rope, 10, 3, 2, 32, seed=seed)[1] for seed in (None, 1, 2)]
    for other in made[1:]:
        assert all((a == b).all() for a, b in zip(made[0], other, strict=True))


def test_bytes_of_norms_of_heads():
    rows, H, G, D = 6, 3, 1, 64
    (there, back), _ = check_head_norm(rope, rows, H, G, D)
    heads = rows * (H + G) * D * 2
    read = 2 * rows * (H + G) * D * 4  # gains and angles, which the cache has
    assert there["global stores bytes"] == 2 * heads
    assert there["global loads bytes"] == heads + read
    assert back["global loads bytes"] == 2 * heads + read
    assert back["global stores bytes"] == heads + rope.head_norm_blocks(rows, 1) * 2 * D * 4


def test_norms_of_heads_that_do_not_fit():
    gain, raw = np.ones(24, np.float32), np.zeros((2, 48), np.float32)
    norm = rope.HeadNorm(1, gain, gain, 1e-5)
    with pytest.raises(UserError, match="heads of width 24, 1 of 2 of them queries"):
        rope.head_norm_launch(np.zeros((2, 72), np.float32), raw, norm, 1)
    gain = np.ones(16, np.float32)
    norm = rope.HeadNorm(1, gain, gain, 1e-5)
    with pytest.raises(UserError, match="3 rows are no sequences of 2 positions"):
        rope.head_norm_launch(np.zeros((3, 48), np.float32), np.zeros((3, 32), "f4"), norm, 2)


# ---- Embedding


def check_embed(module, tokens, V, C, kind="bf16", out="bf16", learned=True, start=1, seed=None):
    """Rows of an embedding, plus positions, and compare."""
    rows, T = tokens.size, tokens.shape[1]
    table, positions = draw((V, C), kind), draw((start + T + 1, C), kind, seed=1)
    x = blank((rows, C), out)
    given = positions if learned else None
    launch = module.embed_launch(
        tokens.reshape(-1).astype(np.int32), table, x, T, positions=given, start=start
    )
    (report,) = play(launch, (x,), seed)
    at = real(positions)[start : start + T] if learned else None
    want = layers.embed(tokens, real(table), at).reshape(rows, C)
    close(x, want, (B[out] + U) * np.abs(want) * (learned or kind != out) + 1e-37)
    return report, [x]


def check_embed_backward(
    module, tokens, V, C, kind="bf16", learned=True, seed=None, scale=1.0, cores=CORES
):
    """Gradients of an embedding and of positions, and compare; returns the gradients."""
    rows, (sequences, T) = tokens.size, tokens.shape
    dx = draw((rows, C), kind, scale)
    dtable, dpositions = draw((V, C), "float32"), draw((T + 1, C), "float32", seed=1)
    want, at = real(dtable), real(dpositions)
    size, size_at = np.abs(want), np.abs(at)
    backward.embed_backward(real(dx).reshape(sequences, T, C), tokens, want, at[:T])
    backward.embed_backward(np.abs(real(dx)).reshape(sequences, T, C), tokens, size, size_at[:T])
    plan = module.scatter_plan(tokens, V)
    assert plan.dtype == np.int32 and plan.shape == (module.plan_length(rows, V),)
    slots = blank(module.slots_shape(rows, V, C), "float32")
    launches = module.embed_backward_launches(
        dx, plan, dtable, slots, T=T, dpositions=dpositions if learned else None,
        multiprocessors=cores,
    )  # fmt: skip
    reports = play(launches, (slots,), seed)
    close(dtable, want, (rows + 2) * U * size)
    if learned:
        close(dpositions, at, (sequences + 1) * U * size_at)
    return reports, [dtable, dpositions]


def sequences(B_, T, V, seed=0):
    """Tokens of a batch: small numbers are frequent."""
    draws = np.random.default_rng(seed).random((B_, T)) ** 3
    return (draws * V).astype(np.int64)


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("bf16", "float32"), ("float32", "float32")])
@pytest.mark.parametrize("B_, T, V, C", [(1, 1, 3, 8), (2, 3, 5, 264), (3, 1, 7, 136)])
def test_embedding(kinds, B_, T, V, C):
    tokens = sequences(B_, T, V)
    check_embed(embedding, tokens, V, C, *kinds)
    check_embed(embedding, tokens, V, C, *kinds, learned=False)


@pytest.mark.parametrize("kind", ["bf16", "float32"])
@pytest.mark.parametrize("B_, T, V, C", [(1, 1, 3, 8), (2, 3, 5, 264), (5, 33, 4, 64)])
def test_embedding_backward(kind, B_, T, V, C):
    check_embed_backward(embedding, sequences(B_, T, V), V, C, kind)


def test_one_token_everywhere():
    check_embed_backward(embedding, np.full((3, 64), 2), 4, 16, learned=False, scale=1e30)


@pytest.mark.parametrize("rows, V", [(1, 1), (31, 4), (32, 1), (33, 1), (1000, 7), (1000, 5000)])
def test_a_plan_names_every_place_once_and_fits(rows, V):
    tokens = sequences(1, rows, V, seed=rows).reshape(-1)
    plan = embedding.scatter_plan(tokens, V)
    room, most, slots = embedding.plan_sizes(rows, V)
    body, order = plan[:-rows].reshape(-1, 4), plan[-rows:]
    (chunks, several), items = body[0, :2], body[1 : 1 + room]
    assert chunks <= room and several <= most and sorted(order) == list(range(rows))
    assert not items[chunks:].any()
    covered, used = [], []
    for token, first, end, slot in items[:chunks]:
        assert 0 < end - first <= embedding.CHUNK and (tokens[order[first:end]] == token).all()
        assert (np.diff(order[first:end]) > 0).all()  # in the order of places
        covered += range(first, end)
        used += [slot] if slot >= 0 else []
    assert covered == list(range(rows)) and used == list(range(len(used))) and len(used) <= slots
    for token, first, last, _ in body[1 + room : 1 + room + several]:
        own = items[:chunks][(items[:chunks, 3] >= first) & (items[:chunks, 3] < last)]
        assert (own[:, 0] == token).all() and len(own) > 1
        assert (own[:, 2] - own[:, 1]).sum() == (tokens == token).sum()


def test_a_plan_has_room_in_the_worst_case():
    """Every token but the last at one place more than a whole number of chunks."""
    tokens = np.repeat(np.arange(30), embedding.CHUNK + 1)
    embedding.scatter_plan(tokens, 40)
    with pytest.raises(UserError, match=r"numbers in \[0, 29\)"):
        embedding.scatter_plan(tokens, 29)


# ---- The order of blocks, and what is refused


EVERYTHING = {
    "move and norm": lambda seed: check_move_norm(residual_norm, 9, 64, "layer", seed=seed)[1],
    "a wide row": lambda seed: check_move_norm(residual_norm, 2, 1032, "layer", seed=seed)[1],
    "norm backward": lambda seed: check_backward(
        residual_norm_backward, 9, 64, "layer", ("bf16", "bf16", "float32"), seed=seed
    ),
    "columns": lambda seed: check_columns(columns_module, 40, 8, "bf16", seed=seed, cores=1)[1],
    "sums of many": lambda seed: check_sums(columns_module, seed),
    "SwiGLU": lambda seed: check_gates(
        activations, "swiglu", 20, 8, forward=False, seed=seed, place=True, cores=1
    )[1],
    "GELU": lambda seed: check_gates(
        activations, "gelu", 20, 8, forward=False, seed=seed, cores=1
    )[1],
    "RoPE": lambda seed: check_rope(rope, 2, 5, 2, 3, 16, seed=seed)[1],
    "embedding": lambda seed: check_embed_backward(
        embedding, sequences(3, 25, 4), 4, 16, seed=seed
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("what", EVERYTHING)
def test_equal_bits_whatever_the_order_of_blocks(what):
    first, *others = [EVERYTHING[what](seed) for seed in (None, 0, 1)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def norm_arrays(columns=64, rows=2):
    x, stats = np.zeros((rows, columns), np.uint16), np.zeros((rows, 1), np.float32)
    return {"x": x, "n": x.copy(), "gain": np.ones(columns, np.float32), "stats": stats}


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n=np.zeros((2, 63), np.uint16)), r"n is uint16 \(2, 64\), not uint16 \(2, 63\)"),
        (dict(gain=np.ones(64)), r"gain is float32 \(64,\), not float64"),
        (dict(x=np.zeros((2, 64), np.int32)), r"bf16 \(uint16\) or float32, not int32"),
        (dict(x=np.zeros((2, 128), np.uint16)[:, ::2]), "x is in C order"),
        (dict(bias=np.zeros(64, np.float32)), "has no bias"),
        (norm_arrays(60), "multiple of 8 columns, at most 32768, not 60"),
    ],
)
def test_move_and_norm_refuses(change, message):
    with pytest.raises(UserError, match=message):
        residual_norm.move_norm_launch("rms", **(norm_arrays() | change))


def test_an_activation_that_there_is_not_is_refused():
    u, h = np.zeros((2, 64), np.uint16), np.zeros((2, 64), np.uint16)
    message = "an activation, swiglu, gelu, gelu_exact, relu2, got 'silu'"
    with pytest.raises(UserError, match=message):
        activations.activation_launch("silu", u, h)
    with pytest.raises(UserError, match=message):
        activations.activation_backward_launches("silu", h, u, u)


def test_memory_that_is_not_aligned_is_refused():
    class Elsewhere:
        address, shape, strides, dtype = 8, (2, 64), (128, 2), np.dtype(np.uint16)

    with pytest.raises(UserError, match="x begins at a multiple of 16 bytes, not at 8"):
        residual_norm.move_norm_launch("rms", **(norm_arrays() | {"x": Elsewhere()}))


def turn_zeros(n, D, T=3, start=0):
    table = np.zeros((6, D // 2), np.float32)
    rope.rope_launch(np.zeros((6, 48), np.uint16), table, table, n, T, start=start)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: residual_norm.move_norm_launch("batch", **norm_arrays()),
         "norms are rms and layer"),
        (lambda: piece("bf16", "float16"), "bf16 or float32, not 'float16'"),
        (lambda: columns_module.Walk(0, 8, 8, 512), "rows and a multiple of 8 columns, not 0 x 8"),
        (lambda: turn_zeros(4, 16), "4 heads of width 16, 16 at a time, are not in 48"),
        (lambda: turn_zeros(1, 24), "1 heads of width 24, 16 at a time, are not in 48"),
        (lambda: turn_zeros(1, 16, start=4), "no sequences of 3 positions from 4 to 6"),
        (lambda: turn_zeros(1, 16, T=4), "6 rows are no sequences of 4 positions"),
        (
            lambda: embedding.embed_launch(
                np.zeros(6, np.int32), np.zeros((4, 8), np.uint16), np.zeros((6, 8), np.uint16), 4
            ),
            "8 columns, 6 rows, T = 4",
        ),
    ],
)  # fmt: skip
def test_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


# ---- Planted faults


def with_fault(name, fault):
    """The module of this name, or, of a fault in what it uses, a copy of it that uses the wrong."""
    wrong = load(fault)
    if fault.module.endswith(name):
        return wrong
    text = Path(MODULES[name].__file__).read_text(encoding="utf-8")
    copy = ModuleType(f"{name}_over_{fault.function}")
    execute(text, copy.__name__, copy)
    for helper in vars(copy).keys() & vars(wrong).keys():
        if isinstance(getattr(wrong, helper), FunctionType):
            setattr(copy, helper, getattr(wrong, helper))
    for alias, value in list(vars(copy).items()):
        if getattr(value, "__name__", "") == f"nanoeuler.engines.gpu.{fault.module}":
            setattr(copy, alias, wrong)
    return copy


MODULES = {
    "rows.residual_norm": residual_norm, "rows.residual_norm_backward": residual_norm_backward,
    "rows.column_sums": columns_module,
    "rows.activations": activations, "rows.rope": rope, "rows.embedding": embedding,
}  # fmt: skip


def wide(module):
    check_move_norm(module, 2, 1032, "layer")


def added(module):
    x, t, out = draw((3, 8)), draw((3, 8), seed=1), blank((3, 8))
    play(module.add_scaled_launch(x, t, 0.5, out), (out,))
    close(out, real(x) + 0.5 * real(t), 2.0**-8 * (np.abs(real(x)) + np.abs(real(t))))


def ragged(module):
    check_move_norm(module, 9, 72, "layer")


def slopes(module):
    check_backward(module, 9, 72, "layer", cores=1)


def check_sums(module, seed=None):
    """Partial sums of three arrays, two of them side by side, in one launch; one is stored."""
    flat, outs = draw((3000,), "float32"), draw((500,), "float32", seed=1)
    start, jobs = real(outs), [(0, 17, 80, 40), (40, 17, 80, 40), (1400, 130, 8, 8)]
    lines, wanted, size = [], start.copy(), np.abs(start)
    for out, (first, count, pitch, columns) in zip((300, 20, 96), jobs, strict=True):
        store = out == 20  # over what nobody may read
        lines += module.sum_lines(first, count, pitch, out, columns, store)
        if store:
            outs[out : out + columns], wanted[out : out + columns] = np.nan, 0
        rows = np.stack([real(flat)[first + i * pitch :][:columns] for i in range(count)])
        wanted[out : out + columns] += rows.sum(axis=0)
        size[out : out + columns] += np.abs(rows).sum(axis=0)
    play((module.sum_table_launch(np.array(lines, np.int32), flat, outs),), (), seed)
    close(outs, wanted, (130 + 20) * U * size * (wanted != start))
    return [outs]


def test_sums_of_many_in_one_launch():
    check_sums(columns_module)


def long(module):
    check_columns(module, 230, 8, "bf16", cores=1)


def swiglu(module):
    check_gates(module, "swiglu", 70, 8, forward=False, cores=1)


def gelu(module):
    check_gates(module, "gelu", 70, 8, forward=False, cores=1)


def capped(module):
    check_cap(module, 17, 72, "float32", cap=3.0)


def squared(module):
    check_gates(module, "relu2", 70, 8, forward=False, cores=1)


def exact(module):
    check_gates(module, "gelu_exact", 70, 8, "float32", forward=False, cores=1)


def turned(module):
    check_rope(module, 2, 3, 2, 4, 32, start=1)


def head_norms(module):
    check_head_norm(module, 26, 3, 2, 32, "float32")


def looked_up(module):
    check_embed(module, sequences(2, 3, 5), 5, 264)


def scattered(module):
    check_embed_backward(module, sequences(3, 33, 4), 4, 264)


def in_turns(module):
    """Two tokens have several chunks, and each warp several pieces of work."""
    tokens = np.resize([0, 1, 0, 1, 0, 1, 5], (3, 33))
    with mock.patch.object(module, "BLOCKS", 2):
        check_embed_backward(module, tokens, 14, 520, learned=False, cores=1)


# Where: module, function; what is wrong; what becomes what; what must see it.
FAULTS = [
    ("lang.vectors", "over_warps", "cuda.syncthreads()  # all parts are there", "pass", wide),
    ("lang.vectors", "over_warps", "cuda.syncthreads()  # all have read", "pass  # all have read",
     wide),
    ("lang.vectors", "warp_sum", "range(5)", "range(4)", ragged),
    ("lang.vectors", "load_row", "whole or column < columns", "True", ragged),
    ("lang.vectors", "load_row", "values[k] = float32(0)", "pass", ragged),
    ("lang.vectors", "store_row", "whole or column < columns", "True", ragged),
    ("lang.vectors", "settle", "if rounds:", "if False:", ragged),
    ("rows.residual_norm", "move_norm", "if row < rows:", "if row <= rows:", ragged),
    ("rows.residual_norm", "move_norm", "values[k] += add.weight * others[k]",
     "values[k] += others[k]", ragged),
    ("rows.residual_norm", "move_norm", "if biased:", "if False:", ragged),
    ("rows.residual_norm", "add_scaled", "if i < count", "if i <= count", added),
    ("rows.residual_norm", "add_scaled", "+= weight *", "= weight *", added),
    ("rows.residual_norm", "inside", "whole or (j * lanes + lane) * width < columns", "True",
     ragged),
    ("rows.residual_norm", "normed", " + float32(eps)", "", lambda m: check_move_norm(m, 3, 64,
     scale=1e-3)),
    ("rows.residual_norm_backward", "in_turn", "cuda.syncthreads()  # the", "pass  # the", slopes),
    ("rows.residual_norm_backward", "in_turn", "turn == 0)", "False)", slopes),
    ("rows.residual_norm_backward", "in_turn", "range(warps)", "range(warps - 1)", slopes),
    ("rows.residual_norm_backward", "slope", "g[k] -= shift", "pass", slopes),
    ("rows.residual_norm_backward", "slope", "g[k] - x_hat[k] * along", "g[k] + x_hat[k] * along",
     slopes),
    ("rows.residual_norm_backward", "slope", "row_sum(along) * float32(share)", "row_sum(along)",
     slopes),
    ("rows.residual_norm_backward", "read", "sums[own + k] += g[k]", "sums[own + k] += x_hat[k]",
     slopes),
    ("rows.residual_norm_backward", "norm_backward", "g[k] += old[k]", "pass", slopes),
    ("rows.residual_norm_backward", "norm_backward", "sums[k] = float32(0)", "pass", slopes),
    ("rows.residual_norm_backward", "norm_backward", "cuda.gridDim.x * rows_a_block",
     "rows_a_block", slopes),
    ("rows.residual_norm_backward", "leave", "settle(g)", "pass", slopes),
    ("rows.column_sums", "total_of", "cuda.syncthreads()", "pass", long),
    ("rows.column_sums", "total_of", "value if row < count else float32(0)", "value", long),
    ("rows.column_sums", "add_up", "total += load_own_float(out)", "pass", long),
    ("rows.column_sums", "add_up_lines", "inside = lane < (", "inside = lane <= (", check_sums),
    ("rows.column_sums", "add_up_lines", "int64(first) * 4", "int64(first) * 8", check_sums),
    ("rows.column_sums", "add_up_lines", "sizes & STORED == 0", "sizes & STORED != 0", check_sums),
    ("rows.column_sums", "add_up_lines", "sizes & (STORED - 1)", "sizes & 255", check_sums),
    ("rows.column_sums", "sum_lines", "STORED * store", "0", check_sums),
    ("rows.column_sums", "add_up_lines", "sizes >> COUNTED, pitch", "sizes >> COUNTED, 40",
     check_sums),
    ("rows.column_sums", "slab_sums", "row += slabs", "row += rows", long),
    ("rows.column_sums", "slab_sums", "row += AHEAD * slabs", "row += (AHEAD + 1) * slabs", long),
    ("rows.column_sums", "slab_sums", "if column < columns", "if column <= columns", long),
    ("tile.curves", "swiglu_slopes", "(float32(1) - sigma)", "sigma", swiglu),
    ("rows.activations", "gated_rows", "store(up, i", "store(gate, i", swiglu),
    ("rows.activations", "gated_backward", "put(left, out)", "put(right, out)", swiglu),
    ("rows.activations", "gated_backward", "row += AHEAD * slabs", "row += rows", swiglu),
    ("rows.activations", "gated_backward", "while row < rows", "while row < 0", swiglu),
    ("tile.curves", "gelu_slope", "float32(3 * CUBIC)", "float32(CUBIC)", gelu),
    ("tile.curves", "gelu_exact_slope", "share + u * density", "share", exact),
    ("tile.curves", "normal", "1) - tail if u > float32(0) else tail", "1) - tail", exact),
    ("tile.curves", "normal", "-0.5 * LOG2_E", "-LOG2_E", exact),
    ("rows.activations", "shares", "gelu_exact_share, gelu_exact_slope",
     "gelu_exact_share, gelu_slope", exact),
    ("tile.curves", "relu2_slope", "float32(2) * larger", "larger", squared),
    ("tile.curves", "relu2_share", "larger(u, float32(0))", "u", squared),
    ("rows.soft_cap", "cap_logits", "cap * share, float32(1)", "share, float32(1)", capped),
    ("rows.soft_cap", "cap_logits", "share * share", "share", capped),
    ("rows.soft_cap", "cap_logits", "values[k] * inverse", "values[k]", capped),
    ("rows.soft_cap", "by_slopes", "values[k] *= slope[k]", "values[k] = slope[k]", capped),
    ("rows.soft_cap", "by_slopes", "i < pieces", "i < pieces - 1", capped),
    ("rows.activations", "curved_rows", "sums[k] += slope[at]", "sums[k] = slope[at]", gelu),
    ("rows.rope", "rotate", "sign * sin[k]", "sin[k]", turned),
    ("rows.rope", "rope", "start + row -", "row -", turned),
    ("rows.rope", "load_two", "load(x.b, 0, at + half * size)", "load(x.b, 0, at)", turned),
    ("rows.rope", "load_gains", "gains.q if head < H else gains.k", "gains.q", head_norms),
    ("rows.rope", "root", " + float32(eps)", "", head_norms),
    ("rows.rope", "head_norm", "rotate(x, tables, angle, float32(1))", "pass", head_norms),
    ("rows.rope", "head_sum", "range(5)", "range(1)", head_norms),
    ("rows.rope", "half_slopes", "- x_hat * along", "", head_norms),
    ("rows.rope", "half_slopes", "sums[at + k] += g[k] * x_hat", "sums[at + k] += g[k] * x[k]",
     head_norms),
    ("rows.rope", "slopes", "2 * width, root", "0, root", head_norms),
    ("rows.rope", "head_norm_backward", "angle, float32(-1)", "angle, float32(1)", head_norms),
    ("rows.rope", "head_norm_backward", "gridDim.x * ROWS", "gridDim.x * ROWS + 1", head_norms),
    ("rows.rope", "leave", "cuda.syncthreads()", "pass", head_norms),
    ("rows.rope", "leave", "range(ROWS)", "range(ROWS - 1)", head_norms),
    ("rows.embedding", "embed", "T * divide(row, T)", "0", looked_up),
    ("rows.embedding", "make_look", "values[k] += others[k]", "pass", looked_up),
    ("rows.embedding", "pile", "while i < rows.end", "while i < rows.end - 1", scattered),
    ("rows.embedding", "pile", "i += AHEAD", "i += AHEAD + 1", scattered),
    ("rows.embedding", "scatter", "if slot < 0", "if slot <= 0", scattered),
    ("rows.embedding", "scatter", "item += int32(cuda.gridDim.x * WARPS)", "break", in_turns),
    ("rows.embedding", "several", "first, end, 1, 0", "first, end - 1, 1, 0", scattered),
    ("rows.embedding", "add_positions", "B, T, t)", "B, T, 0)", scattered),
    ("rows.embedding", "scatter_plan", "(starts + counts)[of]", "(starts + CHUNK)[of]", scattered),
]  # fmt: skip


def test_all_faults_have_their_place():
    for module, function, old, new, _ in FAULTS:
        source(Mutant(f"engines.gpu.{module}", function, "", old, new))


@pytest.mark.parametrize(
    "module, function, old, new, check", thinned(FAULTS, 8),
    ids=lambda part: getattr(part, "__name__", str(part)[:30]),
)  # fmt: skip
def test_planted_faults_are_found(module, function, old, new, check):
    users = {"lang.vectors": "rows.residual_norm", "tile.curves": "rows.activations"}
    name = users.get(module, module)
    wrong = with_fault(name, Mutant(f"engines.gpu.{module}", function, "", old, new))
    with pytest.raises((AssertionError, Fault)):
        check(wrong)
