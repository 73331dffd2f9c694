"""The model and its training step in PyTorch, as one writes them there: a peer of the benchmarks.

Every architecture of ours that steps by Euler with h = 1, shares no blocks and has no window. On a
GPU: `Trainer`.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanoeuler.model.backward import IGNORE
from nanoeuler.model.layers import LAYERNORM_EPS, RMSNORM_EPS, rope_tables
from nanoeuler.model.transformer import head_weights, loss_scale
from nanoeuler.training.optim import BETA1, BETA2, CLIP_NORM, EPS, WEIGHT_DECAY


def norm(config):
    """The norm that a layer reads the stream through."""
    if config.norm == "rms":
        return nn.RMSNorm(config.dim, eps=RMSNORM_EPS)
    return nn.LayerNorm(config.dim, eps=LAYERNORM_EPS, bias=config.bias)


class Block(nn.Module):
    """One layer: attention, then the MLP, each added to the stream."""

    def __init__(self, config):
        super().__init__()
        C, D, hidden, bias = config.dim, config.head_dim, config.hidden, config.bias
        self.H, self.G, self.D = config.n_heads, config.n_kv_heads, D
        self.turned, self.kind = config.position == "rope", config.mlp
        self.normed, gated = config.qk_norm, config.mlp == "swiglu"
        self.norm1 = norm(config)
        self.wqkv = nn.Linear(C, (self.H + 2 * self.G) * D, bias=bias)
        if self.normed:
            self.q_norm, self.k_norm = (nn.RMSNorm(D, eps=config.norm_eps) for _ in "qk")
        self.wo = nn.Linear(self.H * D, C, bias=bias)
        self.norm2 = norm(config)
        self.w_up = nn.Linear(C, 2 * hidden if gated else hidden, bias=bias)
        self.w_down = nn.Linear(hidden, C, bias=bias)

    def split(self, n, cos, sin):
        """Queries, keys, values (B, heads, T, D), as attention takes them."""
        B, T, _ = n.shape
        heads = self.wqkv(n).view(B, T, self.H + 2 * self.G, self.D).transpose(1, 2)
        turned, v = heads.split([self.H + self.G, self.G], 1)
        if self.normed:
            q, k = turned.split([self.H, self.G], 1)
            turned = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        if self.turned:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(v.dtype)
        return *turned.to(v.dtype).split([self.H, self.G], 1), v

    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.H != self.G)
        return self.wo(y.transpose(1, 2).flatten(2))

    def mlp(self, n):
        u = self.w_up(n)
        if self.kind == "relu2":
            return self.w_down(F.relu(u).square())
        if self.kind != "swiglu":
            return self.w_down(F.gelu(u, approximate="tanh" if self.kind == "gelu" else "none"))
        gate, up = u.chunk(2, -1)
        return self.w_down(F.silu(gate) * up)

    def forward(self, x, cos, sin):
        x = x + self.attend(*self.split(self.norm1(x), cos, sin))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A model of our architecture; called, it returns the loss and its sums (K,) by head."""

    def __init__(self, config):
        super().__init__()
        if (config.integrator, config.step_size, config.repeat, config.sliding_window) != (
                "euler", 1.0, 1, 0):  # fmt: skip
            raise ValueError(f"PyTorch has no model for {config}")
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.context, config.dim)
        self.block = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm, self.cap = norm(config), config.logit_cap
        words = config.n_predict * config.vocab_size
        self.output = None if config.tied else nn.Linear(config.dim, words, bias=False)
        tables = rope_tables(config.context, config.head_dim) if config.position == "rope" else ()
        for name, table in zip(("cos", "sin"), tables or [np.zeros(0)] * 2, strict=True):
            self.register_buffer(name, torch.from_numpy(table))  # float64: `to` makes them shorter

    def blocks(self, x, tokens):
        """The stream x (B, T, C) after all blocks."""
        T = x.shape[1]
        for block in self.block:
            x = block(x, self.cos[:T], self.sin[:T])
        return x

    def forward(self, tokens, targets, scale):
        """Of tokens (B, T), targets (B, T, K), scale (K,): `loss_and_gradients`'s."""
        T, x = tokens.shape[1], self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[:T]
        n = self.norm(self.blocks(x, tokens))
        logits = F.linear(n, self.embedding.weight) if self.output is None else self.output(n)
        if self.cap:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            logits = self.cap * torch.tanh(wide / self.cap)
        logits, flat = logits.view(targets.numel(), -1), targets.reshape(-1)
        each = F.cross_entropy(logits, flat, reduction="none", ignore_index=IGNORE)
        each = each.view(-1, len(scale))
        return (each * scale).sum(), each.detach().sum(0)


def ours(name, tensor):
    """Our name of a parameter, and its elements in our layout: a linear layer's is (in, out)."""
    table = name in ("embedding.weight", "positions.weight")
    name = name.removesuffix(".weight").replace(".bias", "_bias")
    return name, tensor.T if tensor.ndim == 2 and not table else tensor


def load(model, w):
    """Our weights, a Mapping of arrays by name, into a model."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            name, x = ours(name, x)
            x.copy_(torch.from_numpy(w[name]))


def adapted(model, rank):
    """The model with PEFT's adapters on all matrices of its blocks, which alone learn.

    A matrix of ours that others have in parts, such as that of queries, keys and values, has one
    adapter for all: fewer products than with one for each part, so that theirs is not slower.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = ["wqkv", "wo", "w_up", "w_down"]
    rules = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=names)
    model = inject_adapter_in_model(rules, model)
    for name, x in model.named_parameters():
        x.requires_grad_("lora_" in name)
    return model


def adamw(model):
    """Our optimizer's rules: matrices decay, vectors do not."""
    learn = [x for x in model.parameters() if x.requires_grad]
    groups = [{"params": [x for x in learn if x.ndim == 2]}]
    if vectors := [x for x in learn if x.ndim == 1]:
        groups.append({"params": vectors, "weight_decay": 0})
    return torch.optim.AdamW(groups, lr=1e-3, betas=(BETA1, BETA2), eps=EPS,
                             weight_decay=WEIGHT_DECAY, fused=True)  # fmt: skip


def training(compiled, threads, config, w, tokens, targets, scale):
    """(evaluate, step): loss and gradients under our names at weights w, and a training step.

    Compiled, a second compilation (another shape, a guard that fails) is an error.
    """
    torch.set_num_threads(threads)
    model = Model(config).float()
    load(model, w)
    batch = torch.tensor(tokens).long(), torch.tensor(targets).long()
    batch = *batch, torch.tensor(scale, dtype=torch.float32)
    torch._dynamo.config.error_on_recompile = True
    loss = torch.compile(model) if compiled else model
    optimizer = adamw(model)

    def evaluate():
        value, _ = loss(*batch)
        value.backward()
        gradients = dict(ours(name, x.grad.numpy()) for name, x in model.named_parameters())
        optimizer.zero_grad(set_to_none=True)
        return value.item(), gradients

    def step():
        loss(*batch)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return evaluate, step


class Trainer:
    """A model in training on one device, with copies of batches that the host does not wait for.

    precision: bf16 (autocast), TF32, float32, float64. compiled: by torch.compile. rank: of
    adapters that alone learn; 0: all weights do.
    """

    def __init__(self, config, w, precision, compiled, device="cuda", rank=0):
        torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
        torch._dynamo.config.error_on_recompile = True
        self.config, self.device, self.half = config, device, precision == "bf16"
        kind = torch.float64 if precision == "float64" else torch.float32
        self.model = Model(config).to(device, kind)
        load(self.model, w)
        if rank:
            self.model = adapted(self.model, rank)
        self.loss = torch.compile(self.model) if compiled else self.model
        self.optimizer, self.sums = adamw(self.model), []

    def there(self, values, kind):
        """A NumPy array on the device, by way of memory that the copy engine reaches."""
        values = torch.from_numpy(values).to(kind)
        if self.device != "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def backward(self, tokens, targets):
        """Gradients of a batch into the parameters; the sums (K,), on the device."""
        scale = loss_scale(targets, head_weights(self.config.n_predict))
        kind = next(self.model.parameters()).dtype
        batch = (self.there(x, torch.long) for x in (tokens, targets))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            value, sums = self.loss(*batch, self.there(scale, kind))
        value.backward()
        return sums

    def step(self, tokens, targets, lr, number):
        """A training step; its sums are kept in `sums`, on the device."""
        self.sums.append(self.backward(tokens, targets))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, tokens, targets):
        """(sums (K,), name -> gradient) in our layout, of a batch; no step is taken."""
        sums = self.backward(tokens, targets).cpu().numpy()
        found = dict(ours(name, x.grad) for name, x in self.model.named_parameters())
        found = {name: x.cpu().numpy() for name, x in found.items()}
        self.optimizer.zero_grad(set_to_none=True)
        return sums, found

    def wait(self):
        """Wait for all steps that were begun."""
        if self.device != "cpu":
            torch.cuda.synchronize()
