"""The model and its training step in PyTorch, as one writes them there: a peer of bench/cpu.py."""

import torch
import torch.nn.functional as F
from torch import nn

from nanoeuler.model.layers import RMSNORM_EPS, ROPE_BASE
from nanoeuler.training.optim import BETA1, BETA2, CLIP_NORM, EPS, WEIGHT_DECAY


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each added to the stream."""

    def __init__(self, config):
        super().__init__()
        C, D, hidden = config.dim, config.head_dim, config.hidden
        self.H, self.G, self.D = config.n_heads, config.n_kv_heads, D
        self.norm1 = nn.RMSNorm(C, eps=RMSNORM_EPS)
        self.wqkv = nn.Linear(C, (self.H + 2 * self.G) * D, bias=False)
        self.wo = nn.Linear(self.H * D, C, bias=False)
        self.norm2 = nn.RMSNorm(C, eps=RMSNORM_EPS)
        self.w_up = nn.Linear(C, 2 * hidden, bias=False)
        self.w_down = nn.Linear(hidden, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        heads = self.wqkv(self.norm1(x)).view(B, T, self.H + 2 * self.G, self.D).transpose(1, 2)
        turned, v = heads.split([self.H + self.G, self.G], 1)
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        q, k = turned.split([self.H, self.G], 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.w_up(self.norm2(x)).chunk(2, -1)
        return x + self.w_down(F.silu(gate) * up)


class Model(nn.Module):
    """The model with our default architecture; called, it returns the loss."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.block = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=RMSNORM_EPS)
        self.output = nn.Linear(config.dim, config.n_predict * config.vocab_size, bias=False)
        half = config.head_dim // 2
        angle = torch.arange(config.context)[:, None] * ROPE_BASE ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets, scale):
        """The loss of tokens (B, T), targets (B, T, K), scale (K,): `loss_and_gradients`'s."""
        x = self.embedding(tokens)
        for block in self.block:
            x = block(x, self.cos, self.sin)
        logits = self.output(self.norm(x)).view(targets.numel(), -1)
        each = F.cross_entropy(logits, targets.view(-1), reduction="none")
        return (each.view(-1, len(scale)) * scale).sum()


def ours(name, tensor):
    """Our name of a parameter, and its elements in our layout: a linear layer's is (in, out)."""
    linear = tensor.ndim == 2 and name != "embedding.weight"
    return name.removesuffix(".weight"), tensor.T if linear else tensor


def training(compiled, threads, config, w, tokens, targets, scale):
    """(evaluate, step): loss and gradients under our names at weights w, and a training step.

    Compiled, a second compilation (another shape, a guard that fails) is an error.
    """
    torch.set_num_threads(threads)
    model = Model(config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            name, x = ours(name, x)
            x.copy_(torch.from_numpy(w[name]))
    batch = torch.tensor(tokens).long(), torch.tensor(targets).long()
    batch = *batch, torch.tensor(scale, dtype=torch.float32)
    torch._dynamo.config.error_on_recompile = True
    loss = torch.compile(model) if compiled else model
    groups = [{"params": [x for x in model.parameters() if x.ndim == 2]},
              {"params": [x for x in model.parameters() if x.ndim == 1], "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(BETA1, BETA2), eps=EPS,
                                  weight_decay=WEIGHT_DECAY, fused=True)  # fmt: skip

    def evaluate():
        value = loss(*batch)
        value.backward()
        gradients = dict(ours(name, x.grad.numpy()) for name, x in model.named_parameters())
        optimizer.zero_grad(set_to_none=True)
        return value.item(), gradients

    def step():
        loss(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return evaluate, step
