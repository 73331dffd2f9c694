# Made from book/19b-other-peoples-tokenizers.md by nanoeuler.book: edit the chapter, not this file.


# %% sec-their-templates
"""Chat templates in Jinja, in its sandbox: a conversation as text, as ids, and what to learn of it.

Leaves out a conversation of our own models without Jinja (chat_template.py).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from nanoeuler.errors import UserError
from nanoeuler.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer

Message = Mapping[str, Any]  # "role" and "content", and what else a template reads
MAX_TEMPLATE = 1 << 20  # characters; a long template, Kimi K3's, has 15 thousand
MAX_TEXT = 1 << 26  # characters that a template may repeat something into

# The template of our own models, for programs that speak Jinja: chat_template.py writes the same.
OURS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>' + "
    "message['content'] + '<|assistant|>' }}{% elif message['role'] == 'assistant' %}{{ "
    "message['content'] + '<|end|>' }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
# Noncharacters, which Unicode keeps for a program's internal use: hardly any text has them.
GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def _environment() -> Any:
    """Jinja's sandbox, with what chat templates expect to find in it."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag {% generation %}, which marks an answer in some templates: its body."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, which also refuses to write one thing very often."""

        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context, operator, left, right):
            long = [len(x) for x in (left, right) if hasattr(x, "__len__")]
            times = [x for x in (left, right) if isinstance(x, int)]
            if operator == "**" or (long and times and long[0] * times[0] > MAX_TEXT):
                raise jinja2.sandbox.SecurityError("a power, or too long a repetition")
            return super().call_binop(context, operator, left, right)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True,
                   extensions=[Generation, "jinja2.ext.loopcontrols"])  # fmt: skip
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(x: Any, ensure_ascii: bool = False, **form: Any) -> str:
    """JSON as a model has seen it: characters as they are, and no escapes for HTML."""
    known = {key: form.get(key) for key in ("indent", "separators")}
    return json.dumps(x, ensure_ascii=ensure_ascii, sort_keys=bool(form.get("sort_keys")), **known)


def _raise(message: str) -> None:
    """What a template calls when it can't write a conversation."""
    import jinja2

    raise jinja2.TemplateError(message)


class ChatTemplate:
    """The template of a tokenizer's conversations. `stops` are the ids that end an answer.

    source: a template in Jinja; without one the tokenizer's own, or that of our models. UserError
    if there is none, or if Jinja can't read it.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None):
        import jinja2

        self.tokenizer, vocabulary = tokenizer, tokenizer.vocabulary
        self.source = source or tokenizer.template
        if not self.source and all(name in tokenizer.special for name in SPECIAL_TOKENS[1:]):
            self.source = OURS
        if not self.source or len(self.source) > MAX_TEMPLATE:
            raise UserError(
                "expected a tokenizer with a chat template, but it has none (or an endless one): "
                "the model was not trained to chat, or chat_template.jinja was not copied with it"
            )
        names = {token.id: token.content for token in vocabulary.added}
        self._variables = {
            f"{key}_token": names[i]
            for key, i in (("bos", vocabulary.bos), ("eos", vocabulary.eos)) if i in names
        }  # fmt: skip
        self._names = sorted(tokenizer.special, key=len, reverse=True)
        try:
            self._template = _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            told = f"the chat template is no Jinja that we can read: {error!s:.200}"
            raise UserError(told) from None

    def render(self, messages: Sequence[Message], answer: bool = False, **variables: Any) -> str:
        """The text of a conversation; with `answer` up to where an answer would begin.

        variables: what else the template reads, such as tools or enable_thinking. UserError if the
        template refuses the conversation, in its words, or fails.
        """
        given = {"tools": None, "documents": None, **self._variables, **variables}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=answer,
                **given,
            )  # fmt: skip
        except Exception as error:  # whatever a template's author has not thought of
            told = f"the chat template refuses this conversation: {error!s:.200}"
            raise UserError(told) from None

    def prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The ids of a conversation up to where the answer begins. Names in a message stay text."""
        guard, guarded = self._guarded(messages)
        text = self.render(guarded, answer=True, **variables)
        return self.tokenizer.encode(text, special=True, guard=guard).tolist()

    def conversation(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and for each whether the model says it: answers and ends."""
        guard, guarded = self._guarded(messages)
        text = self.render(guarded, **variables)
        ids, counted, at = list[int](), list[bool](), 0
        spans = self._answers(guarded, text, variables)
        for begin, end in [*spans, (len(text), len(text))]:
            for start, stop, which in ((at, begin, False), (begin, end, True)):
                new = self.tokenizer.encode(
                    text[start:stop], special=True, guard=guard,
                    begins=not start or text[:start].endswith((*self._names,)),
                ).tolist()  # fmt: skip
                ids, counted = ids + new, counted + [which] * len(new)
            at = end
        return ids, counted

    def _answers(
        self, messages: Sequence[Message], text: str, variables: dict[str, Any]
    ) -> Iterator[tuple[int, int]]:
        """Where in `text` each answer begins and ends, the token that ends it included."""
        at, ends = 0, [name for name, i in self.tokenizer.special.items() if i in self.stops]
        for n, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:n], answer=True, **variables)
            said = str(message.get("content") or "").strip()
            begin = len(before) if len(before) >= at and text.startswith(before) else at
            found = text.find(said, begin)
            if found < 0:  # of an older answer some templates leave the thoughts out
                said = said.rpartition("</think>")[2].strip()
                found = text.find(said, begin)
            if found < 0:
                raise UserError(f"the chat template changes the answer {said!r:.60}, so we can't "
                                "tell what to learn: give it as the model says it")  # fmt: skip
            begin = begin if text.startswith(before) else found
            places = [(text.find(name, found + len(said)), name) for name in ends]
            end = min([place + len(name) for place, name in places if place >= 0], default=None)
            at = found + len(said) if end is None else end
            yield begin, at

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer: what the template writes after one, the tokenizer's end."""
        found = []
        probe = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "\ue000"}]
        try:
            after = self.render(probe).partition("\ue000")[2]
            first = re.search("|".join(map(re.escape, self._names)), after) if self._names else None
            found = [self.tokenizer.special[first[0]]] if first else []
        except UserError:
            pass  # the template needs other conversations
        eos = self.tokenizer.vocabulary.eos
        return (*found, *([eos] if eos is not None and eos not in found else []))

    def _guarded(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """A character that no message has; the messages with it in each special token's name."""
        whole = json.dumps([*map(dict, messages)], ensure_ascii=False, default=str)
        guard = next((guard for guard in GUARDS if guard not in whole), None)
        if guard is None:
            raise UserError("expected messages of text, but they have all of U+FDD0 to U+FDEF, "
                            "which are no characters: take them out")  # fmt: skip
        names = "|".join(map(re.escape, self._names))
        search = re.compile(f"(?=(?:{names}))(.)", re.S) if names else None

        def changed(x: Any) -> Any:
            if isinstance(x, str):
                return search.sub(rf"\1{guard}", x) if search else x
            if isinstance(x, Mapping):
                return {key: changed(value) for key, value in x.items()}
            return [changed(value) for value in x] if isinstance(x, list | tuple) else x

        return guard, [changed(message) for message in messages]
