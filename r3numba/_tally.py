"""Columns of an audit's tally, int64 [segments, COLUMNS]; a segment is what one piece holds of one trajectory."""

from __future__ import annotations

from typing import Final

RANGE: Final = 0  #: ids out of range: count, token and layer of the first
DUPLICATE: Final = 3  #: (token, layer) pairs with an id twice, zeros aside: count, token, layer
ZERO: Final = 6  #: (token, layer) pairs that are all zero: count, token, layer
ZERO_ROW: Final = 9  #: tokens whose MoE layers are all zero: count, token
REPEATED: Final = 12  #: runs of one repeated row: count, token of the first, longest
COLUMNS: Final = 16
