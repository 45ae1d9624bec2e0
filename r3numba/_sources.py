"""From what the caller passed to a table of sources: every check of a trajectory is made here, before any write.

The loop below is the price of a trajectory (about 1.3 us for an ndarray, 1.1 us for a tensor), so it reads each
attribute once and compares dtypes by identity before it asks the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import CANONICAL, CANONICAL_NAMES, ITEMSIZE, contiguous, host_tensor, is_tensor, kind, sequence
from ._plan import Sources

_REMEDY = f"need {CANONICAL_NAMES}: call compact_routes where they are captured"

#: Marks a C-contiguous source in the table of strides; no stride has this value, while 0 is one (a broadcast row).
_DENSE = np.iinfo(np.int64).min
_NO_STRIDES = np.empty((0, 3), np.int64)


def read_sources(routes: object) -> Sources:
    """Return the table of a batch's routes, or raise the first fault found, naming the trajectory.

    Entries are ndarrays or CPU tensors ``[rows, layers, topk]`` of uint8, int16 or int32, or None; entries without rows
    carry neither dtype nor shape.
    """
    entries = sequence("routes", routes, "a sequence with one array (or None) for each trajectory")
    if not entries:
        raise ValueError("routes is empty, need at least one trajectory")
    count = len(entries)
    strided_layout = getattr(sys.modules.get("torch"), "strided", None)
    address = np.zeros(count, np.int64)
    rows = np.zeros(count, np.int64)
    itemsize = np.ones(count, np.int8)
    strides: NDArray[np.int64] | None = None
    layers = topk = -1
    model = 0  # the trajectory that said how many layers and ids a row has
    widest = 0
    last: tuple[object, int] = (None, 0)  # dtype object and its itemsize
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        array = isinstance(entry, np.ndarray)
        if not array and not is_tensor(entry):
            hint = ": np.asarray(rows, np.uint8) makes one" if isinstance(entry, (list, tuple)) else ""
            raise TypeError(f"routes[{index}] is a {kind(entry)}, need an ndarray, a CPU tensor or None{hint}")
        shape = entry.shape
        if len(shape) and shape[0] == 0:
            continue
        if len(shape) != 3:
            raise ValueError(f"routes[{index}] has {len(shape)} dimensions, need 3: [rows, layers, topk]")
        if entry.dtype is not last[0]:
            last = (entry.dtype, _itemsize(index, entry))
            widest = max(widest, last[1])
        if array:
            if type(entry) is not np.ndarray and isinstance(entry, np.ma.MaskedArray):
                raise TypeError(f"routes[{index}] is a MaskedArray, need an ndarray: its mask would be ignored")
            contiguous = entry.flags.c_contiguous
        else:
            if not entry.is_cpu or entry.layout is not strided_layout:
                host_tensor(f"routes[{index}]", entry)
            contiguous = entry.is_contiguous()
        if shape[1] != layers or shape[2] != topk:
            if topk >= 0:
                _refuse_shape(index, shape, model, layers, topk)
            _, layers, topk = shape
            if layers < 1 or topk < 1:
                raise ValueError(f"routes[{index}] has {layers} layers and topk {topk}, need at least 1 of each")
            model = index
        address[index] = entry.ctypes.data if array else entry.data_ptr()
        rows[index] = shape[0]
        itemsize[index] = last[1]
        if not contiguous:
            if strides is None:
                strides = np.full((count, 3), _DENSE)
            strides[index] = entry.strides if array else [last[1] * stride for stride in entry.stride()]
    if topk < 0:
        raise ValueError("no trajectory has a captured row, need at least one: layers and topk are unknown")
    if strides is not None:
        dense = strides[:, 0] == _DENSE  # a C-contiguous source beside strided ones
        strides[dense] = itemsize[dense, None] * np.array([layers * topk, topk, 1])
    return Sources(
        held=entries,
        address=address,
        rows=rows,
        itemsize=itemsize,
        strides=_NO_STRIDES if strides is None else strides,
        layers=layers,
        topk=topk,
        dtype=CANONICAL[widest // 2],  # 1, 2 or 4 bytes
    )


def _itemsize(index: int, entry: Any) -> int:
    dtype = entry.dtype
    if not isinstance(dtype, np.dtype):
        name = str(dtype)
        dtype = np.dtype(name[6:]) if name in ("torch.uint8", "torch.int16", "torch.int32") else dtype
    size = ITEMSIZE.get(dtype)
    if size is None:
        raise TypeError(f"routes[{index}] has dtype {dtype}, {_REMEDY}")
    return size


def _refuse_shape(index: int, shape: Sequence[int], model: int, layers: int, topk: int) -> None:
    raise ValueError(
        f"routes[{index}] has {shape[1]} layers and topk {shape[2]}, need {layers} and {topk} as in routes[{model}]"
    )


def extent(sources: Sources, part: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lowest and the end address that each source of a part touches, int64; equal where it has no rows."""
    rows, itemsize = sources.rows[part], sources.itemsize[part]
    low, end = sources.address[part].copy(), sources.address[part] + itemsize
    elements = (sources.layers * sources.topk, sources.topk, 1)  # strides of a C-contiguous source
    for axis, count in ((2, sources.topk), (1, sources.layers), (0, rows)):
        if len(sources.strides):
            reach = sources.strides[part, axis] * (count - 1)
        else:
            reach = itemsize * (np.int64(elements[axis]) * (count - 1))
        low += np.minimum(reach, 0)
        end += np.maximum(reach, 0)
    return np.where(rows > 0, low, 0), np.where(rows > 0, end, 0)  # no rows touch nothing, not even a point


def read_missing(missing: object, sources: Sources) -> list[Any] | None:
    """Return the masks of missing rows, bool arrays or CPU tensors [rows] or None; None where there are none at all."""
    if missing is None:
        return None
    entries = sequence("missing", missing, "a sequence with one bool array (or None) for each trajectory")
    if len(entries) != len(sources.rows):
        raise ValueError(f"missing has {len(entries)} entries, need {len(sources.rows)}, one for each trajectory")
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        if is_tensor(entry):
            host_tensor(f"missing[{index}]", entry)
        elif not isinstance(entry, np.ndarray) or isinstance(entry, np.ma.MaskedArray):
            raise TypeError(f"missing[{index}] is a {kind(entry)}, need a bool array or None")
        if str(entry.dtype) not in ("bool", "torch.bool"):
            raise TypeError(f"missing[{index}] has dtype {entry.dtype}, need bool")
        rows = int(sources.rows[index])
        if tuple(entry.shape) != (rows,):
            raise ValueError(
                f"missing[{index}] has shape {list(entry.shape)}, need [{rows}], one for each captured row"
            )
    return entries


def effective(masks: list[Any] | None) -> list[Any] | None:
    """Return the masks that hold a missing row, C-contiguous: the row-by-row walk is for trajectories that need it."""
    if masks is None:
        return None
    kept = [contiguous(mask) if mask is not None and bool(mask.any()) else None for mask in masks]
    return kept if any(mask is not None for mask in kept) else None
