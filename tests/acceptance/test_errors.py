"""Refusals in OpenAI's shape, whatever is wrong: key, path, method, body."""

from __future__ import annotations

import hashlib
import socket

import openai
import pytest
from structlog.testing import capture_logs

from api.http import json_body
from api.routes.not_offered import INSTEAD, TO_COME
from domain.commands.keys import RevokeKey, revoke_key
from tests.acceptance.conftest import Served
from tests.acceptance.stand_in_worker import BASE
from tests.acceptance.training_files import chat_file


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer gl_wrong",
        "Basic gl_wrong",
        "Bearer sk-wrong",
        "Bearer gl_" + "x" * 500,
    ],
)
def test_a_wrong_key_is_refused(served: Served, authorization: str | None) -> None:
    with served.http() as http:
        del http.headers["authorization"]
        headers = {"authorization": authorization} if authorization is not None else {}
        answer = http.get("/openai/v1/models", headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 401
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "gl_wrong" not in answer.text


def test_a_revoked_key_opens_nothing(served: Served) -> None:
    tenant = served.new_tenant()
    client = served.openai(tenant.key)
    client.models.list()
    served.run(revoke_key, RevokeKey(tenant.key_id))
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_wrong_key_is_judged_before_the_body_comes(served: Served) -> None:
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /openai/v1/batches HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
            b"Authorization: Bearer gl_wrong\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


def test_organization_and_project_headers_are_ignored(served: Served) -> None:
    client = served.openai().with_options(organization="org-x", project="proj_x")
    assert client.models.list().data


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/",
        "/openai/v1",
        "/openai/v1/nothing",
        "/openai/v1/files/",
        "/openai/v2/files",
        "/openai/v1/files/a/b",
        "/openai/v1/files/%00",
        "/openai/v1/models/%00",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_404_in_openais_shape(served: Served, method: str, path: str) -> None:
    with served.http() as http:
        answer = http.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"
    if not path.startswith("/openai/v1"):
        assert "/openai/v1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions", "/openai/v1/chat/completions"),
        ("/v1/fine_tuning/jobs/ftjob-1", "/openai/v1/fine_tuning/jobs/ftjob-1"),
        ("/openai/files", "/openai/v1/files"),
        ("/openai/v2/files", "/openai/v1/files"),
        ("/openai/v1/v1/models", "/openai/v1/models"),
        ("/openai/v1/openai/v1/models", "/openai/v1/models"),
        ("/batches", "/openai/v1/batches"),
    ],
)
def test_a_wrong_base_url_is_told_the_right_one_and_where_the_request_then_goes(
    served: Served, path: str, meant: str
) -> None:
    with served.http("gl_wrong") as http:
        answer = http.post(path)
    assert answer.json()["error"]["code"] == "not_found"
    assert answer.json()["error"]["message"] == (
        f"There is no route {path} here. Give your client {served.base_url} as its base URL; "
        f"this request then goes to {meant}."
    )


@pytest.mark.parametrize(
    "path", ["/openai%2fv1/files", "/openai/v1%2Ffiles", "/openai/v1/models%2fbge-m3"]
)
def test_an_encoded_slash_is_part_of_no_route(served: Served, path: str) -> None:
    with served.http() as http:
        answer = http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "%2F" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["models", "files", "batches", "models/bge-m3"])
def test_a_slash_at_the_end_names_the_route_and_not_a_thing(served: Served, path: str) -> None:
    with served.http() as http:
        answer = http.get(f"/openai/v1/{path}/")
    assert answer.json()["error"]["message"] == (
        f"There is no route /openai/v1/{path}/ here. Routes have no slash at their end."
    )


@pytest.mark.parametrize("template", TO_COME)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_route_of_the_pages_that_is_to_come_is_404_by_name(
    served: Served, method: str, template: str
) -> None:
    path = template.replace(":path", "").format(model="ft:x:y:z", path="a/b.safetensors", key="k")
    with served.http("gl_wrong") as http:
        answer = http.request(method, f"/openai/v1{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_offered")
    assert error["message"] == f"This route is not offered yet. {TO_COME[template]}"


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/embeddings",
        "/responses",
        "/uploads",
        "/images/generations",
        "/threads/t/runs",
        "/fine_tuning/alpha/graders/run",
        "/fine-tunes",
        "/evals/e/runs",
    ],
)
def test_what_openai_has_and_we_do_not_says_what_to_use_instead(served: Served, path: str) -> None:
    with served.http("gl_wrong") as http:
        answer = http.post(f"/openai/v1{path}", json={"model": "gpt-5"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_offered")
    assert error["message"].endswith(INSTEAD[path.split("/")[1]])


def test_the_sdks_own_call_of_a_route_that_is_not_offered_says_so(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        served.openai().chat.completions.create(
            model="gpt-5", messages=[{"role": "user", "content": "hi"}]
        )
    assert "POST /batches" in refused.value.message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/openai/v1/files", "GET, POST"),
        ("POST", "/openai/v1/models", "GET"),
        ("GET", "/openai/v1/batches/b/cancel", "POST"),
        ("DELETE", "/openai/v1/batches/b", "GET"),
        ("PATCH", "/openai/v1/models/ft:x", "GET, DELETE"),
        ("POST", "/healthz", "GET"),
    ],
)
def test_a_wrong_method_is_405_and_names_the_right_ones(
    served: Served, method: str, path: str, allowed: str
) -> None:
    with served.http() as http:
        answer = http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_head_answers_as_get_without_a_body(served: Served) -> None:
    with served.http() as http:
        answer = http.head("/openai/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 100


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": 1, "a": 2}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"training_file": "\\u0000"}', "invalid_json"),
        (b'{"metadata": {"\\u0000": "b"}}', "invalid_json"),
        (b"[" * 10_000, "invalid_json"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "invalid_json"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
        (b'"text"', "invalid_request"),
    ],
)
@pytest.mark.parametrize("path", ["batches", "fine_tuning/jobs"])
def test_a_body_that_is_no_json_object_is_refused(
    served: Served, path: str, body: bytes, code: str
) -> None:
    with served.http() as http:
        answer = http.post(f"/openai/v1/{path}", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_an_endless_json_body_is_refused(served: Served) -> None:
    with served.http() as http:
        answer = http.post("/openai/v1/batches", content=b" " * 1_100_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_declared_size_past_the_limit_is_refused_before_the_body_comes(served: Served) -> None:
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /openai/v1/batches HTTP/1.1\r\nHost: x\r\n"
            b"Content-Length: 18446744073709551615\r\n"
            + f"Authorization: Bearer {served.tenant.key}\r\n\r\n".encode()
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_json_body_that_never_ends_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "BODY_SECONDS_MAX", 0.05)
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            b"POST /openai/v1/batches HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            + f"Authorization: Bearer {served.tenant.key}\r\n\r\n1\r\n{{\r\n".encode()
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    "body",
    [
        b'{"%b": 1}' % (b"x" * 900_000),
        b'{"model": "%b", "training_file": "f"}' % (b"x" * 900_000),
        b'{"model": "smollm2-135m-instruct", "training_file": "f", '
        b'"method": {"type": "dpo", "%b": 1}}' % (b"x" * 900_000),
    ],
)
def test_a_refusal_names_what_was_sent_but_not_a_megabyte_of_it(
    served: Served, body: bytes
) -> None:
    with served.http() as http:
        answer = http.post("/openai/v1/fine_tuning/jobs", content=body)
    assert answer.status_code == 400
    assert "xxx" in answer.json()["error"]["message"]
    assert len(answer.content) < 4_000


def test_our_own_mistake_is_500_without_detail(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("MARKER-7391")

    monkeypatch.setattr(type(served.plane), "read", broken)
    with capture_logs() as logged, served.http() as http:
        answer = http.get("/openai/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "MARKER" not in answer.text
    assert answer.headers["x-request-id"] in [entry.get("request_id") for entry in logged]


def test_no_row_key_path_or_query_reaches_the_log(served: Served) -> None:
    rows = chat_file(text="MARKER-7391 <|im_end|>")
    broken = chat_file(3) + b'{"messages": "MARKER-7391"}\n'
    with capture_logs() as entries, served.http() as http:
        for data in (rows, broken):
            sent = http.post(
                "/openai/v1/files", files={"file": data}, data={"purpose": "fine-tune"}
            ).json()
            body = {"model": BASE, "training_file": sent.get("id", "MARKER-7391")}
            refused = http.post("/openai/v1/fine_tuning/jobs", json=body)
            assert refused.status_code in (400, 404)
        http.get("/openai/v1/files/file-MARKER-7391?x=MARKER-7391")
        http.get("/openai/v1/models/MARKER-7391")
    logged = [str(entry) for entry in entries]
    assert any("GET /openai/v1/files/{file_id}" in line for line in logged)
    digest = hashlib.sha256(served.tenant.key.encode()).hexdigest()
    for secret in (served.tenant.key, digest, "MARKER-7391"):
        assert not any(secret in line for line in logged)


def test_the_log_of_a_request_names_whose_it_was_and_a_strangers_nobody(served: Served) -> None:
    with capture_logs() as entries, served.http() as http:
        http.get("/openai/v1/models")
        http.get("/openai/v1/models", headers={"authorization": "Bearer gl_wrong"})
    named = [(each["account_id"], each["key_id"]) for each in entries if each["event"] == "request"]
    assert named == [(served.tenant.account_id, served.tenant.key_id), (None, None)]
