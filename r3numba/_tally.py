"""What the audit and its kernels agree on: the columns of a tally, and the layers that are looked at by line.

A tally is int64 [segments, COLUMNS]; a segment is what one piece holds of one trajectory.
"""

from __future__ import annotations

from typing import Final

from ._plan import LINE

RANGE: Final = 0  #: (token, layer) pairs with an id out of range: count, token and layer of the first
DUPLICATE: Final = 3  #: (token, layer) pairs with an id twice, zeros aside: count, token, layer
ZERO: Final = 6  #: (token, layer) pairs that are all zero: count, token, layer
ZERO_ROW: Final = 9  #: tokens whose MoE layers are all zero: count, token
REPEATED: Final = 12  #: runs of one repeated row: count, token of the first, longest
PASSED: Final = 15  #: ids of the last run that passed as a whole; 0 again once it is read
COLUMNS: Final = 16

#: Item size and top-k of the layers that are looked at by line: every top-k that a model was seen to have.
LAYERS: Final = tuple(
    (itemsize, topk) for itemsize in (1, 2, 4) for topk in (1, 2, 4, 6, 8, 10, 12, 16, 22) if itemsize * topk <= LINE
)


def kind_of(itemsize: int, topk: int) -> int:
    """Return the number of a kind of layer."""
    return itemsize << 8 | topk


def step_of(itemsize: int, topk: int) -> int:
    """Return the bytes of the whole layers in a line."""
    return LINE // (itemsize * topk) * itemsize * topk
