"""Steps that run each block again in the backward pass: no bit differs, and memory is as said.

Gradients, updates and losses are compared on paper, bit for bit. At full size nothing is played:
there the launches are compared, since a kernel with equal arguments on equal bits gives equal bits.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import recorded as helpers
from idle_card import IdleCard
from mutants import Mutant, load, source
from published import PUBLISHED
from recorded import step_on_paper
from test_cuda_engine import DEEP, EULER, GPT, HOPPER, TEXTS, TURNED, WIDE
from tiers import kept, thinned

from nanoeuler.engines.gpu.attention.layout import padded
from nanoeuler.engines.gpu.lang.kernel import Map
from nanoeuler.engines.gpu.rows.residual_norm import NORMS
from nanoeuler.engines.gpu.step import engine, recording
from nanoeuler.engines.gpu.step.engine import CudaEngine
from nanoeuler.engines.gpu.step.precision import BF16, COPIES, PRECISIONS, WEIGHTS
from nanoeuler.engines.gpu.step.program import ARENA, CONSTANTS, Array
from nanoeuler.engines.gpu.step.recording import GRADIENTS, Machine, program_builder, record_step
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model import transformer
from nanoeuler.model.config import PRESETS
from nanoeuler.model.transformer import loss_and_gradients
from nanoeuler.training.optim import AdamW

NORMED = replace(EULER, n_layers=2, n_predict=1, qk_norm=True, sliding_window=2,
                 window_pattern="SL")  # fmt: skip
HEUN = replace(EULER, n_predict=1, tied=True, n_layers=4, repeat=2, integrator="heun",
               step_size=0.7, mlp="gelu")  # fmt: skip
MODELS = {  # the model, its numbers, parts of a batch, whether rows hold several texts
    "GPT-2's": (replace(GPT, n_layers=2), BF16, 1, False),
    "GPT-2's, wide stream, in pieces": (replace(GPT, n_layers=2), WIDE, 2, False),
    "Llama's": (replace(DEEP, tied=True), BF16, 1, False),
    "Llama's, in pieces": (DEEP, BF16, 2, False),
    "Llama's, n made again": (DEEP, BF16._replace(kept=0), 1, False),
    "norms of heads, windows, several texts": (NORMED, BF16, 1, True),
    "GPT-2's, several texts": (replace(GPT, n_layers=2), BF16, 1, True),
    "shared, by Heun": (HEUN, BF16, 1, False),
    "in float32": (replace(TURNED, n_layers=2), PRECISIONS["cuda-tf32"], 1, False),
}
LEFT = GRADIENTS, "weights", "m", "v", "sums", "decision"  # what a step leaves


def played(name, again):
    """What a step of MODELS[name] leaves on paper; again: whether blocks are run again."""
    config, precision, pieces, packed = MODELS[name]
    precision = precision._replace(recompute=again)
    T, first = (9, TEXTS) if packed else (4, None)
    return step_on_paper(config, 2, T, HOPPER, precision, pieces, first=first)


@pytest.mark.parametrize("name", kept(
    MODELS, "GPT-2's", "Llama's, in pieces", "norms of heads, windows, several texts",
    "shared, by Heun",
))  # fmt: skip
def test_no_bit_differs(name, monkeypatch):
    helpers.by_numpy(monkeypatch)
    plain, again = (played(name, each) for each in (False, True))
    for memory in LEFT:
        assert plain.memories[memory].tobytes() == again.memories[memory].tobytes(), memory
    assert np.isfinite(again.gradients.flat).all() and again.gradients.flat.any()
    flops = [sum(step.flops for step in x.recorded.program.steps) for x in (plain, again)]
    assert flops[0] < flops[1] < 4 / 3 * flops[0]
    assert len(again.recorded.program.steps) > len(plain.recorded.program.steps)


@pytest.mark.parametrize("integrator", ["euler", "heun", "rk4"])
def test_any_engine_can_run_its_layers_again(integrator):
    """The reference engine, whose gradients are the same to the last bit."""
    config = replace(HEUN, integrator=integrator, context=8)
    w, tokens, targets, scale = helpers.problem(config, 2, 8)
    found = []
    for again in False, True:
        this, gradients = ReferenceEngine(), w.zeros_like()
        this.recompute = again
        sums = loss_and_gradients(this, config, w, tokens, targets, scale, gradients)
        _, saved = transformer.stream(this, config, w, tokens)
        assert all((type(layer) is np.ndarray) == again for layer in saved.layers)
        found.append((sums.tobytes(), gradients.flat.tobytes()))
    assert found[0] == found[1]


WRONG = [  # the module, the function, the text and its mutant
    ("model.transformer", "stream", "stages[0][0].x", "stages[1][0].x"),
    ("engines.gpu.step.engine", "lend_gradients", "self.lent.pop(here, [])", "[]"),
    ("engines.gpu.step.engine", "running_again", "self.pending, None", "(self.pending,) * 2"),
    ("engines.gpu.step.engine", "running_again", "waiting, False", "waiting, True"),
    ("engines.gpu.step.engine", "mlp_again", "self.hidden(config, b, n)",
     "self.hidden(config, b, self.scale(n, 1.1))"),
    ("model.transformer", "backward", "stages, saved.first", "stages, None"),
]


@pytest.mark.parametrize("module, function, old, new", thinned(WRONG))
def test_mistakes_are_seen(module, function, old, new, monkeypatch):
    helpers.by_numpy(monkeypatch)
    name = "norms of heads, windows, several texts" if "first" in old else "Llama's"
    name = "GPT-2's, wide stream, in pieces" if "None" in old else name
    plain, wrong = played(name, False), load(Mutant(module, function, "run again", old, new))
    if module == "model.transformer":
        monkeypatch.setattr(recording, "loss_and_gradients", wrong.loss_and_gradients)
    else:
        monkeypatch.setattr(CudaEngine, function, getattr(wrong.CudaEngine, function))
    try:
        again = played(name, True)
    except RuntimeError as error:
        assert "have come back" in str(error)
    else:
        assert plain.memories[GRADIENTS].tobytes() != again.memories[GRADIENTS].tobytes()


def test_every_mistake_has_its_place():
    for module, function, old, new in WRONG:
        source(Mutant(module, function, "run again", old, new))


# ---- At full size

SIZES = {
    "gpt2-124m": (PRESETS["gpt2-124m"], 16, 1024), "euler-116m": (PRESETS["euler-116m"], 16, 512),
    "llama-1b": (PUBLISHED["llama-1b"], 4, 2048),
}  # fmt: skip


def steps_of(name, again, machine=HOPPER):
    """The list of a step of SIZES[name]."""
    config, *shape = SIZES[name]
    return record_step(config, *shape, machine, BF16._replace(recompute=again), helpers.RULES)


def key(step):
    """What a launch does, whatever places its activations have."""
    def shown(arg):
        if isinstance(arg, Map):
            return shown(arg.array), arg.box
        if not isinstance(arg, Array):
            return arg
        place = (arg.memory, arg.address) if arg.memory in (COPIES, WEIGHTS) else ()
        return arg.shape, arg.dtype.str, arg.strides, place

    return step.name, step.launch.kernel, step.launch.grid, tuple(map(shown, step.launch.args))


@pytest.mark.parametrize("machine", [HOPPER, Machine((8, 9), 34)], ids=["Hopper", "Ada"])
@pytest.mark.parametrize("name", kept(SIZES, "gpt2-124m", "euler-116m"))
def test_what_is_run_again_are_the_launches_of_the_forward_pass(name, machine):
    """All of a layer's but the last product, by the same kernels and of the same sizes."""
    plain, again = (Counter(map(key, steps_of(name, each, machine).program.steps))
                    for each in (False, True))  # fmt: skip
    norms = Counter({each: n for each, n in plain.items() if each[0] == "norm"})
    assert not plain - again - norms  # an n that was made again for its layer alone is no more
    more, layers = again - plain, SIZES[name][0].n_layers
    assert all(each in plain or each[0] == "norm" for each in more)
    names = Counter()
    for (what, *_), n in more.items():
        names[what.split(".")[-1]] += n
    assert {"attention", "wo", "move and norm"} <= names.keys()
    assert not any("w_down" in what or "backward" in what for what in names)
    assert all(n == layers for what, n in names.items() if what != "norm")


def at_the_loss(program):
    """Bytes that are lent when the first logits are made, of the arena and of gradients."""
    turn = next(i for i, step in enumerate(program.steps) if step.name == "logits")
    loans = [*program.loans, *program.borrowed.get(GRADIENTS, ())]
    return sum(size for _, size, first, last in loans if first <= turn < last)


@pytest.mark.parametrize("name", SIZES)
def test_only_a_layers_input_is_kept(name):
    """By hand: of each layer the second stream, both norms' n and numbers, heads, y and u are not.

    A list holds the bytes of its arrays and no others, so the plan's are the card's.
    """
    config, B, T = SIZES[name]
    plain, again = (steps_of(name, each).program for each in (False, True))
    D, gated = config.head_dim, config.mlp == "swiglu"
    heads = (config.n_heads + 2 * config.n_kv_heads) * D
    columns = config.dim + heads + config.n_heads * D + config.hidden * (1 + gated)
    columns += 2 * config.dim * (config.dim < engine.WIDE)
    numbers = 2 * NORMS[config.norm] * B * T + B * config.n_heads * padded(T)
    layer = 2 * B * T * columns + 4 * numbers
    assert at_the_loss(plain) - at_the_loss(again) == config.n_layers * layer
    assert sum(again.sizes.values()) < sum(plain.sizes.values())
    same = plain.sizes.keys() - {ARENA, "partials", "constants"}
    assert all(plain.sizes[memory] == again.sizes[memory] for memory in same)


@pytest.mark.parametrize("again", [False, True])
def test_a_card_is_asked_for_what_was_planned_and_for_nothing_to_judge(again):
    """A forward pass alone keeps nothing, and fits into the arena of the step."""
    config, B, T = replace(DEEP, n_layers=6, context=64), 4, 64
    precision = BF16._replace(recompute=again)
    w, tokens, targets, _ = helpers.problem(config, B, T)
    card = IdleCard()
    stepper = CudaStepper(w, AdamW(w), card, precision=precision)
    stepper.step(tokens, targets, 1e-3, 1)
    machine = Machine(*card.card[:2], l2=card.card.l2)
    program = record_step(config, B, T, machine, precision, helpers.RULES).program
    planned, spare = sum(program.sizes.values()), program.sizes[CONSTANTS] + 64
    assert abs(card.live - planned) <= spare  # boxes are padded; an idle card forgets constants
    stepper.sums(tokens, targets)
    sums = program_builder(config, machine, precision).build_sums(B, T)
    own = sum(array.nbytes for array in (*sums.inputs.values(), *sums.results.values()))
    assert card.live <= planned + spare + own + sums.program.sizes[CONSTANTS]
    assert sums.program.sizes[ARENA] <= program.sizes[ARENA]
