"""Five minutes on one GPU, ours and PyTorch's: `python tests/bench/speedrun.py STAGE ...`.

Stages, each a command of its own, one after another and alone on the machine:
    warm          two steps of every contestant, all at once: kernels are compiled and kept on disk
    ours-adamw, ours-muon      through `nanoeuler speedrun`, in a process of its own
    torch-adamw, torch-muon    the same models, rules, data and minutes with torch.compile
    first         seconds from the start of a process to the end of its first step, gpt2-124m
    rows          those in the files --from into data/measurements/faster.json, and the ratios
A contestant's five minutes hold everything since its process started. All are judged by the same
engine, --judge, on the held-out part of --data, a prepared folder. Each stage leaves what it knows
in --work, and in $OUT/speedrun.json; records of ours are in $OUT/speedrun.jsonl as well. --dry does
it on a processor, with models of nearly nothing and --minutes of a few seconds.

    python tests/bench/speedrun.py warm --data DIR
    python tests/bench/speedrun.py ours-muon --data DIR --seed 1
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

from base_rows import card, circumstances  # noqa: E402

from nanoeuler import measurements  # noqa: E402
from nanoeuler.errors import UserError  # noqa: E402
from nanoeuler.files import project_root, replacing  # noqa: E402

CONTESTANTS = ("ours-adamw", "ours-muon", "torch-adamw", "torch-muon")
STAGES = ("warm", *CONTESTANTS, "first")
FILE = "faster"  # of data/measurements
BITS, FIRST = "bits per byte after five minutes", "seconds to the first step"
PEERS = {"torch-adamw": "torch compile, AdamW", "torch-muon": "torch compile, Muon"}
UNITS = {"tokens": ("tokens seen", "tokens"), "first_step": (FIRST, "s"),
         "steps": ("steps", "steps"),
         "tokens_per_second": ("tokens a second, all included", "tokens/s"),
         "seconds": ("seconds, all included", "s")}  # fmt: skip
DRY = {"dim": 48, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden": 96, "context": 32}
DRY_BATCH = 4
GPT2, GPT2_BATCH, REPEATS = "gpt2-124m", 16, 3  # of `first`: batch of the trainer's default


def options_of(arguments=None):
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", nargs="?", choices=[*STAGES, "rows"])
    parser.add_argument("--data", type=Path, help="a prepared folder")
    parser.add_argument("--work", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--recipe", help="in place of the contestant's: a name, or a .json file")
    parser.add_argument("--idea", help="of a record of ours")
    parser.add_argument("--predicted", type=float, help="bits per byte, before the run")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--judge", default="cuda-float32", help="by which all are judged")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    parser.add_argument("--keep", action="store_true", help="the models, in --work")
    parser.add_argument("--parts", action="store_true", help="of `first`: only what it consists of")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry:
        options.engine = options.judge = "cpu"
    return options


# ---- Rows


def add(options, what, case, engine, value, unit, peer=None, peer_value=None):
    """Keep a row in --work, in place of an older one of its kind; all of them go to $OUT."""
    path = options.work / "rows.json"
    new = circumstances(options) | {"device": card(options.dry), "what": what, "case": case,
           "engine": engine, "value": value, "unit": unit, "peer": peer,
           "peer_value": peer_value}  # fmt: skip
    rows = json.loads(path.read_text()) if path.exists() else []
    same = "what", "case", "engine", "peer"
    rows = [row for row in rows if any(row[key] != new[key] for key in same)] + [new]
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(rows, indent=1))
    copy(options)


def copy(options):
    """What is small, to $OUT."""
    out = os.environ.get("OUT", "")
    if not out or not Path(out).is_dir():
        return
    rows, log = options.work / "rows.json", options.work / "speedrun.jsonl"
    told = {path.stem: json.loads(path.read_text())
            for path in sorted(options.work.glob("told-*.json"))}  # fmt: skip
    told["rows"] = json.loads(rows.read_text()) if rows.exists() else []
    (Path(out) / "speedrun.json").write_text(json.dumps(told, indent=1))
    if log.exists():
        shutil.copy2(log, Path(out) / log.name)


def ratios(rows):
    """The rows that compare: means over the seeds that both have, on one kind of device.

    Of several kinds, the one with the most seeds.
    """
    seen, made = {}, {}
    for row in rows:
        if row["what"] == BITS and row["case"].startswith("speedrun, ") and not row["peer"]:
            _, who, seed = row["case"].split(", ")
            seen.setdefault((row["device"], who), {})[seed] = row
    for (device, who), theirs in seen.items():
        for mine in ("ours-muon", "ours-adamw"):
            ours, peer = seen.get((device, mine), {}), PEERS.get(who)
            both = sorted({*ours} & {*theirs})
            if not peer or not both or (mine, who) == ("ours-adamw", "torch-muon"):
                continue
            case = "speedrun" if mine == "ours-muon" else "speedrun, AdamW on both sides"
            newest = max((theirs[seed] for seed in both), key=lambda row: row["date"])
            mean = [statistics.mean(each[seed]["value"] for seed in both)
                    for each in (ours, theirs)]  # fmt: skip
            row = newest | {"what": BITS, "case": case, "engine": "cuda", "peer": peer,
                            "value": mean[0], "peer_value": mean[1]}  # fmt: skip
            made[case, peer] = max(made.get((case, peer), (0, None)), (len(both), row),
                                   key=lambda each: each[0])  # fmt: skip
    return [row for _, row in made.values()]


def rows(options):
    """Rows that came back into data/measurements, then what all seeds there say together."""
    for source in options.sources:
        measurements.update(FILE, json.loads(source.read_text())["rows"])
    made = ratios(measurements.load(FILE))
    measurements.update(FILE, made)
    for row in made:
        print(f"{row['case']}: {row['value']:.4f} / {row['peer_value']:.4f} = "
              f"{row['value'] / row['peer_value']:.4f} of {row['peer']}, {row['device']}")


# ---- Contestants


def recipe_for(options, who):
    """The recipe of a contestant, smaller if dry."""
    from nanoeuler.training.speedrun import recipe_of

    recipe = recipe_of(options.recipe or who.split("-")[1])
    changes = {"seed": options.seed} | ({"batch_size": DRY_BATCH} if options.dry else {})
    return recipe.with_changes(DRY if options.dry else {}, changes)


def specification(options, who, **more):
    """What `speed_twin.py` is told; the settings are resolved as `Run.begin` does."""
    from dataclasses import asdict

    from nanoeuler.data.dataset import read_record
    from nanoeuler.tokenizer.tokenizer import Tokenizer
    from nanoeuler.training.muon import matrix_rate
    from nanoeuler.training.optim import rate_for
    from nanoeuler.training.run import OPTIMIZERS, Settings

    recipe = recipe_for(options, who)
    read_record(options.data)
    words = Tokenizer.load(options.data / "tokenizer.json").vocab_size
    config, settings = recipe.config(words), Settings(**recipe.settings)
    settings = settings.with_rate(rate_for(config.dim, OPTIMIZERS[settings.optimizer].peak))
    return {"model": asdict(config), "settings": asdict(settings), "dry": options.dry,
            "data": str(options.data.resolve()), "minutes": options.minutes, "mode": options.mode,
            "ratio": matrix_rate(1.0, config.dim), **more}  # fmt: skip


def twin(options, who, name, **more):
    """Start PyTorch's process; what it is told lies in --work."""
    spec = options.work / f"spec-{name}.json"
    spec.write_text(json.dumps(specification(options, who, **more)))
    return [sys.executable, str(TESTS / "helpers" / "speed_twin.py"), str(spec)]


def theirs(options, who, out):
    """PyTorch's five minutes: what it tells."""
    told = options.work / f"told-{who}-{options.seed}.json"
    told.unlink(missing_ok=True)
    command = twin(options, who, f"{who}-{options.seed}", out=str(out.resolve()),
                   told=str(told.resolve()))  # fmt: skip
    subprocess.run(command, check=True)
    return json.loads(told.read_text())


def ours(options, who, out):
    """Ours, by the command that everybody has: its record."""
    log = (options.work / "speedrun.jsonl").resolve()
    command = [sys.executable, "-m", "nanoeuler", "speedrun", "--data", options.data.resolve(),
               "--out", out.resolve(), "--recipe", options.recipe or who.split("-")[1],
               "--seed", options.seed, "--minutes", options.minutes, "--engine", options.engine,
               "--log", log]  # fmt: skip
    for name in ("idea", "predicted"):
        if getattr(options, name) is not None:
            command += [f"--{name}", getattr(options, name)]
    if options.dry:
        names = {"n_layers": "layers", "n_heads": "heads", "n_kv_heads": "kv_heads"}
        for name, size in {**DRY, "batch_size": DRY_BATCH}.items():
            command += [f"--{names.get(name, name)}".replace("_", "-"), size]
    subprocess.run([*map(str, command)], check=True, cwd=project_root())
    lines = log.read_text().splitlines()
    record = json.loads(lines[-1]) | {"commit": circumstances(options)["commit"]}
    log.write_text("\n".join([*lines[:-1], json.dumps(record, sort_keys=True)]) + "\n")
    return record


def contest(options, who):
    """A contestant's five minutes, the judgement, and its rows."""
    from nanoeuler.api import load

    out = options.work / f"{who}-{options.seed}"
    shutil.rmtree(out, ignore_errors=True)
    told = (ours if who.startswith("ours") else theirs)(options, who, out)
    judged = load(out).evaluate(options.data, engine=options.judge)
    told["judged"] = judged.bits_per_byte
    path = options.work / f"told-{who}-{options.seed}.json"
    path.write_text(json.dumps(told, indent=1))
    cut = ", cut" if told["cut"] else ""
    print(f"{who}, seed {options.seed}: {judged.bits_per_byte:.4f} bits per byte of "
          f"{judged.bytes:,} bytes; {told['steps']:,} steps, {told['tokens'] / 1e6:.1f} million "
          f"tokens in {told['seconds']:.2f} s, the first step after {told['first_step']:.2f} s"
          f"{cut}", flush=True)  # fmt: skip
    case = f"speedrun, {who}, seed {options.seed}"
    engine = "cuda" if who.startswith("ours") else "torch compile"
    add(options, BITS, case, engine, judged.bits_per_byte, "bits/byte")
    for name, (what, unit) in UNITS.items():
        add(options, what, case, engine, told[name], unit)
    if not options.keep:
        shutil.rmtree(out)


def warm_ours(options, who):
    """Two steps and a judgement of ours, in this process: what a run compiles."""
    from nanoeuler.data.dataset import Prepared
    from nanoeuler.training.speedrun import begin

    prepared, recipe = Prepared(options.data), recipe_for(options, who)
    run, stepper, (batches, held_out) = begin(prepared, recipe, options.engine)
    for number in (1, 2):
        stepper.step(*batches.batch(number), 1e-9, number)
    stepper.finish()
    held_out.bits_per_byte(stepper.sums, quick=True)


def warm(options):
    """All of them at once, since compiling leaves the GPU idle; what had no room, once more alone.

    One after the other they take some 11 GB and twice as much of the GPU's memory; rarely all at
    the same moment.
    """
    again = [each for each in options.given if each != "warm"]
    began, commands = time.monotonic(), {}
    for who in CONTESTANTS:
        commands[who] = [sys.executable, __file__, "warm", *again, "--one", who]
        if who.startswith("torch"):
            if not has_torch():
                print(f"there is no PyTorch here: {who} is left out")
                del commands[who]
                continue
            commands[who] = twin(options, who, f"warm-{who}", steps=2)
    at_work = {who: subprocess.Popen(command) for who, command in commands.items()}
    for who, process in at_work.items():
        if process.wait():
            subprocess.run(commands[who], check=True)
        print(f"{who}: warm after {time.monotonic() - began:.1f} s", flush=True)


def has_torch():
    """Whether PyTorch is here."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


# ---- The first step


def drawn_data(folder):
    """A prepared folder of drawn tokens, as many ids as GPT-2 has: their content doesn't matter."""
    import numpy as np

    from nanoeuler.data.shards import SIDES, ShardWriter
    from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

    if (folder / "prepared.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(i // 256, i % 256) for i in range(50257 - 256 - len(SPECIAL_TOKENS))]
    tokenizer, rng, sides = Tokenizer(pairs), np.random.default_rng(0), {}
    tokenizer.save(folder / "tokenizer.json")
    for side, count in zip(SIDES, (10_000_000, 200_000), strict=True):
        writer = ShardWriter(folder, side, tokenizer)
        writer.document(2 * count, [rng.integers(50000, size=count)])
        sides[side] = writer.close()
    record = {"nanoeuler": "0", "source": "drawn", "digest": "0123456789abcdef", "repeated": 0,
              "tokenizer": tokenizer.hash, **sides}  # fmt: skip
    (folder / "prepared.json").write_text(json.dumps(record))


def first_of_ours(options, data, parts=False):
    """Seconds from just before `nanoeuler train` to the first line of its metrics.

    That line comes when the second step has been begun, which is a little later than the end of the
    first. parts: have the process say what they are spent on, which takes some of them itself.
    """
    out = options.work / "first"
    shutil.rmtree(out, ignore_errors=True)
    program = [TESTS / "helpers" / "first_parts.py"] if parts else ["-m", "nanoeuler"]
    command = [sys.executable, *program, "train", "--preset", GPT2, "--data", data.resolve(),
               "--steps", 1000, "--out", out.resolve(), "--engine", options.engine,
               "--batch-size", GPT2_BATCH]  # fmt: skip
    if options.dry:
        command += ["--dim", 48, "--layers", 2, "--heads", 2, "--kv-heads", 2, "--context", 32]
    began = time.monotonic()
    process = subprocess.Popen([*map(str, command)], cwd=project_root(),
                               stderr=subprocess.PIPE)  # fmt: skip
    lines = out / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        if process.poll() is not None:
            sys.exit(f"no first step: {process.stderr.read().decode()}")
        time.sleep(0.002)
    seconds = time.monotonic() - began
    process.kill()
    said = process.communicate()[1].decode()
    if parts:
        print(said)
    shutil.rmtree(out, ignore_errors=True)
    return seconds


def first_of_theirs(options, data, cold):
    """Seconds from just before the script to the end of its first step. cold: empty caches."""
    import tempfile
    from dataclasses import asdict, replace

    from nanoeuler.model.config import PRESETS

    config = PRESETS[GPT2]
    if options.dry:
        config = replace(config, dim=48, n_layers=2, n_heads=2, n_kv_heads=2, hidden=192,
                         context=32)  # fmt: skip
    settings = {"batch_size": GPT2_BATCH, "lr": 1e-3, "warmup": 50, "weight_decay": 0.1,
                "beta2": 0.98, "clip": 1.0, "seed": 0, "optimizer": "adamw"}  # fmt: skip
    spec = options.work / "spec-first.json"
    spec.write_text(json.dumps({
        "model": asdict(config), "settings": settings, "dry": options.dry, "steps": 1,
        "data": str(data.resolve()), "minutes": 10, "mode": options.mode, "ratio": 1.0,
    }))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        empty = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/i", "TRITON_CACHE_DIR": f"{folder}/t"}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(TESTS / "helpers" / "speed_twin.py"), str(spec)],
            env=os.environ | (empty if cold else {}), capture_output=True, text=True,
        )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("first ")]
    if not said:
        sys.exit(f"PyTorch took no first step: {done.stderr[-2000:]}")
    return float(said[0].split()[1]) - began


def first(options):
    """The rows about the first step, medians of REPEATS; one more before, which fills caches."""
    data = options.work / "drawn"
    drawn_data(data)
    if options.parts:
        first_of_ours(options, data)
        print(f"{first_of_ours(options, data, parts=True):.2f} s in all")
        return
    mine = [first_of_ours(options, data) for _ in range(REPEATS + 1)]
    print(f"ours: {mine[0]:.2f} s, then {', '.join(f'{each:.2f}' for each in mine[1:])}")
    value, case = statistics.median(mine[1:]), f"{GPT2}, cached kernels"
    add(options, FIRST, f"{GPT2}, first process on this machine", "cuda", mine[0], "s")
    add(options, FIRST, case, "cuda", value, "s")
    if not has_torch():
        print("there is no PyTorch here: it was left out")
        return
    for cold, name in (True, case), (False, f"{case}, and torch's caches warm"):
        if not cold:
            first_of_theirs(options, data, cold)
        them = [first_of_theirs(options, data, cold) for _ in range(1 if cold else REPEATS)]
        print(f"torch.compile, {'empty' if cold else 'warm'} caches: "
              f"{', '.join(f'{each:.2f}' for each in them)} s; ours over theirs "
              f"{value / statistics.median(them):.3f}", flush=True)  # fmt: skip
        add(options, FIRST, name, "cuda", value, "s", "torch compile", statistics.median(them))


def main(arguments=None):
    given = list(sys.argv[1:] if arguments is None else arguments)
    one = given.pop() if "--one" in given else None  # of `warm`, which starts it
    options = options_of([each for each in given if each != "--one"])
    options.given = given
    try:
        if options.stage == "rows":
            return rows(options)
        if options.stage is None or not options.dry and not shutil.which("nvidia-smi"):
            print(f"stages are {', '.join(STAGES)} and rows, on an NVIDIA GPU; --dry rehearses")
            return 0
        if options.stage != "first" and options.data is None:
            raise UserError("expected prepared data: name its folder with --data")
        options.work.mkdir(parents=True, exist_ok=True)
        if one:
            return warm_ours(options, one)
        if options.stage in CONTESTANTS:
            return contest(options, options.stage)
        return globals()[options.stage](options)
    except UserError as error:
        print(f"{options.stage}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
