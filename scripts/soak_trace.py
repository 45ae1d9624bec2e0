"""Random call sequences on traces against the naive model in ``tests/trace_model.py``, one a case.

Case i draws everything from the seed and i, so that a failure is reproduced by its number alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

_TESTS = str(Path(__file__).resolve().parent.parent / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)

import trace_model  # noqa: E402  (tests/ is not a package)


def check_case(seed, index):
    """Run one random call sequence; raise AssertionError where a trace and the model disagree."""
    try:
        trace_model.drive(np.random.default_rng([seed, index]))
    except AssertionError as error:
        raise AssertionError(f"case {index}: {error}") from error
    except Exception as error:
        raise AssertionError(f"case {index}: {type(error).__name__}: {error}") from error
