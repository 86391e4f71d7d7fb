"""Files that are whole or absent, and hashes of content."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path


def write_atomically(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file beside its place and then put it there: a reader finds the old content or the new one, always whole.

    Any number of processes may write at a time; a process or machine that stops here leaves what was there before.

    Raises:
        OSError: if it cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with scratch.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def content_hash(*parts: bytes, size: int = 8) -> str:
    """BLAKE2b of the parts, one after the other, as 2 × `size` hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
