"""The wire: what engines and trainers send, to routes of one trajectory and back.

Nothing here is imported with the package: NumPy is all that this module needs, pybase64 (extra ``wire``) makes it fast,
and Numba is loaded by the first payload whose ids have to be scanned.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ._base64 import encode
from ._checks import CANONICAL_NAMES, ITEMSIZE, dummy_fits, experts_dtype, host_array, integer
from ._formats import WIRE_FORMATS, Expected, Sent, expected, named_dtype, read_payload, read_split
from ._policy import Policy, policy_from_environment
from ._responses import Choice, read_choices, read_holder
from .routes import _scan, compact_routes

__all__ = ["ENCODABLE_FORMATS", "WIRE_FORMATS", "DecodedRoutes", "decode_response", "decode_routes", "encode_routes"]

#: The formats that ``encode_routes`` writes.
ENCODABLE_FORMATS: Final = ("skyrl", "vllm", "sglang")

#: Never reached: the scan of a payload stays on the thread that decoded it. It is no slower than the decode (1 ms for
#: 12.6 MB), trainers decode many payloads at once, and two spinning threads on two busy CPUs took 10 to 16 ms for it.
_ONE_THREAD: Final = 1 << 62

_SIGNED_LIMIT: Final = {np.dtype(np.int8): 1 << 7, np.dtype(np.int16): 1 << 15, np.dtype(np.int32): 1 << 31}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DecodedRoutes:
    """Routes of one trajectory (or of one turn of it) as an engine sent them.

    Attributes
    ----------
    indices : ndarray ``[rows, layers, topk]``, uint8, int16 or int32
        Expert ids, C-contiguous; dummy routes where ``missing`` is True. Writable, except over a caller's read-only
        array.
    start : int or None
        The token that row 0 belongs to; None where neither the payload, the caller nor the token counts say.
    format : str
        One of ``WIRE_FORMATS``.
    missing : ndarray ``[rows]``, bool, or None
        True where the engine sent -1 in place of a row; None where it sent them all. Goes into
        ``collate_routes(missing=)``.
    prompt_token_count, generated_token_count : int or None
        Tokens of prompt and completion, where the body says so for this choice.

    Notes
    -----
    Thread-safe to read.

    Examples
    --------
    >>> decode_routes([[[3, 7]], [[-1, -1]]], start=5)
    DecodedRoutes(nested, uint8 [2, 1, 2], start=5, missing=1)
    """

    indices: NDArray[Any]
    start: int | None
    format: str
    missing: NDArray[np.bool_] | None = None
    prompt_token_count: int | None = None
    generated_token_count: int | None = None

    def __repr__(self) -> str:
        missing = "" if self.missing is None else f", missing={int(self.missing.sum())}"
        shape = list(self.indices.shape)
        return f"DecodedRoutes({self.format}, {self.indices.dtype} {shape}, start={self.start}{missing})"


def decode_routes(
    payload: Any,
    *,
    num_layers: int | None = None,
    topk: int | None = None,
    num_experts: int | None = None,
    start: int | None = None,
    dtype: str | None = None,
) -> DecodedRoutes:
    """Decode one payload of routes, whatever engine or trainer sent it.

    Parameters
    ----------
    payload : str, bytes, dict, list, ndarray or CPU tensor
        The value itself, told apart by its form: base64 of raw ids (``sglang``) or of a ``.npy`` stream (``vllm``),
        nested lists (``nested``), an object with ``data``, ``shape`` and ``dtype`` (``skyrl``), or with ``start``
        (``prime-rl``), a ``nrlre1:`` string (``nemo-rl``), a pair of header and base64 (``rllm``), an integer array
        (``array``). A mapping that holds ``routed_experts`` (such as SGLang's ``meta_info``, or with
        ``prompt_routed_experts`` beside it: ``split``) and a body of one choice are unwrapped.
    num_layers, topk : int, optional
        Needed where the format has no header (``sglang``), checked everywhere else.
    num_experts : int, optional
        Experts of a layer: fixes the dtype, the same on every rank, and ids outside are an error. Costs a scan.
    start : int, optional
        The token of row 0, as it was asked for. A payload that states another one is refused.
    dtype : {"int32", "uint16", "int16", "uint8"}, optional
        The dtype declared beside the payload (SGLang's ``routed_experts_dtype``); raw ids are int32 without it.

    Returns
    -------
    DecodedRoutes
        Over the decoded bytes themselves. Without ``num_experts`` the dtype is the payload's, where that is canonical
        (so that it does not change from turn to turn); uint16 becomes int16, int8 becomes uint8, both in place, and
        nested lists and other arrays take the narrowest that holds their largest id.

    Raises
    ------
    TypeError, ValueError
        For a payload that is not exactly what its format says, with format, field, need and got; and where the
        payload and the caller disagree.

    Notes
    -----
    Thread-safe; each call stays on its own thread. A copy is made of Fortran order, of ids that change their width, of
    missing rows, and by nested lists. Ids of signed dtypes (and of uint16) are scanned once for -1; those of uint8 are
    not, unless ``num_experts`` is given. pybase64 and the scan release the GIL; nested lists, and the standard
    library's base64, hold it.

    Examples
    --------
    >>> decode_routes({"data": "AwcFAg==", "shape": [2, 1, 2], "dtype": "uint8"}).indices.tolist()
    [[[3, 7]], [[5, 2]]]
    >>> decode_routes("AwAAAAcAAAA=", num_layers=1, topk=2, num_experts=512)
    DecodedRoutes(sglang, int16 [1, 1, 2], start=None)
    """
    known = expected(num_layers, topk, dtype)
    choice = Choice("", payload)
    if isinstance(payload, Mapping) and "data" not in payload:
        if "choices" in payload or "meta_info" in payload:
            choices = read_choices(payload)
            if len(choices) != 1:
                raise ValueError(f"payload is a body of {len(choices)} choices, need 1: call decode_response")
            choice = choices[0]
        elif payload.get("routed_experts") is not None:
            choice = read_holder(payload)
    return _decode(choice, known, num_experts, start)


def decode_response(
    body: Any,
    *,
    num_layers: int | None = None,
    topk: int | None = None,
    num_experts: int | None = None,
    start: int | None = None,
    dtype: str | None = None,
) -> list[DecodedRoutes]:
    """Decode the routes of a whole response, and say which tokens they belong to.

    Parameters
    ----------
    body : dict, list, str or bytes
        A body of ``/v1/completions``, ``/v1/chat/completions``, ``/inference/v1/generate``, ``/skyrl/v1/generate`` or
        SGLang's ``/generate`` (a list of them too): parsed, as JSON, or as the text of its event stream.
    num_layers, topk, num_experts, start : int, optional
        As for `decode_routes`; they hold for every choice.
    dtype : str, optional
        As for `decode_routes`, where the body does not declare it.

    Returns
    -------
    list of DecodedRoutes
        One for each choice, in the body's order (of a stream: by index). ``start`` is what the payload or the caller
        states, else ``prompt + completion - 1 - rows`` where the choice's own counts are known (token ids, SGLang's
        ``meta_info``, or the ``usage`` of a body with one choice), else None. It is never 0 by default.

    Raises
    ------
    TypeError, ValueError
        As `decode_routes`; for a choice without routes; and where the number of rows is not
        ``prompt + completion - 1 - start``, or the counts contradict each other.

    Notes
    -----
    Thread-safe. The costs are those of `decode_routes`, and of parsing JSON, which holds the GIL.

    Examples
    --------
    >>> routes = {"data": "AwcFAg==", "shape": [2, 1, 2], "dtype": "uint8"}
    >>> usage = {"prompt_tokens": 4, "completion_tokens": 2}
    >>> decode_response({"choices": [{"routed_experts": routes}], "usage": usage})
    [DecodedRoutes(skyrl, uint8 [2, 1, 2], start=3)]
    """
    known = expected(num_layers, topk, dtype)
    return [_decode(choice, known, num_experts, start) for choice in read_choices(body)]


def _decode(choice: Choice, known: Expected, num_experts: int | None, start: object) -> DecodedRoutes:
    declared = choice.dtype
    if declared is not None:
        declared = str(named_dtype(f"{choice.where}routed_experts_dtype", declared))
        if known.dtype not in (None, declared):
            raise ValueError(f"{choice.where}routed_experts_dtype is {declared}, need dtype = {known.dtype}")
        known = Expected(known.num_layers, known.topk, declared)
    if choice.prompt_part is not None:
        sent = read_split(choice.where, choice.prompt_part, choice.payload, known)
    else:
        sent = read_payload(choice.where, choice.payload, known)
    begin = _start(choice, sent, start)
    indices, missing = _canonical(f"{choice.where}{sent.format} payload", sent.array, num_experts)
    return DecodedRoutes(indices, begin, sent.format, missing, choice.prompt_tokens, choice.generated_tokens)


def _start(choice: Choice, sent: Sent, asked: object) -> int | None:
    """Return the token of row 0, having compared all that state it, and the rows with the tokens."""
    name, rows = f"{choice.where}{sent.format} payload", len(sent.array)
    prompt, generated = choice.prompt_tokens, choice.generated_tokens
    stated = [("the payload's start", sent.start), *choice.starts, ("start", asked)]
    if sent.prompt_rows is not None and prompt is not None:
        # The prompt's part says where it begins, and a row lost at the end must not shift it.
        stated.append((f"the prompt's {prompt} tokens less its {sent.prompt_rows} rows", prompt - sent.prompt_rows))
    begin: int | None = None
    source = ""
    for what, value in stated:
        if value is None:
            continue
        number = integer(f"{name}: {what}", value, 0)
        if begin is not None and number != begin:
            raise ValueError(f"{name}: {what} is {number}, need {begin} as {source} says")
        begin, source = number, what
    if prompt is not None and generated is not None:
        captured = prompt + generated - 1
        counts = f"prompt {prompt} + completion {generated} - 1"
        if begin is None:
            begin = captured - rows
            if begin < 0:
                raise ValueError(f"{name} has {rows} rows, need at most {captured} ({counts})")
        elif rows != captured - begin:
            raise ValueError(f"{name} has {rows} rows, need {captured - begin} ({counts} - start {begin})")
    if rows and begin is not None and prompt is not None and begin > prompt:
        # No engine starts past the prompt; rows of generated tokens are lost, and nobody knows which.
        raise ValueError(f"{name}: start is {begin} for {rows} rows, need at most the {prompt} tokens of the prompt")
    return begin


def _canonical(name: str, array: NDArray[Any], num_experts: int | None) -> tuple[NDArray[Any], Any]:
    """Return the ids in a canonical dtype, C-contiguous, and which rows are missing (None where none is)."""
    try:
        indices, missing = _settle(array, num_experts)
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from None
    return indices, missing if missing is not None and missing.any() else None


def _scan_policy() -> Policy:
    return replace(policy_from_environment(), serial_below_recycled=_ONE_THREAD)


def _settle(array: NDArray[Any], num_experts: int | None) -> tuple[NDArray[Any], Any]:
    if not (array.flags.c_contiguous and array.dtype.isnative):
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    dummy_fits(array.shape[2], array.dtype)
    if num_experts is not None:
        count, dtype = experts_dtype(num_experts, array.shape[2])
        if array.dtype == np.uint8 and count >= 256:  # no id can be outside
            return np.ascontiguousarray(array, dtype), None
        indices, missing = compact_routes(array, num_experts=count, missing="mask", _policy=_scan_policy())
        return indices, missing
    if array.dtype == np.uint8:
        return array, None
    signed = array.view(np.int16) if array.dtype == np.uint16 else array
    limit = _SIGNED_LIMIT.get(signed.dtype)
    if limit is not None and _scan(signed, _scan_policy())[0] >= 0:
        return (signed.view(np.uint8) if limit == 1 << 7 else signed), None
    if array.dtype == np.uint16:  # an id of 2^15 or more
        limit = 1 << 16
    indices, missing = compact_routes(array, num_experts=limit, missing="mask", _policy=_scan_policy())
    return indices, missing


def encode_routes(routes: Any, format: Literal["skyrl", "vllm", "sglang"], *, dtype: str | None = None) -> Any:
    """Encode routes as an engine sends them.

    Parameters
    ----------
    routes : ndarray or CPU tensor ``[rows, layers, topk]``, uint8, int16 or int32
        Expert ids, none of them negative; only read.
    format : {"skyrl", "vllm", "sglang"}
        ``skyrl``: an object with ``data``, ``shape`` and ``dtype``, in that order. ``vllm``: base64 of a ``.npy``
        stream. ``sglang``: base64 of the ids alone.
    dtype : {"int32", "uint16", "int16", "uint8"}, optional
        For ``sglang`` only: what the ids are written as, to be declared beside them; int32 by default.

    Returns
    -------
    dict or str
        Ready for ``json.dumps``.

    Raises
    ------
    TypeError, ValueError
        For another format, dtype or shape, a negative id, an id that ``dtype`` does not hold.

    Notes
    -----
    Thread-safe. One copy where the routes are strided or change their width, and one of the ids behind the ``.npy``
    header.

    Examples
    --------
    >>> import numpy as np
    >>> encode_routes(np.array([[[3, 7]], [[5, 2]]], np.uint8), format="skyrl")
    {'data': 'AwcFAg==', 'shape': [2, 1, 2], 'dtype': 'uint8'}
    >>> encode_routes(np.array([[[3, 7]]], np.uint8), format="sglang")
    'AwAAAAcAAAA='
    """
    if format not in ENCODABLE_FORMATS:
        raise ValueError(f"format is {format!r:.40}, need one of {', '.join(ENCODABLE_FORMATS)}")
    array = host_array("routes", routes, CANONICAL_NAMES)
    if array.dtype not in ITEMSIZE:
        raise TypeError(f"routes has dtype {array.dtype}, need {CANONICAL_NAMES}: call compact_routes first")
    if array.ndim != 3 or min(array.shape[1:]) < 1:
        raise ValueError(f"routes has shape {list(array.shape)}, need [rows, layers, topk], the last two at least 1")
    low, high = (0, 255) if array.dtype == np.uint8 else _scan(array, _scan_policy())
    if low < 0:
        raise ValueError(f"routes has an id of {low}, need at least 0 (missing rows cannot be sent)")
    if format == "sglang":
        wanted = named_dtype("dtype", "int32" if dtype is None else dtype)
        if high > np.iinfo(wanted).max:
            raise ValueError(f"routes has an id of {high}, need at most {np.iinfo(wanted).max} for {wanted}")
        return encode(np.ascontiguousarray(array, wanted))
    if dtype is not None:
        raise ValueError(f"dtype is {dtype!r:.40}, need None: {format} names the dtype of the routes themselves")
    array = np.ascontiguousarray(array)
    if format == "skyrl":
        return {"data": encode(array), "shape": list(array.shape), "dtype": str(array.dtype)}
    stream = io.BytesIO()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return encode(b"".join((stream.getvalue(), array.data)))
