"""Comparisons, the loss of preferences and its gradient, and the run that learns from them."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import sketches
from hypothesis import given
from hypothesis import strategies as st

from nanoeuler.checks.derivatives import complex_step
from nanoeuler.checks.gradcheck import TINY, TINY_GPT2, reference, tiny_problem
from nanoeuler.cli import main as cli
from nanoeuler.engines.registry import engine_factory
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.tokenizer.chat_template import END, conversation
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import dpo as preferring
from nanoeuler.training.checkpoint import load, load_model
from nanoeuler.training.dpo import (
    PREFERRING,
    QUICK,
    DpoEvaluator,
    DpoMetrics,
    PreferenceStepper,
    halves,
    prefer,
)
from nanoeuler.training.folder import checkpoints, read_metrics
from nanoeuler.training.optim import AdamW
from nanoeuler.training.preferences import (
    Comparisons,
    Preference,
    couples,
    dpo,
    likelihoods,
    margins,
    pulls,
    read_preferences,
    weighted_gradients,
)
from nanoeuler.training.run import Run, Settings

TOKENIZER = Tokenizer(np.zeros((0, 2)))  # bytes and the special tokens
SMALL = ModelConfig(vocab_size=TOKENIZER.vocab_size, dim=16, n_layers=1, n_heads=2, n_kv_heads=1,
                    hidden=24, context=64, n_predict=2)  # fmt: skip
PAIRS = [(f"What is {i}?", f"The number {i}, {'x' * (i % 7)}.") for i in range(60)]
SETTINGS = Settings(steps=6, batch_size=5, lr=1e-3, weight_decay=0.0)


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with sketches.drawn():
        yield


def model(seed=0):
    return SMALL, TOKENIZER, initialise(SMALL, seed)


# --- comparisons


@given(st.lists(st.tuples(st.text(), st.text()), max_size=30), st.randoms())
def test_a_judge_that_does_not_read_the_questions_is_right_in_one_half(pairs, random):
    answers = sorted({answer for _, answer in pairs})
    random.shuffle(answers)
    opinion = {answer: rank for rank, answer in enumerate(answers)}
    compared = couples(pairs)
    right = [opinion[each.chosen] > opinion[each.rejected] for each in compared]
    assert 2 * sum(right) == len(compared)
    assert all(each.chosen != each.rejected for each in compared)


def test_couples_are_of_nearly_equal_length_and_leave_out_one_at_most():
    compared = couples(PAIRS[:51])
    assert len(compared) == 50
    lengths = [abs(len(each.chosen) - len(each.rejected)) for each in compared]
    assert max(lengths) <= 1
    assert {each.question for each in compared} < {question for question, _ in PAIRS}
    assert all((each.question, each.chosen) in PAIRS for each in compared)


def test_halves_hold_out_the_pairs_that_fine_tuning_holds_out():
    learned, held_out = halves(PAIRS)
    assert {each.question for each in learned} == {question for question, _ in PAIRS[:54]}
    assert {each.question for each in held_out} == {question for question, _ in PAIRS[54:]}
    answers = {each.chosen for each in learned}
    assert not answers & {each.rejected for each in held_out}


def test_the_rows_of_a_comparison_count_its_answers_and_their_ends():
    compared = Comparisons(TOKENIZER, couples(PAIRS), 4, 64, 2)
    tokens, targets = compared.rows([3, 8])
    assert tokens.shape == targets.shape[:2] and targets.shape[2] == 2 and len(tokens) == 4
    assert (targets[:, :, 1] == IGNORE).all()
    expected = [text for i in (3, 8) for text in compared.kept[i][1:]]
    for row, answer in zip(targets[:, :, 0], expected, strict=True):
        ids = row[row != IGNORE]
        assert ids[-1] == TOKENIZER.special[END]
        assert TOKENIZER.decode_text(ids[:-1].tolist()) == answer
    for row, i, side in ((0, 3, 1), (1, 3, 2), (2, 8, 1), (3, 8, 2)):
        ids, _ = conversation(TOKENIZER, compared.kept[i][0], compared.kept[i][side])
        assert (tokens[row, : len(ids) - 1] == ids[:-1]).all()


def test_what_is_too_long_is_left_out_and_counted():
    fits = Preference("a", "b" * 61, "c")  # with three marks: one more than the context
    compared = Comparisons(TOKENIZER, [fits, Preference("a", "b" * 62, "c")], 4, 64, 2)
    assert compared.kept == [fits] and compared.left_out == 1
    assert compared.rows([0])[0].shape == (2, 64)
    with pytest.raises(UserError, match="at most 9 tokens, got none"):
        Comparisons(TOKENIZER, [fits], 4, 8, 2)


def test_of_a_couple_both_fit_or_neither_is_kept():
    fits, long = Preference("a", "b", "c"), Preference("a" * 70, "c", "b")
    alone = Preference("a", "x", "y")
    for offered, kept in (
        ([fits, long], []), ([long, fits], []), ([fits, long, alone], [alone]),
        ([fits, fits._replace(chosen="c", rejected="b"), alone], "all"),
        ([alone, long, fits], [alone, fits]),  # no couple: they do not begin at an even place
        ([fits, long._replace(rejected="z")], [fits]),
    ):  # fmt: skip
        made = [*offered, *couples(PAIRS[:2])]
        compared = Comparisons(TOKENIZER, made, 1, 64, 2)
        assert compared.kept == (offered if kept == "all" else kept) + made[len(offered) :]
        assert len(compared.texts) == len(compared.kept) == len(made) - compared.left_out


def test_a_pass_sees_each_comparison_once_and_batches_are_functions_of_seed_and_step():
    compared = Comparisons(TOKENIZER, couples(PAIRS), 5, 64, 2, seed=3)
    again = Comparisons(TOKENIZER, couples(PAIRS), 5, 64, 2, seed=3)
    seen = set()
    for step in range(1, 13):
        tokens = compared.batch(step)[0]
        assert (tokens == again.batch(step)[0]).all()
        seen |= {TOKENIZER.decode_text(row.tolist()).split("?")[0] for row in tokens[0::2]}
    assert len(seen) == compared.windows == 60


GOOD = {"question": "a", "chosen": "b", "rejected": "c"}


def test_comparisons_come_from_a_file(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "more": 1}) + "\n")
    assert read_preferences(path) == [Preference("a", "b", "c")] * 2


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"question": "a"}', json.dumps({**GOOD, "chosen": 3}),
             json.dumps({**GOOD, "rejected": "b"}), '{"question": "\\ud800"}', "[" * 5000],
    ids="empty brace list short number equal surrogate deep".split(),
)  # fmt: skip
def test_wrong_lines_are_named_and_counted(tmp_path, line):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), line, json.dumps(GOOD), "no", ""]))
    with pytest.raises(UserError, match=r"^line 2 of .*\(2 of 4 lines are wrong\)$"):
        read_preferences(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(UserError, match="which is empty: expected"):
        read_preferences(tmp_path / "none.jsonl")


# --- the loss and its gradient


def batch(config, seed=1):
    """tokens, targets of two comparisons, and what a reference may have said."""
    rng, shape = np.random.default_rng(seed), (4, config.context)
    tokens = rng.integers(config.vocab_size, size=shape)
    targets = np.full((*shape, config.n_predict), IGNORE)
    for row, first in enumerate((2, 1, 3, 2)):
        targets[row, first:-1, 0] = rng.integers(config.vocab_size, size=shape[1] - first - 1)
    return tokens, targets, rng.standard_normal(4)


@pytest.mark.parametrize("config", [TINY, TINY_GPT2], ids=["euler", "gpt2"])
def test_likelihoods_are_sums_of_the_models_own(config):
    w, (tokens, targets, _) = tiny_problem(config).w, batch(config)
    logits = forward(reference, config, w, tokens)[0][:, :, 0]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [sum(log_p[b, t, targets[b, t, 0]] for t in range(tokens.shape[1])
                    if targets[b, t, 0] != IGNORE) for b in range(4)]  # fmt: skip
    found = likelihoods(reference, config, w, tokens, targets)
    assert np.allclose(found, expected, rtol=1e-12)
    longer = np.pad(tokens[:, :-1], ((0, 0), (0, 1)), constant_values=1)  # another filling
    assert np.allclose(likelihoods(reference, config, w, longer, targets), expected, rtol=1e-12)


def gradient(config, w, weigh, engine=reference, seed=1):
    tokens, targets, _ = batch(config, seed)
    dw = w.zeros_like()
    weighted_gradients(engine, config, w, tokens, targets, weigh, dw)
    return dw


def exact(config, w, beta, anchor):
    """The gradient of the loss by the complex step."""
    tokens, targets, before = batch(config)
    trial, found = Weights(config, np.complex128), w.zeros_like()
    trial.flat[...] = w.flat
    for name, tensor in trial.items():
        def loss(value, tensor=tensor):
            tensor[...] = value
            log_p = likelihoods(reference, config, trial, tokens, targets)
            return dpo(margins(log_p, before), beta)[0].mean() - anchor * log_p[0::2].mean()

        found[name][...] = complex_step(loss, w[name])
        tensor[...] = w[name]
    return found


# Of another architecture only the engine's own gradient is another: tests/test_backward.py has it.
@pytest.mark.parametrize(
    "config",
    [pytest.param(TINY, id="euler"), pytest.param(TINY_GPT2, id="gpt2", marks=pytest.mark.long)],
)
def test_every_derivative_is_that_of_the_complex_step(config):
    w, before = tiny_problem(config).w, batch(config)[2]
    expected = exact(config, w, 0.7, 0.2).flat
    found = gradient(config, w, lambda log_p: pulls(log_p, before, 0.7, 0.2, 2)).flat
    assert np.abs(found - expected).max() < 1e-13 * np.abs(expected).max()
    wrong = {
        "sign": lambda log_p: -pulls(log_p, before, 0.7, 0.2, 2),
        "no reference": lambda log_p: pulls(log_p, 0 * before, 0.7, 0.2, 2),
        "beta forgotten": lambda log_p: pulls(log_p, before, 0.7, 0.2, 2) / 0.7,
        "no anchor": lambda log_p: pulls(log_p, before, 0.7, 0.0, 2),
        "both up": lambda log_p: np.abs(pulls(log_p, before, 0.7, 0.2, 2)),
        "rows mixed up": lambda log_p: pulls(log_p, before, 0.7, 0.2, 2)[[0, 2, 1, 3]],
    }
    for name, weigh in wrong.items():
        off = np.abs(gradient(config, w, weigh).flat - expected).max()
        assert off > 1e-3 * np.abs(expected).max(), name


@pytest.mark.parametrize("name", ["cpu", "fused"])
def test_the_engines_agree_in_float32(name):
    """To 2e-5 of the largest: rounding of sums of some dozens of numbers, as in test_cpu."""
    w, before = tiny_problem(TINY).w, batch(TINY)[2]
    single = Weights(TINY, np.float32)
    single.flat[...] = w.flat

    def weigh(log_p):
        return pulls(log_p, before, 0.7, 0.2, 2)

    expected = gradient(TINY, w, weigh).flat
    found = gradient(TINY, single, weigh, engine_factory(name)()).flat
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_the_loss_by_hand_and_far_out():
    loss, weight = dpo(np.array([10.0, 0.0, -1e6, 1e6]), 0.1)
    assert np.allclose(loss, [np.log1p(np.exp(-1)), np.log(2), 1e5, 0])
    assert np.allclose(weight, [0.1 * 0.268941, 0.05, 0.1, 0], atol=1e-7)
    assert (margins(np.array([-48.0, -53.0]), np.array([-50.0, -45.0])) == [10.0]).all()
    assert np.allclose(pulls(np.zeros(4), np.zeros(4), 0.1, 0.3, 2), [0.175, -0.025] * 2)


def test_accuracy_is_one_half_where_nothing_has_moved():
    log_p = np.array([-3.0, -5.0, -9.0, -8.0])
    numbers = DpoMetrics(log_p, log_p, 0.1).numbers()
    assert numbers["accuracy"] == 0.5 and numbers["prefers"] == 0.5
    assert numbers["loss"] == pytest.approx(np.log(2))
    moved = DpoMetrics(log_p + [1, 0, -2, -3], log_p, 0.1).numbers()
    assert moved["accuracy"] == 1 and moved["chosen"] == -0.5 and moved["rejected"] == -1.5


# --- the run


def stepper(threads, seed=0):
    weights = initialise(SMALL, seed)
    return PreferenceStepper(engine_factory("cpu"), weights, initialise(SMALL, seed),
                             AdamW(weights, weight_decay=0.0), 0.1, 0.05, threads)  # fmt: skip


def test_threads_change_no_bit(monkeypatch):
    monkeypatch.setattr(preferring, "cores", lambda: 4)
    compared = Comparisons(TOKENIZER, couples(PAIRS), 7, 64, 2)
    flats = []
    for threads in (1, 2, 3):
        each = stepper(threads)
        for number in (1, 2):
            judged, norm = each.step(*compared.batch(number), 1e-3, number)
        assert np.isfinite(norm) and len(judged.log_p) == 14
        flats.append(each.weights.flat.copy())
    assert (flats[0] == flats[1]).all() and (flats[0] == flats[2]).all()
    assert (each.reference.flat == initialise(SMALL, 0).flat).all()


@pytest.mark.parametrize(
    ("threads", "comparisons", "engines"),
    # A slice has two comparisons: of seven there are four, of three two, of one one.
    [(1000, 7, 4), (1000, 3, 2), (1000, 1, 1), (3, 7, 3), (None, 7, 4), (2**32, 20, 5)],
)
def test_no_more_engines_than_slices_or_cores(threads, comparisons, engines, monkeypatch):
    """A thread has an engine and a gradient: nothing is made for one that finds nothing to do."""
    monkeypatch.setattr(preferring, "cores", lambda: 5)
    each = stepper(threads)
    each.step(*Comparisons(TOKENIZER, couples(PAIRS), comparisons, 64, 2).batch(1), 1e-3, 1)
    assert len(each.engines) == len(each.parts) == engines


def test_a_judge_with_more_texts_than_a_batch_has_more_engines(monkeypatch):
    monkeypatch.setattr(preferring, "cores", lambda: 5)
    each = stepper(None)
    few, many = (Comparisons(TOKENIZER, couples(PAIRS), n, 64, 2).batch(1) for n in (2, 20))
    each.step(*few, 1e-3, 1)
    each.likelihoods(each.reference, *many)
    assert (len(each.engines), len(each.parts)) == (5, 1)


def test_a_step_is_the_mean_over_its_comparisons():
    """Seven comparisons in parts, against all in one pass."""
    compared, each = Comparisons(TOKENIZER, couples(PAIRS), 7, 64, 2), stepper(2)
    each.weights.flat[...] = initialise(SMALL, 5).flat  # so that margins are not 0
    each.optimizer.clip_norm = np.inf
    tokens, targets = compared.batch(1)
    dw, engine, w = each.weights.zeros_like(), engine_factory("cpu")(), initialise(SMALL, 5)
    before = likelihoods(engine, SMALL, each.reference, tokens, targets)
    weighted_gradients(engine, SMALL, w, tokens, targets,
                       lambda log_p: pulls(log_p, before, 0.1, 0.05, 7), dw)  # fmt: skip
    judged, norm = each.step(tokens, targets, 0.0, 1)
    assert np.allclose(each.gradients.flat, dw.flat, atol=1e-5 * np.abs(dw.flat).max())
    assert norm == pytest.approx(np.linalg.norm(dw.flat), rel=1e-4)
    assert np.allclose(judged.reference, before, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing():
    compared, each = Comparisons(TOKENIZER, couples(PAIRS), 4, 64, 2), stepper(1)
    each.weights["norm"][0] = np.nan
    before = each.weights.flat.copy()
    _, norm = each.step(*compared.batch(1), 1e-3, 1)
    assert not np.isfinite(norm)
    assert np.array_equal(before, each.weights.flat, equal_nan=True)


def test_part_of_the_comparisons_is_judged_in_whole_couples():
    pairs = [(f"What is {i}?", f"The number {i}.") for i in range(2 * QUICK)]
    each = DpoEvaluator(stepper(1), Comparisons(TOKENIZER, couples(pairs), 4, 64, 2))
    some = each.chosen(quick=True)
    assert len(some) == QUICK
    assert (some[0::2] % 2 == 0).all() and (some[1::2] == some[0::2] + 1).all()
    assert len(each.chosen(quick=False)) == 2 * QUICK


def run(out, **how):
    how = {"settings": SETTINGS, "threads": 1, "save_every": 2, **how}
    return prefer(how.pop("base", model()), halves(PAIRS), out, **how)


def test_a_run_learns_and_leaves_its_lines_and_its_save(tmp_path):
    lines, base = [], model()
    before = base[2].flat.copy()
    done = run(tmp_path / "run", base=base, on_step=lines.append, anchor=0.1,
               settings=replace(SETTINGS, steps=30, lr=1e-2))  # fmt: skip
    assert (base[2].flat == before).all()
    assert [line["step"] for line in lines] == list(range(31))
    assert lines[0]["held_out_accuracy"] == 0.5
    assert lines[-1]["loss"] < lines[1]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert lines[-1]["held_out_bits_per_byte"] < lines[0]["held_out_bits_per_byte"]  # the anchor's
    assert read_metrics(tmp_path / "run") == lines[1:]
    assert (load_model(tmp_path / "run")[2].flat == done.weights.flat).all()
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [28, 30]


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, capsys):
    whole = run(tmp_path / "whole")

    def interrupt(line):
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    run(tmp_path / "cut", on_step=interrupt)
    assert checkpoints(tmp_path / "cut")[-1][0] in (3, 4)  # heard after this step or the next
    assert "SIGINT: step" in capsys.readouterr().err
    done = run(tmp_path / "cut", resume=True)
    assert done.step == 6 and (done.weights.flat == whole.weights.flat).all()
    assert (load(tmp_path / "cut").optimizer.v.flat == whole.optimizer.v.flat).all()
    assert len(read_metrics(tmp_path / "cut")) == 6


@pytest.mark.parametrize("how", [{"base": model(seed=9)}, {"beta": 0.2}, {"anchor": 0.5}],
                         ids=["reference", "beta", "anchor"])  # fmt: skip
def test_a_run_goes_on_with_what_it_began_with(tmp_path, how):
    run(tmp_path / "run")
    with pytest.raises(UserError, match="holds a run with data"):
        run(tmp_path / "run", resume=True, **how)


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_save(tmp_path, monkeypatch):
    taken = PreferenceStepper.step

    def bad(self, tokens, targets, lr, number):
        if number == 4:
            self.weights["norm"][0] = np.nan
        return taken(self, tokens, targets, lr, number)

    monkeypatch.setattr(PreferenceStepper, "step", bad)
    with pytest.raises(UserError, match="step 4: expected a finite loss"):
        run(tmp_path / "run")
    assert load(tmp_path / "run").step == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [({"beta": 0}, "beta to be a number above 0, got 0"), ({"beta": "x"}, "beta"),
     ({"beta": float("nan")}, "beta"), ({"beta": 10**400}, "beta"),
     ({"anchor": -1.0}, "anchor to be a number of at least 0"),
     ({"anchor": True}, "anchor"), ({"threads": 0}, "threads"), ({"save_every": 0}, "save_every"),
     ({"engine": "cuda"}, "one of the engines cpu"), ({"base": "nowhere"}, "no config.json")],
    ids=range(10),
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, how, said):
    with pytest.raises(UserError, match=said):
        run(tmp_path / "run", **how)
    assert not (tmp_path / "run").exists()


def test_settings_left_open_are_those_of_preferring(tmp_path):
    done = run(tmp_path / "run", settings=Settings(steps=1, batch_size=2))
    assert done.settings.lr == 3e-4 and PREFERRING.weight_decay == 0
    assert isinstance(done, Run)


# --- the command


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder to stand in, with a model in base and some comparisons."""
    monkeypatch.chdir(tmp_path)
    prefer(model(), halves(PAIRS), "base", settings=replace(SETTINGS, steps=1), threads=1)
    lines = [json.dumps(each._asdict()) for each in couples(PAIRS)]
    (tmp_path / "good.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "one.jsonl").write_text(lines[0] + "\n")
    (tmp_path / "bad.jsonl").write_text("\n".join([lines[0], "{}", *lines[1:]]) + "\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_the_command_learns_from_a_file_and_goes_on(base, capsys):
    line = "prefer --from base --data good.jsonl --out new --batch-size 4 --threads 1 --steps 3"
    assert cli.main(line.split()) == 0
    out, err = capsys.readouterr()
    assert out == "saved in new; next: nanoeuler chat --from new\n"
    assert "step 0/3  held out: loss 0.693  accuracy 50.0%" in err
    assert cli.main([*line.split(), "--resume"]) == 0
    assert load("new").step == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--data bad.jsonl", 'line 2 of bad.jsonl: expected {"question": TEXT, "chosen": TEXT'),
     ("--data one.jsonl", "expected at least 2 comparisons in one.jsonl, got 1"),
     ("--data nowhere", "there is no nowhere"), ("--data folder", "no file folder/pairs.jsonl"),
     ("--data good.jsonl --beta 0", "beta"), ("--data good.jsonl --anchor nan", "anchor"),
     ("--data good.jsonl --engine cuda", "engine"), ("--data good.jsonl --lr 0", "lr"),
     ("--data good.jsonl --from folder", "no config.json"),
     ("--data good.jsonl --batch-size 1000000000", "batch_size")],
    ids=range(10),
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(base, capsys, flags, said):
    first = "" if "--from" in flags else "--from base "
    assert cli.main(f"prefer {first}{flags} --out new".split()) in (1, 2)
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1, err
    assert not (base / "new").exists()
