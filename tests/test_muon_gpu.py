"""Muon on a GPU, on paper: products of a batch, the kernels around them, and whole steps.

Bounds are derived. HALF = 2^-8 is what rounding to bf16 costs at most, relative; U = 2^-24 rounding
to float32, of which a sum of k terms has k at most, each of the sum of magnitudes, and as many for
cards that cut off where they should round.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import recorded
from mutants import Mutant, load, source
from tiers import kept, thinned

from nanoeuler.emulator import Device, Fault, rehearsal, run
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.gemm import wgmma_batch
from nanoeuler.engines.gpu.gemm.wgmma_batch import APPLY, GRAM, POLYNOMIAL, Operands
from nanoeuler.engines.gpu.rows import adamw, muon
from nanoeuler.engines.gpu.rows.gradient_norm import schedule
from nanoeuler.engines.gpu.step import muon as step_module
from nanoeuler.engines.gpu.step import stepper as stepper_module
from nanoeuler.engines.gpu.step.engine import CudaEngine
from nanoeuler.engines.gpu.step.muon import MuonStepper
from nanoeuler.engines.gpu.step.precision import COPIES, LOWER, PRECISIONS, WEIGHTS
from nanoeuler.engines.gpu.step.program import Recording
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS, Machine, Rules
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training.muon import COEFFICIENTS, Muon, matrices, matrix_rate, orthogonalize
from nanoeuler.training.optim import AdamW

HALF, U = 2.0**-8, 2.0**-24
NAN = 0x7FC0  # of bf16
BATCHES = {"gram": GRAM, "polynomial": POLYNOMIAL, "apply": APPLY}


def bf16(*shape, seed=0):
    """Normal deviates: bits, and the numbers in float64."""
    bits = to_bf16(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    return bits, from_bf16(bits).astype(np.float64)


# ---- Products of a batch


class Product:
    """A batch of products, its poisoned result, and what should come."""

    def __init__(self, batch, count, r, c, seed=0):
        self.batch, shape = batch, (1, count, r, c)
        x, self.x = bf16(*shape, seed=seed)
        a, self.a = bf16(1, count, r, r, seed=seed + 1)
        a, self.a = (y if batch is APPLY else np.tril(y) + np.tril(y, -1).swapaxes(2, 3)
                     for y in (a, self.a))  # fmt: skip
        scales = np.random.default_rng(seed).uniform(0.5, 2, count).astype(np.float32)
        n = c if batch is APPLY else r
        self.c = np.full((1, count, r, n), NAN, np.uint16)
        both = {"gram": (x, x), "polynomial": (a, a), "apply": (a, x)}
        (self.name,) = (name for name, each in BATCHES.items() if each == batch)
        self.of = Operands(*both[self.name], self.c, a if batch.polynomial else scales)
        self.scales = scales[:, None, None].astype(np.float64)

    def run(self, module=wgmma_batch, blocks=3, seed=None):
        numbers = COEFFICIENTS if self.batch.polynomial else (0, 0, 0)
        batch = module.Batch(**vars(self.batch))
        return run(module.batch_launch(batch, self.of, numbers, blocks=blocks), seed)

    def exact(self):
        """The result, and the same of magnitudes, in float64."""
        if self.batch.polynomial:
            a, b, c = COEFFICIENTS
            eye, A = np.eye(self.a.shape[-1]), self.a
            large = a * eye + abs(b * A) + c * abs(A) @ abs(A)
            return a * eye + b * A + c * A @ A, large
        p, q = (self.x, self.x.swapaxes(2, 3)) if self.batch.symmetric else (self.a, self.x)
        return self.scales * (p @ q), self.scales * (abs(p) @ abs(q))

    def off(self):
        """The largest error in parts of its bound."""
        exact, large = self.exact()
        terms = self.of.a.shape[-1] + 4
        bound = HALF * abs(exact) + 2 * terms * U * large * (1 + HALF)
        return (abs(from_bf16(self.c).astype(np.float64) - exact) / bound).max()


SHAPES = [(1, 8, 8), (1, 128, 64), (3, 136, 200),
          pytest.param((2, 264, 328), marks=pytest.mark.long)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_products_of_a_batch(name, shape):
    product = Product(BATCHES[name], *shape)
    product.run()
    assert product.off() <= 1  # nan where nothing was written
    if BATCHES[name].symmetric:
        assert np.array_equal(product.c, product.c.swapaxes(2, 3))


@pytest.mark.parametrize("name", kept(BATCHES, "polynomial"))
def test_the_order_of_blocks_moves_no_bit(name):
    made = []
    for seed in (1, 2):
        product = Product(BATCHES[name], 1, 136, 72)
        product.run(seed=seed, blocks=seed + 1)
        made.append(product.c.tobytes())
    assert made[0] == made[1]


def test_a_symmetric_product_has_the_tiles_on_and_below_the_diagonal():
    order = wgmma_batch.batch_tiles(2, 6, 6, True)
    assert len(order) == 2 * 21
    assert {(x, y) for x, y, _ in order.tolist()} == {*zip(*np.tril_indices(6), strict=True)}
    every = wgmma_batch.batch_tiles(2, 6, 24, False)
    assert len({tuple(each) for each in every.tolist()}) == len(every) == 2 * 6 * 24


WRONG = {
    "rows of another matrix": ("make_fetch_batch", "x * TILE, matrix, 0", "x * TILE, 0, 0"),
    "columns of another matrix": ("make_fetch_batch", "y * TILE, matrix, 0", "y * TILE, 0, 0"),
    "k begins anew": ("make_fetch_batch", "int32(k * schedule.TILE_K)", "int32(0)"),
    "columns are not transposed": ("put_turned", "hopper.stmatrix4_turned", "hopper.stmatrix4"),
    "halves of rows exchanged": ("put_turned", "2 * warp + chunk", "2 * warp + (chunk ^ 1)"),
    "another warp's columns": ("put_turned", "2 * warp", "2 * (warp ^ 1)"),
    "no mirrored tile": ("make_strip_out", "tile.x != tile.y", "False"),
    "mirrored to itself": (
        "make_strip_out", "box, tile, row, column", "box, tile, column, row"),
    "boxes out of turn": ("make_send", "hopper.bulk_wait_read()", "pass"),
    "not fenced": ("make_send", "hopper.proxy_fence()", "pass"),
    "the diagonal below it": ("make_scale_strip", "row + 8 == at else", "row == at else"),
    "no diagonal": ("make_scale_strip", "tile.x == tile.y", "tile.x < tile.y"),
    "D of the first matrix": ("make_scale_strip", "int64(tile.matrix) * n", "int64(0) * n"),
    "D of other rows": ("make_scale_strip", "at + 8 * n", "at + 4 * n"),
    "numbers exchanged": ("make_scale_strip", "of.two * ptx.low_bf16(low)",
                          "of.three * ptx.low_bf16(low)"),
    "one scale for all": ("make_consume_batch", "4 * int64(matrix)", "0 * int64(matrix)"),
    "twice the scale": ("make_consume_batch", "matrix, scale))", "matrix, 2 * scale))"),
    "both consumers take all": ("make_consume_batch", "if me.c == 1", "if me.c == 2"),
    "the stage of the other": (
        "make_consume_batch", "leave(acc, Square(of, me, x, y", "leave(acc, Square(of, me, y, x"),
    "another stage given back": ("make_consume_batch", "stages + last", "stages + stage"),
    "above the diagonal": ("batch_tiles", "x >= y", "x > y"),
}  # fmt: skip


def planted(what):
    function, old, new = WRONG[what]
    return Mutant("engines.gpu.gemm.wgmma_batch", function, what, old, new)


@pytest.mark.parametrize("what", thinned(WRONG, 10))
def test_planted_mistakes_in_products_are_seen(what):
    module = load(planted(what))
    seen = False
    for name in BATCHES:
        product = Product(BATCHES[name], 2, 200, 136)
        try:
            product.run(module)
        except (Fault, UserError, RuntimeError, TimeoutError):
            seen = True
        seen = seen or not product.off() <= 1
        if seen:
            break
    assert seen, what


def test_mistakes_in_products_have_their_places():
    for what in WRONG:
        source(planted(what))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(a=np.zeros((1, 2, 12, 16), np.uint16)), "multiples of 8"),
        (dict(c=np.zeros((1, 2, 8, 8), np.float32)), "C is uint16"),
        (dict(by=np.zeros(3, np.float32)), "scales is float32"),
        (dict(a=np.zeros((1, 2, 8, 16), np.float32)), "A is uint16"),
    ],
)
def test_batches_that_do_not_fit(change, message):
    rows = change.get("a", np.zeros((1, 2, 8, 16))).shape[2]
    x = np.zeros((1, 2, rows, 16), np.uint16)
    of = Operands(x, x, np.zeros((1, 2, rows, rows), np.uint16), np.zeros(2, np.float32))
    with pytest.raises(UserError, match=message):
        wgmma_batch.batch_launch(GRAM, of._replace(**change))


# ---- Momentum before the products, the step behind them

RULES = muon.MuonRules((), 5.0, 0.95, 5, COEFFICIENTS)
RATE, DECAY, CLIP = 0.02, 0.1, 0.5


class Rows:
    """Matrices of one shape in flat buffers, of which some lie side by side; decision: the step's.

    kind: "float32", "copied" (with bf16 copies) or "halves".
    """

    def __init__(self, kind="copied", go=1.0, short=72, long=136):
        rng = np.random.default_rng(0)
        self.matrices = [
            muon.Matrix(16, 2 * long + 8, short, long, 1.5),
            muon.Matrix(16 + long + 8, 2 * long + 8, short, long, 1.5),  # beside the first
            muon.Matrix(16 + short * (2 * long + 8), short, long, short, 1.0),  # lies across
        ]  # fmt: skip
        size = 16 + short * (3 * long + 8) + 16
        self.kind, self.w = kind, rng.standard_normal(size).astype(np.float32)
        self.g, self.m = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
        copy, low = adamw.to_halves(self.w)
        copies = {"float32": np.zeros(16, np.uint16), "copied": copy.copy(), "halves": copy}
        weights = low if kind == "halves" else self.w.copy()
        self.buffers = adamw.Buffers(weights, self.g, self.m.copy(), None, copies[kind])
        self.decision = np.float32([RATE, 9, 9, DECAY, CLIP, 7, go, 0])
        self.batch = np.full((1, 3, short, long), NAN, np.uint16)
        self.scales = np.full(muon.scales_shape(3), np.nan, np.float32)
        self.take = muon.Take(np.asarray, lambda shape, kind: np.full(shape, np.nan, kind))

    def before(self, module=muon, seed=None):
        given = self.matrices, self.buffers, self.decision, self.batch, self.scales, self.take
        rules = module.MuonRules(*RULES)
        for launch in module.momentum_launches(rules, *given):
            run(launch, seed)

    def behind(self, module=muon, seed=None):
        given = self.matrices, self.buffers, self.decision, self.batch, self.take
        run(module.move_launch(module.MuonRules(*RULES), *given), seed)

    def masters(self):
        """The masters as float32 now."""
        weights, *_, copy, _ = self.buffers
        return adamw.from_halves(copy, weights) if self.kind == "halves" else weights

    def views(self, flat):
        """Each matrix of a flat buffer (N,)."""
        step = flat.itemsize
        return [
            np.lib.stride_tricks.as_strided(
                flat[one.start :], (one.rows, one.columns), (one.pitch * step, step))
            for one in self.matrices
        ]  # fmt: skip

    def check_before(self):
        """AssertionError unless momentum, directions and norms are right."""
        moved = 0.95 * self.m.astype(np.float64) + 0.05 * (CLIP * self.g.astype(np.float64))
        u = 0.95 * moved + 0.05 * (CLIP * self.g.astype(np.float64))
        inside = np.zeros(len(self.m), bool)
        for view in self.views(inside):
            view[...] = True
        bound = 4 * U * (abs(self.m) + abs(self.g))
        assert (abs(self.buffers.m - moved) <= bound)[inside].all()
        assert np.array_equal(self.buffers.m[~inside], self.m[~inside]), "wrote beside a matrix"
        for i, (exact, large) in enumerate(zip(self.views(u), self.views(bound), strict=True)):
            exact, large = (x.T if len(x) > x.shape[1] else x for x in (exact, large))
            off = abs(from_bf16(self.batch[0, i]) - exact)
            assert (off <= HALF * (abs(exact) + large) + 2 * large).all()
            norm = np.sqrt((exact**2).sum())
            # Sums of squares of 9 and 3 and 256 terms; an inverse root is off by 4 U.
            terms = 2 * (exact.size // 256 + 20) + 2 * np.sqrt((large**2).sum()) / norm / U
            assert abs(self.scales[1, i] * norm - 1) <= terms * U
            assert abs(self.scales[0, i] * norm**2 - 1) <= 2 * (terms + 1) * U

    def check_behind(self):
        """The same of masters and copies, for the directions that the batch holds."""
        exact, bound = self.w.astype(np.float64), np.zeros(len(self.w))
        directions = from_bf16(self.batch[0]).astype(np.float64)
        for one, w, off, o in zip(
            self.matrices, self.views(exact), self.views(bound), directions, strict=True
        ):
            o = one.scale * (o.T if one.rows > one.columns else o)
            off[...] = 2 * U * (abs(w) + 3 * 5 * RATE * (abs(o) + DECAY * abs(w)))
            w -= 5 * RATE * (o + DECAY * w)
        made = self.masters()
        assert (abs(made - exact) <= bound).all(), "a matrix, or beside one"
        if self.kind == "copied":
            assert np.array_equal(self.buffers.copy, adamw.to_halves(made)[0])


@pytest.mark.parametrize("kind", ["float32", "copied", "halves"])
def test_momentum_and_the_step_of_matrices(kind):
    rows = Rows(kind)
    rows.before()
    rows.check_before()
    rows.behind()
    rows.check_behind()


def test_the_order_of_blocks_moves_no_bit_of_the_rows():
    made = []
    for seed in (1, 2):
        rows = Rows(short=8, long=72)
        rows.before(seed=seed)
        rows.behind(seed=seed)
        made.append([x.tobytes() for x in (*rows.buffers[:5:2], rows.buffers.copy, rows.scales)])
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", ["copied", "halves"])
def test_a_step_that_is_not_taken_changes_nothing(kind):
    rows = Rows(kind, go=0.0)
    rows.g[...] = np.nan
    before = [x.copy() for x in (rows.buffers.weights, rows.buffers.m, rows.buffers.copy)]
    rows.before()
    assert not rows.batch.any() and not rows.scales[:, :3].any()
    rows.batch[...] = NAN
    rows.behind()
    after = rows.buffers.weights, rows.buffers.m, rows.buffers.copy
    assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True))


def test_a_matrix_of_zeros_has_the_scale_zero():
    rows = Rows()
    rows.views(rows.g)[1][...] = 0
    rows.views(rows.buffers.m)[1][...] = 0
    rows.before()
    assert (rows.scales[:, 1] == 0).all() and (rows.scales[:, [0, 2]] > 0).all()


WRONG_ROWS = {
    "the momentum's direction": ("mixed", "return m, float32(keep * m + rest * g)", "return m, m"),
    "no momentum in the direction": ("mixed", "return m, float32(keep * m + rest * g)",
                                     "return m, float32(g)"),
    "not clipped": ("direct", "g2 * clip", "g2"),
    "a skipped step moves": ("direct", "go != float32(0)", "go != float32(2)"),
    "momenta exchanged": ("direct", "ptx.store_float4(m, a, b, c, d)",
                          "ptx.store_float4(m, a, b, d, c)"),
    "taller ones not transposed": ("put_turned", "place[column + j, row]",
                                   "place[row, column + j]"),
    "rows beyond the edge": ("momentum", "row < tile.rows and", "row >= 0 and"),
    "columns beyond the edge": ("momentum", "and column < tile.columns", "and column >= 0"),
    "no barrier before": ("leave_tile", "cuda.syncthreads()", "pass"),
    "the first matrix's tiles for all": ("norms", "8 * int64(i)", "0 * int64(i)"),
    "the norm for its inverse": ("norms", "ptx.inverse_root(total) if",
                                 "ptx.square_root(total) if"),
    "not squared": ("norms", "float32(scale * scale)", "float32(scale)"),
    "a tile where another is": ("matrix_tiles", "x * width + y if", "y * width + x if"),
    "no scale": ("moved", "tile.scale * o", "o"),
    "decay is added": ("moved", "+ decay * w", "- decay * w"),
    "no ratio": ("move_kernel", "ratio * lr", "lr"),
    "the step is not transposed": ("fetch_turned", "place[column + 2, row]",
                                   "place[column + 3, row]"),
    "no barrier behind": ("move_kernel", "cuda.syncthreads()", "pass"),
    "no copy": ("make_masters", "adamw.put_copy(w, 0, copy, at)", "pass"),
    "halves exchanged": ("make_masters", "adamw.join_upper(b, d)", "adamw.join_lower(b, d)"),
}  # fmt: skip


def planted_row(what):
    function, old, new = WRONG_ROWS[what]
    return Mutant("engines.gpu.rows.muon", function, what, old, new)


def wrong_rows(module):
    """Whether anything shows that a module is wrong."""
    try:
        for kind in "copied", "halves":
            rows = Rows(kind)
            rows.before(module)
            rows.check_before()
            rows.behind(module)
            rows.check_behind()
        rows = Rows(go=0.0)
        rows.before(module)
        return rows.buffers.m.tobytes() != rows.m.tobytes()
    except (Fault, AssertionError, UserError, RuntimeError):
        return True


@pytest.mark.parametrize("what", thinned(WRONG_ROWS, 10))
def test_planted_mistakes_in_rows_are_seen(what):
    assert wrong_rows(load(planted_row(what)))


def test_mistakes_in_rows_have_their_places():
    assert not wrong_rows(muon)
    for what in WRONG_ROWS:
        source(planted_row(what))


def test_matrices_that_no_tile_fits():
    with pytest.raises(UserError, match="expected matrices of multiples of 8 for Muon on a GPU"):
        muon.shapes([muon.Matrix(0, 12, 12, 16, 1.0)])
    with pytest.raises(UserError, match="less than 2\\^31"):
        muon.matrix_tiles([muon.Matrix((1 << 31) - 16, 64, 64, 64, 1.0)])


# ---- Newton-Schulz


def path(sigma, steps=5):
    """How much of an error of one rounding of bf16 in each of its products is left at the end,
    at most, of singular values that begin at `sigma`, and the values then.

    An error is multiplied by at most the polynomial's slope along a singular direction, and by
    p(s) / s across. Each round rounds A, P and X: three errors of HALF of the largest value.
    """
    a, b, c = COEFFICIENTS
    left = 0.0
    for _ in range(steps):
        slope = abs(a + 3 * b * sigma**2 + 5 * c * sigma**4)
        ratio = abs(a + b * sigma**2 + c * sigma**4)
        sigma = ratio * sigma
        left = left * max(slope.max(), ratio.max()) + 3 * HALF * sigma.max()
    return left, sigma


@pytest.mark.parametrize("capability, count, r, c", [
    ((9, 0), 2, 16, 24), ((8, 0), 2, 16, 24), ((8, 0), 1, 64, 136),
    pytest.param((9, 0), 1, 64, 136, marks=pytest.mark.long),
])  # fmt: skip
def test_newton_schulz_is_that_of_float64(monkeypatch, capability, count, r, c):
    """Of matrices whose singular values are alike: an error of small ones may grow 3.44^5 times."""
    rng = np.random.default_rng(3)
    x = np.stack([np.linalg.qr(rng.standard_normal((c, r)))[0].T for _ in range(count)])
    x *= rng.uniform(0.8, 1.0, (count, r, 1))
    bits = to_bf16(x.astype(np.float32))[None]
    exact = [orthogonalize(from_bf16(each).astype(np.float64)) for each in bits[0]]
    recording = Recording()
    of_x = recording.whole("x", bits.shape, np.uint16)
    scales = recording.whole("scales", muon.scales_shape(count), np.float32)
    norms = np.sqrt((from_bf16(bits[0]).astype(np.float64) ** 2).sum((1, 2)))
    rules = muon.MuonRules((), 5.0, 0.95, 5, COEFFICIENTS)
    scales = scales[0, :count], scales[1, :count]
    if capability == (9, 0):
        out = step_module.newton_schulz(recording, of_x, scales, rules, 2)
    else:
        recorded.by_numpy(monkeypatch, attention=False)
        engine = CudaEngine(recording, capability, 2)
        out = step_module.newton_schulz_each(engine, of_x, scales, rules)
    memories = {"x": bits.copy(), "scales": np.zeros(muon.scales_shape(count), np.float32)}
    memories["scales"][:, :count] = 1 / norms**2, 1 / norms
    program = recording.end()
    list(rehearsal.rehearse(program, memories))
    made = memories[out.memory].view(np.uint8)[out.address :][: out.nbytes].view(np.uint16)
    made = from_bf16(made.reshape(count, r, c)).astype(np.float64)
    bound, end = path(np.array([0.8, 1.0]) / np.sqrt(r))
    for ours, theirs in zip(made, exact, strict=True):
        assert np.linalg.norm(ours - theirs, 2) <= bound * end.max()
    assert np.linalg.norm(made[0] @ made[0].T - np.eye(r), 2) < 0.7


# ---- Steps

GPT = ModelConfig(
    vocab_size=71, dim=64, n_layers=1, n_heads=1, n_kv_heads=1, hidden=64, context=16, n_predict=1,
    norm="layer", position="learned", mlp="gelu", bias=True, tied=True,
)  # fmt: skip
EULER = ModelConfig(
    vocab_size=64, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden=88, context=16, n_predict=3
)
HOPPER, ADA = (9, 0), (8, 9)


@dataclass(frozen=True)
class NumpyOrthogonal(recorded.ByNumpy):
    """The directions of a batch in float64, rounded; args: the batch, the result."""

    writes = (1,)

    def run(self):
        for x, out in zip(*(each[0] for each in self.args), strict=True):
            out[...] = to_bf16(orthogonalize(recorded.numbers(x)).astype(np.float32))


@pytest.fixture
def by_numpy(monkeypatch):
    """Products, attention and Newton-Schulz by NumPy: their kernels are tested elsewhere."""
    recorded.by_numpy(monkeypatch)

    def rounds(recording, x, *rest):
        out = recording.take(x.shape, np.uint16)
        recording.add("Newton-Schulz", [NumpyOrthogonal((x, out))])
        return out

    monkeypatch.setattr(step_module, "newton_schulz", rounds)
    monkeypatch.setattr(
        step_module, "newton_schulz_each", lambda engine, *rest: rounds(engine.recording, *rest))


class End:
    """The end of a step alone, from gradients on: what `MuonBuilder` records behind AdamW's."""

    def __init__(self, config, capability=HOPPER, precision="cuda"):
        self.weights = initialise(config, 0)
        self.optimizer = Muon(self.weights, weight_decay=0.3, clip_norm=0.5)
        machine, kind = Machine(capability, 4), PRECISIONS[precision]
        rules = Rules(*(getattr(self.optimizer, name) for name in Rules._fields))
        matrix_rules = step_module.rules_of(self.optimizer, self.weights)
        builder = step_module.muon_builder(config, machine, kind, matrix_rules)
        losses = builder.recording.whole("losses", (4,), np.float32)
        builder.update(builder.whole(GRADIENTS), losses, rules)
        self.program, self.builder = builder.recording.end(), builder
        self.memories = builder.memories(self.weights)
        self.memories |= {name: np.zeros(self.weights.flat.size, np.float32) for name in MOMENTS}
        self.memories |= {"losses": np.ones(4, np.float32), "decision": np.zeros(8, np.float32)}

    def step(self, gradients, number, lr=0.01):
        """Step `number` on gradients, flat (N,); the norm."""
        rule = self.optimizer
        rates = schedule([lr], rule.beta1, rule.beta2, rule.weight_decay, first=number)
        self.memories |= {GRADIENTS: gradients, "rates": rates}
        list(rehearsal.rehearse(self.program, self.memories))
        return float(self.memories["decision"][5])

    def masters(self):
        """The masters now, (N,) float32."""
        if LOWER in self.memories:
            return adamw.from_halves(self.memories[COPIES], self.memories[LOWER])
        return self.memories[WEIGHTS]


def expected_matrices(before, m, gradients, clip, lr=0.01):
    """name, columns, and what they are after a step, of directions as float32 mixes them."""
    keep, rest, made = np.float32(Muon.momentum), np.float32(1 - Muon.momentum), []
    rate = matrix_rate(lr, before.config.dim)
    for each in matrices(before):
        name, here = each.name, slice(each.start, each.start + each.columns)
        g = np.float32(clip) * gradients[name][:, here]
        new = keep * m[name][:, here] + rest * g
        u = from_bf16(to_bf16(keep * new + rest * g)).astype(np.float64)
        o = from_bf16(to_bf16(orthogonalize(u).astype(np.float32)))
        w = before[name][:, here].astype(np.float64)
        scale = max(1, u.shape[1] / u.shape[0]) ** 0.5
        made.append((name, here, w - rate * (scale * o + 0.3 * w)))
        m[name][:, here] = new
    return made


def gradients_of(weights, number):
    """Normal deviates for every parameter, and zeros between them."""
    made, rng = weights.zeros_like(), np.random.default_rng(number)
    for view in made.values():
        view[...] = rng.standard_normal(view.shape)
    return made


@pytest.mark.parametrize("config, capability, precision", [
    (GPT, HOPPER, "cuda"), (EULER, ADA, "cuda-float32"),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (
        (EULER, HOPPER, "cuda"), (GPT, ADA, "cuda"), (EULER, HOPPER, "cuda-float32"))),
])  # fmt: skip
def test_steps_are_muons_for_matrices_and_adamws_for_the_rest(
    by_numpy, config, capability, precision
):
    this, adam = End(config, capability, precision), initialise(config, 0)
    rule, m = AdamW(adam, weight_decay=0.3, clip_norm=0.5), adam.zeros_like()
    names = {each.name for each in matrices(adam)}
    for number in (1, 2):
        before, gradients = Weights(config, flat=this.masters().copy()), gradients_of(adam, number)
        norm = this.step(gradients.flat.copy(), number)
        assert norm > 0.5, "nothing to clip"
        after = Weights(config, flat=this.masters())
        for name, here, w in expected_matrices(before, m, gradients, 0.5 / norm):
            # A direction that bf16 rounds to the other side, because the clip's reciprocal has
            # rounded it otherwise, is rare, and off by 2^-8 of itself: 1 % is room for each to be.
            off = np.linalg.norm(after[name][:, here] - w)
            assert off < 0.01 * np.linalg.norm(w - before[name][:, here]), name
        gradients.flat[...] *= np.float32(0.5 / norm)
        rule.update(adam, gradients, 0.01, number)
        for name in set(before) - names:
            # Roots and reciprocals are off by 8 U in the step, masters by U of themselves.
            off = abs(after[name] - adam[name])
            assert (off <= number * 2 * U * (abs(adam[name]) + 16 * 0.01)).all(), name
        moments = Weights(config, flat=this.memories["v"])
        assert all(moments[name].any() == (name not in names) for name in moments)


@pytest.mark.parametrize("precision", ["cuda", "cuda-float32"])
def test_a_gradient_that_is_not_finite_changes_nothing(by_numpy, precision):
    this = End(GPT, precision=precision)
    this.step(gradients_of(this.weights, 1).flat, 1)
    kept = {name: this.memories[name].tobytes() for name in (*MOMENTS, WEIGHTS, COPIES)}
    bad = gradients_of(this.weights, 2)
    bad["block.0.wo"][3, 5] = np.inf
    assert this.step(bad.flat, 2) == np.inf
    assert all(this.memories[name].tobytes() == each for name, each in kept.items())


class Run:
    """A model, its Muon, a stepper on paper, and a batch for it."""

    def __init__(self, flat=None, moments=(), config=GPT, B=1):
        self.weights, rng = initialise(config, 0), np.random.default_rng(5)
        if flat is not None:
            self.weights.flat[...] = flat
        self.optimizer = Muon(self.weights)
        for each, values in zip((self.optimizer.m, self.optimizer.v), moments, strict=False):
            each.flat[...] = values
        self.tokens = rng.integers(config.vocab_size, size=(B, 8))
        self.targets = rng.integers(config.vocab_size, size=(B, 8, config.n_predict))
        device = Device(capability=HOPPER, multiprocessors=4)
        self.stepper = MuonStepper(self.weights, self.optimizer, device)

    def step(self, number, lr=0.01):
        """What is left of the run after step `number`, as bytes; and the gradients' norm."""
        self.stepper.step(self.tokens, self.targets, lr, number)
        (taken,) = self.stepper.finish()
        self.stepper.pull()
        kept = self.weights, self.optimizer.m, self.optimizer.v
        return [x.flat.tobytes() for x in kept], taken.norm


def test_a_run_goes_on_from_what_was_pulled_to_the_byte(by_numpy):
    ours = Run()
    kept, _ = ours.step(1)
    flat, *moments = (np.frombuffer(x, np.float32) for x in kept)
    other = Run(flat, moments)
    assert ours.step(2) == other.step(2)


@pytest.mark.long
def test_a_loss_that_is_not_finite_changes_nothing(by_numpy):
    this = Run()
    this.step(1)
    this.weights["norm"][3] = np.inf
    before = [x.flat.tobytes() for x in (this.weights, this.optimizer.m, this.optimizer.v)]
    this.stepper.push()
    after, norm = this.step(2)
    assert not np.isfinite(norm) and after == before


def test_what_a_step_holds(monkeypatch):
    """Recorded, not run: AdamW's tiles and Muon's cover every parameter once."""
    weights = initialise(EULER, 0)
    stepper = MuonStepper(weights, Muon(weights), Device(capability=HOPPER))
    recorded_step = stepper.builder("step").build_step(2, 16, recorded.RULES)
    steps = recorded_step.program.steps
    covered = np.zeros(weights.flat.size, int)
    tables = {id(values): values for values in recorded_step.program.constants}
    for one in stepper.step_builder.keywords["rules"].matrices:
        for row in range(one.rows):
            covered[one.start + row * one.pitch :][: one.columns] += 1
    (of_adamw,) = (step.launch for step in steps if step.name == "AdamW")
    (tiles,) = (t for t in tables.values() if t.shape == of_adamw.args[0].shape
                and t.dtype == np.int32 and t.shape[1] == 4)  # fmt: skip
    for first, count, *_ in tiles.tolist():
        covered[first : first + count] += 1
    assert (covered == 1).all()
    names = [step.name for step in steps if step.name in ("X X^T", "polynomial", "P X")]
    assert names == 3 * 5 * ["X X^T", "polynomial", "P X"]  # 64 x 64, 32 x 64, 64 x 88


def test_steppers_refuse_optimizers_that_are_not_theirs():
    weights = initialise(GPT, 0)
    with pytest.raises(UserError, match="expected the optimizer AdamW for training on a GPU"):
        CudaStepper(weights, Muon(weights), None)
    with pytest.raises(UserError, match="expected the optimizer Muon for training on a GPU"):
        MuonStepper(weights, AdamW(weights), None)


def test_the_engine_of_a_gpu_takes_muon(monkeypatch):
    monkeypatch.setattr(stepper_module, "gpu", lambda: Device(capability=HOPPER))
    weights = initialise(GPT, 0)
    for kind, stepper in (Muon, MuonStepper), (AdamW, CudaStepper):
        assert type(stepper_module.cuda_stepper("cuda", weights, kind(weights))) is stepper
    assert type(stepper_module.cuda_stepper("cuda", weights, None)) is CudaStepper


@pytest.mark.long
def test_steps_by_our_kernels_lower_the_loss():
    this = Run(config=EULER, B=4)
    first = this.stepper.sums(this.tokens, this.targets).sum()
    for number in range(1, 4):
        this.step(number, lr=0.02)
    assert this.stepper.sums(this.tokens, this.targets).sum() < 0.98 * first
