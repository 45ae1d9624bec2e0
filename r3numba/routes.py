"""Routes of one trajectory: to the canonical dtype in one scan, and the dummy route."""

from __future__ import annotations

import importlib
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ._checks import canonical_dtype, dtype_for, dummy_fits, experts_dtype, host_array, integer, is_tensor, sequence
from ._dispatch import run, thread_count
from ._policy import Policy, policy_from_environment

#: What one step of the NumPy scan reads: its minimum and maximum are two passes over cache, one over memory.
_BLOCK_BYTES = 256 << 10
#: How many ids speak for the dtype of all, before the scan.
_SAMPLE_IDS = 4096


def dummy_routes(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return dummy routes: ``0..topk-1`` along the last axis.

    Parameters
    ----------
    shape : ints ``[..., topk]``
        Usually ``(rows, layers, topk)``; topk at least 1.
    dtype : dtype
        uint8, int16 or int32 (NumPy's or torch's), wide enough for ``topk - 1``.

    Returns
    -------
    ndarray ``shape``
        New, C-contiguous. Legal for a router that has at least topk experts: distinct ids in every row.

    Raises
    ------
    TypeError, ValueError
        For another dtype, a negative or missing dimension, a topk that the dtype cannot hold.

    Notes
    -----
    Thread-safe.

    Examples
    --------
    >>> dummy_routes((2, 1, 3), "uint8").tolist()
    [[[0, 1, 2]], [[0, 1, 2]]]
    """
    kind = canonical_dtype("dtype", dtype)
    entries = sequence("shape", shape, "a sequence of integers")
    sizes = tuple(integer(f"shape[{axis}]", size, 0) for axis, size in enumerate(entries))
    if not sizes or sizes[-1] < 1:
        raise ValueError(f"shape is {list(sizes)}, need a last axis (topk) of at least 1")
    dummy_fits(sizes[-1], kind)
    result = np.empty(sizes, kind)
    result[...] = np.arange(sizes[-1], dtype=kind)
    return result


def compact_routes(
    routes: Any,
    *,
    num_experts: int | None = None,
    missing: Literal["raise", "mask"] = "raise",
    copy: bool | None = None,
    _policy: Policy | None = None,
) -> Any:
    """Bring routes of any integer dtype to the canonical one, in one scan.

    Parameters
    ----------
    routes : ndarray or tensor ``[rows, layers, topk]``, any integer dtype, any device
        Expert ids; only read.
    num_experts : int, optional
        Experts of a layer. It fixes the dtype, the same on every rank, and ids outside are an error. Without it the
        largest id decides.
    missing : {"raise", "mask"}
        What -1 means: an error, or a row that the engine did not record (all its ids must be -1).
    copy : bool, optional
        None copies where it must; True always; False raises ValueError where a copy would be needed.

    Returns
    -------
    ndarray or tensor ``[rows, layers, topk]``, uint8, int16 or int32
        C-contiguous and writable, of the kind and on the device of the input. It is the input itself where that is
        canonical already, and a view of it where only the sign changes (uint16 to int16, int8 to uint8).
    (routes, missing)
        With ``missing="mask"``: and a bool array ``[rows]``, True where a row was missing; such rows hold dummies.

    Raises
    ------
    TypeError
        For anything but integers.
    ValueError
        For a shape that is not ``[rows, layers, topk]``, a negative id, an id outside ``num_experts`` or past 2^31 - 1,
        a partly missing row; the message has the coordinates.

    Notes
    -----
    Thread-safe. The scan runs in a kernel, parallel when large; the GIL is released.

    Examples
    --------
    >>> import numpy as np
    >>> compact_routes(np.array([[[3, 200]]])).dtype, compact_routes(np.array([[[3, 200]]]), num_experts=512).dtype
    (dtype('uint8'), dtype('int16'))
    >>> routes, missing = compact_routes(np.array([[[-1, -1]], [[5, 2]]]), missing="mask")
    >>> routes.tolist(), missing.tolist()
    ([[[0, 1]], [[5, 2]]], [True, False])
    """
    if missing not in ("raise", "mask"):
        raise ValueError(f"missing is {missing!r}, need 'raise' or 'mask'")
    if copy is not None and copy is not True and copy is not False:
        raise TypeError(f"copy is {copy!r}, need None, True or False")
    policy = _policy or policy_from_environment()
    if is_tensor(routes) and routes.device.type != "cpu":
        return _compact_on_device(routes, num_experts, missing, copy)
    array = host_array("routes", routes, "integers")
    result, absent = _compact_array(array, num_experts, missing, copy, policy)
    given: Any = result
    if is_tensor(routes):
        torch = importlib.import_module("torch")
        given = routes if result is array else torch.from_numpy(result)
        absent = None if absent is None else torch.from_numpy(absent)
    return given if missing == "raise" else (given, absent)


def _compact_array(
    array: NDArray[Any], num_experts: int | None, missing: str, copy: bool | None, policy: Policy
) -> tuple[NDArray[Any], Any]:
    topk = _check_form(array.shape, array.dtype.kind in "iu", array.dtype)
    likely = _likely_dtype(array, num_experts, topk)
    narrows = copy is not False and array.itemsize > likely.itemsize
    result = np.empty(array.shape, likely) if narrows else None
    low, high = _scan(array, policy, result)
    absent = np.zeros(len(array), np.bool_) if missing == "mask" else None
    if low < 0:
        absent = _missing_rows(array, low, missing)
    filled = bool(absent is not None and absent.any())
    dtype = _target_dtype(array, high, num_experts, topk, filled=filled)
    if copy is False and filled:
        raise ValueError("copy is False, but missing rows have to be replaced by dummies")
    if not filled and _may_stay(array, dtype, copy):
        return (array if array.dtype == dtype else array.view(dtype)), absent
    if copy is False:
        raise ValueError(f"copy is False, but routes of {array.dtype} (strides {array.strides}) need one for {dtype}")
    if result is None or result.dtype != dtype:  # the same width, or the first ids spoke for another dtype than all
        result = array.astype(dtype, order="C")
    if absent is not None and filled:
        result[absent] = np.arange(topk, dtype=dtype)
    return result, absent


def _may_stay(array: NDArray[Any], dtype: np.dtype[Any], copy: bool | None) -> bool:
    """Say whether the result can be the array itself, or a view of it where only the sign changes."""
    flags = array.flags
    same = array.dtype.itemsize == dtype.itemsize and array.dtype.isnative
    return copy is not True and same and flags.c_contiguous and flags.writeable


def _likely_dtype(array: NDArray[Any], num_experts: int | None, topk: int) -> np.dtype[Any]:
    """Return the dtype of the result, before the scan: by ``num_experts``, or as the first ids suggest.

    So that one pass narrows and scans; where it was wrong, a second one is made.
    """
    if num_experts is not None:
        return experts_dtype(num_experts, topk)[1]
    highest = int(array[: 1 + _SAMPLE_IDS // math.prod(array.shape[1:])].max(initial=0))
    return dtype_for(min(highest, (1 << 31) - 1), "routes")


def _check_form(shape: tuple[int, ...], integers: bool, dtype: Any) -> int:
    if not integers:
        raise TypeError(f"routes has dtype {dtype}, need integers")
    if len(shape) != 3:
        raise ValueError(f"routes has {len(shape)} dimensions, need 3: [rows, layers, topk]")
    if shape[1] < 1 or shape[2] < 1:
        raise ValueError(f"routes has {shape[1]} layers and topk {shape[2]}, need at least 1 of each")
    return int(shape[2])


def _target_dtype(array: NDArray[Any], high: int, num_experts: int | None, topk: int, *, filled: bool) -> np.dtype[Any]:
    """Return the canonical dtype, having refused ids that it or ``num_experts`` does not allow."""
    if num_experts is not None:
        count, dtype = experts_dtype(num_experts, topk)
        if high >= count:
            raise ValueError(f"routes{_where(array, high)} is {high}, need less than num_experts = {count}")
        return dtype
    if high >= 1 << 31:
        raise ValueError(f"routes{_where(array, high)} is {high}, need less than 2^31")
    return dtype_for(max(high, topk - 1 if filled else 0), "routes")


def _missing_rows(array: NDArray[Any], low: int, missing: str) -> NDArray[np.bool_]:
    """Return which rows are missing (all -1), having refused every other negative id."""
    if missing == "raise" or low < -1:
        hint = "" if low < -1 else " (a row of -1 is missing: pass missing='mask')"
        raise ValueError(f"routes{_where(array, low)} is {low}, need at least 0{hint}")
    negative = array < 0
    absent: NDArray[Any] = np.asarray(negative.all(axis=(1, 2)))
    partly = negative.any(axis=(1, 2)) & ~absent
    if partly.any():
        row = int(np.argmax(partly))
        layer, position = np.argwhere(negative[row])[0].tolist()
        raise ValueError(
            f"routes[{row}, {layer}, {position}] is -1 but row {row} is not missing as a whole, "
            "need a row of -1 or of ids"
        )
    return absent


def _where(array: NDArray[Any], value: int) -> str:
    return str(np.argwhere(array == value)[0].tolist()) if array.size else "[]"


def _scan(array: NDArray[Any], policy: Policy, result: NDArray[Any] | None = None) -> tuple[int, int]:
    """Return the least and the largest id, (0, 0) without rows; write all to ``result``, which may be too narrow."""
    if array.size == 0:
        return 0, 0
    if not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):
        low, high = np.empty(1, array.dtype), np.empty(1, array.dtype)
        _scan_slices(np.array([[0, len(array), 0]]), low, high, array, result)
        return int(low[0]), int(high[0])
    flat = array.reshape(-1)
    flat.flags.writeable = False  # one compilation serves writable and read-only arrays; this is our own view
    target = None if result is None else result.reshape(-1)
    threads = thread_count(array.nbytes, fresh=False, num_threads=None, policy=policy)
    edges = np.linspace(0, flat.size, min(threads, flat.size) + 1).astype(np.int64)
    pieces = np.stack((edges[:-1], edges[1:], np.arange(len(edges) - 1)), axis=1)
    low, high = np.empty(len(pieces), flat.dtype), np.empty(len(pieces), flat.dtype)
    name = "scan" if target is None else "narrow"
    run(
        pieces, threads, policy, twin=f"{name}_serial", kernel="scan_parallel" if target is None else None,
        arguments=(low, high, flat) if target is None else (low, high, target, flat),
        slices=lambda part: _scan_slices(part, low, high, flat, target),
    )  # fmt: skip
    return int(low.min()), int(high.max())


def _scan_slices(
    pieces: NDArray[np.int64], low: NDArray[Any], high: NDArray[Any], array: NDArray[Any], result: NDArray[Any] | None
) -> None:
    """Write least and largest of each piece of the first axis, block by block, so that all but one pass hit cache."""
    step = max(1, _BLOCK_BYTES // (math.prod(array.shape[1:]) * array.itemsize))
    for begin, end, index in pieces.tolist():
        extremes = []
        for start in range(begin, end, step):
            part = slice(start, min(end, start + step))
            extremes.append((array[part].min(), array[part].max()))
            if result is not None:
                np.copyto(result[part], array[part], casting="unsafe")
        low[index] = min(least for least, _ in extremes)
        high[index] = max(most for _, most in extremes)


def _compact_on_device(routes: Any, num_experts: int | None, missing: str, copy: bool | None) -> Any:
    """Compact where the tensor lives, so that the narrow one is what crosses to the host."""
    torch = importlib.import_module("torch")
    integers = not (routes.is_floating_point() or routes.is_complex() or routes.dtype == torch.bool)
    topk = _check_form(tuple(routes.shape), integers, routes.dtype)
    if num_experts is not None:
        experts_dtype(num_experts, topk)  # its faults come first, as on the host
    wide = routes.to(torch.int64)
    low, high = (int(value) for value in torch.aminmax(wide)) if wide.numel() else (0, 0)
    if low < 0 and routes.dtype == torch.uint64:  # ids past 2^63 turned negative: the host has the words to refuse them
        return _compact_array(routes.cpu().numpy(), num_experts, missing, copy, policy_from_environment())
    # An error, or missing rows, which are few: the host looks where they are, and the device writes their dummies.
    gone = _missing_rows(wide.cpu().numpy(), low, missing) if low < 0 else np.zeros(len(routes), np.bool_)
    refused = high >= 1 << 31 or (num_experts is not None and high >= num_experts)
    where = wide.cpu().numpy() if refused else np.empty((0, 1, topk), np.int64)  # only a refusal names coordinates
    dtype = _target_dtype(where, high, num_experts, topk, filled=low < 0)
    absent = torch.from_numpy(gone).to(routes.device)
    if low < 0:
        if copy is False:
            raise ValueError("copy is False, but missing rows have to be replaced by dummies")
        wide = wide.clone()  # it is the input itself where that is int64
        wide[absent] = torch.arange(topk, device=routes.device)
        copy = True
    target = getattr(torch, str(dtype))
    if copy is not True and routes.is_contiguous() and routes.element_size() == dtype.itemsize:
        result = routes if routes.dtype == target else routes.view(target)
    elif copy is False:
        raise ValueError(f"copy is False, but routes of {routes.dtype} need one for {dtype}")
    else:
        result = wide.to(target).contiguous()
        result = result.clone() if result.data_ptr() == routes.data_ptr() else result
    return result if missing == "raise" else (result, absent)
