# Made from book/f-command-line.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-face-model
"""A trained model as one object: configuration, tokenizer and weights, and methods to use them.

Leaves out how a model is made: training, fine-tuning and loading are functions of api.py.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from nanoeuler.data.dataset import Prepared
from nanoeuler.data.shards import Tokens
from nanoeuler.data.text import read_text
from nanoeuler.data.validation import HeldOut
from nanoeuler.engines.registry import engine_factory
from nanoeuler.errors import UserError
from nanoeuler.inference.backends import make_reader
from nanoeuler.inference.chat import Chat, ChatOptions
from nanoeuler.inference.decoder import Decoder, Drawn, check_stop, generate, text_pieces
from nanoeuler.inference.decoder import draws as draw_tokens
from nanoeuler.inference.evaluate import Evaluation, Report, windows_at_once
from nanoeuler.inference.evaluate import evaluate as evaluate_weights
from nanoeuler.inference.sampling import SamplingOptions
from nanoeuler.inference.speculative import generate_ahead
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.transformer import forward
from nanoeuler.model.weights import Weights
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training.run import check_sizes

TOKENS = 200  # to generate, if nobody says how many: about a paragraph


def check_kind(name: str, value: object, kind: type[Any]) -> None:
    """UserError unless the argument `name` is of the public class `kind`."""
    if not isinstance(value, kind):
        raise UserError(
            f"expected {name} to be a {kind.__name__}, got {value!r:.60}: see "
            f"help(nanoeuler.{kind.__name__})"
        )


class GenerateOptions(SamplingOptions, total=False):
    """Options of generation: the `SamplingOptions`, where the text ends, and the backend."""

    stop_tokens: Sequence[int | str]  # tokens to stop at: ids, or names of special tokens
    engine: str  # auto, cuda, cpu, fused, reference, ...
    quantize: str  # none; int8, int4: weights in less memory, slightly less accurate


@dataclass(frozen=True)
class Model:
    """A model that is ready to use: `nanoeuler.load`, `train` and `finetune` return one.

    UserError for parts that don't belong together.

    >>> model.config.n_layers
    2
    >>> model.tokenizer.vocab_size == model.config.vocab_size
    True
    >>> model.weights["embedding"].shape
    (300, 48)
    """

    config: ModelConfig
    tokenizer: Tokenizer
    weights: Weights

    def __post_init__(self) -> None:
        check_kind("config", self.config, ModelConfig)
        check_kind("tokenizer", self.tokenizer, Tokenizer)
        if not isinstance(self.weights, Weights):
            raise UserError(
                f"expected weights to be Weights, got {self.weights!r:.60}: load a model with "
                "nanoeuler.load"
            )
        check_sizes(self.config, self.tokenizer)
        for name in (field.name for field in fields(ModelConfig)):
            own, theirs = getattr(self.config, name), getattr(self.weights.config, name)
            if own != theirs:
                raise UserError(
                    f"expected weights of a model with {name} {own}, got those of one with "
                    f"{theirs}: use the weights that belong to the configuration"
                )

    def logits(self, text: str | bytes) -> np.ndarray:
        """The scores (T, V) float32 of the token that follows each of the T tokens of `text`.

        UserError if the text has no token, or more than the context holds.

        >>> scores = model.logits("The river")
        >>> ids = model.tokenizer.encode("The river")
        >>> scores.shape == (len(ids), 300)
        True
        >>> likeliest = scores[-1].argmax()
        >>> text = model.tokenizer.decode_text([likeliest])
        >>> text == model.generate("The river", tokens=1, temperature=0)
        True
        """
        ids, most = self.tokenizer.encode(text), self.config.context
        if not 0 < len(ids) <= most:
            raise UserError(
                f"expected a text of 1 to {most} tokens, got {len(ids)}: give a part of it"
            )
        scores, _ = forward(engine_factory("reference")(), self.config, self.weights, ids[None])
        return scores[0, :, 0]

    def held_out(self, text: str | bytes | Path) -> HeldOut:
        """The windows of a text by which `evaluate` judges the model."""
        config, tokens = self.config, ids_to_judge(text, self.tokenizer)
        batch_size = windows_at_once(-(-len(tokens) // config.context) or 1, config.context)
        shape = batch_size, config.context, config.n_predict
        return HeldOut.from_tokens(tokens, self.tokenizer, *shape)

    def evaluate(
        self, text: str | bytes | Path, *, engine: str = "auto", threads: int | None = None,
        report: Report | None = None,
    ) -> Evaluation:  # fmt: skip
        """How well the model predicts `text`: a text, or the `Path` of a file or prepared folder.

        Only the held-out part of a prepared folder is judged, and all of anything else. engine:
        auto, cuda, ...; threads: of a CPU, None for one per core; `report` gets the tokens judged,
        tokens in total and bits per byte so far. UserError for a text of fewer than two tokens,
        data prepared with another tokenizer, and a str that names a file.

        >>> model.evaluate("The river begins under a stone.").perplexity >= 1
        True
        """
        return evaluate_weights(self.weights, self.held_out(text), engine, threads, report)

    def bits_per_byte(self, text: str | bytes | Path, *, engine: str = "auto") -> float:
        """The first number of `evaluate`: the compressed size of the text if the model coded it.

        >>> known, unknown = "The river begins under a stone.", "zxq jvw kpf zqj xvk"
        >>> model.bits_per_byte(known) < model.bits_per_byte(unknown)
        True
        """
        return self.evaluate(text, engine=engine).bits_per_byte

    def _begin(self, text: str | bytes, stop_tokens: Sequence[int | str] = (),
               engine: str = "auto", quantize: str = "none", **sampling: Unpack[SamplingOptions]
               ) -> tuple[Decoder, list[int], list[int], SamplingOptions]:  # fmt: skip
        """A decoder, the ids of the prompt `text`, the ids to stop at, and the sampling options."""
        special, ends = self.tokenizer.special, []
        for token in [stop_tokens] if isinstance(stop_tokens, int | str) else stop_tokens:
            found = special.get(token) if isinstance(token, str) else token
            if found is None or not 0 <= found < self.config.vocab_size:
                names = ", ".join(special) or "it has none"
                raise UserError(
                    f"expected a token to stop at, got {token!r:.60}: give an id below "
                    f"{self.config.vocab_size}, or the name of a special one ({names})"
                )
            ends.append(found)
        reader = make_reader(self.config, self.weights, engine, quantize=quantize)
        decoder = Decoder(self.config, self.weights, reader)
        ids = [*self.tokenizer.begin, *self.tokenizer.encode(text).tolist()]
        return decoder, ids, ends, sampling

    def stream(self, text: str | bytes = "\n", tokens: int = TOKENS,
               stop: Sequence[str] = (), guesses: int = 0, **options: Unpack[GenerateOptions]
               ) -> Iterator[str]:  # fmt: skip
        """`generate` in pieces, each as soon as its bytes form whole characters.

        >>> pieces = model.stream("The river", tokens=20, seed=3)
        >>> first = next(pieces)
        >>> first + "".join(pieces) == model.generate("The river", tokens=20, seed=3)
        True
        """
        check_stop(stop)
        decoder, prompt, ends, sampling = self._begin(text, **options)
        if guesses:
            ids = generate_ahead(decoder, prompt, tokens, ends, guesses=guesses, **sampling)
        else:
            ids = generate(decoder, prompt, tokens, ends, **sampling)
        return text_pieces(self.tokenizer, ids, stop)

    def draws(self, text: str | bytes = "\n", tokens: int = TOKENS,
              **options: Unpack[GenerateOptions]
              ) -> Iterator[Drawn]:  # fmt: skip
        """The tokens of a continuation one by one, each with the model's logits before any option.

        >>> for drawn in model.draws("The river", tokens=3, seed=3):
        ...     assert drawn.log_probability <= 0
        """
        decoder, prompt, ends, sampling = self._begin(text, **options)
        return draw_tokens(decoder, prompt, tokens, ends, **sampling)

    def generate(self, text: str | bytes = "\n", tokens: int = TOKENS,
                 stop: Sequence[str] = (), guesses: int = 0, **options: Unpack[GenerateOptions]
                 ) -> str:  # fmt: skip
        """A continuation of `text`, up to `tokens` long, without the text itself.

        It ends before the first text of `stop`. `guesses`: how many tokens to guess ahead in a pass
        (speculative decoding); the text is then another one of the same distribution. UserError for
        an empty text, a negative number of tokens, or an option out of its range.

        >>> model.generate("The river", 20, seed=3) == model.generate("The river", 20, seed=3)
        True
        >>> model.generate("The river", tokens=20, temperature=-1)
        Traceback (most recent call last):
        nanoeuler.errors.UserError: expected temperature to be a number from 0 ...
        """
        return "".join(self.stream(text, tokens, stop, guesses, **options))

    def chat(self, **options: Unpack[ChatOptions]) -> Chat:
        """A conversation; the model should be a fine-tuned one. `reply(question)` yields pieces.

        >>> talk = model.chat(seed=1)
        >>> answer = "".join(talk.reply("Where does the river begin?"))
        """
        return Chat(self.config, self.tokenizer, self.weights, **options)


# %% sec-face-model
def ids_to_judge(text: str | bytes | Path, tokenizer: Tokenizer) -> Tokens | np.ndarray:
    """The ids of a text, a file, or the held-out part of a prepared folder; see `evaluate`."""
    if isinstance(text, Path) and text.is_dir():
        prepared = Prepared(text)
        if prepared.tokenizer.hash != tokenizer.hash:
            raise UserError(
                f"{text} was prepared with another tokenizer than the model's: prepare it again "
                "with the tokenizer of the model, or give the text itself"
            )
        return prepared.held_out
    if isinstance(text, str) and os.path.isfile(text):
        raise UserError(
            f"expected a text, but {text!r} names a file: give Path({text!r}) to judge "
            "its contents"
        )
    return tokenizer.encode(read_text(text) if isinstance(text, Path) else text)
