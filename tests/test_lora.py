"""LoRA: gradients by complex step, merging, runs that hold adapters alone, and PEFT's format."""

import inspect
import json
import os
import shutil
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import sketches
from fragments import replaced
from safetensors.numpy import load_file, save_file

import nanoeuler as ne
from nanoeuler.checks.derivatives import complex_step, relative_error
from nanoeuler.checks.gradcheck import BOUND, TINIEST, TINY, TINY_GPT2, tiny_problem
from nanoeuler.cli.main import main
from nanoeuler.engines import registry
from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine
from nanoeuler.engines.cpu.stepper import CpuStepper
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.interop import huggingface, peft
from nanoeuler.model import lora as module
from nanoeuler.model.config import ModelConfig, count_parameters
from nanoeuler.model.lora import (
    AdaptedWeights,
    Adapters,
    Lora,
    LowRank,
    adapted,
    adapter_shapes,
    count_adapters,
    for_adapters,
)
from nanoeuler.model.transformer import forward, loss_and_gradients, loss_sums
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.planning.lora import lora_lines, lora_memory
from nanoeuler.planning.plan import cpu_memory
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import load, load_adapters, load_model, read_record
from nanoeuler.training.folder import checkpoints
from nanoeuler.training.lora import LoraAdamW
from nanoeuler.training.lora import add_product as fast_product
from nanoeuler.training.run import Run, Settings
from nanoeuler.training.sft import Conversations, finetune
from nanoeuler.training.train import train

RK4 = replace(TINIEST, integrator="rk4", repeat=2)
CASES = {
    "all targets": (TINY, Lora(3, 5.0)),
    "two predicted tokens, q and v": (TINY, Lora(2, 1.0, ("q", "v"))),
    "GPT-2, tied": (TINY_GPT2, Lora(2)),
    "shared layers, RK4": (RK4, Lora(2, 1.0, ("k", "down"))),
    "a window": (replace(TINY, sliding_window=2), Lora(1, None, ("o", "up"))),
}
if "qk_norm" in ReferenceEngine.supports:  # whose gains are frozen, as all are
    CASES["QK-norm, exact GELU"] = (replace(TINY, qk_norm=True, mlp="gelu_exact"), Lora(2))
LLAMA = ModelConfig(vocab_size=40, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, hidden=32,
                    context=16, n_predict=1)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def sketched():
    with sketches.drawn():
        yield


def drawn(adapters, seed=1, size=0.3):
    """Adapters with numbers in A and in B."""
    rng = np.random.default_rng(seed)
    for tensor in adapters.values():
        tensor[...] = size * rng.standard_normal(tensor.shape)


def adapted_problem(config, lora, dtype=np.float64):
    """A problem whose weights have adapters, merged."""
    problem = tiny_problem(config)
    weights = Weights(config, dtype)
    weights.flat[...] = problem.w.flat
    both = AdaptedWeights(weights, lora.settled(config))
    drawn(both.adapters)
    both.merge()
    return problem, both


def gradients(problem, weights, engine):
    """The gradients of the adapters, by two backward passes."""
    found = weights.zeros_like()
    for part in (slice(0, 1), slice(1, None)):
        loss_and_gradients(for_adapters(engine), weights.config, weights, problem.tokens[part],
                           problem.targets[part], problem.scale, found)  # fmt: skip
    return found


def exact_gradients(problem, weights):
    """Each number of A and of B by its own complex step through the merge and the whole model."""
    config, plain = weights.config, Weights(weights.config, np.complex128)
    plain.flat[...] = weights.flat
    trial = AdaptedWeights(plain, weights.lora)
    trial.base = [each.astype(complex) for each in weights.base]
    trial.adapters.flat[...] = weights.adapters.flat
    found = Adapters(config, weights.lora, np.float64)
    for name, tensor in trial.adapters.items():
        def loss(value, tensor=tensor):
            tensor[...] = value
            trial.merge()
            sums = loss_sums(ReferenceEngine(), config, trial, problem.tokens, problem.targets)
            return np.sum(problem.scale * sums)

        found[name][...] = complex_step(loss, weights.adapters[name])
        tensor[...] = weights.adapters[name]
    return found


def worst(one, two):
    return max(relative_error(one[name], two[name]) for name in two)


@pytest.fixture(scope="module")
def proved():
    """Of each case: the problem, the weights, and the exact gradients."""
    found = {}
    for name, (config, lora) in CASES.items():
        problem, weights = adapted_problem(config, lora)
        found[name] = problem, weights, exact_gradients(problem, weights)
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_complex_steps(proved, case):
    problem, weights, exact = proved[case]
    assert worst(gradients(problem, weights, ReferenceEngine()), exact) < BOUND


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_dense_one_projected(proved, case):
    problem, weights, _ = proved[case]
    dense, found = Weights(weights.config, np.float64), gradients(problem, weights,
                                                                  ReferenceEngine())  # fmt: skip
    loss_and_gradients(ReferenceEngine(), weights.config, weights, problem.tokens, problem.targets,
                       problem.scale, dense)  # fmt: skip
    for name, tensor, columns in adapted(weights.config, weights.lora):
        A, B = weights.adapters[f"{name}.A"], weights.adapters[f"{name}.B"]
        dW, scale = dense[tensor][:, columns], weights.lora.scale
        assert relative_error(found[f"{name}.A"], scale * dW @ B.T) < BOUND
        assert relative_error(found[f"{name}.B"], scale * A.T @ dW) < BOUND


@pytest.mark.parametrize("engine", [FusedEngine, CpuEngine])
@pytest.mark.parametrize("case", CASES)
def test_the_engines_of_a_cpu_have_these_gradients(proved, case, engine):
    config, lora = CASES[case]
    problem, weights = adapted_problem(config, lora, np.float32)
    _, _, exact = proved[case]
    # float32 with some hundred additions in a row: 1e-7 a step, at most a few times 1e-5 in all.
    assert worst(gradients(problem, weights, engine()), exact) < 1e-4


# Each mistake: what is wrong, a function of model/lora.py, what stands there, what would.
MISTAKES = [
    ("no scale in dB", "linear_backward", "engine.scale(h, scale)", "h"),
    ("no scale in dA", "linear_backward", "engine.scale(dh, scale)", "dh"),
    ("dB of the whole input", "linear_backward", "dpart = engine.linear(x, A), dy[..., columns]",
     "dpart = engine.linear(x, A + 0.1), dy[..., columns]"),
    ("dA of the columns' beginning", "linear_backward", "dy[..., columns]",
     "dy[..., : B.shape[1]]"),
    ("dA is not added but for the last", "linear_backward", "A.T, dA.T)",
     "A.T, (dA.fill(0), dA.T)[1])"),
    ("dx without the adapters", "linear_backward", "engine.linear(dy, w.T)",
     "engine.linear(dy, (w - 0.1).T)"),
    ("A twice in the forward", "merge", "self.product(A * A.dtype.type(self.lora.scale), B, into)",
     "self.product(A * A.dtype.type(self.lora.scale), B, into); self.product(A, B, into)"),
    ("merged on what was merged", "merge", "into[...] = base", "pass"),
    ("alpha alone", "scale", "self.alpha / self.rank", "self.alpha"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[each[0] for each in MISTAKES])
def test_a_planted_mistake_is_seen(proved, mistake, monkeypatch):
    """By a complex step of the right merge, so that a merge that is wrong is seen as well."""
    _, where, old, new = mistake
    owner = {"merge": AdaptedWeights, "scale": Lora}.get(where, module)
    original = vars(owner)[where]
    function = original.fget if isinstance(original, property) else original
    source = replaced(textwrap.dedent(inspect.getsource(function)), old, new)
    scope = dict(vars(module))
    exec(source, scope)
    wrong = scope[where]
    problem, _, exact = proved["all targets"]
    monkeypatch.setattr(owner, where, wrong)
    _, weights = adapted_problem(*CASES["all targets"])
    weights.merge()
    assert worst(gradients(problem, weights, ReferenceEngine()), exact) > 1e-6


def test_merging_is_the_product_and_b_of_zero_changes_nothing():
    config, lora = LLAMA, Lora(2, 3.0, ("k", "down")).settled(LLAMA)
    plain = initialise(config, 0)
    both = AdaptedWeights(initialise(config, 0), lora, fast_product)
    both.begin(0)
    both.merge()
    assert np.array_equal(both.flat, plain.flat)
    bound = config.hidden**-0.5
    assert 0.8 * bound < np.abs(both.adapters["block.0.down.A"]).max() < bound
    drawn(both.adapters)
    both.merge()
    both.merge()  # anew, not on top
    wanted = {name: tensor.astype(float) for name, tensor in plain.items()}
    for name, tensor, columns in adapted(config, lora):
        A, B = (both.adapters[f"{name}.{side}"].astype(float) for side in "AB")
        wanted[tensor][:, columns] += 1.5 * A @ B
    for name, tensor in both.items():
        assert np.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name
    assert not np.array_equal(both["block.0.w_down"], plain["block.0.w_down"])
    assert np.array_equal(both["block.0.wo"], plain["block.0.wo"])


def test_the_merged_model_is_the_model_with_two_products():
    """x W' = x W + s (x A) B, by hand on a 2 x 2."""
    W, A, B = np.array([[1.0, 2], [3, 4]]), np.array([[1.0], [2]]), np.array([[0.5, -1]])
    x, scale = np.array([[1.0, 1]]), 2.0
    assert (x @ (W + scale * A @ B)).tolist() == [[7.0, 0.0]]
    assert (x @ W + scale * (x @ A) @ B).tolist() == [[7.0, 0.0]]


def test_only_adapters_have_gradients_and_moments():
    lora = Lora(2).settled(LLAMA)
    weights = AdaptedWeights(initialise(LLAMA, 0), lora, fast_product)
    stepper = CpuStepper(lambda: for_adapters(CpuEngine()), weights, LoraAdamW(weights), threads=1)
    padded = sum(-(-a * b // 16) * 16 for a, b in adapter_shapes(LLAMA, lora).values())
    for each in (stepper.gradients, stepper.optimizer.m, stepper.optimizer.v):
        assert each.flat.size == padded < LLAMA.dim * LLAMA.hidden * 6
    assert count_adapters(LLAMA, lora) == sum(a * b for a, b in
                                              adapter_shapes(LLAMA, lora).values())  # fmt: skip
    found = stepper.gradients
    assert found["norm"] is None and found.get("norm_bias") is None
    assert isinstance(found["output"], LowRank) and not found["output"].adapters
    assert len(found.blocks[0].wqkv.adapters) == 3 and len(found.blocks[1].w_up.adapters) == 2


def steps(threads, engine="cpu", number=4):
    """The adapters after some steps, and the weights."""
    lora, rng = Lora(2).settled(LLAMA), np.random.default_rng(0)
    weights = AdaptedWeights(initialise(LLAMA, 0), lora, fast_product)
    weights.begin(3)
    weights.merge()
    stepper = make_stepper(engine, weights, LoraAdamW(weights), threads=threads)
    for i in range(number):
        tokens = rng.integers(LLAMA.vocab_size, size=(40, LLAMA.context + 1))
        first = np.zeros((40, LLAMA.context), np.int32)
        first[:, 9:] = 9
        stepper.step(tokens[:, :-1], tokens[:, 1:, None], 1e-2, i + 1, first)
    return weights


def test_threads_change_no_bit():
    one, three = steps(1), steps(3)
    assert np.array_equal(one.adapters.flat, three.adapters.flat)
    assert np.array_equal(one.flat, three.flat)
    assert not np.array_equal(one.flat, initialise(LLAMA, 0).flat)
    frozen = ("embedding", "norm", "output", "block.1.norm2")
    assert all(np.array_equal(one[name], initialise(LLAMA, 0)[name]) for name in frozen)


def test_the_engines_take_the_same_steps():
    mine, theirs = steps(1), steps(1, "reference")
    # Adam divides by the gradient's own size, so a step may differ by a part of its rate 1e-2 where
    # a gradient is all rounding; nothing here is.
    assert np.allclose(mine.adapters.flat, theirs.adapters.flat, rtol=0, atol=2e-4)


# ---- Runs

SMALL = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, hidden=24, context=48,
                    vocab_size=270, n_predict=1)  # fmt: skip
PAIRS = [(f"What is {i}?", f"It is {i}.") for i in range(30)]
HOW = {"settings": Settings(steps=5, batch_size=2), "save_every": 2, "engine": "reference"}
FILES = "model.safetensors", "optimizer.safetensors", "state.json"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with base/ and lora/, which belongs to it."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("the number of the beast is a number. " * 30)
    train(folder / "text.txt", folder / "base", config=SMALL, engine="reference",
          settings=Settings(steps=2, batch_size=2))  # fmt: skip
    finetune(folder / "base", PAIRS, folder / "lora", lora=Lora(2, None, ("q", "down")), **HOW)
    return folder


@pytest.fixture
def copied(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def test_a_run_holds_adapters_alone_and_its_base(runs):
    record = read_record(runs / "lora")
    assert record.adaptation.lora == Lora(2, 4.0, ("q", "down"))
    saved = load_file(checkpoints(runs / "lora")[-1][1] / "model.safetensors")
    assert {*saved} == {*adapter_shapes(SMALL, record.adaptation.lora)}
    best = load_file(checkpoints(runs / "lora" / "best")[-1][1] / "model.safetensors")
    assert {*best} == {*saved}
    _, _, base = load_model(runs / "base")
    config, _, weights = load_model(runs / "lora")
    adapters, _ = load_adapters(runs / "lora")
    changed = {name for name in base if not np.array_equal(base[name], weights[name])}
    assert changed == {f"block.{i}.{name}" for i in range(2) for name in ("wqkv", "w_down")}
    A, B = adapters["block.1.down.A"], adapters["block.1.down.B"]
    assert np.allclose(weights["block.1.w_down"], base["block.1.w_down"] + 2 * A @ B, atol=1e-6)
    assert type(weights) is Weights and config == SMALL


def test_the_best_model_is_one_to_use(runs):
    assert load_model(runs / "lora" / "best")[2].flat.size == load_model(runs / "base")[2].flat.size


def test_a_run_resumes_to_the_same_byte(runs, tmp_path):
    class Stop(Exception):
        pass

    batch = Conversations.batch
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        def dies(self, step):
            if step == 4:
                raise Stop
            return batch(self, step)

        patch.setattr(Conversations, "batch", dies)
        finetune(runs / "base", PAIRS, tmp_path / "broken", lora=Lora(2, None, ("q", "down")),
                 **HOW)  # fmt: skip
    assert load(tmp_path / "broken").step == 2
    finetune(None, PAIRS, tmp_path / "broken", resume=True, engine="reference")
    for name in FILES:
        straight, broken = (checkpoints(run)[-1][1] / name
                            for run in (runs / "lora", tmp_path / "broken"))  # fmt: skip
        assert straight.read_bytes() == broken.read_bytes()


def test_a_run_that_died_before_its_first_save_knows_its_adapters(runs, tmp_path):
    class Stop(Exception):
        pass

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        def dies(*rest, **options):
            os.makedirs(tmp_path / "broken", exist_ok=True)
            shutil.copytree(tmp_path / "broken", tmp_path / "dead", dirs_exist_ok=True)
            raise Stop

        patch.setattr("nanoeuler.training.sft.fit", dies)
        finetune(runs / "base", PAIRS, tmp_path / "broken", lora=Lora(2, None, ("q", "down")),
                 **HOW)  # fmt: skip
    run = finetune(runs / "base", PAIRS, tmp_path / "dead", resume=True, engine="reference")
    assert run.lora == Lora(2, 4.0, ("q", "down"))
    assert np.array_equal(run.weights.flat, load_model(runs / "lora")[2].flat)


def test_both_runs_may_move_together(copied):
    shutil.rmtree(copied / "lora" / "best" / ".lock", ignore_errors=True)
    before = load_model(copied / "lora")[2].flat  # where the base was: the path of its own
    record = json.loads((copied / "lora" / "config.json").read_text())
    record["base"][0] = "/nowhere"
    for folder in (copied / "lora", copied / "lora" / "best"):
        (folder / "config.json").write_text(json.dumps(record))
        assert load_model(folder)[2].flat.size == before.size
    assert np.array_equal(load_model(copied / "lora")[2].flat, before)


def lost(copied, change):
    record = json.loads((copied / "lora" / "config.json").read_text())
    record["base"][0] = "/nowhere"
    (copied / "lora" / "config.json").write_text(json.dumps(record))
    change()
    with pytest.raises(UserError) as error:
        load_model(copied / "lora")
    return str(error.value)


def test_a_base_that_is_gone_or_another_is_told(copied):
    said = lost(copied, lambda: shutil.move(copied / "base", copied / "elsewhere"))
    assert "but it is not there: put that run back" in said

    def another():
        shutil.move(copied / "elsewhere", copied / "base")
        for _, folder in checkpoints(copied / "base"):
            state = json.loads((folder / "state.json").read_text())
            state["sha256"]["model.safetensors"] = "0" * 64
            (folder / "state.json").write_text(json.dumps(state))

    assert "another model is there now" in lost(copied, another)


@pytest.mark.parametrize("wanted, words", [
    (Lora(3), "lora_rank 2, but 3 was asked for"),
    (Lora(2, 5.0), "lora_alpha 4.0, but 5.0 was asked for"),
    (Lora(2, None, ("v",)), "lora_targets"),
])  # fmt: skip
def test_a_run_goes_on_only_with_its_own_adapters(runs, wanted, words):
    with pytest.raises(UserError, match=words):
        finetune(None, PAIRS, runs / "lora", lora=wanted, resume=True)


def test_a_whole_run_does_not_go_on_with_adapters(runs, tmp_path):
    finetune(runs / "base", PAIRS, tmp_path / "whole", **HOW)
    with pytest.raises(UserError, match="lora_rank None, but 2 was asked for"):
        finetune(None, PAIRS, tmp_path / "whole", lora=Lora(2), resume=True)


def test_what_cannot_be_adapted_is_told(runs, tmp_path):
    with pytest.raises(UserError, match="holds adapters itself"):
        finetune(runs / "lora", PAIRS, tmp_path / "a", lora=Lora(2), **HOW)
    with pytest.raises(UserError, match="expected the folder of a run to adapt"):
        finetune(load_model(runs / "base")[:3], PAIRS, tmp_path / "b", lora=Lora(2), **HOW)
    with pytest.raises(UserError, match="a LoRA rank of at most 8, the smaller side"):
        finetune(runs / "base", PAIRS, tmp_path / "c", lora=Lora(9, None, ("k",)), **HOW)
    assert not any((tmp_path / name).exists() for name in "abc")


@pytest.mark.parametrize("arguments, words", [
    ((0,), "a LoRA rank of at least 1, got 0"), ((True,), "got True"), ((2.0,), "got 2.0"),
    ((2, 0), "alpha to be a number above 0, got 0"), ((2, 10**400), "above 0"),
    ((2, float("nan")), "got nan"),
    ((2, "8"), "got '8'"), ((2, None, ()), "each once, got 'none'"),
    ((2, None, ("q", "q")), "each once, got 'q,q'"), ((2, None, ("w",)), "got 'w'"),
])  # fmt: skip
def test_settings_that_cannot_be(arguments, words):
    with pytest.raises(UserError, match=words):
        Lora(*arguments)


def test_gelu_has_no_gate():
    with pytest.raises(UserError, match="q,k,v,o,up,down, which this model has, got gate"):
        Lora(2, None, ("gate",)).settled(TINY_GPT2)
    assert Lora(2).settled(TINY_GPT2) == Lora(2, 4.0, ("q", "k", "v", "o", "up", "down"))


def damaged(folder, change):
    """What is said of the run in `folder` when its config.json has been changed."""
    path = folder / "config.json"
    kept, record = path.read_text(), json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    try:
        with pytest.raises(UserError) as error:
            load_model(folder)
    finally:
        path.write_text(kept)
    return str(error.value)


@pytest.mark.parametrize("change", [
    lambda record: record["lora"].pop("rank"), lambda record: record["lora"].update(rank=10**9),
    lambda record: record["lora"].update(rank="2"), lambda record: record["lora"].update(more=1),
    lambda record: record["lora"].update(alpha=None), lambda record: record["lora"].update(alpha=4),
    lambda record: record["lora"].update(targets=None),
    lambda record: record["lora"].update(targets=["down", "q"]),
    lambda record: record["lora"].update(base=7), lambda record: record.update(base="x"),
    lambda record: record.update(base=[1]), lambda record: record.pop("base"),
    lambda record: record.update(base=[]),
    lambda record: record.update(lora=[]), lambda record: record.update(lora=None),
    lambda record: record.pop("lora"), lambda record: record.update(format=2),
    lambda record: record.update(lora={}), lambda record: record.update(format=5),
    lambda record: record["model"].update(n_layers=10**12),
])  # fmt: skip
def test_a_damaged_record_gets_one_line(copied, change):
    said = damaged(copied / "lora", change)
    assert "\n" not in said and str(copied / "lora") in said


def test_other_adapters_than_the_records_are_told(copied):
    said = damaged(copied / "lora", lambda record: record["lora"].update(rank=1, alpha=4.0))
    assert "different runs" in said


# ---- Where adapters are refused


def test_cards_and_ranks_refuse_adapters_by_name(monkeypatch):
    weights = AdaptedWeights(initialise(LLAMA, 0), Lora(2).settled(LLAMA), fast_product)
    monkeypatch.setattr(registry, "engine_name", lambda name: name)
    with pytest.raises(UserError, match="not trained by the engine cuda-tf32 yet: choose --engine"):
        make_stepper("cuda-tf32", weights, LoraAdamW(weights))
    token = registry.LEAD.set(lambda *rest: None)
    try:
        with pytest.raises(UserError, match="trained by several ranks yet"):
            make_stepper("cpu", weights, LoraAdamW(weights))
    finally:
        registry.LEAD.reset(token)


# ---- PEFT's format


def bases(tmp_path, config=LLAMA):
    """A model in Hugging Face's format, and its weights."""
    weights = initialise(config, 1)
    for tensor in weights.values():
        if tensor.ndim == 2:
            tensor *= 5
    huggingface.write_folder(tmp_path / "base", config, weights)
    return weights


def exported(tmp_path, config=LLAMA, lora=Lora(3, 7.0), kind="F32"):  # noqa: B008 it's immutable
    """Adapters in a folder, and the weights that have them."""
    both = AdaptedWeights(initialise(config, 1), lora.settled(config))
    drawn(both.adapters, size=0.2)
    both.merge()
    peft.write_adapter(tmp_path / "adapter", config, both.adapters, str(tmp_path / "base"), kind)
    return both


def test_names_and_shapes_are_pefts(tmp_path):
    exported(tmp_path, lora=Lora(3, 7.0, ("q", "k", "gate", "down")))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.2."
    assert tensors[f"{stem}self_attn.q_proj.lora_A.weight"].shape == (3, 24)
    assert tensors[f"{stem}self_attn.k_proj.lora_B.weight"].shape == (12, 3)
    assert tensors[f"{stem}mlp.gate_proj.lora_B.weight"].shape == (32, 3)
    assert tensors[f"{stem}mlp.down_proj.lora_A.weight"].shape == (3, 32)
    assert len(tensors) == 3 * 4 * 2
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["target_modules"] == ["down_proj", "gate_proj", "k_proj", "q_proj"]
    assert (record["peft_type"], record["r"], record["lora_alpha"]) == ("LORA", 3, 7.0)


@pytest.mark.parametrize("kind, most", [("F32", 0), ("F16", 1e-3), ("BF16", 4e-3)])
def test_adapters_come_back(tmp_path, kind, most):
    both = exported(tmp_path, kind=kind)
    again = peft.read_adapter(tmp_path / "adapter", LLAMA)
    assert again.lora == both.lora
    assert np.allclose(again.flat, both.adapters.flat, rtol=most, atol=most * 1e-3)
    weights = peft.with_adapter(initialise(LLAMA, 1), tmp_path / "adapter")
    assert np.allclose(weights.flat, both.flat, atol=1e-6 + 2 * most)


def test_a_step_size_is_multiplied_into_what_writes(tmp_path):
    config = replace(LLAMA, step_size=0.5)
    both = exported(tmp_path, config, Lora(2, 2.0, ("v", "o", "up", "down")))
    again = peft.read_adapter(tmp_path / "adapter", LLAMA)
    for name in ("v", "o", "up", "down"):
        factor = 0.5 if name in ("o", "down") else 1.0
        own = f"block.1.{name}"
        assert np.array_equal(again[f"{own}.B"], factor * both.adapters[f"{own}.B"])
        assert np.array_equal(again[f"{own}.A"], both.adapters[f"{own}.A"])


def changed(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_rslora_is_another_alpha_and_layers_may_have_none(tmp_path):
    both = exported(tmp_path, lora=Lora(4, 6.0))
    changed(tmp_path / "adapter", use_rslora=True)
    assert peft.read_adapter(tmp_path / "adapter", LLAMA).lora.scale == pytest.approx(3.0)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    kept = {name: each for name, each in load_file(path).items() if ".layers.1." in name}
    save_file(kept, path)
    again = peft.read_adapter(tmp_path / "adapter", LLAMA)
    assert np.array_equal(again["block.1.q.B"], both.adapters["block.1.q.B"])
    assert not again["block.0.q.A"].any() and not again["block.2.q.B"].any()


@pytest.mark.parametrize("fields, words", [
    ({"peft_type": "IA3"}, "'IA3', and only LORA is read"), ({"peft_type": 3}, "kind 3"),
    ({"use_dora": True}, "use_dora True"), ({"bias": "all"}, "bias 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"rank_pattern": {"q": 1}}, "rank_p"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"), ({"lora_bias": True}, "lora_bias"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"r": 0}, "a LoRA rank of at least 1"), ({"r": "3"}, "got '3'"), ({"r": True}, "got True"),
    ({"r": 10**30}, "a LoRA rank"), ({"r": 2}, "expected block.0.q.A as"),
    ({"r": 10**6}, "rank of at most"), ({"lora_alpha": -1}, "alpha"),
    ({"lora_alpha": "x", "use_rslora": True}, "alpha"), ({"lora_alpha": None}, "alpha"),
    ({"lora_alpha": 1e400}, "alpha"),
])  # fmt: skip
def test_another_kind_of_adapter_is_refused_by_name(tmp_path, fields, words):
    exported(tmp_path)
    changed(tmp_path / "adapter", **fields)
    with pytest.raises(UserError, match=words) as error:
        peft.read_adapter(tmp_path / "adapter", LLAMA)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "orthogonal", "eva", "mica", None])
def test_beginnings_that_leave_the_model_as_it_is_are_read(tmp_path, begun):
    both = exported(tmp_path)
    changed(tmp_path / "adapter", init_lora_weights=begun)
    assert np.array_equal(peft.read_adapter(tmp_path / "adapter", LLAMA).flat, both.adapters.flat)


def without(tensors, end):
    return {name: each for name, each in tensors.items() if not name.endswith(end)}


@pytest.mark.parametrize("change, words", [
    (lambda tensors: {}, "holds no adapter at all"),
    (lambda tensors: tensors | {"x\n": np.zeros(1, "f4")}, "which is no adapter of a matrix"),
    (lambda tensors: tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((3, 24), "f4")},
     "which is no adapter of a matrix"),
    (lambda tensors: without(tensors, "layers.0.self_attn.q_proj.lora_A.weight"),
     "found nothing beside block.0.q.B"),
    (lambda tensors: {name: each[:, :-1].copy() for name, each in tensors.items()}, "found base_"),
    (lambda tensors: {name: each * np.float32("nan") for name, each in tensors.items()},
     "not finite"),
    (lambda tensors: {name: each.astype(np.int32) for name, each in tensors.items()}, "I32"),
])  # fmt: skip
def test_a_hostile_file_gets_one_line(tmp_path, change, words):
    exported(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UserError, match=words) as error:
        peft.read_adapter(tmp_path / "adapter", LLAMA)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, content", [
    ("adapter_config.json", b"["), ("adapter_config.json", b"[]"), ("adapter_config.json", b"\xff"),
    ("adapter_config.json", b"[" * 10**5), ("adapter_model.safetensors", b"\xff" * 100),
    ("adapter_model.safetensors", b""), ("adapter_config.json", None),
    ("adapter_model.safetensors", None),
])  # fmt: skip
def test_a_file_that_is_none_gets_one_line(tmp_path, name, content):
    exported(tmp_path)
    path = tmp_path / "adapter" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as error:
        peft.read_adapter(tmp_path / "adapter", LLAMA)
    assert "\n" not in str(error.value)


def test_gpt2_and_folders_in_use_are_refused(tmp_path):
    config = replace(TINY_GPT2, n_kv_heads=TINY_GPT2.n_heads)
    both = AdaptedWeights(Weights(config), Lora(2).settled(config))
    with pytest.raises(UserError, match="GPT-2's family are not exchanged"):
        peft.write_adapter(tmp_path / "a", config, both.adapters, "base")
    assert not (tmp_path / "a").exists()
    exported(tmp_path)
    with pytest.raises(UserError, match="to be new or empty"):
        exported(tmp_path)


@pytest.mark.parametrize("config", [
    LLAMA, replace(LLAMA, step_size=0.5), replace(LLAMA, sliding_window=4),
], ids=["llama", "half a step", "mistral"])  # fmt: skip
def test_peft_computes_what_we_compute(tmp_path, config):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    huggingface.write_folder(tmp_path / "base", config, initialise(config, 1))
    both = exported(tmp_path, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=(2, 16))
    with torch.no_grad():
        plain = model(torch.tensor(tokens)).logits.numpy()
        model = theirs.PeftModel.from_pretrained(model, tmp_path / "adapter")
        logits = model(torch.tensor(tokens)).logits.numpy()
    mine = forward(ReferenceEngine(), config, both, tokens)[0][:, :, 0]
    # float32 on both sides; the adapters alone change some tenths of the largest logit.
    assert np.abs(mine - logits).max() < 1e-4 * np.abs(logits).max()
    assert np.abs(plain - logits).max() > 0.1 * np.abs(logits).max()


@pytest.mark.parametrize("options", [
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 2, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True},
    {"r": 2, "target_modules": ["o_proj"], "layers_to_transform": [1]},
], ids=["three", "rslora", "a layer"])  # fmt: skip
def test_we_compute_what_peft_computes(tmp_path, options):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = pytest.importorskip("peft", reason="peft is not installed")
    weights = bases(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = theirs.get_peft_model(model, theirs.LoraConfig(task_type="CAUSAL_LM", **options))
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            tensor.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(1).integers(LLAMA.vocab_size, size=(2, 16))
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens)).logits.numpy()
    mine = peft.with_adapter(weights, tmp_path / "theirs")
    mine = forward(ReferenceEngine(), LLAMA, mine, tokens)[0][:, :, 0]
    assert np.abs(mine - logits).max() < 1e-4 * np.abs(logits).max()


# ---- Commands


def test_the_commands(runs, tmp_path, capsys):
    lora, out = str(runs / "lora"), tmp_path / "adapter"
    assert main(["generate", "the", "--from", lora, "--tokens", "3", "--seed", "1"]) == 0
    assert main(["export", lora, "--to", "hf", "--adapter", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json",
                                                           "adapter_model.safetensors"]  # fmt: skip
    assert main(["import", str(runs / "base"), "--peft", str(out), "--out",
                 str(tmp_path / "merged")]) == 0  # fmt: skip
    one, two = (load_model(run)[2].flat for run in (runs / "lora", tmp_path / "merged"))
    assert np.allclose(one, two, rtol=0, atol=1e-6) and not np.array_equal(
        one, load_model(runs / "base")[2].flat)  # fmt: skip
    model = ne.load(runs / "base", adapter=out)
    assert np.array_equal(model.weights.flat, two)
    capsys.readouterr()
    assert main(["plan", "--from", str(runs / "base"), "--lora", "2"]) == 0
    number = count_adapters(SMALL, Lora(2).settled(SMALL))
    assert capsys.readouterr().out.startswith(f"{number:,} numbers learn")
    for words, said in (
        (["export", str(runs / "base"), "--to", "hf", "--adapter"], "trained all weights"),
        (["export", lora, "--to", "gguf", "--adapter"], "takes adapters alone"),
        (["sft", "--lora-alpha", "3", "--data", "docs"], "give the rank of the adapters, too"),
        (["sft", "--lora", "2", "--lora-targets", "q,x"], "got 'q,x'"),
        (["sft", "--lora", "2", "--ranks", "2"], "trained by several ranks yet"),
    ):
        assert main([*words, "--out", str(tmp_path / "no")]) == 2
        assert said in capsys.readouterr().err


def test_python_takes_a_rank(runs, tmp_path):
    model = ne.finetune(runs / "base", PAIRS, out=tmp_path / "mine", lora=2, engine="cpu",
                        settings=Settings(steps=1, batch_size=2))  # fmt: skip
    assert type(model.weights) is Weights
    assert np.array_equal(model.weights.flat, ne.load(tmp_path / "mine").weights.flat)
    with pytest.raises(UserError, match="expected lora to be"):
        ne.finetune(runs / "base", PAIRS, out=tmp_path / "no", lora="2")


# ---- The plan


def test_the_plan_counts_what_a_step_holds():
    lora = Lora(2).settled(LLAMA)
    sizes, whole = lora_memory(LLAMA, lora, 8, threads=1), cpu_memory(LLAMA, 8, threads=1)
    weights = AdaptedWeights(initialise(LLAMA, 0), lora, fast_product)
    stepper = CpuStepper(lambda: for_adapters(CpuEngine()), weights, LoraAdamW(weights), threads=1)
    tokens = np.zeros((8, 16), np.int32)
    stepper.step(tokens, tokens[:, :, None], 1e-3, 1)
    held = [stepper.gradients, *stepper.buffers]
    assert sizes["weights"] == weights.flat.nbytes == whole["weights"]
    assert sizes["copy"] == sum(each.nbytes for each in weights.base)
    assert sizes["adapters"] == weights.adapters.flat.nbytes
    assert sizes["gradients"] == sum(each.flat.nbytes for each in held)
    assert sizes["moments"] == 2 * weights.adapters.flat.nbytes
    # Arrays begin at a cache line, and of a toy's some are smaller than that.
    arena = stepper.engines[0].arena
    assert max(arena.needed, arena.slab.size) * 4 < 1.15 * sizes["activations"]
    assert "0.00 adapters" in lora_lines(LLAMA, Lora(2), 8)
    assert sum(sizes.values()) < sum(whole.values())
    assert count_parameters(LLAMA) > 5 * count_adapters(LLAMA, lora)


def test_a_run_keeps_its_identity_without_adapters():
    words = Tokenizer.train("the number of the beast is a number. " * 9, 270)
    run = Run.begin(SMALL, Settings(steps=1), words, "digest")
    assert "lora" not in run.facts and run.lora is None
