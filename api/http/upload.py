"""Takes in one upload: a multipart stream becomes one stored object, checked as it passes.

Called by POST /files. The parts may come in any order; the Node SDKs send the file before its
purpose, so a file of yet unknown purpose is checked as a training file alongside, and the purpose
decides whether that verdict counts. Nothing is held in memory but a few pieces; an upload that is
refused or broken off leaves no object.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from api.file_checks import FileChecks
from api.http.multipart import MultipartReader, PartHead, bare_filename
from domain.assets.file import Purpose
from domain.errors import FileTooLarge, InvalidFile, InvalidRequest, StoreAway
from domain.inputs.body import read_body
from domain.inputs.create_fields import ExpiresAfter
from domain.inputs.training_file import TrainingFacts, TrainingFileCheck
from domain.log.stored import StoredObject
from domain.ports import Objects

PIECE_BYTES = 1 << 20
"""What is stored and checked at a time: worth a hop to another thread."""
PARTS_MAX = 16

_EXPIRY_FIELDS = ("expires_after[anchor]", "expires_after[seconds]")
_PURPOSES: dict[str, Purpose] = {"fine-tune": "fine-tune", "batch": "batch"}


@dataclass(frozen=True, slots=True)
class Upload:
    """A stored upload. `training` is null for a batch file."""

    object: StoredObject
    purpose: Purpose
    filename: str
    expires_after_seconds: int | None
    training: TrainingFacts | None


class UploadReceiver:
    """One upload; `receive` once."""

    def __init__(
        self,
        reader: MultipartReader,
        objects: Objects,
        checks: FileChecks,
        *,
        account_id: str,
        key: str,
        bytes_max: int,
    ) -> None:
        self._reader = reader
        self._objects = objects
        self._checks = checks
        self._account_id = account_id
        self._key = key
        self._bytes_max = bytes_max
        self._fields: dict[str, str] = {}
        self._file: tuple[str, StoredObject] | None = None
        self._check = TrainingFileCheck()
        self._refusal: InvalidFile | None = None

    async def receive(self) -> Upload:
        """Stores the file part and reads the fields. Raises InvalidRequest, InvalidFile or
        FileTooLarge; whatever it raises, no object is left."""
        try:
            parts = 0
            while (head := await self._reader.next_part()) is not None:
                parts += 1
                if parts > PARTS_MAX:
                    raise InvalidRequest("The multipart body has too many parts.")
                await self._take(head)
            return await self._finished()
        except BaseException:
            if self._file is not None:
                with suppress(StoreAway):
                    await self._objects.delete(self._key)
            raise

    async def _take(self, head: PartHead) -> None:
        if head.transfer_encoding not in ("binary", "8bit", "7bit"):
            raise InvalidRequest("Parts must not have a Content-Transfer-Encoding.")
        if head.name == "file":
            if self._file is not None:
                raise InvalidRequest("file is given more than once.", param="file")
            stored = await self._objects.put(self._key, self._pieces())
            self._file = (bare_filename(head.filename), stored)
            return
        if head.name not in ("purpose", *_EXPIRY_FIELDS):
            name = bare_filename(head.name)
            raise InvalidRequest(f"Unsupported parameter: {name}", param=name)
        if head.name in self._fields:
            raise InvalidRequest(f"{head.name} is given more than once.", param=head.name)
        self._fields[head.name] = await self._reader.text(head.name)
        if head.name == "purpose":
            self._purpose()

    async def _pieces(self) -> AsyncIterator[bytes]:
        """The file part in pieces, each checked while it is being stored."""
        gathered, size = bytearray(), 0
        async for chunk in self._reader.data():
            size += len(chunk)
            if size > self._bytes_max:
                raise too_large(self._bytes_max)
            gathered += chunk
            if len(gathered) >= PIECE_BYTES:
                piece = bytes(gathered)
                gathered.clear()
                checking = self._begin_check(piece)
                yield piece
                await self._settle(checking)
        if gathered:
            checking = self._begin_check(bytes(gathered))
            yield bytes(gathered)
            await self._settle(checking)

    def _begin_check(self, piece: bytes) -> asyncio.Task[None] | None:
        if self._fields.get("purpose") == "batch" or self._refusal is not None:
            return None
        return asyncio.ensure_future(self._checks.in_turn(self._account_id, self._feed, piece))

    async def _settle(self, checking: asyncio.Task[None] | None) -> None:
        if checking is None:
            return
        await checking
        if self._refusal is not None and "purpose" in self._fields:
            raise self._refusal

    def _feed(self, piece: bytes) -> None:
        try:
            self._check.feed(piece)
        except InvalidFile as refusal:
            refusal.param = "file"
            self._refusal = refusal

    def _purpose(self) -> Purpose:
        given = self._fields.get("purpose")
        if given is None:
            raise InvalidRequest("Missing required parameter: purpose", param="purpose")
        if given not in _PURPOSES:
            raise InvalidRequest(
                'purpose must be "fine-tune" or "batch". Files of other purposes are not kept '
                "here.",
                param="purpose",
            )
        return _PURPOSES[given]

    async def _finished(self) -> Upload:
        purpose = self._purpose()
        if self._file is None:
            raise InvalidRequest("Missing required parameter: file", param="file")
        filename, stored = self._file
        if stored.bytes == 0:
            raise InvalidFile("The file is empty.", param="file")
        return Upload(
            object=stored,
            purpose=purpose,
            filename=filename,
            expires_after_seconds=self._expires_after_seconds(),
            training=await self._facts() if purpose == "fine-tune" else None,
        )

    async def _facts(self) -> TrainingFacts:
        if self._refusal is not None:
            raise self._refusal
        try:
            return await self._checks.in_turn(self._account_id, self._check.finish)
        except InvalidFile as refusal:
            refusal.param = "file"
            raise

    def _expires_after_seconds(self) -> int | None:
        given: dict[str, Any] = {
            name.partition("[")[2].rstrip("]"): self._fields[name]
            for name in _EXPIRY_FIELDS
            if self._fields.get(name)
        }
        if not given:
            return None
        text = given.get("seconds", "")
        if text.isascii() and text.isdigit() and len(text) <= 9:
            given["seconds"] = int(text)
        return read_body(ExpiresAfter, given, at="expires_after").seconds


def too_large(bytes_max: int) -> FileTooLarge:
    """The refusal of an upload past the limit."""
    return FileTooLarge(f"The file is larger than {bytes_max:,} bytes.", param="file")
