"""What an ONNX file says about itself, without ONNX Runtime."""

import os
from pathlib import Path
from typing import BinaryIO

_GRAPH, _METADATA = 7, 14  # field numbers of ModelProto in onnx.proto
_NUMBER, _BYTES = 0, 2  # protobuf's wire types


def onnx_metadata(file: str | Path) -> set[str]:
    """The keys of an ONNX model's metadata. Only the outermost fields of the file are read; its weights are skipped.

    Raises:
        ValueError: If the file is missing or no (whole) ONNX model.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"The model {file} does not exist: expected a local ONNX file.")
    try:
        with path.open("rb") as stream:
            keys, fields = _scan(stream)
            whole = stream.tell() == path.stat().st_size
    except (ValueError, IndexError):
        whole = False
    if not whole or _GRAPH not in fields:
        raise ValueError(f"The model {file} is not a (whole) ONNX file.")
    return keys


def _scan(stream: BinaryIO) -> tuple[set[str], set[int]]:
    """The metadata's keys and the numbers of all outermost fields."""
    keys, fields = set(), set()
    while (tag := _varint(stream)) is not None:
        field, kind = tag >> 3, tag & 7
        length = _varint(stream)
        if kind not in (_NUMBER, _BYTES) or length is None:
            raise ValueError
        fields.add(field)
        if kind == _BYTES and field == _METADATA:
            entry = stream.read(length)  # a line feed (field 1, bytes), the length of the key, the key, ...
            keys.add(entry[2 : 2 + entry[1]].decode())
        elif kind == _BYTES:
            stream.seek(length, os.SEEK_CUR)
    return keys, fields


def _varint(stream: BinaryIO) -> int | None:
    """The next base-128 number; None at the end of the file."""
    value, shift = 0, 0
    while byte := stream.read(1):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return value
    return None
