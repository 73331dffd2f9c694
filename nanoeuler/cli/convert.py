# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-convert
"""nanoeuler import and nanoeuler export: other people's models in, ours out.

Imports inside functions, as main.py does.
"""

from pathlib import Path
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell
from nanoeuler.errors import UserError

_Source = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="a folder, a .gguf or .bin file, or hf:OWNER/NAME"),
]
_Context = flags.whole("context length, in tokens")  # at most the model's own
_To = Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, gguf or llama2c")]
_Kind = Annotated[
    str | None,
    typer.Option("--dtype", metavar="KIND", help="f32, f16, bf16, or q8_0 for gguf"),
]
_Adapter = Annotated[
    Path | None,
    typer.Option("--peft", metavar="DIR", help="LoRA adapters as PEFT saves them, to merge"),
]
_OutPath = Annotated[Path, typer.Option("--out", metavar="PATH", help="where to write")]


def import_model(
    source: _Source, out: flags.Out = Path("runs/imported"), context: _Context = None,
    tokenizer: flags.Tokenizer = None, adapter: _Adapter = None,
) -> None:  # fmt: skip
    """Import a model that others have trained, as a run.

    All commands that use a run can use it then. Nothing is executed that came with the model. With
    --peft, PEFT's LoRA adapters are merged into it; SOURCE may then be a run of ours, too.

    Example: nanoeuler import SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smol
    """
    from nanoeuler.interop.peft import with_adapter
    from nanoeuler.interop.source import RUN, kind_of, read_source
    from nanoeuler.model.config import count_parameters
    from nanoeuler.training.checkpoint import load_model, write_model
    from nanoeuler.training.folder import check_free

    check_free(out)
    if adapter and kind_of(source) == RUN:
        config, words, weights, origin = *load_model(source), source
    else:
        config, words, weights, origin = read_source(source, context, tokenizer)
    if adapter:
        weights, origin = with_adapter(weights, adapter), f"{origin} with {adapter}"
    write_model(out, config, words, weights, origin)
    tell(f"{out}: {count_parameters(config):,} parameters in {config.n_layers} layers, "
         f"{words.vocab_size:,} tokens, a context of {config.context:,}")  # fmt: skip


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="a folder with a run")],
    to: _To, out: _OutPath, kind: _Kind = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="only the adapters of a LoRA run, for PEFT (hf)")
    ] = False,
) -> None:  # fmt: skip
    """Write a run's model in another program's format.

    hf is a folder that transformers opens, gguf a file for llama.cpp, llama2c one for run.c.

    Example: nanoeuler export runs/chat --to gguf --dtype q8_0 --out mine.gguf
    """
    from nanoeuler.interop.peft import write_adapter
    from nanoeuler.interop.source import write_source
    from nanoeuler.training.checkpoint import load_adapters, load_model

    if adapter:
        if to != "hf":
            raise UserError(f"only PEFT (--to hf) takes adapters alone, got --to {to}: leave "
                            "out --adapter to merge them")  # fmt: skip
        adapters, known = load_adapters(run)
        write_adapter(out, adapters.config, adapters, known.places[0], (kind or "F32").upper())
        tell(f"wrote {out}")
        return
    config, words, weights = load_model(run)
    for sentence in write_source(to, out, config, words, weights, kind):
        tell(f"note: {sentence}")
    tell(f"wrote {out}")
