"""The script that measures steps over two GPUs, as far as no GPU is needed: jobs, rows, spans."""

import json
import math
import threading
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import pytest
import recorded
from bench import ranks
from pair import Piped
from test_cuda_engine import GPT

from nanoeuler.emulator.collectives import RankDevice
from nanoeuler.engines.gpu.ranks.stepper import CudaRankStepper
from nanoeuler.engines.gpu.step.precision import COPIES
from nanoeuler.engines.gpu.step.recording import GRADIENTS
from nanoeuler.engines.ranks.threads import together
from nanoeuler.training.optim import AdamW

BARS = "gpt2-124m 64x1024 bf16, 2 GPUs", "euler-116m 64x512 bf16, 2 GPUs"


def outcome(job):
    """What both ranks may say of a job."""
    part, _, who = job.split(": ")
    if part == "check":
        return {"ranks": [{"largest error": 1e-7}, {"largest error": 2e-7}]}
    if part == "memory":
        return {"ranks": [{"memory": 2**31}, {"memory": 2**31}]}
    if part == "timeline":
        return {"spans": [["forward", False, 0.0, 9.0], ["reduce", True, 7.0, 8.5]]}
    ms = 50.0 if who == ranks.ALONE else 51.0
    seen = {"ms": ms, "least": ms, "most": ms, "memory": 2**31, "tokens": 32768}
    return {"ranks": [seen, seen | {"ms": ms + 1}]}


def test_every_bar_has_a_row_beside_one_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    journal = ranks.Journal({}, True, "cuda")
    jobs = ranks.jobs_of(ranks.PARTS)
    assert len(jobs) == len({*jobs}) and jobs[0].startswith("check: toy")
    for job in jobs:
        journal.tell(job, outcome(job))
    rows = json.loads((tmp_path / "ranks.json").read_text())
    for case in BARS:
        (row,) = [r for r in rows if (r["what"], r["case"], r["engine"], r["peer"])
                  == ("tokens per second a GPU", case, "cuda", "1 GPU")]  # fmt: skip
        assert row["value"] / row["peer_value"] == pytest.approx(
            (1 / 51 + 1 / 52) / (1 / 50 + 1 / 51))  # fmt: skip
    keys = [tuple(r[k] for k in ("what", "case", "engine", "peer")) for r in rows]
    assert len(keys) == len({*keys})  # none replaces another
    assert "0.9806 of 1 GPU" in capsys.readouterr().out


def test_what_fails_is_told_and_makes_no_rows(capsys):
    journal = ranks.Journal({}, True, "cuda")
    journal.tell("time: a 64x8 bf16: 2 GPUs", {"failed": "rank 1: MemoryError"})
    assert not journal.rows and "FAILED, rank 1" in capsys.readouterr().out


def test_spans_of_a_phase_are_one_and_exchanges_have_their_names():
    names = ["embed", "logits", "reduce", "product", "gather norms", "join", "AdamW", "spread x"]
    main = [(False, i, i + 1) for i in range(8)]
    beside = [(True, 2.5, 3.0), (True, 4.2, 4.4), (True, 7.5, 8.0)]
    made = ranks.shown(names, main + beside)
    assert made == [
        ["reduce", True, 2.5, 3.0], ["gather norms", True, 4.2, 4.4], ["spread x", True, 7.5, 8.0],
        ["forward", False, 0, 1], ["loss and backward", False, 1, 4], ["wait", False, 5, 6],
        ["update", False, 6, 7],
    ]  # fmt: skip


def test_two_ranks_talk_through_a_pipe():
    ends = Pipe()
    found = {}
    big = "x" * 10**6  # more than a pipe holds

    def act(rank):
        group = Piped(rank, ends[rank])
        found[rank] = group.share((rank, big)), group.broadcast("told" if rank == 0 else None)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert found[0] == found[1] == ([(0, big), (1, big)], "told")


def test_ranks_that_exchange_nothing_decide_by_what_they_have(monkeypatch):
    """And not by what memory held before, of which a norm that is no number may come: the time of
    a step that is not taken says nothing."""
    recorded.by_numpy(monkeypatch)
    config = replace(GPT, n_layers=1)

    def act(group):
        (w, tokens, targets, _), device = recorded.problem(config, 2, 4), RankDevice()
        link = ranks.Mute(device, group)
        this = CudaRankStepper(w, AdamW(w), device, link, group, least=4096)
        before = device.host(this.memories[COPIES])
        this.step(tokens, targets, 1e-3, 1)
        (taken,) = this.finish()
        after, gradients = (device.host(this.memories[name]) for name in (COPIES, GRADIENTS))
        parts = [this.sharing.part(bucket, group.rank) for bucket in this.sharing.buckets]
        moved = [(after[part] != before[part]).any() for part in parts]
        own = np.concatenate([gradients[part] for part in parts]).astype(float)
        return taken, np.linalg.norm(own), np.mean(moved)

    for taken, own, moved in together(2, act):
        assert taken.finite and moved > 0.5  # some parts are padding, or rows no token asks for
        # As if the other had the same: sums of float32, each addition off by 2^-24 of its result.
        np.testing.assert_allclose(taken.norm, math.sqrt(2) * own, rtol=1e-5)
