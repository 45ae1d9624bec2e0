"""What the engines send, format by format: from a payload to an integer array ``[rows, layers, topk]``.

A payload is hostile input. Sizes are compared with the bytes that came before anything is allocated, nothing is
unpickled or evaluated, and every walk is as deep as the format and as long as the payload. What comes out still has
the wire's dtype and may hold negative ids: ``wire.py`` settles both, for every format in one place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._base64 import Text, decode, decoded_size, first, text_of
from ._checks import host_array, integer, is_tensor, kind
from ._npy import MAGIC_TEXT, read_header

#: Every format that ``decode_routes`` recognises, by the name that ``DecodedRoutes.format`` has.
WIRE_FORMATS: Final = ("sglang", "vllm", "nested", "split", "skyrl", "prime-rl", "nemo-rl", "rllm", "array")

#: dtypes that a header may name. NeMo-RL sends int8 too (ids below 128, and -1).
_NAMED: Final = {name: np.dtype(name) for name in ("uint8", "int16", "uint16", "int32")}
_NAMED_SIGNED: Final = {"int8": np.dtype(np.int8), **_NAMED}

_NEMO: Final = re.compile(r"nrlre1:([a-z0-9]{1,8}):([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10}):")
_NEMO_HEAD: Final = 64  # longer than any header that the pattern matches
_LARGEST_ROW: Final = 1 << 31  # bytes; no row is that wide, and NumPy cannot shape some that are


@dataclass(frozen=True, slots=True)
class Sent:
    """One payload as it was sent: ``array`` ``[rows, layers, topk]`` of the wire's dtype, and the start it states."""

    format: str
    array: NDArray[Any]
    start: object = None
    #: Rows of the prompt's part, where prompt and completion came apart.
    prompt_rows: int | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What the caller knows of a payload; None where it does not."""

    num_layers: int | None = None
    topk: int | None = None
    dtype: str | None = None


def expected(num_layers: object, topk: object, dtype: object) -> Expected:
    """Return what the caller knows, checked."""
    if dtype is not None:
        dtype = str(named_dtype("dtype", dtype, _NAMED))
    return Expected(
        None if num_layers is None else integer("num_layers", num_layers, 1),
        None if topk is None else integer("topk", topk, 1),
        dtype,
    )


def named_dtype(name: str, value: object, names: Mapping[str, np.dtype[Any]] = _NAMED) -> np.dtype[Any]:
    """Return the dtype that a header names."""
    if not isinstance(value, str) or value not in names:
        got = repr(value[:40]) if isinstance(value, str) else f"a {kind(value)}"
        raise TypeError(f"{name} is {got}, need one of {', '.join(names)}")
    return names[value]


def load_json(name: str, text: str) -> Any:
    """Return the value of JSON text; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{name} is JSON nested too deeply, need it as an engine sends it") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON, need it as an engine sends it: {error}") from None


def read_payload(where: str, payload: object, known: Expected) -> Sent:
    """Return what ``payload`` holds, told from its own form; ``where`` begins each message."""
    if isinstance(payload, Mapping):
        sent = _read_object(where, payload, known)
    elif isinstance(payload, (str, bytes, bytearray, memoryview)):
        sent = _read_text(where, text_of(f"{where}payload", payload), known)
    elif isinstance(payload, np.ndarray) or is_tensor(payload):
        sent = _read_array(where, payload, known)
    elif isinstance(payload, (list, tuple)):
        pair = len(payload) == 2 and isinstance(payload[1], (str, bytes, bytearray, memoryview))
        sent = _read_rllm(where, payload, known) if pair else _read_nested(where, payload)
    else:
        raise TypeError(
            f"{where}payload is a {kind(payload)}, need base64 text, an object, nested lists, an ndarray or a tensor"
        )
    check_sizes(f"{where}{sent.format} payload", sent.array.shape, known)
    return sent


def read_split(where: str, prompt: object, completion: object, known: Expected) -> Sent:
    """Return the rows of prompt and completion, which vLLM 0.21 sends apart, as one array."""
    name = f"{where}split payload"
    parts = []
    for key, part in (("prompt_routed_experts", prompt), ("routed_experts", completion)):
        if not isinstance(part, (list, tuple)):
            raise TypeError(f"{name}: {key} is a {kind(part)}, need nested lists beside the other part")
        if part:
            parts.append(_nested_array(f"{name}: {key}", part))
    if not parts:
        raise ValueError(f"{name} has no rows, need at least one: layers and topk are unknown")
    if parts[0].shape[1:] != parts[-1].shape[1:]:
        raise ValueError(
            f"{name}: routed_experts has [layers, topk] = {list(parts[-1].shape[1:])}, "
            f"need {list(parts[0].shape[1:])} as in prompt_routed_experts"
        )
    array = np.concatenate(parts)
    check_sizes(name, array.shape, known)
    return Sent("split", array, prompt_rows=len(prompt))  # type: ignore[arg-type]  # a list or tuple, checked above


def check_sizes(name: str, shape: tuple[int, ...], known: Expected) -> None:
    """Refuse layers and topk that are not the caller's; a transposed capture would otherwise still fit."""
    for what, got, wanted in (("num_layers", shape[1], known.num_layers), ("topk", shape[2], known.topk)):
        if wanted is not None and got != wanted:
            raise ValueError(f"{name} has shape {list(shape)}, need {what} = {wanted}, got {got}")


# --- Objects: SkyRL, and prime-rl's with a start ---------------------------------------------------------------------


def _read_object(where: str, payload: Mapping[Any, Any], known: Expected) -> Sent:
    # prime-rl's states a start, or leaves the dtype out; SkyRL's always has the three keys.
    form = "prime-rl" if "start" in payload or "dtype" not in payload else "skyrl"
    name = f"{where}{form} payload"
    for key in ("data", "shape"):
        if key not in payload:
            raise ValueError(f"{name} has no {key!r}, need data, shape and dtype, or a whole response body")
    dtype = named_dtype(f"{name}: dtype", payload.get("dtype", "uint8"))
    shape = _shape(f"{name}: shape", payload["shape"])
    return Sent(form, _raw(name, payload["data"], dtype, shape, known), payload.get("start"))


def _shape(name: str, value: object) -> tuple[int, int, int]:
    """Return ``[rows, layers, topk]``; no rows are fine, no layers are not."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} is a {kind(value)}, need a list of 3 integers")
    if len(value) != 3:
        raise ValueError(f"{name} has {len(value)} sizes, need 3: [rows, layers, topk]")
    rows, layers, topk = (_size(f"{name}[{axis}]", size, min(axis, 1)) for axis, size in enumerate(value))
    return rows, layers, topk


def _size(name: str, value: object, minimum: int) -> int:
    size = integer(name, value, minimum)
    if size >= 1 << 31:
        raise ValueError(f"{name} is 2^{size.bit_length() - 1} or more, need less than 2^31")
    return size


def _raw(name: str, text: object, dtype: np.dtype[Any], shape: tuple[int, int, int], known: Expected) -> NDArray[Any]:
    """Return the array of base64 text whose shape is stated: the sizes must agree before a byte is decoded."""
    _agree(name, dtype, known)
    _check_row(name, dtype, shape)
    text = text_of(f"{name}: data", text)
    size, need = decoded_size(f"{name}: data", text), shape[0] * shape[1] * shape[2] * dtype.itemsize
    if size != need:
        raise ValueError(f"{name}: data has {size} bytes, need {need} for shape {list(shape)} of {dtype}")
    return _from_bytes(decode(f"{name}: data", text), 0, dtype, shape)


def _check_row(name: str, dtype: np.dtype[Any], shape: tuple[int, int, int]) -> None:
    """Refuse rows that nothing could hold: without rows, the number of bytes says nothing about the other sizes."""
    if shape[1] * shape[2] * dtype.itemsize >= _LARGEST_ROW:
        raise ValueError(f"{name} has shape {list(shape)} of {dtype}, need rows of less than {_LARGEST_ROW} bytes")


def _from_bytes(data: bytearray, offset: int, dtype: np.dtype[Any], shape: tuple[int, int, int]) -> NDArray[Any]:
    """Return the array over the decoded bytes themselves; their number is checked."""
    if 0 in shape:
        return np.empty(shape, dtype)
    array = np.frombuffer(data, dtype, offset=offset).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _agree(name: str, dtype: np.dtype[Any], known: Expected) -> None:
    if known.dtype is not None and dtype != np.dtype(known.dtype):
        raise TypeError(f"{name}: dtype is {dtype}, need {known.dtype} as declared beside it")


# --- Text: NeMo-RL, vLLM and SGLang ----------------------------------------------------------------------------------


def _read_text(where: str, text: Text, known: Expected) -> Sent:
    head = first(text, _NEMO_HEAD)
    if head.lstrip()[:1] in ("{", "[") or head.startswith("data:"):
        raise ValueError(f"{where}payload begins with {head[:8]!r}, need base64: call decode_response for a body")
    if ":" in head:
        return _read_nemo(where, text, head, known)
    if head.startswith(MAGIC_TEXT):
        return _read_npy(where, text, known)
    name = f"{where}sglang payload"
    dtype = np.dtype(known.dtype or np.int32)
    size = decoded_size(name, text)
    if known.num_layers is None or known.topk is None:
        raise ValueError(f"{name} has {size} bytes without a header, need num_layers= and topk= to shape them")
    rows, rest = divmod(size, known.num_layers * known.topk * dtype.itemsize)
    if rest:
        raise ValueError(
            f"{name} has {size} bytes, need a multiple of {known.num_layers * known.topk * dtype.itemsize} "
            f"({known.num_layers} layers x topk {known.topk} of {dtype})"
        )
    shape = (rows, known.num_layers, known.topk)
    _check_row(name, dtype, shape)
    return Sent("sglang", _from_bytes(decode(name, text), 0, dtype, shape))


def _read_nemo(where: str, text: Text, head: str, known: Expected) -> Sent:
    name = f"{where}nemo-rl payload"
    match = _NEMO.match(head)
    if match is None:
        raise ValueError(f"{name} begins with {head[:48]!r}, need nrlre1:<dtype>:<rows>x<layers>x<topk>:<base64>")
    dtype = named_dtype(f"{name}: dtype", match[1], _NAMED_SIGNED)
    shape = _shape(f"{name}: shape", [int(match[index]) for index in (2, 3, 4)])
    # A str cannot be sliced without a copy (2 ms for 16 MB); bytes can.
    return Sent("nemo-rl", _raw(name, text[match.end() :], dtype, shape, known))


def _read_npy(where: str, text: Text, known: Expected) -> Sent:
    name = f"{where}vllm payload"
    data = decode(name, text)
    header = read_header(name, data)
    dtype, shape = header.dtype, _shape(f"{name}: shape", header.sizes)
    _agree(name, dtype, known)
    _check_row(name, dtype, shape)
    need, size = shape[0] * shape[1] * shape[2] * dtype.itemsize, len(data) - header.end
    if size != need:
        raise ValueError(f"{name} has {size} bytes after its header, need {need} for shape {list(shape)} of {dtype}")
    if not header.fortran_order:
        return Sent("vllm", _from_bytes(data, header.end, dtype, shape))
    reverse = _from_bytes(data, header.end, dtype, (shape[2], shape[1], shape[0]))
    return Sent("vllm", np.ascontiguousarray(reverse.transpose()))


# --- Lists: nested ids, and rllm's pair ------------------------------------------------------------------------------


def _read_nested(where: str, payload: Any) -> Sent:
    return Sent("nested", _nested_array(f"{where}nested payload", payload))


def _nested_array(name: str, rows: Any) -> NDArray[np.int64]:
    """Return three levels of lists as int64; each level is checked as a whole before the next is touched."""
    if not rows:
        raise ValueError(f"{name} is empty, need at least one row: layers and topk are unknown")
    layers = _same_lengths(name, rows, "row")
    flat = list(chain.from_iterable(rows))
    topk = _same_lengths(name, flat, "layer", layers)
    for kind_of_id in set(map(type, chain.from_iterable(flat))):
        if kind_of_id is bool or not issubclass(kind_of_id, (int, np.integer)):
            index = next(i for i, ids in enumerate(flat) if kind_of_id in map(type, ids))
            at = [index // layers, index % layers, list(map(type, flat[index])).index(kind_of_id)]
            raise TypeError(f"{name}{at} is a {kind_of_id.__name__}, need an integer")
    try:
        ids = np.fromiter(chain.from_iterable(flat), np.int64, len(flat) * topk)
    except OverflowError:
        raise ValueError(f"{name} has an id outside int64, need ids below 2^31") from None
    return ids.reshape(len(rows), layers, topk)


def _same_lengths(name: str, lists: Any, what: str, layers: int = 0) -> int:
    """Return the length that all of ``lists`` have; at least 1. ``layers`` turns a position into [row, layer]."""
    if set(map(type, lists)) <= {list, tuple}:
        lengths = set(map(len, lists))
        if len(lengths) == 1 and 0 not in lengths:
            return lengths.pop()
    for index, item in enumerate(lists):  # something is wrong, or a subclass: name the first
        at = list(divmod(index, layers) if layers else (index,))
        if not isinstance(item, (list, tuple)):
            raise TypeError(f"{name}{at} is a {kind(item)}, need a list")
        if len(item) != len(lists[0]) or not item:
            need = len(lists[0]) or "at least 1"
            raise ValueError(f"{name}{at} has {len(item)} entries, need {need} (the {what} lists are equally long)")
    return len(lists[0])


def _read_rllm(where: str, payload: Any, known: Expected) -> Sent:
    name = f"{where}rllm payload"
    header, data = payload
    if isinstance(header, (bytes, bytearray)):
        header = bytes(header).decode("utf-8", "replace")
    if isinstance(header, str):
        header = load_json(f"{name}: header", header)
    if not isinstance(header, Mapping):
        raise TypeError(f"{name}: header is a {kind(header)}, need an object (or its JSON) with shape and dtype")
    for key in ("shape", "dtype"):
        if key not in header:
            raise ValueError(f"{name}: header has no {key!r}, need shape [layers, topk] and dtype")
    dtype, pair = named_dtype(f"{name}: dtype", header["dtype"]), header["shape"]
    if not isinstance(pair, (list, tuple)):
        raise TypeError(f"{name}: shape is a {kind(pair)}, need a list of 2 integers")
    if len(pair) != 2:
        raise ValueError(f"{name}: shape has {len(pair)} sizes, need 2: [layers, topk]")
    layers, topk = (_size(f"{name}: shape[{axis}]", size, 1) for axis, size in enumerate(pair))
    text = text_of(f"{name}: data", data)
    size, row = decoded_size(f"{name}: data", text), layers * topk * dtype.itemsize
    if size % row:
        raise ValueError(f"{name}: data has {size} bytes, need a multiple of {row} ({layers} x {topk} of {dtype})")
    return Sent("rllm", _raw(name, text, dtype, (size // row, layers, topk), known))


# --- Arrays, as an engine in this process hands them over ------------------------------------------------------------


def _read_array(where: str, payload: object, known: Expected) -> Sent:
    name = f"{where}array payload"
    array = np.asarray(host_array(name, payload, "integers"))
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, need integers")
    if array.ndim != 3:
        raise ValueError(f"{name} has {array.ndim} dimensions, need 3: [rows, layers, topk]")
    if array.shape[1] < 1 or array.shape[2] < 1:
        raise ValueError(f"{name} has shape {list(array.shape)}, need at least 1 layer and topk of at least 1")
    _agree(name, array.dtype, known)
    return Sent("array", array)
