# Made from book/18-the-whole-pipeline.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-road-stages
"""`nanoeuler all`: the whole pipeline, from a text to a model that answers, as commands in a row.

What has been done is what lies in the folders. Leaves out what the commands do. Imports inside
functions, as main.py does.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError


class Stage(NamedTuple):
    """A command, the folder of its own run, and that of the run whose model it begins with."""

    name: str
    flags: list[str]
    out: Path | None = None
    base: Path | None = None

    def begun(self) -> bool:
        """Whether its run was begun."""
        from nanoeuler.training.folder import is_begun

        return self.out is not None and is_begun(self.out)

    def ended(self) -> bool:
        """Whether its run has taken all of its steps."""
        from nanoeuler.training.checkpoint import read_record
        from nanoeuler.training.folder import checkpoints

        if self.out is None or not (known := checkpoints(self.out)):
            return False
        # A model that was imported (part VI) has no settings: nothing is left to train.
        settings = read_record(self.out).settings
        return settings is None or known[-1][0] >= settings.steps

    def words(self) -> list[str]:
        """What one would type after `nanoeuler`; all earlier stages must have ended."""
        from nanoeuler.training.best import chosen

        words = [self.name, *self.flags]
        words += ["--from", str(chosen(self.base))] if self.base else []
        words += ["--out", str(self.out)] if self.out else []
        return words + (["--resume"] if self.begun() else [])


# %% sec-road-sizes
class Size(NamedTuple):
    """A size of `all`: its model, and the flags that each of its three runs gets."""

    preset: str
    sizes: dict[str, int]
    train: dict[str, Any]
    sft: dict[str, Any]
    prefer: dict[str, Any] | None  # None: left out


SIZES = {
    # Forty steps on a model of seventy thousand parameters: it learns little, but all stages run.
    "try": Size("small", {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "context": 128,
                          "vocab_size": 300},
                {"steps": 40, "batch_size": 8}, {"steps": 20, "batch_size": 4},
                {"steps": 4, "batch_size": 4}),
    "laptop": Size("small-modern", {}, {}, {}, {}),
    # The runs of chapter 9a: train's 2,000 steps read the 25 books eight and a half times. sft's
    # 220 steps read the pairs of --pairs (4,900, less those held out or too long) two and a half
    # times.
    "gpu": Size("euler-116m", {},
                {"steps": 2000, "batch_size": 64, "warmup": 200, "weight_decay": 4.0},
                {"steps": 220, "batch_size": 16, "warmup": 30}, None),
}  # fmt: skip


def as_flags(values: dict[str, Any]) -> list[str]:
    """Flags as one types them."""
    return [word for name, value in values.items()
            for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip


def stages(
    size: Size, folder: Path, data: str, pairs: str, comparisons: str, shared: dict[str, Any],
) -> list[Stage]:  # fmt: skip
    """The stages in order. shared: flags for both train and sft (the engine, the ranks)."""
    base, chat, last = (folder / name for name in ("base", "chat", "preferred"))
    model = as_flags({"preset": size.preset} | size.sizes)
    runs = [
        Stage("train", ["--data", data, *model, *as_flags(size.train | shared)], base),
        Stage("sft", ["--data", pairs, *as_flags(size.sft | shared)], chat, base),
    ]
    if size.prefer is not None:
        runs.append(Stage("prefer", ["--data", comparisons, *as_flags(size.prefer)], last, chat))
    how = as_flags({name: value for name, value in shared.items() if name == "engine"})
    # If data is a file, train keeps its tokens in base/data, and eval judges the held-out part of
    # them. An imported base has ended without base/data, and has never read the text, so eval
    # judges all of it.
    own = base / "data"
    kept = own.is_dir() or not runs[0].ended()
    text = str(own) if Path(data).is_file() and kept else data
    return runs + [Stage("eval", [str(run), "--data", text, *how]) for run in (base, runs[-1].out)]


# %% sec-road-forecast
# A step on comparisons, in training steps on one answer to each question: it has two answers, and
# the forward pass of the reference is a third more.
ANSWERS = 2 * (1 + 1 / 3)


def forecast(size: Size, engine: str, ranks: int) -> Iterator[tuple[str, float, float]]:
    """(stage, seconds, bytes of memory of a rank) of the runs of a size."""
    from nanoeuler.api import resized
    from nanoeuler.engines.registry import GPU_ENGINES
    from nanoeuler.model.config import PRESETS, count_parameters
    from nanoeuler.planning import plan
    from nanoeuler.planning.counts import flops_per_token
    from nanoeuler.planning.step import predict_step
    from nanoeuler.training.dpo import PREFERRING
    from nanoeuler.training.run import Settings
    from nanoeuler.training.sft import FINETUNING

    # --layers is the field n_layers
    fields = {flags.FIELDS.get(name, name): value for name, value in size.sizes.items()}
    config = resized(PRESETS[size.preset], **fields)
    on_a_card = engine in GPU_ENGINES
    rate = 0.0 if on_a_card and size.prefer is None else plan.product_rate(plan.cores())
    for name, usual, asked in (("train", Settings(), size.train), ("sft", FINETUNING, size.sft),
                               ("prefer", PREFERRING, size.prefer)):  # fmt: skip
        if asked is None:
            continue
        batch = asked.get("batch_size", usual.batch_size)
        steps = asked.get("steps", usual.steps)
        if on_a_card and name != "prefer":
            _, seconds, memory = predict_step(config, batch // ranks, engine)
        else:
            flops = batch * config.context * flops_per_token(config)
            seconds = flops / (plan.CPU_SHARE * rate)
            held = plan.cpu_memory(config, batch, ranks=1 if name == "prefer" else ranks)
            memory = plan.PROCESS_BYTES + sum(held.values())
        if name == "prefer":
            seconds, memory = ANSWERS * seconds, memory + 4 * count_parameters(config)
        minutes = asked.get("minutes", usual.minutes)
        yield name, steps * seconds if steps else 60 * minutes, memory


# %% sec-road-command
def summary(stages: list[Stage], size: Size, engine: str, ranks: int) -> str:
    """What the pipeline will do and take, as text."""
    from nanoeuler.engines.registry import GPU_ENGINES
    from nanoeuler.planning.plan import duration

    where = "an H200" if engine in GPU_ENGINES else "this processor"
    where += f", for each of {ranks} ranks" if ranks > 1 else ""
    lines = [f"{size.preset} by the engine {engine}; estimated for {where}:"]
    for stage, (name, seconds, memory) in zip(stages, forecast(size, engine, ranks), strict=False):
        took = "done" if stage.ended() else f"about {duration(seconds)}"
        took += ", begun" if stage.begun() and not stage.ended() else ""
        lines.append(f"  {name:7} {stage.out!s:24} {memory / 1e9:6.2f} GB  {took}")
    return "\n".join(lines)


def made(out: Path) -> str:
    """The size of an ended run, which may differ from this call's."""
    from nanoeuler.model.config import count_parameters
    from nanoeuler.training.checkpoint import read_record
    from nanoeuler.training.folder import checkpoints

    parameters = count_parameters(read_record(out).config)
    return f"{parameters:,} parameters, {checkpoints(out)[-1][0]:,} steps"


def run_stages(stages: list[Stage], run: Any) -> None:
    """Do what is left of the stages, each by run(words); typer.Exit with the code of a failure."""
    for stage in stages:
        if stage.ended():
            tell(f"{stage.out} is done: {made(stage.out)}")
            continue
        words = stage.words()
        tell(f"\n$ nanoeuler {shlex.join(words)}")
        if code := run(words):
            raise typer.Exit(code)


_Size = Annotated[str, typer.Option("--size", metavar="NAME", help="auto, try, laptop or gpu")]
_Folder = Annotated[Path, typer.Option("--out", metavar="DIR", file_okay=False,
                                       help="where to write")]  # fmt: skip
_Minutes = flags.SETTINGS["minutes"]
_Name = Annotated[str, typer.Option(metavar="NAME|FILE|DIR",
                                    help="docs (the embedded corpus), a file, or prepared data")]


def chosen_size(name: str, engine: str, minutes: float | None) -> Size:
    """The size of this name, or that of the engine; UserError if there is none."""
    from nanoeuler.engines.registry import GPU_ENGINES

    name = ("gpu" if engine in GPU_ENGINES else "laptop") if name == "auto" else name
    if name not in SIZES:
        raise UserError(f"unknown size {name!r}: choose auto, {', '.join(SIZES)}")
    size = SIZES[name]
    if minutes is None:
        return size
    rest = {key: value for key, value in size.train.items() if key != "steps"}
    return size._replace(train=rest | {"minutes": minutes})


def run_pipeline(
    call: typer.Context, size: _Size = "auto", out: _Folder = flags.BASE.parent,
    data: flags.Data = "docs", pairs: _Name = "docs", comparisons: _Name = "docs",
    minutes: _Minutes = None,
    engine: flags.Engine = "auto", ranks: flags.Ranks = None,
    plan: Annotated[bool, typer.Option("--plan", help="only say what it will take")] = False,
) -> None:  # fmt: skip
    """Run the whole pipeline: train, sft, prefer, eval.

    It begins by saying what that will take. Finished stages are skipped, and an interrupted one is
    resumed. --size auto is gpu if there is a GPU, else laptop.

    Example: nanoeuler all --size try --out runs/try
    """
    from nanoeuler.engines.registry import engine_name

    name = engine_name(engine)
    this = chosen_size(size, name, minutes)
    shared = {"engine": name} | ({"ranks": ranks} if ranks else {})
    every = stages(this, flags.folder_out(out), data, pairs, comparisons, shared)
    print(summary(every, this, name, ranks or 1), file=sys.stderr)
    if plan:
        return
    app = call.find_root().command

    def run(words: list[str]) -> int:
        # as main.py does; with --ranks, the other processes are started with the words in obj
        return app(words, prog_name="nanoeuler", standalone_mode=False, obj=words) or 0

    run_stages(every, run)
    last = [stage.out for stage in every if stage.out][-1]
    tell(f"\ndone; next: nanoeuler chat --from {last}, or nanoeuler serve --from {last}")
