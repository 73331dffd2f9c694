"""Muon: which matrices, how nearly orthogonal, equal bits for threads, ranks and resumed runs."""

import tracemalloc
from dataclasses import replace
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import sketches
from mutants import Mutant, execute, source

import nanoeuler as ne
from nanoeuler.cli.main import main
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.ranks.stepper import RankStepper
from nanoeuler.engines.ranks.threads import together
from nanoeuler.engines.registry import engine_factory, make_stepper
from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training import muon as module
from nanoeuler.training.checkpoint import read_record
from nanoeuler.training.muon import Muon, matrices, matrix_rate, matrix_scale, orthogonalize
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Run, Settings, identity

CONFIG = ModelConfig(vocab_size=40, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, hidden=40,
                     context=8, n_predict=2)  # fmt: skip
GPT2 = dict(norm="layer", position="learned", mlp="gelu", bias=True, tied=True, n_kv_heads=4,
            n_predict=1)  # fmt: skip
LR = 0.01


def random_like(weights, seed, scale=1.0):
    made, rng = weights.zeros_like(), np.random.default_rng(seed)
    for tensor in made.values():
        tensor[...] = scale * rng.standard_normal(tensor.shape)
    return made


def polar(x):
    """U V^T of x = U S V^T."""
    U, _, Vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return U @ Vt


# ---- Which matrices


@pytest.mark.parametrize("changes", [{}, GPT2])
def test_joint_tensors_are_cut_and_the_rest_stays_with_adamw(changes):
    weights = initialise(replace(CONFIG, **changes), 0)
    config, by_name = weights.config, {}
    for each in matrices(weights):
        by_name.setdefault(each.name.split(".")[-1], []).append((each.start, each.columns))
    D, H, G, F = config.head_dim, config.n_heads, config.n_kv_heads, config.hidden
    up = [(0, F)] if changes else [(0, F), (F, F)]
    assert by_name == {
        "wqkv": 2 * [(0, H * D), (H * D, G * D), ((H + G) * D, G * D)], "wo": 2 * [(0, 24)],
        "w_up": 2 * up, "w_down": 2 * [(0, 24)],
    }  # fmt: skip
    assert not {"embedding", "positions", "output"} & {each.name for each in matrices(weights)}


def plain_steps(weights, steps=3, decay=0.3):
    """Weights after steps of random gradients by the rule in plain NumPy, in float64."""
    w = {name: each.astype(np.float64) for name, each in weights.items()}
    m = {name: 0 * each for name, each in w.items()}
    adam = Weights(weights.config, np.float64)
    adam.flat[...] = weights.flat
    optimizer = AdamW(adam, weight_decay=decay)
    for t in range(1, steps + 1):
        gradients = random_like(weights, t)
        wide = adam.zeros_like()
        wide.flat[...] = gradients.flat
        optimizer.update(adam, wide, LR, t)
        for each in matrices(weights):
            columns = slice(each.start, each.start + each.columns)
            g, buffer = (x[each.name][:, columns] for x in (wide, m))
            buffer[...] = 0.95 * buffer + 0.05 * g
            step = orthogonalize(0.05 * g + 0.95 * buffer)
            scale = max(1, step.shape[1] / step.shape[0]) ** 0.5
            place = w[each.name][:, columns]
            place -= 2.5 * LR * (scale * step + decay * place)
    names = {each.name for each in matrices(weights)}
    return {name: w[name] if name in names else adam[name] for name in weights}


def within(dtype):
    """How far three steps in this dtype may be from those in float64.

    In the first Newton-Schulz step a product's sum of at most 40 terms is off by 40 roundings of
    the largest singular value, which is 1 at most. Where singular values are small the later ones
    let that grow by the slope 3.4445 each, 141 times in all, and by less elsewhere; what they add
    themselves grows less often. A step of a matrix is 0.025 long, times a scale of 1.3.
    """
    return 3 * 0.025 * 1.3 * 2 * 141 * 40 * np.finfo(dtype).eps


@pytest.mark.parametrize("changes", [{}, GPT2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_three_steps_are_those_of_the_rule_in_plain_numpy(changes, dtype):
    weights = initialise(replace(CONFIG, **changes), 0, dtype)
    expected = plain_steps(weights)
    optimizer = Muon(weights, weight_decay=0.3)
    for t in (1, 2, 3):
        optimizer.update(weights, random_like(weights, t), LR, t)
    for name, w in weights.items():
        assert np.abs(w - expected[name]).max() < within(dtype), name
    names = {each.name for each in matrices(weights)}
    assert all((optimizer.v[name] == 0).all() == (name in names) for name in weights)
    assert all(optimizer.m[name].any() for name in weights)


def test_every_number_outside_of_the_matrices_has_adamws_bits():
    ours, theirs = (initialise(CONFIG, 0) for _ in range(2))
    muon, adamw = Muon(ours), AdamW(theirs)
    for t in (1, 2):
        muon.update(ours, random_like(ours, t), LR, t)
        adamw.update(theirs, random_like(ours, t), LR, t)
    names = {each.name for each in matrices(ours)}
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]) == (name not in names), name


def test_the_plan_counts_what_is_multiplied(capsys):
    """flops: by counting the products of one orthogonalization, symmetric ones by half."""
    counted = 0

    def product(a, b, out, work):
        nonlocal counted
        counted += 2 * a.size * b.shape[2]
        out[...] = a @ b

    def gram(x, out, work):
        nonlocal counted
        counted += x.size * x.shape[1]
        out[...] = x @ x.swapaxes(1, 2)

    config, rng = replace(CONFIG, n_layers=1), np.random.default_rng(0)
    with mock.patch.multiple(module, product=product, gram=gram):
        for each in matrices(config):
            orthogonalize(rng.standard_normal((each.rows, each.columns)))
    assert counted == sum(map(module.flops, matrices(config)))
    assert main(["plan", "--preset", "small", "--optimizer", "muon"]) == 0
    said = capsys.readouterr().out
    assert "Muon adds 0.0015 TFLOP to a step, 12.0% of its products" in said
    assert main(["plan", "--preset", "small", "--optimizer", "lion"]) == 2
    assert "expected the optimizer adamw or muon, got 'lion'" in capsys.readouterr().err


# ---- The product and the steps


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (24, 24), (24, 40), (40, 24), (130, 60)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_many_steps_that_converge_give_the_polar_factor(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    given = x.copy()
    got = orthogonalize(x, steps=40, coefficients=(1.5, -0.5, 0.0))
    assert got.dtype == dtype and np.array_equal(x, given)
    # At its fixed point a step repairs what it rounds: two products of sums of R or N terms.
    assert np.abs(got - polar(x)).max() < 2 * sum(shape) * np.finfo(dtype).eps * 4


@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (130, 60), (128, 344)])
def test_five_steps_leave_singular_values_in_their_band(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    before = np.linalg.svd(x.astype(np.float64) / np.linalg.norm(x), compute_uv=False)
    after = np.linalg.svd(orthogonalize(x).astype(np.float64), compute_uv=False)
    a, b, c = module.COEFFICIENTS
    s = before
    for _ in range(module.STEPS):
        s = a * s + b * s**3 + c * s**5
    assert np.abs(np.sort(s)[::-1] - after).max() < 1e-3  # each value goes its own way
    assert after.max() < 1.21 and after[before > 0.01].min() > 0.67


def test_a_gradients_size_does_not_matter_and_zeros_stay_zeros():
    x = np.random.default_rng(2).standard_normal((24, 40)).astype(np.float32)
    assert np.abs(orthogonalize(x * np.float32(1e-20)) - orthogonalize(x)).max() < 1e-4
    assert np.array_equal(orthogonalize(x * np.float32(1024)), orthogonalize(x))
    assert not orthogonalize(0 * x).any()


def test_the_scale_and_the_rate_done_by_hand():
    assert Run.begin(CONFIG, Settings(optimizer="muon"), Ids(), "").settings.lr == 8e-3
    assert Run.begin(CONFIG, Settings(), Ids(), "").settings.lr == 4e-3
    assert matrix_scale(100, 25) == 1 and matrix_scale(25, 100) == 2
    assert np.isclose(matrix_rate(4e-3, 128), module.MUON_RATIO * 4e-3)
    # as `optim.rate_for` divides by the width, this is the rate of any
    assert np.isclose(matrix_rate(4e-3 / 6, 768), module.MUON_RATIO * 4e-3)
    assert np.isclose(matrix_rate(4e-3, 24), module.MUON_RATIO * 4e-3)


# ---- Memory, threads, ranks, runs


def test_an_update_asks_for_no_memory():
    """After the first: of the matrices, 128 KiB and more each, nothing is copied to new places."""
    weights = initialise(replace(CONFIG, dim=256, hidden=344), 0)
    optimizer, gradients = Muon(weights), random_like(weights, 1)
    optimizer.update(weights, gradients, LR, 1)
    rooms = optimizer.crew.free[0].values()
    places = [{room.y.ctypes.data, room.other.ctypes.data} for room in rooms]
    tracemalloc.start()
    try:
        for number in (2, 3):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            optimizer.update(weights, gradients, LR, number)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 16
    finally:
        tracemalloc.stop()
    assert places == [{room.y.ctypes.data, room.other.ctypes.data} for room in rooms]


@pytest.mark.parametrize("threads", [1, 2, 3, 50])
def test_threads_have_every_matrix_once(threads):
    these = matrices(replace(CONFIG, n_layers=5))
    with mock.patch.object(module, "PIECE", 24 * 40 * 4):  # so there are pieces of several sizes
        crew, done = module._Crew(these, threads, np.float32), []
    crew.run(lambda piece, room: done.extend(piece) or room.y[: len(piece)].shape)
    assert sorted(done) == sorted(these)
    for piece in crew.pieces:
        assert len({(each.rows, each.columns) for each in piece}) == 1
        assert all(len(rooms[piece[0].rows, piece[0].columns].y) >= len(piece)
                   for rooms in crew.free)  # fmt: skip
    work = [sum(map(module.flops, piece)) for piece in crew.pieces]
    assert len(crew.free) == threads and work == sorted(work, reverse=True)


def test_another_set_of_matrices_gets_another_crew():
    """A rank that has other matrices, or another number of threads, in the next update."""
    weights = initialise(CONFIG, 0)
    optimizer = Muon(weights)
    optimizer.update(weights, random_like(weights, 1), LR, 1)
    before, optimizer.threads = optimizer.crew, 2
    optimizer.update(weights, random_like(weights, 1), LR, 2)
    assert optimizer.crew is not before and len(optimizer.crew.free) == 2


def test_the_setting_of_momentum_reaches_the_optimizer():
    assert Run.begin(CONFIG, Settings(optimizer="muon"), Ids(), "").optimizer.momentum == 0.95
    chosen = Settings(optimizer="muon", momentum=0.9)
    assert Run.begin(CONFIG, chosen, Ids(), "").optimizer.momentum == 0.9
    assert not hasattr(Run.begin(CONFIG, Settings(momentum=0.9), Ids(), "").optimizer, "momentum")
    with pytest.raises(UserError, match="expected momentum to be below 1, got 1"):
        Settings(momentum=1)


def batch(config, seed=0, B=8):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(config.vocab_size, size=(B, config.context))
    return tokens, rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))


def stepped(engine, threads, config=CONFIG, steps=3):
    weights = initialise(config, 0)
    optimizer = Muon(weights)
    stepper = make_stepper(engine, weights, optimizer, threads=threads)
    for number in range(1, steps + 1):
        (taken,) = stepper.step(*batch(config, number), LR, number)
        assert taken.finite
    return weights.flat.tobytes() + optimizer.m.flat.tobytes() + optimizer.v.flat.tobytes()


@pytest.mark.parametrize("engine", ["cpu", "fused"])
def test_threads_change_no_bit(engine):
    assert len({stepped(engine, threads) for threads in (1, 2, 3, 7)}) == 1


def test_the_reference_engine_trains_with_it_too():
    one, other = (np.frombuffer(stepped(each, 1), np.float32) for each in ("reference", "cpu"))
    weights = initialise(CONFIG, 0).flat.size
    assert np.abs(one - other)[:weights].max() < 0.1 * np.abs(one[:weights]).max()


def over_ranks(ranks, steps=3, B=32):
    """What rank 0 has after steps over so many ranks, and what it held of m before it asked."""

    def go(group):
        weights = initialise(CONFIG, 0)
        optimizer = Muon(weights)
        inner = CpuStepper(engine_factory("cpu"), weights, optimizer, threads=1)
        stepper = RankStepper(group, inner)
        for number in range(1, steps + 1):
            stepper.step(*batch(CONFIG, number, 4 * B), LR, number)
        held = optimizer.m.flat.copy()
        stepper.pull()
        return [each.flat.tobytes() for each in (weights, optimizer.m, optimizer.v)], held

    return together(ranks, go)


def test_ranks_share_the_state_and_change_no_bit():
    (one, whole), = over_ranks(1)
    for ranks in 2, 4:
        said = over_ranks(ranks)
        assert said[0][0] == one and all(each[0][0] == one[0] for each in said)
        parts = np.stack([held for _, held in said])
        assert (np.count_nonzero(parts, axis=0) <= 1).all()  # each rank its own part of m
        assert np.array_equal(parts.sum(axis=0), whole)


def test_a_part_without_other_ranks_is_refused():
    weights = initialise(CONFIG, 0)
    with pytest.raises(UserError, match="choose the optimizer adamw"):
        Muon(weights).update(weights, random_like(weights, 1), LR, 1, slice(0, 64))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "river.txt"
    path.write_text("The river goes down to the sea, and the sea goes up to the river. " * 60)
    return path


def trained(text, out, steps=6, resume=False, **changes):
    config = replace(CONFIG, vocab_size=260)
    settings = Settings(steps=6, batch_size=2, optimizer="muon", **changes)
    with sketches.drawn():
        return ne.train(text, out=out, config=config, settings=settings, engine="cpu", threads=1,
                        save_every=2, resume=resume)  # fmt: skip


class Stopped(Exception):
    """In the place of a machine that dies."""


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(text, tmp_path, monkeypatch):
    trained(text, tmp_path / "whole")
    update = Muon.update

    def dies(self, weights, gradients, lr, number, part=slice(None)):
        if number == 4:
            raise Stopped
        update(self, weights, gradients, lr, number, part)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Muon, "update", dies)
        trained(text, tmp_path / "cut")
    trained(text, tmp_path / "cut", resume=True)
    for name in ("model", "optimizer"):
        whole, cut = (tmp_path / each / f"step-00000006/{name}.safetensors"
                      for each in ("whole", "cut"))  # fmt: skip
        assert whole.read_bytes() == cut.read_bytes()


def test_a_run_knows_its_optimizer_and_goes_on_with_no_other(text, tmp_path, capsys):
    out = tmp_path / "run"
    trained(text, out)
    assert read_record(out).settings.optimizer == "muon"
    command = ["train", "--data", str(text), "--out", str(out), "--resume", "--optimizer"]
    assert main([*command, "adamw"]) == 2
    said = capsys.readouterr().err
    assert "holds a run with optimizer muon, but adamw was asked for: resume it" in said
    assert main([*command, "muon"]) == 0


def test_runs_from_before_there_was_a_choice_have_the_same_identity():
    facts = {"model": {}, "data": "", "tokenizer": "", "training": {"steps": 1}}
    named = {**facts, "training": {"steps": 1, "optimizer": "adamw", "momentum": 0.95}}
    other = {**facts, "training": {"steps": 1, "optimizer": "muon"}}
    assert identity(facts) == identity(named) != identity(other)


@pytest.mark.parametrize("wrong", ["lion", "", 3, None, ["muon"]])
def test_an_unknown_optimizer_is_refused(wrong):
    with pytest.raises(UserError, match="training: expected the optimizer adamw or muon, got"):
        Settings(optimizer=wrong)


def test_adapters_and_gpus_say_that_they_have_no_muon():
    from nanoeuler.engines.gpu.step.stepper import CudaStepper

    weights = initialise(CONFIG, 0)
    with pytest.raises(UserError, match="expected the optimizer AdamW for training on a GPU"):
        CudaStepper(weights, Muon(weights), None)
    weights.optimizer = AdamW
    with pytest.raises(UserError, match="LoRA adapters are trained with AdamW: leave out"):
        Run.begin(CONFIG, Settings(optimizer="muon"), Ids(), "", weights)


class Ids:
    """In the place of a tokenizer."""

    vocab_size = 40


# ---- Planted mistakes: each must show in three steps, or in what a matrix is

MISTAKES = [
    Mutant("training.muon", name, what, old, new)
    for name, what, old, new in (
        ("_mix", "the buffer forgets at once", "m[i] = momentum * m[i] + rest * dw[i]",
         "m[i] = rest * dw[i]"),
        ("_mix", "no Nesterov", "dw[i] = momentum * m[i] + rest * dw[i]", "dw[i] = m[i]"),
        ("_mix", "Nesterov without the mean", "dw[i] = momentum * m[i] + rest * dw[i]",
         "dw[i] = rest * m[i] + momentum * dw[i]"),
        ("_move", "no decay", "o[i] + decay * w[i]", "o[i]"),
        ("_move", "decay at AdamW's rate", "decay * w[i]", "decay * w[i] / 2.5"),
        ("_move", "uphill", "w[i] -=", "w[i] +="),
        ("matrix_scale", "turned over", "outputs / inputs", "inputs / outputs"),
        ("matrix_scale", "no root", "math.sqrt(max(1.0, outputs / inputs))",
         "max(1.0, outputs / inputs)"),
        ("matrices", "queries, keys and values are one", "cuts.get(name.split(\".\")[-1], outputs)",
         "outputs"),
        ("matrices", "the output matrix, too", 'name.startswith("block.") and outputs',
         'outputs and name != "embedding"'),
        ("_normed", "not divided by the norm", "1 / np.sqrt(total) if total else 0.0", "1"),
        ("_normed", "divided by the square", "np.sqrt(total)", "total"),
        ("turn", "the product from the wrong side", "(t, y) if self.wide", "(t, y) if True"),
        ("turn", "always the square of the rows", "gram(y if self.wide", "gram(y if True"),
        ("_polynomial", "the third term is forgotten", "+ c * t[n, i, j]", ""),
        ("_polynomial", "the first is nowhere", "t[n, i, i] += a", "pass"),
        ("_mirror", "some of the upper half is missing", "s[m + j, k + i] = s[k + i, m + j]",
         "s[m + j, k + i] = 0"),
        ("_mirror", "not near the diagonal", "for j in range(k, i):", "for j in range(k, k):"),
        ("_turn", "all have the step of the first", "room.put(i, x)", "room.put(i, places[0])"),
        ("_turn", "none of another's length", "matrix_scale(*x.shape)", "1"),
        ("update", "the matrices have AdamW's step, too", "_between(spans.values(), first, end)",
         "[(first, end)]"),
        ("update", "AdamW's rate", "rate = matrix_rate(lr, weights.config.dim)", "rate = lr"),
    )
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_planted_mistakes_are_seen(mistake):
    (_, text), wrong = source(mistake), ModuleType("wrong")
    plain = "import njit\nnjit = lambda **_: lambda function: function\n"
    text = text.replace("import njit\n", plain)
    execute(text, mistake.what, wrong)  # not compiled: there are few numbers
    weights = initialise(CONFIG, 0)
    expected = plain_steps(weights)
    try:
        optimizer = wrong.Muon(weights, weight_decay=0.3)
        with np.errstate(all="ignore"):  # some grow without end
            for t in (1, 2, 3):
                optimizer.update(weights, random_like(weights, t), LR, t)
        off = max(np.abs(w - expected[name]).max() for name, w in weights.items())
    except ValueError:  # shapes that don't fit
        return
    assert not off < 4 * within(np.float32)
