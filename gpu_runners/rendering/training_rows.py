"""Turns a conversation into token ids and the spans of them that train, exactly as serving would
send and expect them.

Training calls it once a row. A conversation is first rendered with marks in place of its contents
(the skeleton), which shows where the base's chat template puts each message and what the model has
to write in each turn: everything from the end of the generation prompt to the first end-of-turn
token. Then the real contents are filled in, and the result must equal the template's own rendering,
so that text is never silently dropped, trimmed or moved. It must never log a row or name its text
in an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.errors import GridlineError
from domain.inputs.training_row import ChatRow
from gpu_runners.rendering.chat_template import ChatTemplate, RolesRefused
from gpu_runners.rendering.text_encoding import Encoded, Letters

_MARK_CHARS = 6
_MARK = re.compile("\ue000([0-9]{4})\ue001")
_THINK = re.compile(r"<think>\n.*\n</think>\n\n", re.DOTALL)


class TrainingRefused(GridlineError):
    """A training cannot go on; `code` is a job error code and the message is for the customer."""

    code = "training_failed"


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids as the model reads them, and the half-open index ranges of those that train."""

    ids: NDArray[np.int32]
    spans: tuple[tuple[int, int], ...]

    @property
    def loss_tokens(self) -> int:
        """How many tokens carry loss."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A row's samples: one, or one for each trained turn where the template shows history
    differently from what serving sends. `billed_tokens` counts the row once, after the cut."""

    samples: tuple[Sample, ...]
    billed_tokens: int


@dataclass(frozen=True, slots=True)
class _Row:
    """A row with its contents shielded; `letters` is the way back."""

    line: int
    roles: tuple[str, ...]
    contents: list[str]
    letters: Letters


@dataclass(frozen=True, slots=True)
class _Turn:
    """One assistant turn with marks for contents: what serving sends, and what the model answers
    up to and including the first end-of-turn token. `whole` is the template's rendering of the
    turn with all before it. The prompt of a `thinks` turn is the one for its template's own form
    of a thought, which serving does not send."""

    prompt: str
    completion: str
    whole: str
    thinks: bool


class Renderer:
    """Renders for one base. `template` and `arguments` are what serving uses with it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        control_tokens: Sequence[str],
        max_seq_length: int,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = ChatTemplate(
            tokenizer, control_tokens=control_tokens, text=template, arguments=arguments
        )
        self._encoder = self._template.encoder
        self._control_tokens = tuple(control_tokens)
        self._max_seq_length = max_seq_length
        self._skeletons: dict[tuple[tuple[str, ...], bool], str | None] = {}
        self._turns: dict[tuple[tuple[str, ...], bool], _Turn] = {}

    def render(self, given: ChatRow) -> RenderedRow | None:
        """The row's samples, or None when no trained token is left within `max_seq_length`. Raises
        TrainingRefused with `template_mismatch`."""
        messages, line = given.messages, given.line
        self._refuse_control_tokens(given)
        roles = tuple(m.role for m in messages)
        contents, letters = self._encoder.shielded([m.content for m in messages])
        row = _Row(line, roles, contents, letters)
        thinks = roles[-1] == "assistant" and _THINK.match(contents[-1]) is not None
        trained = [i for i, m in enumerate(messages) if m.trained]
        full = self._skeleton(roles, thinks, line)
        if full is not None:
            self._require_equal(full, row, len(roles), generation=False)
        turns = {
            i: self._turn(roles[: i + 1], thinks and i == len(roles) - 1, line) for i in trained
        }
        if full is not None and all(
            full.startswith(turn.prompt + turn.completion) for turn in turns.values()
        ):
            encoded = self._encoded(_fill(full, contents), row)
            spans = self._token_spans(encoded, turns, row)
            if spans is not None:
                return self._one_sample(_array(encoded.ids), spans)
        return self._as_served(full, turns, row)

    def _one_sample(
        self, ids: NDArray[np.int32], spans: Sequence[tuple[int, int]]
    ) -> RenderedRow | None:
        sample = self._cut(ids, spans)
        return None if sample is None else RenderedRow((sample,), self._billed(ids))

    def _as_served(
        self,
        full: str | None,
        turns: Mapping[int, _Turn],
        row: _Row,
    ) -> RenderedRow | None:
        """One sample a trained turn: the ids that serving sends, then the answer's."""
        samples, ids = [], np.empty(0, np.int32)
        for i, turn in turns.items():
            if not turn.thinks:
                self._require_equal(turn.prompt, row, i, generation=True)
            if full is None:
                self._require_equal(turn.whole, row, i + 1, generation=False)
            prompt = _fill(turn.prompt, row.contents)
            completion = _fill(turn.completion, row.contents)
            sent, ids = self._ids(prompt, row), self._ids(prompt + completion, row)
            if not np.array_equal(ids[: len(sent)], sent):
                ids = np.concatenate((sent, self._ids(completion, row)))
            sample = self._cut(ids, [(len(sent), len(ids))])
            if sample is not None:
                samples.append(sample)
        if full is not None:
            ids = self._ids(_fill(full, row.contents), row)
        return RenderedRow(tuple(samples), self._billed(ids)) if samples else None

    def _cut(self, ids: NDArray[np.int32], spans: Sequence[tuple[int, int]]) -> Sample | None:
        """Within the limit, and no further than the last trained token."""
        limit = self._max_seq_length
        kept = tuple((start, min(end, limit)) for start, end in spans if start < limit)
        return Sample(ids[: kept[-1][1]], kept) if kept else None

    def _billed(self, ids: NDArray[np.int32]) -> int:
        return min(len(ids), self._max_seq_length)

    def _encoded(self, text: str, row: _Row) -> Encoded:
        return self._encoder.encode(text, row.letters)

    def _ids(self, text: str, row: _Row) -> NDArray[np.int32]:
        return _array(self._encoded(text, row).ids)

    def _token_spans(
        self, encoded: Encoded, turns: Mapping[int, _Turn], row: _Row
    ) -> list[tuple[int, int]] | None:
        """Where the turns lie in the tokens of the whole conversation; None if a turn starts within
        a token or its prompt would be other tokens by itself (white space at a turn's start can
        merge with the template's), so that serving would not send these ids."""
        ids = _array(encoded.ids)
        starts, ends = np.asarray(encoded.offsets, dtype=np.int64).T
        # Byte-level tokenizers leave a token's leading space out of its offsets; a gap before a
        # token is part of it.
        gaps = starts[1:] > ends[:-1]
        starts[1:][gaps] = ends[:-1][gaps]
        spans = []
        for i, turn in turns.items():
            prompt = _fill(turn.prompt, row.contents)
            end = len(prompt) + len(turn.completion) + len(row.contents[i]) - _MARK_CHARS
            first = int(np.searchsorted(starts, len(prompt), side="left"))
            tail = self._ids(prompt[self._last_special(prompt) :], row)
            if starts[first] != len(prompt) or not np.array_equal(
                ids[first - len(tail) : first], tail
            ):
                return None
            spans.append((first, int(np.searchsorted(ends, end, side="right"))))
        return spans

    def _last_special(self, text: str) -> int:
        """Where the last special token ends: tokens never reach across it."""
        last = 0
        for match in self._encoder.marks.finditer(text):
            last = match.end()
        return last

    def _skeleton(self, roles: tuple[str, ...], thinks: bool, line: int) -> str | None:
        """The whole conversation with marks; None where the template drops a message of it, as
        Mistral's does with a system message: then serving's own prompts decide."""
        key = (roles, thinks)
        if key not in self._skeletons:
            text = self._rendered_marks(roles, thinks, generation=False, line=line)
            self._skeletons[key] = text if _missing(text, len(roles)) is None else None
        return self._skeletons[key]

    def _turn(self, roles: tuple[str, ...], thinks: bool, line: int) -> _Turn:
        """The last of these messages as a turn to be answered."""
        key = (roles, thinks)
        if key not in self._turns:
            self._turns[key] = self._new_turn(roles, thinks, line)
        return self._turns[key]

    def _new_turn(self, roles: tuple[str, ...], thinks: bool, line: int) -> _Turn:
        last = len(roles) - 1
        prompt = self._rendered_marks(roles[:last], False, generation=True, line=line)
        whole = self._rendered_marks(roles, thinks, generation=False, line=line)
        dropped = _missing(prompt, last)
        if dropped is not None:
            raise _mismatch(line, dropped, "the base's chat template leaves it out")
        if _mark(last) not in whole:
            raise _mismatch(line, last, "the base's chat template leaves it out or changes it")
        before, after = whole.split(_mark(last), 1)
        # From the message before on: what precedes it may be shown differently without the answer.
        lead = _after_marks(before)
        opening = _after_marks(prompt)
        if thinks and not lead.startswith(opening):
            # The template's own form of a thought: the prompt without the empty think block.
            prompt, opening = prompt[: len(prompt) - len(opening)] + lead, lead
        if not lead.startswith(opening):
            raise _mismatch(line, last, "the base's chat template shows it in another place")
        end = self._encoder.marks.search(after)
        if end is None:
            raise _mismatch(line, last, "the base's chat template does not end the turn")
        answer = _mark(last) + after[: end.end()]
        completion = lead[len(opening) :] + answer
        return _Turn(prompt=prompt, completion=completion, whole=whole, thinks=thinks)

    def _rendered_marks(
        self, roles: tuple[str, ...], thinks: bool, *, generation: bool, line: int
    ) -> str:
        marks = [_mark(i) for i in range(len(roles))]
        if thinks:
            thought = f"<think>\n{_mark(len(roles))}\n</think>\n\n{marks[-1]}"
            text = self._apply(roles, [*marks[:-1], thought], generation=generation, line=line)
            if text.count(thought) != 1:
                raise _mismatch(line, len(roles) - 1, "its think block is not where it may be")
            return text.replace(thought, marks[-1])
        return self._apply(roles, marks, generation=generation, line=line)

    def _apply(
        self, roles: Sequence[str], contents: Sequence[str], *, generation: bool, line: int
    ) -> str:
        try:
            return self._template.render(roles, contents, generation=generation)
        except RolesRefused:
            raise TrainingRefused(
                f"Row {line}: the base's chat template refuses the order of its roles.",
                code="template_mismatch",
            ) from None

    def _require_equal(self, skeleton: str, row: _Row, messages: int, *, generation: bool) -> None:
        """The filled skeleton is what the template itself makes of the row's first messages."""
        line, contents = row.line, row.contents[:messages]
        real = self._apply(row.roles[:messages], contents, generation=generation, line=line)
        at, message = 0, 0
        for n, piece in enumerate(_MARK.split(skeleton)):
            is_mark = n % 2 == 1
            message = int(piece) if is_mark else message
            expected = contents[message] if is_mark else piece
            if not real.startswith(expected, at):
                raise _mismatch(line, message, "the base's chat template would change its text")
            at += len(expected)
        if at != len(real):
            raise _mismatch(line, message, "the base's chat template would change its text")

    def _refuse_control_tokens(self, given: ChatRow) -> None:
        for i, message in enumerate(given.messages):
            for token in self._control_tokens:
                if token in message.content:
                    raise _mismatch(given.line, i, f"its text holds the control token {token}")


def _mark(message: int) -> str:
    """Private-use characters: no template trims, splits or recognises them."""
    return f"\ue000{message:04d}\ue001"


def _fill(skeleton: str, contents: Sequence[str]) -> str:
    pieces = _MARK.split(skeleton)
    pieces[1::2] = [contents[int(number)] for number in pieces[1::2]]
    return "".join(pieces)


def _missing(skeleton: str, messages: int) -> int | None:
    """The first message whose mark is not there exactly once."""
    found = Counter(int(number) for number in _MARK.findall(skeleton))
    return next((i for i in range(messages) if found[i] != 1), None)


def _array(ids: list[int]) -> NDArray[np.int32]:
    return np.asarray(ids, dtype=np.int32)


def _after_marks(skeleton: str) -> str:
    return _MARK.split(skeleton)[-1]


def _mismatch(line: int, message: int, why: str) -> TrainingRefused:
    return TrainingRefused(f"Row {line}, message {message + 1}: {why}.", code="template_mismatch")
