"""Traces: the rows of one trajectory, collected turn by turn, so that no row is lost, doubled or invented.

A conversation is generated in turns. Each turn's request asks for the routes from the *cursor* on (``prompt_start``,
the rows held already), and its response brings one row for each token from there to the last but one: the last
sampled token was never evaluated, its row comes with the next turn's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._checks import integer, integer_vector
from ._rows import RowStore
from ._token_metadata import TokenMetadataTrace
from ._turn import SupportsRoutes, read_rows, read_token_ids, trained_tokens

__all__ = ["RecordedTurn", "RoutedExpertTrace", "SupportsRoutes", "TokenMetadataTrace"]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What one ``record_generation`` did.

    Attributes
    ----------
    appended : int
        Rows that the turn added.
    rewound : int
        Rows that were given up first, because the prompt no longer began with their tokens.
    aborted : {None, "no token", "no routes"}
        Why nothing was appended: no token was generated, or the response had no routes. The next turn brings the rows.
    prompt_start : int
        The cursor to send with the next request.
    """

    appended: int
    rewound: int
    aborted: Literal["no token", "no routes"] | None
    prompt_start: int


class RoutedExpertTrace:
    """The routes of one trajectory, from the responses to its turns.

    Send ``prompt_start`` with each request, and give each response to ``record_generation``. ``finalize`` returns the
    captured rows for the collation, once it is sure that every trained token has a route.

    Attributes
    ----------
    prompt_start : int
        Rows held, which is the cursor to send with the next request.
    uncovered : tuple of int
        The trained tokens without a route that the last ``finalize(missing="accept")`` let through.
    missing : ndarray ``[rows]``, bool, or None
        Rows that the engine did not record, ready for ``collate_routes(missing=[...])``; None where there is none.

    Notes
    -----
    A captured row never changes: it belongs to the policy that sampled, also after an update of the weights. A missing
    row holds the dummy route. The trace owns its rows: later writes into an array that it was given do not reach it.

    One thread at a time may use a trace; traces that were forked from one another may be used by different threads at
    once, and arrays that it handed out may be read by any thread at any time. Traces pickle, and ``copy.copy`` forks.

    A turn costs its own rows, whatever the trace holds (and with token ids the comparison of the prompt's ids). The
    memory held is that of the rows and at most an eighth more, also while a wider dtype comes; token ids are 8 bytes a
    row. Only a fork, and a trace that goes on while a fork or an earlier result of it is alive, is put together by a
    copy at ``finalize``. The GIL is released while rows are copied.

    Examples
    --------
    >>> import numpy as np
    >>> trace = RoutedExpertTrace()
    >>> rows = np.arange(32, dtype=np.uint8).reshape(8, 1, 4)
    >>> trace.record_generation(prompt_token_count=3, generated_token_count=2, routed_experts=rows[:4]).prompt_start
    4
    >>> trace.record_generation(prompt_token_count=7, generated_token_count=2, routed_experts=rows[4:]).prompt_start
    8
    >>> trace.finalize(token_count=9, loss_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1]).shape
    (8, 1, 4)
    """

    __slots__ = ("_count", "_missing", "_routes", "_tokens", "_uncovered")

    def __init__(self) -> None:
        self._count = 0  # the first _count rows of each store are the trace's; nothing else says so
        self._routes, self._missing = RowStore(), RowStore()
        self._tokens: RowStore | None = None  # None: the turns came without token ids
        self._uncovered: tuple[int, ...] = ()

    @property
    def prompt_start(self) -> int:
        """Return the rows held, which is the cursor to send with the next request."""
        return self._count

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Return the trained tokens without a route that the last ``finalize`` let through."""
        return self._uncovered

    @property
    def missing(self) -> NDArray[np.bool_] | None:
        """Return which rows the engine did not record, bool ``[rows]``, read-only; None where there is none."""
        mask = self._missing_mask()
        return mask if mask.any() else None

    def prompt_start_for(self, prompt_token_ids: Sequence[int] | ArrayLike) -> int:
        """Return the cursor to send with a prompt that may have been rendered anew: the rows that still hold for it.

        Parameters
        ----------
        prompt_token_ids : integers ``[prompt tokens]``

        Returns
        -------
        int
            Less than ``prompt_start`` where the prompt does not begin with the tokens of the rows held; then
            ``record_generation(on_mismatch="rewind")`` takes the rows from there on.

        Raises
        ------
        TypeError, ValueError
            For anything but integers, or if the rows held came without token ids.
        """
        prompt = integer_vector("prompt_token_ids", prompt_token_ids)
        self._refuse_other_kind(prompt)
        return self._common_prefix(prompt)

    def record_generation(
        self,
        *,
        prompt_token_count: int,
        generated_token_count: int,
        routed_experts: Any,
        prompt_token_ids: Sequence[int] | ArrayLike | None = None,
        generated_token_ids: Sequence[int] | ArrayLike | None = None,
        start: int | None = None,
        missing: Any = None,
        on_mismatch: Literal["raise", "rewind"] = "raise",
    ) -> RecordedTurn:
        """Append the rows that one turn captured: ``prompt - prompt_start + generated - 1`` of them, no more, no fewer.

        Parameters
        ----------
        prompt_token_count, generated_token_count : int
            Tokens of the request's prompt, at least 1, and of the response. Without a generated token the turn was
            aborted: nothing is appended, whatever ``routed_experts`` is.
        routed_experts : ndarray or CPU tensor ``[rows, layers, topk]``, uint8, int16 or int32; DecodedRoutes; or None
            The rows from the cursor on. An object with ``indices``, ``start`` and ``missing`` (what ``decode_routes``
            returns) says where its rows start, and that must be the cursor; an array's rows are taken to start there.
            None: the response had no routes, nothing is appended. Copied.
        prompt_token_ids, generated_token_ids : integers ``[tokens]``, optional
            Both, and on every turn, or never. With them the trace proves that the prompt begins with the tokens whose
            rows it holds.
        start : int, optional
            Where the rows start, where the caller knows it and the object does not (its ``start`` is None).
        missing : bool ``[rows]``, optional
            Rows of an array that the engine did not record (``compact_routes(missing="mask")`` returns it).
        on_mismatch : {"raise", "rewind"}
            What to do where the prompt does not begin with the tokens held (a chat template rendered the history anew):
            an error, or give up the rows past the common prefix. The rows must start there then: ask
            ``prompt_start_for`` for the cursor before the request. Without token ids nothing proves a common prefix,
            and "rewind" changes nothing.

        Returns
        -------
        RecordedTurn
            Rows appended, rows given up, why nothing was appended, and the next cursor.

        Raises
        ------
        TypeError
            For a wrong type or dtype (``compact_routes`` makes canonical ones), or token ids that are no integers.
        ValueError
            For a wrong number of rows, another start than the cursor or none, a prompt shorter than the cursor, token
            ids that differ from those held (with the position), ids given on some turns only, other layers or topk than
            before, a negative id.
        MemoryError
            Where the rows cannot fit in what the container may still use.

        Notes
        -----
        After a refused call the trace is as it was. (If memory runs out in the middle of a rewind, the trace is left
        rewound, with nothing appended.)
        """
        if on_mismatch not in ("raise", "rewind"):
            raise ValueError(f"on_mismatch is {on_mismatch!r}, need 'raise' or 'rewind'")
        prompt_count = integer("prompt_token_count", prompt_token_count, 1)
        generated_count = integer("generated_token_count", generated_token_count, 0)
        if generated_count == 0 or routed_experts is None:
            return RecordedTurn(0, 0, "no routes" if generated_count else "no token", self._count)
        ids = read_token_ids(prompt_token_ids, generated_token_ids, prompt_count, generated_count)
        cursor = self._cursor_for(ids and ids[0], prompt_count, on_mismatch)
        rows, absent = read_rows(routed_experts, start, missing, cursor, self._routes.trailing)
        needed = prompt_count - cursor + generated_count - 1
        if len(rows) != needed:
            raise ValueError(
                f"routed_experts has {len(rows)} rows, need {needed} (prompt_token_count {prompt_count} - prompt_start "
                f"{cursor} + generated_token_count {generated_count} - 1)"
            )
        return self._append(cursor, rows, absent, ids)

    def fork(self) -> RoutedExpertTrace:
        """Return a trace that holds the same rows, uncopied, for another continuation of the same prefix (``n > 1``).

        Turns that either records never show in the other.
        """
        other = RoutedExpertTrace()
        other._routes, other._missing = self._routes.fork(self._count), self._missing.fork(self._count)
        other._tokens = None if self._tokens is None else self._tokens.fork(self._count)
        other._count, other._uncovered = self._count, self._uncovered
        return other

    def finalize(
        self,
        *,
        token_count: int,
        loss_mask: Sequence[Any] | ArrayLike,
        missing: Literal["raise", "accept"] = "raise",
    ) -> NDArray[Any]:
        """Return the captured rows, having checked that every trained token has a route.

        The row of token i produced token i + 1. So a token that the loss mask trains needs the row before it: it must
        have been captured, and not be missing. The token at index ``prompt_start`` itself is covered by the last row.

        Parameters
        ----------
        token_count : int
            Tokens of the trajectory, T; at least the rows held.
        loss_mask : bools or numbers ``[T]``
            Sequence, ndarray or CPU tensor; a token is trained where it is not 0. Token 0 is never a target.
        missing : {"raise", "accept"}
            What a trained token without a route is: an error, or let through and listed in ``uncovered`` (a synthetic
            end-of-sequence token with loss 1, for example).

        Returns
        -------
        ndarray ``[rows, layers, topk]``, uint8, int16 or int32
            The captured rows alone, the widest dtype that came: padding is the collation's work. C-contiguous and
            read-only; it never changes, whatever becomes of the trace. No copy, except the first time after turns
            that were recorded by a fork, or while a fork or an earlier result was alive. ``[0, 0, 0]`` where no turn
            ever brought a row; the collation takes that as "nothing captured". Missing rows hold the dummy route: pass
            ``missing`` of the trace on with it.

        Raises
        ------
        TypeError
            If ``token_count`` is no integer, or ``loss_mask`` holds no numbers.
        ValueError
            If ``token_count`` is less than the rows held, ``loss_mask`` has another length, or (with "raise") a trained
            token has no route; the message names the first.
        MemoryError
            Where a copy cannot fit in what the container may still use.
        """
        if missing not in ("raise", "accept"):
            raise ValueError(f"missing is {missing!r}, need 'raise' or 'accept'")
        tokens = integer("token_count", token_count, 0)
        if tokens < self._count:
            raise ValueError(f"token_count is {tokens}, need at least {self._count}, the rows held")
        uncovered = trained_tokens(loss_mask, tokens)
        uncovered[:1] = False
        covered = uncovered[1 : self._count + 1]
        covered &= self._missing_mask()[: len(covered)]
        without = np.flatnonzero(uncovered).tolist()
        if without and missing == "raise":
            row = without[0] - 1
            why = "missing (the engine did not record it)" if row < self._count else f"past the {self._count} rows held"
            raise ValueError(
                f"loss_mask trains token {without[0]}, need 0 there: row {row}, which produced it, is {why}; "
                f"tokens without a route: {len(without)} (missing='accept' lets them through)"
            )
        result = np.empty((0, 0, 0), np.uint8) if self._routes.dtype is None else self._routes.gather(self._count)
        self._uncovered = tuple(without)
        return result

    def _cursor_for(self, prompt: NDArray[np.int64] | None, prompt_count: int, on_mismatch: str) -> int:
        """Return the rows held that the prompt keeps, or raise where it must keep all and does not."""
        self._refuse_other_kind(prompt)
        if prompt is not None:
            cursor = self._common_prefix(prompt)
            if on_mismatch == "rewind":
                return cursor
            if cursor < min(self._count, prompt_count):
                raise ValueError(
                    f"prompt_token_ids[{cursor}] is {prompt[cursor]}, need {self._held_tokens()[cursor]}, whose row is "
                    f"held: on_mismatch='rewind' would give up rows {cursor} to {self._count - 1}"
                )
        if prompt_count < self._count:
            raise ValueError(f"prompt_token_count is {prompt_count}, need at least prompt_start = {self._count}")
        return self._count

    def _refuse_other_kind(self, prompt: NDArray[np.int64] | None) -> None:
        """Refuse token ids for rows that came without them, and the other way round."""
        if self._count and (prompt is None) != (self._tokens is None):
            came, held = ("None", "with") if prompt is None else ("given", "without")
            raise ValueError(
                f"prompt_token_ids is {came}, but the trace holds {self._count} rows {held} token ids: need them on "
                "every turn, or never"
            )

    def _common_prefix(self, prompt: NDArray[np.int64]) -> int:
        """Return how many of the tokens whose rows are held the prompt begins with."""
        held = self._held_tokens()[: len(prompt)]
        differs = held != prompt[: len(held)]
        return int(np.argmax(differs)) if differs.any() else len(held)

    def _append(
        self,
        cursor: int,
        rows: NDArray[Any],
        absent: NDArray[np.bool_] | None,
        ids: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    ) -> RecordedTurn:
        """Write what was checked. The count comes last: until then the trace is what it was, or what it keeps."""
        rewound = self._count - cursor
        self._uncovered = ()
        self._count = cursor
        if not cursor:
            self._tokens = None if ids is None else RowStore()
        if ids is not None and self._tokens is not None:
            self._tokens.write(cursor, np.concatenate((ids[0][cursor:], ids[1][:-1])))
        self._missing.write(cursor, np.zeros(len(rows), np.bool_) if absent is None else absent)
        self._routes.write(cursor, rows, None if absent is None else (absent, np.arange(rows.shape[2])))
        self._count = cursor + len(rows)
        return RecordedTurn(len(rows), rewound, None, self._count)

    def _held_tokens(self) -> NDArray[np.int64]:
        """Return the ids of the tokens whose rows are held, int64 ``[rows]``."""
        if self._tokens is None or not self._count:
            return np.empty(0, np.int64)
        return self._tokens.gather(self._count)

    def _missing_mask(self) -> NDArray[np.bool_]:
        return self._missing.gather(self._count) if self._count else np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"RoutedExpertTrace(prompt_start={self._count}, dtype={self._routes.dtype})"

    def __getstate__(self) -> tuple[Any, ...]:
        stores = (self._routes, self._missing, self._tokens)
        return self._count, self._uncovered, *(store and store.held(self._count) for store in stores)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._count, self._uncovered, routes, missing, tokens = state
        self._routes, self._missing = RowStore(routes), RowStore(missing)
        self._tokens = None if tokens is None else RowStore(tokens)
