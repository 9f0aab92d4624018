"""The part of an answer's body that the engine made, as text: chat choices, or embeddings' data.

The engine child writes it, so that the runner's parent passes it on and never reads it. It must
come out as `domain/inputs/result_line.py` writes the rest of the line.
"""

from __future__ import annotations

from collections.abc import Sequence

from domain.inputs.requests.embeddings_body import EncodingFormat
from domain.inputs.result_line import line_text
from gpu_runners.child_pipes import pack_vector, unpack_vector
from gpu_runners.inference.engine import Choice


def choices_text(choices: Sequence[Choice]) -> bytes:
    """The `choices` of a chat completion."""
    listed = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": (
                None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
            ),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(choices)
    ]
    return line_text(listed).encode()


def data_text(vectors: Sequence[list[float]], encoding_format: EncodingFormat) -> bytes:
    """The `data` of an embeddings answer. Numbers are those of float32 in either form."""
    packed = (pack_vector(vector) for vector in vectors)
    listed = [
        {
            "object": "embedding",
            "index": index,
            "embedding": text if encoding_format == "base64" else unpack_vector(text),
        }
        for index, text in enumerate(packed)
    ]
    return line_text(listed).encode()
