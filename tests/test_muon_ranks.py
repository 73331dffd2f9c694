"""Muon over several GPUs, on paper: shards of momentum, matrices dealt to ranks, against one GPU.

With gradients that both have to the bit and no clipping, directions and steps are those of one GPU
to the bit where Newton-Schulz is NumPy's, which divides by a norm of its own. Whole steps differ in
the order in which gradients are added, and rank by rank in nothing.
"""

import dataclasses
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from mutants import Mutant, load, source
from test_exchange import SMALL, arrays_of, devices, wrong
from test_muon_gpu import EULER, GPT, HALF, HOPPER, U, by_numpy, path  # noqa: F401 - a fixture
from tiers import kept

from nanoeuler.emulator import Fault, run
from nanoeuler.emulator.collectives import EmulatedLink
from nanoeuler.emulator.dtypes import from_bf16, to_bf16
from nanoeuler.engines.gpu.ranks import muon as ranks_muon
from nanoeuler.engines.gpu.ranks import stepper as rank_stepper
from nanoeuler.engines.gpu.ranks.buckets import Sharing
from nanoeuler.engines.gpu.ranks.exchange import MASTERS, Exchange, Join, tiles_of
from nanoeuler.engines.gpu.ranks.stepper import CudaRankStepper
from nanoeuler.engines.gpu.rows import adamw, muon
from nanoeuler.engines.gpu.rows.gradient_norm import schedule
from nanoeuler.engines.gpu.step.muon import MuonStepper, rules_of
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, PRECISIONS
from nanoeuler.engines.gpu.step.recording import GRADIENTS, MOMENTS, Machine, Recorded, Rules
from nanoeuler.engines.ranks import controller
from nanoeuler.engines.ranks.threads import together
from nanoeuler.errors import UserError
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning.exchange import Rank
from nanoeuler.training.muon import Muon, matrices
from nanoeuler.training.optim import AdamW

LR = 0.01
TWO = dataclasses.replace(EULER, n_layers=2, hidden=72)


def fresh(config, clip=1.0):
    weights = initialise(config, 0)
    return weights, Muon(weights, weight_decay=0.3, clip_norm=clip)


# ---- Kernels between flat directions and batches


class Flat:
    """Matrices side by side, one that lies across, and their directions in a flat buffer."""

    def __init__(self, short=72, long=136):
        self.matrices = [
            muon.Matrix(16, 2 * long + 8, short, long, 1.5),
            muon.Matrix(16 + long + 8, 2 * long + 8, short, long, 1.0),
            muon.Matrix(16 + short * (2 * long + 8), short, long, short, 1.0),
        ]  # fmt: skip
        size = 16 + short * (3 * long + 8) + 16
        rng = np.random.default_rng(0)
        self.flat = to_bf16(rng.standard_normal(size).astype(np.float32))
        self.take = muon.Take(np.asarray, lambda shape, kind: np.full(shape, np.nan, kind))
        self.batch = np.full((1, 3, short, long), 0x7FC0, np.uint16)

    def views(self, flat):
        """Each matrix of a flat buffer (N,), as it lies in the batch."""
        step = flat.itemsize
        for one in self.matrices:
            view = np.lib.stride_tricks.as_strided(
                flat[one.start :], (one.rows, one.columns), (one.pitch * step, step))  # fmt: skip
            yield view.T if one.rows > one.columns else view

    def check(self, module=muon, seed=None):
        """AssertionError unless matrices go there, with their norms, and come back."""
        scales = np.full(muon.scales_shape(3), np.nan, np.float32)
        given = self.matrices, self.flat, self.batch, scales, self.take
        for launch in module.collect_launches(*given):
            run(launch, seed)
        for i, view in enumerate(self.views(self.flat)):
            assert (self.batch[0, i] == view).all()
            norm = np.linalg.norm(from_bf16(view).astype(np.float64))
            # A tile's sum has 16 terms in a thread, then 8 levels; then tiles; a root is off by 4.
            terms = 16 + 8 + 9 + 4
            assert abs(scales[1, i] * norm - 1) <= terms * U
            assert abs(scales[0, i] * norm**2 - 1) <= 2 * (terms + 1) * U
        back = np.full_like(self.flat, 0x7FC0)
        run(module.deliver_launch(self.matrices, self.batch, back, self.take), seed)
        inside = np.zeros(len(back), bool)
        for view in self.views(inside):
            view[...] = True
        assert (back[inside] == self.flat[inside]).all()
        assert (back[~inside] == 0x7FC0).all(), "wrote beside a matrix"
        return scales.tobytes()


def test_matrices_go_to_a_batch_and_come_back():
    made = {Flat(*shape).check(seed=seed) for seed in (1, 2) for shape in [(72, 136)]}
    assert len(made) == 1, "the order of blocks moves bits"
    Flat(8, 16).check()


WRONG_ROWS = {
    "the first row of all": ("collect", "int64(row) * tile.pitch", "int64(0) * tile.pitch"),
    "squares of one column": ("leave_row", "u[j] * u[j]", "u[j] * u[0]"),
    "not transposed": ("leave_row", "place[row, tile.column + j]",
                       "place[tile.column + j, row]"),
    "no barrier": ("leave_tile", "cuda.syncthreads()", "pass"),
    "no barrier back": ("deliver", "cuda.syncthreads()", "pass"),
    "another row back": ("deliver", "row * width", "row * 8"),
    "another column back": ("deliver", "place[row, column + j]", "place[row, column]"),
}  # fmt: skip


@pytest.mark.parametrize("what", kept(WRONG_ROWS, "squares of one column", "no barrier back"))
def test_planted_mistakes_between_flat_and_batch_are_seen(what):
    function, old, new = WRONG_ROWS[what]
    module = load(Mutant("engines.gpu.rows.muon", function, what, old, new))
    with pytest.raises((Fault, AssertionError, RuntimeError)):
        Flat().check(module)


def test_mistakes_have_their_places():
    for what, (function, old, new) in WRONG_ROWS.items():
        source(Mutant("engines.gpu.rows.muon", function, what, old, new))


# ---- Who has what


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("config", [GPT, TWO], ids=["GPT", "two"])
def test_every_parameter_is_updated_once_by_one_rank(config, size):
    weights, optimizer = fresh(config)
    rules, sharing = rules_of(optimizer, weights), Sharing(weights, size, SMALL)
    builder = SimpleNamespace(
        sharing=sharing, link=Rank(0, size, False), recording=SimpleNamespace(constant=0, take=0)
    )
    shared = ranks_muon.SharedMatrices(builder, rules)
    segments = shared.left(adamw.segments(weights))
    assert 0 < len(segments) < len(adamw.segments(weights))
    covered = np.zeros(sharing.length, int)
    scales = np.zeros(sharing.length, np.float32)
    for bucket in sharing.buckets:
        for rank in range(size):
            part = sharing.part(bucket, rank)
            for first, count, *_ in tiles_of(segments, part.start, part.stop, True).tolist():
                covered[part.start + first :][:count] += 1
            found = shared.within(part.start, part.stop)
            for first, pitch, down, across, to, turned, bits, _ in muon.line_tiles(
                found, part.start
            ).tolist():
                assert to == first and not turned and first % muon.LANE == 0
                assert pitch == muon.SIDE and (down == 1 or across == pitch)
                last = part.start + first + (down - 1) * pitch + across
                assert last <= part.stop
                here = slice(part.start + first, last)
                covered[here] += 1
                (scales[here],) = np.int32([bits]).view(np.float32)
            gaps = ranks_muon.between(found, part.start, part.stop)
            edges = sorted([(a, b) for a, b, _ in found] + [(a, a + n) for a, n in gaps])
            assert edges[0][0] == part.start and edges[-1][1] == part.stop
            assert all(a[1] == b[0] for a, b in pairwise(edges))
            assert all(first % 8 == count % 8 == 0 for first, count in gaps), "pairs, by fours"
    inside = np.concatenate([np.arange(a.start, a.start + a.length)
                             for a in adamw.segments(weights)])  # fmt: skip
    assert (covered[inside] == 1).all() and covered.sum() == len(inside)
    for one in rules.matrices:
        for row in range(one.rows):
            here = scales[one.start + row * one.pitch :][: one.columns]
            assert (here == np.float32(one.scale)).all()


def test_neighbours_of_other_scales_are_not_one_stretch():
    side = [muon.Matrix(8 * i, 24, 2, 8, 1.0 + (i == 1)) for i in range(3)]
    found = muon.within(muon.stretches(side), 4, 44)
    assert found == [(4, 8, 1.0), (8, 16, 2.0), (16, 32, 1.0), (32, 40, 2.0), (40, 44, 1.0)]
    assert muon.within(muon.stretches(side), 48, 99) == []


def test_a_shape_is_dealt_whole():
    for count, size in (1, 2), (7, 2), (7, 4), (8, 4), (3, 8):
        every = [one for rank in range(size)
                 for one in ranks_muon.dealt([*range(count)], rank, size)]  # fmt: skip
        assert every[:count] == [*range(count)] and set(every) == {*range(count)}
        assert len(every) % size == 0


# ---- Lists


def listed(config=TWO, size=2, rank=0, precision=BF16, copies=False, capability=HOPPER):
    weights, optimizer = fresh(config)
    rules = Rules(*(getattr(optimizer, name) for name in Rules._fields))
    machine = Machine(capability, 4)
    how = dict(link=Rank(rank, size, copies), least=SMALL, rules=rules_of(optimizer, weights))
    made = ranks_muon.muon_rank_builder(config, machine, precision, **how)
    return made.build_step(2, 4, rules, 1)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("precision, capability", kept(
    [("cuda", (9, 0)), ("cuda", (8, 9)), ("cuda-float32", (9, 0))],
    ("cuda", (9, 0)), ("cuda-float32", (9, 0))))  # fmt: skip
def test_no_list_races_and_ranks_agree_on_exchanges(precision, capability, copies):
    seen = []
    for rank in range(2):
        how = dict(precision=PRECISIONS[precision], capability=capability, copies=copies)
        program = listed(rank=rank, **how).program
        assert not wrong(program)
        seen.append([(step.name, step.launch.kind, [a.shape for a in step.launch.args])
                     for step in program.steps if isinstance(step.launch, Exchange)])  # fmt: skip
    assert seen[0] == seen[1]
    names = [name for name, *_ in seen[0]]
    assert names.count("gather matrices") == len({tuple(sorted(x[2:])) for x in matrices(TWO)})
    assert names.count("gather directions") >= TWO.n_layers


def test_state_is_in_shards():
    program = listed().program
    for name in (MASTERS, *MOMENTS):
        assert program.sizes[name] * 2 == program.sizes[GRADIENTS]
    for step in program.steps:
        if step.name == "momentum":
            (m,) = (a for a in arrays_of(step.launch) if a.memory == MOMENTS[0])
            (g,) = (a for a in arrays_of(step.launch) if a.memory == GRADIENTS)
            assert m.shape == g.shape and m.shape[0] < program.sizes[GRADIENTS] // 8


# ---- The end of a step, on gradients that are the same to the bit


def planted(builder, rules):
    """The end of a step alone, of gradients that lie there."""
    losses = builder.loss_sums(1).reshape(-1)
    builder.update(builder.whole(GRADIENTS), losses, rules)
    return Recorded(builder.recording.end(), builder.inputs, builder.results)


def ends(this, gradients, there=True):
    """Steps' ends of a stepper, with gradients or zeros; norms, and what is left of the run."""
    optimizer, device = this.optimizer, this.device
    length = this.memories[GRADIENTS].shape[0]
    rules = Rules(*(getattr(optimizer, name) for name in Rules._fields))
    loaded, norms = this.load(planted(this.builder("step"), rules)), []
    for number, flat in enumerate(gradients, 1):
        values = np.zeros(length, np.float32)
        if there:
            values[: len(flat)] = flat
        device.fill(this.memories[GRADIENTS], values)
        how = optimizer.beta1, optimizer.beta2, optimizer.weight_decay
        loaded.inbox.page()["rates"][...] = schedule([LR], *how, first=number)
        this.launch(loaded)
        norms.append(float(loaded.outbox.read()["decision"][5]))
    this.pull()
    copies = device.host(this.memories[COPIES])
    kept = this.weights, optimizer.m, optimizer.v
    return norms, [x.flat.copy() for x in kept], copies


def one_gpu(config, gradients, clip, precision="cuda"):
    weights, optimizer = fresh(config, clip)
    device = devices()
    this = MuonStepper(weights, optimizer, device, precision=PRECISIONS[precision])
    this.memories[GRADIENTS] = device.array(np.zeros(weights.flat.size, np.float32))
    return ends(this, gradients)


def several(config, gradients, size, clip, precision="cuda", late=False, copies=False):
    """The last rank has the gradients, and the others zeros, so sums are exact in any order."""
    def act(group):
        weights, optimizer = fresh(config, clip)
        device = devices()
        this = CudaRankStepper(
            weights, optimizer, device, EmulatedLink(device, group, late, copies), group,
            least=SMALL, precision=PRECISIONS[precision],
        )  # fmt: skip
        return ends(this, gradients, group.rank == size - 1)

    return together(size, act)


def deviates(config, count=2):
    weights, made = initialise(config, 0), []
    for number in range(count):
        gradients, rng = weights.zeros_like(), np.random.default_rng(number)
        for view in gradients.values():
            view[...] = rng.standard_normal(view.shape)
        made.append(gradients.flat)
    return made


FREE = 1e9  # a norm that no gradient has: nothing is clipped


@pytest.mark.parametrize("config, size, precision, late, copies", kept(
    [(GPT, 2, "cuda", False, False), (TWO, 4, "cuda", True, True),
     (TWO, 2, "cuda-float32", True, False), (TWO, 8, "cuda", False, True)],
    (GPT, 2, "cuda", False, False), (TWO, 4, "cuda", True, True),
    (TWO, 2, "cuda-float32", True, False)))  # fmt: skip
def test_the_end_of_a_step_is_one_gpus_to_the_bit(
    by_numpy, config, size, precision, late, copies  # noqa: F811
):
    gradients = deviates(config)
    norms, state, halves = one_gpu(config, gradients, FREE, precision)
    assert not np.array_equal(state[0], initialise(config, 0).flat)
    for theirs, kept_there, copied in several(
        config, gradients, size, FREE, precision, late, copies
    ):
        for ours, other in zip(state, kept_there, strict=True):
            assert ours.tobytes() == other.tobytes()
        for part in adamw.segments(initialise(config, 0)) if precision == "cuda" else ():
            here = slice(part.start, part.start + part.length)
            assert part.copy < 0 or (copied[here] == halves[here]).all()
        # A norm is a root of a sum of squares, in another order.
        np.testing.assert_allclose(theirs, norms, rtol=64 * U)


@pytest.mark.long
def test_by_our_kernels_the_end_is_one_gpus_but_for_the_norm():
    """Newton-Schulz itself, on matrices of equal singular values, which the norm's rounding moves
    by 2^-9 at most: the bound is `path`'s for both sides, and a slope of that."""
    weights = initialise(GPT, 0)
    flat, rng = weights.zeros_like(), np.random.default_rng(1)
    for view in flat.values():
        view[...] = rng.standard_normal(view.shape)
    for each in matrices(GPT):
        x = rng.standard_normal((each.rows, each.columns))
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        flat[each.name][:, each.start : each.start + each.columns] = u @ vt
    (_, one, _), ranks = one_gpu(GPT, [flat.flat], FREE), several(GPT, [flat.flat], 2, FREE)
    ours, theirs = (Weights(GPT, flat=state) for state in (one[0], ranks[0][1][0]))
    assert ranks[0][1][0].tobytes() == ranks[1][1][0].tobytes(), "ranks differ"
    rate = Muon.rate(LR, GPT.dim)
    for each in matrices(GPT):
        here = slice(each.start, each.start + each.columns)
        bound, end = path(np.array([1 - HALF, 1.0]) / np.sqrt(min(each.rows, each.columns)))
        off = np.linalg.norm(ours[each.name][:, here] - theirs[each.name][:, here], 2)
        moved = np.linalg.norm(theirs[each.name][:, here] - weights[each.name][:, here], 2)
        scale = Muon.scale(each.rows, each.columns)
        assert moved > 0.4 * rate * scale, "nothing moved"
        assert off <= 3 * bound * end.max() * rate * scale
    assert ours["embedding"].tobytes() == theirs["embedding"].tobytes()


def test_what_is_not_finite_on_one_rank_changes_nothing_on_all(by_numpy):  # noqa: F811
    good, bad = deviates(GPT)
    bad[initialise(GPT, 0).starts["block.0.wo"] + 5] = np.inf
    (_, before, halves), *_ = several(GPT, [good], 2, 1.0)
    for norms, after, copied in several(GPT, [good, bad], 2, 1.0):
        assert norms[1] == np.inf and (copied == halves).all()
        assert all(x.tobytes() == y.tobytes() for x, y in zip(before, after, strict=True))


# ---- Whole steps


def batch(config, B=4, T=8):
    rng = np.random.default_rng(5)
    return (rng.integers(config.vocab_size, size=(B, T)),
            rng.integers(config.vocab_size, size=(B, T, config.n_predict)))  # fmt: skip


def rank_of(config, group, state=()):
    """A rank's stepper of a run that begins, or goes on from these flat arrays on rank 0."""
    weights, optimizer = fresh(config)
    if group.rank == 0:
        for each, values in zip((weights, optimizer.m, optimizer.v), state, strict=False):
            each.flat[...] = values
    device = devices()
    link = EmulatedLink(device, group)
    this = CudaRankStepper(weights, optimizer, device, link, group, least=SMALL)
    this.push()
    return this


def train(config, size, numbers, state=()):
    """Steps of these numbers on each rank: what is told, and what is left."""
    tokens, targets = batch(config)

    def act(group):
        this, told = rank_of(config, group, state), []
        for number in numbers:
            told += this.step(tokens, targets, LR, number)
        told += this.finish()
        this.pull()
        kept = this.weights, this.optimizer.m, this.optimizer.v
        return [(x.number, *x.sums, x.norm) for x in told], [x.flat.copy() for x in kept]

    return together(size, act)


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def test_a_run_goes_on_to_the_byte(by_numpy):  # noqa: F811
    told, end = train(GPT, 2, (1, 2))[0]
    first, middle = train(GPT, 2, (1,))[0]
    for rest, state in train(GPT, 2, (2,), middle):
        assert same(end, state) and first + rest == told
    assert not same(end, middle)


def test_ranks_train_as_one_gpu(by_numpy):  # noqa: F811
    tokens, targets = batch(GPT)
    weights, optimizer = fresh(GPT)
    one = MuonStepper(weights, optimizer, devices(), pieces=2)
    (taken,) = one.step(tokens, targets, LR, 1) + one.finish()
    one.pull()
    ranks = train(GPT, 2, (1,))
    assert same(ranks[0][1], ranks[1][1]) and ranks[0][0] == ranks[1][0]
    (told,), (flat, m, v) = ranks[0]
    np.testing.assert_allclose(told[1:], [*taken.sums, taken.norm], rtol=16 * U)
    before, after = initialise(GPT, 0), Weights(GPT, flat=flat)
    names = {each.name for each in matrices(GPT)}
    for name in weights:
        off, moved = (np.linalg.norm(after[name] - x[name]) for x in (weights, before))
        # As in `test_steps_are_muons_for_matrices`: directions that bf16 rounds to the other side.
        assert name not in names or 0 < moved and off < 0.01 * moved, name
    assert all(Weights(GPT, flat=v)[name].any() == (name not in names) for name in weights)
    # Momenta are a twentieth of gradients, whose two addends are added in another order.
    assert np.linalg.norm(m - optimizer.m.flat) <= 64 * U * np.linalg.norm(m)


def test_rank_0_leads_ranks_that_train_with_muon(by_numpy, monkeypatch):  # noqa: F811
    """The way of a training run: steppers are made by name, and followers' optimizers by its."""
    tokens, targets = batch(GPT)
    monkeypatch.setattr(rank_stepper, "link_of", lambda group: EmulatedLink(devices(), group))
    monkeypatch.setattr(rank_stepper, "CudaRankStepper", partial(CudaRankStepper, least=SMALL))

    def act(group):
        if group.rank:
            return controller.follow(group)
        weights, optimizer = fresh(GPT)
        with controller.leading(group):
            this = controller.Controller(group, "cuda", weights, optimizer, None, 1)
            this.step(tokens, targets, LR, 1)
            this.finish()
            this.pull()
            return [x.flat.copy() for x in (weights, optimizer.m, optimizer.v)]

    assert same(together(2, act)[0], train(GPT, 2, (1,))[0][1])


def test_other_optimizers_are_refused():
    weights = initialise(GPT, 0)

    class Lion(AdamW):
        pass

    device = devices()
    link = SimpleNamespace(rank=0, size=1, copies=False)
    with pytest.raises(UserError, match="expected the optimizer AdamW or Muon"):
        CudaRankStepper(weights, Lion(weights), device, link, None)


# ---- Mistakes


class Unjoined(ranks_muon.SharedMatrices):
    """Collects directions before they have arrived."""

    def rounds(self, these):
        steps = self.builder.recording.program.steps
        if steps and isinstance(steps[-1].launch, Join):
            del steps[-1]
        return super().rounds(these)


class Own(ranks_muon.SharedMatrices):
    """Orthogonalizes the first share on every rank."""

    def rounds(self, these):
        link, self.builder.link = self.builder.link, Rank(0, self.builder.link.size, False)
        try:
            self.builder.exchange, true = lambda name, kind, *args: true_exchange(
                name, kind, *args), self.builder.exchange  # fmt: skip
            true_exchange = partial(exchanged, self.builder, link)
            return super().rounds(these)
        finally:
            self.builder.link, self.builder.exchange = link, true


def exchanged(builder, link, name, kind, *args):
    builder.recording.add(name, Exchange(kind, args, link))


class Held(ranks_muon.SharedMatrices):
    """Takes the momentum of another bucket."""

    def momentum(self, bucket, decision, pairs):
        sharing, held = self.builder.sharing, self.builder.sharing.held
        sharing.held = lambda bucket: slice(0, held(bucket).stop - held(bucket).start)
        super().momentum(bucket, decision, pairs)
        sharing.held = held


class Left(ranks_muon.SharedMatrices):
    """Leaves matrices to AdamW, too."""

    def left(self, segments):
        return segments


FAULTS = {"not joined": Unjoined, "one share for all": Own, "another bucket's": Held,
          "AdamW's, too": Left}  # fmt: skip


@cache
def right():
    return several(TWO, deviates(TWO), 2, FREE)[0][1]


@pytest.mark.parametrize("what", kept(FAULTS, "one share for all", "another bucket's"))
def test_faults_are_seen(by_numpy, monkeypatch, what):  # noqa: F811
    good = right()
    monkeypatch.setattr(ranks_muon, "SharedMatrices", FAULTS[what])
    try:
        found = several(TWO, deviates(TWO), 2, FREE, late=True)[0][1]
    except Fault:
        return
    assert not same(found, good)
