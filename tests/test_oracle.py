"""The model against one that shares none of its code: PyTorch's functions and PyTorch's autograd.

What chapters 4 to 6 compute is written here a second time, in float64, and by other means where
there are any: rotary positions as complex numbers, attention by PyTorch's own function, integrators
in full, the loss as a weighted sum of means. No gradient is written down: autograd finds them.
`python tests/test_oracle.py` prints the largest differences.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from crossings import KNOWN

from nanoeuler.checks.derivatives import relative_error
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.model.config import CHOICES, PRESETS, ModelConfig
from nanoeuler.model.transformer import head_weights, loss_and_gradients, loss_scale
from nanoeuler.model.weights import Weights

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
F = torch.nn.functional
reference = ReferenceEngine()

# Float64 rounds by 1.1e-16. A few dozen sums, one after the other, each of at most some hundred
# terms of mixed sign and in another order, come to 1e-14; four thousand roundings are allowed, and
# the last test shows that a step which is a millionth too long is far outside.
TOLERANCE = 4096 * 2.0**-53
EPSILON = 1e-5  # under the root of both norms, in Llama 2 and in GPT-2


class Oracle:
    """The architecture of a config, of weights (name -> tensor) that PyTorch differentiates."""

    def __init__(self, config, w):
        self.config, self.w = config, w

    def linear(self, name, x):
        """x (..., I) times the matrix (I, O) of this name; nn.Linear keeps it as (O, I)."""
        return F.linear(x, self.w[name].T, self.w.get(f"{name}_bias"))

    def norm(self, name, x):
        gain = self.w[name]
        if self.config.norm == "layer":
            return F.layer_norm(x, gain.shape, gain, self.w.get(f"{name}_bias"), EPSILON)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * gain

    def rotated(self, x):
        """x (B, heads, T, D): channels i and i + D/2 are one complex number, turned."""
        T, D = x.shape[2:]
        speed = 10000.0 ** (-torch.arange(0, D, 2).double() / D)
        turn = torch.exp(1j * torch.arange(T).double()[:, None] * speed)
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    def attention(self, block, x):
        c, heads = self.config, self.linear(f"{block}.wqkv", self.norm(f"{block}.norm1", x))
        heads = heads.unflatten(-1, (-1, c.head_dim)).transpose(1, 2)  # (B, H + 2G, T, D)
        q, k, v = heads.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], 1)
        if c.position == "rope":
            q, k = (self.rotated(self.head_norm(block, *each)) for each in (("q", q), ("k", k)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(f"{block}.wo", y.transpose(1, 2).flatten(2))

    def head_norm(self, block, name, x):
        if not self.config.qk_norm:
            return x
        return F.rms_norm(x, x.shape[-1:], self.w[f"{block}.{name}_norm"], EPSILON)

    def mlp(self, block, x):
        u = self.linear(f"{block}.w_up", self.norm(f"{block}.norm2", x))
        if self.config.mlp == "gelu":
            return self.linear(f"{block}.w_down", F.gelu(u, approximate="tanh"))
        if self.config.mlp == "relu2":
            return self.linear(f"{block}.w_down", F.relu(u).square())
        gate, up = u.chunk(2, -1)
        return self.linear(f"{block}.w_down", F.silu(gate) * up)

    def step(self, f, x):
        h, k1 = self.config.step_size, f(x)
        if self.config.integrator == "euler":
            return x + h * k1
        if self.config.integrator == "heun":
            return x + h * (k1 + f(x + h * k1)) / 2
        k2 = f(x + h * k1 / 2)
        k3 = f(x + h * k2 / 2)
        return x + h * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3)) / 6

    def logits(self, tokens):
        """(B, T, K, V) after each of tokens (B, T)."""
        c, x = self.config, F.embedding(tokens, self.w["embedding"])
        if c.position == "learned":
            x = x + self.w["positions"][: tokens.shape[1]]
        for layer in range(c.n_layers):
            block = f"block.{layer // c.repeat}"
            x = self.step(lambda x: self.attention(block, x), x)  # noqa: B023 called at once
            x = self.step(lambda x: self.mlp(block, x), x)  # noqa: B023
        n = self.norm("norm", x)
        z = F.linear(n, self.w["embedding"]) if c.tied else self.linear("output", n)
        return z.unflatten(-1, (c.n_predict, c.vocab_size))

    def losses(self, tokens, targets):
        """The sums (K,) over counted targets (B, T, K), and the loss that training differentiates.

        That is the mean of the next token and, with weight 0.3 each, the means of those after it.
        """
        heads = list(zip(self.logits(tokens).unbind(2), targets.unbind(2), strict=True))

        def per_head(how):
            return [F.cross_entropy(z.flatten(0, 1), t.flatten(), ignore_index=-1, reduction=how)
                    for z, t in heads]  # fmt: skip

        means = per_head("mean")
        return torch.stack(per_head("sum")), means[0] + 0.3 * sum(means[1:])


def drawn(config):
    """Weights, tokens and targets of a batch; no gain is 1 and no bias 0, to hide behind."""
    rng, w = np.random.default_rng(0), Weights(config, np.float64)
    for name, x in w.items():
        deviation = {1: 0.3, 2: 1 / np.sqrt(x.shape[0])}[x.ndim] if name != "embedding" else 0.5
        x[...] = deviation * rng.standard_normal(x.shape)
        if x.ndim == 1 and not name.endswith("_bias"):
            x += 1
    tokens = rng.integers(config.vocab_size, size=(3, config.context - 1))  # T below the context
    targets = rng.integers(config.vocab_size, size=(*tokens.shape, config.n_predict))
    targets[rng.random(targets.shape) < 0.2] = -1
    return w, tokens, targets


def differences(config, other=None):
    """Name -> relative error of the loss's sums and of each gradient, reference against oracle.

    The oracle has the architecture `other`, if given.
    """
    w, tokens, targets = drawn(config)
    dw, scale = w.zeros_like(), loss_scale(targets, head_weights(config.n_predict))
    sums = loss_and_gradients(reference, config, w, tokens, targets, scale, dw)

    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in w.items()}
    oracle = Oracle(other or config, leaves)
    their_sums, loss = oracle.losses(torch.tensor(tokens), torch.tensor(targets))
    loss.backward()
    return {
        "sums": relative_error(sums, their_sums.detach().numpy()),
        **{name: relative_error(dw[name], x.grad.numpy()) for name, x in leaves.items()},
    }


SCALED = {  # heads, groups, switches and K stay those of the preset; widths, layers, texts shrink
    "small": dict(vocab_size=61, dim=32, hidden=86, n_layers=3, context=14),
    "small-modern": dict(vocab_size=71, dim=32, hidden=86, n_layers=3, context=14),
    "euler-10m": dict(vocab_size=67, dim=48, hidden=128, n_layers=3, context=14),
    "euler-116m": dict(vocab_size=73, dim=48, hidden=128, n_layers=3, context=14),
    "gpt2-124m": dict(vocab_size=97, dim=48, hidden=192, n_layers=3, context=14),
}
TINY = ModelConfig(
    vocab_size=13, dim=12, n_layers=2, n_heads=6, n_kv_heads=2, hidden=7, context=6, n_predict=1
)  # heads are two channels wide: one pair to turn
SWITCHES = {name: KNOWN[name] for name in ("norm", "position", "mlp", "bias", "tied")}


def presets():
    """(name, config) of each preset, scaled down, by each integrator."""
    assert SCALED.keys() == PRESETS.keys(), "a preset without an oracle"
    for name, integrator in product(SCALED, CHOICES["integrator"]):
        h = 1.0 if integrator == "euler" else 0.7
        changes = SCALED[name] | {"integrator": integrator, "step_size": h}
        yield f"{name} by {integrator}", replace(PRESETS[name], **changes)


def combinations():
    """(name, config) of all settings of the switches, each by each integrator."""
    for *values, integrator in product(*SWITCHES.values(), CHOICES["integrator"]):
        changes = dict(zip(SWITCHES, values, strict=True)) | {"integrator": integrator}
        yield " ".join(f"{n}={x}" for n, x in changes.items()), replace(TINY, **changes)


def others():
    """(name, config) of what the switches leave out: steps, shared blocks, heads that predict."""
    yield "step size 0.3", replace(TINY, step_size=0.3)
    yield "heun, h 0.5, shared", replace(TINY, integrator="heun", step_size=0.5, repeat=2)
    yield "shared by pairs", replace(TINY, n_layers=4, repeat=2, norm="layer", bias=True)
    yield "three predictions", replace(TINY, n_predict=3)
    yield "one key for all", replace(TINY, n_kv_heads=1)


CASES = {**dict(presets()), **dict(combinations()), **dict(others())}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_the_reference_equals_pytorch(config):
    for name, error in differences(config).items():
        assert error <= TOLERANCE, name


@pytest.mark.parametrize(
    "change", [{"norm": "layer"}, {"integrator": "heun"}, {"step_size": 1 + 1e-6}], ids=str
)
def test_another_architecture_is_noticed(change):
    """What has the same tensors and is not the same: a step too long by a millionth, for one."""
    errors = differences(TINY, other=replace(TINY, **change))
    assert min(errors.values()) > 1000 * TOLERANCE


if __name__ == "__main__":
    for kind in (presets, combinations, others):
        worst = max((e, case, name) for case, c in kind() for name, e in differences(c).items())
        print(f"{kind.__name__:13} {worst[0]:.1e}  {worst[2]}  ({worst[1]})")
