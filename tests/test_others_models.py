"""The switches that other people's models need, against loops that share no code with the model.

A model with all of them at once: an epsilon, a base, Llama 3's scaling, a head width of its own,
biases on queries, keys and values, norms of queries and keys, GELU by the integral, and a pattern
of windows. Then each with a cache, and planted mistakes.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from head_gains import TermsOfGains
from mutants import Mutant, load
from slopes import slopes

from nanoeuler.checks import gradcheck
from nanoeuler.engines.cpu import elementwise
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.cpu.engine import CpuEngine, FusedEngine
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.inference.decoder import EngineReader
from nanoeuler.model import layers
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward, loss_and_gradients
from nanoeuler.model.weights import Weights

ALL = ModelConfig(
    vocab_size=11, dim=10, n_layers=3, n_heads=4, n_kv_heads=2, hidden=7, context=12, n_predict=1,
    norm_eps=0.03, rope_base=50.0, rope_scaling="llama3", rope_factor=8.0, rope_original_context=20,
    head_width=6, qkv_bias=True, qk_norm=True, mlp="gelu_exact", sliding_window=3,
    window_pattern="SSL",
)  # fmt: skip
LINEAR = replace(
    ALL, rope_scaling="linear", rope_original_context=8192, norm="layer", window_pattern="LS"
)
IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


def weights(config, dtype=np.float64):
    w, drawn = Weights(config, dtype), np.random.default_rng(0)
    for name, tensor in w.items():
        tensor[...] = 0.5 * drawn.standard_normal(tensor.shape)
        if tensor.ndim == 1 and not name.endswith("_bias"):
            tensor += 1
    return w


def normed(x, gain, eps, centred=False):
    """The norm of one vector, by Python's own numbers."""
    x = [float(each) for each in x]
    mean = sum(x) / len(x) if centred else 0.0
    root = math.sqrt(sum((each - mean) ** 2 for each in x) / len(x) + eps)
    return np.array([g * (each - mean) / root for g, each in zip(gain, x, strict=True)])


def speed(config, i):
    """The angle of pair i in a position, by wave lengths, as Llama 3.1's own rule is told."""
    theta = config.rope_base ** (-2 * i / config.head_dim)
    if config.rope_scaling == "linear":
        return theta / config.rope_factor
    length, old = 2 * math.pi / theta, config.rope_original_context
    if length < old / config.rope_high_freq_factor:
        return theta
    if length > old / config.rope_low_freq_factor:
        return theta / config.rope_factor
    span = config.rope_high_freq_factor - config.rope_low_freq_factor
    smooth = (old / length - config.rope_low_freq_factor) / span
    return (1 - smooth) * theta / config.rope_factor + smooth * theta


def turned(config, x, t):
    """A head at position t, its pairs as complex numbers."""
    half = config.head_dim // 2
    z = [complex(x[i], x[i + half]) * np.exp(1j * t * speed(config, i)) for i in range(half)]
    return np.array([each.real for each in z] + [each.imag for each in z])


def attended(config, b, layer, n):
    """What attention adds to each position, by loops over queries and keys."""
    T, H, G, D = len(n), config.n_heads, config.n_kv_heads, config.head_dim
    heads = (n @ b.wqkv + b.wqkv_bias).reshape(T, H + 2 * G, D)
    letters = config.window_pattern * config.n_layers
    window = config.sliding_window if letters[layer] == "S" else T
    out = np.zeros((T, H, D))
    for t in range(T):
        for h in range(H):
            q = turned(config, normed(heads[t, h], b.q_norm, config.norm_eps), t)
            scores, values = [], []
            for s in range(max(0, t - window + 1), t + 1):
                k = normed(heads[s, H + h // (H // G)], b.k_norm, config.norm_eps)
                scores.append(q @ turned(config, k, s) / math.sqrt(D))
                values.append(heads[s, H + G + h // (H // G)])
            p = np.exp(np.array(scores) - max(scores))
            out[t, h] = p / p.sum() @ np.array(values)
    return out.reshape(T, H * D) @ b.wo


def by_loops(config, w):
    """The logits (T, V) of IDS."""
    x, centred = w["embedding"][IDS], config.norm == "layer"
    for i, b in enumerate(w.blocks):
        n = np.array([normed(row, b.norm1, config.norm_eps, centred) for row in x])
        x = x + attended(config, b, i, n)
        n = np.array([normed(row, b.norm2, config.norm_eps, centred) for row in x])
        u = n @ b.w_up
        share = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))(u)
        x = x + (u * share) @ b.w_down
    n = np.array([normed(row, w["norm"], config.norm_eps, centred) for row in x])
    return n @ w["output"]


def is_by_loops(config, engine):
    w = weights(config)
    logits = forward(engine, config, w, IDS[None])[0][0, :, 0]
    wanted = by_loops(config, w)
    # Sums of some dozen terms one after another through three layers, in float64.
    assert np.abs(logits - wanted).max() <= 2**12 * 2.0**-53 * np.abs(wanted).max()


@pytest.mark.parametrize("config", [ALL, LINEAR], ids=["llama3", "linear"])
def test_the_reference_is_what_loops_say(config):
    is_by_loops(config, ReferenceEngine())


def cached(config, engine=None):
    """A cache, cut by cut, gives the whole pass in float64."""
    w = weights(config)
    whole = forward(engine or ReferenceEngine(), config, w, IDS[None])[0][0, :, 0]
    reader, at = EngineReader(config, w, engine), 0
    for n in (1, 4, 1, 1, 3):
        seen = reader.read([IDS[at : at + n].tolist()], [at], n)[0, :, 0]
        assert np.abs(seen - whole[at : at + n]).max() <= 1e-12 * np.abs(whole).max()
        at += n


@pytest.mark.parametrize("config", [ALL, LINEAR], ids=["llama3", "linear"])
def test_a_cache_sees_what_the_whole_pass_does(config):
    cached(config)


def near(ours, config, w):
    """Logits in float32 are those of float64 but for roundings: as in tests/test_switches.py."""
    exact = Weights(config, np.float64, np.float64(w.flat))
    theirs, single = (forward(ReferenceEngine(), config, x, IDS[None])[0][0, :, 0]
                      for x in (exact, w))  # fmt: skip
    most = 4 * np.abs(single - theirs).max() + 8 * np.finfo(np.float32).eps * np.abs(theirs).max()
    assert np.abs(ours - theirs).max() <= most


@pytest.mark.parametrize("config", [ALL, LINEAR], ids=["llama3", "linear"])
def test_the_engines_of_a_cpu_agree(config):
    w = weights(config, np.float32)
    for engine in FusedEngine(), CpuEngine():
        near(forward(engine, config, w, IDS[None])[0][0, :, 0], config, w)
    reader, at, seen = CpuReader(config, w, threads=2), 0, []
    for n in (1, 4, 1, 1, 3):
        seen += [reader.read([IDS[at : at + n].tolist()], [at], n)[0, :, 0].copy()]
        at += n
    near(np.concatenate(seen), config, w)


@pytest.mark.parametrize("engine", [FusedEngine, CpuEngine])
@pytest.mark.parametrize("config", [ALL, LINEAR], ids=["llama3", "linear"])
def test_gradients_on_a_cpu(config, engine):
    w = weights(config, np.float32)
    exact = Weights(config, np.float64, np.float64(w.flat))
    batch = IDS[None, :-1], IDS[None, 1:, None], np.ones(1)
    found, whole = [], TermsOfGains()
    for made, of in (whole, exact), (ReferenceEngine(), w), (engine(), w):
        found.append(of.zeros_like())
        loss_and_gradients(made, config, of, *batch, found[-1])
    for name, dw in found[0].items():
        off = [np.linalg.norm(other[name] - dw) for other in found[1:]]
        # Gains of heads are sums over positions and heads whose terms cancel: theirs is the size.
        size = whole.of(dw) or np.linalg.norm(dw)
        assert off[1] <= 3 * off[0] + 8 * 2.0**-24 * size, name


def gradient_is_the_slope(engine=gradcheck.reference):
    problem = gradcheck.tiny_problem(replace(ALL, n_layers=2, context=4, window_pattern="SL"))
    derived = gradcheck.derived_gradient(problem, engine)
    for slope in slopes(problem, engine, 3):
        assert slope.error(derived) < 1e-11


def test_the_gradient_is_the_slope():
    gradient_is_the_slope()


def test_erf_and_its_float32():
    z = np.linspace(-8, 8, 4001)
    exact = np.array([math.erf(each) for each in z])
    assert np.abs(layers.erf(z) - exact).max() < 64 * 2.0**-53
    slope = layers.erf(z + 1e-30j).imag / 1e-30
    # A rounding of the slope's term i weighs |(2i + 1) / z - 2z|, times what later terms sum to: at
    # most 1. Of two of them in each of z^2 steps the squares add up to 8/3 z^4, and five times the
    # root of that, which one point in 10^5 may pass (Hoeffding 1963), is 8.2 z^2. Around the steps:
    # 16 roundings of numbers of at most 1.
    within = (8.2 * z * z + 16) * 2.0**-53
    assert (np.abs(slope - 2 / math.sqrt(math.pi) * np.exp(-z * z)) < within).all()
    assert layers.erf(np.float32([0.5, -7, np.inf])).dtype == np.float32
    assert np.isnan(layers.erf(np.array([np.nan]))).all()
    assert layers.erf(np.array([-np.inf, np.inf])).tolist() == [-1, 1]
    for u in np.float32([-9, -5, -1, 0, 1e-20, 0.3, 5, np.inf]):
        exact = 0.5 * math.erfc(-float(u) / math.sqrt(2))
        assert abs(elementwise.below(u) - exact) <= 8 * 2.0**-24 * max(exact, 1e-5)
    assert np.isnan(elementwise.below(np.float32(np.nan)))


# Planted mistakes: a module, a function, what is replaced by what, and the claim that sees it.
def engine_of(wrong, *names):
    """The reference engine with these methods of the wrong `Engine`."""
    methods = {name: getattr(wrong.Engine, name) for name in names}
    return type("Wrong", (ReferenceEngine,), methods)()


def loops_see(wrong, name):
    is_by_loops(ALL, engine_of(wrong, name))


def slopes_see(wrong, name):
    gradient_is_the_slope(engine_of(wrong, name))


def angles_see(wrong, name):
    for config in ALL, LINEAR:
        found = wrong.rope_angles(config.head_dim, config.angles)
        assert np.allclose(found, [speed(config, i) for i in range(config.head_dim // 2)], 1e-14)


def backward_sees(wrong, name):
    engine = ReferenceEngine()
    engine.gelu_exact_backward = wrong.gelu_exact_backward
    gradient_is_the_slope(engine)


def windows_see(wrong, name):
    config = wrong.ModelConfig(**vars(ALL))
    assert [config.in_layer(i).sliding_window for i in range(6)] == [3, 3, 0, 3, 3, 0]


INTERFACE = "engines.interface"
MISTAKES = {
    "one gain for both": (INTERFACE, "norm_heads", "gains[1]", "gains[0]", loops_see),
    "keys of other heads": (INTERFACE, "norm_heads", "heads[:, :, H : H + n_kv], gains",
                            "heads[:, :, H + n_kv :], gains", loops_see),
    "default epsilon in heads": (INTERFACE, "norm_heads", "gains[0], eps", "gains[0]", loops_see),
    "default epsilon": (INTERFACE, "move_norm", "self.rmsnorm(x, gain, config.norm_eps)",
                        "self.rmsnorm(x, gain)", loops_see),
    "normed after the turn": (INTERFACE, "attend", "if config.qk_norm:", "if False:", loops_see),
    "default angles": (INTERFACE, "attend", "D, config.angles)", "D)", loops_see),
    "default angles back": (INTERFACE, "attend_backward", "config.head_dim, config.angles)",
                            "config.head_dim)", slopes_see),
    "no way back through the norm": (INTERFACE, "attend_backward", "if config.qk_norm:",
                                     "if False:", slopes_see),
    "gradient of one gain": (INTERFACE, "norm_heads_backward", "dgains[i]", "dgains[0]",
                             slopes_see),
    "other gain": (INTERFACE, "norm_heads_backward", "gains[i], stats", "gains[0], stats",
                   slopes_see),
    "slower": ("model.layers", "rope_angles", "return theta / angles.factor",
               "return theta * angles.factor", angles_see),
    "from the high": ("model.layers", "rope_angles", "turns - angles.low", "turns - angles.high",
                      angles_see),
    "the other share": ("model.layers", "rope_angles", "share + (1 - share) / angles.factor",
                        "1 - share + share / angles.factor", angles_see),
    "radians for turns": ("model.layers", "rope_angles", "theta / (2 * np.pi)", "theta",
                          angles_see),
    "density": ("model.backward", "gelu_exact_backward", "-0.5 * u * u", "-u * u", backward_sees),
    "the letter after": ("model.config", "in_layer", "i % len", "(i + 1) % len", windows_see),
    "L has the window": ("model.config", "_without_pattern", 'letter == "S"', 'letter == "L"',
                         windows_see),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen(name):
    module, function, old, new, claim = MISTAKES[name]
    wrong = load(Mutant(module, function, name, old, new))
    with pytest.raises(AssertionError):
        claim(wrong, function)
