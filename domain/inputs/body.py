"""JSON bodies of creates as strict models, and the one place that words their refusals.

`job_create`, `batch_create` and the upload declare what they take as a `Body`; `read_body` reads it
and turns whatever pydantic found into the refusal that a client sees, with the field's path in
`param`. No model words a refusal by itself, and no refusal quotes a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from domain.errors import InvalidRequest

_SAID = "said"
_NOT_OFFERED = ("extra_forbidden", "none_required")


class Body(BaseModel):
    """An object of a body. An explicit null of a field that it has is the field's absence; a field
    that it has not is refused by name, null or not. A field of the type None is one of OpenAI's
    that is not offered, so that its null is an absence too. Booleans are no numbers, and nothing is
    converted. Every other field says what it must be (`said`)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absence(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        return {n: value for n, value in given.items() if value is not None or n not in fields}


B = TypeVar("B", bound=Body)


def read_body(
    model: type[B], given: object, *, at: str = "", hint: str = "", context: object = None
) -> B:
    """`given` as that model. Raises InvalidRequest for the first thing that is wrong, unknown names
    before all else. `at` is the path of `given` in the request's body, `hint` what the refusal of
    an unknown name adds, `context` what the model's validators look at besides."""
    try:
        return model.model_validate(given, context=context)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise _refusal(min(faults, key=_rank), at=at, hint=hint) from None


def said(sentence: str | Callable[[Any], str]) -> WrapValidator:
    """What a field must be, in one sentence; `{path}` stands for the field's path. A function makes
    the sentence of the context."""

    def check(
        value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo[Any]
    ) -> Any:
        try:
            return handler(value)
        except ValidationError:
            words = sentence if isinstance(sentence, str) else sentence(info.context)
            raise refused(words) from None

    return WrapValidator(check)


def refused(sentence: str) -> PydanticCustomError:
    """For validators of a `Body` to raise: the refusal, with `{path}` for the field's path."""
    return PydanticCustomError(_SAID, "{sentence}", {"sentence": sentence})


def _rank(fault: ErrorDetails) -> int:
    return 0 if fault["type"] in _NOT_OFFERED else 1


def _refusal(fault: ErrorDetails, *, at: str, hint: str) -> InvalidRequest:
    path = ".".join([*([at] if at else []), *map(str, fault["loc"])])
    return InvalidRequest(_words(fault, path, hint), param=path if at or fault["loc"] else None)


def _words(fault: ErrorDetails, path: str, hint: str) -> str:
    match fault["type"]:
        case "extra_forbidden" | "none_required":
            return f"Unsupported parameter: {path}{hint}"
        case "missing":
            return f"Missing required parameter: {path}"
        case "model_type":
            return f"{path or 'The body'} must be {'an' if path else 'a JSON'} object."
        case kind:
            assert kind == _SAID, f"{path} does not say what it must be"
            sentence: str = fault["ctx"]["sentence"]
            return sentence.replace("{path}", path)


def _text(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise refused("{path} must be a non-empty string.")
    return value


IS_TEXT = BeforeValidator(_text)
"""Asked first of a field whose values are words."""
Text = Annotated[str, IS_TEXT]
Object = Annotated[dict[str, Any], said("{path} must be an object.")]
