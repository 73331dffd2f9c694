"""The template, the loss mask, batches of conversations, and fine-tuning."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import sketches
from hypothesis import given, settings
from hypothesis import strategies as st

import nanoeuler
from nanoeuler.data.batches import STEP_TOKENS
from nanoeuler.data.conversations import Conversation, read_pairs
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import loss_and_gradients, loss_sums
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.chat_template import ASSISTANT, END, USER, conversation, prompt
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import optim
from nanoeuler.training.checkpoint import load, load_model
from nanoeuler.training.folder import checkpoints, read_metrics
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import Settings
from nanoeuler.training.sft import (
    FINETUNING,
    LEARNING_RATE,
    Conversations,
    checked_pairs,
    finetune,
    held_out_answers,
    pack,
    spell,
)
from nanoeuler.training.train import train

TOKENIZER = Tokenizer(np.zeros((0, 2)))  # bytes and the special tokens
MARKS = {name: TOKENIZER.special[name] for name in (USER, ASSISTANT, END)}
PAIRS = [(f"What is {i}?", f"The number {i}.") for i in range(30)]
TINY = ModelConfig(vocab_size=TOKENIZER.vocab_size, dim=16, n_layers=1, n_heads=2, n_kv_heads=1,
                   hidden=24, context=64, n_predict=2)
texts = st.text() | st.sampled_from(["<|end|>", "a<|assistant|>b", "<|user|>", " ", "\n"])


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with sketches.drawn():
        yield


def test_the_marks_are_spelled_once():
    package = Path(nanoeuler.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    found = {name for name, text in texts.items() if any(mark in text for mark in MARKS)}
    assert found == {"tokenizer.py", "jinja.py"}  # the second writes the template for others


@given(texts, texts, texts)
@settings(deadline=None)  # the first encoding compiles
def test_the_template_round_trips_whatever_the_text(question, answer, system):
    ids, counted = conversation(TOKENIZER, question, answer, system)
    asked = prompt(TOKENIZER, question, system)
    assert ids[: len(asked)] == asked  # training and chat use one and the same beginning
    where = [i for i, token in enumerate(ids) if token in MARKS.values()]
    assert [ids[i] for i in where] == list(MARKS.values())  # three marks, none from the texts
    assert where[2] == len(ids) - 1
    assert TOKENIZER.decode_text(ids[: where[0]]) == system
    assert TOKENIZER.decode_text(ids[where[0] + 1 : where[1]]) == question
    assert TOKENIZER.decode_text(ids[where[1] + 1 : -1]) == answer
    assert counted == [i > where[1] for i in range(len(ids))]  # the answer and its end, no more
    assert conversation(TOKENIZER, question, answer)[0] == ids[where[0] :]  # none: not a token


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=20),
       st.integers(1, 3))  # fmt: skip
@settings(deadline=None)
def test_rows_hold_whole_conversations_and_count_each_answer_once(pairs, n_predict):
    pairs = [*pairs, ("fits", "always")]
    data = Conversations(TOKENIZER, pairs, 2, context=40, n_predict=n_predict)
    tokens, targets, first = data.rows(np.arange(len(data.tokens)))
    assert tokens.shape == first.shape == (len(tokens), 40)
    assert targets.shape == (len(tokens), 40, n_predict)
    wanted = [conversation(TOKENIZER, *pair) for pair in pairs]
    assert data.left_out == [n for n, (ids, _) in enumerate(wanted, 1) if len(ids) > 40]
    found = []
    for row, judged, begins in zip(tokens, targets, first, strict=True):
        for begin in np.unique(begins):
            at = np.flatnonzero(begins == begin)
            assert (np.diff(at) == 1).all() and at[0] == begin
            if (judged[at] == IGNORE).all():
                assert (row[at] == MARKS[END]).all() and at[-1] == 39  # filling
                continue
            assert row[begin] == MARKS[USER]
            text = [*row[at], *judged[at[-1:], 0]]  # at a row's end a last token, only predicted
            found.append(text[: text.index(MARKS[END]) + 1])
            for k in range(n_predict):  # head k at place t is judged on the token at t + 1 + k
                counted = np.flatnonzero(judged[at, k] != IGNORE)
                assert (judged[at, k][counted] == np.array(text)[counted + 1 + k]).all()
                assert not counted.size or counted[-1] == len(found[-1]) - 2 - k
    assert sorted(found) == sorted(ids for ids, _ in wanted if len(ids) <= 40)
    spelled = sum(sum(counted) for ids, counted in wanted if len(ids) <= 40)
    assert np.count_nonzero(targets[:, :, 0] != IGNORE) == spelled


def test_every_pass_visits_each_row_once_in_another_order():
    data = Conversations(TOKENIZER, PAIRS, 3, context=64, n_predict=1, seed=4)
    n = data.windows
    assert n == len(data.tokens)
    starts = {tuple(row): i for i, row in enumerate(data.tokens[:, :64])}
    seen = [starts[tuple(row)] for step in range(1, n + 1) for row in data.batch(step)[0]]
    passes = np.reshape(seen, (3, n))  # n steps of 3 rows are 3 passes
    assert (np.sort(passes, axis=1) == np.arange(n)).all()
    assert len({tuple(order) for order in passes.tolist()}) == 3
    again = Conversations(TOKENIZER, PAIRS, 3, context=64, n_predict=1, seed=4)
    for mine, others in zip(data.batch(7), again.batch(7), strict=True):  # of seed and step alone
        assert np.array_equal(mine, others)


@given(st.lists(st.integers(1, 45), max_size=60))
def test_packing_loses_nothing_and_fills_well(sizes):
    rows, left_out = pack([([i] * size, [True] * size) for i, size in enumerate(sizes)], 40)
    filled = [sum(len(ids) for ids, _ in row) for row in rows]
    assert max(filled, default=0) <= 41
    assert [sizes[n - 1] for n in left_out] == [size for size in sizes if size > 40]
    packed = sorted(ids[0] for row in rows for ids, _ in row)
    assert packed == [i for i, size in enumerate(sizes) if size <= 40]
    # Two rows that would go into one would have: no two are together at most 41.
    assert all(a + b > 41 for i, a in enumerate(filled) for b in filled[:i])


def rows_and_texts(pairs, context, n_predict):
    """A random model; the rows of `pairs`; and each conversation in a row of its own."""
    config = dataclasses.replace(TINY, context=context, n_predict=n_predict)
    data = Conversations(TOKENIZER, pairs, 2, context, n_predict)
    alone = [Conversations(TOKENIZER, [pair], 1, context, n_predict).rows(np.arange(1))
             for pair in pairs]  # fmt: skip
    return initialise(config, 1, np.float64), data.rows(np.arange(data.windows)), alone


@pytest.mark.parametrize("n_predict", [1, 4])
def test_packed_rows_teach_what_their_conversations_teach_alone(n_predict):
    pairs = [*PAIRS[:9], ("", "a"), ("b", "c"), Conversation([("d", "e"), ("f", "g")], "h")]
    w, (tokens, targets, first), alone = rows_and_texts(pairs, 64, n_predict)
    assert len(tokens) < len(pairs) / 2
    one, other, scale, sums = w.zeros_like(), w.zeros_like(), np.ones(n_predict), 0
    got = loss_and_gradients(ReferenceEngine(), w.config, w, tokens, targets, scale, one, first)
    for text, aims, begins in alone:
        sums = sums + loss_and_gradients(
            ReferenceEngine(), w.config, w, text, aims, scale, other, begins
        )
    np.testing.assert_allclose(got, sums, rtol=1e-12)  # float64, some thousand sums
    assert np.abs(one.flat - other.flat).max() <= 1e-12 * np.abs(other.flat).max()


def test_prompt_and_filling_have_a_gradient_of_exactly_zero():
    """As targets: no question's token is one. As inputs: filling is read by nobody."""
    w, (tokens, targets, first), _ = rows_and_texts(PAIRS[:5], 64, 2)
    filling = first == first[:, -1:]
    assert (tokens[filling] == MARKS[END]).all() and filling.sum() > 3
    seen = []

    class Watched(ReferenceEngine):
        def cross_entropy(self, logits, targets, scale):
            sums, dlogits = super().cross_entropy(logits, targets, scale)
            seen.append(dlogits.copy())
            return sums, dlogits

    dw = w.zeros_like()
    marked = np.where(filling, 1, tokens)
    assert not (tokens == 1).any()
    loss_and_gradients(Watched(), w.config, w, marked, targets, np.ones(2), dw, first)
    (dlogits,) = seen
    assert not dlogits[targets == IGNORE].any() and dlogits[targets != IGNORE].any(axis=-1).all()
    assert not dw["embedding"][1].any()
    asked = conversation(TOKENIZER, *PAIRS[0])
    assert (targets[..., 0] == MARKS[ASSISTANT]).sum() == 0 and not asked[1][0]


def test_a_longer_conversation_says_its_system_once():
    talk = Conversation([("a", "b"), ("c", "d")], "be short")
    ids, counted = spell(TOKENIZER, talk)
    assert [i for i in ids if i in MARKS.values()] == 2 * [*MARKS.values()]
    assert TOKENIZER.decode_text(ids[: ids.index(MARKS[USER])]) == "be short"
    judged = [i for i, counts in zip(ids, counted, strict=True) if counts]
    assert judged == [*TOKENIZER.encode("b"), MARKS[END], *TOKENIZER.encode("d"), MARKS[END]]
    assert checked_pairs([talk, PAIRS[0]]) == [talk, PAIRS[0]]
    wrongs = ([], None), ([("a", 1)], None), ([("a", "b")], 5)
    for wrong in (Conversation(*each) for each in wrongs):
        with pytest.raises(UserError, match="expected pair 1 to be"):
            checked_pairs([wrong])


def test_a_batch_larger_than_all_rows():
    data = Conversations(TOKENIZER, PAIRS[:2], 7, context=64, n_predict=1)
    assert data.batch(1)[0].shape == (7, 64)


def test_pairs_that_never_fit_are_an_error():
    with pytest.raises(UserError, match="at most 16 tokens"):
        Conversations(TOKENIZER, [("a question that is too long", "yes")], 1, 16, 1)


def test_held_out_bytes_are_those_of_the_answers():
    judged = held_out_answers(TOKENIZER, PAIRS, 4, context=64, n_predict=2)
    spelled = sum(len(answer) for _, answer in PAIRS)  # a byte is a token here, <|end|> is none
    assert np.count_nonzero(judged.targets != IGNORE) == spelled
    assert judged.bytes_per_token == 1


def test_held_out_answers_are_judged_each_alone():
    w = initialise(TINY, 1, np.float64)
    judged = held_out_answers(TOKENIZER, PAIRS, 4, context=64, n_predict=2)

    def loss(*batch):
        return loss_sums(ReferenceEngine(), TINY, w, *batch)

    together = judged.bits_per_byte(loss)
    alone = [held_out_answers(TOKENIZER, [pair], 1, 64, 2) for pair in PAIRS]
    nats = sum(loss(*batch)[0] for each in alone for batch in each.batches(np.arange(1)))
    spelled = sum(len(answer) for _, answer in PAIRS)
    assert abs(together - nats / np.log(2) / spelled) <= 1e-12 * together  # float64
    *_, last = judged.batches(np.arange(len(judged.inputs)))
    assert [x.shape for x in last] == [(4, 64), (4, 64, 2), (4, 64)]  # filled up


def settings_of(steps, **changed):
    return Settings(steps=steps, batch_size=2, **changed)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("the number of the beast is a number. " * 30)
    return folder / "run", train(folder / "text.txt", folder / "run", config=TINY,
                                 settings=settings_of(2), engine="reference")  # fmt: skip


def test_fine_tuning_begins_with_the_base_model(base, tmp_path):
    folder, run = base
    tuned = finetune(folder, PAIRS, tmp_path / "chat", settings=settings_of(1, lr=1e-12),
                     engine="reference")  # fmt: skip
    # A step of Adam is at most about the learning rate: 1e-12 is below any weight's rounding.
    assert np.allclose(tuned.weights.flat, run.weights.flat, rtol=0, atol=1e-7)
    assert tuned.tokenizer.hash == run.tokenizer.hash


def test_fine_tuning_has_settings_of_its_own(base, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def fit(out, run, *rest):
        assert run.settings == FINETUNING.with_rate(LEARNING_RATE) and run.step == 0
        raise Stop

    monkeypatch.setattr("nanoeuler.training.sft.fit", fit)
    with pytest.raises(Stop):
        finetune(base[0], PAIRS, tmp_path / "chat")


def test_fine_tuning_resumes_to_the_same_byte(base, tmp_path):
    folder, _ = base
    how = {"settings": settings_of(5), "save_every": 2, "engine": "reference"}
    finetune(folder, PAIRS, tmp_path / "straight", **how)

    class Stop(Exception):
        pass

    batch = Conversations.batch
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        def dies(self, step):
            if step == 4:
                raise Stop
            return batch(self, step)

        patch.setattr(Conversations, "batch", dies)
        finetune(folder, PAIRS, tmp_path / "broken", **how)
    assert load(tmp_path / "broken").step == 2
    finetune(None, PAIRS, tmp_path / "broken", resume=True, engine="reference")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        straight, broken = (checkpoints(tmp_path / run)[-1][1] / name
                            for run in ("straight", "broken"))  # fmt: skip
        assert straight.read_bytes() == broken.read_bytes()


def test_fine_tuning_refuses_what_train_refuses(base, tmp_path):
    folder, _ = base
    how = {"settings": settings_of(1), "engine": "reference"}
    with pytest.raises(UserError, match="no config.json"):
        finetune(tmp_path / "nowhere", PAIRS, tmp_path / "chat", **how)
    assert not (tmp_path / "chat").exists()
    with pytest.raises(UserError, match="--resume"):
        finetune(folder, PAIRS, folder, **how)
    finetune(folder, PAIRS, tmp_path / "chat", **how)
    with pytest.raises(UserError, match="data"):
        finetune(folder, PAIRS[1:], tmp_path / "chat", resume=True)
    with pytest.raises(UserError, match="steps 1, but 2 was asked for"):
        finetune(folder, PAIRS, tmp_path / "chat", settings=settings_of(2), resume=True)


def test_a_resumed_run_is_compared_with_the_model_that_is_named(base, tmp_path):
    folder, _ = base
    out, wider = tmp_path / "chat", dataclasses.replace(TINY, hidden=32)
    finetune(folder, PAIRS, out, settings=settings_of(1), engine="reference")
    parts = load_model(folder)
    for same in (None, folder, parts):
        finetune(same, PAIRS, out, resume=True)
    with pytest.raises(UserError, match="holds a run with hidden 24, but 32 was asked for"):
        finetune((wider, TOKENIZER, initialise(wider, 0)), PAIRS, out, resume=True)
    other = Tokenizer(np.zeros((0, 2)), ("<|one|>", *[*TOKENIZER.special][1:]))
    with pytest.raises(UserError, match="holds a run with tokenizer"):
        finetune((TINY, other, parts[2]), PAIRS, out, resume=True)
    with pytest.raises(UserError, match="no config.json"):
        finetune(tmp_path / "nowhere", PAIRS, out, resume=True)


def test_a_run_that_died_before_its_first_save_needs_its_model(base, tmp_path):
    out = tmp_path / "chat"
    out.mkdir()
    (out / ".lock").touch()
    with pytest.raises(UserError, match="nothing was saved in .*: name the model that it begins"):
        finetune(None, PAIRS, out, resume=True)
    out.mkdir(exist_ok=True)
    (out / ".lock").touch()
    finetune(base[0], PAIRS, out, resume=True, settings=settings_of(1), engine="reference")
    assert checkpoints(out)[-1][0] == 1


@pytest.mark.parametrize("rate, wanted", [(None, LEARNING_RATE), (0.5, 0.5)])
def test_fine_tuning_has_a_learning_rate_of_its_own(base, tmp_path, rate, wanted):
    assert LEARNING_RATE < optim.LEARNING_RATE
    how = {"settings": Settings(steps=1, batch_size=2, lr=rate), "engine": "reference"}
    run = finetune(base[0], PAIRS, tmp_path / "chat", **how)
    assert run.settings.lr == wanted
    line = read_metrics(tmp_path / "chat")[0]
    assert line["lr"] == learning_rate(1, 1, wanted, run.settings.warmup)


@pytest.mark.parametrize(
    "make", [list, iter, lambda pairs: zip(*zip(*pairs, strict=True), strict=True),
             lambda pairs: [[*pair] for pair in pairs]]
)  # fmt: skip
def test_pairs_may_come_from_anything(make):
    assert checked_pairs(make(PAIRS)) == PAIRS


@pytest.mark.parametrize(
    "pair", [("a", "b", "c"), ("a",), ("a", 5), ("a", None), (b"a", b"b"), "ab", None, {"a": 1}]
)
def test_what_is_no_pair_is_named_by_its_number(pair, tmp_path):
    with pytest.raises(UserError, match=r"^expected pair 2 to be \(question, answer\), .* got "):
        finetune(None, [PAIRS[0], pair], tmp_path / "chat")
    assert not (tmp_path / "chat").exists()


def test_what_are_no_pairs_is_told(tmp_path):
    for pairs, said in ((5, "got 5: give a list"), (None, "got None"), ({"a": "b"}, "pair 1 "),
                        ([], "at least 2 question-answer pairs, got 0"), (PAIRS[:1], "got 1: ")):
        with pytest.raises(UserError, match=said):
            finetune(None, pairs, tmp_path / "chat")


def test_a_batch_that_no_machine_holds_is_refused_at_once(base, tmp_path):
    """It hung: a batch of a thousand million rows is made of as many passes over a few rows."""
    for size in (STEP_TOKENS // TINY.context + 1, 10**9, 2**63 - 1):
        with pytest.raises(UserError, match=f"at most {STEP_TOKENS // TINY.context} .* got {size}"):
            finetune(base[0], PAIRS, tmp_path / "chat", settings=Settings(batch_size=size))
        assert not (tmp_path / "chat").exists()  # nothing stands in the way of the next try


def test_pairs_from_a_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = '{"question": "Caf\\u00e9?", "answer": "Yes."}', '{"question": "b", "answer": "c"}'
    for end in ("", "\n", "\r\n"):
        path.write_bytes(("\n".join(lines) + end).encode())
        assert read_pairs(path) == [("Café?", "Yes."), ("b", "c")]
    for wrong in ("no json", "[1]", '{"question": "a"}', "1", "[" * 100_000,
                  '{"question": "a", "answer": null}', '{"question": "a", "answer": 1}',
                  '{"question": "a", "answer": "\\ud800"}', '{"instruction": "a", "output": 5}',
                  '{"instruction": "a", "input": 5, "output": "b"}', '{"messages": []}',
                  '{"messages": [{"role": "user", "content": "a"}]}', '{"messages": 5}',
                  '{"messages": [{"role": "assistant", "content": "a"}, '
                  '{"role": "user", "content": "b"}]}', '{"messages": ["a", "b"]}',
                  '{"messages": [{"role": "system", "content": "a"}]}', "null"):  # fmt: skip
        path.write_text('{"question": "b", "answer": "c"}\n' + wrong)
        with pytest.raises(UserError, match="^line 2 of") as told:
            read_pairs(path)
        assert "are wrong" not in str(told.value)
    path.write_bytes(b'{"question": "b", "answer": "c"}\n{"question": "\xff", "answer": "c"}\nx')
    with pytest.raises(UserError, match="^line 2 of.*; 2 are wrong$"):
        read_pairs(path)


def test_the_three_forms_and_a_list(tmp_path, capsys):
    def said(role, content):
        return {"role": role, "content": content}

    turns = said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")
    records = {
        ("q", "a"): {"question": "q", "answer": "a"},
        ("do", "done"): {"instruction": "do", "output": "done", "text": "and more"},
        ("do\nthis", "done"): {"instruction": "do", "input": "this", "output": "done"},
        ("a", "b"): {"messages": turns[:2]},
        "talk": {"messages": [said("system", "s"), *turns]},
    }
    expected = [*[*records][:-1], Conversation([("a", "b"), ("c", "d")], "s")]
    path = tmp_path / "some.json"
    for text in ("\n".join(map(json.dumps, records.values())), "\ufeff \n" + json.dumps(
        [*records.values()], indent=1
    )):  # fmt: skip
        path.write_text(text)
        assert read_pairs(path) == expected
    assert capsys.readouterr().err == ""
    empty = [{"question": "", "answer": "a"}, {"instruction": "b", "output": " \n"},
             {"instruction": "c", "output": "<nooutput>"}]  # fmt: skip
    path.write_text(json.dumps([*records.values(), *empty, *[empty[0]] * 9]))
    assert read_pairs(path) == expected
    told = capsys.readouterr().err
    assert "12 left out, empty or <nooutput>, entry 6, 7, 8, 9, " in told
    assert "12, 13 and 4 more" in told
    path.write_text(json.dumps([*records.values(), 5, "x"]))
    with pytest.raises(UserError, match="^entry 6 of .* begins with '5'; 2 are wrong$"):
        read_pairs(path)
    for broken in ('[{"question": "a"', "[" * 100_000):
        path.write_text(broken)
        with pytest.raises(UserError, match="^expected JSON in"):
            read_pairs(path)


def test_what_is_too_long_is_told_by_its_number(base, tmp_path, capsys):
    pairs = [*PAIRS[:3], ("long " * 20, "yes"), *PAIRS[3:]]
    finetune(base[0], pairs, tmp_path / "chat", settings=settings_of(1), engine="reference")
    assert "1 of 27 pairs are longer than the context of 64 tokens, and left out: numbers 4\n" in (
        capsys.readouterr().err
    )
