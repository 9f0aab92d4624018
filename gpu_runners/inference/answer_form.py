"""Holds an answer to the form that its line asks for: a JSON object, or JSON that fits a schema.

The engines call it. llguidance is the one decoder of both: it keeps each keyword of a schema or
refuses the schema, bounds its own work, and writes strings as JSON does. An answer that ends by
itself has passed `check_answer`: text that does not fit must never count as finished.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
from numpy.typing import NDArray

from domain.inputs.requests.chat_body import ChatBody
from domain.inputs.requests.response_format import ResponseFormat
from gpu_runners.inference.engine import EngineRefusal

KEPT_MAX = 64
"""Compiled schemas, of which a file of lines mostly has few."""
CAUSE_LETTERS_MAX = 300

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One layout, as most JSON that models have read: left free, small models write white space until
their tokens are used up."""


class Matcher:
    """Follows one answer, token by token."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next. Raises EngineRefusal where none can."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _raise_error(self._matcher)
        return np.unpackbits(bits, bitorder="little").astype(np.bool_)

    def take(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these. Raises EngineRefusal where it must not."""
        self._matcher.consume_tokens(list(tokens))
        _raise_error(self._matcher)


class AnswerForms:
    """The forms of one model's answers. `ends` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, ends: Sequence[int]) -> None:
        self._make_tokenizer = partial(
            llguidance.hf.from_tokenizer,
            tokenizer,
            n_vocab=max(vocabulary, len(tokenizer)),
            eos_token=list(ends),
        )
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def check(self, form: ResponseFormat) -> None:
        """Raises EngineRefusal for a schema that cannot be followed, with the cause."""
        if form.kind != "text":
            self._copy(form)

    def matcher(self, form: ResponseFormat) -> Matcher | None:
        """For a new answer; None where its form is free. Raises EngineRefusal."""
        return None if form.kind == "text" else Matcher(self._copy(form))

    def check_answer(self, body: ChatBody, text: str) -> None:
        """An answer that ended by itself. Raises EngineRefusal if it does not fit."""
        if body.response_format.kind == "text":
            return
        matcher = self._copy(body.response_format)
        if matcher.consume_tokens(self._tokenizer.tokenize_str(text)) and matcher.is_accepting():
            return
        matcher.compute_bitmask()
        _raise_error(matcher)
        by_stop = " A text in 'stop' ended it." if body.sampling.stop else ""
        raise EngineRefusal(
            f"The answer ended before it had the form of 'response_format'.{by_stop}",
            param="stop" if body.sampling.stop else "response_format",
        )

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """Made when it is first asked for, which takes a second."""
        return self._make_tokenizer()

    def _copy(self, form: ResponseFormat) -> llguidance.LLMatcher:
        schema = json.dumps(decoder_schema(form))
        if schema not in self._compiled:
            self._compiled[schema] = self._compile(schema)
            if len(self._compiled) > KEPT_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        return self._compiled[schema].deep_copy()

    def _compile(self, schema: str) -> llguidance.LLMatcher:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise _refused(str(error)) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        # Some schemas are seen to have no end only when the first token is asked for.
        matcher.compute_bitmask()
        _raise_error(matcher)
        return matcher


def decoder_schema(form: ResponseFormat) -> dict[str, Any]:
    """The schema as the decoder gets it."""
    schema = {"type": "object"} if form.schema is None else form.schema
    return {**schema, "x-guidance": _LAYOUT}


def _raise_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise _refused(matcher.get_error())


def _refused(cause: str) -> EngineRefusal:
    shown = " ".join(cause.partition("<state>")[0].split())[:CAUSE_LETTERS_MAX]
    return EngineRefusal(
        f"The schema in 'response_format' cannot be followed: {_PLAIN.get(shown, shown)}",
        param="response_format",
    )


_PLAIN = {"NoExtensionBias": "no value fits it, or it refers to itself without an end."}
"""What the decoder says in words of its own."""
