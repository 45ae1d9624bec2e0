"""The header of a ``.npy`` stream, read by a pattern: nothing is evaluated, unpickled or allocated for it.

``numpy.load`` reads the header through ``ast.literal_eval``, which hostile text drives into RecursionError and
MemoryError, and it allocates what the header declares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

#: The magic as base64: six bytes are eight characters, so it shows without decoding.
MAGIC_TEXT: Final = "k05VTVBZ"

_STARTS: Final = tuple(b"\x93NUMPY" + version for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"))
_HEADER_LIMIT: Final = 10_000  # NumPy's own
#: The dtypes that routes travel in; a single byte has no order, but not every writer leaves it out.
_DTYPES: Final = {"|u1": np.uint8, "<u1": np.uint8, "<i2": np.int16, "<u2": np.uint16, "<i4": np.int32}
_ITEM: Final = re.compile(
    rb"\s*(['\"])(?P<key>descr|fortran_order|shape)\1\s*:\s*"
    rb"(?:(['\"])(?P<text>[^'\"]{0,16})\3|(?P<flag>True|False)|\((?P<sizes>[0-9,\s]{0,60})\))\s*(?:,\s*|(?=\}))"
)


@dataclass(frozen=True, slots=True)
class Header:
    """What a header declares, and the byte where the ids begin."""

    dtype: np.dtype[Any]
    fortran_order: bool
    sizes: list[int]
    end: int


def read_header(name: str, data: bytearray) -> Header:
    """Return the header of a stream, whose ids may be fewer or more than it declares."""
    if bytes(data[:8]) not in _STARTS:
        raise ValueError(f"{name} begins with {bytes(data[:8])!r}, need the .npy magic and version 1.0, 2.0 or 3.0")
    begin = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:begin], "little")
    if length > _HEADER_LIMIT or begin + length > len(data):
        raise ValueError(f"{name}: header has {length} bytes of {len(data)}, need all and at most {_HEADER_LIMIT}")
    end = begin + length
    fields = _fields(bytes(data[begin:end]))
    if fields is None:
        text = bytes(data[begin : min(end, begin + 100)])
        raise ValueError(f"{name}: header is {text!r}, need descr, fortran_order and shape (3 sizes) once each")
    descr = fields["descr"]
    if descr not in _DTYPES:
        hint = " (objects are never unpickled)" if "O" in descr else ""
        raise TypeError(f"{name}: descr is {descr!r}, need one of {', '.join(_DTYPES)}{hint}")
    return Header(np.dtype(_DTYPES[descr]), fields["fortran_order"], fields["shape"], end)


def _fields(header: bytes) -> dict[str, Any] | None:
    """Return the three fields, which may come in any order; None for anything else."""
    fields: dict[str, Any] = {}
    position = 1
    while header[:1] == b"{" and (match := _ITEM.match(header, position)):
        position = match.end()
        key = match["key"].decode()
        value = _value(key, match)
        if value is None or key in fields:
            return None
        fields[key] = value
    return fields if len(fields) == 3 and header[position:].strip() == b"}" else None


def _value(key: str, match: re.Match[bytes]) -> Any:
    """Return a field's value, or None where it is of another field's kind."""
    if key == "descr":
        return None if match["text"] is None else match["text"].decode("latin-1")
    if key == "fortran_order":
        return None if match["flag"] is None else match["flag"] == b"True"
    if match["sizes"] is None:
        return None
    items = [item.strip() for item in match["sizes"].split(b",")]
    if items[-1] == b"":  # one comma may trail, as Python writes it
        items.pop()
    return [int(item) for item in items] if all(item.isdigit() for item in items) else None
