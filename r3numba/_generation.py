"""The body of a generate endpoint to what a caller uses of it: tokens, log-probabilities and checked routes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ._checks import integer_vector, kind
from ._formats import load_json
from .wire import DecodedRoutes, decode_response

#: What a log-probability becomes that is missing, not finite or below; vLLM's own stand-in for one that it lacks.
LOGPROB_FLOOR: Final = -9999.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one request brought.

    Attributes
    ----------
    token_ids : list of int
        The generated tokens.
    logprobs : ndarray ``[generated]``, float64
        Log-probability of each of them; ``LOGPROB_FLOOR`` where it is missing, not finite, or less than that.
    floored : int
        How many of ``logprobs`` are the floor.
    finish_reason : str or None
        As the server says: "stop", "length", "abort".
    routes : DecodedRoutes or None
        Rows from the cursor on, ``prompt - cursor + generated - 1`` of them; ``start`` and both token counts are set.
        None without a generated token, and for an aborted request that came without routes.
    """

    token_ids: list[int]
    logprobs: NDArray[np.float64]
    floored: int
    finish_reason: str | None
    routes: DecodedRoutes | None


class UndecodableError(ValueError):
    """A body that is not what a server wrote; asking again may help."""


def read_generation(body: bytes, sizes: Mapping[str, Any], prompt_count: int, cursor: int) -> Generation:
    """Return what a body holds: `UndecodableError` where it does not decode, another error where it does not fit."""
    try:
        parsed = load_json("body", body.decode("utf-8"))
    except ValueError as error:
        raise UndecodableError(f"{error} ({len(body)} bytes)") from error
    choices = parsed.get("choices") if isinstance(parsed, Mapping) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise UndecodableError(f"body has no choices, need one of them: {body[:200]!r}")
    if len(choices) != 1:
        raise ValueError(f"choices has {len(choices)} entries, need 1")
    choice = choices[0]
    tokens: list[int] = integer_vector("choices[0].token_ids", choice.get("token_ids")).tolist()
    logprobs, floored = _logprobs(choice.get("logprobs"), len(tokens))
    reason, routes = choice.get("finish_reason"), None
    if tokens and choice.get("routed_experts") is not None:
        try:
            (routes,) = decode_response(parsed, **sizes)
        except (TypeError, ValueError) as error:
            raise UndecodableError(str(error)) from error
        routes = _checked(routes, prompt_count, len(tokens), cursor)
    elif tokens and reason != "abort":
        raise ValueError("choices[0] has no routed_experts, need them: start vLLM with --enable-return-routed-experts")
    return Generation(tokens, logprobs, floored, reason, routes)


def _checked(routes: DecodedRoutes, prompt_count: int, generated_count: int, cursor: int) -> DecodedRoutes:
    """Return the routes with what is known of the request, having compared both."""
    name = f"choices[0].routed_experts ({routes.format})"
    if routes.prompt_token_count not in (None, prompt_count):
        raise ValueError(f"the server counts {routes.prompt_token_count} prompt tokens, need the {prompt_count} sent")
    needed = prompt_count - cursor + generated_count - 1
    if len(routes.indices) != needed:
        counts = f"prompt {prompt_count} - prompt_start {cursor} + generated {generated_count} - 1"
        raise ValueError(f"{name} has {len(routes.indices)} rows, need {needed} ({counts})")
    if routes.start not in (None, cursor):
        raise ValueError(f"{name} starts at {routes.start}, need prompt_start = {cursor}")
    return dataclasses.replace(
        routes, start=cursor, prompt_token_count=prompt_count, generated_token_count=generated_count
    )


def _logprobs(sent: object, count: int) -> tuple[NDArray[np.float64], int]:
    """Return the log-probability of each token, and how many of them are the floor."""
    entries = sent.get("content") if isinstance(sent, Mapping) else None
    if entries is None:  # nobody asked for them, or nothing was sampled
        entries = [None] * count
    if not isinstance(entries, list) or len(entries) != count:
        got = f"{len(entries)} entries" if isinstance(entries, list) else f"a {kind(entries)}"
        raise ValueError(f"choices[0].logprobs.content has {got}, need {count}, one for each token")
    values = np.full(count, LOGPROB_FLOOR)
    for index, entry in enumerate(entries):
        value = entry.get("logprob") if isinstance(entry, Mapping) else entry
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise TypeError(f"choices[0].logprobs.content[{index}] is a {kind(value)}, need a number")
        if value is not None and LOGPROB_FLOOR < value < math.inf:  # False for NaN
            values[index] = value
    return values, int(np.count_nonzero(values == LOGPROB_FLOOR))
