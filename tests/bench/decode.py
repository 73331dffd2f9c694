"""One token on a GPU beside PyTorch's: `python tests/bench/decode.py [PART ...]`.

Parts, all if none is named:
    correct   logits of the presets against float64, PyTorch's beside; graph against launches, bits
    token     milliseconds of a token of one text, greedy, kernels waiting and starting early
    torch     PyTorch's own, with a static cache: eager, and torch.compile, "reduce-overhead"
    kernels   microseconds of each kind of kernel, in a graph of its own, beside the prediction
    sweep     a token at the context's beginning, middle and end
    batch     tokens a second of 8, 64 and 256 texts
Weights are random. What is known is printed and saved at once: rows of data/measurements/talking,
and of $OUT/decode.json. --dry does what needs no GPU: a small model on paper, without PyTorch.
--commit, --device: what rows say where git and the driver do not know.
"""

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median

import numpy as np

from nanoeuler import measurements
from nanoeuler.errors import UserError
from nanoeuler.model.config import PRESETS

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from bench.gpu import circumstances  # noqa: E402
from published import PUBLISHED  # noqa: E402

from nanoeuler.engines.gpu.decode.decoder import CudaReader, predict  # noqa: E402
from nanoeuler.engines.gpu.lang.bf16 import from_bf16, to_bf16  # noqa: E402
from nanoeuler.engines.reference import ReferenceEngine  # noqa: E402
from nanoeuler.model.layers import rope_tables  # noqa: E402
from nanoeuler.model.transformer import forward  # noqa: E402
from nanoeuler.model.weights import Weights, initialise  # noqa: E402

PARTS = "correct", "token", "torch", "kernels", "sweep", "batch"
NAMES = "gpt2-124m", "euler-116m", "smollm2-135m"
COUNT, ROUNDS = 100, 5  # tokens that are timed as one, and how often
BATCHES = 8, 64, 256
FILE = "talking"


class Setting:
    """What all parts use. config: of a preset, or of a small model if dry."""

    def __init__(self, dry, where):
        self.dry, self.where, self.rows, self.took = dry, where, [], {}
        self.weights, self.reader = cache(self.make_weights), cache(self.make_reader)
        self.count, self.rounds = (2, 1) if dry else (COUNT, ROUNDS)

    def config(self, preset):
        """The model's."""
        config = (PRESETS | PUBLISHED)[preset]
        if not self.dry:
            return config
        n = 4 if config.n_kv_heads == config.n_heads else 2
        return replace(config, vocab_size=40, dim=32, n_layers=1, n_heads=4, n_kv_heads=n,
                       hidden=40, context=40)  # fmt: skip

    def make_weights(self, preset):
        """Random ones, larger than at a beginning, so that errors show."""
        weights = initialise(self.config(preset), 0)
        rng = np.random.default_rng(1)
        for name, tensor in weights.items():
            if tensor.ndim == 1:
                tensor += 0.1 * rng.standard_normal(tensor.shape, dtype=np.float32)
            else:
                tensor *= 2
            if tensor.ndim == 1 or name == "positions":  # numbers that bf16 has, for PyTorch
                tensor[...] = from_bf16(to_bf16(tensor))
        return weights

    @cached_property
    def device(self):
        """The GPU, or a paper one."""
        if self.dry:
            from nanoeuler.emulator.device import Device
        else:
            from nanoeuler.engines.gpu.host.device import Device
        return Device()

    def make_reader(self, preset, early=True, texts=1):
        """A model on the device."""
        given = self.config(preset), self.weights(preset), self.device, "bf16", texts
        more = {"chunk": 32, "warps": 1} if self.dry else {}
        return CudaReader(*given, early=early, **more)

    def tell(self, what, case, value, unit, engine="cuda", peer=None, peer_value=None):
        """Print a figure and save its row."""
        ratio = f" {value / peer_value:.3f} of {peer}" if peer_value else ""
        print(f"{what}, {case}, {engine}: {value:.6g} {unit}{ratio}", flush=True)
        row = {"what": what, "case": case, "engine": engine, "value": value, "unit": unit,
               "peer": peer, "peer_value": peer_value}  # fmt: skip
        self.rows.append(self.where | row)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "decode.json").write_text(json.dumps(self.rows, indent=0))
        try:
            measurements.update(FILE, [self.rows[-1]]) if not self.dry else None
        except UserError as error:  # a copy without the book has no place for them
            print(error)


def seconds(this, run):
    """The median of the seconds that `run` takes, until the device is done."""
    taken = []
    for _ in range(this.rounds + 1):  # the first warms up
        this.device.synchronize()
        begin = time.perf_counter()
        run()
        this.device.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def case_of(preset, texts=1):
    """As the rows have it."""
    return f"{preset}, batch {texts}, bf16"


# ---- Correct


def exact_logits(this, preset, text):
    """By the reference engine in float64, with the matrices' bf16 values."""
    weights = this.weights(preset)
    exact = Weights(weights.config, np.float64)
    exact.flat[:] = weights.flat
    for name, tensor in exact.items():
        if tensor.ndim == 2 and name != "positions":
            tensor[...] = from_bf16(to_bf16(tensor.astype(np.float32)))
    return forward(ReferenceEngine(), weights.config, exact, text[None])[0][0, :, 0]


def correct(this, preset):
    """Logits at every position of a text, cut into pieces; greedy tokens; bits."""
    config, reader = this.config(preset), this.reader(preset)
    text = np.random.default_rng(2).integers(config.vocab_size, size=8 if this.dry else 24)
    exact, at, made = exact_logits(this, preset, text), 0, []
    for n in (4, 1, len(text) - 6, 1):
        made.append(reader.read([text[at : at + n].tolist()], [at], rows=n)[0, :, 0])
        at += n
    got = np.concatenate(made)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    peer = None if this.dry else torch_error(this, preset, text, exact)
    this.tell("logits, error", case_of(preset), float(error), "relative to float64", "cuda",
              peer and "torch eager", peer)  # fmt: skip
    if peer and error > 2 * peer:
        print("FAILED: more than twice PyTorch's error")
    whole = reader.read([text.tolist()], [0], rows=len(text))[0, :, 0]
    print("same bits in pieces and at once:", "yes" if (whole == got).all() else "NO, FAILED")
    count, start = 2 if this.dry else 32, len(text) - 1
    said = reader.follow([int(text[-1])], [start], count)
    again = reader.follow([int(text[-1])], [start], count)
    loaded = reader.loaded(1, True)
    reader.begin(loaded, [(int(text[-1]), start, 0, 0)])
    starts = [this.device.prepare(launch) for _, launch in loaded.launches]
    for _ in range(count):
        for begin in starts:
            begin(0)
    single = this.device.host(loaded.work["said"])[0, start + 1 : start + 1 + count]
    token, steps = int(text[-1]), []
    for i in range(count):
        token = int(reader.read([[token]], [start + i])[0, 0, 0].argmax())
        steps.append(token)
    same = [(said == again).all(), (said[0] == single).all(), said[0].tolist() == steps]
    end = "" if all(same) else "FAILED"
    print("greedy tokens: graph twice, launch by launch, with the host:", same, end)


# ---- PyTorch's


@cache
def torch_model(this, preset, texts=1):
    """PyTorch's model in bf16 with a static cache: step(token (B,), position) -> next (B,), logits.
    """
    import torch
    import torch.nn.functional as F
    import torch_peer

    config = this.config(preset)
    model = torch_peer.Model(config)
    torch_peer.load(model, this.weights(preset))
    model = model.to("cuda", torch.bfloat16).eval()
    shape = config.n_layers, 2, texts, config.n_kv_heads, config.context, config.head_dim
    # A buffer of the module, so that a captured graph may write to it.
    model.register_buffer("held", torch.zeros(shape, device="cuda", dtype=torch.bfloat16))
    tables = rope_tables(config.context, config.head_dim) if config.position == "rope" else ()
    tables = [torch.tensor(x, dtype=torch.float32, device="cuda") for x in tables]
    positions = torch.arange(config.context, device="cuda")

    def attend(block, n, cos, sin, held, position):
        heads = block.wqkv(n).view(texts, 1, block.H + 2 * block.G, block.D).transpose(1, 2)
        turned, v = heads.split([block.H + block.G, block.G], 1)
        if block.turned:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(v.dtype)
        q, k = turned.split([block.H, block.G], 1)
        held[0].index_copy_(2, position, k)
        held[1].index_copy_(2, position, v)
        seen = (positions <= position)[None, None, None]
        y = F.scaled_dot_product_attention(
            q, held[0], held[1], attn_mask=seen, enable_gqa=block.H != block.G)
        return block.wo(y.transpose(1, 2).reshape(texts, 1, -1))

    def step(tokens, position):
        x = model.embedding(tokens)[:, None]
        if model.positions is not None:
            x = x + model.positions.weight[position]
        cos, sin = [table[position] for table in tables] or (None, None)
        for i, block in enumerate(model.block):
            x = x + attend(block, block.norm1(x), cos, sin, model.held[i], position)
            x = x + block.mlp(block.norm2(x))
        n = model.norm(x)[:, 0]
        W = model.embedding.weight if model.output is None else model.output.weight
        logits = F.linear(n, W[: config.vocab_size])
        return logits.argmax(-1), logits

    return torch.no_grad()(step)


def torch_error(this, preset, text, exact):
    """The error of PyTorch's logits, token by token."""
    import torch

    step, made = torch_model(this, preset), []
    for i, token in enumerate(text):
        where = torch.tensor([i], device="cuda")
        _, logits = step(torch.tensor([int(token)], device="cuda"), where)
        made.append(logits[0].double().cpu().numpy())
    return float(np.linalg.norm(np.stack(made) - exact) / np.linalg.norm(exact))


def torch_seconds(this, preset, way, texts=1):
    """Seconds of a token, greedy, each fed to the next."""
    import torch

    step = torch_model(this, preset, texts)
    if way == "torch compile":
        torch._dynamo.reset()
        step = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    where = [torch.tensor([i], device="cuda") for i in range(this.config(preset).context)]

    def run():
        tokens = torch.ones(texts, dtype=torch.long, device="cuda")
        for i in range(this.count):
            tokens, _ = step(tokens, where[256 + i])
            tokens = tokens.clone()

    return seconds(this, run) / this.count


def torch_part(this, preset, texts=1):
    """Both ways; ours beside the compiled one is the bar."""
    ours = this.took.get((preset, texts))
    for way in ("torch eager", "torch compile"):
        if texts > 1 and way == "torch compile":  # half a minute for each number of texts
            continue
        value = 1e3 * torch_seconds(this, preset, way, texts)
        this.tell("one token", case_of(preset, texts), value, "ms", way)
        if ours:
            this.tell("one token", case_of(preset, texts), ours, "ms", "cuda", way, value)


# ---- Ours


def token(this, preset):
    """Milliseconds of a greedy token."""
    start = 4 if this.dry else 256
    text = np.random.default_rng(3).integers(this.config(preset).vocab_size, size=start).tolist()
    for early in (False, True):
        reader = this.reader(preset, early)
        reader.read([text], [0])
        took = 1e3 * seconds(this, lambda r=reader: r.follow([1], [start], this.count)) / this.count
        if early:
            this.took[preset, 1] = took
        name = "cuda" if early else "cuda, each kernel waiting"
        this.tell("one token", case_of(preset), took, "ms", name)
        predicted = predict(reader.this, start + this.count // 2)
        total = sum(count * us for count, us in predicted.values()) / 1e3
        this.tell("one token, predicted", case_of(preset), took, "ms", name, "predicted", total)


def kernels(this, preset):
    """Microseconds of each kind: all launches of its name as one graph, over and over."""
    reader = this.reader(preset)
    start = 4 if this.dry else 512
    loaded = reader.loaded(1, True)
    predicted = predict(reader.this, start)
    for name in dict.fromkeys(name for name, _ in loaded.launches):
        reader.begin(loaded, [(1, start, 0, 0)])
        starts = [this.device.prepare(one) for kind, one in loaded.launches if kind == name]
        graph = this.device.capture(starts * (1 if this.dry else 4))
        each = seconds(this, lambda g=graph: [g.launch() for _ in range(5)])
        each *= 1e6 / (5 * len(starts) * (1 if this.dry else 4))
        this.tell(f"in a token, {name}", case_of(preset), each, "us", "cuda", "predicted",
                  predicted[name][1])  # fmt: skip


def sweep(this, preset):
    """A token (without its choice) at three positions."""
    config, reader = this.config(preset), this.reader(preset)
    ids = np.random.default_rng(4).integers(config.vocab_size, size=config.context - 1).tolist()
    reader.read([ids], [0])
    loaded = reader.loaded(1, False)
    for position in (0, config.context // 2, config.context - 1):
        reader.begin(loaded, [(1, position, 0, 0)])
        run = lambda: [loaded.graph.launch() for _ in range(this.count)]  # noqa: E731
        took = 1e3 * seconds(this, run) / this.count
        this.tell(f"one token, after {position}", case_of(preset), took, "ms")
    begin = time.perf_counter()
    reader.read([ids], [0])
    rate = len(ids) / (time.perf_counter() - begin)
    this.tell("reading a prompt", f"{preset}, {len(ids)} tokens, bf16", rate, "tokens/s")


def batch(this, preset):
    """Tokens a second of several texts."""
    config = this.config(preset)
    start, count = (2, 2) if this.dry else (256, 64)
    ids = np.random.default_rng(5).integers(config.vocab_size, size=start).tolist()
    for texts in (2,) if this.dry else BATCHES:
        reader = this.make_reader(preset, texts=texts)  # its caches are large
        reader.read([ids] * texts, [0] * texts)
        begun = [1] * texts, [start] * texts
        took = seconds(this, lambda r=reader, b=begun: r.follow(*b, count)) / count
        this.took[preset, texts] = 1e3 * took
        this.tell("one token", case_of(preset, texts), 1e3 * took, "ms")
        this.tell("tokens a second, all texts", case_of(preset, texts), texts / took, "tokens/s")
        if not this.dry and preset == NAMES[0]:
            torch_part(this, preset, texts)
        del reader


def main():
    known = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known.add_argument("parts", nargs="*", choices=[*PARTS, []])
    known.add_argument("--preset", action="append", choices=NAMES)
    known.add_argument("--dry", action="store_true")
    known.add_argument("--commit")
    known.add_argument("--device")
    options = known.parse_args()
    name = options.device or ("paper" if options.dry else None)
    where = {} if options.dry else circumstances(name, options.commit or measurements.commit())
    this = Setting(options.dry, where)
    if not options.dry and not name:
        this.where["device"] = this.device.name
    does = {"correct": correct, "token": token, "torch": torch_part, "kernels": kernels,
            "sweep": sweep, "batch": batch}  # fmt: skip
    begin, failed = time.perf_counter(), 0
    for part in options.parts or PARTS:
        for preset in options.preset or NAMES:
            if options.dry and part == "torch":
                continue
            try:
                does[part](this, preset)
            except Exception:
                traceback.print_exc()
                failed += 1
            print(f"-- {part}, {preset}: {time.perf_counter() - begin:.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
