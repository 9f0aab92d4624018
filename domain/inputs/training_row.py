"""One line of a fine-tune file, checked and made plain: the one reader of training rows.

A chat row is a conversation, a preference row a prompt with two answers. Called by the upload's
check, by create's template check and by the runner that trains, so that what was checked is what
trains. What the product does not offer is refused by name; null of any field of OpenAI's, and an
empty list or object where that means none, is its absence. No message of a refusal ever holds text
of the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from domain.catalog import Role
from domain.errors import InvalidFile
from domain.inputs.jsonl import Line, array_hint
from domain.inputs.strict_json import InvalidJson, parse_json
from domain.limits import MIB, ROW_MESSAGES_MAX, TRAINING_LINE_BYTES_MAX

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_EMPTY: dict[str, object] = {
    "annotations": [],
    "content_parts": [],
    "functions": [],
    "logit_bias": {},
    "metadata": {},
    "stop": [],
    "tool_calls": [],
    "tools": [],
}
"""What says "none" in a field beside null."""
_ROW_FIELDS = frozenset(
    (
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "modalities",
        "model",
        "moderation",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    )
)
"""OpenAI's fields of a chat request besides its messages: clients store requests as rows."""
_MESSAGE_FIELDS = frozenset(
    (
        "annotations",
        "audio",
        "content_parts",
        "function_call",
        "id",
        "name",
        "parsed",
        "reasoning_content",
        "refusal",
        "tool_call_id",
        "tool_calls",
        "weight",
    )
)
"""OpenAI's fields of a message besides role and content, and `reasoning_content`, which servers of
open models answer: clients store what an SDK dumps of an answer."""
_SAFE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")


_PLAIN = {"role", "content"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `path` says where it stands in the row; `trained` is false for prompts and for
    weight 0."""

    role: Role
    content: str
    trained: bool
    path: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation with at least one trained assistant message. `line` counts from 1, blank lines
    included."""

    line: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt that ends with the user, and two different answers to it."""

    line: int
    prompt: tuple[Message, ...]
    preferred: Message
    non_preferred: Message

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of it: the prompt once, and both answers."""
        return (*self.prompt, self.preferred, self.non_preferred)


TrainingRow = ChatRow | PreferenceRow


def read_row(line: Line) -> TrainingRow:
    """Reads one line. Raises InvalidFile (`line_too_large`, `invalid_json`, `invalid_messages`)
    with its number."""
    number = line.number
    if line.content is None:
        raise InvalidFile(
            f"Line {number} is larger than {TRAINING_LINE_BYTES_MAX // MIB} MiB.",
            code="line_too_large",
            line=number,
        )
    try:
        value = parse_json(line.content)
    except InvalidJson as error:
        raise InvalidFile(
            f"Line {number} is not valid JSON: {error.message}"
            f"{array_hint(line.content, line=number)}.",
            code="invalid_json",
            line=number,
        ) from None
    if not isinstance(value, dict):
        raise InvalidFile(
            f"Line {number}: each line must be a JSON object with a messages list"
            f"{array_hint(line.content, line=number)}.",
            code="invalid_messages",
            line=number,
        )
    return _RowReader(number).row(value)


class _RowReader:
    """Knows the line, so that every refusal names it."""

    def __init__(self, line: int) -> None:
        self._line = line

    def row(self, value: dict[str, Any]) -> TrainingRow:
        if "input" in value or "preferred_output" in value or "non_preferred_output" in value:
            return self._preference_row(value)
        return self._chat_row(value)

    def _chat_row(self, value: dict[str, Any]) -> ChatRow:
        self._refuse_others(value, known=("messages",), optional=_ROW_FIELDS)
        messages = self._messages(value, "messages", prompt=False)
        if not any(message.trained for message in messages):
            self._refuse("messages needs at least one assistant message to train on")
        return ChatRow(self._line, messages)

    def _preference_row(self, value: dict[str, Any]) -> PreferenceRow:
        known = ("input", "preferred_output", "non_preferred_output")
        self._refuse_others(value, known=known, optional=_ROW_FIELDS)
        given = value.get("input")
        if not isinstance(given, dict):
            self._refuse("input must be an object with a messages list")
        self._refuse_others(given, known=("messages",), optional=_ROW_FIELDS, at="input.")
        prompt = self._messages(given, "input.messages", prompt=True)
        if prompt[-1].role != "user":
            self._refuse("input.messages must end with a user message")
        preferred = self._answer(value, "preferred_output")
        non_preferred = self._answer(value, "non_preferred_output")
        if preferred.content == non_preferred.content:
            self._refuse("preferred_output and non_preferred_output must differ")
        return PreferenceRow(self._line, prompt, preferred, non_preferred)

    def _messages(self, holder: dict[str, Any], path: str, *, prompt: bool) -> tuple[Message, ...]:
        given = holder.get("messages")
        if given is None:
            self._refuse(f"a {path} list is missing")
        if not isinstance(given, list) or not given:
            self._refuse(f"{path} must be a list of at least one message")
        if len(given) > ROW_MESSAGES_MAX:
            self._refuse(f"{path} has more than {ROW_MESSAGES_MAX:,} messages")
        return tuple(
            self._message(each, f"{path}[{index}]", first=index == 0, prompt=prompt)
            for index, each in enumerate(given)
        )

    def _answer(self, value: dict[str, Any], path: str) -> Message:
        given = value.get(path)
        if not isinstance(given, list) or len(given) != 1:
            self._refuse(f"{path} must be a list of one assistant message")
        message = self._message(given[0], f"{path}[0]", first=False, prompt=False)
        if message.role != "assistant":
            self._refuse(f"{path}[0].role must be assistant")
        if not message.trained:
            self._refuse(f"{path}[0].weight must be 1 or absent")
        return message

    def _message(self, given: object, path: str, *, first: bool, prompt: bool) -> Message:
        if not isinstance(given, dict):
            self._refuse(f"{path} must be an object with role and content")
        role = self._role(given, path)
        if role == "system" and not first:
            self._refuse(f"{path}: a system message may only be the first message")
        if given.keys() != _PLAIN:
            self._refuse_message_fields(given, path, role=role)
        return Message(
            role=role,
            content=self._content(given, path),
            trained=role == "assistant" and not prompt and self._weight(given, path) == 1,
            path=path,
        )

    def _role(self, given: dict[str, Any], path: str) -> Role:
        role = given.get("role")
        if role is None:
            self._refuse(f"{path}.role is missing")
        if not isinstance(role, str) or role not in _ROLES:
            named = f" {role}" if isinstance(role, str) and _SAFE_NAME.fullmatch(role) else ""
            self._refuse(
                f"{path}: the role{named} is not supported; roles are system, user and assistant"
            )
        return _ROLES[role]

    def _content(self, given: dict[str, Any], path: str) -> str:
        content = given.get("content")
        if isinstance(content, list):
            self._refuse(f"{path}.content: content parts are not offered; content must be a string")
        if not isinstance(content, str) or not content:
            self._refuse(f"{path}.content must be a non-empty string")
        return content

    def _weight(self, given: dict[str, Any], path: str) -> int:
        weight = given.get("weight")
        if weight is None:
            return 1
        if isinstance(weight, bool) or not isinstance(weight, int) or weight not in (0, 1):
            self._refuse(f"{path}.weight must be 0 or 1")
        return weight

    def _refuse_message_fields(self, given: dict[str, Any], path: str, *, role: Role) -> None:
        self._refuse_others(
            given,
            known=("role", "content", "weight") if role == "assistant" else ("role", "content"),
            optional=_MESSAGE_FIELDS,
            at=f"{path}.",
        )

    def _refuse_others(
        self,
        given: dict[str, Any],
        *,
        known: tuple[str, ...],
        optional: frozenset[str],
        at: str = "",
    ) -> None:
        for name, value in given.items():
            if name in known or (name in optional and _says_none(name, value)):
                continue
            if not _SAFE_NAME.fullmatch(name):
                self._refuse(f"{at.rstrip('.') or 'the row'} holds an unknown field")
            missing = f", and a {known[0]} list is missing" if known[0] not in given else ""
            self._refuse(f"unsupported field: {at}{name}{missing}")

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidFile(f"Line {self._line}: {reason}.", code="invalid_messages", line=self._line)


def _says_none(name: str, value: object) -> bool:
    return value is None or (name in _EMPTY and value == _EMPTY[name])
