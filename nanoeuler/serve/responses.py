# Made from book/r-server.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-serve-writing
"""Responses in the formats of OpenAI's protocol: whole, in chunks, and errors.

Leaves out HTTP. Our own additions are under the key "nanoeuler".
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from nanoeuler.serve.request import Request
from nanoeuler.serve.streaming import End, Piece, Token
from nanoeuler.tokenizer.tokenizer import Tokenizer

Json = dict[str, Any]  # an object of the protocol
DONE = b"data: [DONE]\n\n"  # the last line of a stream


def event(said: Json) -> bytes:
    """A line of a stream: a server-sent event."""
    return f"data: {json.dumps(said)}\n\n".encode()


def error(message: str, kind: str = "invalid_request_error", field: str | None = None) -> Json:
    """The body of an error response."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def spelled(tokenizer: Tokenizer, token: int, p: float | None) -> Json:
    """A token in the format of a chat's logprobs."""
    whole = tokenizer.tokens[token]
    return {"token": whole.decode(errors="replace"), "bytes": [*whole], "logprob": p}


def log_of(tokenizer: Tokenizer, tokens: Sequence[Token], chat: bool) -> Json:
    """The log probabilities of tokens, in the format of a chat or of a completion."""
    if chat:
        return {"content": [
            spelled(tokenizer, token.id, token.log_probability)
            | {"top_logprobs": [spelled(tokenizer, *each) for each in token.likeliest]}
            for token in tokens
        ]}  # fmt: skip
    text = tokenizer.decode_text
    return {
        "tokens": [text([token.id]) for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": [{text([i]): p for i, p in token.likeliest} for token in tokens],
    }


class Response:
    """The formats of one answer, to a `request` to the model called `name`."""

    def __init__(self, request: Request, tokenizer: Tokenizer, name: str):
        self.request, self.tokenizer, self.name = request, tokenizer, name
        self.ids: list[int] = []
        self.id = f"{'chatcmpl' if request.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.made = int(time.time())

    def _form(self, choices: list[Json], chunk: bool) -> Json:
        kind = "text_completion"
        if self.request.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.made, "model": self.name,
                "choices": choices}  # fmt: skip

    def _usage(self, end: End) -> Json:
        n, m = len(self.request.ids), end.tokens
        return {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}

    def _own(self, end: End) -> Json:
        own: Json = {"seed": self.request.sampling["seed"], "prompt_ids": self.request.ids,
                     "ids": self.ids, "turns_left_out": self.request.left_out}  # fmt: skip
        if end.count:
            own["guesses"] = {"passes": end.count.passes, "tokens": end.count.tokens,
                              "made": end.count.made, "kept": end.count.kept}  # fmt: skip
        return own

    def _log(self, tokens: list[Token]) -> Json | None:
        if self.request.top is None:
            return None
        return log_of(self.tokenizer, tokens, self.request.chat)

    def chunk(self, piece: Piece) -> Json:
        """A piece of a stream."""
        self.ids += [token.id for token in piece.tokens]
        choice = {"index": 0, "finish_reason": None, "logprobs": self._log(piece.tokens)}
        said = {"delta": {"content": piece.text}} if self.request.chat else {"text": piece.text}
        own = {"guessed": [token.guessed for token in piece.tokens]} if self.request.guesses else {}
        return self._form([choice | said], True) | ({"nanoeuler": own} if own else {})

    def begin(self) -> Json:
        """The first chunk of a chat's stream: the role."""
        delta = {"role": "assistant", "content": ""}
        return self._form([{"index": 0, "delta": delta, "finish_reason": None}], True)

    def last(self, end: End) -> list[Json]:
        """The last chunks of a stream: why it ended and, if asked for, the number of tokens."""
        said = {"delta": {}} if self.request.chat else {"text": ""}
        choice = {"index": 0, "finish_reason": end.reason, "logprobs": None}
        chunks = [self._form([choice | said], True) | {"nanoeuler": self._own(end)}]
        if self.request.usage:
            chunks.append(self._form([], True) | {"usage": self._usage(end)})
        return chunks

    def whole(self, pieces: Sequence[Piece], end: End) -> Json:
        """The whole answer in one response."""
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        self.ids = [token.id for token in tokens]
        said: Json = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": end.reason, "logprobs": self._log(tokens)}
        choice |= said if self.request.chat else {"text": text}
        own = {"usage": self._usage(end), "nanoeuler": self._own(end)}
        return self._form([choice], False) | own
