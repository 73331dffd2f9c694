"""Recipes beside each other on one GPU: `python tests/bench/recipes.py NAME ... --data PREPARED`.

Each is a smaller model of the base model's shape (or the base model itself, with --width 768),
trained on the same tokens of a prepared folder; what a recipe changes is a line of RECIPES. AdamW
and Muon get as many runs each. What is held out is measured by the trainer, which leaves
NAME-WIDTH-STEPS-SEED.json in --work and in $OUT: settings, curve, seconds. `table` prints those in
--work; `keep` puts them into data/trained/recipes.json. --dry does it with models of nearly
nothing, on a processor.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from base_train import DRY_BATCH, DRY_CONTEXT, NEVER, PRESET  # noqa: E402

from nanoeuler.data.dataset import Prepared  # noqa: E402
from nanoeuler.files import project_root, replacing  # noqa: E402
from nanoeuler.model.config import PRESETS, ModelConfig, count_parameters  # noqa: E402
from nanoeuler.training import muon  # noqa: E402
from nanoeuler.training.folder import read_metrics  # noqa: E402
from nanoeuler.training.optim import rate_for  # noqa: E402
from nanoeuler.training.run import Settings  # noqa: E402
from nanoeuler.training.train import train  # noqa: E402

BATCH, STEPS, WARMUP = 64, 2000, 100
# width: layers, query heads, key/value heads, hidden
SHAPES = {384: (8, 6, 2, 1024), 768: (16, 12, 4, 2048)}
SQUARED = {"mlp": "relu2", "wide": 1.5}  # two matrices in place of three, as many weights
NORM, CAP, ZERO = {"qk_norm": True}, {"logit_cap": 15.0}, {"init": "zero"}
ALL, LEAN = SQUARED | NORM | CAP | ZERO, NORM | ZERO
# rate: parts of the default's for this width. matrices and momentum: of Muon. The rest are fields
# of ModelConfig and Settings, but wide: the hidden width in parts of the shape's.
ADAMW = {"optimizer": "adamw", "rate": 0.75, "weight_decay": 0.2}  # 4e-3 * 128 / width * rate
MUON = {"optimizer": "muon", "rate": 1.0, "weight_decay": 0.03}
RECIPES = {
    "adamw": ADAMW, "adamw-rate-0.4": ADAMW | {"rate": 0.375},
    "adamw-rate-2": ADAMW | {"rate": 1.5}, "adamw-decay-0.1": ADAMW | {"weight_decay": 0.1},
    "adamw-decay-0.4": ADAMW | {"weight_decay": 0.4},
    "adamw-beta2-0.95": ADAMW | {"beta2": 0.95}, "adamw-all": ADAMW | ALL,
    "adamw-half-batch": ADAMW | {"batch": 0.5},
    "muon": MUON, "muon-rate-0.5": MUON | {"rate": 0.5}, "muon-rate-2": MUON | {"rate": 2.0},
    "muon-decay-0.01": MUON | {"weight_decay": 0.01},
    "muon-decay-0.1": MUON | {"weight_decay": 0.1},
    "muon-matrices-1.25": MUON | {"matrices": 1.25}, "muon-momentum-0.9": MUON | {"momentum": 0.9},
    "muon-half-batch": MUON | {"batch": 0.5},
    "muon-relu2": MUON | SQUARED, "muon-norm": MUON | NORM, "muon-zero": MUON | ZERO,
    "muon-cap": MUON | CAP, "muon-relu2-norm": MUON | SQUARED | NORM,
    "muon-relu2-norm-zero": MUON | SQUARED | NORM | ZERO, "muon-all": MUON | ALL,
    "muon-all-rate-2": MUON | ALL | {"rate": 2.0},
    "muon-all-rate-0.5": MUON | ALL | {"rate": 0.5},
}  # fmt: skip


def options_of(arguments=None):
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=[*RECIPES, "table", "keep"])
    parser.add_argument("--data", type=Path, help="a prepared folder")
    parser.add_argument("--work", type=Path, default=Path("data/recipes"))
    parser.add_argument("--width", type=int, choices=SHAPES, default=384)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a whole batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--change", type=json.loads, default={}, help="JSON, of every recipe")
    parser.add_argument("--tag", default="", help="of the files' names, if something is changed")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--at-once", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args(arguments)


def planned(recipe: dict, options, vocabulary: int) -> tuple[ModelConfig, Settings, dict]:
    """Model, settings, and what is changed in Muon, of a recipe."""
    left = recipe | options.change
    batch = left.pop("batch", 1)
    wide, share = left.pop("wide", 1), left.pop("rate")
    shape = SHAPES[options.width]
    base = replace(PRESETS[PRESET], vocab_size=vocabulary, n_predict=1, dim=options.width,
                   n_layers=shape[0], n_heads=shape[1], n_kv_heads=shape[2],
                   hidden=round(shape[3] * wide))  # fmt: skip
    if options.dry:
        base = replace(base, dim=48, n_layers=2, n_heads=2, n_kv_heads=1, hidden=96,
                       context=DRY_CONTEXT)  # fmt: skip
    own = {key: left.pop(key) for key in ("matrices", "momentum") if key in left}
    ours = {key: left.pop(key) for key in list(left) if hasattr(base, key)}
    peak = muon.MUON_PEAK if left["optimizer"] == "muon" else 4e-3  # at MEASURED_DIM
    whole = DRY_BATCH if options.dry else BATCH
    settings = Settings(steps=round(options.steps / batch), batch_size=round(whole * batch),
                        lr=rate_for(base.dim, peak) * share, warmup=round(WARMUP / batch),
                        seed=options.seed, **left)  # fmt: skip
    return replace(base, **ours), settings, own


def trained(name: str, options) -> dict:
    """What a recipe comes to."""
    prepared = Prepared(options.data)
    config, settings, own = planned(RECIPES[name], options, prepared.vocab_size)
    known = []
    with (tempfile.TemporaryDirectory() as folder,
          mock.patch.object(muon, "MUON_RATIO", own.get("matrices", muon.MUON_RATIO)),
          mock.patch.object(muon.Muon, "momentum", own.get("momentum", muon.MOMENTUM)),
    ):  # fmt: skip
        out = Path(folder) / "run"
        train(prepared.folder, out, config=config, settings=settings, engine=options.engine,
              save_every=NEVER, on_step=lambda line: known.append(time.perf_counter()))  # fmt: skip
        lines = read_metrics(out)
    curve = [[line["step"], line["bits_per_byte"]] for line in lines if "bits_per_byte" in line]
    return {"recipe": name, "width": options.width, "bits": curve[-1][1], "held_out": curve,
            "tokens": settings.steps * settings.batch_size * config.context,
            "seconds": known[-1] - known[0], "parameters": count_parameters(config),
            "model": asdict(config), "training": asdict(settings), "muon": own,
            "commit": options.commit}  # fmt: skip


def path_of(name: str, options) -> Path:
    """Where what comes of a recipe is kept."""
    tag = options.tag and f"-{options.tag}"
    return options.work / f"{name}{tag}-{options.width}-{options.steps}-{options.seed}.json"


def one(name: str, options) -> None:
    """Train a recipe, and leave what came of it."""
    said = trained(name, options)
    with replacing(path_of(name, options)) as temporary:
        temporary.write_text(json.dumps(said) + "\n")
    if out := os.environ.get("OUT"):  # one file, since few come back
        kept = Path(out) / "recipes.jsonl"
        with kept.open("a") as file:
            file.write(json.dumps(said) + "\n")
    print(f"RECIPE {name}: {said['bits']:.4f} bits per byte, {said['tokens'] / 1e6:.0f}M tokens, "
          f"{said['seconds']:.1f} s", flush=True)  # fmt: skip


def table(options) -> None:
    """The runs in --work, the best first."""
    runs = [json.loads(path.read_text()) for path in options.work.glob("*.json")]
    for each in sorted(runs, key=lambda x: (x["width"], x["tokens"], x["bits"])):
        print(f"{each['recipe']:24} {each['width']} {each['tokens'] / 1e6:6.0f}M tokens "
              f"{each['bits']:.4f} {each['seconds']:6.1f} s")  # fmt: skip


def keep(options) -> None:
    """The runs in --work, among those of data/trained/recipes.json."""
    path = project_root() / "data" / "trained" / "recipes.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for each in sorted(options.work.glob("*.json")):
        known[each.stem] = json.loads(each.read_text())
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(known) + "\n")


def main(arguments=None):
    options = options_of(arguments)
    if options.dry:
        options.engine = "cpu"
    elif not shutil.which("nvidia-smi") and not {"table", "keep"} & {*options.names}:
        return print("recipes are trained on an NVIDIA GPU; --dry rehearses")
    options.work.mkdir(parents=True, exist_ok=True)
    waiting, running = [*options.names], []
    if waiting[0] in ("table", "keep"):
        return globals()[waiting[0]](options)
    waiting = [name for name in waiting if not path_of(name, options).exists()]
    if len(waiting) == 1:
        return one(waiting[0], options)
    rest = [each for each in (arguments or sys.argv[1:]) if each not in options.names]
    while waiting or running:
        while waiting and len(running) < options.at_once:
            running.append(subprocess.Popen([sys.executable, __file__, waiting.pop(0), *rest]))
        running = [each for each in running if each.poll() is None]
        time.sleep(0.2)
    return None


if __name__ == "__main__":
    main()
