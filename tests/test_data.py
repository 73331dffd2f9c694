"""Splits, batches and bits per byte: properties that must hold for any text and any sizes."""

import hashlib
import io
import itertools
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoeuler.data import shards, text
from nanoeuler.data.batches import STEP_TOKENS, Batches, Prefetcher
from nanoeuler.data.dataset import Prepared
from nanoeuler.data.prepare import prepare_text
from nanoeuler.data.shards import ShardWriter, Tokens, shard_path
from nanoeuler.data.text import digest, read_text, scanned, split
from nanoeuler.data.validation import QUICK_WINDOWS, HeldOut, entropies
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.tokenizer.tokenizer import Tokenizer

RIVER = Path(__file__).parents[1] / "data" / "river.txt"


class ThreeBytes:
    """A stand-in tokenizer: id i spells i % 3 + 1 bytes."""

    vocab_size, special, hash = 50, {"<|endoftext|>": 49}, "of three bytes"

    def decode(self, ids):
        return b"".join(b"x" * (int(i) % 3 + 1) for i in ids)


@given(st.text(max_size=200))
def test_a_split_loses_nothing_and_cuts_between_characters(text):
    text = text.encode("utf-8", "ignore")
    train, held_out = split(text)
    assert train + held_out == text
    train.decode("utf-8"), held_out.decode("utf-8")
    assert 0 <= len(train) - int(0.9 * len(text)) <= 3  # a character has at most four bytes


sizes = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**32))


@given(sizes, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_pass_visits_every_window_once_and_targets_are_what_follows(sizes, more):
    context, n_predict, batch_size, seed = sizes
    tokens = np.arange(2 * context + n_predict - 1 + more)  # a token is its own position
    batches = Batches(tokens, batch_size, context, n_predict, seed)
    seen = []
    for step in range(1, 2 * batches.windows + 1):
        x, y = batches.batch(step)
        assert x.shape == (batch_size, context) and y.shape == (batch_size, context, n_predict)
        assert x.dtype == y.dtype == np.int32
        assert (np.diff(x, axis=1) == 1).all()
        assert (y == x[:, :, None] + 1 + np.arange(n_predict)).all()
        seen += list(x[:, 0])
    for number in range(2):  # passes
        starts = np.sort(seen[number * batches.windows : (number + 1) * batches.windows])
        assert 0 <= starts[0] < context and (np.diff(starts) == context).all()
    # no room was left for another window, at the offset where there is least room
    assert (batches.windows + 2) * context + n_predict - 1 > len(tokens)


@given(sizes, st.lists(st.integers(1, 60), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_batch_is_a_function_of_seed_and_step_alone(sizes, steps):
    context, n_predict, batch_size, seed = sizes
    tokens = np.random.default_rng(0).integers(0, 99, 100)
    asked = Batches(tokens, batch_size, context, n_predict, seed)
    for step in steps:
        fresh = Batches(tokens, batch_size, context, n_predict, seed).batch(step)
        for a, b in zip(asked.batch(step), fresh, strict=True):
            assert np.array_equal(a, b)


def test_a_pass_is_cut_from_an_offset_of_its_own():
    batches = Batches(np.arange(2000), 62, 32, 1, seed=0)
    assert batches.windows == 61  # so that no step lies in one pass alone
    offsets = [set(batches.starts(step) % 32) for step in range(1, 40)]
    assert len(set.union(*offsets)) > 16  # of 32; 40 draws leave out nine on average


def in_shards(folder, ids, shard_tokens):
    """Tokens of a row of ids below 50, in shards of so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # a power cut is not what is tested here
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        writer = ShardWriter(folder, "train", ThreeBytes())
        writer.document(len(ids), [ids])
        count = len(writer.close()["shards"])
    return Tokens([shard_path(folder, "train", i) for i in range(count)], ThreeBytes())


@given(sizes, st.integers(1, 40), st.integers(1, 30))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_from_shards_are_those_from_an_array(tmp_path, sizes, shard_tokens, step):
    context, n_predict, batch_size, seed = sizes
    ids = np.random.default_rng(1).integers(0, 50, 2 * context + n_predict + 40)
    tokens = in_shards(tmp_path, ids, shard_tokens)
    shape = batch_size, context, n_predict, seed
    for a, b in zip(Batches(tokens, *shape).batch(step), Batches(ids, *shape).batch(step),
                    strict=True):  # fmt: skip
        assert a.dtype == b.dtype == np.int32 and np.array_equal(a, b)
        assert a.flags.c_contiguous and a.flags.writeable


class Many:
    """Stands for more tokens than four bytes can number."""

    def __len__(self):
        return 3 << 32


def test_places_beyond_four_bytes_are_counted_right():
    batches = Batches(Many(), 64, 1 << 16, 1, seed=0)
    assert batches.windows == (3 << 16) - 1  # the last has no room to begin at another offset
    starts = np.concatenate([batches.starts(step + 1) for step in range(batches.windows // 64)])
    assert starts.dtype == np.int64 and starts.min() >= 0 and starts.max() > 1 << 33
    assert (np.diff(np.sort(starts)) % (1 << 16) == 0).all() and len(set(starts)) == len(starts)


@given(st.integers(0, 2**63), st.integers(1, 10**18))
@settings(max_examples=25)
def test_a_step_of_any_number_has_a_batch(seed, step):
    batches = Batches(np.arange(50), 7, 8, 2, seed)
    starts = batches.starts(step)
    assert len(starts) == 7 and 0 <= starts.min() and starts.max() <= 50 - 8 - 2


def test_the_order_of_a_pass_is_made_once(monkeypatch):
    batches, made = Batches(np.arange(2000), 4, 8, 1, seed=0), []
    make = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: (made.append(key), make(key))[1])
    for step in range(1, 1 + batches.windows // 4):
        batches.batch(step)
    assert made == [(0, 0)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_windows_is_equally_likely(n):
    orders = dict.fromkeys(itertools.permutations(range(n)), 0)
    tokens = np.arange(8 * (n + 1))
    for seed in range(3000):
        batches = Batches(tokens, n, 8, 1, seed)
        assert batches.windows == n
        orders[tuple((batches.starts(1) // 8).tolist())] += 1
    counts = np.array(list(orders.values()))
    free = len(counts) - 1
    chi_squared = np.sum((counts - counts.mean()) ** 2) / counts.mean()
    assert chi_squared < free + 5 * math.sqrt(2 * free)  # five standard deviations


@pytest.mark.parametrize("batch_size", [STEP_TOKENS // 32 + 1, 10**9, 2**63 - 1, 10**400])
def test_a_batch_that_no_machine_could_hold_is_refused_at_once(batch_size):
    with pytest.raises(UserError, match=f"at most {STEP_TOKENS // 32} for a context of 32"):
        Batches(np.zeros(67), batch_size, 32, 4, 0)


def test_other_seeds_and_passes_give_other_orders():
    tokens = np.arange(2000)
    firsts = {
        (seed, step): tuple(Batches(tokens, 62, 32, 1, seed).batch(step)[0][:, 0])
        for seed in (0, 1)
        for step in (1, 2)
    }
    assert Batches(tokens, 62, 32, 1, 0).windows in (61, 62) and len(set(firsts.values())) == 4


def test_a_text_that_is_too_short_is_refused_with_the_length_it_needs():
    with pytest.raises(UserError, match="at least 67 training tokens .* got 66"):
        Batches(np.zeros(66), 4, 32, 4, 0)
    assert Batches(np.zeros(67), 4, 32, 4, 0).batch(1)[1].shape == (4, 32, 4)
    with pytest.raises(UserError, match="held-out"):
        HeldOut.from_tokens(np.zeros(1, int), ThreeBytes(), 4, 32, 4)


@given(st.integers(2, 300), st.integers(1, 17), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_held_out_token_but_the_first_is_judged_once(n, context, batch_size):
    tokens = np.random.default_rng(n).integers(0, 49, n).astype(np.int32)
    held_out, judged = HeldOut.from_tokens(tokens, ThreeBytes(), batch_size, context, 3), []

    def loss(x, y):
        assert x.shape == (batch_size, context) and y.shape == (batch_size, context, 3)
        assert (y[:, :, 1:] == IGNORE).all() and (x >= 0).all()
        judged.extend(y[:, :, 0][y[:, :, 0] != IGNORE])
        return np.array([len(tokens) * 0.25, 7.0, 7.0])

    bits = held_out.bits_per_byte(loss)
    assert np.array_equal(judged, tokens[1:])
    n_bytes = len(ThreeBytes().decode(tokens[1:]))
    batches = math.ceil(math.ceil((n - 1) / context) / batch_size)
    assert math.isclose(bits, batches * n * 0.25 / math.log(2) / n_bytes, rel_tol=1e-12)
    assert math.isclose(held_out.bytes_per_token, n_bytes / (n - 1), rel_tol=1e-12)


def test_inputs_are_what_comes_before_the_targets():
    tokens = np.arange(40, dtype=np.int32)
    for x, y in HeldOut.from_tokens(tokens, ThreeBytes(), 2, 8, 1).batches(np.arange(5)):
        counted = y[:, :, 0] != IGNORE
        assert (x[counted] + 1 == y[:, :, 0][counted]).all()


def test_a_quick_look_judges_its_share_from_beginning_to_end():
    tokens = np.arange(10 * QUICK_WINDOWS * 4 + 1, dtype=np.int32)
    held_out, windows = HeldOut.from_tokens(tokens, ThreeBytes(), 16, 4, 1), []

    def loss(x, y):
        windows.extend(x[:, 0])
        return np.array([float(np.sum(y != IGNORE))])

    quick, full = held_out.bits_per_byte(loss, quick=True), held_out.bits_per_byte(loss)
    assert len(windows) == 11 * QUICK_WINDOWS
    assert windows[0] == 0 and windows[QUICK_WINDOWS - 1] == 4 * (10 * QUICK_WINDOWS - 1)
    # The tokens of a tenth of the windows spell 1, 2 or 3 bytes, on average nearly 2 as all do.
    assert math.isclose(quick, full, rel_tol=0.05)


def test_the_landmarks_of_a_text_with_two_tokens():
    assert entropies(np.array([3, 5, 3, 5]), 512) == {"uniform": 9.0, "unigram": 1.0}


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "latin1").write_bytes("é".encode("latin1"))
    for name, words in (("latin1", "byte 0"), ("absent", "No such file"), (".", "directory")):
        with pytest.raises(UserError, match=words):
            read_text(tmp_path / name)


def test_ends_of_documents_are_not_judged_and_spell_nothing():
    tokens = np.array([1, 2, 49, 4, 49, 49, 5])
    held_out, judged = HeldOut.from_tokens(tokens, ThreeBytes(), 1, 3, 1), []

    def loss(x, y):
        judged.extend(y[y != IGNORE])
        assert (x >= 0).all()
        return np.ones(1)

    bits = held_out.bits_per_byte(loss)
    assert judged == [2, 4, 5]
    assert math.isclose(bits, 2 / math.log(2) / len(ThreeBytes().decode([2, 4, 5])))
    assert 49 in held_out.inputs  # what comes after an end may know of it


@pytest.mark.parametrize("tokens", [[], [1], [49, 49, 49], [1, 49]])
def test_a_held_out_text_with_nothing_to_judge_is_refused(tokens):
    with pytest.raises(UserError, match="expected held-out tokens to judge"):
        HeldOut.from_tokens(np.array(tokens, np.int32), ThreeBytes(), 1, 3, 1)


def test_held_out_text_from_shards_is_that_from_an_array(tmp_path):
    ids = np.random.default_rng(2).integers(0, 50, 100)
    a = HeldOut.from_tokens(in_shards(tmp_path, ids, 9), ThreeBytes(), 4, 8, 2)
    b = HeldOut.from_tokens(ids, ThreeBytes(), 4, 8, 2)
    assert np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets)
    assert a.baselines == b.baselines


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_ahead_gives_what_batches_gives_in_any_order(steps):
    batches = Batches(np.arange(200), 3, 8, 2, seed=5)
    ahead = Prefetcher(batches)
    for step in steps:
        for a, b in zip(ahead.batch(step), batches.batch(step), strict=True):
            assert np.array_equal(a, b)


class Slow:
    """Batches that are made when `go` is set; `begun` holds the steps and their threads."""

    def __init__(self):
        self.go, self.begun = threading.Event(), []

    def batch(self, step):
        self.begun.append((step, threading.current_thread()))
        if step > 1:
            assert self.go.wait(60)
        if step == 3:
            raise UserError("step 3 is damaged")
        return step


def test_ahead_prepares_the_next_batch_while_the_caller_works():
    slow = Slow()
    ahead = Prefetcher(slow)
    assert ahead.batch(1) == 1  # and returns though the next one takes long
    while len(slow.begun) < 2:
        time.sleep(0.001)
    step, thread = slow.begun[1]
    assert step == 2 and thread is not threading.current_thread() and thread.daemon
    slow.go.set()
    assert ahead.batch(2) == 2
    assert [step for step, _ in slow.begun].count(2) == 1  # it was not made again


def test_an_error_of_the_thread_reaches_the_one_who_asks_each_time_and_nobody_else():
    slow = Slow()
    slow.go.set()
    ahead = Prefetcher(slow)
    assert ahead.batch(2) == 2
    for _ in range(2):
        with pytest.raises(UserError, match="step 3 is damaged"):
            ahead.batch(3)
    assert ahead.batch(4) == 4


def test_a_thread_that_cannot_start_leaves_no_batch_to_wait_for(monkeypatch):
    ahead = Prefetcher(Batches(np.arange(200), 3, 8, 2, seed=5))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more threads"):
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no more threads")))
        ahead.batch(1)
    assert ahead._ready is None  # a Future here would never be done
    assert np.array_equal(ahead.batch(2)[0], ahead.batches.batch(2)[0])


def test_a_damaged_shard_is_named_through_ahead(tmp_path):
    tokens = in_shards(tmp_path, np.full(300, 60), 100)
    with pytest.raises(UserError, match="ids below 50"):
        Prefetcher(Batches(tokens, 2, 8, 1, 0)).batch(1)


@pytest.mark.parametrize("end, code", [("pass", 0), ("raise SystemExit(3)", 3)])
def test_a_batch_that_never_comes_does_not_keep_a_program_from_ending(end, code):
    program = f"""
import time
from nanoeuler.data.batches import Prefetcher
class Never:
    def batch(self, step):
        if step > 1:
            time.sleep(3600)
Prefetcher(Never()).batch(1)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True)
    assert done.returncode == code and done.stderr == b""


def test_threads_end_with_their_batches():
    before = threading.active_count()
    ahead = Prefetcher(Batches(np.arange(200), 3, 8, 2, seed=5))
    for step in range(1, 50):
        ahead.batch(step)
    ahead._ready.result()
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.001)
    assert threading.active_count() <= before


@given(st.text(max_size=60), st.integers(0, 80), st.integers(1, 9))
def test_the_place_of_a_bad_byte_does_not_depend_on_how_a_file_is_read(words, at, chunk):
    raw = words.encode("utf-8", "ignore")
    raw = raw[: at % (len(raw) + 1)] + b"\xe9" + raw[at % (len(raw) + 1) :]
    with pytest.raises(UnicodeDecodeError) as expected:
        raw.decode()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK", chunk)
        path = Path(folder, "text")
        path.write_bytes(raw)
        with pytest.raises(UserError, match=rf"byte {expected.value.start} of "):
            read_text(path)


@given(st.text(max_size=60), st.integers(1, 9))
def test_the_digest_of_a_file_is_that_of_its_bytes(words, chunk):
    raw = words.replace("\r", "").encode("utf-8", "ignore")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK", chunk)
        Path(folder, "text").write_bytes(raw)
        assert scanned(Path(folder, "text")).digest == digest(raw)


def test_a_digest_holds_a_few_chunks_of_the_file_and_no_more(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"a river \n" * 4_000_000)  # 36 MB
    tracemalloc.start()
    scanned(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * text.CHUNK  # a chunk as bytes, as characters, and the one before it


def test_held_out_windows_may_come_from_anywhere():
    inputs = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    targets = np.array([[IGNORE, 4, 5], [IGNORE, IGNORE, 6]], np.int32)
    held_out = HeldOut(inputs, targets, ThreeBytes(), batch_size=4, n_predict=2)
    ((x, y),) = held_out.batches(np.arange(2))
    assert np.array_equal(x[:2], inputs) and np.array_equal(y[:2, :, 0], targets)
    assert held_out.bytes_per_token == len(ThreeBytes().decode([4, 5, 6])) / 3
    with pytest.raises(UserError, match="expected held-out tokens to judge"):
        HeldOut(inputs, np.full((2, 3), IGNORE), ThreeBytes(), batch_size=4, n_predict=2)


# Line ends.


WITH_ENDS = st.text(alphabet="aé€\r\n", max_size=40)


def written(folder, raw, chunk, patch):
    patch.setattr(text, "CHUNK", chunk)
    path = Path(folder, "text")
    path.write_bytes(raw)
    return path


def normal(words):
    """The same by the definition: universal newlines, as Python's own text files have them."""
    with io.TextIOWrapper(io.BytesIO(words.encode()), "utf-8", newline=None) as file:
        return file.read().encode()


@given(WITH_ENDS, st.integers(1, 5), st.integers(0, 45), st.integers(0, 45))
def test_line_ends_do_not_depend_on_how_a_file_is_read(words, chunk, start, stop):
    want = normal(words)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = written(folder, words.encode(), chunk, patch)
        assert read_text(path) == b"".join(text.chunks(path)) == want
        assert b"".join(text.chunks(path, start, stop)) == want[start:stop]
        assert text.scanned(path) == (digest(want), len(want), words.count("\r"))


def test_a_text_from_windows_is_the_same_text(tmp_path, capsys):
    """Prepared, it has the same digest and the same tokens; judged, the same bytes."""
    raw, found = (RIVER.read_bytes() + "é".encode() * 900).replace(b". ", b".\n"), []
    for name, ends in (("unix", b"\n"), ("windows", b"\r\n"), ("old mac", b"\r")):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(raw.replace(b"\n", ends))
        prepare_text(path, tmp_path / name, vocab_size=300)
        opened = Prepared(tmp_path / name)
        sides = (side.window([0], len(side)) for side in (opened.train, opened.held_out))
        sides = [ids[0].tobytes() for ids in sides]
        found.append((opened.digest, opened.tokenizer.hash, *sides, read_text(path)))
        said = capsys.readouterr().err.splitlines()
        told = f"{path}: line ends normalized: {raw.count(10):,}"
        assert said == ([told] * 2 if name != "unix" else [])  # prepared, and read for judging
    assert found[0] == found[1] == found[2]
    assert len(found[0][-1]) == len(raw)


def test_what_was_prepared_from_line_feeds_alone_keeps_its_digest(tmp_path):
    assert scanned(RIVER).digest == hashlib.sha256(RIVER.read_bytes()).hexdigest()[:16]


def test_a_pipe_and_a_device_are_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/urandom")
    for name in ("pipe", "link"):
        for read in (read_text, scanned, Tokenizer.load):
            with pytest.raises(UserError, match="is a pipe or a device"):
                read(tmp_path / name)
