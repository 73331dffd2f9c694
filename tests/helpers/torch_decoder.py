"""Decoding with a KV cache in PyTorch, eager, as one writes it there: a peer of the benchmarks.

Every architecture of ours that steps by Euler with h = 1 and shares no blocks.
"""

import torch
import torch.nn.functional as F

from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, rope_tables
from nanoeuler.model.weights import output_matrix


class TorchDecoder:
    """One text: `read(token)` returns the logits (V,) after it, as a tensor."""

    def __init__(self, config, weights, threads=1):
        torch.set_num_threads(threads)
        if (config.integrator, config.step_size, config.repeat) != ("euler", 1.0, 1):
            raise ValueError(f"PyTorch has no decoder for {config}")
        self.config, self.tokens = config, 0

        def tensor(x, turned=False):  # a linear map is stored (out, in) there
            return None if x is None else torch.tensor(x.T if turned else x).contiguous()

        self.blocks = [
            {name: tensor(getattr(b, name), name in ("wqkv", "wo", "w_up", "w_down"))
             for name in b._fields}
            for b in weights.blocks
        ]  # fmt: skip
        names = ("embedding", "positions", "norm", "norm_bias")
        self.rest = {name: tensor(weights.get(name)) for name in names}
        output = output_matrix(config, weights)[:, : config.vocab_size]
        self.output = self.rest["embedding"] if config.tied else tensor(output, True)
        G, D = config.n_kv_heads, config.head_dim
        if config.position == "rope":
            tables = (torch.tensor(x, dtype=torch.float32) for x in rope_tables(config.context, D))
            self.cos, self.sin = tables
        shape = config.n_layers, 1, G, config.context, D
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def norm(self, x, gain, bias):
        if self.config.norm == "rms":
            return F.rms_norm(x, (self.config.dim,), gain, RMSNORM_EPS)
        return F.layer_norm(x, (self.config.dim,), gain, bias, LAYERNORM_EPS)

    def attend(self, i, b, n):
        c, t = self.config, self.tokens
        H, G, D = c.n_heads, c.n_kv_heads, c.head_dim
        heads = F.linear(n, b["wqkv"], b["wqkv_bias"]).view(1, 1, H + 2 * G, D).transpose(1, 2)
        turned, v = heads.split([H + G, G], 1)
        if c.position == "rope":
            one, two = turned.chunk(2, -1)
            cos, sin = self.cos[t], self.sin[t]
            turned = torch.cat([one * cos - two * sin, one * sin + two * cos], -1)
        q, k = turned.split([H, G], 1)
        self.keys[i, :, :, t], self.values[i, :, :, t] = k[:, :, 0], v[:, :, 0]
        k, v = self.keys[i, :, :, : t + 1], self.values[i, :, :, : t + 1]
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=H != G)
        return F.linear(y.transpose(1, 2).reshape(1, 1, -1), b["wo"], b["wo_bias"])

    def mlp(self, b, n):
        u = F.linear(n, b["w_up"], b["w_up_bias"])
        if self.config.mlp == "gelu":
            h = F.gelu(u, approximate="tanh")
        else:
            gate, up = u.chunk(2, -1)
            h = F.silu(gate) * up
        return F.linear(h, b["w_down"], b["w_down_bias"])

    @torch.inference_mode()
    def read(self, token):
        """The logits (V,) after one more token."""
        x = self.rest["embedding"][token].view(1, 1, -1)
        if self.config.position == "learned":
            x = x + self.rest["positions"][self.tokens]
        for i, b in enumerate(self.blocks):
            x = x + self.attend(i, b, self.norm(x, b["norm1"], b["norm1_bias"]))
            x = x + self.mlp(b, self.norm(x, b["norm2"], b["norm2_bias"]))
        self.tokens += 1
        n = self.norm(x, self.rest["norm"], self.rest["norm_bias"])
        return F.linear(n, self.output)[0, 0]
