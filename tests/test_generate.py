"""The decoder against the model, at every position; and the rules of drawing."""


import numpy as np
import pytest
from crossings import choices, crossings
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import paired

from nanoeuler.engines.cpu.decode import CpuReader
from nanoeuler.engines.reference import ReferenceEngine
from nanoeuler.errors import UserError
from nanoeuler.inference.decoder import (
    Decoder,
    EngineReader,
    KeyValues,
    check_stop,
    draws,
    generate,
    generate_together,
    text_pieces,
)
from nanoeuler.inference.sampling import Sampler, distribution, draw, log_probabilities, penalised
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights, initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer

reference = ReferenceEngine()
SHAPES = {"grouped": (4, 2), "one key head": (4, 1), "a key for each query": (4, 4), "one": (1, 1)}


def model(heads=4, kv=2, context=12, dtype=np.float64, **switches):
    sizes = {"vocab_size": 23, "dim": 16, "n_layers": 3, "hidden": 24, "n_predict": 2} | switches
    config = ModelConfig(n_heads=heads, n_kv_heads=kv, context=context, **sizes)
    weights, rng = initialise(config, seed=1, dtype=np.float64), np.random.default_rng(1)
    for tensor in weights.values():  # far from the start, so that every term matters
        if tensor.ndim == 2:
            tensor *= 10
        else:
            tensor += 0.3 * rng.standard_normal(tensor.shape)
    cast = Weights(config, dtype)
    cast.flat[...] = weights.flat
    return config, cast


def close(logits, exact):
    # The same sums in another order, in float64: a thousand roundings of the largest logit.
    return np.abs(logits - exact).max() <= 1000 * np.finfo(np.float64).eps * np.abs(exact).max()


@pytest.mark.parametrize("heads, kv", SHAPES.values(), ids=SHAPES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_cut_into_passes_equals_forward(heads, kv, data):
    config, weights = model(heads, kv)
    text = data.draw(st.lists(st.integers(0, 22), min_size=1, max_size=config.context))
    exact = forward(reference, config, weights, np.array([text]))[0][0, :, 0]
    decoder, at = Decoder(config, weights), 0
    while at < len(text):
        n = data.draw(st.integers(1, len(text) - at))
        logits = decoder.read(text[at : at + n])
        at += n
        assert close(logits, exact[at - 1])
        assert decoder.tokens == text[:at]


def compositions(n):
    """All ways to cut n tokens into passes: [3], [2, 1], [1, 2], [1, 1, 1]."""
    return [[n]] + [[*cut, n - k] for k in range(1, n) for cut in compositions(k)]


ARCHITECTURES = [
    each | {"n_predict": 1, "step_size": 1.0 if each["integrator"] == "euler" else 0.7}
    for each in crossings("sliding_window", "integrator")
]


@pytest.mark.parametrize("switches", paired(ARCHITECTURES, choices()))
def test_every_architecture_and_every_cut(switches):
    config, weights = model(context=5, n_layers=2, **switches)  # learned positions: to the last
    text = np.random.default_rng(0).integers(23, size=5)
    exact = forward(reference, config, weights, text[None])[0][0, :, 0]
    assert len(compositions(5)) == 16
    for cut in compositions(5):
        decoder, ends = Decoder(config, weights), np.cumsum(cut)
        for n, end in zip(cut, ends, strict=True):
            assert close(decoder.read(text[end - n : end]), exact[end - 1])


def test_layers_that_share_a_block_share_no_cache():
    config, weights = model(n_layers=4, repeat=2, integrator="heun", step_size=0.5)
    text = np.random.default_rng(0).integers(23, size=config.context)
    exact = forward(reference, config, weights, text[None])[0][0, :, 0]
    decoder = Decoder(config, weights)
    assert all(close(decoder.read([token]), row) for token, row in zip(text, exact, strict=True))


GPT2 = {  # and 20 channels in 4 heads: where positions are learned, a head's width may be odd
    "norm": "layer", "position": "learned", "mlp": "gelu", "bias": True, "tied": True,
    "n_predict": 1, "dim": 20,
}  # fmt: skip


@pytest.mark.parametrize("context", [1, 2, 7, 12])
@pytest.mark.parametrize("switches", [{}, GPT2], ids=["default", "like GPT-2"])
def test_beyond_the_context_it_reads_the_newest_half_again(context, switches):
    config, weights = model(context=context, **switches)
    text = np.random.default_rng(0).integers(23, size=3 * context + 2).tolist()
    decoder, held = Decoder(config, weights), 0
    for i, token in enumerate(text):
        logits = decoder.read([token])
        held = held + 1 if held < context else max(1, context // 2)
        assert decoder.tokens == text[i + 1 - held : i + 1]
        window = np.array([decoder.tokens])
        assert close(logits, forward(reference, config, weights, window)[0][0, -1, 0])


def test_a_prompt_longer_than_the_context_keeps_its_end():
    config, weights = model()
    text = np.random.default_rng(0).integers(23, size=50)
    decoder = Decoder(config, weights)
    logits = decoder.read(text)
    assert decoder.tokens == text[-6:].tolist()
    assert close(logits, forward(reference, config, weights, text[None, -6:])[0][0, -1, 0])


@pytest.mark.parametrize("switches", [{}, GPT2], ids=["default", "like GPT-2"])
def test_float32_is_as_near_to_the_truth_as_forward_is(switches):
    config, weights = model(dtype=np.float32, **switches)
    text = np.random.default_rng(0).integers(23, size=(1, config.context))
    exact = forward(reference, config, model(**switches)[1], text)[0][0, :, 0]
    own_error = np.abs(forward(reference, config, weights, text)[0][0, :, 0] - exact).max()
    decoder = Decoder(config, weights)
    for token, wanted in zip(text[0], exact, strict=True):
        logits = decoder.read([token])
        assert logits.dtype == np.float32
        assert np.abs(logits - wanted).max() <= 2 * own_error


def test_decoders_in_turns_do_not_disturb_each_other():
    """Two texts by one engine, a token of one after a token of the other."""
    config, weights = model(integrator="heun")
    texts = np.random.default_rng(0).integers(23, size=(2, config.context))
    exact = forward(reference, config, weights, texts)[0][:, :, 0]
    readers = [EngineReader(config, weights, reference) for _ in texts]
    decoders = [Decoder(config, weights, reader) for reader in readers]
    for t in range(config.context):
        for decoder, text, rows in zip(decoders, texts, exact, strict=True):
            assert close(decoder.read([text[t]]), rows[t])


@pytest.mark.parametrize("switches", [{}, {"integrator": "rk4"}, {"n_layers": 4, "repeat": 2}])
def test_a_call_of_attention_has_a_cache_of_its_own(switches):
    config, weights = model(**switches)
    caches = sum(EngineReader(config, weights).caches[0], [])
    stages = 4 if "integrator" in switches else 1
    assert len(caches) == len({id(cache.keys) for cache in caches}) == config.n_layers * stages
    assert caches[0].keys.shape == caches[0].values.shape == (2, config.context, 4)


def test_what_stands_behind_the_newest_position_means_nothing():
    config, weights = model()
    text, decoder = [3, 1, 4, 1, 5], Decoder(config, weights)
    decoder.read(text)
    decoder.read([9, 2])
    decoder.forget(2)  # two tokens are taken back, and others come
    expected = forward(reference, config, weights, np.array([[*text, 6]]))[0][0, -1, 0]
    assert close(decoder.read([6]), expected)


def test_a_cache_refuses_what_it_has_no_room_for():
    config, _ = model()
    for shape, start in (((1, 2, 8, 4), 11), ((2, 1, 8, 4), 0)):
        with pytest.raises(AssertionError, match="no room"):
            KeyValues(config, np.float64).attention(np.zeros(shape), 2, start)


logits = st.lists(st.floats(-30, 30), min_size=1, max_size=40).map(np.array)


@given(logits, st.floats(0.1, 5), st.integers(0, 50), st.floats(0.01, 1))
def test_a_distribution_keeps_the_right_tokens(z, temperature, top_k, top_p):
    p = distribution(z, temperature, top_k, top_p)
    whole = distribution(z, temperature)
    kept = p > 0
    assert abs(p.sum() - 1) < 1e-12 and kept.any()
    if top_k:
        assert kept.sum() <= top_k
    if not kept.all():
        assert whole[kept].min() >= whole[~kept].max()  # none dropped is likelier than one kept
    # Without its least likely token the set has not reached top_p (up to rounding of a sum).
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-9
    if not top_k:
        assert whole[kept].sum() > top_p - 1e-9
    # The kept ones keep their proportions.
    assert np.allclose(p[kept] * whole[kept].sum(), whole[kept], rtol=1e-9, atol=0)


def test_temperature_zero_takes_the_first_of_the_largest():
    assert distribution(np.array([1.0, 3.0, 3.0]), temperature=0).tolist() == [0, 1, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-3, 1e-320])
def test_a_tiny_temperature_and_huge_logits_are_finite(temperature):
    p = distribution(np.array([1e300, -1e300, 0.0]), temperature)
    assert p.tolist() == [1, 0, 0]
    p = distribution(np.array([0.0, 1.0, 1.0]), temperature)  # exp(-1000) is 0
    assert p.tolist() == [0, 0.5, 0.5]


def test_top_p_of_one_drops_nothing():
    # GPT-2's vocabulary: the sum of fifty thousand rounded numbers reaches 1 before its last terms.
    for seed in range(20):
        p = distribution(4 * np.random.default_rng(seed).standard_normal(50257), top_p=1.0)
        assert np.all(p > 0)


@given(logits, st.floats(0, 1, exclude_max=True))
def test_draw_never_takes_what_is_impossible(z, u):
    p = distribution(z, top_k=3)
    token = draw(p, u)
    assert p[token] > 0
    before = p[:token].sum()
    assert before - 1e-9 <= u <= before + p[token] + 1e-9  # its stretch, up to rounding of the sum


def test_draws_come_as_often_as_they_should():
    p, n = np.array([0.5, 0.0, 0.3, 0.2]), 20_000
    rng = np.random.default_rng(0)
    counts = np.bincount([draw(p, u) for u in rng.random(n)], minlength=4)
    # Five standard deviations of a binomial count: one seed in a million would fail.
    assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p))).all()


def test_the_seed_decides():
    config, weights = model()
    texts = [tuple(generate(Decoder(config, weights), [1, 2], 30, seed=s)) for s in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 30


def test_it_ends_before_a_stop_token():
    config, weights = model()
    whole = list(generate(Decoder(config, weights), [1], 30, seed=3))
    stop = whole[10]
    short = list(generate(Decoder(config, weights), [1], 30, seed=3, stop={stop}))
    assert short == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "knob, value",
    [("temperature", -1), ("temperature", np.nan), ("temperature", np.inf), ("temperature", "0"),
     ("temperature", None), ("temperature", [1]), ("temperature", 10**400), ("top_k", -1),
     ("top_k", 1.5), ("top_k", "a"), ("top_k", None), ("top_p", 0), ("top_p", 1.1),
     ("top_p", np.nan), ("top_p", "x"), ("min_p", -0.1), ("min_p", 1.1), ("min_p", "x"),
     ("repetition_penalty", 0), ("repetition_penalty", np.nan), ("repetition_penalty", None),
     ("repetition_penalty", np.inf), ("repetition_penalty", 1e-31),
     ("repetition_penalty", 5e-324), ("repetition_penalty", 2e30),
     ("seed", -1), ("seed", "a"), ("seed", 1.5),
     ("seed", None), ("seed", (1, -1)), ("seed", [0.5])],
)
def test_wrong_options_are_refused_before_the_first_token(knob, value):
    config, weights = model()
    with pytest.raises(UserError, match=f"^expected {knob} to be a .*, got .*: choose another$"):
        generate(Decoder(config, weights), [1], 1, **{knob: value})  # nobody has asked for a token
    if knob not in ("seed", "repetition_penalty"):
        with pytest.raises(UserError, match=f"expected {knob}"):
            distribution(np.zeros(3), **{knob: value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sampling", [
    {"repetition_penalty": 1e-30}, {"repetition_penalty": 1e30}, {"repetition_penalty": 10**30},
    {"temperature": 5e-324}, {"temperature": 1e30}, {"temperature": 10**30}, {"top_p": 5e-324},
    {"min_p": 5e-324}, {"top_k": 10**30}, {"seed": 10**40},
    {"repetition_penalty": 1e-30, "temperature": 5e-324}, {"temperature": -0.0},
], ids=repr)  # fmt: skip
def test_the_least_and_the_largest_options_draw_a_token(sampling):
    """Logits as large as float32 has them stay numbers."""
    most = float(np.finfo(np.float32).max)
    for logits in ([most, -most, 0, 1], [-most, -most, most, most], [1e-38, 0, -1e-38, 0]):
        sampler = Sampler(**sampling)
        p = sampler.distribution(np.array(logits, np.float32), [0, 1, 2])
        assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-12 and 0 <= sampler.draw(p) < 4


@pytest.mark.filterwarnings("error")
def test_the_options_may_be_numbers_of_numpy():
    config, weights = model()
    plain = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 2}
    kinds = (np.float32, np.int64, np.float32, np.int64)
    numpy = {name: kind(value) for (name, value), kind in zip(plain.items(), kinds, strict=True)}
    texts = [list(generate(Decoder(config, weights), [1], 9, **each)) for each in (plain, numpy)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("n", [-1, "5", 1.5, None])
def test_a_number_of_tokens_that_is_none_is_refused(n):
    config, weights = model()
    with pytest.raises(UserError, match="new tokens to be a whole number of at least 0, got"):
        generate(Decoder(config, weights), [1], n)
    assert list(generate(Decoder(config, weights), [1], 0)) == []


@pytest.mark.parametrize("ids", [[23], [1, -1], [0, 2**40]])
def test_ids_that_the_model_does_not_have_are_refused(ids):
    config, weights = model()
    decoder = Decoder(config, weights)
    with pytest.raises(UserError, match="expected ids from 0 to 22, as the model has, got"):
        decoder.read(ids)
    assert decoder.tokens == []


def test_an_empty_prompt_is_refused():
    config, weights = model()
    with pytest.raises(UserError, match="at least one token"):
        generate(Decoder(config, weights), [], 1)
    with pytest.raises(UserError, match="at least one token"):
        Decoder(config, weights).read([])


@given(st.text())
@settings(deadline=None)  # the first encoding compiles
def test_text_pieces_never_break_a_character(text):
    tokenizer = Tokenizer(np.zeros((0, 2)))  # bytes alone: every character outside ASCII is cut
    pieces = list(text_pieces(tokenizer, tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def transformers_rule(logits, temperature, top_k, top_p, min_p):
    """Which tokens Hugging Face's transformers leaves, written down from its documentation.

    `TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper`, in the
    order of its `generate`: each sets scores to -inf, and the next takes the softmax of what it is
    given. Its top-p adds up from the least probable and drops while the sum is at most 1 - p.
    """

    def softmax(z):
        e = np.exp(z - z.max())
        return e / e.sum()

    z = logits / temperature
    if top_k:
        z = np.where(z < np.sort(z)[-min(top_k, len(z))], -np.inf, z)
    if top_p < 1:
        order = np.argsort(z, kind="stable")
        drop = np.cumsum(softmax(z)[order]) <= 1 - top_p
        drop[-1] = False  # one token stays
        z[order[drop]] = -np.inf
    if min_p:
        p = softmax(z)
        z = np.where(p < min_p * p.max(), -np.inf, z)
    return softmax(z)


@given(st.integers(0, 10**6), st.floats(0.2, 3), st.integers(0, 60), st.floats(0.05, 1),
       st.floats(0, 0.9))  # fmt: skip
@settings(max_examples=300)
def test_several_rules_cut_as_in_the_usual_library(seed, temperature, top_k, top_p, min_p):
    logits = 3 * np.random.default_rng(seed).standard_normal(50)
    ours = distribution(logits, temperature, top_k, top_p, min_p)
    theirs = transformers_rule(logits, temperature, top_k, top_p, min_p)
    assert ((ours > 0) == (theirs > 0)).all()
    assert np.allclose(ours, theirs, rtol=1e-12, atol=0)


def test_rules_in_a_row_are_not_rules_side_by_side():
    p = distribution(np.log([0.5, 0.3, 0.2]), top_k=2, top_p=0.6)
    assert p.tolist() == [1, 0, 0]  # 0.5 / 0.8 reaches 0.6; 0.5 does not


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.5])
def test_the_penalty_divides_what_is_above_zero(penalty):
    z = np.array([2.0, -2.0, 1.0, -1.0])
    expected = [2 / penalty, -2 * penalty, 1, -1]
    assert penalised(z, [0, 1, 1, 0], penalty).tolist() == expected
    assert z.tolist() == [2, -2, 1, -1]  # what the reader gave is not changed


def test_a_repeated_token_becomes_less_probable():
    config, weights = model()
    sampling = {"temperature": 0, "n": 40}
    plain = list(generate(Decoder(config, weights), [1], **sampling))
    held = list(generate(Decoder(config, weights), [1], repetition_penalty=50.0, **sampling))
    assert len(set(held)) > len(set(plain))


def test_log_probabilities_are_the_models_own():
    config, weights = model()
    text = [1, 2]
    for drawn in draws(Decoder(config, weights), [1, 2], 9, temperature=0.3, top_k=2, seed=4):
        logits = forward(reference, config, weights, np.array([text]))[0][0, -1, 0]
        wanted = logits[drawn.token] - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
        assert abs(drawn.log_probability - wanted) < 1e-9
        text.append(drawn.token)
    assert np.isclose(np.exp(log_probabilities(np.array([1e3, 0, -1e3]))).sum(), 1)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
@settings(deadline=None)
def test_it_ends_before_the_stop_string_that_is_complete_first(text, stop):
    tokenizer = Tokenizer(np.zeros((0, 2)))
    pieces = "".join(text_pieces(tokenizer, tokenizer.encode(text), stop))
    ends = [(n, n - len(s)) for n in range(len(text) + 1) for s in stop if text[:n].endswith(s)]
    assert pieces == (text[: min(ends)[1]] if ends else text)


def test_text_that_cannot_be_a_stop_string_is_not_held_back():
    tokenizer = Tokenizer(np.zeros((0, 2)))
    pieces = list(text_pieces(tokenizer, tokenizer.encode("abxabc!"), ["abc"]))
    assert pieces == ["", "", "abx", "", "", ""]
    pieces = list(text_pieces(tokenizer, tokenizer.encode("xab"), ["abc"]))
    assert pieces == ["x", "", "", "", "ab"]  # no more tokens: it was none


class Counted(str):
    """A string that counts how often it is looked into."""

    looks = 0

    def __getitem__(self, at):
        Counted.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("unit, text", [("x", "a"), ("x", "x"), ("ab", "aab"), ("aab", "aaab")])
def test_the_work_for_a_stop_string_grows_with_the_lengths_alone(unit, text):
    """A string costs its length once, and each character of a text a constant, held back or not."""
    tokenizer, stop, Counted.looks = Tokenizer(np.zeros((0, 2))), Counted(unit * 2000 + "!"), 0
    text = text * 1000
    assert "".join(text_pieces(tokenizer, tokenizer.encode(text), [stop])) == text
    # Of each character: one look finds that it goes on or not and one adds it; each time that the
    # search falls back there is one more, and it cannot fall oftener than it has gone on.
    assert Counted.looks <= 3 * (len(stop) + len(text))


@pytest.mark.parametrize("stop", ["end", ["a", ""], [1], [b"x"]])
def test_stop_strings_that_are_none_are_refused(stop):
    with pytest.raises(UserError, match="expected stop to be a list of texts, none of them empty"):
        check_stop(stop)


@pytest.mark.parametrize("kind", [EngineReader, CpuReader])
def test_texts_together_are_the_texts_alone(kind):
    config, weights = model(dtype=np.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(23, size=n).tolist() for n in (1, 7, 30, 12)]
    sampling = {"stop": {3, 5}, "temperature": 1.5}
    together = generate_together(kind(config, weights, texts=5), prompts, 25, seed=8, **sampling)
    for i, (prompt, text) in enumerate(zip(prompts, together, strict=True)):
        decoder = Decoder(config, weights, kind(config, weights))
        assert text == list(generate(decoder, prompt, 25, seed=(8, i), **sampling))
    assert {len(text) for text in together} != {25}  # some met a stop token
    with pytest.raises(UserError, match="at most 1 prompts, as many as the reader holds, got 4"):
        generate_together(kind(config, weights), prompts, 3)
    with pytest.raises(UserError, match="at least one token"):
        generate_together(kind(config, weights, texts=2), [[1], []], 3)


def test_greedy_draws_no_lot():
    config, weights = model()
    texts = [list(generate(Decoder(config, weights), [1], 30, temperature=0, seed=s))
             for s in range(3)]  # fmt: skip
    assert texts[0] == texts[1] == texts[2]
