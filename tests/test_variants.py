"""A variant of the model or of training is small: it touches at most three files.

Each test copies the package, edits the files that CONTRIBUTING.md's table names for its kind of
variant, and runs a script against the copy: gradients by complex steps, some steps of training on
the reference and on the CPU engine, and refusals by name where there is no code.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanoeuler

PACKAGE = Path(nanoeuler.__file__).parent
RECIPES = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
MOST = 3  # files

# A class of the copy's code, its edits as {file: [(old, new), ...]}.
RELU = {
    "model/config.py": [('"relu2")', '"relu2", "relu")')],
    "engines/reference.py": [
        ('"relu2")', '"relu2", "relu")'),
        ("    def add_into(", '''    def relu(self, u: Array) -> Array:
        """What is positive in u (Nair and Hinton, 2010)."""
        return np.where(u.real > 0, u, 0)

    def relu_backward(self, dh: Array, u: Array) -> Array:
        """du from dh, both of any shape."""
        return np.where(u.real > 0, dh, 0)

    def add_into('''),
        ("from nanoeuler.engines.interface",
         "import numpy as np\n\nfrom nanoeuler.engines.interface"),
    ],
    "engines/cpu/engine.py": [
        ('"relu2")', '"relu2", "relu")'),
        ("    def gelu(self,", '''    def relu(self, u: Array) -> Array:
        """As `ReferenceEngine.relu`."""
        return np.maximum(u, 0, out=self.arena.take(*u.shape))

    def relu_backward(self, dh: Array, u: Array) -> Array:
        """As `ReferenceEngine.relu_backward`."""
        return np.multiply(u > 0, dh, out=self.arena.take(*u.shape))

    def gelu(self,'''),
    ],
}  # fmt: skip
SCALE = {  # what enters the stream is multiplied by a number, as Gemma does by the root of C
    "model/config.py": [
        ('    "integrator": tuple',
         '    "embedding_scale": (1.0, 8.0),\n    "integrator": tuple'),
        ("    sliding_window: int = 0",
         "    embedding_scale: float = 1.0  # of what enters\n    sliding_window: int = 0"),
    ],
    "engines/interface.py": [
        ('        return self.embed(tokens, w["embedding"], positions, first)',
         '''        x = self.embed(tokens, w["embedding"], positions, first)
        return x if config.embedding_scale == 1 else self.scale(x, config.embedding_scale)'''),
        ("        self.embed_backward(dx,", '''        if config.embedding_scale != 1:
            dx = self.scale(dx, config.embedding_scale)
        self.embed_backward(dx,'''),
    ],
    "engines/reference.py": [
        ('    "sliding_window"', '    "embedding_scale": (1.0, 8.0),\n    "sliding_window"'),
    ],
}
BLOCKS = {  # block-local attention: a query sees the keys of its own block of positions
    "model/config.py": [
        ('    "integrator": tuple', '    "local_block": (0, 2),\n    "integrator": tuple'),
        ("    sliding_window: int = 0",
         "    local_block: int = 0  # positions; 0: one block\n    sliding_window: int = 0"),
        ("    window = config.sliding_window\n", '''    window = config.sliding_window
    if config.local_block:
        t = np.arange(T, dtype=np.int32)
        begins = t // config.local_block * config.local_block
        first = begins if first is None else np.maximum(begins, first, dtype=np.int32)
'''),
    ],
    "engines/reference.py": [
        ('    "sliding_window"', '    "local_block": (0, 2),\n    "sliding_window"'),
    ],
}  # fmt: skip
LION = {
    "training/optim.py": [
        ("class AdamW:", '''class Lion:
    """Chen et al. 2023: the sign of a mean of gradients is the step. `v` stays zero."""

    def __init__(
        self, weights: Weights, beta1: float = BETA1, beta2: float = BETA2, eps: float = EPS,
        weight_decay: float = WEIGHT_DECAY, clip_norm: float = CLIP_NORM,
    ) -> None:  # fmt: skip
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay, self.clip_norm = weight_decay, clip_norm
        self.m, self.v = weights.zeros_like(), weights.zeros_like()

    def update(self, weights, gradients, lr, number, part=slice(None)):
        """Change `weights` in place; matrices decay."""
        m, dw = self.m.flat[part], gradients.flat[part]
        decay = weights.zeros_like()
        for name, w in weights.items():
            decay[name][...] = self.weight_decay * w if w.ndim > 1 else 0
        step = np.sign(self.beta1 * m + (1 - self.beta1) * dw) + decay.flat[part]
        weights.flat[part] -= lr * step
        m[...] = self.beta2 * m + (1 - self.beta2) * dw


class AdamW:'''),
        ("# %% sec-train-schedule\n@njit", '''for _name in ("clip", "squares", "limit", "peak"):
    setattr(Lion, _name, getattr(AdamW, _name))


# %% sec-train-schedule
@njit'''),
    ],
    "training/run.py": [
        ('OPTIMIZERS = {"adamw"', 'OPTIMIZERS = {"lion": optim.Lion, "adamw"'),
    ],
}  # fmt: skip
VARIANTS = {
    "an activation": RELU, "a number": SCALE, "a mask": BLOCKS, "an optimizer": LION
}

COMMON = '''
from dataclasses import replace
from pathlib import Path
import numpy as np
import nanoeuler as ne
from nanoeuler.checks import gradcheck
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.gpu.decode.decoder import Decoding, check_model
from nanoeuler.engines.gpu.step.precision import BF16
from nanoeuler.engines.gpu.step.recording import Machine, Rules, record_step
from nanoeuler.engines.gpu.step.stepper import CudaStepper
from nanoeuler.engines.registry import make_stepper
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import EngineReader
from nanoeuler.model.transformer import forward, loss_and_gradients
from nanoeuler.model.weights import initialise
from nanoeuler.planning import counts
from nanoeuler.training import optim
from slopes import slopes

assert Path(ne.__file__).is_relative_to(Path.cwd()), ne.__file__
MODEL = ne.ModelConfig(vocab_size=64, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, hidden=64,
                       context=16, n_predict=1)
TOKENS = np.random.default_rng(0).integers(64, size=(4, 16))
AIMS = np.roll(TOKENS, -1, axis=1)[..., None]


def learned(engine, config, Optimizer=optim.AdamW, lr=1e-2, steps=10):
    """Mean losses of steps on one batch, and the weights after them."""
    w = initialise(config, 0)
    stepper, losses = make_stepper(engine, w, Optimizer(w), threads=1), []
    for number in range(1, steps + 1):
        for taken in stepper.step(TOKENS, AIMS, lr, number):
            losses.append(taken.sums[0] / TOKENS.size)
    return np.array(losses), w


def trains(config, alike=True, **how):
    """On both engines: the loss falls by a nat and more, alike in its digits, or in the first."""
    by = {engine: learned(engine, config, **how) for engine in ("reference", "cpu")}
    for losses, _ in by.values():
        assert losses[0] - losses[-1] > 1, losses
    # A float32 sum of 64 terms is off by at most 64 roundings, and ten steps make ten of these.
    # Weights that differ differ in their gradients too: at most as much again (seen: a tenth).
    within = 2 * 10 * 64 * 2.0**-24
    assert not alike or np.allclose(by["reference"][0], by["cpu"][0], rtol=within), by
    assert np.allclose(by["reference"][0][0], by["cpu"][0][0], rtol=1e-6)
    return by["cpu"]


def refused(words, *calls):
    for call in calls:
        try:
            call()
        except UserError as error:
            assert words in str(error), error
        else:
            raise SystemExit(f"not refused: {words}")


def switched(name, value):
    """All that a new value of a switch has to stand."""
    shared = dict(position="learned", norm="layer", bias=True, n_layers=4, repeat=2)
    for more in {}, {"integrator": "heun", **shared}:
        problem = gradcheck.tiny_problem(replace(gradcheck.TINIEST, **more, **{name: value}))
        derived = gradcheck.derived_gradient(problem)
        for slope in slopes(problem, gradcheck.reference, 2):
            assert slope.error(derived) < 1e-11  # as in test_backward.py
    config = replace(MODEL, **{name: value})
    _, w = trains(config)
    _, plain = learned("cpu", MODEL)
    if w.flat.shape == plain.flat.shape:
        assert np.abs(w.flat - plain.flat).max() > 1e-3  # it is another model
    text = TOKENS[:1]
    whole = forward(gradcheck.reference, config, w, text)[0][0, :, 0]
    reader = EngineReader(config, w)
    for t in range(16):
        got = reader.read([text[0, t : t + 1].tolist()], [t])[0, 0, 0]
        assert np.abs(got - whole[t]).max() < 1e-4 * np.abs(whole).max()
    rules = Rules(1.0, 0.9, 0.98, 1e-8)
    refused(f"expected {name} ",
            lambda: CpuReader(config, w),
            lambda: check_model(Decoding(config)),
            lambda: record_step(config, 2, 16, Machine((9, 0), 132), BF16, rules),
            lambda: counts.operations(config, 2, 4))
'''
SCRIPTS = {
    "an activation": "switched('mlp', 'relu')",
    "a number": "switched('embedding_scale', 8.0)",
    "a mask": '''
switched("local_block", 2)
from nanoeuler.model.config import first_keys
begins = np.array([[0, 0, 0, 0, 4, 4, 4]])
blocks = first_keys(replace(MODEL, local_block=3, sliding_window=2), 7, begins)
assert blocks.tolist() == [[0, 0, 1, 3, 4, 4, 6]], blocks
''',
    "an optimizer": '''
# A step by signs is another one where an element is nearly zero: the second gradient is another
# one, then, and no bound holds for ten steps. After one the engines are apart where the gradient is
# within its roundings alone: a sum of 64 terms, behind a dozen of those, one after the other.
trains(MODEL, alike=False, Optimizer=optim.Lion, lr=3e-3)
first = [learned(engine, MODEL, optim.Lion, 3e-3, 1)[1].flat for engine in ("reference", "cpu")]
w = initialise(MODEL, 0)
dw = w.zeros_like()
loss_and_gradients(gradcheck.reference, MODEL, w, TOKENS, AIMS, np.ones(1, np.float32), dw)
apart = np.abs(first[0] - first[1]) > 3e-3
near = 13 * 64 * 2.0**-24 * np.abs(dw.flat).max()
assert np.abs(dw.flat[apart]).max(initial=0) <= near, np.abs(dw.flat[apart]).max()
assert apart.sum() < 0.01 * apart.size
w = initialise(MODEL, 0)
before, dw, lion = w.flat.copy(), w.zeros_like(), optim.Lion(w, weight_decay=0.0)
dw.flat[...] = np.random.default_rng(0).standard_normal(w.flat.size)
lion.update(w, dw, 0.5, 1)
assert np.allclose(before - w.flat, 0.5 * np.sign(dw.flat), atol=1e-6)
refused("expected the optimizer AdamW for training on a GPU, got Lion",
        lambda: CudaStepper(w, lion, None))
Path("text.txt").write_text("The river goes down to the sea. " * 60)
tiny = replace(MODEL, vocab_size=260, dim=16)
for name in ("adamw", "lion"):
    settings = ne.Settings(steps=3, batch_size=2, optimizer=name)
    model = ne.train("text.txt", out=name, config=tiny, settings=settings, engine="cpu")
    again = ne.load(name)
    assert np.array_equal(again.weights.flat, model.weights.flat)
''',
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A copy of the package as it is, which trains, and which numba has compiled."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(PACKAGE, folder / "nanoeuler")
    done = run(folder, "trains(MODEL)")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def variant(compiled, folder, edits):
    """A copy of the package in `folder` with the edits; the names of files that are changed."""
    copy = folder / "nanoeuler"
    shutil.copytree(compiled / "nanoeuler", copy)  # with the times of files, which numba looks at
    for name, replacements in edits.items():
        text = (copy / name).read_text(encoding="utf-8")
        for old, new in replacements:
            assert text.count(old) == 1, f"{name}: {old!r} occurs {text.count(old)} times"
            text = text.replace(old, new)
        (copy / name).write_text(text, encoding="utf-8")
    sources = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {str(name) for name in sources
            if (copy / name).read_bytes() != (PACKAGE / name).read_bytes()}  # fmt: skip


def named(kind):
    """The files that CONTRIBUTING.md's table names for this kind of variant."""
    (line,) = re.findall(rf"^\| {re.escape(kind)}\b.*", RECIPES, re.MULTILINE)
    return set(re.findall(r"`([\w/]+\.py)`", line.split("|")[2]))


def run(folder, script):
    helpers = Path(__file__).parent / "helpers"
    known = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{helpers}"}
    code = COMMON + script
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=known,
                          capture_output=True, text=True, check=False)  # fmt: skip


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_variant_touches_three_files_and_works(kind, compiled, tmp_path):
    changed = variant(compiled, tmp_path, VARIANTS[kind])
    assert changed == named(kind) and len(changed) <= MOST
    done = run(tmp_path, SCRIPTS[kind])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_window_is_one_function_and_names_in_lists():
    """Whoever wants to add a mask finds the window, which is one already, in few places."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")
             if re.search(r"\bsliding_window\b", path.read_text(encoding="utf-8"))}  # fmt: skip
    lists = {"engines/reference.py", "engines/cpu/decode.py", "engines/gpu/step/engine.py",
             "engines/gpu/step/recording.py", "engines/gpu/decode/decoder.py",
             "planning/counts.py"}  # fmt: skip
    others = {"cli/flags.py", "checks/gradcheck.py", "model/config.py"}
    others |= {f"interop/{name}.py" for name in ("families", "gguf_model", "llama2c")}  # fields
    assert found == lists | others


# Mistakes of a variant that its script has to see: it would prove nothing if it did not.
WRONG = {
    "an activation": ("engines/cpu/engine.py", "np.multiply(u > 0, dh,", "np.multiply(u > -1, dh,"),
    "a number": ("engines/interface.py", "dx = self.scale(dx, config.embedding_scale)", "pass"),
    "a mask": ("model/config.py", "t // config.local_block * config.local_block", "0 * t"),
    "an optimizer": ("training/optim.py", "np.sign(self.beta1 * m +", "(self.beta1 * m +"),
}


@pytest.mark.long  # each is a process, and the variants that are right are in the short tier
@pytest.mark.parametrize("kind", WRONG)
def test_a_variant_that_is_wrong_is_seen(kind, compiled, tmp_path):
    variant(compiled, tmp_path, VARIANTS[kind])
    name, old, new = WRONG[kind]
    path = tmp_path / "nanoeuler" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert run(tmp_path, SCRIPTS[kind]).returncode != 0


@pytest.mark.long
@pytest.mark.parametrize("program", ["engines/reference.py", "engines/cpu/engine.py"])
def test_an_activation_without_code_is_refused_by_name(program, compiled, tmp_path):
    """The word alone, as somebody may write who has forgotten the rest."""
    edits = {name: RELU[name] for name in RELU if name != program}
    variant(compiled, tmp_path, edits)
    done = run(tmp_path, SCRIPTS["an activation"])
    refusal = "UserError: expected mlp swiglu or gelu or gelu_exact or relu2 for "
    assert refusal in done.stderr, done.stderr
