"""What chapter 19b cannot hold: parity with other people's programs, and hostile files."""

import json
import lzma
import random
import struct
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from gguf_keys import metadata
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import RIVER, data_file, fuzz, old_characters, real_texts, refuse, regex_words
from tiers import kept

from nanoeuler.errors import UserError
from nanoeuler.tokenizer import huggingface, pretokenizer, sentencepiece
from nanoeuler.tokenizer.others import (
    gguf_metadata,
    read_llama2c_tokenizer,
    read_sentencepiece,
    read_tokenizer_json,
    tokenizer_of_gguf,
    write_tokenizer_json,
)
from nanoeuler.tokenizer.scanners import SCANNERS, last_cut_of, words_of
from nanoeuler.tokenizer.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Piece
from nanoeuler.tokenizer.tokenizer import Tokenizer

PATTERN_OF = {scanner: pattern for pattern, scanner in huggingface.PATTERNS.items()}


def unpacked(name, where):
    """The path of a file of the optional data, unpacked into the folder `where`."""
    path = where / name.rpartition("/")[2].removesuffix(".xz")
    path.write_bytes(lzma.decompress(data_file(f"interop/tokenizers/{name}").read_bytes()))
    return path


def expected(name):
    """The tricky texts, and their ids with names of special tokens read and not read."""
    texts = json.loads(data_file("interop/tokenizers/texts.json").read_text("utf-8"))
    file = data_file(f"interop/tokenizers/{name}/expected.json.xz")
    ids = json.loads(lzma.decompress(file.read_bytes()))
    assert len(texts) == 408
    return texts, ids["ids"], ids["ids_no_special_parsing"]


def in_chunks(tokenizer, text, size=3):
    """The ids of a text that comes in chunks of a few bytes."""
    data = text.encode()
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    return np.concatenate(list(tokenizer.encode_stream(chunks))).tolist()


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_ids_of_published_vocabularies_are_hugging_faces(tmp_path, name):
    texts, special, plain = expected(name)
    theirs = read_tokenizer_json(unpacked(f"{name}/tokenizer.json.xz", tmp_path))
    for text, both, without in zip(texts, special, plain, strict=True):
        assert theirs.encode(text, special=True).tolist() == both, text
        assert theirs.encode(text).tolist() == without, text
        assert in_chunks(theirs, text) == without, text


@pytest.mark.parametrize("name", kept(["smollm2", "qwen3"], "smollm2"))
def test_published_vocabularies_come_back_from_files_of_ours(tmp_path, name):
    texts, _, plain = expected(name)
    theirs = read_tokenizer_json(unpacked(f"{name}/tokenizer.json.xz", tmp_path))
    theirs.save(tmp_path / "ours.json")
    saved = Tokenizer.load(tmp_path / "ours.json")
    assert saved.hash == theirs.hash
    by_gguf = tokenizer_of_gguf(gguf_metadata(theirs))
    for text, without in zip(texts, plain, strict=True):
        assert saved.encode(text).tolist() == by_gguf.encode(text).tolist() == without, text


def test_ids_of_gpt2s_gguf_are_llama_cpps(tmp_path):
    texts, special, plain = expected("gpt2-gguf")
    keys = metadata(unpacked("gpt2-gguf/ggml-vocab-gpt-2.gguf.xz", tmp_path).read_bytes())
    theirs = tokenizer_of_gguf(keys)
    for text, both, without in zip(texts, special, plain, strict=True):
        assert theirs.encode(text, special=True).tolist() == both, text
        assert theirs.encode(text).tolist() == without, text
    written = gguf_metadata(theirs)
    for key in ("model", "pre", "tokens", "merges", "token_type", "bos_token_id", "eos_token_id"):
        assert written[f"tokenizer.ggml.{key}"] == keys[f"tokenizer.ggml.{key}"], key


def split_plainly(scanner, data):
    """What the `regex` package makes of bytes by a scanner's pattern."""
    regex = pytest.importorskip("regex", reason="the `regex` package (a test extra) is missing")
    if scanner == "gpt2":
        return regex_words(data)
    text = data.decode("utf-8", "surrogateescape")
    if scanner == "digits":  # numbers one by one, and GPT-2's words in what is between them
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        rows = [[part] if regex.fullmatch(r"\p{N}", part) else regex.findall(
            PATTERN_OF["gpt2"], part) for part in parts]  # fmt: skip
        words = [word for row in rows for word in row]
    else:
        words = regex.findall(PATTERN_OF[scanner], text)
    return [word.encode("utf-8", "surrogateescape") for word in words]


OTHERS = ("digits", "llama3", "qwen2")
EDGES = ["'", "s", "S", "ſ", "ll", "Ve", "'RE", " ", "  ", "\n", "\r\n", "\t", "1", "½", "é", "!",
         "\u3000", "\x85", "\x1c", "漢", "🙂", "𝒜", "\u0301"]  # fmt: skip


@pytest.mark.parametrize("scanner", OTHERS)
def test_words_are_those_of_the_published_pattern(scanner):
    rng = random.Random(2)
    drawn = ["".join(rng.choices(EDGES, k=rng.randint(1, 9))) for _ in range(10_000)]
    for string in [*drawn, *fuzz()[:5_000], *real_texts()[:3]]:
        data = string.encode()
        assert words_of(data, scanner) == split_plainly(scanner, data), string


@pytest.mark.parametrize("scanner", OTHERS)
@given(parts=st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=4).map(str.encode),
                                st.sampled_from([edge.encode() for edge in EDGES]))))  # fmt: skip
def test_words_of_any_bytes_are_those_of_the_published_pattern(scanner, parts):
    data = b"".join(parts)
    assert words_of(data, scanner) == split_plainly(scanner, data)


@pytest.mark.parametrize("scanner", [*OTHERS, "gpt2"])
def test_a_text_may_be_cut_where_a_scanner_says(scanner):
    rng, cuts, classes = random.Random(7), 0, pretokenizer.CHARACTER_CLASSES
    edges = [edge.encode() for edge in EDGES] + [b"\xe3", b"\x80"]
    for _ in range(20_000):
        whole = b"".join(rng.choices(edges, k=rng.randint(3, 10)))
        seen = np.frombuffer(whole[: rng.randint(0, len(whole))], np.uint8)
        cut = last_cut_of(seen, classes, SCANNERS.index(scanner))
        assert words_of(whole[:cut], scanner) + words_of(whole[cut:], scanner) == words_of(
            whole, scanner), (whole, cut)  # fmt: skip
        cuts += cut > 0
    assert cuts > 4000


def huggingface_trained(scanner, text, size, nfc=False):
    """Hugging Face's tokenizer of a text, by its own trainer: special tokens come first."""
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    made, before = hf.Tokenizer(hf.models.BPE(ignore_merges=scanner == "llama3")), []
    if scanner == "digits":
        before = [hf.pre_tokenizers.Digits(individual_digits=True)]
    elif scanner != "gpt2":
        pattern = hf.Regex(PATTERN_OF[scanner])
        before = [hf.pre_tokenizers.Split(pattern, "isolated")]
    level = hf.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=scanner in ("gpt2", "digits")
    )
    made.pre_tokenizer = hf.pre_tokenizers.Sequence([*before, level])
    made.decoder = hf.decoders.ByteLevel()
    made.normalizer = hf.normalizers.NFC() if nfc else None
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator([text], hf.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(hf.pre_tokenizers.ByteLevel.alphabet())[:200],
    ))  # fmt: skip
    made.add_tokens([hf.AddedToken("<think>", normalized=False), "</think>"])
    return made


@pytest.mark.parametrize("scanner", [*OTHERS, "gpt2"])
def test_a_vocabulary_of_hugging_faces_trainer_goes_in_and_out(tmp_path, scanner):
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    theirs = huggingface_trained(scanner, RIVER + "e\u0301te\u0301 123 45" * 30, 600, nfc=True)
    theirs.post_processor = hf.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer_json(tmp_path)
    assert ours.begin == (1,) and ours.end == (2,) and ours.special["<|im_end|>"] == 2
    write_tokenizer_json(ours, tmp_path / "written")
    again = hf.Tokenizer.from_file(str(tmp_path / "written" / "tokenizer.json"))
    saved = Tokenizer.load(tmp_path / "written" / "tokenizer.json")
    texts = ["a<think>b</think> c<|im_end|>", *old_characters(fuzz()[:1500]), RIVER]
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True).tolist() == ids, text
        assert saved.encode(text, special=True).tolist() == ids, text
        assert again.encode(text).ids == [1, *ids, 2], text
        assert in_chunks(ours, text[:300]) == ours.encode(text[:300]).tolist(), text
        assert ours.decode_text(ids) == theirs.decode(ids, skip_special_tokens=False), text


def test_bytes_without_a_token_are_dropped_as_hugging_face_does():
    theirs = huggingface_trained("digits", RIVER, 500)
    ours = Tokenizer.of(huggingface.vocabulary_of(json.loads(theirs.to_str()), "it"))
    missing = [byte for byte, i in enumerate(ours.vocabulary.byte_ids) if i < 0]
    assert missing
    for text in ("th\x14e", "\x14", "a" + "".join(map(chr, range(256)))):
        assert ours.encode(text).tolist() == theirs.encode(text).ids, text


def test_bytes_without_a_token_that_are_an_unknown_one_are_refused():
    content = json.loads(huggingface_trained("digits", RIVER, 500).to_str())
    content["model"]["unk_token"] = next(iter(content["model"]["vocab"]))
    with pytest.raises(UserError, match="a token for each of the 256 bytes, or no unk_token"):
        huggingface.vocabulary_of(content, "it")


@given(st.lists(st.sampled_from(["<think>", "<thi", "nk>", " ", "a", "</think>", "<", "1", "é"])))
@settings(deadline=None)
def test_added_tokens_are_found_in_chunks_of_any_size(parts):
    ours, text = with_added(), "".join(parts)
    for size in (1, 2, 5, 11):
        assert in_chunks(ours, text, size) == ours.encode(text).tolist()
    assert ours.decode_text(ours.encode(text)) == text


@cache
def with_added():
    """A tokenizer with added tokens that are not special."""
    return Tokenizer.of(
        huggingface.vocabulary_of(json.loads(huggingface_trained("qwen2", RIVER, 500).to_str()), "")
    )


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_flags_of_added_tokens_are_hugging_faces(flag):
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    theirs = huggingface_trained("gpt2", RIVER, 500)
    theirs.add_tokens([hf.AddedToken("river", **{flag: True})])
    theirs.add_special_tokens([hf.AddedToken("<s>", **{flag: True})])
    ours = Tokenizer.of(huggingface.vocabulary_of(json.loads(theirs.to_str()), "it"))
    texts = "a river b", "ariver", "river_ \n river", " \n river \t\n<s>  river.", "<s><s>é<s>"
    for text in texts:
        assert ours.encode(text, special=True).tolist() == theirs.encode(text).ids, text


# SentencePiece
def varint(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def message(*fields_of):
    """A protocol buffer's message of (number, int, float or bytes)."""
    out = b""
    for number, value in fields_of:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def spm_model(pieces, kind=2, fallback=1, **changes):
    """The bytes of a tokenizer.model with these pieces, and Llama's settings."""
    normal = {1: b"identity", 3: 1, 4: 0, 5: 1} | changes.pop("normalizer", {})
    rows = [(1, message((1, p.text.encode()), (2, p.score), (3, p.kind))) for p in pieces]
    return message(*rows, (2, message((3, kind), (35, fallback), (40, 0), (41, 1), (42, 2))),
                   (3, message(*normal.items())))  # fmt: skip


@cache
def spm_pieces():
    """Pieces as BPE would learn them from a story: scores by rank, with ties and odd ones."""
    trained = Tokenizer.train(RIVER.replace("\n", " "), 700, ())
    names = dict.fromkeys(RIVER.replace("\n", " ") + "é漢")
    merged = [token.decode() for token in trained.tokens[256:]]
    pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    pieces += [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [Piece("[INST]", 0.0, CONTROL), Piece("<tool>", 0.0, USER_DEFINED)]
    pieces += [Piece(m.replace(" ", "▁"), -float(r // 3), NORMAL) for r, m in enumerate(merged)]
    pieces += [Piece("▁▁", -1e9, NORMAL), Piece("▁▁▁▁", -1e9, NORMAL)]
    pieces += [Piece(name.replace(" ", "▁"), -1e4 - i, NORMAL) for i, name in enumerate(names)]
    return pieces


def spm_plainly(text, pieces, prefix=True):
    """The ids of a text by SentencePiece's rule: the best score first, of equals the leftmost."""
    free = (NORMAL, USER_DEFINED)
    ids = {p.text: i for i, p in enumerate(pieces) if p.kind in free}
    bytes_of = {int(p.text[3:5], 16): i for i, p in enumerate(pieces) if p.kind == BYTE}
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    symbols = []
    while text:
        size = 6 if text.startswith("<tool>") else 1
        symbols.append(text[:size])
        text = text[size:]
    while True:
        pairs = [(-pieces[ids[a + b]].score, n) for n, (a, b) in enumerate(pairwise(symbols))
                 if a + b in ids and "<tool>" not in (a, b)]  # fmt: skip
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    rows = [[ids[s]] if s in ids else [bytes_of[byte] for byte in s.encode()] for s in symbols]
    return [i for row in rows for i in row]


SPACED = ["", " ", "   a", "the river  goes", "\n\n", "漢字é🙂", "<s>", "<0x41>", "a <tool>b",
          "<tool>", "▁a", "th\x00e", "x" * 100, "The river goes down. " * 9]  # fmt: skip


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory):
    """A small tokenizer.model."""
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(spm_model(spm_pieces()))
    return path


def test_sentencepieces_merges_go_by_score_and_then_from_the_left(spm_file, tmp_path):
    ours = read_sentencepiece(spm_file)
    assert ours.begin == (1,) and ours.special == {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 259}
    ours.save(tmp_path / "tokenizer.json")
    saved, by_gguf = Tokenizer.load(tmp_path / "tokenizer.json"), gguf_metadata(ours)
    assert saved.hash == ours.hash
    others = [saved, tokenizer_of_gguf(by_gguf)]
    rng = random.Random(1)
    parts = [*RIVER.split(), " ", "  ", "é", "漢", "🙂", "<tool>", "▁", "\n"]
    texts = SPACED + ["".join(rng.choices(parts, k=rng.randint(1, 9))) for _ in range(500)]
    for text in texts:
        ids = spm_plainly(text, spm_pieces())
        assert ours.encode(text).tolist() == ids, text
        assert in_chunks(ours, text) == ids, text
        assert all(other.encode(text).tolist() == ids for other in others), text
        assert ours.decode_text(ids) == text.replace("▁", " ")
        stream = ours.stream()
        assert "".join(map(stream.feed, ids)) + stream.flush() == text.replace("▁", " ")


def test_sentencepiece_itself_agrees(spm_file):
    spm = pytest.importorskip("sentencepiece", reason="`sentencepiece` is not installed")
    theirs = spm.SentencePieceProcessor(model_file=str(spm_file))
    ours = read_sentencepiece(spm_file)
    for text in [*SPACED, *old_characters(fuzz()[:2000]), RIVER]:
        assert ours.encode(text).tolist() == theirs.encode(text), text


def test_a_text_goes_on_without_a_space_before_it(spm_file):
    ours = read_sentencepiece(spm_file)
    ids = ours.encode("the river").tolist()
    assert ours.encode("the river", begins=False).tolist() == spm_plainly(
        "the river", spm_pieces(), prefix=False)  # fmt: skip
    assert ours.decode_text([1, *ids]) == "<s>the river"
    going_on = ours.stream(begins=False)
    assert "".join(map(going_on.feed, ids)) == " the river"
    assert ours.encode("<s>the[INST] x", special=True).tolist() == [
        1, *ours.encode("the"), 259, *ours.encode(" x")]  # fmt: skip


def test_hugging_faces_form_of_sentencepiece_goes_in_and_out(spm_file, tmp_path):
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    distinct = [p._replace(score=-float(i)) for i, p in enumerate(spm_pieces())]  # no ties there
    (tmp_path / "tokenizer.model").write_bytes(spm_model(distinct))
    ours = read_sentencepiece(tmp_path / "tokenizer.model")
    write_tokenizer_json(ours, tmp_path)
    theirs, read = hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read_tokenizer_json(
        tmp_path)  # fmt: skip
    for text in [t for t in SPACED if "tool" not in t] + old_characters(fuzz()[:2000]):
        ids = theirs.encode(text, add_special_tokens=False).ids
        if "<s>" not in text:
            assert ours.encode(text).tolist() == ids, text
        assert read.encode(text, special=True).tolist() == ids, text
        assert theirs.decode(ids, skip_special_tokens=False) == read.decode_text(ids)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace_is_hugging_faces(scheme, tmp_path):
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    content = json.loads(Tokenizer.of(sentencepiece.vocabulary_of_model(
        spm_model(spm_pieces()), "it")).json)  # fmt: skip
    content["model"].pop("nanoeuler")
    content["normalizer"] = None
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
                                "split": False}  # fmt: skip
    theirs = hf.Tokenizer.from_str(json.dumps(content))
    ours = Tokenizer.of(huggingface.vocabulary_of(content, "it"))
    ours.save(tmp_path / "tokenizer.json")
    for tokenizer in (ours, Tokenizer.load(tmp_path / "tokenizer.json")):
        for text in [*SPACED, "<s>a<s> b", " <s>a", "a<tool> b<tool>c"]:
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=True).tolist() == ids, text


def test_without_bytes_to_fall_back_on_unknown_characters_are_one_token():
    pieces = [p for p in spm_pieces() if p.kind != BYTE]
    ours = Tokenizer.of(sentencepiece.vocabulary_of_model(spm_model(pieces, fallback=0), "it"))
    ids = ours.encode("the 字字🙂 a").tolist()
    assert ids == [*ours.encode("the "), 0, *ours.encode("a")]
    assert in_chunks(ours, "the 字字🙂 a") == ids


def llama2c_file(pieces):
    """The bytes of a tokenizer.bin."""
    rows = [struct.pack("<I", 27)]
    for piece in pieces:
        text = piece.text.replace("▁", " ").encode()
        text = b"\n" + text + b"\n" if piece.kind == CONTROL else text
        rows += [struct.pack("<fi", piece.score, len(text)), text]
    return b"".join(rows)


def test_llama2cs_file_is_the_same_tokenizer(spm_file, tmp_path):
    pieces = [p for p in spm_pieces() if p.text not in ("[INST]", "<tool>")]
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(llama2c_file(pieces))
    ours = read_llama2c_tokenizer(path, len(pieces))
    assert ours.special == {"<unk>": 0, "<s>": 1, "</s>": 2} and ours.begin == (1,)
    for text in SPACED:
        if "tool" not in text:
            assert ours.encode(text).tolist() == spm_plainly(text, pieces), text
    refuse("breaks off in token", read_llama2c_tokenizer, path, len(pieces) + 1)
    refuse("belongs to a larger model", read_llama2c_tokenizer, path, len(pieces) - 1)
    refuse("259 ids or more", read_llama2c_tokenizer, path, 10)


# What is refused
REFUSED = [
    (lambda c: c["model"].update(type="Unigram"), "type BPE, got 'Unigram'"),
    (lambda c: c["model"].update(type="WordPiece"), "got 'WordPiece'"),
    (lambda c: c["model"].update(dropout=0.1), "dropout 0.1"),
    (lambda c: c["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (lambda c: c.update(normalizer={"type": "NFKC"}), "normalizer is NFKC"),
    (lambda c: c.update(normalizer={"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Lowercase"}]}), "NFC then Lowercase"),
    (lambda c: c.update(pre_tokenizer={"type": "BertPreTokenizer"}), "BertPreTokenizer"),
    (lambda c: c.update(pre_tokenizer={"type": "Metaspace", "replacement": "▁"}), "Metaspace"),
    (lambda c: c.update(pre_tokenizer=None), "pre-tokenizer"),
    (lambda c: c.update(pre_tokenizer={}), "pre-tokenizer is None"),
    (lambda c: c["pre_tokenizer"].pop("type"), "pre-tokenizer is None"),
    (lambda c: c["pre_tokenizer"].update(type="\x1b[2J"), r"pre-tokenizer is \[2J"),
    (lambda c: c["decoder"].update(type="\x1b[2J\n"), r"decoder is \[2J"),
    (lambda c: c.update(pre_tokenizer={"type": "Sequence"}), "pre-tokenizer is Sequence"),
    (lambda c: c["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
    (lambda c: c["pre_tokenizer"].update(use_regex=False), "pre-tokenizer is ByteLevel"),
    (lambda c: c.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\d+"}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}), "splits by"),
    (lambda c: c.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Digits"}, {"type": "ByteLevel", "add_prefix_space": False}]}), "Digits then"),
    (lambda c: c.update(decoder={"type": "WordPiece"}), "decoder is WordPiece"),
    (lambda c: c.update(post_processor={"type": "RobertaProcessing"}), "RobertaProcessing"),
    (lambda c: c.update(post_processor={"type": "TemplateProcessing", "single": 3}), "damaged"),
    (lambda c: c["model"]["vocab"].update({"zz": 3}), "is both"),
    (lambda c: c["model"]["vocab"].update({"zz": True}), "expected ids from 0"),
    (lambda c: c["model"]["vocab"].update({"zz": 1 << 40}), "expected ids from 0"),
    (lambda c: c["model"]["vocab"].update({"日": 9000}), "256 characters"),
    (lambda c: c["model"].update(vocab=[]), "expected ids"),
    (lambda c: c["model"].update(merges="ab"), "no pair of names"),
    (lambda c: c["model"].update(nanoeuler={"ranks": [1]}), "'nanoeuler' is damaged"),
    (lambda c: c["model"].update(nanoeuler={"bos": 10**7}), "around a text"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), REFUSED)
def test_what_we_have_no_code_for_is_refused_by_name(tmp_path, change, told):
    content = json.loads(Tokenizer.train(RIVER, 400).json)
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=told) as refused:
        Tokenizer.load(path)
    assert str(path) in str(refused.value) and len(str(refused.value)) < 1000
    assert str(refused.value).isprintable()


def test_models_of_sentencepiece_that_are_none_of_ours_are_refused():
    read, pieces = sentencepiece.vocabulary_of_model, spm_pieces()
    refuse("is unigram", read, spm_model(pieces, kind=1), "it")
    refuse("is word", read, spm_model(pieces, kind=3), "it")
    refuse("normalizes text by", read, spm_model(pieces, normalizer={2: b"xx"}), "it")
    refuse("removes spaces", read, spm_model(pieces, normalizer={4: 1}), "it")
    refuse("comes twice", read, spm_model([*pieces, pieces[-1]]), "it")
    refuse("of kind 5", read, spm_model([*pieces, Piece("zz", 0.0, 5)]), "it")
    refuse("no score", read, spm_model([*pieces, Piece("zz", float("nan"), 1)]), "it")
    refuse("256 bytes", read, spm_model([p for p in pieces if p.text != "<0x41>"]), "it")
    refuse("such as <0x0A>", read, spm_model([*pieces, Piece("<0xZZ>", 0.0, BYTE)]), "it")
    refuse("from 1 to", read, spm_model([]), "it")


def test_a_damaged_model_is_refused_or_is_another_tokenizer():
    whole, rng, refusals = spm_model(spm_pieces()), random.Random(3), 0
    for n in range(400):
        changed = bytearray(whole)
        if n % 2:
            changed[rng.randrange(len(whole))] = rng.randrange(256)
        else:
            del changed[rng.randrange(len(whole)) :]
        try:
            loaded = Tokenizer.of(sentencepiece.vocabulary_of_model(bytes(changed), "it"))
        except UserError:
            refusals += 1
            continue
        loaded.decode(loaded.encode("the river 漢"))
    assert refusals > 150


def gguf_changed(**changes):
    """GGUF's keys for a small tokenizer, some of them changed."""
    keys = gguf_metadata(Tokenizer.train(RIVER, 400))
    return keys | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize(("changes", "told"), [
    ({"model": "t5"}, "'t5' model"), ({"model": None}, "None model"),
    ({"pre": "chatglm-bpe"}, "as chatglm-bpe does"), ({"pre": None}, "as None does"),
    ({"tokens": None}, "list tokenizer.ggml.tokens"), ({"tokens": [1]}, "list of str"),
    ({"tokens": ["a", "a"], "token_type": [1, 1]}, "two ids"),
    ({"token_type": [1]}, "expected 400"),
    ({"merges": ["a b c"]}, "no pair of names"), ({"merges": ["zz q"]}, "merge 0 joins"),
    ({"bos_token_id": 400}, "below 400"), ({"eos_token_id": "x"}, "below 400"),
])  # fmt: skip
def test_ggufs_that_are_damaged_or_none_of_ours_are_refused(changes, told):
    refuse(told, tokenizer_of_gguf, gguf_changed(**changes))


def test_a_gguf_of_a_tokenizer_of_ours_is_padded_to_the_models_rows():
    ours = Tokenizer.train(RIVER, 400)
    keys = gguf_metadata(ours, rows=512)
    assert keys["tokenizer.ggml.pre"] == "gpt-2" and len(keys["tokenizer.ggml.tokens"]) == 512
    theirs = tokenizer_of_gguf(keys)
    assert theirs.vocab_size == 512 and theirs.special == ours.special
    assert theirs.encode(RIVER).tolist() == ours.encode(RIVER).tolist()
    assert theirs.decode([511]) == b""


def test_everything_that_is_known_of_a_tokenizer_is_saved(tmp_path):
    theirs = huggingface_trained("llama3", RIVER, 400)
    theirs.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>",
              "chat_template": "{{ messages[0]['content'] }}"}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = read_tokenizer_json(tmp_path)
    read.save(tmp_path / "run" / "tokenizer.json")
    for tokenizer in (read, Tokenizer.load(tmp_path / "run" / "tokenizer.json")):
        known = tokenizer.vocabulary
        assert (known.bos, known.eos, known.template) == (1, 2, config["chat_template"])
        assert known.ignore_merges and known.scanner == "llama3" and not known.ours
    hf = pytest.importorskip("tokenizers", reason="`tokenizers` (a test extra) is missing")
    opened = hf.Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json"))
    assert opened.encode(RIVER).ids == read.encode(RIVER).tolist()
    (tmp_path / "tokenizer_config.json").write_text("[3]")
    refuse("not a JSON object", read_tokenizer_json, tmp_path)
