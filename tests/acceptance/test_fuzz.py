"""Requests that nobody would write, made from OpenAI's own document: no answer may be a server
error, and each must have the promised content type and shape.

Schemathesis makes the requests, good and bad, the same ones in every run. In the document ids are
free text; here they are those that the account has, or all good requests would end at 404.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckContext, not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode
from schemathesis.generation.case import Case
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from domain.ledger.account import AccountLimits
from tests.acceptance import strict
from tests.acceptance.conftest import SECONDS_MAX, Served
from tests.acceptance.stand_in_worker import BASE, finish, run_batch, succeed_training
from tests.acceptance.training_files import chat_file, preference_file

EXAMPLES = 25
"""For each operation, besides the document's edge cases."""
EDGE_CASES_MAX = 120
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]

OPERATIONS = [
    ("POST", "/files"),
    ("GET", "/files"),
    ("GET", "/files/{file_id}"),
    ("GET", "/files/{file_id}/content"),
    ("DELETE", "/files/{file_id}"),
    ("POST", "/fine_tuning/jobs"),
    ("GET", "/fine_tuning/jobs"),
    ("GET", "/fine_tuning/jobs/{fine_tuning_job_id}"),
    ("POST", "/fine_tuning/jobs/{fine_tuning_job_id}/cancel"),
    ("POST", "/fine_tuning/jobs/{fine_tuning_job_id}/pause"),
    ("POST", "/fine_tuning/jobs/{fine_tuning_job_id}/resume"),
    ("GET", "/fine_tuning/jobs/{fine_tuning_job_id}/events"),
    ("GET", "/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints"),
    ("POST", "/batches"),
    ("GET", "/batches"),
    ("GET", "/batches/{batch_id}"),
    ("POST", "/batches/{batch_id}/cancel"),
    ("GET", "/models"),
    ("GET", "/models/{model}"),
    ("DELETE", "/models/{model}"),
]


CURSORS = {
    "/files": "files",
    "/fine_tuning/jobs": "jobs",
    "/batches": "batches",
}
"""Which of `Owned`'s ids are a list's cursors."""
METHODS = {
    "supervised": "FineTuneSupervisedHyperparameters",
    "dpo": "FineTuneDPOHyperparameters",
}
"""A method's settings, by their name in OpenAI's document."""
NUL = "\0"
"""PostgreSQL keeps no text with it, so each way in must refuse it; by chance it comes rarely."""
METADATA = {
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"type": "string", "maxLength": 64},
    "additionalProperties": {"anyOf": [{"type": "string", "maxLength": 512}, {"enum": [NUL]}]},
}
REFUSAL = {
    "description": "A refusal",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
}


@dataclass(frozen=True, slots=True)
class Owned:
    """The ids of what an account has."""

    training_files: list[str]
    batch_files: list[str]
    jobs: list[str]
    batches: list[str]
    models: list[str]

    @property
    def files(self) -> list[str]:
        return self.training_files + self.batch_files


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_request_is_answered_with_a_server_error_or_in_another_shape(
    served: Served, method: str, path: str
) -> None:
    roomy = AccountLimits(open_fine_tunes=10_000, open_batches=10_000)
    tenant = served.api.new_tenant(credit_usd=10_000, limits=roomy)
    served = replace(served, tenant=tenant)
    schema = schemathesis.openapi.from_dict(_document(_owned(served)))
    operation = schema[path][method]
    with requests.Session() as session:

        def check(case: Case) -> None:
            case.call_and_validate(
                base_url=served.base_url,
                session=session,
                headers={"authorization": f"Bearer {tenant.key}"},
                timeout=SECONDS_MAX,
                checks=[
                    not_a_server_error,
                    content_type_conformance,
                    response_schema_conformance,
                    _judged,
                ],
            )

        for case in _edge_cases(operation):
            check(case)
        _fuzz(operation, check)


def _edge_cases(operation: APIOperation) -> Iterator[Case]:
    """Each bound and type of the document, kept and broken."""
    cases = operation.schema.iter_coverage_cases(
        operation,
        generation_modes=MODES,
        generation_config=operation.schema.config.generation_for(operation=operation),
    )
    return islice(cases, EDGE_CASES_MAX)


def _fuzz(operation: APIOperation, check: Any) -> None:
    cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in MODES)

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def fuzz(case: Case) -> None:
        check(case)

    fuzz()


def _judged(_: CheckContext, response: Response, case: Case) -> None:
    strict.check(
        method=str(response.request.method),
        path=response.request.path_url.partition("?")[0],
        status=response.status_code,
        headers={name: values[0] for name, values in response.headers.items()},
        body=response.content,
    )


def _owned(served: Served) -> Owned:
    """One of everything, in more than one state."""
    client = served.openai()
    chats = client.files.create(file=("t.jsonl", chat_file()), purpose="fine-tune").id
    pairs = client.files.create(file=("p.jsonl", preference_file()), purpose="fine-tune").id
    lines = client.files.create(file=b"{}\n" * 3, purpose="batch").id
    done, waiting = (
        client.fine_tuning.jobs.create(model=BASE, training_file=chats).id for _ in range(2)
    )
    succeed_training(served, done)
    model = client.fine_tuning.jobs.retrieve(done).fine_tuned_model
    assert model is not None
    ended, open_still = (
        client.batches.create(
            input_file_id=lines, endpoint="/v1/chat/completions", completion_window="24h"
        ).id
        for _ in range(2)
    )
    run_batch(served, ended, requests=3)
    finish(served, ended, output=b"{}\n{}\n", errors=b"{}\n")
    return Owned(
        training_files=[chats, pairs],
        batch_files=[lines],
        jobs=[done, waiting],
        batches=[ended, open_still],
        models=[BASE, model],
    )


def _document(owned: Owned) -> dict[str, Any]:
    """The operations that the product has, each with the refusals' shape, narrowed to what the
    product takes: good requests are then answered with 200 and bad ones are near it."""
    whole = strict.specification()
    paths: dict[str, Any] = {}
    for method, path in OPERATIONS:
        operation = copy.deepcopy(whole["paths"][path][method.lower()])
        operation["responses"]["default"] = REFUSAL
        for parameter in operation.get("parameters", []):
            parameter["schema"] = _narrowed(owned, path, parameter["name"], parameter["schema"])
        paths.setdefault(path, {})[method.lower()] = operation
    # OpenAI's document says JSON, its servers send bytes.
    paths["/files/{file_id}/content"]["get"]["responses"]["200"]["content"] = {
        "application/octet-stream": {}
    }
    schemas = copy.deepcopy(whole["components"]["schemas"])
    _narrow_bodies(schemas, owned)
    return {
        "openapi": whole["openapi"],
        "info": whole["info"],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _narrowed(owned: Owned, path: str, parameter: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a path's or query's parameter."""
    match parameter:
        case "file_id":
            return _one_of(owned.files)
        case "fine_tuning_job_id":
            return _one_of(owned.jobs)
        case "batch_id":
            return _one_of(owned.batches)
        case "model":
            return _one_of(owned.models)
        case "after" if path in CURSORS:
            return _one_of([*getattr(owned, CURSORS[path]), NUL])
        case "purpose":
            return _one_of(["batch", "fine-tune", "batch_output", NUL])
        case "limit":
            return {"type": "integer", "minimum": 0, "maximum": 100}
        case _:
            return schema


def _narrow_bodies(schemas: dict[str, Any], owned: Owned) -> None:
    """Changes the schemas of what is sent, and none that an answer is made of too."""
    schemas["CreateFileRequest"]["properties"]["purpose"] = _one_of(["batch", "fine-tune"])
    job = schemas["CreateFineTuningJobRequest"]
    job["additionalProperties"] = False
    job["properties"] |= {
        "model": _one_of([BASE]),
        "training_file": _one_of(owned.training_files),
        "validation_file": _one_of(owned.training_files),
        "integrations": {"type": "array", "maxItems": 0},
        "metadata": METADATA,
        "method": {"anyOf": [_method(schemas, name) for name in METHODS]},
    }
    del job["properties"]["hyperparameters"]  # refused beside `method`
    batch = schemas["CreateBatchRequest"]
    batch["additionalProperties"] = False
    batch["properties"] |= {
        "input_file_id": _one_of(owned.batch_files),
        "endpoint": _one_of(["/v1/chat/completions", "/v1/embeddings"]),
        "metadata": METADATA,
    }


def _method(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    of_method = {"hyperparameters": schemas[METHODS[name]] | {"additionalProperties": False}}
    return {
        "type": "object",
        "properties": {
            "type": _one_of([name]),
            name: {"type": "object", "properties": of_method, "additionalProperties": False},
        },
        "required": ["type"],
        "additionalProperties": False,
    }


def _one_of(values: list[str]) -> dict[str, Any]:
    return {"type": "string", "enum": values}
