"""A batch's input file as its bytes pass: lines checked, run planned, worst case added up.

The worker feeds it while a batch is `validating`. Its memory is bounded by the limit of requests,
never by the file: of each line it keeps a digest of its id.
"""

from __future__ import annotations

import hashlib
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
from domain.stored import StoredModel, TokenUsage


class ChunkPlan(StoredModel):
    """Where a chunk's lines lie in the input object. `sha256` is of the lines that are no blank
    ones, an LF after each: whoever reads them later sees whether they are what was checked."""

    start_byte: int
    end_byte: int
    first_line: int
    requests: int
    sha256: str


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
        self._usage: dict[str, TokenUsage] = {}
        self._chunks: list[ChunkPlan] = []
        self._digest = hashlib.sha256()
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
            models=tuple(sorted(self._usage)),
            worst_case=tuple(self._usage[name] for name in sorted(self._usage)),
            chunks=tuple(self._chunks),
            first_lines=self._first_lines,
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
        elif request.model not in self._usage and request.model != self._base.id:
            others = sum(name != self._base.id for name in self._usage)
            if others >= self._base.ft_models_per_batch_max:
                message = (
                    f"Line {line}: a batch on {self._base.id} names at most "
                    f"{self._base.ft_models_per_batch_max} ft: models."
                )
                self._fault("too_many_models", message, param="body.model", line=line)

    def _add(self, request: BatchRequest, line: Line) -> None:
        if request.model != request.base:
            self._first_lines.setdefault(request.model, line.number)
        used = self._usage.get(request.model)
        self._usage[request.model] = TokenUsage(
            model=request.model,
            input_tokens=request.input_token_bound + (used.input_tokens if used else 0),
            output_tokens=request.output_token_bound + (used.output_tokens if used else 0),
        )
        assert line.content is not None
        last = self._chunks[-1] if self._chunks else None
        if last is None or not self._fits(last, line):
            self._digest = hashlib.sha256()
            last = ChunkPlan(
                start_byte=line.start_byte,
                end_byte=line.start_byte,
                first_line=line.number,
                requests=0,
                sha256="",
            )
            self._chunks.append(last)
        self._digest.update(line.content)
        self._digest.update(b"\n")
        self._chunks[-1] = last.model_copy(
            update={
                "end_byte": line.end_byte,
                "requests": last.requests + 1,
                "sha256": self._digest.hexdigest(),
            }
        )

    def _fits(self, chunk: ChunkPlan, line: Line) -> bool:
        return (
            chunk.requests < self._chunk_requests
            and line.end_byte - chunk.start_byte <= CHUNK_BYTES_MAX
        )

    def _fault(
        self, code: str, message: str, *, param: str | None, line: int | None = None
    ) -> None:
        self._errors.append(LineError(code=code, message=message, param=param, line=line))
