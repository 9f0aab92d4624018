"""Judges every answer of the API as strictly as OpenAI's own types and specification allow.

`check` is given each response by the test client's transport hook. It validates the body with
pydantic in strict mode over the official SDK's classes, refuses fields that those do not declare
(but for ours), and validates it against OpenAI's OpenAPI document. That document is wrong in known
places; `transformed` corrects those and nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from openai.types import Batch, FileDeleted, FileObject, Model, ModelDeleted
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

BASE = "/openai/v1"
SPECIFICATION = Path(__file__).with_name("openai-subset.yaml")
SPECIFICATION_URI = "urn:openai"

OURS = {"gridline", "adapter", "learning_rate", "lora_rank", "lora_alpha", "max_seq_length"}
"""Fields beyond OpenAI's that our objects may have."""
ERROR_EXTRAS = {"limit"}
PAGE_FIELDS = {"object", "data", "has_more", "first_id", "last_id"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a route answers: the SDK's class of the object or of the list's items, and the name of
    the whole body's schema."""

    method: str
    path: str
    item: type[BaseModel]
    schema: str
    is_list: bool = False


ID = "[^/]+"
JOBS = "/fine_tuning/jobs"
SHAPES = [
    Shape("POST", "/files", FileObject, "OpenAIFile"),
    Shape("GET", "/files", FileObject, "ListFilesResponse", is_list=True),
    Shape("GET", f"/files/{ID}", FileObject, "OpenAIFile"),
    Shape("DELETE", f"/files/{ID}", FileDeleted, "DeleteFileResponse"),
    Shape("POST", JOBS, FineTuningJob, "FineTuningJob"),
    Shape("GET", JOBS, FineTuningJob, "ListPaginatedFineTuningJobsResponse", is_list=True),
    Shape("GET", f"{JOBS}/{ID}", FineTuningJob, "FineTuningJob"),
    Shape("POST", f"{JOBS}/{ID}/cancel", FineTuningJob, "FineTuningJob"),
    Shape(
        "GET",
        f"{JOBS}/{ID}/events",
        FineTuningJobEvent,
        "ListFineTuningJobEventsResponse",
        is_list=True,
    ),
    Shape(
        "GET",
        f"{JOBS}/{ID}/checkpoints",
        FineTuningJobCheckpoint,
        "ListFineTuningJobCheckpointsResponse",
        is_list=True,
    ),
    Shape("POST", "/batches", Batch, "Batch"),
    Shape("GET", "/batches", Batch, "ListBatchesResponse", is_list=True),
    Shape("GET", f"/batches/{ID}", Batch, "Batch"),
    Shape("POST", f"/batches/{ID}/cancel", Batch, "Batch"),
    Shape("GET", "/models", Model, "ListModelsResponse", is_list=True),
    Shape("GET", "/models/.+", Model, "Model"),
    Shape("DELETE", "/models/.+", ModelDeleted, "DeleteModelResponse"),
]
NOT_OPENAI = re.compile(rf"{BASE}/gridline/.*|{BASE}/files/{ID}/content")
"""Answers that OpenAI has no shape for."""


def check(*, method: str, path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    """Fails where an answer is not what OpenAI's clients are promised."""
    assert headers.get("x-request-id", "").startswith("req_"), "no request id"
    if method == "HEAD":
        return
    if status >= 400 and path != "/readyz":
        _check_error(headers, body)
        return
    if not path.startswith(BASE) or NOT_OPENAI.fullmatch(path):
        return
    shape = next(
        (each for each in SHAPES if each.method == method and re.fullmatch(BASE + each.path, path)),
        None,
    )
    assert shape is not None, f"no shape is known for {method} {path}"
    assert headers["content-type"] == "application/json"
    value = json.loads(body)
    for item in _items(shape, value):
        _check_item(shape.item, item)
    _check_schema(shape.schema, value)


def _check_error(headers: dict[str, str], body: bytes) -> None:
    assert headers["content-type"] == "application/json"
    value = json.loads(body)
    assert value.keys() == {"error"}
    assert value["error"].keys() - ERROR_EXTRAS == {"message", "type", "param", "code"}
    known = {name: each for name, each in value["error"].items() if name not in ERROR_EXTRAS}
    _check_item(ErrorObject, known)
    _check_schema("ErrorResponse", value)


def _items(shape: Shape, value: dict[str, Any]) -> list[Any]:
    if not shape.is_list:
        return [value]
    if shape.item is Model:
        assert value.keys() == {"object", "data"}
    else:
        assert value.keys() == PAGE_FIELDS
        ids = [item["id"] for item in value["data"]]
        assert (value["first_id"], value["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    items: list[Any] = value["data"]
    return items


def _check_item(cls: type[BaseModel], value: Any) -> None:
    parsed = TypeAdapter(cls).validate_json(json.dumps(value), strict=True)
    undeclared = sorted(_undeclared(parsed, cls.__name__))
    assert not undeclared, f"undeclared fields: {undeclared}"


def _undeclared(value: object, where: str) -> set[str]:
    found: set[str] = set()
    if isinstance(value, BaseModel):
        found |= {f"{where}.{name}" for name in set(value.model_extra or {}) - OURS}
        for name in type(value).model_fields:
            found |= _undeclared(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for each in value:
            found |= _undeclared(each, f"{where}[]")
    return found


def _check_schema(name: str, value: Any) -> None:
    errors = list(_validator(name).iter_errors(value))
    assert not errors, [f"{error.json_path}: {error.message}" for error in errors]


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        {"$ref": f"{SPECIFICATION_URI}#/components/schemas/{name}"}, registry=_registry()
    )


@cache
def specification() -> dict[str, Any]:
    """OpenAI's document, corrected; shared by all who ask, so nobody may change it."""
    document: dict[str, Any] = transformed(yaml.safe_load(SPECIFICATION.read_text()))
    document["paths"]["/evals/{eval_id}/runs/{run_id}/cancel"] = document["paths"].get(
        "/evals/{eval_id}/runs/{run_id}", {}
    )
    for schema, field in (
        ("ListFilesResponse", "first_id"),
        ("ListFilesResponse", "last_id"),
        ("EvalList", "first_id"),
        ("EvalList", "last_id"),
        ("EvalRunList", "first_id"),
        ("EvalRunList", "last_id"),
        ("EvalRunOutputItemList", "first_id"),
        ("EvalRunOutputItemList", "last_id"),
        ("EvalRun", "error"),
        ("EvalRun", "report_url"),
    ):
        properties = document["components"]["schemas"][schema]["properties"]
        properties[field] = _or_null(properties[field])
    sample = document["components"]["schemas"]["EvalRunOutputItem"]["properties"]["sample"]
    sample["properties"]["error"] = _or_null(sample["properties"]["error"])
    return document


@cache
def _registry() -> Registry[Any]:
    resource = Resource.from_contents(specification(), default_specification=DRAFT202012)
    return Registry().with_resource(SPECIFICATION_URI, resource)


def transformed(node: Any) -> Any:
    """The document with its 3.0-style keywords read as they were meant, `oneOf` (whose branches
    overlap) as `anyOf`, and null allowed where a property is not required."""
    if isinstance(node, list):
        return [transformed(each) for each in node]
    if not isinstance(node, dict):
        return node
    out = {name: transformed(each) for name, each in node.items()}
    if isinstance(out.get("exclusiveMinimum"), bool) and out.pop("exclusiveMinimum"):
        out["exclusiveMinimum"] = out.pop("minimum")
    if isinstance(out.get("$recursiveAnchor"), bool):
        del out["$recursiveAnchor"]
    if "oneOf" in out:
        out["anyOf"] = out.pop("oneOf")
    if isinstance(out.get("properties"), dict):
        required = set(out.get("required", ()))
        out["properties"] = {
            name: each if name in required else _or_null(each)
            for name, each in out["properties"].items()
        }
    if out.pop("nullable", False) is True:
        return _or_null(out)
    return out


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
