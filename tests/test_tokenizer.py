"""What appendix B cannot hold: parity with other tokenizers, fuzzing, threads, hostile files."""

import gzip
import json
import os
import random
import subprocess
import sys
import unicodedata
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoeuler.errors import UserError
from nanoeuler.files import project_root
from nanoeuler.tokenizer import encode as bpe
from nanoeuler.tokenizer import file, pretokenizer
from nanoeuler.tokenizer.learn import LENGTH, START, TIMES, count_words, learn_merges
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
ODD_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b"
RIVER = (project_root() / "data" / "river.txt").read_text(encoding="utf-8")


def data_file(name):
    """The path of a file of the optional test data, or a skip that says what is missing."""
    folder = os.environ.get("NANOEULER_DATA", project_root().parent / "shared" / "data")
    path = project_root() / folder / name
    if not path.exists():
        pytest.skip(f"no {path}: set NANOEULER_DATA to a folder that holds {name}")
    return path


@cache
def real_texts():
    """The first 150 kB of each optional test text: books, plays, web pages, questions."""
    folder = data_file("MANIFEST.tsv").parent
    wanted = ("*.txt", "web/*", "instruct/*", "gutenberg/*")
    texts = []
    for path in sorted(path for kind in wanted for path in folder.glob(kind)):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            texts.append(file.read(150_000).decode("utf-8", errors="replace"))
    return texts


@cache
def fuzz(count=100_000):
    """`count` short strings of letters, marks, digits, odd spaces, contractions of all planes."""
    rng = random.Random(3)
    planes = [(0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    pieces = ["'s", "'t", "'d", "'m", "'ll", "'ve", "'re", "'", "'S", "’s", "'l", "'r", "'v"]

    def piece():
        kind = rng.random()
        if kind < 0.25:
            return rng.choice(pieces)
        if kind < 0.5:
            return rng.choice(ODD_SPACES) * rng.randint(1, 2)
        if kind < 0.75:
            return rng.choice("abzé1٣½ⅷ.,!-漢한\u0301\u093f🙂𝒜")
        return chr(rng.randrange(*rng.choice(planes)))

    return ["".join(piece() for _ in range(rng.randint(0, 10))) for _ in range(count)]


def old_characters(strings):
    """`strings` without characters that Python's own Unicode does not know.

    tiktoken and Hugging Face freeze other versions of Unicode than we do. Characters that are
    already in Python's have kept their class in all of them.
    """
    return ["".join(c for c in s if unicodedata.category(c) != "Cn") for s in strings]


@cache
def gpt2():
    """GPT-2's own vocabulary."""
    return Tokenizer.load(data_file("gpt2/gpt2.tiktoken"))


def regex_words(data):
    """What the `regex` package makes of bytes, invalid UTF-8 as single odd characters."""
    regex = pytest.importorskip("regex", reason="the `regex` package (a test extra) is missing")
    words = regex.findall(PATTERN, data.decode("utf-8", "surrogateescape"))
    return [word.encode("utf-8", "surrogateescape") for word in words]


def test_the_frozen_table_is_that_of_the_regex_package():
    regex = pytest.importorskip("regex", reason="the `regex` package (a test extra) is missing")
    points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    everything = "".join(map(chr, points))
    classes = np.zeros(0x110000, np.uint8)
    letter, number, space = pretokenizer.LETTER, pretokenizer.NUMBER, pretokenizer.SPACE
    for kind, pattern in ((letter, r"\p{L}"), (number, r"\p{N}"), (space, r"\s")):
        classes[[ord(c) for c in regex.findall(pattern, everything)]] = kind
    assert np.array_equal(classes, pretokenizer.CHARACTER_CLASSES)


def test_words_are_those_of_the_pattern_on_real_text():
    for text in real_texts():
        data = text.encode()
        assert pretokenizer.split(data) == regex_words(data)


def test_words_are_those_of_the_pattern_on_the_fuzz():
    for string in fuzz()[:20_000]:
        data = string.encode()
        assert pretokenizer.split(data) == regex_words(data), string
    together = "".join(fuzz()).encode()  # where one ends the next one goes on
    assert pretokenizer.split(together) == regex_words(together)


@given(st.lists(st.one_of(st.binary(max_size=4), st.sampled_from([b" ", b"'ll", b"\xe3\x80\x80"]))))
def test_words_are_those_of_the_pattern_on_any_bytes(parts):
    data = b"".join(parts)
    assert pretokenizer.split(data) == regex_words(data)


def test_every_sequence_of_boundary_bytes_is_cut_as_utf8_demands():
    edges = bytes.fromhex("41 7f 80 9f a0 bf c0 c2 df e0 ed ef f0 f4 ff")
    for data in map(bytes, product(edges, repeat=4)):
        assert pretokenizer.split(data) == regex_words(data), data


def huggingface_merges(text, vocab_size):
    """The merges that Hugging Face's trainer learns with our settings, as pairs of ids."""
    tokenizers = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator([text], trainer)
    model = json.loads(trained.to_str())["model"]
    return [[model["vocab"][a], model["vocab"][b]] for a, b in model["merges"]]


# Of the texts one in so many, and the vocabularies.
@pytest.mark.parametrize(
    ("every", "sizes"), tiers.kept([(4, (512, 8192)), (1, (512, 4096, 50257))], (4, (512, 8192)))
)
def test_training_learns_hugging_faces_merges(every, sizes):
    """Merges are nested: the smaller vocabularies are the beginning of the largest."""
    text = "".join(old_characters(real_texts()[::every]))
    theirs = huggingface_merges(text, sizes[-1])
    assert len(theirs) == sizes[-1] - 256
    for vocab_size in sizes:
        ours = Tokenizer.train(text, vocab_size, ())
        assert ours.merges.tolist() == theirs[: vocab_size - 256]


@given(st.lists(st.text("aab c\n", max_size=30), max_size=20))
@settings(max_examples=50, deadline=None)  # Hugging Face's trainer starts threads each time
def test_training_learns_hugging_faces_merges_where_everything_is_a_tie(lines):
    text = "".join(lines)
    merges = learn_merges([text.encode()], 1000).tolist()
    assert merges == huggingface_merges(text, 256 + len(merges))


def test_hugging_face_loads_our_file_and_agrees(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    ours = Tokenizer.train(RIVER, 700)
    ours.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == ours.vocab_size
    assert {name: theirs.token_to_id(name) for name in SPECIAL_TOKENS} == ours.special
    for text in [RIVER, *old_characters(fuzz()[:2000])]:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids) == text
    theirs.save(str(tmp_path / "theirs.json"))  # indented, keys of its own: still the same content
    assert Tokenizer.load(tmp_path / "theirs.json").hash == ours.hash


def test_gpt2_ids_are_tiktokens():
    tiktoken = pytest.importorskip("tiktoken", reason="`tiktoken` (a test extra) is missing")
    ours = gpt2()
    ranks = {token: i for i, token in enumerate(ours.tokens[:-1])}
    theirs = tiktoken.Encoding("g", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in real_texts():
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)
    for string in old_characters(fuzz()[:20_000]):
        assert ours.encode(string).tolist() == theirs.encode_ordinary(string), string


@pytest.mark.parametrize("every", tiers.kept([10, 1], 10))
def test_gpt2_ids_are_hugging_faces(every):
    tokenizers = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    data = data_file("gpt2/vocab.bpe"), data_file("gpt2/encoder.json")
    merges = [tuple(line.split()) for line in data[0].read_text("utf-8").split("\n")[1:] if line]
    vocab = json.loads(data[1].read_text("utf-8"))
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in [*real_texts(), *old_characters(fuzz()[:20_000])][::every]:
        assert gpt2().encode(text).tolist() == theirs.encode(text).ids


def test_the_merges_behind_gpt2s_ranks_are_those_that_it_was_published_with(tmp_path):
    lines = data_file("gpt2/vocab.bpe").read_text("utf-8").split("\n")[1:-1]
    tokens = [token.decode("latin-1") for token in gpt2().tokens[:256]]
    names = dict(zip(tokens, file.VISIBLE, strict=True))

    def visible(i):
        return "".join(names[c] for c in gpt2().tokens[i].decode("latin-1"))

    assert [f"{visible(a)} {visible(b)}" for a, b in gpt2().merges] == lines
    assert gpt2().vocab_size == 50257
    assert gpt2().special == {"<|endoftext|>": 50256}
    gpt2().save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").hash == gpt2().hash


@cache
def small():
    """A tokenizer of the story."""
    return Tokenizer.train(RIVER, 600)


@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_any_bytes_come_back(data):
    ids = small().encode(data)
    assert ids.dtype == np.int32
    assert small().decode(ids) == data
    assert all(i < 600 - len(SPECIAL_TOKENS) for i in ids)


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|", "|>", "end", " ", "the "])))
def test_no_text_makes_a_special_token(parts):
    ids = small().encode("".join(parts))
    assert not set(ids.tolist()) & set(small().special.values())
    assert small().decode_text(ids) == "".join(parts)


@given(st.lists(st.integers(0, 599)))
def test_streamed_text_is_the_whole_text(ids):
    stream = small().stream()
    pieces = [stream.feed(i) for i in ids]
    assert "".join(pieces) + stream.flush() == small().decode_text(ids)


@given(st.text())
def test_a_stream_never_shows_part_of_a_character(text):
    stream = small().stream()
    shown = ""
    for i in small().encode(text):
        shown += stream.feed(i)
        assert text.startswith(shown)
    assert shown == text


@given(st.lists(st.one_of(st.binary(), st.text().map(str.encode), st.just(b"  a's\n "))))
def test_a_text_in_chunks_has_the_ids_of_the_whole(chunks):
    whole = small().encode(b"".join(chunks))
    assert np.concatenate(list(small().encode_stream(chunks))).tolist() == whole.tolist()


@given(st.data())
def test_pieces_have_the_words_of_the_whole(data):
    """Bytes that look like the edges of words and of characters, in chunks of all sizes."""
    edges = st.sampled_from([b" ", b"\n", b"'", b"s", b"ll", b"re", b"1", b".", b"\x85", b"\xf0"])
    part = st.one_of(edges, st.binary(max_size=3), st.text(max_size=3).map(str.encode))
    whole = b"".join(data.draw(st.lists(part, max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    pieces = list(pretokenizer.whole_words(chunks))
    assert b"".join(pieces) == whole
    assert [w for piece in pieces for w in pretokenizer.split(piece)] == pretokenizer.split(whole)


def test_a_cut_is_the_end_of_a_word_whatever_follows():
    rng = random.Random(7)
    edges = [" ", "\n", "\u3000", "'", "s", "l", "é", "𝒜", "1", ".", "漢", "🙂"]
    edges = [edge.encode() for edge in edges] + [b"\xe3", b"\x80"]
    cuts = 0
    for _ in range(20_000):
        whole = b"".join(rng.choices(edges, k=rng.randint(3, 10)))
        seen = whole[: rng.randint(0, len(whole))]
        cut = pretokenizer.last_cut(np.frombuffer(seen, np.uint8), pretokenizer.CHARACTER_CLASSES)
        assert pretokenizer.split(whole[:cut]) + pretokenizer.split(whole[cut:]) == (
            pretokenizer.split(whole)
        ), (whole, seen, cut)
        cuts += cut > 0
    assert cuts > 5000


@pytest.mark.parametrize(
    ("text", "cut"),
    [(b"a\xf0\x9d\x92", 0), (b"a'sabc", 1), ("𝒜aaaa".encode(), 0)],
)
def test_the_last_cut_of_hard_texts(text, cut):
    array = np.frombuffer(text, np.uint8)
    assert pretokenizer.last_cut(array, pretokenizer.CHARACTER_CLASSES) == cut


def test_a_word_of_exactly_the_limit_passes(monkeypatch):
    monkeypatch.setattr(pretokenizer, "MAX_WORD", 1000)
    assert b"".join(pretokenizer.whole_words([b"a" * 1000])) == b"a" * 1000


def test_a_chunk_that_changes_after_it_was_read_changes_nothing():
    buffer = bytearray(4)

    def chunks():
        yield b"a" * 8
        for part in (b"bbbb", b"cccc"):
            buffer[:] = part
            yield memoryview(buffer)

    assert b"".join(pretokenizer.whole_words(chunks())) == b"aaaaaaaabbbbcccc"


def test_bytes_past_the_end_and_overlong_forms_are_no_characters():
    assert pretokenizer.split(memoryview("aé".encode())[:2]) == [b"a", b"\xc3"]
    assert pretokenizer.split(b"A\xf0\x80\xa0\x80") == [b"A", b"\xf0\x80\xa0\x80"]


def test_padding_covers_an_eight_byte_read_of_the_last_byte():
    assert len(bpe.padded(b"abc").base) >= 3 + 7


def test_the_merge_table_has_room_and_wraps():
    pairs = list(product(range(256), repeat=2))
    assert len(bpe.merge_table(np.array(pairs[:1024], np.int32))) >= 4 * 1024
    # two pairs that begin at the last slot of the smallest table, the second of two letters
    last = [(a, b) for a, b in pairs if bpe.first_slot(np.int64(a << 32 | b), 1024) == 1023]
    letters = [i for i in range(94) if chr(bpe.BYTE_FROM_ID[i]).isalpha()]
    other, pair = last[0], next(p for p in last[1:] if {*p} <= {*letters})
    table = bpe.merge_table(np.array([other, pair], np.int32))
    assert bpe.encode_words(bytes(bpe.BYTE_FROM_ID[[*pair]]), table).tolist() == [257]


def replay(word, merges):
    """The ids of a word by the lowest merge first, from the left: the oracle."""
    rank = {tuple(pair): 256 + m for m, pair in enumerate(merges)}
    ids = bpe.ID_FROM_BYTE[list(word)].tolist()
    while len(ids) > 1:
        made = [rank.get(pair, bpe.NEVER) for pair in zip(ids, ids[1:], strict=False)]
        if min(made) == bpe.NEVER:
            break
        at = made.index(min(made))
        ids[at : at + 2] = [made[at]]
    return ids


def test_words_of_all_lengths_are_merged_as_by_replay():
    rng = random.Random(11)
    for letters in (b"a", b"ab", b"aab", b"abc"):
        merges = learn_merges([bytes(rng.choices(letters, k=400))], 60)
        table = bpe.merge_table(merges)
        for n in [1, 2, 3, 5, 9, *range(bpe.LONG_WORD - 1, bpe.LONG_WORD + 3), 200, 301]:
            word = bytes(rng.choices(letters, k=n))
            assert bpe.encode_words(word, table).tolist() == replay(word, merges.tolist())


def test_more_words_than_slots_end():
    """456,976 distinct words for 65,536 slots; hanging is what fails this test."""
    text = "".join(" " + "".join(word) for word in product(ascii_lowercase, repeat=4)).encode()
    assert small().decode(small().encode(text)) == text


def test_pieces_of_ordinary_text_are_small():
    text = RIVER.encode()
    chunks = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert max(map(len, pretokenizer.whole_words(chunks))) < 1100  # a chunk and a word


def test_a_long_word_in_small_chunks_is_looked_at_in_linear_time(monkeypatch):
    seen, cut = [], pretokenizer.last_cut
    monkeypatch.setattr(pretokenizer, "last_cut", lambda t, c: seen.append(t.size) or cut(t, c))
    word = [b"a" * 100] * 20_000
    assert b"".join(pretokenizer.whole_words(word)) == b"".join(word)
    assert sum(seen) < 2 * 2_000_000  # each look has twice the bytes of the one before


def test_a_word_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(pretokenizer, "MAX_WORD", 1000)
    monkeypatch.setattr("nanoeuler.tokenizer.tokenizer.MAX_WORD", 1000)
    ordinary = RIVER.encode() + b"a" * 990
    assert small().decode(small().encode(ordinary)) == ordinary
    assert Tokenizer.train(ordinary, 600).hash == Tokenizer.train([ordinary], 600).hash
    for hopeless in (b"a" * 2500, ordinary + b"a" * 2500 + ordinary):
        refuse("words of at most 1000 bytes", small().encode, hopeless)
        refuse("words of at most 1000 bytes", Tokenizer.train, hopeless, 300)
        refuse("words of at most 1000", list, small().encode_stream([hopeless]))


@pytest.mark.parametrize("before", range(980, 1001))
def test_a_special_name_where_a_long_text_may_be_cut_is_its_token(monkeypatch, before):
    monkeypatch.setattr(pretokenizer, "MAX_WORD", 1000)
    monkeypatch.setattr("nanoeuler.tokenizer.tokenizer.MAX_WORD", 1000)
    tokenizer, text = small(), (" a" * 600).encode()
    name, one = next(iter(tokenizer.special.items()))
    long = text[:before] + name.encode() + text
    wanted = [*tokenizer.encode(text[:before]), one, *tokenizer.encode(text)]
    assert tokenizer.encode(long, special=True).tolist() == wanted
    assert one not in tokenizer.encode(long)


STREAMED = """
import sys
from nanoeuler.tokenizer.tokenizer import Tokenizer

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0])

text = open(sys.argv[1], "rb").read()
tokenizer = Tokenizer.train(text, 512)
list(tokenizer.encode_stream([text] * 10))
before = peak()
count = sum(ids.size for ids in tokenizer.encode_stream(text * 20 for _ in range(300)))
print(count, peak() - before)
"""


def test_a_long_stream_takes_no_more_memory_than_a_short_one():
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc/self/status, which only Linux has")
    story = project_root() / "data" / "river.txt"
    command = [sys.executable, "-c", STREAMED, str(story)]
    count, kilobytes = map(int, subprocess.check_output(command, text=True).split())
    assert count > 6000 * 3000  # the story, over 3000 tokens, 20 times in each of 300 chunks: 93 MB
    # a chunk is 0.3 MB and its ids 0.5 MB; holding the stream or its ids would take over 90 MB
    assert kilobytes < 20_000


def test_training_on_pieces_is_training_on_the_text():
    chunks = [RIVER.encode()[at : at + 500] for at in range(0, len(RIVER), 500)]
    calls = []
    trained = Tokenizer.train(pretokenizer.whole_words(chunks), 600, progress=calls.append)
    assert trained.hash == small().hash
    assert calls == [100, 200, 300, 340]
    apart = Tokenizer.train(["ab"] * 5 + ["ba"] * 4, 261)
    assert apart.tokens[256:257] == [b"ab"]  # not "ba", which the joined texts have 8 times


def test_a_batch_over_threads_is_each_text_alone():
    texts = fuzz()[:500] + [RIVER] * 8
    for threads in (None, 1, 5):
        for ids, text in zip(small().encode_batch(texts, threads), texts, strict=True):
            assert np.array_equal(ids, small().encode(text))


@pytest.mark.parametrize("word", [b"a", b"abcde", b" ", b"\xff", "漢".encode()])
def test_a_word_of_a_megabyte_costs_no_more_than_text(word):
    data = word * (1_000_000 // len(word))
    trained = Tokenizer.train(RIVER.encode() + data[:5000], 600)
    # n * n steps would be a million million; hanging is what fails this test
    assert trained.decode(trained.encode(data)) == data
    assert Tokenizer.train(data, 262, ()).merges.shape == (6, 2)


def test_ids_do_not_depend_on_which_words_are_remembered():
    """More distinct words than there are slots, so that some find none, each three times."""
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(5, 12))) for _ in range(80_000)]
    sequence = words * 2 + rng.sample(words, len(words))
    assert len(set(words)) > bpe.REMEMBERED
    expected = {word: small().encode(" " + word).tolist() for word in set(words)}
    whole = small().encode("".join(" " + word for word in sequence)).tolist()
    assert whole == [i for word in sequence for i in expected[word]]


def test_words_that_begin_alike_are_told_apart():
    """Words of one length whose first eight bytes are the same: 17,576 of them, each twice."""
    words = [" beginning" + "".join(letters) for letters in product(ascii_lowercase, repeat=3)]
    text = "".join(words + words[::-1]).encode()
    counted, store = count_words([text[: 13 * 1000], text[13 * 1000 :]])
    assert len(counted) == len(words)
    assert set(counted[:, TIMES]) == {2} and set(counted[:, LENGTH]) == {13}
    starts = counted[:, START].tolist()
    assert [store[start : start + 13].tobytes().decode() for start in starts] == words
    expected = {word: small().encode(word).tolist() for word in words}
    ids = small().encode(text).tolist()
    assert ids == [i for word in words + words[::-1] for i in expected[word]]


def test_a_hash_changes_with_every_part_of_the_content():
    merges = small().merges
    last = np.concatenate([merges[:-1], [[31, 31]]])  # "@@", which is not in the story
    other = [Tokenizer(merges[:-1]), Tokenizer(last), Tokenizer(merges, ("<|end|>",))]
    assert Tokenizer(merges).hash == small().hash
    assert len({small().hash, *(t.hash for t in other)}) == 4


def refuse(match, attempt, *arguments):
    with pytest.raises(UserError, match=match):
        attempt(*arguments)


def test_ids_that_are_not_in_the_vocabulary_are_refused():
    for ids in ([-1], [600], [0, 2**40], np.array([2**63], np.uint64)):
        refuse("not in this vocabulary of 600", small().decode, ids)
    for ids in ([0.5], ["a"], [[1, 2]], 3, [[1], [1, 2]]):
        refuse("expected a row of integer ids", small().decode, ids)
    refuse("not in this vocabulary", small().stream().feed, 600)


def test_empty_input_is_empty_output():
    assert small().encode("").shape == small().encode(b"").shape == (0,)
    assert small().decode([]) == b"" and small().decode_text([]) == ""
    assert [ids.size for ids in small().encode_stream([])] == [0]
    assert small().encode_batch([]) == []


def test_training_refuses_what_it_cannot_do():
    refuse("vocabulary size from 260", Tokenizer.train, RIVER, 259)
    refuse("to 1048576", Tokenizer.train, RIVER, 10**9)
    refuse("use more text, or a vocabulary size of at most 263", Tokenizer.train, "abab abab", 300)
    refuse("tokens that aren't empty and differ", Tokenizer.train, RIVER, 300, ("<|a|>", "<|a|>"))
    refuse("tokens that aren't empty and differ", Tokenizer.train, RIVER, 300, ("",))
    refuse("tokens that aren't empty and differ", Tokenizer.train, RIVER, 300, ("a",))
    refuse("half of a surrogate pair", Tokenizer.train, "\ud800", 300)
    refuse("str or bytes, got int", Tokenizer.train, 5, 300)
    refuse("got '300'", Tokenizer.train, RIVER, "300")
    refuse("special tokens as str, got bytes", Tokenizer.train, RIVER, 300, (b"<|x|>",))
    for name in ("é", "Ġ", "Ġthe"):  # what a tokenizer.json calls a byte, the space, and a merge
        refuse("their names in a file", Tokenizer.train, RIVER, 300, (name,))
    untouched = iter([RIVER])
    refuse("tokens that aren't empty and differ", Tokenizer.train, untouched, 300, ("",))
    assert next(untouched) == RIVER  # refused before it has read anything
    once = (name for name in SPECIAL_TOKENS)
    assert Tokenizer.train(RIVER, 600, once).hash == small().hash
    for chunks in ("abc", b"abc", ["abc"], [None]):
        refuse("expected chunks of bytes", list, small().encode_stream(chunks))
    same = Tokenizer.train(bytearray(RIVER.encode()), 600)
    assert same.hash == Tokenizer.train(memoryview(RIVER.encode()), 600).hash == small().hash
    assert Tokenizer.train("", 260).vocab_size == 260


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = small().json.encode()
    path = tmp_path / "tokenizer.json"
    rng = random.Random(0)
    for size in [0, 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(40))]:
        path.write_bytes(whole[:size])
        refuse("not JSON from end to end", Tokenizer.load, path)


def test_a_file_with_a_changed_byte_is_refused_or_is_another_tokenizer(tmp_path):
    """Whatever a file says, loading gives a tokenizer that works or a UserError, never a crash."""
    whole, path = small().json.encode(), tmp_path / "tokenizer.json"
    rng = random.Random(1)
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.choice(b'0,:"[]{}ax \xff')
        path.write_bytes(changed)
        try:
            loaded = Tokenizer.load(path)
        except UserError:
            continue
        assert loaded.decode(loaded.encode(RIVER)) == RIVER.encode()


HOSTILE = [
    "[" * 100_000,
    "null",
    "[]",
    "{}",
    '{"model": 3}',
    '{"model": {"type": "BPE", "vocab": {}, "merges": 5}}',
    '{"model": null, "pre_tokenizer": null}',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_files_are_refused(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    refuse(str(path), Tokenizer.load, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["model"]["merges"].append(["zz", "q"]),
        lambda c: c["model"]["merges"].append(c["model"]["merges"][0]),
        lambda c: c["model"]["merges"].append(["a"]),
        lambda c: c["model"]["merges"].append([["a"], {}]),
        lambda c: c["model"]["vocab"].update({"a": 10**9}),
        lambda c: c["model"]["vocab"].update({"a": None}),
        lambda c: c["model"]["vocab"].popitem(),
        lambda c: c["model"].update(type="WordPiece"),
        lambda c: c["model"].update(dropout=0.1),
        lambda c: c["model"].update(end_of_word_suffix="</w>"),
        lambda c: c["model"].update(continuing_subword_prefix="##"),
        lambda c: c["model"]["merges"].append(["z" * 10**6, "q"]),
        lambda c: c.update(normalizer={"type": "NFKC"}),
        lambda c: c["pre_tokenizer"].update(use_regex=False),
        lambda c: c["added_tokens"][0].update(id=0),
        lambda c: c["added_tokens"][0].update(id=-1),
        lambda c: c["added_tokens"][0].update(content=["x"]),
        lambda c: c["added_tokens"][0].update(content=7),
        lambda c: c["added_tokens"][0].update(content="\ud800"),
        lambda c: c["added_tokens"][0].update(content="a"),
        lambda c: c["added_tokens"].append(c["added_tokens"][0]),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, change):
    content = json.loads(small().json)
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        Tokenizer.load(path)
    assert len(str(refused.value)) < 1000


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    refuse("cannot read .*nothing.json", Tokenizer.load, tmp_path / "nothing.json")
    refuse("cannot read", Tokenizer.load, tmp_path)
    refuse("cannot read", Tokenizer.load, "a\0b")


def test_a_file_that_is_far_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "MAX_FILE", 1000)
    (tmp_path / "tokenizer.json").write_text(small().json)
    refuse("expected at most 1000 bytes", Tokenizer.load, tmp_path / "tokenizer.json")


def test_ranks_that_are_not_gpt2s_to_the_last_byte_are_refused(tmp_path):
    """They may be of a vocabulary with other words, which would be cut in the wrong places."""
    whole = data_file("gpt2/gpt2.tiktoken").read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole.replace(b"IQ== 0", b"IQ== 1", 1)):
        (tmp_path / "gpt2.tiktoken").write_bytes(damaged)
        refuse("nor GPT-2's file of ranks", Tokenizer.load, tmp_path / "gpt2.tiktoken")


def test_without_the_compiler_there_is_one_sentence():
    script = "from nanoeuler.errors import UserError\n"
    script += "try: import nanoeuler.tokenizer.tokenizer\nexcept UserError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "NUMBA_DISABLE_JIT is set" in done.stdout and not done.stderr


def test_names_are_spelt_in_the_characters_of_bytes():
    """Each of the 256 characters is its byte; every other character is none."""
    for byte, character in zip(bpe.BYTE_FROM_ID, file.VISIBLE, strict=True):
        assert file.spelt_bytes(character) == bytes([byte])
    others = {chr(i) for i in (*range(0x400), 0xFFFF, 0xD800, 0x10FFFF)} - {*file.VISIBLE}
    assert len(others) > 600 and all(file.spelt_bytes(f"a{each}") is None for each in others)
    assert file.spelt_bytes("".join(file.VISIBLE)) == bytes(bpe.BYTE_FROM_ID.tolist())


def test_a_known_digest_is_the_hash(tmp_path, monkeypatch):
    """Of the file that was saved, and of no other with the same content."""
    tokenizer, path = Tokenizer.train("the river and the stone " * 9, 270), tmp_path / "t.json"
    tokenizer.save(path)
    assert Tokenizer.load(path, "0" * 64).hash == tokenizer.hash
    path.write_text(path.read_text().replace(": ", ":"))
    assert Tokenizer.load(path, tokenizer.hash).hash == tokenizer.hash  # worked out
    tokenizer.save(path)
    monkeypatch.setattr(Tokenizer, "json", property(lambda self: pytest.fail("worked out")))
    assert Tokenizer.load(path, tokenizer.hash).hash == tokenizer.hash
