"""Shards: what is written comes back however it is cut into files, and nothing else is opened."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from nanoeuler.data import shards
from nanoeuler.data.shards import (
    END_OF_TEXT,
    ShardWriter,
    Tokens,
    open_shard,
    shard_path,
    token_dtype,
    write_shard,
)
from nanoeuler.errors import UserError
from nanoeuler.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(b"the river, the river, the sea", 264)
END = TOKENIZER.special[END_OF_TEXT]
reused_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)
documents = st.lists(st.lists(st.integers(0, 259), min_size=1, max_size=30), min_size=1, max_size=9)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Hundreds of small files: that they outlive a power cut is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def written(folder, documents, shard_tokens, tokenizer=TOKENIZER, end=(END,)):
    """Write documents (lists of ids) in shards of so many tokens; their paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", shard_tokens)
        writer = ShardWriter(folder, "train", tokenizer)
        for ids in documents:
            writer.document(len(ids), (np.array(ids), end))
        found = writer.close()
    assert found["documents"] == len(documents)
    assert found["tokens"] == sum(len(ids) + len(end) for ids in documents)
    assert all(shard["tokens"] <= shard_tokens for shard in found["shards"])
    return [shard_path(folder, "train", i) for i in range(len(found["shards"]))]


@given(documents, st.integers(1, 40), st.sampled_from([(END,), ()]))
@reused_folder
def test_documents_come_back_whatever_the_size_of_a_shard(tmp_path, documents, size, end):
    tokens = Tokens(written(tmp_path, documents, size, end=end), TOKENIZER)
    assert tokens.n_documents == len(documents)
    assert [tokens.document(i).tolist() for i in range(len(documents))] == documents


@given(documents, st.integers(1, 40), st.data())
@reused_folder
def test_a_window_does_not_see_the_borders_of_shards(tmp_path, documents, size, data):
    row = np.array([i for ids in documents for i in [*ids, END]])
    tokens = Tokens(written(tmp_path, documents, size), TOKENIZER)
    assert len(tokens) == len(row)
    length = data.draw(st.integers(1, len(row)))
    starts = data.draw(st.lists(st.integers(0, len(row) - length), min_size=1, max_size=5))
    found = tokens.window(starts, length)
    assert found.dtype == np.int32 and found.shape == (len(starts), length)
    assert (found == [row[start : start + length] for start in starts]).all()


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_take_two_bytes_as_long_as_they_fit(tmp_path, vocab_size, dtype):
    class Large:
        hash, special = "of a large vocabulary", {}

    Large.vocab_size = vocab_size
    assert token_dtype(vocab_size) == dtype
    ids = [0, 65_535, vocab_size - 1]
    paths = written(tmp_path, [ids], 2, tokenizer=Large, end=())
    assert open_shard(paths[0], Large)[0].dtype == dtype
    assert Tokens(paths, Large).document(0).tolist() == ids


def test_a_shard_is_mapped_and_not_copied(tmp_path):
    write_shard(tmp_path / "shard", [1, 2, 3], [0], TOKENIZER)
    tokens, _ = open_shard(tmp_path / "shard", TOKENIZER)
    while not isinstance(tokens, np.memmap):
        tokens = tokens.base
        assert tokens is not None


@pytest.mark.parametrize("bad", [264, 40_000, 65_535])
def test_an_id_beyond_the_vocabulary_never_leaves_a_window(tmp_path, bad):
    write_shard(tmp_path / "shard", [1, 2, bad, 3, 4], [0], TOKENIZER)
    tokens = Tokens([tmp_path / "shard"], TOKENIZER)
    assert tokens.window([3, 0], 2).tolist() == [[3, 4], [1, 2]]
    with pytest.raises(UserError, match=f"below 264.*{bad}"):
        tokens.window([0, 1], 2)


def test_an_id_that_would_be_negative_in_four_bytes_is_refused(tmp_path):
    class Large:
        hash, special, vocab_size = "of a large vocabulary", {}, 100_000

    write_shard(tmp_path / "shard", [1, 2**32 - 1], [0], Large)
    with pytest.raises(UserError, match="below 100000"):
        Tokens([tmp_path / "shard"], Large).window([0], 2)


def save(path, owner=TOKENIZER.hash, **tensors):
    save_file(tensors, path, {"tokenizer": owner} if owner else None)


U16, I64 = np.zeros(4, np.uint16), np.zeros(1, np.int64)
BAD = {
    "absent": (lambda path: path.unlink(), "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "header too small"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "expected a whole shard"),
    "a text": (lambda path: path.write_text("It is a truth universally"), "expected a whole shard"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "expected a whole shard"),
    "too long": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "expected a whole shard"),
    "floats": (lambda path: save(path, tokens=U16.astype("f4"), documents=I64), "F32"),
    "four bytes": (lambda path: save(path, tokens=U16.astype("u4"), documents=I64), "U32"),
    "a square": (lambda path: save(path, tokens=U16.reshape(2, 2), documents=I64), "'U16', 2"),
    "no documents": (lambda path: save(path, tokens=U16), "expected a shard to have"),
    "a third": (lambda path: save(path, tokens=U16, documents=I64, more=I64), "more"),
    "no owner": (lambda path: save(path, None, tokens=U16, documents=I64), "an unknown one"),
    "another's": (lambda path: save(path, "ab" * 32, tokens=U16, documents=I64), "abababab"),
    "no tokens": (lambda path: save(path, tokens=U16[:0], documents=I64), "within 0 tokens"),
    "backwards": (lambda path: save(path, tokens=U16, documents=np.array([2, 0])), "one after"),
    "twice": (lambda path: save(path, tokens=U16, documents=np.array([0, 0])), "one after"),
    "beyond": (lambda path: save(path, tokens=U16, documents=np.array([0, 4])), "one after"),
    "before": (lambda path: save(path, tokens=U16, documents=np.array([-1, 2])), "one after"),
    "overflow": (
        lambda path: save(path, tokens=U16, documents=np.array([0, -(2**63), 2**63 - 1])),
        "one after",
    ),
    "thousands of tensors": (
        lambda path: save(path, **{f"tensor {i}": I64 for i in range(2000)}), "but .* has .*tensor",
    ),
    "an owner that clears the screen": (
        lambda path: save(path, "\x1b[2J\x1b]0;mine\x07", tokens=U16, documents=I64), "those of",
    ),
    "a name that clears the screen": (
        lambda path: save(path, **{"\x1b[2J": U16}), "expected a shard to have",
    ),
    "a late start": (lambda path: save(path, tokens=U16, documents=I64 + 1), "to begin with"),
}


@pytest.mark.parametrize("damage, words", BAD.values(), ids=BAD)
def test_what_is_no_shard_of_this_tokenizer_is_refused_in_one_line(tmp_path, damage, words):
    path = tmp_path / "shard"
    write_shard(path, [1, 2, 3], [0, 1], TOKENIZER)
    damage(path)
    with pytest.raises(UserError, match=words) as error:
        Tokens([path], TOKENIZER)
    said = str(error.value)
    assert str(path) in said and said.isprintable() and len(said.replace(str(path), "")) < 300


@given(st.data())
@reused_folder
def test_a_shard_with_wrong_bytes_opens_as_numbers_or_not_at_all(tmp_path, data):
    good, path = tmp_path / "good", tmp_path / "shard"
    if not good.exists():
        write_shard(good, np.arange(40) % 264, [0, 7, 30], TOKENIZER)
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(len(raw) - 3, len(raw)))])
    try:
        tokens = Tokens([path], TOKENIZER)
        found = [tokens.document(i) for i in range(tokens.n_documents)]
    except UserError:
        return
    assert sum(map(len, found)) <= len(tokens) == 40 and tokens.n_documents == 3
    assert all((0 <= ids).all() and (ids < TOKENIZER.vocab_size).all() for ids in found)


def test_headers_that_lie_are_refused(tmp_path):
    path = tmp_path / "shard"
    for first, last, shape in ((8, 16, 5), (0, 8, 4), (8, 2**40, 4), (16, 8, 4)):
        parts = {"documents": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
        parts["tokens"] = {"dtype": "U16", "shape": [shape], "data_offsets": [first, last]}
        parts["__metadata__"] = {"tokenizer": TOKENIZER.hash}
        header = json.dumps(parts).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        with pytest.raises(UserError, match="expected a whole shard"):
            Tokens([path], TOKENIZER)


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    path = tmp_path / "shard"
    write_shard(path, [1, 2, 3], [0], TOKENIZER)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    again = b',"documents":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'
    header = header[:-1] + again + b" " * (-(len(header) - 1 + len(again)) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    with pytest.raises(UserError, match="has documents twice"):
        Tokens([path], TOKENIZER)


def test_a_failed_write_leaves_the_shard_before(tmp_path, monkeypatch):
    path = tmp_path / "shard"
    write_shard(path, [1, 2, 3], [0], TOKENIZER)
    before = path.read_bytes()

    def full(tensors, filename, metadata):
        filename.write_bytes(before[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        write_shard(path, [4, 5, 6], [0], TOKENIZER)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    shutil.copy(path, tmp_path / "copy")
    assert load_file(tmp_path / "copy")["tokens"].tolist() == [1, 2, 3]
