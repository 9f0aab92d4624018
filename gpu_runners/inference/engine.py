"""The small protocol between the engine child's loop and an engine.

`child.py` drives an engine: load the base, add adapters, submit requests, step. An engine
must never answer for an adapter that it could not load with the base's words, never let one request
end another, and never write to standard output, which carries the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from domain.catalog import Pooling
from domain.errors import GridlineError
from domain.inputs.requests.chat_body import ChatBody
from domain.inputs.requests.embeddings_body import EncodingFormat, Inputs

FinishReason = Literal["stop", "length"]

logger = logging.getLogger(__name__)


class AdapterUnusable(GridlineError):
    """An adapter's files cannot be loaded onto this base."""

    status: ClassVar[int] = 500
    code = "adapter_unusable"
    error_type: ClassVar[str] = "server_error"


class EngineFailed(GridlineError):
    """The engine could not finish this line."""

    status: ClassVar[int] = 500
    code = "engine_failed"
    error_type: ClassVar[str] = "server_error"


CACHE_BYTES = 1 << 30
"""What an engine on a CPU may take for keys and values of all lines that run."""


@dataclass(frozen=True, slots=True)
class Base:
    """What an engine loads. `window_tokens` bounds prompt and answer together; `rank_max` is the
    greatest adapter rank of this base; `template_kwargs` go to the chat template, as in training,
    whose marks `control_tokens` are. `pooling` is how an embedding base makes one vector of an
    input's tokens.
    """

    directory: Path
    kind: Literal["chat", "embedding"]
    window_tokens: int
    rank_max: int
    template_kwargs: dict[str, Any]
    control_tokens: Sequence[str]
    pooling: Pooling | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat line. `adapter` is a name given to `add_adapter`, None for the base."""

    id: str
    adapter: str | None
    body: ChatBody


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One embeddings line: texts or token ids, in the line's order."""

    id: str
    inputs: Inputs
    encoding_format: EncodingFormat = "float"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `logprobs` is OpenAI's list of token entries, None unless asked for."""

    text: str
    finish_reason: FinishReason
    logprobs: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished chat request; the token counts are the ones billed."""

    id: str
    choices: list[Choice]
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """A finished embeddings request; each vector has length 1."""

    id: str
    vectors: list[list[float]]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that ended without an answer."""

    id: str
    error: GridlineError


Result = Generated | Embedded | Refused


class Engine(Protocol):
    """One loaded base. Not thread-safe: one loop calls it. `gather_seconds` is how long it waits
    for the next line before it starts on those that it has: long for one that begins with a batch
    and takes nothing in until that has ended, 0 for one that takes lines in at every step."""

    gather_seconds: float

    def load(self, base: Base) -> None:
        """Loads the weights; any exception means that this base cannot be served here."""
        ...

    def add_adapter(self, name: str, directory: Path) -> None:
        """Makes an adapter usable; loading it twice is no error. Raises AdapterUnusable."""
        ...

    def submit(self, request: ChatRequest | EmbeddingRequest) -> None:
        """Queues a request. Raises GridlineError for one that can never run."""
        ...

    def step(self) -> list[Result]:
        """Does a bounded piece of work and returns what it finished."""
        ...

    def abort(self) -> None:
        """Drops every request that is not finished; none of them gives a result any more."""
        ...

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...


def guarded(line: str, make: Callable[[], Result]) -> Result:
    """What `make` returns; what goes wrong in it, whatever that is, ends this one line."""
    try:
        return make()
    except GridlineError as refusal:
        return Refused(id=line, error=refusal)
    except Exception as error:  # noqa: BLE001 - no line ends another
        logger.warning("a line failed: %s", type(error).__name__)
        return Refused(id=line, error=EngineFailed("The engine could not finish this line."))


def window_exceeded(*, prompt_tokens: int, window_tokens: int) -> GridlineError:
    """The refusal of a prompt that leaves no room for an answer."""
    return EngineRefusal(
        f"The prompt has {prompt_tokens} tokens; the model's context holds {window_tokens}, "
        "and an answer needs at least one. Shorten the messages.",
        param="messages",
        code="context_length_exceeded",
    )


def text_too_long(*, letters: int, window_tokens: int, param: str) -> GridlineError:
    """The refusal of a text so long that its tokens need not be counted."""
    return EngineRefusal(
        f"'{param}' has {letters} letters of text; the model's context holds {window_tokens} "
        "tokens, which are never so many. Shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def input_too_long(*, tokens: int, window_tokens: int) -> GridlineError:
    """The refusal of a text that an embedding model cannot take whole: it is never cut."""
    return EngineRefusal(
        f"An input has {tokens} tokens; this model takes at most {window_tokens} for each. "
        "Split the text.",
        param="input",
        code="context_length_exceeded",
    )


class EngineRefusal(GridlineError):
    """A request that this base or engine cannot run; its line says why."""
