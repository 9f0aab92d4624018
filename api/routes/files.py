"""POST, GET, DELETE /files."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from starlette.responses import Response

from api.control import Call
from api.http.download import send_object
from api.http.errors import error_response
from api.http.idempotency import answer_came_through, canonical_sha256, create_once, delete_once
from api.http.json_body import refuse_content_encoding
from api.http.json_response import json_response
from api.http.multipart import MultipartReader, boundary_of
from api.http.pagination import answer_page, given_once, order_of
from api.http.upload import Upload, UploadReceiver, too_large
from api.http.upload_allowance import must_allow_upload
from api.schemas.files import file_deleted, file_object
from domain import ids
from domain.commands.files import DeleteFile, StoreFile, delete_file, store_file
from domain.commands.idempotency import Origin
from domain.errors import (
    GridlineError,
    InvalidRequest,
    NotFound,
    RequestTimeout,
    StorageOutcomeUnknown,
)
from domain.limits import FILE_KEPT_SECONDS, MIB
from domain.log.stored import StoredObject
from projections.work import files
from projections.work.files import FileRow

LIMIT_MAX = 10_000
DRAIN_SECONDS_MAX = 60
MULTIPART_BYTES_MAX = MIB
"""What the fields and headers around a file may take."""

PURPOSES = (
    "fine-tune", "batch", "batch_output", "fine-tune-results",
    # OpenAI's others: nothing here has them, so that a list of them is empty.
    "assistants", "assistants_output", "evals", "user_data", "vision",
)  # fmt: skip


async def create(call: Call) -> Response:
    """Uploads a file."""
    request, bytes_max = call.request, call.api.upload_bytes_max
    refuse_content_encoding(request)
    reader = MultipartReader(
        request.stream(),
        boundary=boundary_of(request.headers.get("content-type", "")),
        bytes_max=bytes_max + MULTIPART_BYTES_MAX,
    )
    declared = request.headers.get("content-length", "0")
    declared_bytes = int(declared) if declared.isascii() and declared.isdigit() else 0
    file_id = call.api.control.ids.new(ids.FILE)
    try:
        if declared_bytes > bytes_max + MULTIPART_BYTES_MAX:
            raise too_large(bytes_max)
        if call.retry_count == 0:  # what is sent again may have been recorded, and have its place
            await must_allow_upload(call, max(0, declared_bytes - MULTIPART_BYTES_MAX))
        receiver = UploadReceiver(
            reader,
            call.api.control.objects,
            call.api.file_checks,
            account_id=call.caller.account_id,
            key=f"files/{file_id}",
            bytes_max=bytes_max,
        )
        upload = await receiver.receive()
    except GridlineError as error:
        return await _refused(
            call,
            reader,
            error,
            unread=declared_bytes > 2 * bytes_max
            or "expect" in request.headers
            or isinstance(error, RequestTimeout),
        )
    made = await _record(call, file_id, upload)
    return json_response(file_object(await _file(call, made)))


async def _refused(
    call: Call, reader: MultipartReader, error: GridlineError, *, unread: bool
) -> Response:
    """Answers once the client has sent all: answered earlier, some clients see a broken connection
    instead. A client that waits to be told, or would send too much, is answered at once."""
    response = error_response(error)
    drained = False
    if not unread:
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS_MAX):
                drained = await reader.drain(bytes_max=2 * call.api.upload_bytes_max)
    if not drained:
        response.headers["connection"] = "close"
    return response


async def _record(call: Call, file_id: str, upload: Upload) -> str:
    """Records the stored upload; returns the id of its file, or of that which the same request made
    before, and then forgets the bytes that came again."""
    kept_seconds = upload.expires_after_seconds or FILE_KEPT_SECONDS
    control = call.api.control

    async def store(origin: Origin) -> str:
        file = StoreFile(
            file_id=file_id,
            purpose=upload.purpose,
            object=upload.object,
            filename=upload.filename,
            expires_at=control.clock.now() + timedelta(seconds=kept_seconds),
            training=upload.training,
            origin=origin,
        )
        async with call.api.upload_turns.of(call.caller.account_id):
            await must_allow_upload(call, upload.object.bytes)
            return await call.execute(store_file, file)

    fingerprint = canonical_sha256(
        {
            "sha256": upload.object.sha256,
            "purpose": upload.purpose,
            "filename": upload.filename,
            "expires_after_seconds": upload.expires_after_seconds,
        }
    )
    try:
        made = await create_once(call, body_sha256=fingerprint, create=store)
    except StorageOutcomeUnknown:
        raise  # the file may be recorded after all: its bytes must stay
    except BaseException:
        await call.delete_objects(upload.object.key)
        raise
    if made != file_id:
        await call.delete_objects(upload.object.key)
    return made


async def list_all(call: Call) -> Response:
    """Lists the account's files."""
    purpose = given_once(call.request, "purpose") or None
    if purpose is not None and purpose not in PURPOSES:
        raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
    return await answer_page(
        call,
        files.list_page,
        file_object,
        default=LIMIT_MAX,
        most=LIMIT_MAX,
        account_id=call.caller.account_id,
        order=order_of(call.request),
        purpose=purpose,
    )


async def retrieve(call: Call) -> Response:
    """One file object."""
    return json_response(file_object(await _file(call, call.request.path_params["file_id"])))


async def content(call: Call) -> Response:
    """The bytes as they were uploaded or written."""
    row = await _file(call, call.request.path_params["file_id"])
    await answer_came_through(call, row.id, made_at=row.created_at)
    return await send_object(
        call.request,
        call.api.control.objects,
        StoredObject(key=row.object_key, bytes=row.bytes, sha256=row.sha256),
        filename=row.filename or row.id,
    )


async def delete(call: Call) -> Response:
    """Forgets a file that no open work uses."""
    account_id, file_id = call.caller.account_id, call.request.path_params["file_id"]
    await delete_once(
        call,
        call.execute(delete_file, DeleteFile(account_id=account_id, file_id=file_id)),
        deleted_at=lambda: call.read(files.deleted_at, account_id=account_id, file_id=file_id),
    )
    return json_response(file_deleted(file_id))


async def _file(call: Call, file_id: str) -> FileRow:
    row = await call.read(files.get, account_id=call.caller.account_id, file_id=file_id)
    if row is None:
        raise NotFound("No such file: id.", param="id")
    return row
