"""A batch's input file as its bytes pass: lines checked, run planned, worst case added up.

The worker feeds it while a batch is `validating`. Its memory is bounded by the limit of requests,
never by the file: of each line it keeps a digest of its id.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from domain.catalog import CATALOG, BaseModel, Endpoint
from domain.inputs.batch_line import BatchRequest, LineError, parse_request
from domain.inputs.jsonl import Line, LineSplitter
from domain.limits import (
    BATCH_ERRORS_MAX,
    BATCH_LINE_BYTES_MAX,
    BATCH_REQUESTS_MAX,
    CHUNK_BYTES_MAX,
    CHUNK_REQUESTS,
    MIB,
)
from domain.log.stored import StoredModel, TokenUsage


class ChunkPlan(StoredModel):
    """Where a chunk's lines lie in the input object. `sha256` is of the lines that are no blank
    ones, an LF after each: whoever reads them later sees whether they are what was checked."""

    start_byte: int
    end_byte: int
    first_line: int
    requests: int
    sha256: str


class _Chunk:
    """A chunk's plan as its lines come."""

    def __init__(self, start_byte: int, first_line: int) -> None:
        self.start_byte = start_byte
        self.requests = 0
        self._first_line = first_line
        self._end_byte = start_byte
        self._digest = hashlib.sha256()

    def add(self, content: bytes, *, end_byte: int) -> None:
        self.requests += 1
        self._end_byte = end_byte
        self._digest.update(content)
        self._digest.update(b"\n")

    def plan(self) -> ChunkPlan:
        return ChunkPlan(
            start_byte=self.start_byte,
            end_byte=self._end_byte,
            first_line=self._first_line,
            requests=self.requests,
            sha256=self._digest.hexdigest(),
        )


@dataclass(frozen=True, slots=True)
class BatchFileFacts:
    """What validation found. With `errors` the batch fails and the rest has no meaning.

    `models` are all names that lines use, the base's own among them if one does; `worst_case` is
    each one's input bound and every max_tokens; `first_lines` the line that names each `ft:` model
    first.
    """

    errors: tuple[LineError, ...]
    base: BaseModel | None
    requests: int
    models: tuple[str, ...]
    worst_case: tuple[TokenUsage, ...]
    chunks: tuple[ChunkPlan, ...]
    first_lines: Mapping[str, int]


class BatchFileCheck:
    """Feed it the file's bytes in order, then `finish`.

    `own_models` maps the account's servable `ft:` models to their bases.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        own_models: Mapping[str, str],
        chunk_requests: int = CHUNK_REQUESTS,
    ) -> None:
        self._endpoint = endpoint
        self._own_models = own_models
        self._chunk_requests = chunk_requests
        self._lines = LineSplitter(line_bytes_max=BATCH_LINE_BYTES_MAX)
        self._errors: list[LineError] = []
        self._requests = 0
        self._line_of_id: dict[bytes, int] = {}
        self._base: BaseModel | None = None
        self._input_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()
        self._chunks: list[_Chunk] = []
        self._first_lines: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        """Checks the lines that end in this chunk."""
        for line in self._lines.feed(chunk):
            self._check(line)

    def finish(self) -> BatchFileFacts:
        """Checks the last line; what the whole file holds."""
        for line in self._lines.finish():
            self._check(line)
        if not self._requests:
            self._fault("empty_file", "The input file has no requests.", param="input_file_id")
        return BatchFileFacts(
            errors=tuple(self._errors[:BATCH_ERRORS_MAX]),
            base=self._base,
            requests=self._requests,
            models=tuple(sorted(self._input_tokens)),
            worst_case=tuple(map(self._worst_case, sorted(self._input_tokens))),
            chunks=tuple(chunk.plan() for chunk in self._chunks),
            first_lines=self._first_lines,
        )

    def _worst_case(self, model: str) -> TokenUsage:
        return TokenUsage(
            model=model,
            input_tokens=self._input_tokens[model],
            output_tokens=self._output_tokens[model],
        )

    def _check(self, line: Line) -> None:
        self._requests += 1
        if self._requests == BATCH_REQUESTS_MAX + 1:
            self._errors.clear()
            self._fault(
                "too_many_tasks",
                f"The input file has more than {BATCH_REQUESTS_MAX:,} requests.",
                param="input_file_id",
                line=line.number,
            )
        if self._requests > BATCH_REQUESTS_MAX or len(self._errors) >= BATCH_ERRORS_MAX:
            return
        if line.content is None:
            most = BATCH_LINE_BYTES_MAX // MIB
            message = f"Line {line.number} is larger than {most} MiB."
            self._fault("line_too_large", message, param=None, line=line.number)
            return
        request = parse_request(
            line.content, line=line.number, endpoint=self._endpoint, own_models=self._own_models
        )
        if isinstance(request, list):
            self._errors += request
            return
        self._check_among_others(request, line.number)
        self._add(request, line)

    def _check_among_others(self, request: BatchRequest, line: int) -> None:
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        first = self._line_of_id.setdefault(digest, line)
        if first != line:
            message = f"Line {line}: custom_id is the same as that of line {first}."
            self._fault("duplicate_custom_id", message, param="custom_id", line=line)
        if self._base is None:
            self._base = CATALOG[request.base]
        if request.base != self._base.id:
            message = (
                f"Line {line}: body.model is not {self._base.id} or a fine-tune of it, as the "
                "lines before; a batch runs on one base model."
            )
            self._fault("model_mismatch", message, param="body.model", line=line)
        elif request.model not in self._input_tokens and request.model != self._base.id:
            others = sum(name != self._base.id for name in self._input_tokens)
            if others >= self._base.ft_models_per_batch_max:
                message = (
                    f"Line {line}: a batch on {self._base.id} names at most "
                    f"{self._base.ft_models_per_batch_max} ft: models."
                )
                self._fault("too_many_models", message, param="body.model", line=line)

    def _add(self, request: BatchRequest, line: Line) -> None:
        if request.model != request.base:
            self._first_lines.setdefault(request.model, line.number)
        self._input_tokens[request.model] += request.input_token_bound
        self._output_tokens[request.model] += request.output_token_bound
        assert line.content is not None
        if not self._chunks or not self._fits(self._chunks[-1], line):
            self._chunks.append(_Chunk(line.start_byte, line.number))
        self._chunks[-1].add(line.content, end_byte=line.end_byte)

    def _fits(self, chunk: _Chunk, line: Line) -> bool:
        return (
            chunk.requests < self._chunk_requests
            and line.end_byte - chunk.start_byte <= CHUNK_BYTES_MAX
        )

    def _fault(
        self, code: str, message: str, *, param: str | None, line: int | None = None
    ) -> None:
        self._errors.append(LineError(code=code, message=message, param=param, line=line))
