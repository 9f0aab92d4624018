"""The peer of `upload.py`, as a process of its own: the least that takes bytes in for good.

It prints its port, then for each connection reads the given number of bytes, hashes them with
SHA-256, writes them to a new file, syncs file and directory, and sends the digest back.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path

PIECE_BYTES = 1 << 20


def main() -> None:
    """Arguments: the directory, and how many bytes a connection brings."""
    directory, size = Path(sys.argv[1]), int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(_receive(connection, directory, size))


def _receive(connection: socket.socket, directory: Path, size: int) -> bytes:
    piece = memoryview(bytearray(PIECE_BYTES))
    digest, left = hashlib.sha256(), size
    with (directory / "received").open("wb", buffering=0) as output:
        while left:
            count = connection.recv_into(piece)
            if count == 0:
                raise ConnectionError(f"{left} bytes did not come")
            left -= count
            digest.update(piece[:count])
            rest = piece[:count]
            while rest:
                rest = rest[output.write(rest) :]
        os.fsync(output.fileno())
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.digest()


if __name__ == "__main__":
    main()
