"""The two sides of bench/step.py: our engine and PyTorch, in training on the same batches.

A side offers step(tokens, targets, lr, number), wait(), sums() of all steps, gradients(tokens,
targets) and memory(). And products of NVIDIA's library, by our door and by PyTorch.
"""

import gc
import gzip
import os
import time
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import median

import numpy as np
from published import PUBLISHED

from nanoeuler.data.batches import Batches
from nanoeuler.engines.gpu.gemm import float32
from nanoeuler.engines.gpu.lang.card import PRETENDED
from nanoeuler.files import project_root
from nanoeuler.model.config import PRESETS, count_parameters
from nanoeuler.model.lora import AdaptedWeights, Lora
from nanoeuler.model.weights import INITIAL_DEVIATION, Weights, initialise
from nanoeuler.training.lora import LoraAdamW
from nanoeuler.training.muon import Muon
from nanoeuler.training.optim import AdamW

OURS, WITH_MUON = "cuda", "cuda, Muon"
ENGINES = {"bf16": "cuda", "TF32": "cuda-tf32", "float32": "cuda-float32"}  # by precision
OTHERS = {  # ours with one thing changed, for comparison: numbers of Precision, who multiplies
    "cuda, float32 stream": ({"stream": "float32", "gradient": "float32"}, ""),
    "cuda, own products": ({}, "ours"),
    "cuda, rope apart": ({"fused_rope": False}, ""),
    "cuda, gates apart": ({}, ""),
    "cuda, n made again": ({"kept": 0}, ""),
    "cuda, launch by launch": ({}, ""),
}
AGAIN = "cuda, recompute"  # ours with each block run again in the backward pass
MOST_DRAWN, MANY = 500_000_000, 10_000_019  # parameters that are drawn one by one; a prime
STRETCH = float32.DEEP[3]
STRETCHES = {  # of k in float32's products of three pieces: the value of `float32.DEEP` then
    "cuda, stretches of 256": 1536,
    "cuda, stretches of 64": 384,
}


# ---- What both sides are given


def config_of(preset, dry):
    """The configuration of a preset, or of a model with its architecture for a rehearsal."""
    config = (PRESETS | PUBLISHED)[preset]
    if not dry:
        return config
    sizes = dict(vocab_size=192, n_layers=1, hidden=128, context=16)
    heads = (2, 2) if config.n_heads == config.n_kv_heads else (3, 1)
    return replace(config, **sizes, dim=32 * heads[0], n_heads=heads[0], n_kv_heads=heads[1])


@cache
def tokens(preset):
    """The ids of the text that is trained on."""
    path = os.environ.get("NANOEULER_TOKENS", "")
    if path and (preset or "PRESET" not in path):
        return np.load(path.replace("PRESET", preset))
    return np.frombuffer((project_root() / "data" / "river.txt").read_bytes(), np.uint8)


def batches(config, batch, context, preset=""):
    """step (from 1) -> tokens (B, T), targets (B, T, K), int32."""
    ids = tokens(preset).astype(np.int64) % config.vocab_size
    need = (batch + 1) * (context + config.n_predict)
    ids = np.tile(ids, -(-need // len(ids)))
    made = Batches(ids.astype(np.int32), batch, context, config.n_predict, seed=0)
    return lambda step: tuple(np.ascontiguousarray(x, np.int32) for x in made.batch(step))


def make_tokens(folder, to, ranks=None):
    """Write the ids of all texts of a folder, books in the order of their names."""
    from nanoeuler.tokenizer.tokenizer import Tokenizer

    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".txt", ".gz"))
    texts = [(gzip.open if path.suffix == ".gz" else open)(path, "rb").read() for path in paths]
    tokenizer = Tokenizer.load(ranks) if ranks else Tokenizer.train(texts, 4096)
    ids = np.concatenate([tokenizer.encode(text) for text in texts])
    np.save(to, ids.astype(np.uint16))
    print(f"{len(ids)} tokens of {len(paths)} texts, the largest {ids.max()}: {to}")


def ways_of(precision, who):
    """The Precision of one of our sides, and what records its products."""
    from nanoeuler.engines.gpu.step.backends import multiplier
    from nanoeuler.engines.gpu.step.matmul import Multiplier
    from nanoeuler.engines.gpu.step.precision import PRECISIONS

    changed, products = (OTHERS | {AGAIN: ({"recompute": True}, "")}).get(who, ({}, ""))
    numbers = PRECISIONS[ENGINES[precision]]._replace(**changed)
    return numbers, Multiplier if products == "ours" else multiplier()


# ---- The sides: step, wait, sums of each step, gradients, memory


class Torch:
    """PyTorch's model in training; who: "exact", or one of PEERS. rank: of PEFT's adapters."""

    def __init__(self, config, w, precision, who, dry, rank=0):
        import torch
        from torch_peer import Trainer

        self.torch, self.dry = torch, dry
        torch._dynamo.reset()
        if not dry:
            gc.collect(), torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
        self.before = self.taken()
        compiled = "compile" in who and not dry
        precision = "float64" if who == "exact" else precision
        self.trainer = Trainer(config, w, precision, compiled, "cpu" if dry else "cuda", rank)
        self.step, self.wait = self.trainer.step, self.trainer.wait
        self.gradients = self.trainer.gradients

    def taken(self):
        """Bytes that are taken on the card."""
        if self.dry:
            return 0
        free, whole = self.torch.cuda.mem_get_info()
        return whole - free

    def sums(self):
        """The sums (steps, K) of all steps."""
        return self.torch.stack(self.trainer.sums).cpu().numpy()

    def memory(self):
        """Bytes: the most that tensors had, and what the card says more than before."""
        most = 0 if self.dry else self.torch.cuda.max_memory_allocated()
        return {"arrays": most, "card": self.taken() - self.before}


class OneByOne:
    """A device whose graphs are no graphs: each launch is put on the stream by itself."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)

    def capture(self, starts):
        return Walk(self.device, list(starts))


class Walk:
    """In place of a graph."""

    def __init__(self, device, starts):
        self.device, self.starts = device, starts

    def launch(self):
        for start in self.starts:
            start(getattr(self.device, "stream", 0))  # paper has none


class Ours:
    """Our engine in training; rank: of adapters, which alone learn then."""

    def __init__(self, config, w, precision, who, dry, rank=0):
        try:
            from nanoeuler.engines.gpu.step.engine import CudaEngine
            from nanoeuler.engines.gpu.step.lora import LoraStepper
            from nanoeuler.engines.gpu.step.muon import MuonStepper
            from nanoeuler.engines.gpu.step.stepper import CudaStepper
        except ImportError as error:
            raise ValueError(f"there is no engine for a GPU: {error}") from None
        device, self.taken = card(dry), []
        self.device = OneByOne(device) if "launch by launch" in who else device
        gc.collect()
        self.before = self.device.memory_used()
        CudaEngine.fused_swiglu_backward = "gates apart" not in who
        float32.DEEP[3] = STRETCHES.get(who, STRETCH)
        numbers, multiplier = ways_of(precision, who)
        how = {"precision": numbers, "multiplier": multiplier}
        if rank:
            w = AdaptedWeights(w, Lora(rank).settled(config))
            w.begin(0)
            self.stepper = LoraStepper(w, LoraAdamW(w), self.device, **how)
        elif who == WITH_MUON:
            self.stepper = MuonStepper(w, Muon(w), self.device, **how)
        else:
            self.stepper = CudaStepper(w, AdamW(w), self.device, **how)

    def step(self, tokens, targets, lr, number):
        self.taken += self.stepper.step(tokens, targets, lr, number)

    def wait(self):
        self.taken += self.stepper.finish()
        self.device.synchronize()

    def sums(self):
        return np.array([taken.sums for taken in self.taken])

    def memory(self):
        """Bytes that the card has taken since: all is asked for before the first step runs."""
        taken = self.device.memory_used() - self.before
        return {"arrays": taken, "card": taken}

    def gradients(self, tokens, targets):
        """(sums (K,), name -> gradient), by a step of rate 0."""
        from nanoeuler.engines.gpu.step.recording import GRADIENTS

        self.step(tokens, targets, 0.0, 1)
        self.wait()
        (program,) = self.stepper.programs.values()
        there = self.device.host(program.shared[GRADIENTS]).reshape(-1).view(np.float32)
        weights = self.stepper.weights
        return self.taken[-1].sums, Weights(weights.config, flat=there[: weights.flat.size])


def card(dry):
    """Our device, as NANOEULER_CAPABILITY has it."""
    return device_of(dry, os.environ.get(PRETENDED, ""))


@cache
def device_of(dry, pretends):
    """One for each name of a card; its kernels are compiled once for all jobs of a process."""
    if dry:
        from nanoeuler.emulator import Device
    else:
        from nanoeuler.engines.gpu.host.device import Device
    return Device()


@lru_cache(1)
def initial(config):
    """The weights that all sides of a case begin with.

    A thousand million take a minute: where they are as many, the first MANY are laid again and
    again, which is as good for times.
    """
    if count_parameters(config) < MOST_DRAWN:
        return initialise(config, seed=0)
    few = INITIAL_DEVIATION * np.random.default_rng(0).standard_normal(MANY, np.float32)
    weights = Weights(config)
    for start in range(0, weights.flat.size, MANY):
        part = weights.flat[start : start + MANY]
        part[:] = few[: part.size]
    for name, tensor in weights.items():
        if tensor.ndim == 1:
            tensor[:] = not name.endswith("_bias")
    return weights


def side(preset, batch, context, precision, who, dry, rank=0):
    """What trains, and its batches: a function of the step's number, from 1.

    rank: of adapters that alone learn; 0: all weights do.
    """
    config = config_of(preset, dry)
    if dry:
        batch, context = min(batch, 2), 15
    if "padded" in who:  # the words that are added are words like others
        config = replace(config, vocab_size=-(-config.vocab_size // 64) * 64)
    w = Weights(config, flat=initial(config).flat.copy())
    kind = Ours if who.startswith(OURS) else Torch
    return kind(config, w, precision, who, dry, rank), batches(config, batch, context, preset)


# ---- Products of the vendor, and what a launch costs


PRODUCTS = {  # name -> layout, m, n, k, precision, add
    f"{layout} {m}x{n}x{k} {precision}{' + C' * add}": (layout, m, n, k, precision, add)
    for layout, m, n, k, add in (("NT", 16384, 3072, 768, False), ("NN", 8192, 768, 4096, False),
                                 ("TN", 768, 3072, 16384, True))
    for precision in ("bf16", "TF32", "float32")
}  # fmt: skip


def products(name):
    """Errors and milliseconds of one of PRODUCTS, by our door and by PyTorch."""
    import torch
    from bench.card import Bench

    from nanoeuler.engines.gpu.gemm.cublas import Gemm

    layout, m, n, k, precision, add = PRODUCTS[name]
    torch.set_float32_matmul_precision("high" if precision == "TF32" else "highest")
    bench, kind = Bench({}, {}), torch.bfloat16 if precision == "bf16" else torch.float32
    a = bench.random(*((k, m) if layout[0] == "T" else (m, k)), dtype=kind)
    b = bench.random(*((n, k) if layout[1] == "T" else (k, n)), dtype=kind)
    c = bench.random(m, n, dtype=torch.float32)
    first, second = a.T if layout[0] == "T" else a, b.T if layout[1] == "T" else b
    exact = first.double() @ second.double() + add * c.double()
    theirs = (first @ second).float() + add * c
    arrays = tuple(map(bench.view, (a, b, c)))
    start = Gemm(layout, arrays, precision.lower(), add).prepare(bench.device)
    start(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    errors = {"error": bench.error(c, exact), "peer error": bench.error(theirs, exact)}
    graph = bench.device.capture([start] * 20)
    with torch.no_grad():
        times = timed(graph.launch, 20), timed(lambda: first @ second, 1)
    return errors | {"ms": times[0], "peer ms": times[1]}


def timed(act, count, seconds=0.5):
    """Milliseconds of one of the `count` things that act does, for so long, then waited for."""
    import torch

    act(), torch.cuda.synchronize()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(10):
            act()
        torch.cuda.synchronize()
        done += 10 * count
    return 1e3 * (time.perf_counter() - begin) / done


def launch(dry):
    """Microseconds of a launch: put on a stream by Python, and as one of many in a graph."""
    from nanoeuler.engines.gpu import ladder

    device = card(dry)
    x, y = (device.array(np.ones((4, 64), np.float32)) for _ in range(2))
    start = device.prepare(ladder.softmax(x, y))
    starts = [start] * (2 if dry else 1000)
    graph, times = device.capture(starts), {"python": [], "graph": []}
    ways = {"python": lambda: [start(0) for start in starts], "graph": graph.launch}
    for _ in range(3 if dry else 11):
        for name, act in ways.items():
            device.synchronize()
            begin = time.perf_counter()
            act()
            device.synchronize()
            times[name].append(1e6 * (time.perf_counter() - begin) / len(starts))
    return {name: median(values) for name, values in times.items()}
