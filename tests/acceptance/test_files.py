"""Files over HTTP: uploads as clients really send them, downloads, and their ends."""

from __future__ import annotations

import asyncio
import hashlib
import io
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from api.control import Api
from api.http import multipart, upload_allowance
from domain.commands.batches import FailBatch, fail_batch
from domain.inputs.batch_line import LineError
from tests.acceptance.conftest import UPLOAD_BYTES_MAX, Served, serving
from tests.acceptance.training_files import chat_file
from tests.unit.case_files import case_bytes

BOUNDARY = "multipart/form-data; boundary=B"


def _part(name: str, data: bytes, *, filename: str | None = None) -> bytes:
    shown = f'; filename="{filename}"' if filename is not None else ""
    head = f'--B\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def _upload(served: Served, *parts: bytes, **headers: str) -> httpx2.Response:
    with served.http(**headers) as http:
        return http.post(
            "/openai/v1/files",
            content=b"".join(parts) + b"--B--\r\n",
            headers={"content-type": BOUNDARY},
        )


def _refused(response: httpx2.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_the_sdk_uploads_lists_downloads_and_deletes_a_file(served: Served) -> None:
    client = served.openai()
    rows = chat_file()
    created = client.files.create(file=("train set.jsonl", io.BytesIO(rows)), purpose="fine-tune")
    assert created.bytes == len(rows)
    assert created.filename == "train set.jsonl"
    assert created.status == "processed"
    assert created.expires_at == created.created_at + 30 * 86_400
    assert created.gridline["rows"] == 12  # type: ignore[attr-defined]
    assert created.gridline["messages"] == 24  # type: ignore[attr-defined]
    assert client.files.retrieve(created.id) == created
    assert client.files.wait_for_processing(created.id) == created
    assert [each.id for each in client.files.list(purpose="fine-tune")] == [created.id]
    assert client.files.list(purpose="batch").data == []
    assert client.files.content(created.id).read() == rows
    assert client.files.delete(created.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(created.id)
    assert f"files/{created.id}" not in served.stored_objects()


async def test_the_asynchronous_sdk_uploads_bytes_without_a_name(served: Served) -> None:
    async with served.async_openai() as client:
        created = await client.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert created.filename == "upload"
        assert created.expires_at == created.created_at + 3600
        assert (await client.files.content(created.id)).content == b"{}"


@pytest.mark.parametrize("file_first", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_the_order_of_parts_and_their_framing_do_not_matter(
    served: Served, file_first: bool, chunked: bool
) -> None:
    parts = [_part("purpose", b"fine-tune"), _part("file", chat_file(), filename="訓練.jsonl")]
    body = b"".join(reversed(parts) if file_first else parts) + b"--B--\r\n"

    def pieces() -> Iterator[bytes]:
        yield from (body[at : at + 100] for at in range(0, len(body), 100))

    with served.http() as http:
        answer = http.post(
            "/openai/v1/files",
            content=pieces() if chunked else body,
            headers={"content-type": BOUNDARY},
        )
        assert answer.status_code == 200
        created = answer.json()
        assert created["filename"] == "訓練.jsonl"
        assert created["gridline"]["rows"] == 12
        sent = http.get(f"/openai/v1/files/{created['id']}/content")
    assert sent.content == chat_file()
    assert "filename*=UTF-8''%E8%A8%93%E7%B7%B4.jsonl" in sent.headers["content-disposition"]


@pytest.mark.parametrize(
    ("case", "filename"),
    [
        ("star.txt", "訓練 data.jsonl"),
        ("no-filename.txt", "upload"),
        ("file-first.txt", "t.jsonl"),
        ("traversal.txt", 'x"y.jsonl'),
    ],
)
def test_names_come_in_every_form_that_clients_send(
    served: Served, case: str, filename: str
) -> None:
    body = case_bytes("multipart", case)
    with served.http() as http:
        answer = http.post("/openai/v1/files", content=body, headers={"content-type": BOUNDARY})
    assert answer.status_code == 200
    assert (answer.json()["filename"], answer.json()["gridline"]["rows"]) == (filename, 12)


def test_a_file_part_without_a_filename_is_a_file(served: Served) -> None:
    large = chat_file(rows=12, text="x" * 100_000)
    answer = _upload(served, _part("purpose", b"fine-tune"), _part("file", large))
    assert answer.status_code == 200
    assert answer.json()["filename"] == "upload"
    assert answer.json()["bytes"] == len(large) > 1_100_000


def test_a_batch_file_that_comes_before_its_purpose_is_not_judged_as_a_training_file(
    served: Served,
) -> None:
    answer = _upload(served, _part("file", b"any\x00thing"), _part("purpose", b"batch"))
    assert answer.status_code == 200


PURPOSE = _part("purpose", b"batch")
FINE_TUNE = _part("purpose", b"fine-tune")
FILE = _part("file", b"{}")
BAD_JSON = _part("file", chat_file(3) + b"{nope}\n" + chat_file(3))
ANCHOR = _part("expires_after[anchor]", b"created_at")
SECONDS = _part("expires_after[seconds]", b"60")


@pytest.mark.parametrize(
    ("parts", "refusal"),
    [
        ([FILE], (400, "invalid_request", "purpose")),
        ([PURPOSE], (400, "invalid_request", "file")),
        ([PURPOSE, PURPOSE, FILE], (400, "invalid_request", "purpose")),
        ([PURPOSE, FILE, FILE], (400, "invalid_request", "file")),
        ([_part("purpose", b"assistants"), FILE], (400, "invalid_request", "purpose")),
        ([FILE, _part("purpose", b"batch_output")], (400, "invalid_request", "purpose")),
        ([PURPOSE, _part("color", b"red"), FILE], (400, "invalid_request", "color")),
        ([PURPOSE, _part("file", b"")], (400, "invalid_file_format", "file")),
        ([PURPOSE, SECONDS, FILE], (400, "invalid_request", "expires_after")),
        ([PURPOSE, ANCHOR, SECONDS, FILE], (400, "invalid_request", "expires_after.seconds")),
        ([FILE, FINE_TUNE], (400, "invalid_messages", "file")),
        ([FINE_TUNE, BAD_JSON], (400, "invalid_json", "file")),
        ([BAD_JSON, FINE_TUNE], (400, "invalid_json", "file")),
        ([PURPOSE, _part("file", b"x" * (UPLOAD_BYTES_MAX + 1))], (413, "file_too_large", "file")),
    ],
)
def test_a_refused_upload_names_its_fault_and_leaves_no_object(
    served: Served, parts: list[bytes], refusal: tuple[int, str, str | None]
) -> None:
    before = served.stored_objects()
    assert _refused(_upload(served, *parts)) == refusal
    assert served.stored_objects() == before


def test_a_bad_line_is_named_and_never_quoted(served: Served) -> None:
    rows = chat_file(5) + b'{"messages": "MARKER-7391"}\n' + chat_file(5)
    answer = _upload(served, _part("purpose", b"fine-tune"), _part("file", rows))
    assert "6" in answer.json()["error"]["message"]
    assert "MARKER" not in answer.text


def test_an_upload_of_the_largest_size_is_taken_and_one_byte_more_is_drained_and_refused(
    served: Served,
) -> None:
    client = served.openai()
    assert client.files.create(file=b"x" * UPLOAD_BYTES_MAX, purpose="batch").bytes
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=b"x" * (2 * UPLOAD_BYTES_MAX - 1000), purpose="batch")
    assert refused.value.status_code == 413
    assert refused.value.code == "file_too_large"


@pytest.mark.parametrize(
    ("size", "refused"), [(200_000_000, None), (200_000_001, (413, "file_too_large", "file"))]
)
def test_two_hundred_million_bytes_are_taken_and_not_one_more(
    served: Served, size: int, refused: tuple[int, str, str] | None
) -> None:
    megabyte = b"x" * 999_999 + b"\n"

    def body() -> Iterator[bytes]:
        head, tail = _part("file", b"\0").split(b"\0")
        yield PURPOSE + head
        yield from (megabyte for _ in range(size // len(megabyte)))
        yield b"x" * (size % len(megabyte)) + tail + b"--B--\r\n"

    with serving(Api(control=served.plane, lease_seconds=30)) as root, served.http() as http:
        answer = http.post(
            f"{root}/openai/v1/files",
            content=body(),
            headers={"content-type": BOUNDARY},
            timeout=60,
        )
        if refused is not None:
            assert _refused(answer) == refused
        else:
            assert answer.json()["bytes"] == size
            http.delete(f"/openai/v1/files/{answer.json()['id']}")


def test_a_compressed_request_is_refused(served: Served) -> None:
    answer = _upload(served, PURPOSE, FILE, **{"content-encoding": "gzip"})
    assert _refused(answer) == (415, "unsupported_content_encoding", None)


def test_a_body_that_is_not_multipart_is_refused(served: Served) -> None:
    with served.http() as http:
        answer = http.post("/openai/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 400


async def test_an_upload_that_is_broken_off_leaves_nothing(served: Served) -> None:
    before = served.stored_objects()
    _, writer = await asyncio.open_connection(*served.address)
    head = (
        "POST /openai/v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n"
        f"Authorization: Bearer {served.tenant.key}\r\nContent-Type: {BOUNDARY}\r\n\r\n"
    )
    begun = _part("purpose", b"batch") + _part("file", b"x" * 1_500_000)[:-2]
    writer.write(head.encode() + begun)
    await writer.drain()
    await _until(lambda: served.stored_objects() > before)
    writer.transport.abort()
    await _until(lambda: served.stored_objects() == before)
    assert served.openai().files.list().data == []
    with served.http() as http:
        assert 'route="POST /openai/v1/files",status="499"' in http.get("/metrics").text


@pytest.mark.parametrize("length", [2 * UPLOAD_BYTES_MAX + 1_000_000, 100])
def test_a_client_that_waits_to_be_told_is_refused_before_it_sends(
    served: Served, length: int
) -> None:
    key = served.tenant.key if length > 100 else "gl_wrong"
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            f"POST /openai/v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: {BOUNDARY}\r\n"
            "Expect: 100-continue\r\n\r\n".encode()
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413" if length > 100 else b"HTTP/1.1 401")


def test_an_upload_that_stops_coming_is_given_up_and_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "IDLE_SECONDS_MAX", 0.05)
    before = served.stored_objects()
    with socket.create_connection(served.address, timeout=5) as connection:
        connection.sendall(
            "POST /openai/v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
            f"Authorization: Bearer {served.tenant.key}\r\n"
            f"Content-Type: {BOUNDARY}\r\n\r\n".encode()
            + _part("purpose", b"batch")
            + _part("file", b"x" * 1_000, filename="x.jsonl")[:-10]
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer
    assert served.stored_objects() == before


def test_a_range_is_answered_with_its_bytes(served: Served) -> None:
    data = bytes(range(256)) * 10
    created = served.openai().files.create(file=data, purpose="batch")
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    with served.http() as http:
        url = f"/openai/v1/files/{created.id}/content"
        whole = http.get(url)
        assert whole.headers["content-length"] == str(len(data))
        assert whole.headers["etag"] == etag
        assert whole.headers["accept-ranges"] == "bytes"
        assert "content-encoding" not in whole.headers
        some = http.get(url, headers={"range": "bytes=10-19"})
        assert (some.status_code, some.content) == (206, data[10:20])
        assert some.headers["content-range"] == f"bytes 10-19/{len(data)}"
        rest = http.get(url, headers={"range": "bytes=2550-", "if-range": etag})
        assert (rest.status_code, rest.content) == (206, data[2550:])
        last = http.get(url, headers={"range": "bytes=-3"})
        assert (last.status_code, last.content) == (206, data[-3:])
        beyond = http.get(url, headers={"range": "bytes=9999-"})
        assert (beyond.status_code, beyond.headers["content-range"]) == (
            416,
            f"bytes */{len(data)}",
        )
        for endless in (f"bytes={'9' * 5000}-", "bytes=-0", "bytes=5-2"):
            assert http.get(url, headers={"range": endless}).status_code == 416
        for wide in (f"bytes=-{'9' * 5000}", f"bytes={'0' * 5000}-", f"bytes=0-{'9' * 5000}"):
            answer = http.get(url, headers={"range": wide})
            assert (answer.status_code, answer.content) == (206, data)
        changed = http.get(url, headers={"range": "bytes=0-1", "if-range": '"other"'})
        assert (changed.status_code, changed.content) == (200, data)
        several = http.get(url, headers={"range": "bytes=0-1,5-6"})
        assert (several.status_code, several.content) == (200, data)
        head = http.head(url)
        assert (head.status_code, head.headers["content-length"]) == (200, str(len(data)))
        assert head.content == b""


def test_a_file_in_use_cannot_be_deleted_until_its_work_ends(served: Served) -> None:
    client = served.openai()
    created = client.files.create(file=b"{}", purpose="batch")
    batch = client.batches.create(
        input_file_id=created.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(created.id)
    assert refused.value.code == "invalid_state"
    assert refused.value.response.headers["x-should-retry"] == "false"
    fault = LineError(code="invalid_json_line", message="Line 1.", param=None, line=1)
    served.run(fail_batch, FailBatch(batch_id=batch.id, errors=(fault,)))
    assert client.files.delete(created.id).deleted


def test_another_accounts_files_answer_as_unknown_ones(served: Served) -> None:
    created = served.openai().files.create(file=b"{}", purpose="batch")
    other = served.openai(served.new_tenant().key)
    errors = []
    for file_id in (created.id, "file-doesnotexist"):
        with pytest.raises(openai.NotFoundError) as refused:
            other.files.retrieve(file_id)
        errors.append(refused.value.body)
        with pytest.raises(openai.NotFoundError) as refused:
            other.files.delete(file_id)
        errors.append(refused.value.body)
    assert errors[:2] == errors[2:]
    assert other.files.list().data == []


async def _until(condition: Callable[[], bool]) -> None:
    """Nothing tells when the server's task ends: it is looked at."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _end_of_log(served: Served) -> int:
    with served.plane.reads.connection() as connection:
        row = connection.execute("SELECT max(notification_id) AS last FROM gridline_events")
        last: int = row.fetchall()[0]["last"]
    return last


@pytest.fixture
def small_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_allowance, "STORED_BYTES_MAX", 1_000_000)
    monkeypatch.setattr(upload_allowance, "STORED_BYTES_WITHOUT_CREDIT_MAX", 300_000)
    monkeypatch.setattr(upload_allowance, "UPLOADS_PER_MINUTE_MAX", 15)


@pytest.mark.usefixtures("small_allowance")
@pytest.mark.parametrize(("credit_usd", "fit"), [(25, 10), (0, 3)])
def test_uploads_past_the_accounts_space_are_refused_until_files_are_deleted(
    served: Served, credit_usd: int, fit: int
) -> None:
    key = served.api.new_tenant(credit_usd=credit_usd).key
    client = served.openai(key)
    data = b"x" * 100_000
    kept = [client.files.create(file=data, purpose="batch").id for _ in range(fit)]
    end_of_log = _end_of_log(served)
    with pytest.raises(openai.RateLimitError) as refused:
        client.files.create(file=b"x", purpose="batch")
    assert _end_of_log(served) == end_of_log
    assert refused.value.code == "limit_exceeded"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["limit"] == {
        "name": "stored_bytes",
        "limit": fit * 100_000,
        "in_use": fit * 100_000,
    }
    with served.http(key) as http:
        credit = http.get("/openai/v1/gridline/credits").json()
    assert credit["uploads"] == {"bytes": fit * 100_000, "limit": fit * 100_000}
    client.files.delete(kept[0])
    client.files.create(file=data, purpose="batch")


@pytest.mark.usefixtures("small_allowance")
def test_uploads_at_once_cannot_pass_the_accounts_space_together_and_leave_no_object(
    served: Served,
) -> None:
    before = served.stored_objects()
    part = [PURPOSE, _part("file", b"x" * 100_000)]
    with ThreadPoolExecutor(14) as threads:
        answers = list(threads.map(lambda _: _upload(served, *part), range(14)))
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [429] * 4
    assert len(served.stored_objects() - before) == 10


@pytest.mark.usefixtures("small_allowance")
def test_uploads_past_the_rate_are_to_come_again_once_the_minute_is_over(served: Served) -> None:
    client = served.openai().with_options(max_retries=0)
    for _ in range(15):
        client.files.delete(client.files.create(file=b"x", purpose="batch").id)
    with pytest.raises(openai.RateLimitError) as refused:
        client.files.create(file=b"x", purpose="batch")
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    served.openai(served.new_tenant().key).files.create(file=b"x", purpose="batch")
