"""The template, the loss mask, batches of conversations, fine-tuning, and the chat."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nanoeuler
from nanoeuler.data.batches import STEP_TOKENS
from nanoeuler.errors import UserError
from nanoeuler.inference.chat import TEMPERATURE, Chat, converse
from nanoeuler.model.backward import IGNORE
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.template import ASSISTANT, END, USER, conversation, prompt
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import optim
from nanoeuler.training.folder import read_metrics, saves
from nanoeuler.training.optim import learning_rate
from nanoeuler.training.run import Settings
from nanoeuler.training.saves import load, load_model
from nanoeuler.training.sft import (
    FINETUNING,
    LEARNING_RATE,
    Conversations,
    checked_pairs,
    finetune,
    held_out_answers,
    read_pairs,
)
from nanoeuler.training.train import train

TOKENIZER = Tokenizer(np.zeros((0, 2)))  # bytes and the special tokens
MARKS = {name: TOKENIZER.special[name] for name in (USER, ASSISTANT, END)}
PAIRS = [(f"What is {i}?", f"The number {i}.") for i in range(30)]
TINY = ModelConfig(vocab_size=TOKENIZER.vocab_size, dim=16, n_layers=1, n_heads=2, n_kv_heads=1,
                   hidden=24, context=64, n_predict=2)
texts = st.text() | st.sampled_from(["<|end|>", "a<|assistant|>b", "<|user|>", " ", "\n"])


def test_the_marks_are_spelled_once():
    package = Path(nanoeuler.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    assert [name for name, text in texts.items() if any(mark in text for mark in MARKS)] == [
        "tokenizer.py"
    ]


@given(texts, texts)
@settings(deadline=None)  # the first encoding compiles
def test_the_template_round_trips_whatever_the_text(question, answer):
    ids, counted = conversation(TOKENIZER, question, answer)
    asked = prompt(TOKENIZER, question)
    assert ids[: len(asked)] == asked  # training and chat use one and the same beginning
    where = [i for i, token in enumerate(ids) if token in MARKS.values()]
    assert [ids[i] for i in where] == list(MARKS.values())  # three marks, none from the texts
    assert where[0] == 0 and where[2] == len(ids) - 1
    assert TOKENIZER.decode_text(ids[1 : where[1]]) == question
    assert TOKENIZER.decode_text(ids[where[1] + 1 : -1]) == answer
    assert counted == [i > where[1] for i in range(len(ids))]  # the answer and its end, no more


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=20),
       st.integers(1, 3))  # fmt: skip
@settings(deadline=None)
def test_rows_hold_whole_conversations_and_count_each_answer_once(pairs, n_predict):
    pairs = [*pairs, ("fits", "always")]
    data = Conversations(TOKENIZER, pairs, 2, context=40, n_predict=n_predict)
    tokens, targets = data.rows(np.arange(len(data.tokens)))
    assert tokens.shape == (len(tokens), 40) and targets.shape == (len(tokens), 40, n_predict)
    assert (tokens[:, 0] == MARKS[USER]).all()
    wanted = [conversation(TOKENIZER, *pair) for pair in pairs]
    wanted = [(ids, counted) for ids, counted in wanted if len(ids) <= 40]
    answers = [token for ids, counted in wanted
               for token, counts in zip(ids, counted, strict=True) if counts]  # fmt: skip
    assert targets[:, :, 0][targets[:, :, 0] != IGNORE].tolist() == answers
    for k in range(n_predict):  # head k at place t is judged on the token at t + 1 + k
        for row, judged in zip(tokens, targets[:, :, k], strict=True):
            places = np.flatnonzero(judged[: 40 - 1 - k] != IGNORE)
            assert (judged[places] == row[places + 1 + k]).all()


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
        straight, broken = (saves(tmp_path / run)[-1][1] / name for run in ("straight", "broken"))
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
    assert saves(out)[-1][0] == 1


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


def test_a_chat_drops_whole_turns_and_never_overfills_the_context():
    weights = initialise(TINY, seed=0)
    chat = Chat(TINY, TOKENIZER, weights, seed=1)
    for i in range(12):
        list(chat.reply(f"Question {i}?"))
        assert chat.turns[-1][: len(prompt(TOKENIZER, f"Question {i}?"))] == prompt(
            TOKENIZER, f"Question {i}?"
        )
        for turn in chat.turns:
            assert turn[0] == MARKS[USER] and turn[-1] == MARKS[END]
            assert not set(turn[1:-1]) & {MARKS[USER], MARKS[END]}
    again = Chat(TINY, TOKENIZER, weights, seed=1)
    for i in range(12):
        list(again.reply(f"Question {i}?"))
    assert again.turns == chat.turns  # the same seed, the same conversation


def test_a_chat_that_cannot_be_is_refused_before_the_first_question():
    weights = initialise(TINY, seed=0)
    for knob in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0},
                 {"seed": -1}, {"seed": "a"}, {"seed": None}, {"temperature": "hot"}):  # fmt: skip
        with pytest.raises(UserError, match=f"expected {[*knob][0]} to be "):
            Chat(TINY, TOKENIZER, weights, **knob)
    gpt2 = Tokenizer(np.zeros((0, 2)), ("<|endoftext|>",))
    with pytest.raises(UserError, match=r"has no <\|user\|>"):
        Chat(TINY, gpt2, weights)


def test_earlier_turns_are_read_again(monkeypatch):
    asked = []

    def fake(decoder, tokens, n, **knobs):
        asked.append((tokens, n))
        assert knobs["temperature"] == TEMPERATURE  # where nobody says another
        return iter(TOKENIZER.encode("ok").tolist())

    monkeypatch.setattr("nanoeuler.inference.chat.generate", fake)
    chat = Chat(TINY, TOKENIZER, initialise(TINY, seed=0))
    assert "".join(chat.reply("one?")) == "ok"
    assert "".join(chat.reply("two?")) == "ok"
    first = conversation(TOKENIZER, "one?", "ok")[0]
    tokens, n = asked[1]
    assert tokens == first + prompt(TOKENIZER, "two?")
    assert len(tokens) + n == TINY.context
    list(chat.reply("x" * 30))  # fills its half: there is no room for what was said before
    assert asked[2][0] == prompt(TOKENIZER, "x" * 30)


def test_a_question_that_is_too_long_is_told_and_the_chat_goes_on():
    chat, shown = Chat(TINY, TOKENIZER, initialise(TINY, seed=0)), []
    with pytest.raises(UserError, match="at most 30 tokens, got 31"):
        list(chat.reply("x" * 31))
    converse(chat, ["x" * 31 + "\n", "  \n", "why?\n"], shown.append)
    text = "".join(shown)
    assert text.startswith("(expected a question of at most 30 tokens, got 31: shorten it)\n")
    assert len(chat.turns) == 1


def test_pairs_from_a_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = '{"question": "Caf\\u00e9?", "answer": "Yes."}', '{"question": "b", "answer": "c"}'
    path.write_text("\n".join(lines))
    assert read_pairs(path) == [("Café?", "Yes."), ("b", "c")]
    for wrong in ("no json", "[1]", '{"question": "a"}', "1", "[" * 100_000,
                  '{"question": "a", "answer": null}', '{"question": "a", "answer": 1}',
                  '{"question": "a", "answer": "\\ud800"}'):
        path.write_text('{"question": "b", "answer": "c"}\n' + wrong)
        with pytest.raises(UserError, match="line 2 of"):
            read_pairs(path)
