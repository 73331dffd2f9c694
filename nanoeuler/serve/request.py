# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-order
"""Requests in OpenAI's protocol, parsed and checked: ids and sampling options.

Leaves out HTTP, and pictures, sounds, tools, and several answers to one question.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from nanoeuler.errors import UserError
from nanoeuler.inference.chat import TEMPERATURE, Memory, Turn
from nanoeuler.inference.decoder import check_stop
from nanoeuler.inference.sampling import SamplingOptions, check
from nanoeuler.model.config import ModelConfig
from nanoeuler.tokenizer.chat_template import conversation
from nanoeuler.tokenizer.tokenizer import Tokenizer

TOP = 20  # the most alternatives to a token that may be asked for: the protocol's bound for a chat
STOPS = 4  # the most stop strings: the protocol's own bound, too
STOP = 256  # the most characters of one, which the protocol leaves open: three lines of text
SEED_BITS = 53  # of a seed that we choose: a number in JavaScript holds all of them

# Options that would change the answer and that we do not support, with the values that ask for
# nothing.
CANNOT: dict[str, Collection[Any]] = {
    "tools": ([],), "functions": ([],), "response_format": ({"type": "text"},), "n": (1,),
    "best_of": (1,), "logit_bias": ({},), "frequency_penalty": (0,), "presence_penalty": (0,),
    "suffix": ("",), "echo": (False,), "audio": (), "prediction": (), "web_search_options": (),
    "modalities": (["text"],),
}  # fmt: skip


class Refusal(UserError):
    """A request that is not answered: the HTTP status, and the field that is wrong."""

    def __init__(self, message: str, status: int = 400, field: str | None = None):
        super().__init__(message)
        self.status, self.field = status, field


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """Turn a UserError raised inside into a `Refusal` for this field."""
    try:
        yield
    except UserError as error:
        raise Refusal(str(error), 400, field) from None


class Request(NamedTuple):
    """A request, checked."""

    ids: list[int]         # of the prompt
    tokens: int            # the most tokens to generate
    sampling: SamplingOptions
    stop: Sequence[str]    # texts before which it ends
    guesses: int           # tokens to guess ahead in a pass
    top: int | None        # alternatives to report for each token; None: not even its own p
    stream: bool
    usage: bool            # whether a stream ends with the number of tokens
    chat: bool
    left_out: int          # turns of the conversation that did not fit into the context


def _whole(least: int, most: float = float("inf")) -> Callable[[Any], bool]:
    """Whether a value is a whole number in these bounds."""
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def _is_text(x):
    return isinstance(x, str)


def _is_flag(x):
    return isinstance(x, bool)


# The fields whose values we check ourselves: a test, and what it expects, in words.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "the name of a model"),
    "stream": (_is_flag, "true or false"),
    "stream_options": (lambda x: isinstance(x, dict), "an object"),
    "max_tokens": (_whole(1), "a whole number of at least 1"),
    "max_completion_tokens": (_whole(1), "a whole number of at least 1"),
    "guesses": (_whole(0), "a whole number of at least 0"),
    "logprobs": (lambda x: _is_flag(x) or _whole(0, TOP)(x), f"true, false, or 0 to {TOP}"),
    "top_logprobs": (_whole(0, TOP), f"a whole number from 0 to {TOP}"),
    "stop": (lambda x: _is_text(x) or isinstance(x, list), "a text, or a list of texts"),
}


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a request: a JSON object, without those that are null.

    `Refusal` if the body is no JSON object, or a field has a value that it cannot have.
    """
    try:
        said = json.loads(body, parse_constant=_no_number)
    except ValueError:
        raise Refusal("expected the body of the request to be JSON, but it is not") from None
    except RecursionError:  # some 950 deep
        raise Refusal("expected the body of the request to be nested less deeply") from None
    if not isinstance(said, dict):
        raise Refusal(f"expected a JSON object, got {said!r:.60}: see OpenAI's API")
    said = {name: value for name, value in said.items() if value is not None}
    for name, (good, wanted) in FIELDS.items():
        if name in said and not good(said[name]):
            raise Refusal(f"expected {name} to be {wanted}, got {said[name]!r:.60}", 400, name)
    for name, harmless in CANNOT.items():
        if name in said and said[name] not in harmless:
            raise Refusal(f"this server cannot do {name}: leave it out", 400, name)
    return said


def _no_number(name):
    raise ValueError(name)


# The protocol's roles without tools: programs for newer models say developer, not system.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Turns = list[tuple[str, str]]  # questions and their answers


def turns_of(messages: Any) -> tuple[str | None, Turns, str]:
    """The system prompt, the turns so far, and the question, from the messages of a request."""
    if not (isinstance(messages, list) and messages):
        raise Refusal(f"expected messages, a list of them, got {messages!r:.60}", 400, "messages")
    system, said = [], []
    for message in messages:
        role, text = _spoken(message)
        if role == "system":
            system.append(text)
        elif said and said[-1][0] == role:
            said[-1] = role, f"{said[-1][1]}\n{text}"
        else:
            said.append((role, text))
    if not said or said[0][0] != "user" or said[-1][0] != "user":
        raise Refusal("expected a user to speak first and last", 400, "messages")
    texts = [text for _, text in said]
    return "\n".join(system) or None, [*zip(texts[::2], texts[1::2], strict=False)], texts[-1]


def _spoken(message):
    """The role and the text of one message."""
    if not isinstance(message, dict) or message.get("role") not in [*ROLES]:
        raise Refusal(f"expected a message with a role, {', '.join(ROLES)}, got {message!r:.60}",
                      400, "messages")  # fmt: skip
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        text = isinstance(part, dict) and part.get("type") == "text" and part.get("text")
        if not _is_text(text):
            raise Refusal(f"expected a message of text, got {part!r:.60}", 400, "messages")
    return ROLES[message["role"]], "".join(part["text"] for part in parts)


def fitting(
    tokenizer: Tokenizer, context: int, system: str | None, turns: Turns, question: str
) -> tuple[list[int], int]:
    """The ids of a conversation cut to fit the context, and how many turns were left out."""
    memory = Memory(tokenizer, context)
    memory.tell(system or "")
    memory.turns = [Turn(*turn, conversation(tokenizer, *turn)[0]) for turn in turns]
    before, ids = memory.sees(question)
    return before + ids, len(turns) - memory.kept


# The fields that the sampler takes and checks under the same names.
SAMPLING = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"


def read_request(
    body: bytes, chat: bool, config: ModelConfig, tokenizer: Tokenizer, name: str, most: int
) -> Request:
    """The `Request` in the body of a POST to the model called `name`.

    At most `most` tokens are generated. `Refusal` or UserError if it cannot be answered.
    """
    said = fields_of(body)
    if (model := said.get("model", name)) != name:
        raise Refusal(f"there is no model {model!r:.60} here: its name is {name!r}", 404, "model")
    stop, sampling = _stop(said.get("stop", ())), _sampling(said)
    if chat:
        sampling.setdefault("temperature", TEMPERATURE)
        with blaming("messages"):
            ids, left_out = fitting(tokenizer, config.context, *turns_of(said.get("messages")))
        most = min(most, config.context - len(ids))
    else:
        with blaming("prompt"):
            ids, left_out = _prompt(said.get("prompt", "\n"), config, tokenizer), 0
    wanted = min(said.get("max_completion_tokens", most), said.get("max_tokens", most), most)
    top = _top(said, chat)
    guesses = min(said.get("guesses", 0), config.n_predict - 1)
    if guesses and top is not None:
        raise Refusal("guesses and logprobs exclude each other: leave one out", 400, "guesses")
    usage = bool(said.get("stream_options", {}).get("include_usage"))
    return Request(ids, wanted, sampling, stop, guesses, top, said.get("stream", False), usage,
                 chat, left_out)  # fmt: skip


def _stop(said):
    """The stop strings of a request: one, or a list."""
    stop = [said] if isinstance(said, str) else said
    with blaming("stop"):
        check_stop(stop)
    if len(stop) > STOPS or max(map(len, stop), default=0) > STOP:
        raise Refusal(f"expected stop to be at most {STOPS} texts of at most {STOP} characters "
                      f"each, got {len(stop)} of {max(map(len, stop))}", 400, "stop")  # fmt: skip
    return stop


def _sampling(said):
    """The sampling options of a request, always with a seed."""
    sampling = {key: said[key] for key in SAMPLING if key in said}
    for key, value in sampling.items():
        with blaming(key):
            check(**{key: value})
    return {"seed": secrets.randbits(SEED_BITS)} | sampling


def _prompt(given, config, tokenizer):
    """The ids of the prompt of a completion: a text, or ids."""
    if isinstance(given, str) and given:
        return tokenizer.encode(given).tolist()
    if isinstance(given, list) and given and all(map(_whole(0, config.vocab_size - 1), given)):
        return given
    raise Refusal("expected prompt to be a text, or a list of ids below "
                  f"{config.vocab_size}, got {given!r:.60}", 400, "prompt")  # fmt: skip


def _top(said, chat):
    """How many alternatives to each token to report; None: not even its own probability."""
    asked = said.get("logprobs", False)
    if isinstance(asked, bool) != chat and "logprobs" in said:
        raise Refusal(f"expected logprobs to be {'true or false' if chat else 'a number'}, got "
                      f"{asked!r}", 400, "logprobs")  # fmt: skip
    if chat:
        return said.get("top_logprobs", 0) if asked else None
    return None if asked is False else asked
