"""A fine-tune file as its bytes pass: checked at upload, and read again at create.

`TrainingFileCheck` is the upload's: every row valid, one kind of rows, and the counts that quotes
need, in flat memory. `TemplateCheck` is create's: what the text of the messages would do to the
base's chat template. Both stop at the first bad line, and never quote a row.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from domain.catalog import CATALOG, BaseModel, FineTuning
from domain.errors import InvalidFile
from domain.inputs.jsonl import Line, LineSplitter
from domain.inputs.token_estimate import CharacterCounts
from domain.inputs.training_row import ChatRow, Message, PreferenceRow, TrainingRow, read_row
from domain.limits import TRAINING_LINE_BYTES_MAX
from domain.log.stored import StoredModel

FileRole = Literal["training file", "validation file"]

_TRAINABLE: dict[str, tuple[BaseModel, FineTuning]] = {
    name: (base, base.fine_tuning) for name, base in CATALOG.items() if base.fine_tuning is not None
}
_THINK_END = "</think>"


class TrainingFacts(StoredModel):
    """What the check of a fine-tune file found (fine-tuning page, "Training files").

    `token_bounds` and `token_estimates` are per base id: an upper bound from the UTF-8 bytes, the
    template's own tokens included, and a conservative estimate from the text. `sample_estimates`
    has the bases that train several samples of a row (`domain/catalog.py`, `samples_per_turn`):
    the estimate over all samples, which counts for time and never for money.
    """

    kind: Literal["chat", "preference"]
    rows: int
    messages: int
    token_bounds: dict[str, int]
    token_estimates: dict[str, int]
    sample_estimates: dict[str, int] = Field(default_factory=dict)
    first_row_that_does_not_alternate: int | None


class TrainingFileCheck:
    """Feed it a file's bytes in order, then `finish`. After the first refusal, feed no more."""

    def __init__(self) -> None:
        self._lines = LineSplitter(line_bytes_max=TRAINING_LINE_BYTES_MAX)
        self._kind: Literal["chat", "preference"] | None = None
        self._rows = 0
        self._messages = 0
        self._text = CharacterCounts()
        self._always = _Samples()
        self._with_system = _Samples()
        self._first_row_that_does_not_alternate: int | None = None

    def feed(self, chunk: bytes) -> None:
        """Checks the lines that end in this chunk. Raises InvalidFile with the first bad line."""
        for line in self._lines.feed(chunk):
            self._check(line)

    def finish(self) -> TrainingFacts:
        """What the whole file holds. Raises InvalidFile for its last line, or if it has no rows."""
        for line in self._lines.finish():
            self._check(line)
        if self._kind is None:
            raise InvalidFile("The file has no rows.")
        return TrainingFacts(
            kind=self._kind,
            rows=self._rows,
            messages=self._messages,
            token_bounds={
                name: self._text.bytes + self._template_tokens(base)
                for name, (base, _) in _TRAINABLE.items()
            },
            token_estimates={
                name: self._text.estimate(training.token_rates) + self._template_tokens(base)
                for name, (base, training) in _TRAINABLE.items()
            },
            sample_estimates={
                name: samples.estimate(base, training)
                for name, (base, training) in _TRAINABLE.items()
                if (samples := self._samples_of(training)) is not None
            },
            first_row_that_does_not_alternate=self._first_row_that_does_not_alternate,
        )

    def _check(self, line: Line) -> None:
        row = read_row(line)
        kind: Literal["chat", "preference"] = "chat" if isinstance(row, ChatRow) else "preference"
        if self._kind not in (None, kind):
            raise InvalidFile(
                f"Line {line.number} is a {kind} row among {self._kind} rows; a file holds one "
                "kind.",
                code="invalid_messages",
                line=line.number,
            )
        self._kind = kind
        self._rows += 1
        self._messages += len(row.messages)
        self._count(row)
        if self._first_row_that_does_not_alternate is None and not _alternates(row):
            self._first_row_that_does_not_alternate = line.number

    def _count(self, row: TrainingRow) -> None:
        counts = CharacterCounts()
        for message in row.messages:
            counts.add(message.content)
        self._text.merge(counts)
        has_system = row.messages[0].role == "system"
        if isinstance(row, ChatRow) and _trained_turns(row) > 1:
            samples = _samples(row)
            self._always.merge(samples)
            self._with_system.merge(
                samples if has_system else _Samples(counts, 1, len(row.messages))
            )
        else:
            whole = _Samples(counts, 1, len(row.messages))
            self._always.merge(whole)
            self._with_system.merge(whole)

    def _template_tokens(self, base: BaseModel) -> int:
        return self._rows * base.template_row_tokens + self._messages * base.template_message_tokens

    def _samples_of(self, training: FineTuning) -> _Samples | None:
        match training.samples_per_turn:
            case "never":
                return None
            case "system":
                return self._with_system
            case "always":
                return self._always


class _Samples:
    """The text of the samples that training as served makes of rows."""

    def __init__(
        self, counts: CharacterCounts | None = None, samples: int = 0, messages: int = 0
    ) -> None:
        self.counts = CharacterCounts() if counts is None else counts
        self.samples = samples
        self.messages = messages

    def merge(self, other: _Samples) -> None:
        self.counts.merge(other.counts)
        self.samples += other.samples
        self.messages += other.messages

    def estimate(self, base: BaseModel, training: FineTuning) -> int:
        return (
            self.counts.estimate(training.token_rates)
            + self.samples * base.template_row_tokens
            + self.messages * base.template_message_tokens
        )


def _samples(row: ChatRow) -> _Samples:
    """One sample for each trained turn: the conversation up to it."""
    total, so_far = _Samples(), CharacterCounts()
    for index, message in enumerate(row.messages):
        so_far.add(message.content)
        if message.trained:
            total.counts.merge(so_far)
            total.samples += 1
            total.messages += index + 1
    return total


def _trained_turns(row: ChatRow) -> int:
    return sum(message.trained for message in row.messages)


def _alternates(row: TrainingRow) -> bool:
    """User and assistant in turn, after an optional first system message. An answer of a preference
    row follows its prompt."""
    messages = (*row.prompt, row.preferred) if isinstance(row, PreferenceRow) else row.messages
    turns = messages[1:] if messages[0].role == "system" else messages
    return all(
        message.role == ("assistant" if index % 2 else "user")
        for index, message in enumerate(turns)
    )


class TemplateCheck:
    """Create's reading of a file that upload has accepted, for one base.

    Raises InvalidFile: `template_token_in_content` for a control token or a think block written as
    text, `template_mismatch` for spaces that the template would drop.
    """

    def __init__(self, base: BaseModel, training: FineTuning, *, file: FileRole) -> None:
        self._base = base
        self._training = training
        self._file = file
        self._lines = LineSplitter(line_bytes_max=TRAINING_LINE_BYTES_MAX)
        self._control_token = re.compile("|".join(map(re.escape, training.control_tokens)))

    def feed(self, chunk: bytes) -> None:
        """Reads the lines that end in this chunk."""
        for line in self._lines.feed(chunk):
            self._check(line)

    def finish(self) -> None:
        """Reads the last line."""
        for line in self._lines.finish():
            self._check(line)

    def _check(self, line: Line) -> None:
        row = read_row(line)
        last = (
            (row.preferred, row.non_preferred)
            if isinstance(row, PreferenceRow)
            else row.messages[-1:]
        )
        for message in row.messages:
            found = self._control_token.search(message.content)
            if found is not None:
                raise self._token_in_content(line.number, message, found.group())
            if self._training.think_block and message.role == "assistant":
                self._check_think_block(line.number, message, is_last=message in last)
            if (
                message.role in self._training.trimmed_roles
                and message.content.strip() != message.content
            ):
                raise self._changed(line.number, message, "begins or ends with white space")

    def _check_think_block(self, line: int, message: Message, *, is_last: bool) -> None:
        content = message.content
        if _THINK_END in content and not (is_last and _is_template_think_block(content)):
            raise self._token_in_content(line, message, _THINK_END)
        if is_last and content.startswith("\n"):
            raise self._changed(line, message, "begins with a line end")

    def _token_in_content(self, line: int, message: Message, token: str) -> InvalidFile:
        return InvalidFile(
            f"The {self._file}, line {line}, {message.path} ({message.role}) holds {token}, which "
            f"{self._base.id} would read as its chat template's own markup. Write it otherwise "
            "(for example as plain words) and upload the file again.",
            code="template_token_in_content",
            param=self._file.replace(" ", "_"),
            line=line,
        )

    def _changed(self, line: int, message: Message, how: str) -> InvalidFile:
        return InvalidFile(
            f"The {self._file}, line {line}, {message.path} ({message.role}) {how}, which the chat "
            f"template of {self._base.id} drops. Remove it and upload the file again.",
            code="template_mismatch",
            param=self._file.replace(" ", "_"),
            line=line,
        )


def _is_template_think_block(content: str) -> bool:
    """Whether the template writes a last turn with a think block back as it was sent: one block, at
    the start, with its line ends."""
    thought, _, answer = content.partition(_THINK_END)
    inside = thought.removeprefix("<think>\n").removesuffix("\n")
    return (
        thought == f"<think>\n{inside}\n"
        and inside.strip("\n") == inside
        and "<think>" not in inside
        and answer.startswith("\n\n")
        and not answer.startswith("\n\n\n")
        and _THINK_END not in answer
    )
