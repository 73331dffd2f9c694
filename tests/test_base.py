"""The script that trains the base model and its twin, rehearsed on a processor, and its parts."""

import json
import random
import time

import base_law
import base_pieces
import base_train
import base_weights
import numpy as np
import pytest
from bench import base

from nanoeuler.api import load
from nanoeuler.data.corpus import texts_in, write_corpus
from nanoeuler.data.dataset import Prepared
from nanoeuler.errors import UserError
from nanoeuler.files import project_root
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.checkpoint import write_model

BOOKS, LEAST = 12, 12_000  # of the collection, and bytes of a block


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A cleaned collection of little books, each of other sentences of the story."""
    folder = tmp_path_factory.mktemp("collection")
    story = (project_root() / "data" / "river.txt").read_text().split(". ")
    for i in range(BOOKS):
        drawn = random.Random(i).sample(story, len(story) // 2)
        (folder / f"book {i:02}.txt").write_text(". ".join(drawn) + ".\n")
    write_corpus([folder], folder / "clean")
    return folder / "clean"


@pytest.fixture(scope="module")
def packed(clean, tmp_path_factory):
    """Its pieces."""
    folder = tmp_path_factory.mktemp("pieces")
    base_pieces.pack(clean, folder, 300, LEAST)
    return folder


# ---- Pieces


def test_pieces_hold_every_book_once_and_the_held_out_ones_apart(clean, packed, tmp_path):
    books = [*texts_in(clean)]
    assert len(books) == BOOKS
    manifest = json.loads((packed / "manifest.json").read_text())
    base_pieces.unpack(packed, tmp_path / "store")
    base_pieces.prepare(tmp_path / "store", tmp_path / "prepared")
    prepared = Prepared(tmp_path / "prepared")
    prepared.verify()
    read = {side: {prepared.tokenizer.decode(tokens.document(i)) for i in range(tokens.n_documents)}
            for side, tokens in (("train", prepared.train), ("held out", prepared.held_out))}
    assert not read["train"] & read["held out"]
    assert read["train"] | read["held out"] == {*books}
    assert sum(len(block["books"]) for block in manifest["blocks"]) == len(read["train"])


def test_a_call_carries_what_fits_and_the_first_blocks_make_the_same_tokens(packed, tmp_path):
    manifest = json.loads((packed / "manifest.json").read_text())
    sizes = {each["name"]: each["bytes"] for each in manifest["blocks"]}
    small = manifest["held-out"]["bytes"] + base_pieces.MIB
    first, more = small + max(sizes.values()), 2 * max(sizes.values())
    calls = base_pieces.loads(manifest, [first, more])
    assert [name for call in calls for name in call[:] if name in sizes] == [*sizes]
    for limit, call in zip([first - small, *[more] * len(calls)], calls, strict=False):
        assert sum(sizes.get(name, 0) for name in call) <= limit
    assert "tokenizer.json" in calls[0] and len(calls) > 2
    with pytest.raises(UserError, match="larger limit"):
        base_pieces.loads(manifest, [small, 1])
    store = tmp_path / "store"
    for i, call in enumerate(calls):  # as they come
        (tmp_path / str(i)).mkdir()
        for name in call:
            (tmp_path / str(i) / name).write_bytes((packed / name).read_bytes())
        base_pieces.unpack(tmp_path / str(i), store)
    one_by_one = base_pieces.prepare(store, tmp_path / "a")
    base_pieces.unpack(packed, tmp_path / "at once")
    assert one_by_one == base_pieces.prepare(tmp_path / "at once", tmp_path / "b")


def test_a_damaged_block_is_refused(packed, tmp_path):
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "block-000.bz2"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="carry it again"):
        base_pieces.unpack(tmp_path, tmp_path / "store")


# ---- The prediction


@pytest.mark.parametrize("rest", [0.0, 0.6, 1.0])
def test_a_law_is_found_again(rest):
    points = [(c, rest + 40 * c**-0.1) for c in (1e14, 1e15, 1e16)]
    found = base_law.fitted(points)
    assert found == pytest.approx(rest, abs=0.01)  # four steps of the grid
    assert base_law.at(points, found, 1e18) == pytest.approx(rest + 40 * 1e18**-0.1, rel=0.01)


def test_a_validation_between_two_steps_does_not_count():
    known = [0, 1, 2.5, 3.5, 13.5, 13.5, 14.5]
    assert base_train.of_steps(known) == pytest.approx(1 + 1.5 + 1 + 1 + 1 + 1)
    assert base_train.of_steps([5.0]) == 0


# ---- Weights in parts


def test_parts_give_the_weights_back(tmp_path, monkeypatch):
    monkeypatch.setattr(base_weights, "PART", 3000)
    config = ModelConfig(vocab_size=300, dim=24, n_layers=2, n_heads=2, n_kv_heads=1, hidden=40,
                         context=16, n_predict=1)  # fmt: skip
    weights = initialise(config, 0)
    for x in weights.values():
        x += np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32) ** 3
    write_model(tmp_path / "run", config, Tokenizer.train([b"some text " * 9], 260), weights, "x")
    paths = base_weights.cut(tmp_path / "run", tmp_path / "parts")
    calls = base_weights.calls(paths)
    assert all(len(call) <= 8 for call in calls) and sum(calls, []) == paths and len(calls) > 1
    assert base_weights.join(tmp_path / "parts", tmp_path / "whole")
    low = [path for path in paths if path.name.startswith("low")]
    low[0].unlink()
    assert not base_weights.join(tmp_path / "parts", tmp_path / "half")
    groups = base_weights.matrices(weights)
    scales = np.abs(groups).max(axis=1, keepdims=True)
    for name, bits in ("whole", 15), ("half", 7):
        made = load(tmp_path / name).weights
        error = np.abs(base_weights.matrices(made) - groups) / scales
        # half of a step of 1.004 2^-bits, and float32's roundings; in the mean its root of 1/12
        assert error.max() <= 0.51 * 2.0**-bits and np.sqrt((error**2).mean()) < 0.3 * 2.0**-bits
        for key, x in weights.items():
            assert x.ndim > 1 or (made[key] == x).all()
    paths[2].write_bytes(b"?")
    with pytest.raises(UserError, match="bring it once more"):
        base_weights.join(tmp_path / "parts", tmp_path / "none")


# ---- All stages


def stage(name, folder, *more):
    """Rehearse a stage, whose training is of six steps."""
    given = [name, "--dry", "--pieces", folder / "pieces", "--work", folder / "work", "--steps", 6,
             "--commit", "abc", *more]  # fmt: skip
    base.BEGAN = time.perf_counter()  # each stage is a program of its own elsewhere
    assert base.main([*map(str, given)]) == 0


def rows_in(folder):
    """{(what, case, peer): value} of a folder's rows."""
    rows = json.loads((folder / "work" / "rows.json").read_text())
    return {(row["what"], row["case"], row["peer"]): row["value"] for row in rows}


@pytest.mark.long
def test_the_whole_chain_is_rehearsed(clean, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    stage("all", tmp_path, "--clean", clean, "--vocab-size", 300, "--block", LEAST)
    seen, said = rows_in(tmp_path), capsys.readouterr().out
    what = "bits per byte, held-out books"
    ours, theirs = seen[what, "base model", None], seen.get((what, "twin, torch compile", None))
    tokens = 6 * base_train.DRY_BATCH * base_train.DRY_CONTEXT
    assert seen["tokens seen", "base model", None] == tokens
    assert "predicted: " in said
    assert {"base.json", "weights.json"} <= {path.name for path in out.iterdir()}
    told = json.loads((out / "base.json").read_text())
    assert {*told} == {"rows", "times", "prediction", "samples", "curve"}
    stage("join", tmp_path, "--from", out, "--to", tmp_path / "joined")
    joined, model = load(tmp_path / "joined"), load(tmp_path / "work" / "base")
    assert np.abs(joined.weights.flat - model.weights.flat).max() < 1e-4
    assert joined.generate("The river", tokens=3, temperature=0, engine="reference")
    if theirs is None:
        pytest.skip("the twin was left out: it needs PyTorch, pip install -e '.[oracle]'")
    assert seen[what, "base model, equal wall time", "torch compile"] == ours
    assert ours == pytest.approx(theirs, rel=0.01)  # six steps of the same; theirs in bf16


def test_runs_stop_and_go_on(packed, tmp_path):
    """Ours, ended by the clock after a step, and asked for again."""
    stage("unpack", tmp_path, "--pieces", packed)
    stage("train", tmp_path, "--steps", 400, "--stop-after", 0)
    known = json.loads((tmp_path / "work" / "times.json").read_text())["base"]
    assert 1 <= known[0]["to"] < 400
    stage("train", tmp_path, "--steps", 400)
    known = json.loads((tmp_path / "work" / "times.json").read_text())["base"]
    assert known[1]["from"] == known[0]["to"] + 1 and known[1]["to"] == 400
    assert rows_in(tmp_path)["seconds of steps", "base model", None] == pytest.approx(
        sum(each["loop"] for each in known))  # fmt: skip


@pytest.mark.long
def test_the_twin_stops_and_goes_on(packed, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
    import base_twin

    monkeypatch.setattr(base_twin, "LOOK", 2)
    stage("unpack", tmp_path, "--pieces", packed)
    stage("twin", tmp_path, "--stop-after", 0)
    known = json.loads((tmp_path / "work" / "times.json").read_text())["twin"]
    assert known[0]["to"] == 2 and not (tmp_path / "work" / "twin").exists()
    stage("twin", tmp_path)
    halves = load(tmp_path / "work" / "twin").weights.flat
    (tmp_path / "work" / "twin.pt").unlink()
    (tmp_path / "work" / "twin").rename(tmp_path / "halves")
    stage("twin", tmp_path)
    assert (load(tmp_path / "work" / "twin").weights.flat == halves).all()


def test_the_twin_gets_as_many_steps_as_fit(packed, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[oracle]'")
    base.main([*map(str, ["unpack", "--dry", "--pieces", packed, "--work", tmp_path])])
    (tmp_path / "times.json").write_text(json.dumps({"base": [{"loop": 2.0, "to": 1}]}))
    base.main([*map(str, ["twin", "--dry", "--work", tmp_path])])
    (known,) = json.loads((tmp_path / "times.json").read_text())["twin"]
    assert known["to"] == known["steps"] > 3
    assert 0.2 < known["loop"] / 2.0 < 5  # its pace is taken from one step on a busy machine
