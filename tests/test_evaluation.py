"""Scores on tasks: items, likelihoods, measures, files; and the harness's numbers beside ours."""

import bz2
import importlib.util
import json
import math
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import recorded
from mutants import Mutant, load

from nanoeuler.data.catalogue import catalogue
from nanoeuler.data.documents import documents
from nanoeuler.emulator import Device, Fault, run
from nanoeuler.engines.gpu.rows.likeliest import likeliest_launch
from nanoeuler.engines.gpu.step.precision import PRECISIONS
from nanoeuler.engines.gpu.step.scoring import CudaScorer
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.evaluation import judge as judging
from nanoeuler.evaluation.items import KINDS, item
from nanoeuler.evaluation.judge import (
    TaskFile,
    core,
    find_likelihoods,
    is_core,
    judge,
    judge_text,
    spans_of,
    task_name,
)
from nanoeuler.evaluation.likelihood import (
    CpuScorer,
    GpuScorer,
    Likelihood,
    Span,
    batches,
    likelihoods,
    scorers,
    span,
    windows,
)
from nanoeuler.evaluation.scores import Score, grouped, mean, perplexities, right
from nanoeuler.evaluation.tasks import (
    TASKS,
    detokenized,
    file_of,
    pages,
    read_items,
    with_shots,
)
from nanoeuler.files import project_root
from nanoeuler.interop.huggingface import write_folder
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.integrators import INTEGRATORS
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.others import read_tokenizer_json, write_tokenizer_json
from nanoeuler.tokenizer.tokenizer import Tokenizer

DATA = Path(os.environ.get("NANOEULER_DATA", project_root() / ".." / "shared" / "data"))
EVAL = DATA / "eval"
needs_data = pytest.mark.skipif(
    not EVAL.is_dir(), reason=f"needs the folder eval in {DATA} (NANOEULER_DATA)"
)
SAMPLES = {name: f"{name.removesuffix('_openai')}_sample.jsonl" for name in TASKS}
SAMPLES |= {"lambada_openai": "lambada_openai_sample.jsonl"}
SAMPLES = {name: file for name, file in SAMPLES.items() if (EVAL / file).exists()}
CONFIG = ModelConfig(vocab_size=300, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden=48,
                     context=24, n_predict=1)  # fmt: skip
STORY = "The river begins under a stone, and nobody knows why it is wet. " * 6
TOKENIZER = Tokenizer.train(STORY, 300)


def weights_of(config=CONFIG, seed=0):
    """Weights whose opinions are strong: logits of an rms near 2."""
    w = initialise(config, seed)
    w.flat *= 4
    return w


W = weights_of()


def on_cpu(w, spans, threads=1):
    return likelihoods(scorers("cpu", w, threads), w.config.context, spans)


# ---- Likelihoods


def by_hand(config, w, ids, begin):
    """log p of ids[begin:], one token after another in float64, each from `context` ids at most."""
    total, greedy = 0.0, True
    for at in range(begin, len(ids)):
        seen = ids[max(0, at - config.context) : at]
        logits = forward(ReferenceEngine(), config, w, np.array([seen]))[0][0, -1, 0].astype("f8")
        total += logits[ids[at]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        greedy &= logits.argmax() == ids[at]
    return total, greedy


@pytest.mark.parametrize("change", [{}, dict(tied=True), dict(n_predict=3),
                                    dict(norm="layer", mlp="gelu", position="learned", bias=True)])
def test_likelihoods_are_those_by_hand(change):
    config = replace(CONFIG, **change)
    w, rng = weights_of(config), np.random.default_rng(1)
    spans = [Span(rng.integers(0, 300, n), begin)
             for n, begin in ((2, 1), (9, 3), (25, 24), (25, 1), (7, 6), (7, 1))]  # fmt: skip
    for one, got in zip(spans, on_cpu(w, spans), strict=True):
        nats, greedy = by_hand(config, w, one.ids, one.begin)
        # Logits of an rms near 2 with float32's roundings, some dozen of them in a row: 1e-5 each.
        assert abs(got.log_p - nats) <= 1e-5 * len(one.ids) and got.greedy == greedy
        assert got.tokens == len(one.ids) - one.begin


def test_a_continuation_that_is_written_greedily_is_said_to_be():
    ids = [5]
    while len(ids) < 9:
        logits = forward(ReferenceEngine(), CONFIG, W, np.array([ids]))[0]
        ids.append(int(logits[0, -1, 0].argmax()))
    wrong = [*ids[:5], (ids[5] + 1) % 300, *ids[6:]]
    spans = [Span(np.array(ids), 3), Span(np.array(wrong), 3), Span(np.array(wrong), 6)]
    one, two, _ = on_cpu(W, spans)
    assert one.greedy and not two.greedy


def test_neither_batches_nor_threads_change_a_likelihood():
    rng = np.random.default_rng(2)
    spans = [Span(rng.integers(0, 300, n), int(rng.integers(1, n)))
             for n in rng.integers(2, 60, 80)]  # fmt: skip
    all_at_once = on_cpu(W, spans, 3)
    alone = [on_cpu(W, [each])[0] for each in spans]
    for one, two in zip(all_at_once, alone, strict=True):
        assert one[1:] == two[1:] and abs(one.log_p - two.log_p) <= 1e-5 * one.tokens


def test_a_scorer_on_a_processor_keeps_nothing_of_a_pass():
    (scorer,) = scorers("cpu", W, 1)
    rows = [(np.arange(9), 1)] * 3
    assert scorer.score(rows) == scorer.score(rows)
    assert scorer.engine.forward_only and not scorer.engine.arena.slab.size


@pytest.mark.parametrize("n, begin, most", [(9, 3, 8), (30, 29, 8), (30, 25, 8), (60, 1, 8),
                                            (17, 1, 8), (25, 9, 8), (2, 1, 1), (9, 1, 1)])
def test_windows_score_each_id_once_from_no_more_than_the_context(n, begin, most):
    found, next_at = list(windows(n, begin, most)), begin
    for start, at, stop in found:
        assert at == next_at and 0 <= start < at < stop <= n and stop - 1 - start <= most
        next_at = stop
    assert next_at == n
    assert found[-1][0] == max(0, n - 1 - most)  # the last reads all it can


@pytest.mark.parametrize("scorer", [CpuScorer(None, W), GpuScorer(None, 60)])
def test_batches_hold_every_row_once_and_no_more_than_they_may(scorer):
    scorer.batch_tokens = 100
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 60, 100).tolist()
    many = list(batches(scorer, lengths))
    assert sorted(i for batch in many for i in batch) == [*range(100)]
    for batch in many:
        longest = max(lengths[i] for i in batch)
        assert longest == lengths[batch[0]] <= scorer.width(longest)
        assert len(batch) == 1 or len(batch) * scorer.width(longest) <= 100


def test_a_gpus_batches_have_few_widths():
    scorer = GpuScorer(None, 1000)
    widths = [scorer.width(n) for n in range(1, 1001)]
    assert sorted({*widths}) == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    assert all(n <= width < 1.5 * n + 1 for n, width in enumerate(widths, 1) if n > 31)


def test_the_context_ends_where_its_tokens_do():
    found = span(TOKENIZER, "The river", " begins")
    assert TOKENIZER.decode_text(found.ids[found.begin :]) == " begins"
    assert TOKENIZER.decode_text(found.ids) == "The river begins"
    first = span(TOKENIZER, "", "The river")
    assert first.begin == 1 and TOKENIZER.decode_text(first.ids[1:]) == "The river"
    # Where the whole has no more tokens than the context, its last token is scored.
    merged = span(TOKENIZER, "The rive", "r")
    assert 0 < merged.begin < len(merged.ids)


# ---- Items and their files

RECORDS = {
    "choice": {"query": "A ", "choices": ["b", "cc"], "gold": 1},
    "schema": {"context_options": ["A", "B"], "continuation": "c", "gold": 0},
    "word": {"context": "A", "continuation": "b"},
    "pair": {"good": "a", "bad": "b", "uid": "u"},
}


def test_items_have_their_pairs():
    made = {kind: item(kind, record, "|", "x") for kind, record in RECORDS.items()}
    assert made["choice"][:4] == (("A", "A"), ("|b", "|cc"), 1, (1, 2))
    assert made["schema"][:4] == (("A", "B"), ("|c", "|c"), 0, (1, 1))
    assert made["word"][:4] == (("A",), ("|b",), 0, (1,))
    assert made["pair"] == (("", ""), ("a", "b"), 0, (1, 1), "u")
    own = {"sentence_good": "a", "sentence_bad": "b", "UID": "u", "more": 1}
    assert item("pair", own, " ", "x") == item("pair", RECORDS["pair"], " ", "x")


@pytest.mark.parametrize("kind, change", [
    *((kind, {name: wrong}) for kind, record in RECORDS.items() for name in record
      for wrong in (None, 1.5, True, {}, [])),
    ("choice", {"gold": 2}), ("choice", {"gold": -1}), ("choice", {"choices": ["b"]}),
    ("choice", {"choices": ["b", 3]}), ("choice", {"choices": ["b", " "]}),
    ("schema", {"context_options": ["A"]}), ("word", {"continuation": ""}), ("pair", {"bad": ""}),
])  # fmt: skip
def test_a_record_of_another_form_is_refused_by_its_line(kind, change):
    with pytest.raises(UserError, match="tasks.jsonl, line 3: expected"):
        item(kind, RECORDS[kind] | change, " ", "tasks.jsonl, line 3")


@pytest.mark.parametrize("text, said", [
    ("", "has no items"), ("\n\n", "has no items"), ("[1]\n", "line 1: expected 'query'"),
    ('{"query": "a"}\n', "line 1: expected 'choices'"), ("nonsense\n", "line 1: expected a JSON"),
    ("[" * 100_000, "line 1: expected a JSON"), ("\udcff", "cannot be read as text"),
])  # fmt: skip
def test_a_file_that_is_no_task_is_refused_in_a_line(tmp_path, text, said):
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=said):
        read_items("copa", path)


def test_a_line_may_hold_any_character(tmp_path):
    odd = RECORDS["choice"] | {"query": "a\u2028b\x85c"}
    (tmp_path / "x").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert read_items("copa", tmp_path / "x")[0].contexts[0] == "a\u2028b\x85c"


def test_limits_and_missing_files(tmp_path):
    (tmp_path / "x").write_text((json.dumps(RECORDS["choice"]) + "\n") * 5)
    assert judge(W, TOKENIZER, TaskFile("copa", tmp_path / "x", limit=3)).scores["acc"].items == 3
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError):
            read_items("copa", path)
    with pytest.raises(UserError, match="expected a task"):
        task_name("nonsense")
    assert task_name("LAMBADA") == "lambada_openai"


def test_examples_stand_before_an_item_and_are_never_the_item():
    items = [item("choice", {"query": f"q{i}", "choices": ["no", f"a{i}"], "gold": 1}, " ", "x")
             for i in range(9)]  # fmt: skip
    made = with_shots(items, 3)
    for i, one in enumerate(made):
        *before, last = one.contexts[0].split("\n\n")
        assert last == f"q{i}" and len({*before}) == 3 and f"q{i} a{i}" not in before
        assert all(re.fullmatch(r"q(\d) a\1", text) for text in before)
        assert one.continuations == items[i].continuations
    assert with_shots(items, 3) == made and with_shots(items, 0) == items
    assert with_shots(items[:5], 3)[:1] != made[:1]  # drawn from what there is
    with pytest.raises(UserError, match="more than 9 items"):
        with_shots(items, 9)


# ---- Measures


def test_an_item_is_answered_by_three_measures():
    one = item("choice", {"query": "q", "choices": ["a cork.", "under a grey stone."], "gold": 1},
               " ", "x")  # fmt: skip
    found = [Likelihood(-6.0, 2, False), Likelihood(-8.0, 4, False)]
    assert [right(one, found, m) for m in ("acc", "acc_norm", "acc_token")] == [False, True, True]
    equal = [Likelihood(-6.0, 2, False)] * 2
    assert not right(one, equal) and right(one._replace(gold=0), equal)  # of equals the first
    word = item("word", RECORDS["word"], " ", "x")
    assert right(word, [Likelihood(-9.0, 1, True)]) and not right(word, [Likelihood(-1, 1, False)])


def test_means_and_errors_are_numpys():
    rng = np.random.default_rng(4)
    values, groups = rng.integers(0, 2, 90), rng.integers(0, 3, 90)
    got = mean(values)
    assert math.isclose(got.value, values.mean())
    assert math.isclose(got.error, values.std(ddof=1) / math.sqrt(90))
    parts = [values[groups == g] for g in range(3)]
    got = grouped(values, [str(g) for g in groups])
    assert math.isclose(got.value, np.mean([part.mean() for part in parts]))
    wanted = math.sqrt(sum(part.var(ddof=1) / len(part) for part in parts)) / 3
    assert math.isclose(got.error, wanted) and got.items == 90
    assert math.isnan(mean([1]).error)
    with pytest.raises(UserError, match="got none"):
        mean([])


def test_perplexities_by_hand():
    found = [Likelihood(-math.log(8), 3, False), Likelihood(-math.log(4), 1, False)]
    got = perplexities(found, ["two words", "one"])
    assert (got.words, got.tokens, got.bytes) == (3, 4, 12)
    assert math.isclose(got.word, 32 ** (1 / 3)) and math.isclose(got.token, 32 ** (1 / 4))
    assert math.isclose(got.bits_per_byte, 5 / 12)
    assert perplexities([Likelihood(-1e6, 1, False)], ["x"]).token == math.inf


def test_core_is_the_mean_of_centred_accuracies():
    def one(task, shots, value, token=None):
        scores = {"acc": Score(value, 0.1, 9)}
        scores |= {"acc_token": Score(token, 0.1, 9)} if token else {}
        return judging.Judged(task, shots, scores, 0)

    rows = [one("hellaswag", 0, 0.9, 0.4), one("lambada_openai", 0, 0.3), one("copa", 5, 0.9, 0.9),
            one("blimp", 0, 0.9)]  # fmt: skip
    got = core(rows)  # the third has other shots than CORE's, the fourth is not of CORE
    assert math.isclose(got.value, ((0.4 - 0.25) / 0.75 + 0.3) / 2) and got.items == 2
    assert math.isclose(got.error, math.hypot(0.1 / 0.75, 0.1) / 2)
    assert sum(len(task.core) for task in TASKS.values()) == 20
    with pytest.raises(UserError):
        core(rows[2:])
    every = [one(name, n, 0.5) for name, task in TASKS.items() for n in task.core]
    assert is_core(every) and not is_core(every[1:]) and core(every).items == 20


# ---- Whole tasks


@pytest.fixture
def task(tmp_path):
    """A file of twelve choices about the river."""
    rng = np.random.default_rng(5)
    words = STORY.split()
    rows = [{"query": " ".join(rng.choice(words, 4)), "gold": int(rng.integers(2)),
             "choices": [" ".join(rng.choice(words, n)) for n in (2, 3)]} for _ in range(12)]
    path = tmp_path / "river.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_interrupted_task_goes_on_where_it_was(task, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuScorer, "group_tokens", 70)
    spans = [spans_of(TOKENIZER, one) for one in read_items("copa", task)]
    sizes = [len(group) for group in judging.groups(range(12), spans, 70)]
    assert sum(sizes) == 12 and 2 < len(sizes) < 8
    whole, seen = judge(W, TOKENIZER, TaskFile("copa", task)), []

    def stop(done, total):
        seen.append((done, total))
        if done == sum(sizes[:-1]):
            raise KeyboardInterrupt

    keep = tmp_path / "kept" / "copa.jsonl"
    with pytest.raises(KeyboardInterrupt):
        judge(W, TOKENIZER, TaskFile("copa", task), report=stop, keep=keep)
    assert seen == [(sum(sizes[: n + 1]), 12) for n in range(len(sizes) - 1)]
    with keep.open("a") as file:
        file.write('{"item": 10, "fou')  # as a power cut leaves it
    asked = []
    real = judging.likelihoods
    monkeypatch.setattr(judging, "likelihoods", lambda *a, **k: asked.append(a[2]) or real(*a, **k))
    assert judge(W, TOKENIZER, TaskFile("copa", task), keep=keep) == whole
    assert len(asked) == 1 and len(asked[0]) == 2 * sizes[-1]  # items of two choices
    assert judge(W, TOKENIZER, TaskFile("copa", task), keep=keep) == whole and len(asked) == 1


def test_groups_have_the_longest_items_first_and_no_more_ids_than_they_may():
    rng = np.random.default_rng(6)
    spans = [[Span(np.zeros(n), 1)] * 2 for n in rng.integers(2, 40, 50)]
    found = [*judging.groups([*range(3, 50)], spans, 100)]
    order = [i for group in found for i in group]
    assert sorted(order) == [*range(3, 50)]
    lengths = [len(spans[i][0].ids) for i in order]
    assert lengths == sorted(lengths, reverse=True)
    sizes = [sum(2 * len(spans[i][0].ids) for i in group) for group in found]
    assert max(sizes) <= 100 and min(sizes[:-1]) > 20
    assert [*judging.groups([0, 1], spans, 1)] == sorted([[0], [1]], key=lambda g: -len(
        spans[g[0]][0].ids))  # fmt: skip


def test_likelihoods_of_others_are_never_mixed(task, tmp_path):
    keep = tmp_path / "kept.jsonl"
    judge(W, TOKENIZER, TaskFile("copa", task), keep=keep)
    before = keep.read_bytes()
    other = tmp_path / "other.jsonl"
    other.write_text(task.read_text() + json.dumps(RECORDS["choice"]))
    for args in ((weights_of(seed=1), TOKENIZER, TaskFile("copa", task)),
                 (W, TOKENIZER, TaskFile("copa", other)),
                 (W, TOKENIZER, TaskFile("copa", task, shots=2))):  # fmt: skip
        with pytest.raises(UserError, match="other weights, another task, other shots"):
            judge(*args, keep=keep)
    keep.write_bytes(before[:200] + b"nonsense\n" + before[200:])
    with pytest.raises(UserError, match="is no line of likelihoods"):
        judge(W, TOKENIZER, TaskFile("copa", task), keep=keep)


def test_a_limit_changes_no_example(task, tmp_path):
    """So that what was kept of the first items holds for all."""
    keep = tmp_path / "kept.jsonl"
    judge(W, TOKENIZER, TaskFile("copa", task, 3, 4), keep=keep)
    whole = judge(W, TOKENIZER, TaskFile("copa", task, 3))
    assert judge(W, TOKENIZER, TaskFile("copa", task, 3), keep=keep) == whole


@needs_data
def test_a_task_is_found_by_its_name(tmp_path):
    for name in ("copa", "lambada_openai", "wikitext"):
        assert file_of(name, EVAL).name.startswith(name.removesuffix("_openai"))
    (tmp_path / "copa_a.jsonl").touch()
    assert file_of("copa", tmp_path) == file_of("copa", tmp_path / "copa_a.jsonl")
    (tmp_path / "copa_b.jsonl").touch()
    for name in ("copa", "piqa"):
        with pytest.raises(UserError, match=f"expected one file {name}.jsonl"):
            file_of(name, tmp_path)
    (tmp_path / "copa.jsonl").touch()
    assert file_of("copa", tmp_path).name == "copa.jsonl"


def test_hellaswag_is_read_as_text_too(tmp_path):
    text = "A: a man is\n2\none.\ntwo.\nthree.\nfour.\n" * 3
    for name, data in (("hellaswag.txt", text.encode()),
                       ("hellaswag.txt.bz2", bz2.compress(text.replace("\n", "\r\n").encode()))):
        (tmp_path / name).write_bytes(data)
        items = read_items("hellaswag", tmp_path / name)
        assert len(items) == 3 and {one.gold for one in items} == {2}
        assert items[0].contexts[0] == "A: a man is" and items[0].continuations[2] == " three."
    with pytest.raises(UserError, match="expected one file hellaswag.jsonl"):
        file_of("hellaswag", tmp_path)  # which of the two?
    (tmp_path / "hellaswag.txt").unlink()
    assert file_of("hellaswag", tmp_path / "none", tmp_path).name == "hellaswag.txt.bz2"
    for bad, said in ((text[:-6], "line 13: expected a beginning"), ("a\nb\n", "line 1"),
                      (text.replace("2", "4"), "line 1:"), ("", "line 1:")):  # fmt: skip
        (tmp_path / "hellaswag.txt").write_text(bad)
        with pytest.raises(UserError, match=said):
            read_items("hellaswag", tmp_path / "hellaswag.txt")


def test_archives_are_read_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "blimp.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for uid in "ba":
            rows = [RECORDS["pair"] | {"uid": uid}] * 2
            whole.writestr(f"data/{uid}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        whole.writestr("__MACOSX/data/._a.jsonl", b"\xff")
        whole.writestr("data/.DS_Store", b"\xff")
    assert file_of("blimp", tmp_path) == path
    assert [one.group for one in read_items("blimp", path)] == ["a", "a", "b", "b"]
    for damage in (path.read_bytes()[:-30], b"", path.read_bytes().replace(b"PK", b"KP")):
        (tmp_path / "x.zip").write_bytes(damage)
        with pytest.raises(UserError, match="cannot be read as text"):
            read_items("blimp", tmp_path / "x.zip")
        (tmp_path / "x.bz2").write_bytes(damage)
        with pytest.raises(UserError):
            read_items("hellaswag", tmp_path / "x.bz2")


def test_every_task_of_core_can_be_fetched_under_its_name(tmp_path):
    sources = catalogue()
    for source in ("core", "blimp", "wikitext"):
        for file in sources[source].files:
            (tmp_path / file.name).touch()
            assert re.search(r"/[0-9a-f]{40}/", file.url)  # a commit, and no branch
            assert file.bytes
    wanted = [name for name, task in TASKS.items() if task.core or name in ("blimp", "wikitext")]
    assert len(wanted) == 21 == len({file_of(name, tmp_path) for name in wanted})
    for source in ("core", "blimp", "wikitext"):
        with pytest.raises(UserError, match="holds tasks, which evaluate models"):
            next(documents(sources[source], tmp_path))


def test_items_that_were_cut_are_counted(tmp_path):
    rows = [RECORDS["choice"], RECORDS["choice"] | {"query": "word " * 60}]
    (tmp_path / "x").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert judge(W, TOKENIZER, TaskFile("copa", tmp_path / "x")).cut == 1


def test_a_text_is_judged_page_by_page(tmp_path):
    text = " = One = \n \n A river . \n = = Part = = \n wet \n = Two = \n stone \n"
    assert [page.split("\n")[0] for page in pages(text)] == [" = One = ", " = Two = "]
    assert "".join(pages(text)) == text and pages("no title") == ["no title"]
    (tmp_path / "x").write_text(text)
    seen, keep = [], tmp_path / "kept"
    how = {"report": lambda *at: seen.append(at), "keep": keep}
    got = judge_text(W, TOKENIZER, tmp_path / "x", **how)
    assert seen == [(2, 2)] and got.bytes == len(text)
    assert judge_text(W, TOKENIZER, tmp_path / "x", **how) == got and len(seen) == 1
    with pytest.raises(UserError, match="another task"):
        judge_text(W, TOKENIZER, tmp_path / "x", as_published=True, **how)
    same = judge_text(W, TOKENIZER, tmp_path / "x", as_published=True)
    assert same.bytes == got.bytes and same.tokens != got.tokens
    for path, data in (("empty", b""), ("binary", b"\xff\xfe")):
        (tmp_path / path).write_bytes(data)
        with pytest.raises(UserError):
            judge_text(W, TOKENIZER, tmp_path / path)


@needs_data
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_files_of_public_repositories_are_read(name):
    items = read_items(name, EVAL / SAMPLES[name])
    lines = [line for line in (EVAL / SAMPLES[name]).read_text("utf-8").split("\n") if line.strip()]
    assert len(items) == len(lines)
    for one, line in zip(items, lines, strict=True):
        record = json.loads(line)
        assert one.gold == record.get("gold", 0)
        if TASKS[name].kind == "choice":
            assert len(one.continuations) == len(record["choices"])


# ---- On a GPU


def on_paper(w, precision="cuda", tokens=64):
    """A scorer on a device on paper, with small batches."""
    device = Device(capability=(9, 0), multiprocessors=4)
    scorer = GpuScorer(CudaScorer(w, None, device, precision=PRECISIONS[precision]),
                       w.config.context)  # fmt: skip
    scorer.batch_tokens = tokens
    return scorer


SMALL = dict(vocab_size=304, dim=64, n_heads=2, n_kv_heads=1, hidden=64, context=16)
SPANS = (9, 3), (20, 1), (2, 1)  # ids, and from which on they are scored


def plain_weights(config):
    """Weights whose logits have an rms near 2, and that make no error larger on its way."""
    w = initialise(config, 0)
    w["embedding" if config.tied else "output"][...] *= 12
    return w


IMPORTED = {
    "gpt2": dict(norm="layer", position="learned", mlp="gelu", bias=True, tied=True,
                 vocab_size=301),
    "llama, three tokens": dict(n_predict=3, vocab_size=320),
    "mistral": dict(sliding_window=5, window_pattern="SL"),
    "qwen": dict(qk_norm=True, tied=True, norm_eps=1e-6),
    "smollm2, by Heun": dict(tied=True, integrator="heun", repeat=2),
}  # fmt: skip


def bound(config, w, spans):
    """The largest errors of log p in bf16, of spans.

    A number has passed at most R = 12 a layer and stage + 4 roundings on its way to a logit, as
    test_cuda_engine.py counts them, forward: each is off by 2^-9 / sqrt(3) in the root of the mean
    square. A logit of size s is then off by sqrt(R) 2^-9 / sqrt(3) s, and so is log p, once from
    its own logit and once from the others', which are no worse together. Tokens add up as squares
    do; four times that is what no span exceeds.
    """
    stages = len(INTEGRATORS[config.integrator].b)
    unit = math.sqrt(12 * config.n_layers * stages + 4) * 2**-9 / math.sqrt(3)
    found = []
    for one in spans:
        ids = one.ids[: config.context]
        logits = forward(ReferenceEngine(), config, w, np.array([ids]))[0]
        rms = math.sqrt(float((logits**2).mean()))
        found.append(4 * math.sqrt(2 * (len(one.ids) - one.begin)) * unit * rms)
    return found


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("gpt2", "qwen") else pytest.mark.long)
    for name in IMPORTED
])  # fmt: skip
def test_a_gpu_finds_the_same_likelihoods(name, monkeypatch):
    recorded.by_numpy(monkeypatch)
    config = replace(CONFIG, **(SMALL | IMPORTED[name]))
    w, rng = plain_weights(config), np.random.default_rng(7)
    spans = [Span(rng.integers(0, config.vocab_size, n), begin) for n, begin in SPANS]
    exact, scorer = on_cpu(w, spans), on_paper(w)
    found = likelihoods([scorer], config.context, spans)
    for one, its, most in zip(exact, found, bound(config, w, spans), strict=True):
        assert one.tokens == its.tokens and abs(one.log_p - its.log_p) < most < 0.2 * -one.log_p
    assert len(scorer.cuda.programs) == 1


def test_a_gpu_in_float32_finds_them_to_the_last_digits_and_which_are_greedy(monkeypatch):
    recorded.by_numpy(monkeypatch)
    config = replace(CONFIG, **SMALL)
    w, ids = weights_of(config), [5]
    while len(ids) < 12:
        logits = forward(ReferenceEngine(), config, w, np.array([ids]))[0]
        ids.append(int(logits[0, -1, 0].argmax()))
    spans = [Span(np.array(ids[: n + 1]), n - 4) for n in (6, 11)]
    spans += [one._replace(ids=np.array([*one.ids[:-1], (one.ids[-1] + 1) % 304])) for one in spans]
    found = likelihoods([on_paper(w, "cuda-float32")], config.context, spans)
    assert [each.greedy for each in found] == [True] * 2 + [False] * 2
    for one, its in zip(on_cpu(w, spans), found, strict=True):
        # As by hand, above: some dozen roundings of logits of an rms near 2.
        assert abs(one.log_p - its.log_p) <= 1e-5 * 12 and one.greedy == its.greedy


def test_a_gpus_kernels_find_them_without_numpys_help():
    """One small batch by the products of tensor cores, on paper."""
    config = replace(CONFIG, vocab_size=72, dim=64, n_layers=1, n_heads=1, n_kv_heads=1, hidden=64,
                     context=8, tied=True)  # fmt: skip
    w, rng = plain_weights(config), np.random.default_rng(8)
    spans = [Span(rng.integers(0, 72, n), 2) for n in (5, 9)]
    found = likelihoods([on_paper(w, tokens=16)], 8, spans)
    for one, its, most in zip(on_cpu(w, spans), found, bound(config, w, spans), strict=True):
        assert abs(one.log_p - its.log_p) < most


@pytest.mark.parametrize("columns, width", [(1, 4), (4, 4), (50, 64), (2047, 2048), (2100, 2112)])
def test_the_likeliest_is_argmaxs(columns, width):
    rng = np.random.default_rng(columns)
    logits = rng.integers(-3, 4, (6, width)).astype(np.float32)  # with equal ones
    logits[:, columns:] = np.nan
    best = logits[:, :columns].argmax(1)
    last = columns - 1 - logits[:, columns - 1 :: -1].argmax(1)  # as large, and beaten by the first
    targets = np.where(np.arange(6) % 2, best, last)[:, None]
    logits[0, 0], logits[0, columns - 1], targets[0], best[0] = 8, 9, 0, columns - 1
    targets = np.concatenate([[[5]] * 2, targets, [[-1]]]).astype(np.int32)
    flags = np.full((9, 1), np.nan, np.float32)
    run(likeliest_launch(logits, targets, flags, columns, 2), seed=1)
    assert np.isnan(flags[:2]).all() and np.isnan(flags[8:]).all()
    assert flags[2:8, 0].tolist() == (targets[2:8, 0] == best).tolist()
    run(likeliest_launch(logits[:1], targets, flags, columns, 8))
    assert flags[8] == 0


def test_what_is_no_number_is_not_the_likeliest():
    for bad, target in ((np.nan, 1), (np.nan, 2), (np.inf, 1)):
        logits, flags = np.float32([[0, 3, 1, 2]]), np.full((1, 1), np.nan, np.float32)
        logits[0, 2] = bad
        run(likeliest_launch(logits, np.int32([[target]]), flags, 4))
        assert flags == 0


def test_a_launch_that_does_not_fit_is_refused():
    logits, targets = np.zeros((3, 8), np.float32), np.zeros((4, 1), np.int32)
    flags = np.zeros((4, 1), np.float32)
    for args in ((logits[:, :6], 6), (logits, 9), (logits, 0), (logits, 8, 2), (logits, 8, -1)):
        with pytest.raises(UserError):
            likeliest_launch(np.ascontiguousarray(args[0]), targets, flags, *args[1:])


PLANTED = {  # in kernels, programs, scorers
    "no tie": ("engines.gpu.rows.likeliest", "likeliest", "at + k >= target", "True"),
    "padding counts": ("engines.gpu.rows.likeliest", "likeliest", "at + k < columns and", ""),
    "a round is left out": ("engines.gpu.rows.likeliest", "likeliest", "4 * THREADS",
                            "8 * THREADS"),
    "another row's target": ("engines.gpu.rows.likeliest", "likeliest",
                             "ptx.load_int(targets + 4 * int64(start + n))",
                             "ptx.load_int(targets + 4 * int64(n))"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_mistakes_in_the_kernel_are_seen(name, monkeypatch):
    module, function, old, new = PLANTED[name]
    wrong = load(Mutant(module, function, name, old, new))
    monkeypatch.setitem(globals(), "likeliest_launch", wrong.likeliest_launch)
    with pytest.raises((AssertionError, Fault)):
        for shape in ((50, 64), (2100, 2112)):
            test_the_likeliest_is_argmaxs(*shape)


# ---- Beside the harness


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The harness's model and ours: the same weights, a context of 256, a published tokenizer."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    from lm_eval.models.huggingface import HFLM

    assert lm_eval
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = read_tokenizer_json(DATA / "interop" / "hf" / "gpt2" / "tokenizer.json")
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size, dim=64, hidden=128, context=256)
    w = initialise(config, 0)
    w.flat *= 2  # opinions that differ by more than roundings
    write_folder(folder, config, w)
    write_tokenizer_json(tokenizer, folder)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=16,
                  max_length=256)  # fmt: skip
    return theirs, w, read_tokenizer_json(folder / "tokenizer.json")


def asked(theirs, pairs):
    """The harness's log-likelihoods of (context, continuation), and whether they are greedy."""
    from lm_eval.api.instance import Instance

    rows = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return theirs.loglikelihood(rows, disable_tqdm=True)


@needs_data
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_harness_finds_the_same_likelihoods_and_choices(both, name):
    """Over all tasks some 2,000 items; not those whose answer alone is longer than the context.

    Two float32 programs part by 1e-5 a token: logits below 10 with some dozen roundings each.
    """
    theirs, w, tokenizer = both
    items = read_items(name, EVAL / SAMPLES[name])[:250]
    ours = find_likelihoods(w, [spans_of(tokenizer, one) for one in items])
    fits = [i for i, found in enumerate(ours) if all(x.tokens <= 256 for x in found)]
    items, ours = [items[i] for i in fits], [ours[i] for i in fits]
    assert len(items) >= 90
    pairs = [pair for one in items for pair in zip(one.contexts, one.continuations, strict=True)]
    found = iter(asked(theirs, pairs))
    for one, mine in zip(items, ours, strict=True):
        its = [next(found) for _ in mine]
        for (nats, greedy), got in zip(its, mine, strict=True):
            assert abs(nats - got.log_p) <= 1e-5 * (1 + got.tokens) and greedy == got.greedy
        if len(mine) > 1:
            sizes = [len(text.removeprefix(TASKS[name].delimiter)) for text in one.continuations]
            for measure, by in (("acc", [1] * len(its)), ("acc_norm", sizes)):
                values = [x[0] / size for x, size in zip(its, by, strict=True)]
                first, second = sorted(values)[-1], sorted(values)[-2]
                if first - second > 1e-4:
                    assert right(one, mine, measure) == (int(np.argmax(values)) == one.gold)


@needs_data
def test_the_harness_finds_the_same_perplexities(both, tmp_path):
    from lm_eval.api.instance import Instance

    path = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "wikitext"
    spec = importlib.util.spec_from_file_location("pre", path / "preprocess_wikitext.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs, w, tokenizer = both
    text = (EVAL / "wikitext_test_sample.raw").read_text("utf-8")[:60_000]
    (tmp_path / "x").write_text(text, encoding="utf-8")
    nats, words, size = 0.0, 0, 0
    for page in pages(text):
        plain = module.wikitext_detokenizer({"page": page})
        assert plain == detokenized(page)
        row = Instance("loglikelihood_rolling", {}, (plain,), 0)
        found = theirs.loglikelihood_rolling([row], disable_tqdm=True)[0]
        measures = module.process_results({"page": page}, (found,))
        nats += measures["word_perplexity"][0]
        words += measures["word_perplexity"][1]
        size += measures["byte_perplexity"][1]
    got = judge_text(w, tokenizer, tmp_path / "x")
    assert (got.words, got.bytes) == (words, size)
    assert math.isclose(got.word, math.exp(-nats / words), rel_tol=1e-4)
    assert math.isclose(got.bits_per_byte, -nats / size / math.log(2), rel_tol=1e-5)


def test_kinds_of_tasks_are_those_of_items():
    assert {task.kind for task in TASKS.values()} <= {*KINDS, "text"}
