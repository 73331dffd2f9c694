# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-cli-tokenizer
"""The command that serves a model. Imports inside functions, as main.py does."""

import sys
from functools import partial
from typing import Annotated

import typer

from nanoeuler.cli import flags
from nanoeuler.cli.stdio import tell

_Origins = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", metavar="URL", help="also answer pages from here (repeatable)"),
]
# The names of the one machine that reaches itself: RFC 1122, RFC 4291 and RFC 6761.
LOOPBACK = "127.0.0.1", "::1", "localhost"


def _warn(name, parameters, host, port):
    """Say on stderr what to expect of the model, and of a port that others reach."""
    print(f"{name} has {parameters:,} parameters: what it says is often wrong", file=sys.stderr)
    if host not in LOOPBACK:
        print(f"warning: anybody who can reach port {port} of {host} can use this model: there is "
              "no password and no encryption", file=sys.stderr)  # fmt: skip


def serve(
    base: flags.From = flags.CHAT,
    host: Annotated[str, typer.Option(metavar="NAME", help="address to listen on")] = LOOPBACK[0],
    port: flags.whole("port to listen on; 0: any that is free", 0, 65535) = 8000,
    slots: flags.whole("requests answered at the same time") = 8,
    waiting: flags.whole("requests that may wait", 0) = 64,
    tokens: flags.whole("number of tokens") = 1024,
    allow_origin: _Origins = None, engine: flags.InferenceEngine = "auto",
) -> None:  # fmt: skip
    """Serve a model: a page to chat with, and an API like OpenAI's at /v1.

    Until Ctrl-C. More than --slots and --waiting requests at a time are refused.

    Example: nanoeuler serve --from runs/chat --port 8000
    """
    from nanoeuler import api
    from nanoeuler.inference.backends import make_reader
    from nanoeuler.model.config import count_parameters
    from nanoeuler.serve.queue import Worker
    from nanoeuler.serve.web import Service, application, listener, run

    model, door = api.load(base), listener(host, port)
    make = partial(make_reader, model.config, model.weights, engine, slots)
    worker = Worker(make, waiting)
    name, at = base.resolve().name, door.getsockname()[1]
    service = Service(name, model.config, model.tokenizer, model.weights, worker, tokens)
    mine = host in LOOPBACK
    app = application(service, (*LOOPBACK, "[::1]") if mine else None, allow_origin or ())
    _warn(name, count_parameters(model.config), host, at)
    shown = f"[{host}]" if ":" in host else host
    tell(f"http://{shown}:{at}/ is the page; programs take http://{shown}:{at}/v1 (Ctrl-C ends it)")
    try:
        run(app, door, worker)
    except KeyboardInterrupt:  # uvicorn's way to say that it was one
        pass
