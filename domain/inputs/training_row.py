"""One line of a fine-tune file, checked and made plain.

A chat row is a conversation, a preference row a prompt with two answers. Called by the upload's
check, by create's template check and by whoever reads rows afterwards. What the product does not
offer is refused by name; an explicit null of an optional OpenAI field is its absence. No message of
a refusal ever holds text of the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from domain.catalog import Role
from domain.errors import InvalidFile
from domain.inputs.strict_json import InvalidJson, parse_json
from domain.limits import ROW_MESSAGES_MAX

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
_OPTIONAL_ROW_FIELDS = ("tools", "functions", "parallel_tool_calls")
_OPTIONAL_MESSAGE_FIELDS = (
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "audio",
    "weight",
)
_SAFE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")


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
    """A conversation with at least one trained assistant message."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A prompt that ends with the user, and two different answers to it."""

    prompt: tuple[Message, ...]
    preferred: Message
    non_preferred: Message

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of it: the prompt once, and both answers."""
        return (*self.prompt, self.preferred, self.non_preferred)


TrainingRow = ChatRow | PreferenceRow


def parse_row(raw: bytes, *, line: int) -> TrainingRow:
    """Reads one line. Raises InvalidFile (`invalid_json`, `invalid_messages`) with the line."""
    try:
        value = parse_json(raw)
    except InvalidJson as error:
        raise InvalidFile(
            f"Line {line} is not valid JSON: {error.message}.", code="invalid_json", line=line
        ) from None
    return _RowReader(line).row(value)


class _RowReader:
    """Knows the line, so that every refusal names it."""

    def __init__(self, line: int) -> None:
        self._line = line

    def row(self, value: object) -> TrainingRow:
        if not isinstance(value, dict):
            self._refuse("each line must be a JSON object with a messages list")
        if "input" in value or "preferred_output" in value or "non_preferred_output" in value:
            return self._preference_row(value)
        return self._chat_row(value)

    def _chat_row(self, value: dict[str, Any]) -> ChatRow:
        self._refuse_others(value, known=("messages",), optional=_OPTIONAL_ROW_FIELDS)
        messages = self._messages(value, "messages", prompt=False)
        if not any(message.trained for message in messages):
            self._refuse("messages needs at least one assistant message to train on")
        return ChatRow(messages)

    def _preference_row(self, value: dict[str, Any]) -> PreferenceRow:
        known = ("input", "preferred_output", "non_preferred_output")
        self._refuse_others(value, known=known, optional=_OPTIONAL_ROW_FIELDS)
        given = value.get("input")
        if not isinstance(given, dict):
            self._refuse("input must be an object with a messages list")
        self._refuse_others(given, known=("messages",), optional=_OPTIONAL_ROW_FIELDS, at="input.")
        prompt = self._messages(given, "input.messages", prompt=True)
        if prompt[-1].role != "user":
            self._refuse("input.messages must end with a user message")
        preferred = self._answer(value, "preferred_output")
        non_preferred = self._answer(value, "non_preferred_output")
        if preferred.content == non_preferred.content:
            self._refuse("preferred_output and non_preferred_output must differ")
        return PreferenceRow(prompt, preferred, non_preferred)

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
        if len(given) > 2:
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
            optional=_OPTIONAL_MESSAGE_FIELDS,
            at=f"{path}.",
        )

    def _refuse_others(
        self,
        given: dict[str, Any],
        *,
        known: tuple[str, ...],
        optional: tuple[str, ...],
        at: str = "",
    ) -> None:
        for name, value in given.items():
            if name in known or (value is None and name in optional):
                continue
            if not _SAFE_NAME.fullmatch(name):
                self._refuse(f"{at.rstrip('.') or 'the row'} holds an unknown field")
            missing = f", and a {known[0]} list is missing" if known[0] not in given else ""
            self._refuse(f"unsupported field: {at}{name}{missing}")

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidFile(f"Line {self._line}: {reason}.", code="invalid_messages", line=self._line)
