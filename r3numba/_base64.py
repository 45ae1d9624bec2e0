"""Base64 text to bytes and back, strictly, on the fastest library that is here.

pybase64 (extra ``wire``) decodes 16 MB in about 2 ms; the standard library takes about 70 ms and serves where pybase64
is missing. Neither is strict enough alone: CPython accepts ``AAAA==``, and both accept bits past the last byte
(``AB==``), which no encoder writes. The checks here are the same on both.
"""

from __future__ import annotations

import base64
import functools
import importlib
from typing import Any, TypeAlias

from ._checks import kind

#: What base64 text may arrive as; a memoryview is flat and of single bytes.
Text: TypeAlias = "str | memoryview"

_PIECE = 1 << 20  # characters that the standard library decodes at once; a multiple of 4


@functools.cache
def library() -> Any:
    """Return pybase64, or None where it is not installed. Imported at the first call, not with the package."""
    try:
        return importlib.import_module("pybase64")
    except ImportError:
        return None


def text_of(name: str, value: object) -> Text:
    """Return ``value`` as text without copying it; bytes count as ASCII text."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        view = memoryview(value)
        if view.ndim == 1 and view.itemsize == 1 and view.contiguous:
            return view.cast("B")
    raise TypeError(f"{name} is a {kind(value)}, need base64 text")


def first(text: Text, count: int) -> str:
    """Return the first ``count`` characters as a str."""
    return text[:count] if isinstance(text, str) else bytes(text[:count]).decode("latin-1")


def decoded_size(name: str, text: Text) -> int:
    """Return how many bytes ``text`` decodes to, without decoding it, so that a wrong size costs no memory."""
    if len(text) % 4:
        raise ValueError(f"{name} has {len(text)} characters, need a multiple of 4 (padded base64)")
    return len(text) // 4 * 3 - _padding(text)


def decode(name: str, text: Text) -> bytearray:
    """Return the bytes of ``text``: standard alphabet, padded, without line breaks; writable, so no later copy."""
    size = decoded_size(name, text)
    fast = library()
    try:
        data: bytearray = (
            _decode_in_pieces(text, size) if fast is None else fast.b64decode_as_bytearray(text, validate=True)
        )
    except ValueError as error:
        raise ValueError(f"{name} is not base64, need the standard alphabet without line breaks: {error}") from None
    padding = _padding(text)
    tail = encode(bytes(data[len(data) - 3 + padding :])) if padding else ""
    if len(data) != size or (padding and tail != _last(text, 4)):
        raise ValueError(f"{name} ends in {_last(text, 4)!r}, need base64 whose padding and last bits are exact")
    return data


def _decode_in_pieces(text: Text, size: int) -> bytearray:
    """Return what the standard library decodes, whose own result could not be written without a copy of it."""
    data, end = bytearray(size), 0
    for begin in range(0, len(text), _PIECE):
        piece = base64.b64decode(text[begin : begin + _PIECE], validate=True)
        data[end : end + len(piece)] = piece
        end += len(piece)
    if end != size:  # padding inside: a piece was short
        raise ValueError(f"{end} bytes in place of {size}")
    return data


def encode(data: Any) -> str:
    """Return the base64 text of a C-contiguous buffer."""
    fast = library()
    if fast is not None:
        text: str = fast.b64encode_as_string(data)
        return text
    return base64.b64encode(data).decode("ascii")


def _last(text: Text, count: int) -> str:
    return text[-count:] if isinstance(text, str) else bytes(text[-count:]).decode("latin-1")


def _padding(text: Text) -> int:
    tail = _last(text, 2)
    return len(tail) - len(tail.rstrip("="))
