"""Random captures with random faults, audited on every path, against the model in ``tests/audit_model.py``.

Case i draws everything from the seed and i, so that a failure is reproduced by its number alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import audit_model  # noqa: E402  (tests/ is not a package)

import r3numba._dispatch as dispatch  # noqa: E402
import r3numba.audit  # noqa: E402

# Three threads run whatever the host has: results may not depend on the count.
dispatch.permitted_cpus_cached = lambda: 3


def check_case(seed, index):
    """Audit one random batch alone and in the pass of both layouts, on every path."""
    rng = np.random.default_rng([seed, index])
    r3numba.audit.AUDIT_BLOCK_BYTES = int(rng.choice([1, 256, 2048, 256 << 10]))
    case = audit_model.draw(rng, most_rows=300 if index % 100 == 0 else 40)
    dtype = np.dtype(np.int32) if rng.random() < 0.3 else None
    try:
        audit_model.check(*case, dtype, piece_align=int(rng.choice([1, 64, 1024])))
    except AssertionError as error:
        raise AssertionError(f"case {index}: {error}") from error
