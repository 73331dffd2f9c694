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
# The names by which a machine reaches itself: RFC 1122, RFC 4291 and RFC 6761.
LOOPBACK = "127.0.0.1", "::1", "localhost"


def _warn(name, parameters, host, port):
    """Say on stderr what to expect of the model, and warn about a port that others can reach."""
    print(f"{name} has {parameters:,} parameters: its answers are often wrong", file=sys.stderr)
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
    """Serve a model: a chat page, and an API like OpenAI's at /v1.

    It runs until Ctrl-C. An answer has at most --tokens tokens. Up to --slots requests are answered
    at the same time, --waiting more may wait, and any others are refused.

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
    tell(f"http://{shown}:{at}/ is the chat page, http://{shown}:{at}/v1 the API; Ctrl-C ends it")
    try:
        run(app, door, worker)
    except KeyboardInterrupt:  # uvicorn raises it again after Ctrl-C
        pass
