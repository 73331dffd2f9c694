"""The package as a program of one's own uses it: import nanoeuler as ne."""

import dataclasses
import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import recorded

import nanoeuler as ne
from nanoeuler import api, emulator
from nanoeuler.cli import flags
from nanoeuler.cli import main as cli
from nanoeuler.engines import registry
from nanoeuler.engines.gpu.step import stepper
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.registry import make_stepper
from nanoeuler.inference import evaluate, model
from nanoeuler.model.config import CHOICES, PRESET, SCALES
from nanoeuler.model.sizes import usual_vocabulary
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.training import sft
from nanoeuler.training.checkpoint import read_record
from nanoeuler.training.folder import read_metrics
from nanoeuler.training.optim import AdamW
from nanoeuler.training.train import RECIPES, of_a_new_run, recipe

ROOT = Path(__file__).resolve().parents[1]
STORY = ROOT / "data" / "river.txt"
TINY = api.resized(ne.PRESETS["small"], dim=48, n_layers=2, context=64, vocab_size=300)
PAIRS = [(f"What is {i}?", f"The number {i}.") for i in range(30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a trained run, base."""
    folder = tmp_path_factory.mktemp("face")
    settings = ne.Settings(steps=60, batch_size=4, lr=0.01)
    ne.train(STORY, out=folder / "base", config=TINY, settings=settings)
    return folder


@pytest.fixture
def base(folder):
    return ne.load(folder / "base")


@pytest.mark.parametrize("module", [api, model], ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings_run(module, folder, base, tmp_path, capfd, monkeypatch):
    os.symlink(folder / "base", tmp_path / "base")
    short = ne.Settings(steps=3, batch_size=4)  # the examples ask for no sizes of a model
    monkeypatch.setitem(ne.PRESETS, PRESET, TINY)
    names = {"model": base, "folder": tmp_path, "story": STORY, "settings": short, "ne": ne}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    done = doctest.testmod(module, extraglobs=names, optionflags=flags)
    assert done.failed == 0, capfd.readouterr().out
    public = [each for each in vars(module).values() if getattr(each, "__doc__", None)
              and getattr(each, "__module__", "") == module.__name__
              and not each.__name__.startswith("_")]  # fmt: skip
    assert done.attempted > len(public)


def test_the_names_are_those_of_the_face():
    assert {*ne.HOMES} < {*dir(ne)}
    for name in ne.HOMES:
        assert getattr(ne, name) is not None
    with pytest.raises(AttributeError, match="module 'nanoeuler' has no attribute 'trian'"):
        ne.trian  # noqa: B018


def child(code, cwd, **environment):
    """Run Python with the package of this checkout, in another folder: what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


NOT_INSTALLED = """
from importlib import metadata
find = metadata.Distribution.from_name
def from_name(name):
    if name == "nanoeuler":
        raise metadata.PackageNotFoundError(name)
    return find(name)
metadata.Distribution.from_name = from_name
"""


def test_a_clone_that_is_not_installed_is_enough(tmp_path):
    code = f"""{NOT_INSTALLED}
import nanoeuler as ne
from nanoeuler.cli.main import main
settings, config = ne.Settings(steps=1, batch_size=2), ne.PRESETS["small"]
model = ne.train({str(STORY)!r}, out="run", settings=settings)
print(len(ne.load("run").generate("The river", tokens=5)) > 0)
assert main(["doctor"]) == main(["data", "list"]) == 0
"""
    assert child(code, tmp_path).startswith("True\n")
    assert os.listdir(tmp_path) == ["run"]


def test_a_model_survives_its_way_through_the_disk(folder, base):
    again = ne.load(str(folder / "base"))
    assert again.config == base.config and again.tokenizer.hash == base.tokenizer.hash
    assert (again.weights.flat == base.weights.flat).all()


def test_a_run_is_resumed_with_its_own_text_and_settings(tmp_path):
    settings = ne.Settings(steps=4, batch_size=2, weight_decay=0.5, warmup=1)
    out = tmp_path / "run"
    once = ne.train(STORY, out=out, config=TINY, settings=settings, save_every=2)
    newest = sorted(out.glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # as if it had been cut short
    again = ne.train(out=out, resume=True)
    assert (again.weights.flat == once.weights.flat).all()
    with pytest.raises(ne.UserError, match="weight_decay 0.5, but 0.1 was asked for"):
        ne.train(out=out, resume=True, settings=dataclasses.replace(settings, weight_decay=0.1))


def test_a_signal_ends_the_program_and_not_only_the_training(tmp_path):
    code = f"""
import os, signal, threading
import nanoeuler as ne
from nanoeuler.api import resized

def soon(run, seconds):
    if seconds is None:
        return
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

config = resized(ne.PRESETS["small"], dim=16, n_layers=1, context=16)
settings = ne.Settings(steps=1_000_000, batch_size=1)
try:
    ne.train({str(STORY)!r}, out="run", config=config, settings=settings, on_estimate=soon)
except KeyboardInterrupt:
    print("not trained to the end", ne.load("run").config.dim)
"""
    assert child(code, tmp_path) == "not trained to the end 16\n"


def test_finetuning_leaves_the_model_as_it_was(base, tmp_path):
    before = base.weights.flat.copy()
    settings = ne.Settings(steps=3, batch_size=2, lr=0.01)
    tuned = ne.finetune(base, PAIRS, out=tmp_path / "chat", settings=settings)
    assert (base.weights.flat == before).all()
    assert (tuned.weights.flat != before).any()
    assert "".join(tuned.chat(seed=1).reply("What is 3?")) is not None
    again = ne.finetune(base, PAIRS, out=tmp_path / "chat", resume=True)
    assert (again.weights.flat == tuned.weights.flat).all()


def test_knobs_are_those_of_generate(base):
    cold = base.generate("The river", tokens=10, temperature=0)
    assert cold == base.generate("The river", tokens=10, top_k=1) != base.generate("The", 10)
    assert base.generate(b"The river", tokens=10, temperature=0) == cold
    with pytest.raises(ne.UserError, match="at least one token"):
        base.generate("")


def test_logits_are_of_each_token_given_those_before(base):
    scores = base.logits("The river begins")
    ids = base.tokenizer.encode("The river begins")
    assert scores.shape == (len(ids), TINY.vocab_size) and scores.dtype == np.float32
    prefix = base.logits(base.tokenizer.decode(ids[:3]))
    # Float32 sums of 48 terms, in another order where the products are of other sizes.
    np.testing.assert_allclose(scores[:3], prefix, rtol=0, atol=1e-4)
    for text in ("", "word " * 100):
        with pytest.raises(ne.UserError, match="expected a text of 1 to 64 tokens, got "):
            base.logits(text)


# What is of the wrong kind ------------------------------------------------------------------------


TINY_RUN = ne.Settings(steps=4, batch_size=2)


def training(tmp_path, **changes):
    """Train a tiny model, but for `changes`."""
    how = {"data": STORY, "out": tmp_path / "run", "config": TINY, "settings": TINY_RUN} | changes
    return ne.train(how.pop("data"), **how)


@pytest.mark.parametrize("name, values", {
    "data": (5, "", b"x", ["a"], "\ud800", "a\0b"), "out": (None, 5, "", b"x", ("a",), "\ud800"),
    "config": ({}, "small", 5, [], TINY_RUN), "settings": ({}, "fast", 5, TINY),
    "tokenizer": ({}, "gpt2", 5, ""), "resume": ("no", 1, None), "sample": (5, "x", {}),
    "on_estimate": (5, "x"),
    "threads": ("a", 0, -1, 1.5, True), "save_every": (True, "a", 0), "keep": (None, 0, "a"),
}.items(), ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_an_argument_of_the_wrong_kind_is_told_by_its_name(tmp_path, base, name, values):
    for value in values:
        said = f"^expected {name} to be a [^\n]*, got [^\n]+$"
        with pytest.raises(ne.UserError, match=said):
            training(tmp_path, **{name: value})
        assert not (tmp_path / "run").exists()
        if name not in ("data", "config", "tokenizer"):
            how = {"out": tmp_path / "run", "settings": TINY_RUN, name: value}
            with pytest.raises(ne.UserError, match=said):
                ne.finetune(base, PAIRS, **how)
            assert not (tmp_path / "run").exists()


def test_a_model_of_the_wrong_kind_is_told(tmp_path):
    for value in (None, 5, {}, b"x", "", ["a"]):
        with pytest.raises(ne.UserError, match="^expected run to be a path, .* got "):
            ne.load(value)
        with pytest.raises(ne.UserError, match="^expected model, if it is no Model, to be a path"):
            ne.finetune(value, PAIRS, out=tmp_path / "chat")


def test_a_sample_that_is_no_text_is_told(tmp_path):
    for name, text in enumerate((None, 5, b"x")):
        out = tmp_path / str(name)
        with pytest.raises(ne.UserError, match="expected sample to return a str, got "):
            training(tmp_path, out=out, sample=lambda model, text=text: text)
        training(tmp_path, out=out, sample=lambda model: "x")  # nothing was saved: begun anew
        assert read_metrics(out)[-1]["step"] == TINY_RUN.steps


def test_pairs_from_a_generator_are_learned(base, tmp_path):
    ends = [ne.finetune(base, pairs, out=tmp_path / name, settings=TINY_RUN).weights.flat
            for name, pairs in (("list", PAIRS), ("generator", (pair for pair in PAIRS)))]
    assert (ends[0] == ends[1]).all()


def test_numbers_and_texts_of_the_wrong_kind_are_told(base):
    for call in (base.generate, base.stream):  # which says it before a piece is asked for
        for tokens in (-1, "5", 1.5, None):
            with pytest.raises(ne.UserError, match="number of new tokens to be a whole number"):
                call("The", tokens)
        for knob, value in (("temperature", float("nan")), ("seed", -1), ("seed", "a"),
                            ("top_k", 0.5), ("top_p", None)):  # fmt: skip
            with pytest.raises(ne.UserError, match=f"expected {knob} to be a "):
                call("The", 5, **{knob: value})
    for text in (None, 5, ["a"], Path("a")):
        for call in (base.generate, base.stream, base.logits, base.tokenizer.encode):
            with pytest.raises(ne.UserError, match="expected text as str or bytes, got "):
                call(text)


def test_the_name_of_a_file_is_not_judged_in_its_place(base):
    with pytest.raises(ne.UserError, match="names a file: give Path"):
        base.evaluate(str(STORY))
    with pytest.raises(ne.UserError, match="names a file: give Path"):
        base.bits_per_byte(str(STORY))


def test_the_parts_of_a_model_belong_together(base):
    config, tokenizer, weights = base.config, base.tokenizer, base.weights
    for field, value in (("context", 32), ("n_layers", 1), ("norm", "layer")):
        other = dataclasses.replace(config, **{field: value})
        with pytest.raises(ne.UserError, match=f"expected weights of a model with {field} {value}"):
            ne.Model(other, tokenizer, weights)
    for parts, said in ((({}, tokenizer, weights), "config to be a ModelConfig, got {}"),
                        ((config, None, weights), "tokenizer to be a Tokenizer, got None"),
                        ((config, tokenizer, weights.flat), "weights to be Weights, got")):
        with pytest.raises(ne.UserError, match=f"expected {said}"):
            ne.Model(*parts)


def test_fine_tuning_has_its_own_learning_rate_unless_told(base, tmp_path):
    ne.finetune(base, PAIRS, out=tmp_path / "own", settings=TINY_RUN)
    assert read_record(tmp_path / "own").settings.lr == sft.LEARNING_RATE
    training(tmp_path)
    assert read_record(tmp_path / "run").settings.lr == 4 * sft.LEARNING_RATE


def test_a_resumed_fine_tuning_needs_no_model_and_takes_no_other(base, tmp_path):
    out = tmp_path / "chat"
    tuned = ne.finetune(base, PAIRS, out=out, settings=TINY_RUN)
    again = ne.finetune(None, PAIRS, out=out, resume=True)
    assert (again.weights.flat == tuned.weights.flat).all()
    config = dataclasses.replace(base.config, hidden=40)
    other = ne.Model(config, base.tokenizer, Weights(config))
    with pytest.raises(ne.UserError, match=f"with hidden {TINY.hidden}, but 40 was asked for"):
        ne.finetune(other, PAIRS, out=out, resume=True)
    with pytest.raises(ne.UserError, match="no config.json"):
        ne.finetune(tmp_path / "nowhere", PAIRS, out=out, resume=True)
    with pytest.raises(ne.UserError, match="expected a run in .*new, but there is none"):
        ne.finetune(None, PAIRS, out=tmp_path / "new", resume=True)


def test_what_is_too_large_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("nanoeuler.planning.memory.limit", lambda: 200e6)
    deep = api.resized(ne.PRESETS["small"], n_layers=10_000)
    with pytest.raises(ne.UserError, match="a model of [0-9,]+ parameters in 10,000 layers"):
        training(tmp_path, config=deep)
    monkeypatch.setattr("nanoeuler.planning.memory.limit", lambda: 20e6)
    with pytest.raises(ne.UserError, match="a step of 9999 x 64 tokens needs .* smaller batch"):
        training(tmp_path, settings=ne.Settings(steps=1, batch_size=9999))


# Judging ------------------------------------------------------------------------------------------


def alphabet(score):
    """A model that knows that a, b, c follow one another, and is as sure of it as `score` says."""
    letters = ne.Tokenizer.train(b"", 260)
    config = ne.ModelConfig(vocab_size=260, dim=4, n_layers=1, n_heads=1, n_kv_heads=1, hidden=1,
                            context=8, n_predict=1)  # fmt: skip
    model = ne.Model(config, letters, Weights(config))
    model.weights["norm"][...] = 1
    for i, (letter, after) in enumerate(zip(b"abc", b"bca", strict=True)):
        model.weights["embedding"][letters.encode(bytes([letter]))[0], i] = 1
        model.weights["output"][i, letters.encode(bytes([after]))[0]] = score
    return model


def test_a_model_that_knows_nothing_is_in_doubt_among_all():
    judged = alphabet(0).evaluate("abcabcabc, and more")
    assert judged.tokens == judged.bytes == 18  # the first is not judged
    assert judged.perplexity == pytest.approx(260, rel=1e-12)
    assert judged.bits_per_byte == pytest.approx(np.log2(260), rel=1e-12)


def test_a_model_that_knows_is_judged_by_how_sure_it_is():
    # RMSNorm makes a one among four channels 2, but for its epsilon, so scores are 2 `score`.
    # log p = -log(1 + 259 exp(-2 score)), of every judged letter of the alphabet.
    for score in (0.5, 1, 3):
        nats = np.log(1 + 259 * np.exp(-2 * score))
        judged = alphabet(score).evaluate("abc" * 9)
        assert judged.perplexity == pytest.approx(np.exp(nats), rel=1e-4)
        assert judged.bits_per_byte == pytest.approx(nats / np.log(2), rel=1e-4)


def test_special_tokens_spell_nothing_and_are_not_judged(monkeypatch):
    model = alphabet(3)
    ids = model.tokenizer.encode("abc").tolist()
    end = model.tokenizer.special["<|endoftext|>"]
    held_out = evaluate.HeldOut.from_tokens(np.array([*ids, end, *ids]), model.tokenizer, 2, 8, 1)
    judged = evaluate.evaluate(model.weights, held_out)
    assert (judged.tokens, judged.bytes) == (5, 5)


def test_windows_at_a_time_do_not_change_the_numbers(base, monkeypatch):
    text = STORY.read_text(encoding="utf-8")[:3000]
    once = base.evaluate(text)
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 1)
    one_by_one = base.evaluate(text)
    assert one_by_one[2:] == once[2:]
    # A window's sum is of float32 losses, a batch's of windows: some 1e-7 each, in other orders.
    np.testing.assert_allclose(one_by_one[:2], once[:2], rtol=1e-5)


@pytest.mark.parametrize("engine", ["cpu", "fused", "reference"])
def test_judging_is_validation_to_the_last_bit(base, engine):
    """The sums of training's stepper, of the same windows; on any number of threads."""
    text = STORY.read_text(encoding="utf-8")[:6000]
    held_out = base.held_out(text)
    stepper = make_stepper(engine, base.weights, AdamW(base.weights), threads=2)
    judged = base.evaluate(text, engine=engine, threads=1)
    assert judged.bits_per_byte == held_out.bits_per_byte(stepper.sums)
    assert base.bits_per_byte(text, engine=engine) == judged.bits_per_byte


@pytest.mark.parametrize("name, bound", [("cuda", 1e-2), ("cuda-float32", 1e-5)])
def test_a_gpu_judges_by_the_program_of_validation(monkeypatch, name, bound):
    """On the emulator: the same sums as training's stepper, and no memory for moments.

    bound: relative, of bits per byte: bf16 rounds by 2^-9, float32 in pieces by some 1e-7.
    """
    config = ne.ModelConfig(vocab_size=264, dim=64, n_layers=1, n_heads=2, n_kv_heads=1, hidden=64,
                            context=16, n_predict=1)  # fmt: skip
    tiny = ne.Model(config, ne.Tokenizer.train(STORY.read_bytes(), 264), initialise(config, seed=0))
    made = []

    def on_paper(engine, weights, optimizer, pieces=1, recompute=False):
        device = emulator.Device(capability=(9, 0), multiprocessors=4)
        made.append(stepper.CudaStepper(weights, optimizer, device, precision=PRECISIONS[engine]))
        return made[-1]

    recorded.by_numpy(monkeypatch)
    monkeypatch.setattr(registry, "_no_gpu", lambda: "")
    monkeypatch.setattr(stepper, "cuda_stepper", on_paper)
    text = "The river begins under a stone, and nobody"
    judged, usual = tiny.evaluate(text, engine=name), tiny.evaluate(text, engine="cpu")
    assert judged.bits_per_byte == pytest.approx(usual.bits_per_byte, rel=bound)
    assert not {"m", "v"} & made[0].memories.keys()
    trained = on_paper(name, tiny.weights, AdamW(tiny.weights))
    assert {"m", "v"} <= trained.memories.keys()
    held_out = tiny.held_out(text)
    assert judged.bits_per_byte == held_out.bits_per_byte(trained.sums)


def test_the_first_token_alone_has_no_context_and_a_document_does_not_begin_anew():
    """Windows of 4 over 10 tokens: what the chapter says of the ends, seen in the batches."""
    letters = ne.Tokenizer.train(b"", 260)
    end, ids = letters.special["<|endoftext|>"], letters.encode("abcdefgh").tolist()
    text = np.array([*ids[:3], end, *ids[3:]])  # two documents
    held_out = evaluate.HeldOut.from_tokens(text, letters, evaluate.windows_at_once(2, 4), 4, 1)
    ((tokens, targets),) = held_out.batches(np.arange(2))
    assert tokens.tolist() == [[*ids[:3], end], ids[3:7]]
    ignored = int(evaluate.IGNORE)
    assert targets[:, :, 0].tolist() == [[*ids[1:3], ignored, ids[3]], ids[4:8]]


def test_batches_are_even_and_no_larger_than_said():
    for context in (1, 7, 128, 1 << 20):
        for n in (1, 2, 127, 128, 129, 1000):
            size = evaluate.windows_at_once(n, context)
            assert size == 1 or size * context <= evaluate.BATCH_TOKENS
            assert -(-n // size) * size - n < size  # no batch is empty
            most = max(1, evaluate.BATCH_TOKENS // context)
            assert -(-n // size) == -(-n // most)  # and none more than must be


def test_how_far_judging_is_can_be_heard(base, monkeypatch):
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 256)
    heard = []
    judged = base.evaluate(STORY, report=lambda *said: heard.append(said))
    done, total, bits = zip(*heard, strict=True)
    assert len(heard) > 2 and list(done) == sorted({*done}) and {*total} == {judged.tokens}
    assert done[-1] == judged.tokens
    assert bits[-1] == pytest.approx(judged.bits_per_byte, rel=1e-12)
    with pytest.raises(ne.UserError, match="expected threads to be above 0, got 0"):
        base.evaluate(STORY, threads=0)


def test_eval_says_what_training_said(folder, base, capfd):
    said = read_metrics(folder / "base")[-1]["bits_per_byte"]
    prepared = base.evaluate(folder / "base" / "data")
    # The same float32 losses, added up in batches of another size: in float64.
    assert prepared.bits_per_byte == pytest.approx(said, rel=1e-12)
    assert cli.main(["eval", str(folder / "base")]) == 0
    out = capfd.readouterr().out
    assert f"bits per byte   {prepared.bits_per_byte:.4f}\n" in out
    assert f"perplexity      {prepared.perplexity:.2f}\n" in out
    assert f"judged          {prepared.tokens:,} tokens, {prepared.bytes:,} bytes of " in out
    assert cli.main(["eval", str(folder / "base"), "--engine", "reference"]) == 0
    assert f"bits per byte   {said:.4f}\n" in capfd.readouterr().out

    assert cli.main(["eval", str(folder / "base"), "--data", str(STORY)]) == 0
    whole = base.evaluate(STORY)  # a file is judged whole
    assert f"bits per byte   {whole.bits_per_byte:.4f}\n" in capfd.readouterr().out
    assert whole == base.evaluate(STORY.read_bytes())
    assert whole.bytes > prepared.bytes


def test_data_of_another_tokenizer_are_refused(base, tmp_path):
    other = tmp_path / "other"
    assert cli.main(f"data prepare {STORY} --vocab-size 310 --out {other}".split()) == 0
    with pytest.raises(ne.UserError, match="prepared with another tokenizer than the model's"):
        base.evaluate(other)


# Flags and settings -------------------------------------------------------------------------------


CHANGED = {
    "steps": 2, "minutes": 3.5, "batch_size": 3, "accumulate": 2, "lr": 0.002, "seed": 7,
    "warmup": 1, "weight_decay": 0.25, "beta2": 0.9, "clip": 0.5,
    "optimizer": "muon", "momentum": 0.9,
}  # fmt: skip


def test_every_setting_has_a_flag_that_reaches_the_run(tmp_path, folder):
    names = [field.name for field in dataclasses.fields(ne.Settings)]
    assert names == [*flags.SETTINGS] == [*CHANGED, "recompute"]  # of a GPU: test_on_a_card
    defaults = ne.Settings()
    assert all(getattr(defaults, name) != value for name, value in CHANGED.items())
    typed = [word for name, value in CHANGED.items()
             for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
    sizes = "--dim 32 --layers 1 --heads 2 --kv-heads 1 --context 32 --vocab-size 280".split()
    run = tmp_path / "run"
    line = ["train", "--preset", "small", "--data", str(STORY), "--out", str(run)]
    assert cli.main([*line, *typed, *sizes]) == 0
    assert dataclasses.asdict(read_record(run).settings) == CHANGED | {"recompute": False}
    config = read_record(run).config
    assert config == api.resized(ne.PRESETS["small"], dim=32, n_layers=1, n_heads=2,
                                  n_kv_heads=1, context=32, vocab_size=280)  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in PAIRS)
    )
    tuned = tmp_path / "chat"
    line = ["sft", "--from", str(run), "--data", str(tmp_path / "pairs.jsonl")]
    assert cli.main([*line, "--out", str(tuned), *typed]) == 0
    assert dataclasses.asdict(read_record(tuned).settings) == CHANGED | {"recompute": False}


SWITCHED = "--predict 1 --mlp relu2 --qk-norm --logit-cap 15 --init zero".split()
SIZED = "--dim 32 --layers 1 --heads 2 --kv-heads 1 --context 32 --vocab-size 280".split()


def test_the_switches_of_a_block_have_flags_that_reach_the_run(tmp_path):
    line = ["train", "--preset", "small", "--data", str(STORY), "--steps", "1", *SIZED]
    assert cli.main([*line, "--out", str(tmp_path / "run"), *SWITCHED]) == 0
    config = read_record(tmp_path / "run").config
    switched = dict(n_predict=1, mlp="relu2", qk_norm=True, logit_cap=15.0, init="zero")
    assert {name: getattr(config, name) for name in switched} == switched
    assert config.hidden == 4 * 32  # no gate any more


def test_a_new_run_is_of_the_default_preset_by_its_recipe(tmp_path, monkeypatch):
    small, own = ne.PRESETS["small"], ne.Settings(steps=1)
    assert PRESET == "small-modern" and recipe() == recipe(PRESET) == RECIPES[PRESET]
    assert recipe("small") == ne.Settings()
    assert of_a_new_run(None, None) == (ne.PRESETS[PRESET], RECIPES[PRESET])
    assert of_a_new_run(small, None) == (small, ne.Settings())  # a model of one's own
    assert of_a_new_run(None, own) == (ne.PRESETS[PRESET], own)
    assert of_a_new_run(small, own) == (small, own)
    tiny = api.resized(ne.PRESETS[PRESET], dim=16, n_layers=1, context=16)
    monkeypatch.setitem(ne.PRESETS, PRESET, tiny)
    monkeypatch.setitem(RECIPES, PRESET, dataclasses.replace(RECIPES[PRESET], steps=1))
    model = ne.train(STORY, out=tmp_path / "run")
    settings = read_record(tmp_path / "run").settings
    assert model.config == dataclasses.replace(tiny, vocab_size=512)  # the story is short
    assert (settings.optimizer, settings.momentum) == ("muon", 0.9)


@pytest.mark.parametrize("named", [[], ["--preset", "small-modern"]], ids=["default", "named"])
def test_a_preset_brings_its_recipe_and_flags_come_before_it(named, tmp_path):
    line = ["train", "--data", str(STORY), *named, "--steps", "1", *SIZED]
    recipe = RECIPES["small-modern"]
    assert cli.main([*line, "--out", str(tmp_path / "own")]) == 0
    record = read_record(tmp_path / "own")
    assert record.config.n_predict == 1 and record.config.qk_norm
    settings = dataclasses.asdict(record.settings)
    wanted = dataclasses.asdict(recipe) | {"steps": 1, "lr": settings["lr"]}
    assert settings == wanted and wanted["optimizer"] == "muon"
    given = ["--optimizer", "adamw", "--weight-decay", "0.5", "--no-qk-norm"]
    assert cli.main([*line, "--out", str(tmp_path / "other"), *given]) == 0
    record = read_record(tmp_path / "other")
    assert (record.settings.optimizer, record.settings.weight_decay) == ("adamw", 0.5)
    assert not record.config.qk_norm
    assert cli.main([*line, "--out", str(tmp_path / "own"), "--resume"]) == 0


def test_a_vocabulary_that_nobody_chose_is_smaller_for_a_short_text(tmp_path):
    for size, tokens in ((0, 512), (999_999, 512), (1_000_000, 4096), (None, 4096)):
        assert usual_vocabulary(size) == tokens
        assert flags.learned_size(None, size) == tokens and flags.learned_size(7, size) == 7
    long, preset = tmp_path / "long.txt", ne.PRESETS[PRESET]
    long.write_bytes(bytes(1_000_000))
    assert api.for_text(preset, long) == api.for_text(preset, None) == preset
    assert api.for_text(preset, STORY) == dataclasses.replace(preset, vocab_size=512)
    assert api.for_text(ne.PRESETS["euler-10m"], tmp_path) == ne.PRESETS["euler-10m"]  # a folder
    line = ["train", "--data", str(STORY), "--steps", "1", "--preset"]
    assert cli.main([*line, "euler-10m", "--out", str(tmp_path / "large")]) == 2  # its 2,048 tokens
    assert not (tmp_path / "large").exists()


def test_another_activation_has_the_width_of_its_rule():
    small = ne.PRESETS["small"]
    assert api.resized(small, mlp="relu2").hidden == api.resized(small, mlp="gelu").hidden == 512
    assert api.resized(small, mlp="relu2", dim=64).hidden == 256
    assert api.resized(small, mlp="relu2", hidden=100).hidden == 100
    assert ne.PRESETS["small-modern"].hidden == small.hidden
    assert api.resized(ne.PRESETS["small-modern"], mlp="gelu", n_layers=2).hidden == 512


def test_every_size_of_a_model_has_a_flag():
    fields = {field.name for field in dataclasses.fields(ne.ModelConfig)}
    sizes = {flags.FIELDS.get(name, name) for name in flags.SIZES}
    assert sizes <= fields
    # What is left: switches, of which most are no numbers, and what belongs to them.
    others = {"step_size", "repeat", *CHOICES, *SCALES}
    assert fields - sizes == others - {"sliding_window", "mlp", "qk_norm", "logit_cap", "init"}


def test_the_help_names_what_there_is(capfd):
    from nanoeuler.engines.registry import CPU_ENGINES, GPU_ENGINES

    assert cli.main(["train", "--help"]) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert ", ".join([*ne.PRESETS][:-1]) + f" or {[*ne.PRESETS][-1]}" in text
    engines = ["auto", *GPU_ENGINES, *CPU_ENGINES]
    assert ", ".join(engines[:-1]) + f" or {engines[-1]}" in text


def test_a_model_of_other_sizes():
    small = ne.PRESETS["small"]
    assert api.resized(small) == small and api.resized(small, n_layers=2).hidden == small.hidden
    for name, preset in ne.PRESETS.items():  # the rule is that of the presets
        other = api.resized(small if preset.mlp == "swiglu" else preset, dim=preset.dim,
                             n_heads=preset.n_heads, n_kv_heads=preset.n_kv_heads)  # fmt: skip
        assert other.hidden == preset.hidden, name
    assert api.resized(ne.PRESETS["gpt2-124m"], dim=96).hidden == 384
    assert api.resized(small, dim=64, hidden=100).hidden == 100


def test_what_cannot_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("nanoeuler.planning.memory.limit", lambda: 50e6)
    out = tmp_path / "run"
    with pytest.raises(ne.UserError, match="a step of 64 x 128 tokens needs .* of memory"):
        ne.train(STORY, out=out, settings=ne.Settings(steps=1, batch_size=64))
    assert not out.exists()


def test_a_model_whose_cache_cannot_fit_is_refused(folder, monkeypatch):
    monkeypatch.setattr("nanoeuler.planning.memory.limit", lambda: 1e3)
    with pytest.raises(ne.UserError, match="the cache of the model in .* for 64 tokens needs"):
        ne.load(folder / "base")


# Types --------------------------------------------------------------------------------------------


WRONG = """
import nanoeuler as ne

model: ne.Model = ne.load("runs/base")
text: str = model.generate("The river", tokens=10, seed=3)
model.generate("The river", tokens="ten")
model.generate("The river", temprature=0.5)
ne.trian("text.txt")
bits: str = model.bits_per_byte("text")
"""


@pytest.mark.long
def test_a_type_checker_reads_the_face(tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml",
         tmp_path / "mine.py"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == [6, 7, 8, 9], done.stdout + done.stderr
