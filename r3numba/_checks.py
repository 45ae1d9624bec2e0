"""Checks of arguments: one helper a check, one form of message (name, need, got).

Nothing here imports torch: a tensor can only reach us when its owner has imported torch already.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Set
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

#: The only dtypes routes travel in, narrowest first: max id < 2^8, < 2^15, < 2^31.
CANONICAL: Final = (np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32))
CANONICAL_NAMES: Final = "uint8, int16 or int32"
#: Kept beside CANONICAL as a dict, so that the loop over trajectories pays one hash.
ITEMSIZE: Final = {dtype: dtype.itemsize for dtype in CANONICAL}


def kind(value: object) -> str:
    """Return how a message names the type of ``value``."""
    return type(value).__name__


def is_tensor(value: object) -> TypeGuard[Any]:
    """Say whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def integer(name: str, value: object, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``; bools and floats are no integers."""
    if isinstance(value, (bool, np.bool_)) or (is_tensor(value) and str(value.dtype) == "torch.bool"):
        raise TypeError(f"{name} is a bool, need an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the except branch is the check
    except TypeError:
        raise TypeError(f"{name} is a {kind(value)}, need an integer") from None
    if number < minimum:
        raise ValueError(f"{name} is {number}, need at least {minimum}")
    return number


def sequence(name: str, value: object, need: str) -> list[Any]:
    """Return the entries of a sequence, array or tensor; text, mappings and sets have no order that fits a batch."""
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} is a {kind(value)}, need {need}")
    try:
        entries: list[Any] = list(value)  # type: ignore[call-overload]  # the except branch is the check
    except TypeError:  # an array of rank 0 has __len__, too
        raise TypeError(f"{name} is a {kind(value)} of rank 0, need {need}") from None
    return entries


def host_array(name: str, value: object, need: str) -> NDArray[Any]:
    """Return an ndarray or a CPU tensor as an ndarray of the same memory; ``need`` names the dtypes."""
    if is_tensor(value):
        host_tensor(name, value)
        try:
            return np.asarray(value.detach().numpy())
        except (TypeError, RuntimeError):  # bfloat16 and its like, which NumPy does not have
            raise TypeError(f"{name} has dtype {value.dtype}, need {need}") from None
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a MaskedArray, need an ndarray or a CPU tensor: its mask would be ignored")
    if isinstance(value, np.ndarray):
        return value
    raise TypeError(f"{name} is a {kind(value)}, need an ndarray or a CPU tensor")


def as_array(value: Any) -> NDArray[Any]:
    """Return an ndarray or CPU tensor that passed its checks as an ndarray of the same memory."""
    return value.detach().numpy() if is_tensor(value) else value  # type: ignore[no-any-return]  # both are arrays


def contiguous(value: Any) -> Any:
    """Return an ndarray or tensor, copied where it is not C-contiguous."""
    return value.contiguous() if is_tensor(value) else np.ascontiguousarray(value)


def host_tensor(name: str, tensor: Any) -> None:
    """Refuse a tensor that the CPU cannot read in place."""
    if tensor.device.type != "cpu":
        raise TypeError(f"{name} is on device {str(tensor.device)!r}, need a CPU tensor: call .cpu() first")
    if str(tensor.layout) != "torch.strided":
        raise TypeError(f"{name} has layout {tensor.layout}, need a strided tensor")


def integer_vector(name: str, values: object, count: int | None = None) -> NDArray[np.int64]:
    """Return a sequence, ndarray or CPU tensor of integers as a new int64 array of one dimension."""
    given = is_tensor(values) or isinstance(values, np.ndarray)
    if given:
        array = host_array(name, values, "integers")
    else:
        array = _vector_of(name, sequence(name, values, "a sequence of integers"))
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions, need 1")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, need integers")
    if count is not None and len(array) != count:
        raise ValueError(f"{name} has {len(array)} entries, need {count}, one for each trajectory")
    if array.dtype == np.uint64 and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}[{int(array.argmax())}] is {int(array.max())}, need less than 2^63")
    return array.astype(np.int64, copy=given)  # a vector made here is ours already


def _vector_of(name: str, items: list[Any]) -> NDArray[np.int64]:
    array = np.empty(len(items), np.int64)
    for index, item in enumerate(items):
        if type(item) is not int:
            item = integer(f"{name}[{index}]", item, -(1 << 63))
        try:
            array[index] = item
        except OverflowError:
            raise ValueError(f"{name}[{index}] is {item}, need less than 2^63") from None
    return array


def not_negative(name: str, values: NDArray[np.int64]) -> None:
    """Refuse a vector with a negative entry, naming the first."""
    if len(values) and int(values.min()) < 0:
        index = int(np.argmax(values < 0))
        raise ValueError(f"{name}[{index}] is {int(values[index])}, need at least 0")


def canonical_dtype(name: str, dtype: object) -> np.dtype[Any]:
    """Return one of the canonical dtypes from anything that names one (a torch dtype too)."""
    text = str(dtype)
    try:
        found = np.dtype(text[6:] if text.startswith("torch.") else dtype)  # type: ignore[call-overload]  # dtype is checked right here
    except TypeError:
        raise TypeError(f"{name} is {dtype!r}, need {CANONICAL_NAMES}") from None
    if found not in ITEMSIZE:
        raise TypeError(f"{name} is {found}, need {CANONICAL_NAMES}")
    return CANONICAL[CANONICAL.index(found)]


def dtype_for(largest: int, name: str) -> np.dtype[Any]:
    """Return the narrowest canonical dtype that holds the id ``largest``."""
    for dtype in CANONICAL:
        if largest <= np.iinfo(dtype).max:
            return dtype
    raise ValueError(f"{name} needs ids up to {largest}, need ids below 2^31")


def experts_dtype(num_experts: object, topk: int) -> tuple[int, np.dtype[Any]]:
    """Return ``num_experts`` as an int and the canonical dtype that every rank derives from it."""
    count = integer("num_experts", num_experts, 1)
    if count < topk:
        raise ValueError(f"num_experts is {count}, need at least topk = {topk} (a dummy route has topk distinct ids)")
    return count, dtype_for(count - 1, f"num_experts = {count}")


def dummy_fits(topk: int, dtype: np.dtype[Any]) -> None:
    """Refuse a top-k whose dummy route ``0..topk-1`` the dtype cannot hold."""
    if topk - 1 > np.iinfo(dtype).max:
        raise ValueError(f"topk is {topk}, need at most {np.iinfo(dtype).max + 1} for {dtype} (the dummy is 0..topk-1)")
