"""Time a table of several texts, and a server with several askers: `python tests/bench/serve.py`.

A second is one of a core's time, as the system accounts for it, so that other programs beside it
take little away; of a server, its askers' own work in the same process is part of it. Every text is
as long as every other, and the medians of some windows count.
"""

import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from generation import SHAPES  # noqa: E402

from nanoeuler import measurements  # noqa: E402
from nanoeuler.engines.cpu.decode import CpuReader  # noqa: E402
from nanoeuler.inference.decoder import Decoder, generate  # noqa: E402
from nanoeuler.model.weights import initialise  # noqa: E402
from nanoeuler.serve import web  # noqa: E402
from nanoeuler.serve.batching import Scheduler  # noqa: E402
from nanoeuler.serve.queue import Worker  # noqa: E402
from nanoeuler.tokenizer.tokenizer import Tokenizer  # noqa: E402

SEATS = 1, 2, 4, 8, 16
WINDOWS = 3
PROMPT = [7, 8, 9, 10]
LENGTHS = {"small": 100, "llama 15M": 20}  # tokens of a text: a second or less for all of them
SAMPLING = {"greedy": {"temperature": 0}, "drawn": {}}


def table_seconds(reader, weights, n, sampling):
    """A core's seconds in which every slot of a scheduler writes a text of n tokens."""
    scheduler, start = Scheduler(reader), time.thread_time()

    def write(seed, slot):
        for _ in generate(Decoder(reader.config, weights, slot), PROMPT, n, seed=seed, **sampling):
            pass

    for seed in range(reader.texts):
        scheduler.start(partial(write, seed))
    while scheduler.running:
        scheduler.step()
    return time.thread_time() - start


def table_rows():
    """Tokens a second of all texts together, by how many there are."""
    for shape, config in SHAPES.items():
        weights, n = initialise(config, seed=0), LENGTHS[shape]
        readers = {seats: CpuReader(config, weights, seats, 1) for seats in SEATS}
        for how, sampling in SAMPLING.items():
            seconds = {seats: [] for seats in SEATS}
            for window in range(1 + WINDOWS):
                for seats, reader in readers.items():
                    took = table_seconds(reader, weights, n, sampling)
                    if window:  # the first warms up
                        seconds[seats].append(took)
            for seats, times in seconds.items():
                rate = round(seats * n / median(times), 1)
                yield measurements.row(f"table, {shape}, {how}", f"{seats} texts", "cpu, 1 thread",
                                       rate, "tokens/s")  # fmt: skip


def http_rows(askers=8, texts=64):
    """The same by HTTP, streams of `small` with a vocabulary of bytes."""
    config = SHAPES["small"]
    tokenizer = Tokenizer(np.zeros((0, 2)))
    config = type(config)(**{**vars(config), "vocab_size": tokenizer.vocab_size})
    weights = initialise(config, seed=0)
    weights["norm"][...] = 0  # equal logits: the last ids, which end a text, are beyond top-p
    worker = Worker(lambda: CpuReader(config, weights, askers, 1), texts)
    door = web.listener("127.0.0.1", 0)
    service = web.Service("small", config, tokenizer, weights, worker, 1000)
    app, uvicorn = web.application(service, None), import_module("uvicorn")
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    list(ThreadPoolExecutor(askers).map(partial(ask, door.getsockname()[1]), range(askers)))
    start, many = time.process_time(), ThreadPoolExecutor(askers)
    tokens = sum(many.map(partial(ask, door.getsockname()[1]), range(texts)))
    rate = round(tokens / (time.process_time() - start), 1)
    worker.close()
    server.should_exit = True
    thread.join()
    yield measurements.row("server and askers, small, bytes", f"{askers} askers", "cpu, 1 thread",
                           rate, "tokens/s")  # fmt: skip


def ask(port, seed):
    """One stream: how many tokens it told of."""
    link = HTTPConnection("127.0.0.1", port)
    body = {"prompt": "The river", "max_tokens": 100, "seed": seed, "stream": True}
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
    lines = [line for line in answer if line.startswith(b"data: {")]
    return len(json.loads(lines[-1][6:])["nanoeuler"]["ids"])


if __name__ == "__main__":
    socket.setdefaulttimeout(60)
    for row in chain(http_rows() if find_spec("uvicorn") else (), table_rows()):
        measurements.update("serve", [row])
        print(row["what"], row["case"], row["value"], row["unit"], flush=True)
