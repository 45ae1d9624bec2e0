"""The oracle: what every layout must hold, written cell by cell and independent of the package's code."""

from __future__ import annotations

import numpy as np


def rectangle(routes, lengths, columns, width, dtype, missing=None):
    """Return indices and mask of the rectangle; ``columns[i]`` is the column of token 0."""
    shapes = [np.asarray(r).shape[1:] for r in routes if r is not None and len(r)]
    layers, topk = shapes[0]
    indices = np.empty((len(lengths), width, layers, topk), dtype)
    mask = np.empty((len(lengths), width), bool)
    for i in range(len(lengths)):
        captured = 0 if routes[i] is None else len(routes[i])
        for column in range(width):
            token = column - columns[i]
            dummy = not 0 <= token < captured
            if not dummy and missing is not None and missing[i] is not None:
                dummy = bool(missing[i][token])
            mask[i, column] = dummy
            indices[i, column] = np.arange(topk) if dummy else np.asarray(routes[i][token])
    return indices, mask


def pack(routes, lengths, dtype, missing=None):
    """Return indices, mask and offsets of the pack."""
    parts = []
    for i, length in enumerate(lengths):
        shaped = next(r for r in routes if r is not None and len(r))
        one = [routes[i], np.asarray(shaped)[:1]]
        gone = None if missing is None else [missing[i], None]
        indices, mask = rectangle(one, [length, 1], [0, 0], max(length, 1), dtype, gone)
        parts.append((indices[0, :length], mask[0, :length]))
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return np.concatenate([p for p, _ in parts]), np.concatenate([m for _, m in parts]), np.array(offsets)


def left(lengths, width):
    return [width - length for length in lengths]
