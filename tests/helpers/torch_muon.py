"""Muon in PyTorch, by its public recipe (Jordan and others, 2024): a peer of the benchmarks.

Nesterov momentum, five Newton-Schulz steps in bf16, batched over matrices of one shape; AdamW for
embeddings, output and vectors. Joint matrices are cut into queries, keys and values, gate and up,
as the recipe has them apart.
"""

from collections import defaultdict

import torch

COEFFICIENTS, ROUNDS, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 0.95


def orthogonalize(x):
    """About U V^T of each x = U S V^T (n, O, I), in bf16."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16()
    y = y.mT if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        s = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(s, s, s, beta=b, alpha=c), y, beta=a)
    return y.mT.contiguous() if tall else y


def orthogonalize_all(groups):
    """The same of each group of one shape: one function, so that it's compiled once."""
    return [orthogonalize(x) for x in groups]


def cuts(config, name):
    """The numbers of rows (outputs) of what a matrix of a block is joined of."""
    D, F = config.head_dim, config.hidden
    if name.endswith("wqkv.weight"):
        return [config.n_heads * D, config.n_kv_heads * D, config.n_kv_heads * D]
    return [F, F] if name.endswith("w_up.weight") and config.mlp == "swiglu" else None


class Muon:
    """The hidden matrices of `torch_peer.Model`, with their momentum. decay: decoupled."""

    def __init__(self, model, config, decay, compiled):
        self.decay, self.parts = decay, defaultdict(list)  # shape -> (parameter, its rows)
        for name, x in model.named_parameters():
            if name.startswith("block.") and x.ndim == 2:
                begin = 0
                for rows in cuts(config, name) or [len(x)]:
                    self.parts[rows, x.shape[1]].append((x, slice(begin, begin + rows)))
                    begin += rows
        self.buffers = {
            shape: torch.zeros((len(parts), *shape), device=next(model.parameters()).device)
            for shape, parts in self.parts.items()
        }
        self.turn = torch.compile(orthogonalize_all) if compiled else orthogonalize_all

    @property
    def learned(self):
        """The parameters that are Muon's, so not AdamW's: their ids."""
        return {id(x) for parts in self.parts.values() for x, _ in parts}

    @torch.no_grad()
    def step(self, rate):
        """A step by the gradients, which it may change."""
        mixed = []
        for shape, parts in self.parts.items():
            g, m = torch.stack([x.grad[rows] for x, rows in parts]), self.buffers[shape]
            m.lerp_(g, 1 - MOMENTUM)
            mixed.append(g.lerp_(m, MOMENTUM))
        for (shape, parts), turned in zip(self.parts.items(), self.turn(mixed), strict=True):
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            these = [x.data[rows] for x, rows in parts]
            torch._foreach_mul_(these, 1 - rate * self.decay)
            torch._foreach_add_(these, [*turned.float().unbind()], alpha=-rate * scale)
