"""The base model and its twin in PyTorch, on one GPU: `python tests/bench/base.py STAGE ...`.

Stages, in the order in which they are done; `all` does them one after another, here:
    pack      the texts that `nanoeuler data clean` left in --clean, in blocks under --pieces
    loads     which of those files go with which call, within --limits MiB; copied to --to, if given
    unpack    new blocks under --pieces as tokens in --work, then a prepared folder of all so far
    small     three small models, and from them the base model's bits per byte, before it is trained
    train     the base model, for --seconds of steps, or --steps; it goes on where it was stopped
    twin      PyTorch's twin, for as many seconds as the base model took; likewise
    score     bits per byte of held-out books of both, and the base model's scores on tasks
    bring     the base model in parts: those of call number --call, to $OUT
    join      a run folder --to of the parts in the folders --from
    rows      those in the files --from, each a base.json, into data/measurements/quality.json
Each leaves what it knows in --work, and small files in $OUT as well. --dry does the same with
models of nearly nothing, on a processor. Where there is no PyTorch, `twin` is left out and says so.

    nanoeuler data clean GUTENBERG --without HELD-OUT-BOOKS --without TASKS --out data/clean/books
    python tests/bench/base.py all --clean data/clean/books --blocks 55

The machine that we rent takes and gives 64 MiB a call, so `pack`, `loads`, `bring` and `join` carry
everything in pieces. NANOEULER_DATA names the folder whose eval/ has the tasks' files.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]  # as pytest and `nanoeuler bench` have it

import base_law  # noqa: E402
import base_pieces  # noqa: E402
import base_score  # noqa: E402
import base_train  # noqa: E402
import base_weights  # noqa: E402
from base_rows import Journal  # noqa: E402

from nanoeuler import measurements  # noqa: E402
from nanoeuler.data.dataset import Prepared  # noqa: E402
from nanoeuler.errors import UserError  # noqa: E402
from nanoeuler.files import project_root, replacing  # noqa: E402

STAGES = ("pack", "loads", "unpack", "small", "train", "twin", "score", "bring")
FILE = "quality"  # of data/measurements

# Bytes of held-out books a token, by tokenizers that learned from 110 MB, and tokens a second that
# the plan of a step (chapter 13) predicts of an H200, over those of four heads of 4,096:
#     V = 4,096: 3.33 and 1.08; 8,192: 3.67 and 1.05; 16,384: 3.94 and 1.00, all with one head.
# So the bytes read in a second are as 3.60 : 3.86 : 3.94. 16,384 reads 2 % more than 8,192,
# but has 12.6 million parameters more, in rows that each come half as often; 4,096 reads 7 % less.
# One head, since four cost 5 % of the tokens and left head 0 as it was, in eight models (15a).
VOCABULARY, HEADS = 8192, 1


def options_of(arguments=None):
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", nargs="?", choices=[*STAGES, "one-small", "join", "rows", "all"])
    paths = {"clean": "data/clean/books", "pieces": "data/base/pieces", "work": "data/base/work",
             "to": None}  # fmt: skip
    for name, default in paths.items():
        parser.add_argument(f"--{name}", type=Path, default=default and Path(default))
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", default=[])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--judge", default="cuda-float32", help="by which both models are judged")
    parser.add_argument("--commit", default="", help="what is measured, where git cannot say it")
    packing = parser.add_argument_group("pieces")
    packing.add_argument("--vocab-size", type=int, default=VOCABULARY)
    packing.add_argument("--block", type=int, default=base_pieces.BLOCK, help="bytes, at least")
    packing.add_argument("--blocks", type=int, help="how many of them to use; all that are there")
    packing.add_argument("--limits", type=float, nargs="+", default=[18, 37],
                         help="MiB of the first call, ..., and of each one more")  # fmt: skip
    packing.add_argument("--call", type=int, help="of `bring`, from 0; all, one after another")
    base_train.add_flags(parser)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)  # of one-small
    options = parser.parse_args(arguments)
    if options.dry:
        options.engine = options.judge = "cpu"
    return options


# ---- Pieces


def pack(options, journal):
    """Blocks, while a line says of each how large it is."""
    say = lambda x: print(f"{x['name']}: {sum(x['books']):,} to {x['bytes']:,} bytes",  # noqa: E731
                          flush=True)  # fmt: skip
    base_pieces.pack(options.clean, options.pieces, options.vocab_size, options.block, say,
                     options.blocks)  # fmt: skip


def loads(options, journal):
    """Say what each call carries; with --to, copy it into folders of the names 0, 1, ..."""
    manifest = json.loads((options.pieces / "manifest.json").read_text())
    sizes = {each["name"]: each["books"] for each in manifest["blocks"]}
    limits = [int(each * base_pieces.MIB) for each in options.limits]
    for i, names in enumerate(base_pieces.loads(manifest, limits)):
        paths = [options.pieces / name for name in names]
        packed = sum(path.stat().st_size for path in paths) / base_pieces.MIB
        text = sum(sum(sizes.get(name, [])) for name in names) / 1e6
        print(f"call {i}: {len(names)} files, {packed:.1f} MiB, {text:.0f} MB to train on")
        if options.to:
            (options.to / str(i)).mkdir(parents=True, exist_ok=True)
            for path in paths:
                shutil.copy2(path, options.to / str(i) / path.name)


def unpack(options, journal):
    """Tokens of what is new, then a prepared folder; and how fast that was."""
    begin = time.perf_counter()
    size = base_pieces.unpack(options.pieces, options.work / "store", options.blocks)
    middle = time.perf_counter()
    record = base_pieces.prepare(options.work / "store", options.work / "prepared")
    train, rate = record["train"], size / 1e6 / (middle - begin)
    print(f"{size / 1e6:.0f} MB unpacked and in tokens at {rate:.0f} MB/s, shards in "
          f"{time.perf_counter() - middle:.1f} s: {train['documents']:,} books, "
          f"{train['tokens'] / 1e6:.1f} million tokens of {train['bytes'] / train['tokens']:.3f} "
          f"bytes; {record['held-out']['tokens']:,} held out")  # fmt: skip
    if size:
        journal.add("pieces unpacked and in tokens", f"{measurements.cores()} cores", rate, "MB/s")
    journal.add("distinct tokens", "base model", train["tokens"], "tokens")


# ---- Small models, and what they predict


def one_small(options, journal):
    """One of the small models, named by its width, which another process asks for."""
    prepared = Prepared(options.work / "prepared")
    base_train.small(options, prepared, HEADS)


def small(options, journal):
    """All of them at once, since each alone leaves most of a GPU idle; then the prediction."""
    config = base_train.config_of(options, Prepared(options.work / "prepared"), HEADS)
    widths = [each[0] for each in base_train.family(options.dry)]
    known = [options.work / f"small-{width}.json" for width in widths]
    command = [sys.executable, __file__, "one-small", *options.given]
    at_work = [subprocess.Popen([*command, "--width", str(width)])
               for width, path in zip(widths, known, strict=True) if not path.exists()]  # fmt: skip
    if any([each.wait() for each in at_work]):
        sys.exit("a small model was not trained: see above")
    runs = [json.loads(path.read_text()) for path in known]
    said = base_law.predict(runs, config, base_train.planned_tokens(options))
    with replacing(options.work / "prediction.json") as temporary:
        temporary.write_text(json.dumps(said, indent=1) + "\n")
    print(base_law.words(said), flush=True)
    for run in runs:
        case = f"{run['parameters'] / 1e6:.1f}M parameters, {run['tokens'] / 1e6:.0f}M tokens"
        journal.add("bits per byte, held-out books", case, run["bits"], "bits/byte")
    case = f"base model, {said['tokens'] / 1e6:.0f}M tokens"
    for name in "predicted", "lowest", "highest":
        journal.add(f"bits per byte, held-out books, {name}", case, said[name], "bits/byte")


# ---- The base model and its twin


def train(options, journal):
    """Ours, on from where it is."""
    path = options.work / "prediction.json"
    print(base_law.words(json.loads(path.read_text())) if path.exists() else
          "no prediction was made: the stage `small` makes it", flush=True)  # fmt: skip
    base_train.ours(options, Prepared(options.work / "prepared"), HEADS, BEGAN)
    base_train.tell(options, journal, "base", HEADS)


def twin(options, journal):
    """PyTorch's, for as long."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return print("there is no PyTorch here: the twin was left out")
    base_train.theirs(options, Prepared(options.work / "prepared"), HEADS, BEGAN)
    base_train.tell(options, journal, "twin", HEADS)
    return None


def score(options, journal):
    """Both models on held-out books, then the base model on all tasks whose files are there."""
    base_score.books(options, journal)
    base_score.tasks(options, journal)
    base_score.samples(options, journal)


def bring(options, journal):
    """The parts of a call, or of all."""
    parts = options.work / "parts"
    listed = parts / "calls.json"
    if not listed.exists():
        calls = base_weights.calls(base_weights.cut(options.work / "base", parts))
        listed.write_text(json.dumps([[path.name for path in call] for call in calls]))
    calls = json.loads(listed.read_text())
    wanted = range(len(calls)) if options.call is None else [options.call]
    for i in wanted:
        print(f"call {i} of {len(calls)}: {', '.join(calls[i])}")
        for name in calls[i]:
            if out := os.environ.get("OUT"):
                shutil.copy2(parts / name, Path(out) / name)


def join(options):
    """A run folder of the parts that came back."""
    parts = options.work / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    for source in options.sources:
        for path in source.iterdir():
            if path.suffix in (".bin", ".json"):
                shutil.copy2(path, parts / path.name)
    whole = base_weights.join(parts, options.to)
    print(f"{options.to} holds the model in {'16' if whole else '8'} bits a weight")


def rows(options):
    """Rows that came back, the last of each kind, into data/measurements."""
    for source in options.sources:
        measurements.update(FILE, json.loads(source.read_text())["rows"])
    print(f"saved in {project_root() / 'data' / 'measurements' / FILE}.json")


def main(arguments=None):
    options = options_of(arguments)
    options.given = [each for each in (arguments or sys.argv[1:]) if each != options.stage]
    if options.stage is None or not options.dry and options.stage in STAGES[3:7] + ("all",) \
            and not shutil.which("nvidia-smi"):  # fmt: skip
        print(f"stages are {', '.join(STAGES)} and all, on an NVIDIA GPU; --dry rehearses")
        return 0
    try:
        do(options)
    except UserError as error:
        print(f"{options.stage}: {error}", file=sys.stderr)
        return 1
    return 0


def do(options):
    """A stage, or all of them."""
    if options.stage in ("join", "rows"):
        return globals()[options.stage](options)
    options.work.mkdir(parents=True, exist_ok=True)
    journal = Journal(options)
    chosen = [each for each in STAGES if each != "loads"] if options.stage == "all" \
        else [options.stage]  # fmt: skip
    for name in chosen:
        globals()[name.replace("-", "_")](options, journal)
    return None


if __name__ == "__main__":
    sys.exit(main())
