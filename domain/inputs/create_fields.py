"""Fields that several creates have: metadata, and how long a file is kept.

Declared once, for the bodies of jobs and batches and for the upload's form.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from domain.inputs.body import Body, refused, said
from domain.limits import (
    EXPIRES_AFTER_SECONDS_MAX,
    EXPIRES_AFTER_SECONDS_MIN,
    METADATA_KEY_CHARACTERS_MAX,
    METADATA_PAIRS_MAX,
    METADATA_VALUE_CHARACTERS_MAX,
)


def _metadata(value: object) -> object:
    """The refusals name the field alone: its keys are somebody's words."""
    if not isinstance(value, dict) or len(value) > METADATA_PAIRS_MAX:
        raise refused(f"{{path}} must be an object of at most {METADATA_PAIRS_MAX} pairs.")
    for key, text in value.items():
        if not isinstance(text, str):
            raise refused("{path} values must be strings.")
        if len(key) > METADATA_KEY_CHARACTERS_MAX or len(text) > METADATA_VALUE_CHARACTERS_MAX:
            raise refused(
                f"{{path}} keys are at most {METADATA_KEY_CHARACTERS_MAX} characters, values at "
                f"most {METADATA_VALUE_CHARACTERS_MAX}."
            )
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]
"""At most 16 pairs of strings."""


class ExpiresAfter(Body):
    """`{"anchor": "created_at", "seconds": …}`: from an hour to thirty days."""

    anchor: Annotated[Literal["created_at"], said('{path} must be "created_at".')]
    seconds: Annotated[
        int,
        Field(ge=EXPIRES_AFTER_SECONDS_MIN, le=EXPIRES_AFTER_SECONDS_MAX),
        said(
            f"{{path}} must be an integer from {EXPIRES_AFTER_SECONDS_MIN} to "
            f"{EXPIRES_AFTER_SECONDS_MAX}."
        ),
    ]

    @model_validator(mode="before")
    @classmethod
    def _has_both(cls, given: object) -> object:
        if not isinstance(given, dict) or given.keys() != cls.model_fields.keys():
            raise refused("{path} must have anchor and seconds, nothing else.")
        return given
