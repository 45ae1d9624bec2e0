"""What a trace is given, checked: token ids, rows and loss masks. Nothing here changes a trace."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    CANONICAL_NAMES,
    ITEMSIZE,
    dummy_fits,
    host_array,
    host_tensor,
    integer,
    integer_vector,
    is_tensor,
    kind,
    sequence,
)

_NEED_CANONICAL = f"{CANONICAL_NAMES}: call compact_routes where they are captured"


@runtime_checkable
class SupportsRoutes(Protocol):
    """What ``decode_routes`` returns, as far as a trace needs it."""

    @property
    def indices(self) -> Any:
        """Routes ``[rows, layers, topk]``."""
        ...

    @property
    def start(self) -> int | None:
        """The token that row 0 belongs to; None where nobody said."""
        ...

    @property
    def missing(self) -> Any:
        """None, or bool ``[rows]``: rows that the engine did not record."""
        ...


def read_token_ids(
    prompt_token_ids: Any, generated_token_ids: Any, prompt_count: int, generated_count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the token ids of prompt and response, int64 ``[count]``, or None where neither was given."""
    if prompt_token_ids is None and generated_token_ids is None:
        return None
    vectors = []
    for part, ids, count in (
        ("prompt", prompt_token_ids, prompt_count),
        ("generated", generated_token_ids, generated_count),
    ):
        if ids is None:
            raise ValueError(
                f"{part}_token_ids is None, need both prompt_token_ids and generated_token_ids, or neither"
            )
        vector = integer_vector(f"{part}_token_ids", ids)
        if len(vector) != count:
            raise ValueError(f"{part}_token_ids has {len(vector)} entries, need {part}_token_count = {count}")
        vectors.append(vector)
    return vectors[0], vectors[1]


def read_rows(
    routed_experts: Any, start: Any, missing: Any, cursor: int, held: tuple[int, ...] | None
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return the rows as they came, and which are missing (None: none is), having checked all but their number.

    ``cursor`` is where they must start, ``held`` the layers and topk of the rows held.
    """
    says, source = None, routed_experts
    if not (isinstance(source, np.ndarray) or is_tensor(source)):
        if not isinstance(source, SupportsRoutes):
            raise TypeError(f"routed_experts is a {kind(source)}, need an ndarray, a CPU tensor or DecodedRoutes")
        if source.missing is not None:
            if missing is not None:
                raise ValueError("missing is given, but routed_experts has a mask of its own, need one of them")
            missing = source.missing
        says, source = source.start, source.indices
        if says is None and start is None:
            raise ValueError(f"routed_experts.start is None, need {cursor}, the cursor: pass start= where you know it")
    for name, value in (("routed_experts.start", says), ("start", start)):
        if value is not None and integer(name, value, 0) != cursor:
            raise ValueError(f"{name} is {value}, need {cursor}, the cursor (the rows held that the prompt keeps)")
    rows = host_array("routed_experts", source, _NEED_CANONICAL)
    if rows.dtype not in ITEMSIZE:
        raise TypeError(f"routed_experts has dtype {rows.dtype}, need {_NEED_CANONICAL}")
    if rows.ndim != 3:
        raise ValueError(f"routed_experts has {rows.ndim} dimensions, need 3: [rows, layers, topk]")
    layers, topk = rows.shape[1:]
    if layers < 1 or topk < 1:
        raise ValueError(f"routed_experts has {layers} layers and topk {topk}, need at least 1 of each")
    if held is not None and held != (layers, topk):
        raise ValueError(f"routed_experts has {layers} layers and topk {topk}, need {held[0]} and {held[1]} as before")
    absent = _read_missing(missing, rows)
    _refuse_negative(rows, absent)
    return rows, absent


def _read_missing(missing: Any, rows: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return the mask of missing rows; None where none is missing."""
    if missing is None:
        return None
    mask = host_array("missing", missing, "bool")
    if mask.dtype != np.bool_:
        raise TypeError(f"missing has dtype {mask.dtype}, need bool")
    if mask.shape != (len(rows),):
        raise ValueError(f"missing has shape {list(mask.shape)}, need [{len(rows)}], one for each row")
    if not mask.any():
        return None
    dummy_fits(rows.shape[2], rows.dtype)
    return mask


def _refuse_negative(rows: NDArray[Any], absent: NDArray[np.bool_] | None) -> None:
    """Refuse a negative id in a row that is not marked as missing."""
    if rows.dtype == np.uint8 or not rows.size or int(rows.min()) >= 0:
        return
    negative = rows < 0
    if absent is not None:
        negative[absent] = False
    if negative.any():
        where = np.argwhere(negative)[0].tolist()
        raise ValueError(
            f"routed_experts{where} is {int(rows[tuple(where)])}, need at least 0 (a row of -1 is missing: "
            "compact_routes(missing='mask') returns the mask for missing=)"
        )


def trained_tokens(loss_mask: Any, count: int) -> NDArray[np.bool_]:
    """Return which tokens are trained, a new bool array ``[count]``."""
    if is_tensor(loss_mask):
        host_tensor("loss_mask", loss_mask)
        array = (loss_mask.detach() != 0).numpy()  # there first: NumPy has no bfloat16
    elif isinstance(loss_mask, np.ndarray):
        array = host_array("loss_mask", loss_mask, "bools or numbers")
    else:
        try:
            array = np.asarray(sequence("loss_mask", loss_mask, "a sequence of bools or numbers"))
        except ValueError:
            raise ValueError("loss_mask is ragged, need one number for each token") from None
    if array.ndim != 1:
        raise ValueError(f"loss_mask has {array.ndim} dimensions, need 1")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"loss_mask has dtype {array.dtype}, need bools or numbers")
    if len(array) != count:
        raise ValueError(f"loss_mask has {len(array)} entries, need token_count = {count}")
    return np.array(array, np.bool_)
