"""The server: slots, worker, what a request may say, the protocol by its own client, the page."""

import base64
import contextlib
import http.client
import json
import logging
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import browser as chromium
import numpy as np
import pytest
from tiers import kept

from nanoeuler.cli.main import main
from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import Decoder, EngineReader, draws, generate
from nanoeuler.inference.sampling import log_probabilities
from nanoeuler.inference.speculative import generate_ahead
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.serve import web
from nanoeuler.serve.attention import LOOKED, look
from nanoeuler.serve.batching import PREFILL_CHUNK, Scheduler
from nanoeuler.serve.queue import Full, Job, Worker
from nanoeuler.serve.request import CANNOT, Refusal, fitting, read_request, turns_of
from nanoeuler.serve.responses import Response
from nanoeuler.serve.streaming import End, write
from nanoeuler.tokenizer.chat_template import ASSISTANT, END, USER, conversation, prompt
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.run import Settings
from nanoeuler.training.train import train

ROOT = Path(__file__).parents[1]
TOKENIZER = Tokenizer(np.zeros((0, 2)))  # a byte is a token
CONFIG = ModelConfig(vocab_size=260, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden=40,
                     context=256, n_predict=4)  # fmt: skip
WEIGHTS = initialise(CONFIG, seed=1)
EQUAL = initialise(CONFIG, seed=1)
EQUAL["norm"][...] = 0  # equal logits: by top-p 0.95 the last ids, which end a text, never come


# ---- slots and worker


def fitted_in(reader, jobs, sit):
    """Write `jobs`, {name: (loop, prompt, sampling)}, by a scheduler; `sit()` in each step."""
    scheduler, found, waiting = Scheduler(reader), {name: [] for name in jobs}, [*jobs.items()]

    def writer(name, loop, ids, sampling, slot):
        for token in loop(Decoder(CONFIG, WEIGHTS, slot), ids, 20, **sampling):
            found[name].append(token)

    while waiting or scheduler.running:
        for _ in range(min(sit(), len(scheduler.free), len(waiting))):
            name, job = waiting.pop(0)
            scheduler.start(partial(writer, name, *job))
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", [EngineReader, CpuReader])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_text_among_others_is_the_one_that_it_is_alone(kind, seed):
    """Prompts of all lengths up to past the context, who guess and who do not, in any order."""
    rng = np.random.default_rng(seed)
    jobs = {}
    for i in range(14):
        ids = rng.integers(0, 256, rng.integers(1, 300)).tolist()
        loop = generate_ahead if i % 3 == 0 else generate
        jobs[i] = loop, ids, {"seed": i, "temperature": 0.9} | ({"guesses": 1 + i % 2} if i % 3 == 0
                                                                 else {})
    together = fitted_in(kind(CONFIG, WEIGHTS, texts=5), jobs, lambda: rng.integers(0, 3))
    for name, (loop, ids, sampling) in jobs.items():
        alone = list(loop(Decoder(CONFIG, WEIGHTS, kind(CONFIG, WEIGHTS)), ids, 20, **sampling))
        assert together[name] == alone, name


class Reused(EngineReader):
    """Hands out the same memory each time, as a reader may: "valid until the next call"."""

    memory = np.zeros(1 << 20, np.float32)

    def read(self, *what, **how):
        found = super().read(*what, **how)
        self.memory[...] = np.nan
        self.memory[: found.size] = found.ravel()
        return self.memory[: found.size].reshape(found.shape)


def test_logits_are_used_before_the_next_pass_of_a_round():
    jobs = {0: (generate, [1, 2], {"seed": 1}), 1: (generate_ahead, [3], {"seed": 2}),
            2: (generate, [4] * 100, {"seed": 3}), 3: (generate_ahead, [5], {"guesses": 1})}
    together = fitted_in(Reused(CONFIG, WEIGHTS, texts=4), jobs, lambda: 4)
    for name, (loop, ids, sampling) in jobs.items():
        assert together[name] == list(loop(Decoder(CONFIG, WEIGHTS), ids, 20, **sampling))


class Watched(EngineReader):
    """Notes how much each of its passes reads; fails where it is told to; takes its time."""

    def __init__(self, *what, pause=0.0, **how):
        super().__init__(*what, **how)
        self.passes, self.fails, self.pause = [], False, pause

    def read(self, pieces, *rest, **how):
        self.passes.append([len(piece) for piece in pieces])
        time.sleep(self.pause)
        if self.fails:
            raise UserError("this reader does not read")
        return super().read(pieces, *rest, **how)


def test_nobody_waits_for_a_whole_prompt():
    reader = Watched(CONFIG, WEIGHTS, texts=2)
    jobs = {0: (generate, [1], {}), 1: (generate, [2] * 200, {})}
    fitted_in(reader, jobs, lambda: 1)
    assert max(max(each) for each in reader.passes) == PREFILL_CHUNK
    reading = [each for each in reader.passes if each[1] > 1]
    assert [each[1] for each in reading] == [64, 64, 64, 8]
    assert all(each[0] == 1 for each in reading)  # the other one wrote on meanwhile
    assert not any(sum(each) == 0 for each in reader.passes)


def test_a_slot_is_free_when_its_client_leaves():
    scheduler, begun, ended = Scheduler(EngineReader(CONFIG, WEIGHTS, texts=2)), [], []

    def forever(name, slot):
        try:
            for token in generate(Decoder(CONFIG, WEIGHTS, slot), [1], 10**9):
                begun.append((name, token))
        finally:
            ended.append(name)

    first, second = (scheduler.start(partial(forever, name)) for name in "ab")
    scheduler.step()
    assert scheduler.free == []
    scheduler.cancel(first)
    assert ended == ["a"] and scheduler.free == [first]
    for _ in range(3):
        scheduler.step()
    assert [name for name, _ in begun] == ["a", "b", "b", "b", "b"]
    scheduler.cancel(second)
    scheduler.step()  # of nobody
    assert scheduler.free == [first, second]


def submitted(worker, *writes):
    """Submit jobs; the lists of what they yield, and events that tell of the end."""
    found = []
    for each in writes:
        said, over = [], threading.Event()

        def put(thing, said=said, over=over):
            said.append(thing)
            if thing is None or isinstance(thing, Exception):
                over.set()

        job = Job(each, put)
        worker.submit(job)
        found.append(SimpleNamespace(said=said, over=over, job=job))
    return found


def endless(slot):
    return generate(Decoder(CONFIG, WEIGHTS, slot), [1], 10**9)


def some(n, slot):
    return generate(Decoder(CONFIG, WEIGHTS, slot), [1], n)


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def test_a_worker_refuses_what_it_has_no_room_for_and_takes_the_next_when_somebody_leaves():
    worker = Worker(lambda: EngineReader(CONFIG, WEIGHTS, texts=2), max_waiting=1)
    one, two, three = submitted(worker, endless, endless, partial(some, 5))
    with pytest.raises(Full, match="writes 2 texts at a time, and 1 more may wait"):
        submitted(worker, endless)
    until(lambda: one.said and two.said)
    assert three.said == []
    one.job.cancel()
    assert three.over.wait(20) and len(three.said) == 6 and three.said[-1] is None
    until(lambda: len(worker.running) == 1)
    worker.close()
    assert two.over.wait(20) and isinstance(two.said[-1], Full)
    with pytest.raises(Full):
        submitted(worker, endless)
    worker.thread.join(20)
    assert not worker.thread.is_alive()


def test_a_job_that_is_cancelled_while_it_waits_is_never_begun():
    worker = Worker(lambda: EngineReader(CONFIG, WEIGHTS, texts=1), max_waiting=5)
    begun = []
    one, two, three = submitted(worker, endless, begun.append, partial(some, 2))
    until(lambda: one.said)
    two.job.cancel()
    one.job.cancel()
    assert three.over.wait(20) and two.said == begun == []
    worker.close()


def test_what_is_wrong_with_one_text_is_told_to_its_asker_alone():
    reader = Watched(CONFIG, WEIGHTS, texts=3)
    worker = Worker(lambda: reader, max_waiting=1)

    def wrong(slot):
        yield "before"
        raise ValueError("a mistake")

    good, bad = submitted(worker, partial(some, 30), wrong)
    assert good.over.wait(20) and bad.over.wait(20)
    assert len(good.said) == 31 and bad.said[0] == "before" and isinstance(bad.said[1], ValueError)
    reader.fails = True
    (failed,) = submitted(worker, partial(some, 3))
    assert failed.over.wait(20) and isinstance(failed.said[-1], UserError)
    reader.fails = False
    (good,) = submitted(worker, partial(some, 3))  # the worker goes on
    assert good.over.wait(20) and len(good.said) == 4
    worker.close()


def test_a_worker_without_a_reader_says_why():
    def none():
        raise UserError("no GPU here")

    with pytest.raises(UserError, match="no GPU here"):
        Worker(none, 1)


# ---- what a request may say


def read(chat=False, most=50, config=CONFIG, tokenizer=TOKENIZER, **said):
    said = {"prompt": "river"} | said
    if chat:
        said.setdefault("messages", [{"role": "user", "content": "Why?"}])
    return read_request(json.dumps(said).encode(), chat, config, tokenizer, "mine", most)


WRONG = {
    "logprobs": [-1, 21, 1.5, "2", [1]], "top_logprobs": [-1, 21, True],
    "max_tokens": [0, -1, 1.5, "3"],
    "max_completion_tokens": [0, True], "stream": [1, "yes"], "stream_options": [True, "usage"],
    "guesses": [-1, 1.5, True, "2"],
    "stop": [3, {"a": 1}, [3], "", [""], [*"abcde"], "x" * 257, ["a", "x" * 257], [[]]],
    "model": [3, ["mine"]],
    "temperature": [-1, "hot", 1e31, True], "top_p": [0, 1.1, "1"], "top_k": [-1, 0.5],
    "min_p": [-0.1, 2], "repetition_penalty": [0, "x", 1e-320, 1e31], "seed": [-1, 1.5, "a", {}],
    "prompt": ["", [], [260], [-1], [1.5], ["a"], [[1]], {"a": 1}, 3, [True], "\ud800"],
    **{name: [{"a": "b"}, "x"] for name in CANNOT},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_a_field_cannot_have_is_refused_in_one_line(name):
    for value in WRONG[name]:
        with pytest.raises(Refusal) as raised:
            read(**{name: value})
        assert "\n" not in str(raised.value)
        assert (raised.value.status, raised.value.field) == (400, name)
    assert read(**{name: None}).ids == [*map(int, TOKENIZER.encode("river" if name != "prompt"
                                                                   else "\n"))]


def test_four_stop_strings_of_256_characters_are_taken():
    assert read(stop=["x" * 256] * 4).stop == ["x" * 256] * 4 and read(stop=[]).stop == []


def test_what_changes_nothing_is_passed_over():
    plain = read(seed=1)
    extra = {"user": "me", "metadata": {"a": "b"}, "tool_choice": "none", "new": [1, 2],
             "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
             "echo": False, "response_format": {"type": "text"}}  # fmt: skip
    assert read(seed=1, **extra) == plain


@pytest.mark.parametrize("body", [b"", b"no", b"[1]", b"3", b'"a"', b"null", b"[" * 100_000,
                                  b'{"seed": NaN}', b'{"seed": ' + b"9" * 5000 + b"}", b"\xff{}",
                                  b'{"temperature": Infinity}'], ids=repr)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(Refusal, match="^expected "):
        read_request(body, False, CONFIG, TOKENIZER, "mine", 5)


def test_the_model_is_asked_by_its_name():
    assert read(model="mine", seed=1) == read(seed=1)
    with pytest.raises(Refusal, match="there is no model 'gpt-2' here: its name is 'mine'") as no:
        read(model="gpt-2")
    assert (no.value.status, no.value.field) == (404, "model")


def test_bounds_on_the_number_of_tokens():
    assert read(max_tokens=7).tokens == 7 and read(max_tokens=10**9).tokens == 50
    assert read(max_completion_tokens=5, max_tokens=9).tokens == 5
    asked = read(chat=True, most=10**6)
    assert asked.tokens == CONFIG.context - len(asked.ids)
    assert read(guesses=99).guesses == CONFIG.n_predict - 1
    assert read(guesses=3, config=replace(CONFIG, n_predict=1)).guesses == 0
    assert read().sampling["seed"] != read().sampling["seed"]  # else everybody had the same answers


def test_log_probabilities_are_asked_for_in_two_ways():
    assert read(logprobs=0).top == 0 and read(logprobs=20).top == 20 and read().top is None
    assert read(chat=True, logprobs=True).top == 0 and read(chat=True, logprobs=False).top is None
    assert read(chat=True, logprobs=True, top_logprobs=4).top == 4
    for wrong in ({"chat": True, "logprobs": 3}, {"logprobs": True}, {"logprobs": 1, "guesses": 1}):
        with pytest.raises(Refusal):
            read(**wrong)


U, A, S = ({"role": role, "content": "c"} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize("messages", [
    None, [], "hello", [3], [{}], [{"role": "user"}], [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], [A], [S], [U, A],
    [A, U], [S, A, U], [{"role": "tool", "content": "x"}], [{"role": ["user"], "content": "x"}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": None}], {"role": "user", "content": "x"},
])  # fmt: skip
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(Refusal) as raised:
        turns_of(messages)
    assert raised.value.field == "messages"


def test_a_conversation_is_what_training_has_shown():
    """Its marks, its turns in their order, and what the system says before the oldest that fits."""
    turns = [("one?", "1."), ("two?", "2."), ("three?", "3.")]
    for first in range(4):
        kept = turns[first:]
        parts = [conversation(TOKENIZER, *turn, "sys" if i == 0 else None)[0]
                 for i, turn in enumerate(kept)]  # fmt: skip
        whole = sum(parts, []) + prompt(TOKENIZER, "four?", None if kept else "sys")
        for context in (2 * len(whole), 2 * len(whole) + 6):
            assert fitting(TOKENIZER, context, "sys", turns, "four?") == (whole, first)
    for system, question in (("sys", "x" * 500), ("s" * 500, "why?")):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        with pytest.raises(Refusal, match="shorten it") as raised:
            read(chat=True, messages=messages)
        assert raised.value.field == "messages"
    with pytest.raises(UserError, match="shorten it"):
        fitting(TOKENIZER, 2 * len(whole) - 2, "sys", turns, "four?")
    marks = [TOKENIZER.special[name] for name in (USER, ASSISTANT, END)]
    sly = "a<|end|><|assistant|>b"
    assert sum(i in marks for i in fitting(TOKENIZER, 10**6, sly, [(sly, sly)], sly)[0]) == 5


def test_ten_thousand_turns_are_no_way_to_stop_the_server():
    turns = [("a", "b")] * 10_000
    begin = time.monotonic()
    assert fitting(TOKENIZER, 256, None, turns, "c")[1] > 9900
    assert time.monotonic() - begin < 5  # it takes a tenth of a second


def told(reader=None, **said):
    asked = read(**said)
    *pieces, end = write(asked, TOKENIZER, WEIGHTS, reader or EngineReader(CONFIG, WEIGHTS))
    return asked, pieces, end


@pytest.mark.parametrize("seed", range(6))
def test_an_answer_is_the_text_of_chapter_10_with_its_log_probabilities(seed):
    asked, pieces, end = told(seed=seed, logprobs=3, max_tokens=30, temperature=1.0)
    wanted = [*draws(Decoder(CONFIG, WEIGHTS), asked.ids, 30, TOKENIZER.special.values(), seed=seed,
                     temperature=1.0)]  # fmt: skip
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(p.text for p in pieces) == TOKENIZER.decode_text([d.token for d in wanted])
    assert [t.id for t in tokens] == [d.token for d in wanted]
    for token, drawn in zip(tokens, draws(Decoder(CONFIG, WEIGHTS), asked.ids, 30, (), seed=seed,
                                          temperature=1.0), strict=False):  # fmt: skip
        p = log_probabilities(drawn.logits)
        assert token.log_probability == p[token.id] and len(token.likeliest) == 3
        assert [i for i, _ in token.likeliest] == np.argsort(-p, kind="stable")[:3].tolist()
    assert end == End("length" if len(wanted) == 30 else "stop", len(wanted), None)


def test_why_a_text_ended():
    for seed in range(30):
        how = {"seed": seed, "max_tokens": 12, "temperature": 1.0}
        _, pieces, plain = told(**how)
        text = "".join(piece.text for piece in pieces)
        if plain.reason == "length" and text[-1].isascii():  # else its last character is cut off
            break
    for stop in (text, text[4], text[5:7]):  # also with the last token that there may be
        _, pieces, end = told(**how, stop=stop)
        assert end.reason == "stop"
        assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    asked = read(most=400, temperature=1.0, top_p=1, seed=1)  # of 260 tokens four end the text
    *_, end = write(asked, TOKENIZER, EQUAL, EngineReader(CONFIG, EQUAL))
    assert end.reason == "stop" and end.tokens < 400


def test_guesses_are_told_and_the_text_is_that_of_guessing():
    asked, pieces, end = told(seed=3, max_tokens=40, guesses=3, temperature=0)
    tokens = [token for piece in pieces for token in piece.tokens]
    alone = generate(Decoder(CONFIG, WEIGHTS), asked.ids, 40, TOKENIZER.special.values(),
                     temperature=0)  # fmt: skip
    assert [t.id for t in tokens] == [*alone]
    assert sum(t.guessed for t in tokens) == sum(end.count.kept) and end.count.tokens == len(tokens)
    own = Response(asked, TOKENIZER, "mine").whole(pieces, end)["nanoeuler"]
    assert own["guesses"]["kept"] == end.count.kept and own["ids"] == [t.id for t in tokens]


def test_attention_maps_are_those_of_the_newest_tokens():
    ids = np.random.default_rng(0).integers(0, 256, 300).tolist()
    found = look(json.dumps({"ids": ids, "layer": 1}).encode(), CONFIG, WEIGHTS, TOKENIZER)
    assert (found["heads"], found["size"], found["layer"]) == (4, LOOKED, 1)
    assert found["tokens"] == [TOKENIZER.decode_text([i]) for i in ids[-LOOKED:]]
    maps = np.frombuffer(base64.b64decode(found["maps"]), np.uint8).reshape(4, LOOKED, LOOKED)
    shares = (maps / 255.0) ** 2
    # A share is within half a step of its root: 2 sqrt(p) / 510 + 1 / 510^2 for each of T.
    assert abs(shares.sum(-1) - 1).max() < LOOKED * (2 / 510 / 16 + 1 / 510**2) + 0.01
    assert not np.triu(maps[0], 1).any() and (np.diagonal(maps[0]) > 0).any()
    wrong = [{}] + [{"ids": ids} for ids in ([], [260], [-1], [True], "a", [[1]])]
    for said in wrong + [{"ids": [1], "layer": layer} for layer in (2, "0", -1, True)]:
        with pytest.raises(Refusal):
            look(json.dumps(said).encode(), CONFIG, WEIGHTS, TOKENIZER)


# ---- HTTP

served = pytest.mark.skipif(
    not all(map(find_spec, ("starlette", "uvicorn", "openai"))),
    reason="starlette, uvicorn and openai are not all installed (the extra test)",
)


class Kept(logging.Handler):
    """Keeps what is logged in a list."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def emit(self, record):
        self.log.append(self.format(record))


@contextlib.contextmanager
def serving(pause=0.0, seats=3, waiting=4, hosts=("127.0.0.1", "localhost"), origins=(),
            config=CONFIG, weights=WEIGHTS, tokens=300):  # fmt: skip
    """A server in this process: its port, worker, reader and log, which must end up empty."""
    reader = Watched(config, weights, texts=seats, pause=pause)
    worker, door = Worker(lambda: reader, waiting), web.listener("127.0.0.1", 0)
    service = web.Service("mine", config, TOKENIZER, weights, worker, tokens)
    server = web.server(web.application(service, hosts, origins), worker)
    log = []
    for name in ("uvicorn", "asyncio"):  # after uvicorn has arranged its own
        logging.getLogger(name).handlers[:] = [Kept(log)]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield SimpleNamespace(port=door.getsockname()[1], worker=worker, reader=reader, log=log,
                              connections=server.server_state.connections)  # fmt: skip
        assert log == []
    finally:
        worker.close()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server():
    with serving() as found:
        yield found


@pytest.fixture
def alone():
    """A server on which nobody else has a connection."""
    with serving() as found:
        yield found


def client(server, **how):
    from openai import OpenAI

    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none",
                  **{"max_retries": 0} | how)  # fmt: skip


def ask(server, path, body=None, method=None, headers=(), raw=None):
    """A request by hand: status, body as JSON if it is some, headers."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = raw if raw is not None else None if body is None else json.dumps(body)
    kind = {} if data is None else {"Content-Type": "application/json"}
    link.request(method or ("GET" if data is None else "POST"), path, data, kind | dict(headers))
    answer = link.getresponse()
    text = answer.read()
    link.close()
    said = json.loads(text) if answer.getheader("Content-Type") == "application/json" else text
    return answer.status, said, answer.headers


@served
def test_the_client_of_the_protocol_gets_the_text_of_chapter_10(server):
    how = dict(model="mine", prompt="The river", max_tokens=40, temperature=0.7, seed=6)
    whole = client(server).completions.create(**how, logprobs=2)
    ids = TOKENIZER.encode("The river").tolist()
    wanted = [*draws(Decoder(CONFIG, WEIGHTS), ids, 40, TOKENIZER.special.values(), seed=6,
                     temperature=0.7)]  # fmt: skip
    choice = whole.choices[0]
    assert choice.text == TOKENIZER.decode_text([drawn.token for drawn in wanted])
    reason = "length" if len(wanted) == 40 else "stop"
    assert choice.finish_reason == reason
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, len(wanted))
    again = draws(Decoder(CONFIG, WEIGHTS), ids, len(wanted), (), seed=6, temperature=0.7)
    assert choice.logprobs.token_logprobs == [each.log_probability for each in again]
    assert whole.nanoeuler["seed"] == 6
    pieces = [*client(server).completions.create(**how, stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, reason]
    assert len({piece.id for piece in pieces}) == 1 and len(pieces) > 2


@served
def test_a_chat_by_the_client_of_the_protocol(server):
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Why?"}]
    how = dict(model="mine", messages=messages, seed=2, max_completion_tokens=30)
    whole = client(server).chat.completions.create(**how, logprobs=True, top_logprobs=2)
    ids = prompt(TOKENIZER, "Why?", "Short.")
    wanted = [*generate(Decoder(CONFIG, WEIGHTS), ids, 30, TOKENIZER.special.values(), seed=2,
                        temperature=0.5)]  # fmt: skip
    choice = whole.choices[0]
    assert choice.message.content == TOKENIZER.decode_text(wanted)
    assert choice.message.role == "assistant" and whole.nanoeuler["prompt_ids"] == ids
    log = choice.logprobs.content
    assert b"".join(bytes(each.bytes) for each in log) == TOKENIZER.decode(wanted)
    assert all(len(each.top_logprobs) == 2 and each.logprob < 0 for each in log)
    stream = client(server).chat.completions.create(
        **how, stream=True, stream_options={"include_usage": True})
    chunks = [*stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert told == choice.message.content and chunks[-2].choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


@served
def test_guesses_and_our_own_knobs_by_the_client(server):
    own = {"guesses": 3, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
    whole = client(server).completions.create(model="mine", prompt="a", seed=1, max_tokens=30,
                                              extra_body=own)  # fmt: skip
    ids = generate_ahead(Decoder(CONFIG, WEIGHTS), TOKENIZER.encode("a").tolist(), 30,
                         TOKENIZER.special.values(), guesses=3, seed=1, top_k=5, min_p=0.01,
                         repetition_penalty=1.1)  # fmt: skip
    assert whole.choices[0].text == TOKENIZER.decode_text([*ids])
    assert sum(whole.nanoeuler["guesses"]["made"]) > 0


@served
def test_errors_are_those_of_the_protocol(server):
    import openai

    mine = client(server)
    for error, how in (
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x" * 500}]}),
        (openai.BadRequestError, {"n": 3}),
    ):
        how = {"model": "mine", "messages": [{"role": "user", "content": "a"}]} | how
        for stream in (False, True):  # also a stream has a status of its own
            with pytest.raises(error) as raised:
                mine.chat.completions.create(**how, stream=stream)
            assert raised.value.body["message"] and raised.value.body["type"]
    assert [model.id for model in mine.models.list()] == ["mine"]
    assert mine.models.retrieve("mine").nanoeuler["context"] == CONFIG.context
    with pytest.raises(openai.NotFoundError):
        mine.models.retrieve("other/one")


@served
def test_what_is_no_good_request_has_a_status(server):
    for status, path, how in (
        (404, "/v1/embeddings", {"body": {}}), (404, "/nowhere", {}),
        (404, "/../../etc/passwd", {}),
        (405, "/v1/completions", {}), (405, "/v1/models", {"body": {}}),
        (400, "/v1/completions", {"raw": "no"}), (400, "/v1/completions", {"raw": ""}),
        (413, "/v1/completions", {"raw": " " * (web.BODY + 1)}),
        (415, "/v1/completions", {"raw": "{}", "headers": {"Content-Type": "text/plain"}}),
        (400, "/attention", {"body": {"ids": [1], "layer": 9}}),
    ):  # fmt: skip
        got, said, _ = ask(server, path, **how)
        assert got == status and set(said["error"]) == {"message", "type", "param", "code"}, path


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SAID = b'{"prompt": "a", "max_tokens": 2}'
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(SAID), SAID)
OPEN = HEAD + b"Content-Length: 99999\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def connect(server, *said):
    link = socket.create_connection(("127.0.0.1", server.port), timeout=120)  # if busy
    for each in said:
        link.sendall(each)
    return link


def heard(link):
    """What comes until the server hangs up, by a reset too."""
    found = b""
    with link, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while part := link.recv(1 << 16):
            found += part
    return found


def answered(link):
    """The status of one answer, which is read to its end."""
    answer = http.client.HTTPResponse(link)
    answer.begin()
    answer.read()
    return answer.status


def told_error(answer):
    """The status of the first answer, which must be an error in the protocol's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
    said = json.loads(body[:length])["error"]
    assert set(said) == {"message", "type", "param", "code"} and said["message"]
    return int(head.split()[1])


@served
def test_what_does_not_come_is_not_waited_for(alone, monkeypatch):
    """Neither a first request nor a second, neither a head nor a body, neither slow nor still."""
    monkeypatch.setattr(web, "SECONDS", 0.5)
    for said, status in (
        (b"", None), (WHOLE[:1], 408), (WHOLE[:40], 408), (HEAD, 408), (OPEN, 408),
        (WHOLE[:-1], 408),
    ):  # fmt: skip
        got = heard(connect(alone, said))
        assert (told_error(got) if status else got) == (status or b""), said
    for more in (b"", WHOLE[:30], WHOLE[:-1]):  # on a connection that has had an answer
        link = connect(alone, WHOLE)
        assert answered(link) == 200
        link.sendall(more)
        got = heard(link)
        assert told_error(got) == 408 if more else not got
    dripping = (WHOLE[:1], WHOLE[1:] * 9), (HEAD, b"X-More: 1\r\n" * 99), (OPEN, b" " * 999)
    for head, rest in dripping:
        link = connect(alone, head)  # a byte at a time, for ever
        with pytest.raises(OSError):
            for i in range(400):
                link.sendall(rest[i : i + 1])
                time.sleep(0.02)
    refused = connect(alone, HEAD.replace(b"json", b"jpeg") + b"Content-Length: 100000\r\n\r\n")
    assert answered(refused) == 415
    with pytest.raises(OSError):  # what comes of a body that was refused has an end, too
        for _ in range(400):
            refused.sendall(b" ")
            time.sleep(0.02)
    until(lambda: not alone.connections)


@served
def test_a_body_in_chunks_is_refused_before_it_is_read(server):
    """Chunks of a byte cost us twenty microseconds each, and the client nothing."""
    got = heard(connect(server, CHUNKED, b"1\r\n{\r\n"))
    assert told_error(got) == 411 and got.count(b"HTTP/1.1") == 1


@served
@pytest.mark.parametrize("grace", [web.GRACE, 0])
def test_half_a_crowd_is_not_taken_for_idle(grace, monkeypatch):
    """More clients than places, all at once, whose requests are whole: none is dropped unheard.

    Not even at once (0), as on a machine so busy that the moment passes before anything is read.
    """
    monkeypatch.setattr(web, "GRACE", grace)
    with serving(seats=1, waiting=1) as server:  # 68 places
        links = [connect(server, WHOLE) for _ in range(200)]
        found = [answered(link) for link in links]
        assert set(found) == {200, 503} or found == [200] * 200
        for link in links:
            link.close()


@served
@pytest.mark.parametrize("how", ["half", "reset"])
def test_who_has_left_is_written_to_no_longer(how, monkeypatch):
    """The system would warn of each piece that is. Here many are ready when it is heard."""
    event = web.event
    monkeypatch.setattr(web, "event", lambda said: time.sleep(0.005) or event(said))
    with serving(weights=EQUAL, tokens=300) as server:
        body = b'{"prompt": "a", "max_tokens": 300, "top_p": 0.9, "stream": true}'
        for _ in range(3):
            link = connect(server, HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            assert b" 200 " in link.recv(100)
            time.sleep(0.1)
            if how == "half":
                link.shutdown(socket.SHUT_WR)
                heard(link)
            else:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                link.close()
        until(lambda: not server.worker.running)


@served
def test_a_stream_that_nobody_reads_is_given_up(monkeypatch):
    monkeypatch.setattr(web, "SECONDS", 0.5)
    opened = web.listener

    def small(*address):
        door = opened(*address)  # what it accepts has its buffers: full soon
        door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return door

    monkeypatch.setattr(web, "listener", small)
    with serving(weights=EQUAL, tokens=10**6) as server:
        body = {"prompt": "a", "max_tokens": 10**6, "top_p": 0.9, "logprobs": 20, "stream": True}
        body = json.dumps(body).encode()  # which never ends, and fills 2 KB a token
        link = socket.socket()
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(("127.0.0.1", server.port))
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: server.worker.running)
        until(lambda: not server.worker.running and not server.connections, seconds=60)
        link.close()


@served
def test_a_body_that_never_ends_is_not_read(server):
    link = connect(server, OPEN.replace(b"99999", b"9" * 20))
    with contextlib.suppress(OSError):
        for _ in range(200):
            link.sendall(b" " * 0x1000)
    with link, contextlib.suppress(ConnectionResetError):  # it answered and hung up: as good
        assert b" 413 " in link.recv(4096)


@served
@pytest.mark.parametrize("said", [b"", b"GET", HEAD, OPEN, WHOLE[:-1]], ids=len)
def test_connections_that_say_nothing_keep_nobody_out(alone, said):
    """Slowloris: more of them than there may be connections, and each request is answered."""
    idle = []
    for _ in range(3):
        idle += [connect(alone, said) for _ in range(100)]
        assert ask(alone, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    most = 2 * (alone.worker.slots + alone.worker.max_waiting) + 64
    assert len(idle) > most
    until(lambda: len(alone.connections) <= most)
    for link in idle:
        link.close()
    until(lambda: not alone.connections)


@served
def test_whoever_is_answered_keeps_the_place_when_others_come():
    with serving(pause=0.02, weights=EQUAL, seats=1) as server, ThreadPoolExecutor(1) as one:
        body = {"prompt": "a", "max_tokens": 100, "seed": 1, "top_p": 0.5}
        alone = ask(server, "/v1/completions", body)
        text = one.submit(ask, server, "/v1/completions", body)
        until(lambda: server.worker.running)
        idle = [connect(server, WHOLE[:20]) for _ in range(300)]
        assert text.result()[1]["choices"] == alone[1]["choices"]
        for link in idle:
            link.close()


MALFORMED = [
    b"\r\n\r\n\r\n", b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    HEAD + b"X: " + b"x" * 70_000 + b"\r\n\r\n",
    HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", HEAD + b"A: b\r\n" * 9000 + b"\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n", CHUNKED + b"zz\r\n", CHUNKED + b"1\r\nab\r\n",
    CHUNKED + b"f" * 99 + b"\r\n", b"HEAD" + CHUNKED[4:] + b"zz\r\n",
    b"\x16\x03\x01\x02\0\x01\0" * 20,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]  # fmt: skip


@served
@pytest.mark.parametrize("said", MALFORMED, ids=lambda said: repr(said[-20:]))
def test_what_is_no_http_is_told_in_the_protocols_form(server, said, monkeypatch):
    monkeypatch.setattr(web, "SECONDS", 1)  # until it hangs up after an answer
    got = heard(connect(server, said))
    assert not got or told_error(got) in (400, 403, 411)  # none: it hung up before all was sent
    assert got or len(said) > 16_000


@served
def test_what_is_wrong_behind_an_answer_is_no_traceback(server, monkeypatch):
    """A body that goes wrong when it has been refused already, or before it has begun."""
    monkeypatch.setattr(web, "SECONDS", 1)
    bad = OPEN.replace(b"/v1/completions", b"/nowhere")
    ask_first = HEAD + b"Expect: 100-continue\r\n\r\n"
    for said in (bad, OPEN.replace(b"json", b"jpeg"), CHUNKED, CHUNKED + b"zz", ask_first):
        link = connect(server, said)
        assert b"HTTP/1.1 " in link.recv(1 << 16)
        link.sendall(b"zz\r\nzz\r\n")
        heard(link)
    assert ask(server, "/health")[0] == 200


@served
def test_whoever_leaves_in_the_middle_of_a_body_is_no_traceback(alone):
    for said in (OPEN + b"{", WHOLE[:-1], HEAD):
        connect(alone, said).close()
    until(lambda: not alone.connections)


@served
def test_requests_one_behind_the_other_are_answered_in_their_order(server):
    bodies = [json.dumps({"prompt": f"{i}", "max_tokens": 1, "seed": i}).encode() for i in range(5)]
    whole = [HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(each), each) for each in bodies]
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    got = heard(connect(server, b"".join(whole) + last))
    assert got.count(b" 200 OK") == 6
    assert [int(each) for each in re.findall(rb'"seed":(\d)', got)] == [*range(5)]


@served
def test_an_older_client_and_one_that_asks_first_whether_it_may_send(server):
    got = heard(connect(server, WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0")))
    assert b" 200 OK" in got and b'"seed"' in got
    link = connect(server, WHOLE[: -len(SAID) - 2] + b"Expect: 100-continue\r\n\r\n")
    assert link.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
    link.sendall(SAID)
    assert b" 200 OK" in link.recv(1 << 16)
    link.close()


@served
def test_attention_maps_have_a_queue_with_an_end(server, monkeypatch):
    monkeypatch.setattr(web, "LOOKS", 2)
    monkeypatch.setattr(web, "look", lambda *what: time.sleep(0.3) or {})
    with ThreadPoolExecutor(8) as many:
        found = [*many.map(lambda _: ask(server, "/attention", {"ids": [1]}), range(8))]
    assert sorted({status for status, _, _ in found}) == [200, 503]
    for status, said, headers in found:
        if status == 503:
            assert said["error"]["type"] == "overloaded" and headers["Retry-After"] == "1"
    assert ask(server, "/attention", {"ids": [1]})[0] == 200


# Who may ask a server that is called localhost, at port 8000: Host, Origin, whether it is let in.
DOORS = [
    ("localhost:8000", None, True), ("localhost", None, True), ("127.0.0.1:8000", None, True),
    ("[::1]:8000", None, True), ("LOCALHOST:8000", None, True), ("localhost:1", None, True),
    ("LocalHost:8000", "http://localhost:8000", True),
    ("localhost:8000", "http://localhost:8000", True),
    ("localhost:8000", "https://localhost:8000", True),  # of a server before it that encrypts
    ("localhost:8000", "", True),
    # Names that an attacker may have given our address: DNS rebinding.
    ("evil.example", None, False), ("evil.example:8000", None, False), ("", None, False),
    ("evil.example:8000", "http://evil.example:8000", False),
    ("127.0.0.1.evil.example", None, False),
    ("localhost.evil.example:8000", None, False), ("evil.localhost:8000", None, False),
    ("localhost:8000.evil.example", None, False), ("localhost:8000@evil.example", None, False),
    ("evil.example#localhost", None, False), ("localhost:80 00", None, False),
    ("127.1:8000", None, False), ("2130706433:8000", None, False), ("0x7f000001", None, False),
    ("0.0.0.0:8000", None, False), ("[::]:8000", None, False), ("[::ffff:127.0.0.1]", None, False),
    ("localhost:\u0663", None, False), ("localhost.:8000", None, False),
    ("192.168.1.2", None, False),
    # Pages of others.
    ("localhost:8000", "https://evil.example", False), ("localhost:8000", "null", False),
    ("localhost:8000", "http://localhost", False), ("localhost:8000", "http://localhost:80", False),
    ("localhost:8000", "http://127.0.0.1:8000", False),
    ("localhost:8000", "evil://localhost:8000", False), ("localhost:8000", "localhost:8000", False),
    ("localhost:8000", "file://", False), ("localhost:8000", "://localhost:8000", False),
    ("localhost:8000", "http://localhost:8000.evil.example", False),
    ("localhost:8000", "http://evil@localhost:8000", False),
    ("localhost:8000", "http://localhost:8000/", False), ("localhost:8000", "*", False),
    ("localhost:8000", "chrome-extension://localhost:8000", False),
    ("localhost:8000", " http://localhost:8000", False),
]  # fmt: skip


def guarded(hosts, origins, *headers):
    said = [(name, value.encode("utf-8")) for name, value in headers if value is not None]
    return web.Guard(None, hosts, origins).refused(said) is None


@pytest.mark.parametrize("host, origin, good", DOORS)
def test_who_is_let_in(host, origin, good):
    mine = "127.0.0.1", "::1", "localhost", "[::1]"
    assert guarded(mine, (), (b"host", host), (b"origin", origin)) == good


def test_a_header_that_comes_twice_opens_no_door():
    host, origin = (b"host", "localhost:8000"), (b"origin", "http://localhost:8000")
    evil = (b"host", "evil.example"), (b"origin", "http://evil.example")
    assert guarded(["localhost"], (), host, origin)
    for headers in ([host, host, origin], [host, origin, evil[1]], [host, evil[1], origin],
                    [evil[0], host], [host, evil[0]], [host, origin, origin]):  # fmt: skip
        assert not guarded(["localhost"], (), *headers)


@pytest.mark.parametrize("host, origin, good", [
    ("box.lan:8000", None, True), ("192.168.1.2:8000", "http://192.168.1.2:8000", True),
    ("[fd00::2]:8000", "http://[fd00::2]:8000", True), ("127.0.0.1:8", "http://127.0.0.1:8", True),
    ("localhost:8000", "http://localhost:8000", True), ("box:1", "https://front.example", True),
    ("box:1", "http://front.example", False), ("192.168.1.2:8000", "http://evil.example", False),
    # What a name means is decided by whoever owns it, so a page by that name may be anybody's.
    ("evil.example:8000", "http://evil.example:8000", False), ("box:1", "http://box:1", False),
])  # fmt: skip
def test_who_is_let_in_where_others_reach_the_server(host, origin, good):
    """It does not know its own names, so of pages only those of an address are its own."""
    allowed = ["https://front.example"]
    assert guarded(None, allowed, (b"host", host), (b"origin", origin)) == good


@served
def test_a_media_type_has_no_case(server):
    for kind, status in (("APPLICATION/JSON", 200), ("application/Json ; charset=utf-8", 200),
                         ("application/jsonp", 415), ("text/plain", 415), ("", 415),
                         ("text/plain, application/json", 415)):  # fmt: skip
        got = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1},
                  headers={"Content-Type": kind})  # fmt: skip
        assert got[0] == status, kind


@served
def test_pages_of_others_may_not_ask(server):
    body = {"prompt": "a", "max_tokens": 1}
    for headers, status in (
        ({}, 200), ({"Origin": f"http://127.0.0.1:{server.port}"}, 200),
        ({"Origin": "https://evil.example"}, 403), ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    ):  # fmt: skip
        got, said, _ = ask(server, "/v1/completions", body, headers=headers)
        assert got == status, (headers, said)
    with serving(origins=["https://front.example"], hosts=None) as open_to:
        for origin, status in (("https://front.example", 200), ("https://evil.example", 403)):
            got, _, headers = ask(open_to, "/v1/completions", body, headers={"Origin": origin})
            assert got == status
            assert headers.get("Access-Control-Allow-Origin") == (origin if got == 200 else None)
        got, _, headers = ask(open_to, "/v1/completions", method="OPTIONS", headers={
            "Origin": "https://front.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,authorization"})  # fmt: skip
        assert got == 200 and "content-type" in headers["Access-Control-Allow-Headers"]
        assert ask(open_to, "/health", headers={"Host": "any.example"})[0] == 200


@served
@pytest.mark.parametrize("stream", kept([False, True], True))
def test_a_hundred_at_once_are_answered_or_refused(stream):
    """With room for seven; and with a client that asks again, as the protocol's own does."""
    import openai

    how = dict(model="mine", max_tokens=10, stream=stream)

    def one(i):
        try:
            made = mine.completions.create(prompt=f"number {i}", seed=i, **how)
            if stream:
                return "".join(part.choices[0].text for part in made)
            return made.choices[0].text
        except openai.InternalServerError as error:
            assert error.status_code == 503 and error.response.headers["retry-after"] == "1"
            return None

    def alone(i):
        ids = generate(Decoder(CONFIG, WEIGHTS), TOKENIZER.encode(f"number {i}").tolist(), 10,
                       TOKENIZER.special.values(), seed=i)  # fmt: skip
        return TOKENIZER.decode_text([*ids])

    with serving(pause=0.005) as server, ThreadPoolExecutor(100) as many:
        mine = client(server)
        found = [*many.map(one, range(100))]
        answered = [i for i, text in enumerate(found) if text is not None]
        assert len(answered) >= server.worker.slots + server.worker.max_waiting
        assert all(found[i] == alone(i) for i in answered)
        until(lambda: ask(server, "/health")[1]["writing"] == 0)
    with serving(seats=8, waiting=100) as server, ThreadPoolExecutor(100) as many:
        mine = client(server)
        assert None not in [*many.map(one, range(100))]


@served
@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_frees_a_seat(stream):
    with serving(pause=0.02, seats=1, waiting=1, tokens=10**6, weights=EQUAL) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": stream}).encode()
        link = socket.create_connection(("127.0.0.1", server.port))
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                     b"application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: len(server.worker.running) == 1 and len(server.reader.passes) > 3)
        link.close()
        until(lambda: not server.worker.running)
        assert ask(server, "/v1/completions", {"prompt": "b", "max_tokens": 2})[0] == 200


@served
def test_a_mistake_of_ours_is_no_traceback(server, monkeypatch):
    def broken(*what):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(web, "read_request", broken)
    status, said, _ = ask(server, "/v1/completions", {"prompt": "a"})
    assert status == 500 and "secret" not in json.dumps(said)
    monkeypatch.undo()
    monkeypatch.setattr("nanoeuler.serve.streaming.text_pieces", broken)
    assert ask(server, "/v1/completions", {"prompt": "a"})[0] == 500
    monkeypatch.undo()
    assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


class Loads(HTMLParser):
    """What a page makes a browser fetch, and whatever of it is script or style in itself."""

    def __init__(self):
        super().__init__()
        self.addresses, self.inline, self.labelled = [], [], set()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [attributes[name] for name in ("src", "href") if attributes.get(name)]
        self.inline += [name for name in attributes if name == "style" or name.startswith("on")]


def test_the_page_loads_nothing_from_elsewhere_and_is_shipped():
    page = Loads()
    page.feed((ROOT / "data" / "page.html").read_text())
    assert page.addresses == ["data:,", "page.css", "page.js"] and page.inline == []
    for name in ("page.js", "page.css", "page.html"):
        assert "//" not in re.sub(r"^ *//.*|/\*.*?\*/", "", (ROOT / "data" / name).read_text(),
                                  flags=re.M | re.S).replace("</", "")  # fmt: skip
        assert "innerHTML" not in (ROOT / "data" / name).read_text()
        assert f'"data/{name}"' in (ROOT / "pyproject.toml").read_text()


@served
def test_the_pages_files_come_with_rules_for_the_browser(server):
    kinds = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
    for path, kind in kinds.items():
        status, said, headers = ask(server, path)
        assert status == 200 and headers["Content-Type"].startswith(kind) and len(said) > 1000
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    for asked in ("bytes=0-9", "bytes=x", "items=0-9", "bytes=9999999-"):  # no error in plain text
        assert ask(server, "/page.js", headers={"Range": asked})[0] == 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    (folder / "text.txt").write_text("the number of the beast is a number. " * 30)
    train(folder / "text.txt", folder / "tiny", config=CONFIG, engine="reference",
          settings=Settings(steps=1, batch_size=2))  # fmt: skip
    return folder / "tiny"


@contextlib.contextmanager
def program(line):
    """The command in a process of its own, which is interrupted: what it said."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-m", "nanoeuler", "serve", *line.split()]
    process = subprocess.Popen(words, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


LONG = {"prompt": "b", "max_tokens": 1024}


@served
def test_the_command_serves_until_ctrl_c(run, capfd):
    with program(f"--from {run} --port 0 --slots 2") as process:
        said = process.stdout.readline()
        port = int(re.match(r"http://127.0.0.1:(\d+)/ is the chat page", said)[1])
        server = SimpleNamespace(port=port)
        assert client(server).completions.create(model="tiny", prompt="a", max_tokens=3)
        assert main(["serve", "--from", str(run), "--port", str(port)]) == 2
        taken = capfd.readouterr().err
        assert "choose another" in taken and taken.count("\n") == 1
        with ThreadPoolExecutor(1) as one:  # in the middle of an answer
            texts = []

            def writing():  # an answer may end at its first token: then another one is asked for
                if not texts or texts[-1].done():
                    texts.append(one.submit(ask, server, "/v1/completions", LONG))
                return ask(server, "/health")[1]["writing"]

            until(writing)
            process.send_signal(signal.SIGINT)
            assert all(text.result()[0] in (200, 503) for text in texts)
        assert process.wait(timeout=20) == 0
        said = process.stderr.read()
        assert "parameters" in said and "warning" not in said and "Traceback" not in said


@served
def test_the_command_warns_where_others_can_reach_it(run):
    with program(f"--from {run} --port 0 --host 0.0.0.0") as process:
        port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
        assert ask(SimpleNamespace(port=port), "/health", headers={"Host": "box.example"})[0] == 200
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        said = process.stderr.read()
        warning = f"warning: anybody who can reach port {port} of 0.0.0.0"
        assert warning in said and "password" in said


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(web, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"starlette is missing: pip install 'nanoeuler\[serve\]'"):
        web.application(None, None)


def test_an_address_that_is_none_is_told():
    for host in ("no.such.host.invalid", "300.1.1.1", "a" * 300):
        with pytest.raises(UserError, match="cannot listen at"):
            web.listener(host, 0)


# ---- the page, in a browser

drawn = pytest.mark.skipif(not (chromium.CHROMIUM and find_spec("websocket")),
                           reason="there is no Chromium here, or no websocket-client")  # fmt: skip


@pytest.fixture
def page():
    with chromium.browser() as found:
        yield found


READY = "document.getElementById('model').textContent.includes('million')"
STILL = "!document.querySelector('.busy')"
SEED = "document.getElementById('seed').value = '1'"  # by chance an answer ends at its first token


def count(what):
    return f"document.querySelectorAll('{what}').length"


@served
@drawn
def test_the_page_talks_by_keyboard_alone(page):
    with serving() as server:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.until(READY)
        page.run(SEED)
        page.type("a < b")  # the field has the focus
        page.press("Enter", shift=True)
        page.type("& <b>bold</b>?")
        page.press("Enter")
        page.until(f"{count('.turn')} === 2 && {STILL}")
        asked = page.run("document.querySelector('.turn.user').lastChild.textContent")
        assert asked == "a < b\n& <b>bold</b>?"
        assert page.run(f"{count('#talk b')} === 0 && {count('#tokens button')} > 3")
        page.run("document.getElementById('tokens-view').open = true")
        page.run("document.querySelector('#tokens button').focus()")
        page.press("ArrowRight")
        assert page.run("document.querySelectorAll('#tokens button')[1].ariaPressed") == "true"
        assert page.run(count("#rivals li")) == 5
        page.run("document.querySelector('#attention-view summary').focus()")
        page.press(" ")
        page.until(f"{count('#looks button')} > 3")
        assert page.run("document.getElementById('map').width === state.maps.size")
        page.run("document.getElementById('question').focus()")
        page.type("And then?")
        page.press("Enter")
        page.until(f"{count('.turn')} === 4 && {STILL}")
        assert page.run("state.messages.map((m) => m.role[0]).join('')") == "uaua"
        assert page.errors == []
        home = f"http://127.0.0.1:{server.port}/"
        assert all(address.startswith((home, "data:")) for address in page.asked), page.asked


@served
@drawn
def test_the_page_stops_an_answer_and_keeps_what_there_is(page):
    with serving(pause=0.05, seats=1, weights=EQUAL) as server:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.until(READY)
        for stop in ("key", "click"):
            page.run("document.getElementById('question').focus()")
            page.type("Go on")
            page.press("Enter")
            page.until("document.querySelector('.busy')?.lastChild.textContent.length > 2")
            if stop == "key":
                page.press("Escape")
            else:
                page.run("document.getElementById('stop').click()")
            page.until(STILL)
            until(lambda: not server.worker.running)  # the server has stopped, too
        assert page.run("state.messages.length") == 4 and page.errors == []
        assert page.run(count(".wrong")) == 0


@served
@drawn
def test_the_page_shows_guesses_and_errors_on_a_phone_in_the_dark(page):
    with serving() as server:
        page.open(f"http://127.0.0.1:{server.port}/", 390, 844, phone=True, dark=True)
        page.until(READY)
        page.run(SEED)
        page.run("document.getElementById('guesses').value = '3'")
        page.run("document.getElementById('question').focus()")
        page.type("Guess")
        page.press("Enter")
        page.until(f"{count('.turn')} === 2 && {STILL}")
        assert page.run(f"{count('#kept tbody tr')} === 3 && {count('#guessed span')} > 3")
        page.run("for (const d of document.querySelectorAll('details')) d.open = true")
        page.until(f"{count('#looks button')} > 3")
        assert page.run("document.documentElement.scrollWidth") == 390  # nothing sticks out
        page.run("document.getElementById('temperature').value = '-1'")
        page.run("document.getElementById('question').focus()")
        page.type("Too cold")
        page.press("Enter")
        page.until(f"{count('.turn.wrong')} === 1 && {STILL}")
        said = page.run("document.querySelector('.turn.wrong').textContent")
        assert "expected temperature to be a number" in said
        assert page.run("state.messages.length") == 2  # the question without an answer is not kept
