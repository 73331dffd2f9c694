"""Do other sources of values, or skips, pay? `python tests/bench/values.py --data DIR`.

Asked in PyTorch, before anything of it is built in our engines: a model of chapter 13b's search
(width 384, Muon, QK-norm), trained on as many tokens of a prepared folder as the recipes there, and
the same with
    value residual      values of layer i > 0 mixed with those of layer 0 (Zhou and others, 2024)
    value embeddings    values of the first three and the last three layers mixed with a vector
                        looked up for the token, in three tables, of which each serves two layers
    skips               the second half of the layers reads the stream of the first half as well,
                        the last layer that of the first, and so inwards
All weights of a mixture are learned, one for each layer. Of each variant and seed a row of
data/measurements/modern.json, also in $OUT: bits per byte of the held-out text, and milliseconds of
a step. CHANGES was written down before the first run. --dry does it on a processor, with models of
nearly nothing.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), str(TESTS / "bench")]

import recipes  # noqa: E402
from base_rows import card, circumstances  # noqa: E402

from nanoeuler import measurements  # noqa: E402
from nanoeuler.data.batches import Batches, Prefetcher  # noqa: E402
from nanoeuler.data.dataset import Prepared  # noqa: E402
from nanoeuler.data.validation import HeldOut  # noqa: E402
from nanoeuler.errors import UserError  # noqa: E402
from nanoeuler.training.muon import matrix_rate  # noqa: E402
from nanoeuler.training.optim import learning_rate  # noqa: E402

RECIPE, STEPS, DRY_STEPS = "muon-norm", 1500, 4
TABLES = 3  # of value embeddings: three of the record of modded-nanogpt, which has 12 layers
PLAIN, RESIDUAL, EMBEDDINGS, SKIPS = "plain", "value residual", "value embeddings", "skips"
CHANGES = {RESIDUAL: -0.005, EMBEDDINGS: -0.02, SKIPS: -0.003}  # predicted, in bits per byte
VARIANTS = PLAIN, *CHANGES
FILE = "modern"  # of data/measurements


def model_class(variant):
    """`torch_peer.Model` with another source of values, or with skips."""
    import torch
    from torch import nn
    from torch_peer import Block, Model

    class Mixed(Block):
        """A block whose values may be mixed with `other` (B, G, T, D)."""

        def forward(self, x, cos, sin, other=None):
            q, k, v = self.split(self.norm1(x), cos, sin)
            use = v if other is None else (self.mix[0] * v + self.mix[1] * other).to(v.dtype)
            x = x + self.attend(q, k, use)
            return x + self.mlp(self.norm2(x)), v

    class Other(Model):
        def __init__(self, config):
            super().__init__(config)
            L = config.n_layers
            self.block = nn.ModuleList(Mixed(config) for _ in range(L))
            if variant == EMBEDDINGS:
                wide = config.n_kv_heads * config.head_dim
                self.tables = nn.ModuleList(
                    nn.Embedding(config.vocab_size, wide) for _ in range(min(TABLES, L // 2))
                )
            for i, block in enumerate(self.block):
                tabled = variant == EMBEDDINGS and self.table_of(i) is not None
                if tabled or variant == RESIDUAL and i:
                    block.mix = nn.Parameter(torch.ones(2))
            if variant == SKIPS:
                self.skip = nn.Parameter(torch.ones(L // 2))

        def table_of(self, i):
            """The table that layer i reads; None: none."""
            near = min(i, len(self.block) - 1 - i)
            return self.tables[near] if near < len(self.tables) else None

        def begin(self):
            """The weights of mixtures as they begin: halves, and skips that change nothing."""
            with torch.no_grad():
                for block in self.block:
                    if hasattr(block, "mix"):
                        block.mix.fill_(0.5)
                if variant == SKIPS:
                    self.skip.zero_()

        def looked_up(self, tokens, i, G):
            """What layer i mixes with its values, from a table; None if nothing."""
            if variant != EMBEDDINGS or (table := self.table_of(i)) is None:
                return None
            B, T = tokens.shape
            return table(tokens).view(B, T, G, -1).transpose(1, 2)

        def blocks(self, x, tokens):
            T, L, known, first = x.shape[1], len(self.block), [], None
            for i, block in enumerate(self.block):
                if variant == SKIPS and i >= L - L // 2:
                    x = x + self.skip[i - L + L // 2] * known[L - 1 - i]
                other = first if variant == RESIDUAL else self.looked_up(tokens, i, block.G)
                x, v = block(x, self.cos[:T], self.sin[:T], other)
                first = v if first is None else first
                known.append(x)
            return x

    return Other


def trained(variant, options):
    """(bits per byte of the held-out text, milliseconds of a step, parameters) of a variant."""
    import speed_twin
    import torch
    import torch_peer

    prepared = Prepared(options.data)
    asked = argparse.Namespace(width=384, steps=options.steps, seed=options.seed, change={},
                               dry=options.dry)  # fmt: skip
    config, settings, _ = recipes.planned(recipes.RECIPES[RECIPE], asked, prepared.vocab_size)
    device = "cpu" if options.dry else "cuda"
    spec = {"settings": asdict(settings), "dry": options.dry, "mode": "default",
            "ratio": matrix_rate(1.0, config.dim)}  # fmt: skip
    with mock.patch.object(torch_peer, "Model", model_class(variant)):
        racer = speed_twin.Racer(spec, config, device)
    racer.model.begin()
    shape = settings.batch_size, config.context, config.n_predict
    batches = Prefetcher(Batches(prepared.train, *shape, settings.seed))
    for number in range(1, settings.steps + 1):
        rate = learning_rate(number, settings.steps, settings.lr, settings.warmup)
        racer.step(*batches.batch(number), rate)
        if number == settings.steps // 2:
            racer.wait()
            began = time.perf_counter()
    racer.wait()
    took = (time.perf_counter() - began) / (settings.steps - settings.steps // 2)

    def sums(tokens, targets):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            batch = racer.there(tokens), racer.there(targets)
            return racer.model(*batch, racer.scale)[1].float().cpu().numpy()

    judge = HeldOut.from_tokens(prepared.held_out, prepared.tokenizer, *shape)
    count = sum(x.numel() for x in racer.model.parameters())
    return judge.bits_per_byte(sums, quick=True), 1e3 * took, count


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", nargs="*", choices=[*VARIANTS, []])
    parser.add_argument("--data", type=Path, required=True, help="a prepared folder")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    options.steps = DRY_STEPS if options.dry else options.steps
    made = []
    for variant in options.variants or VARIANTS:
        try:
            bits, ms, count = trained(variant, options)
        except UserError as error:
            print(f"{variant}: {error}", file=sys.stderr)
            return 1
        print(f"{variant}, seed {options.seed}: {bits:.4f} bits per byte, {ms:.2f} ms a step, "
              f"{count / 1e6:.2f} million parameters", flush=True)  # fmt: skip
        where = circumstances(options) | {"device": card(options.dry), "engine": "torch compile",
                                          "peer": None, "peer_value": None}  # fmt: skip
        case = json.dumps({"search": variant, "seed": options.seed, "steps": options.steps})
        for what, value, unit in (("bits, PyTorch", bits, "bits/byte"), ("step, PyTorch", ms, "ms"),
                                  ("parameters, PyTorch", count, "parameters")):  # fmt: skip
            made.append(where | {"what": what, "case": case, "value": float(value), "unit": unit})
        if variant in CHANGES:
            made.append(where | {
                "what": "predicted, PyTorch", "case": json.dumps({"search": variant}),
                "value": CHANGES[variant], "unit": "bits/byte",
            })  # fmt: skip
        if out := os.environ.get("OUT"):
            name = f"values-{options.seed}-{'-'.join(options.variants).replace(' ', '_')}.json"
            (Path(out) / name).write_text(json.dumps(made, indent=1))
        if not options.dry:
            measurements.update(FILE, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
