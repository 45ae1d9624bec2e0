"""The client of one inference server: token ids out, tokens, log-probabilities and routes back (extra ``client``).

It speaks vLLM's ``/inference/v1/generate`` and SkyRL's ``/skyrl/v1/generate``, which take and return token ids, so
that no chat template can render a history anew. httpx is imported with the first client, not with this module.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Final, Literal

from numpy.typing import ArrayLike

from ._checks import integer, integer_vector, kind
from ._generation import LOGPROB_FLOOR, Generation, UndecodableError, read_generation

__all__ = ["LOGPROB_FLOOR", "Generation", "RemoteGenerateClient", "RemoteGenerateError"]

#: Bodies above this many bytes are decoded in a thread: up to there the loop is held for less than a millisecond.
OFFLOAD_BYTES: Final = 1 << 18
#: Seconds that a connection is kept idle. vLLM closes it after 5; one closed under a request costs a retry.
_KEEPALIVE: Final = 4.0
_CONNECT_SECONDS, _LONGEST_DELAY = 30.0, 30.0
_CURSOR: Final = "routed_experts_prompt_start"
_PATHS: Final = {"vllm": "/inference/v1/generate", "skyrl": "/skyrl/v1/generate"}
_OWN_FIELDS: Final = ("token_ids", "sampling_params", "model", "stream")


class RemoteGenerateError(RuntimeError):
    """The server refused a request, or none of the attempts brought a whole response.

    Attributes
    ----------
    status : int or None
        The status of the last response; None where there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RemoteGenerateClient:
    """Generates from token ids on a remote server, and checks that the routes are those that were asked for.

    Parameters
    ----------
    base_url : str
        Of the server or its router, such as ``http://host:8000``.
    server : {"vllm", "skyrl"}
        Which endpoint: ``/inference/v1/generate`` (vLLM needs ``--enable-scale-out``) or ``/skyrl/v1/generate``.
    model : str, optional
        The model or adapter to name in each request.
    retries : int
        How often a request is sent again after a disconnect, a status of 5xx, or a body that does not decode. Each
        attempt samples anew. A status of 4xx and a timeout are never retried.
    backoff : float
        Seconds before the first retry; doubled for each further one up to 30, each shortened by up to a half at random.
    timeout : float, optional
        Seconds without a byte before a request is given up; None waits as long as a generation takes.
    num_layers, topk, num_experts : int, optional
        As for `decode_routes`.
    headers : mapping, optional
        Sent with every request, such as an authorization.
    trust_env : bool
        Whether httpx may use the environment's proxies; off, since servers of a cluster are reached directly.

    Raises
    ------
    ImportError
        Without httpx (extra ``client``).
    TypeError, ValueError
        For an argument that makes no sense.

    Notes
    -----
    Thread-safe: each event loop gets a connection pool of its own, with as many connections as there are requests.
    A loop's pool is closed by ``aclose`` on that loop, at the end of ``async with``, when ``asyncio.run`` ends, and
    when the client is collected. Cancelling a call closes its connection, and vLLM aborts the request. Bodies of more
    than 256 KiB are decoded in a thread, where only the parsing of JSON holds the GIL. Pickles without its pools.

    Examples
    --------
    >>> async def turn(client, prompt, trace):
    ...     return await client.generate(prompt, sampling_params={"max_tokens": 64}, prompt_start=trace.prompt_start)
    """

    def __init__(
        self,
        base_url: str,
        *,
        server: Literal["vllm", "skyrl"] = "vllm",
        model: str | None = None,
        retries: int = 3,
        backoff: float = 0.5,
        timeout: float | None = None,
        num_layers: int | None = None,
        topk: int | None = None,
        num_experts: int | None = None,
        headers: Mapping[str, str] | None = None,
        trust_env: bool = False,
    ) -> None:
        _import_httpx()
        if not isinstance(base_url, str):
            raise TypeError(f"base_url is a {kind(base_url)}, need a str")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r:.100}, need http:// or https://")
        if server not in _PATHS:
            raise ValueError(f"server is {server!r:.40}, need 'vllm' or 'skyrl'")
        self._url = base_url.rstrip("/") + _PATHS[server]
        self._model = model
        self._retries = integer("retries", retries, 0)
        self._backoff = _seconds("backoff", backoff)
        self._timeout = None if timeout is None else _seconds("timeout", timeout)
        self._sizes = {"num_layers": num_layers, "topk": topk, "num_experts": num_experts}
        self._headers = {**(headers or {}), "Accept-Encoding": "identity"}  # inflating would run on the loop
        self._trust_env = trust_env
        self._no_pools()

    def _no_pools(self) -> None:
        # Not a WeakKeyDictionary: an open connection refers to its loop. What ends a pool is the loop's end instead.
        self._pools: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[Any, None]]] = {}
        self._lock = threading.Lock()

    async def generate(
        self,
        prompt_token_ids: Iterable[int] | ArrayLike,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        prompt_start: int | None = None,
        session_id: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Generate one continuation of a prompt, with the routes from the cursor on.

        Parameters
        ----------
        prompt_token_ids : integers ``[prompt tokens]``
        sampling_params : mapping, optional
            vLLM's sampling parameters. ``logprobs`` is 0 (the sampled token's) where it is not stated; ``n`` is 1.
        prompt_start : int, optional
            The first token whose row is wanted: ``RoutedExpertTrace.prompt_start``; 0 by default. At most the length of
            the prompt. Sent as ``sampling_params["routed_experts_prompt_start"]``, and may be stated there instead.
        session_id : str, optional
            Sent as ``X-Session-ID``, by which a router keeps a conversation on the server that has its prefix.
        extra : mapping, optional
            Further fields of the request, beside ``token_ids``: ``cache_salt``, ``priority``, ``features``.

        Returns
        -------
        Generation

        Raises
        ------
        TypeError, ValueError
            Before anything is sent, for wrong arguments; and for a response that answers another request: other token
            counts, another number of rows, no routes, log-probabilities that do not match the tokens.
        RemoteGenerateError
            For a status of 4xx (with the server's text), a timeout, and after the last retry.
        """
        prompt = integer_vector("prompt_token_ids", prompt_token_ids)
        if not len(prompt):
            raise ValueError("prompt_token_ids is empty, need at least 1 token")
        params = dict(sampling_params or {})
        cursor = params[_CURSOR] = _cursor(params, prompt_start, len(prompt))
        params.setdefault("logprobs", 0)
        if params.get("n", 1) != 1:
            raise ValueError(f"sampling_params['n'] is {params['n']!r:.40}, need 1: fork() the trace, call for each")
        for name in _OWN_FIELDS:
            if name in (extra or {}):
                raise ValueError(f"extra has {name!r}, need fields other than {', '.join(_OWN_FIELDS)}")
        model = {} if self._model is None else {"model": self._model}
        request = {**(extra or {}), **model, "token_ids": prompt.tolist(), "sampling_params": params}
        content = json.dumps(request, allow_nan=False).encode()
        headers = {"Content-Type": "application/json"}
        if session_id is not None:
            headers["X-Session-ID"] = session_id
        return await self._send(content, headers, len(prompt), cursor)

    async def _send(self, content: bytes, headers: dict[str, str], prompt_count: int, cursor: int) -> Generation:
        httpx = _import_httpx()
        disconnects = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.DecodingError)
        failure, status, cause = "", None, None
        for attempt in range(self._retries + 1):
            if attempt:
                delay = min(self._backoff * 2 ** min(attempt - 1, 30), _LONGEST_DELAY)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # so that a fleet does not return at once
            pool = await self._pool()
            try:
                response = await pool.post(self._url, content=content, headers=headers)
            except disconnects as error:
                failure, status, cause = f"{type(error).__name__}: {error}", None, error
                continue
            except httpx.TimeoutException as error:
                raise RemoteGenerateError(f"POST {self._url}: no byte for {self._timeout} s, need some") from error
            status, cause = response.status_code, None
            if not response.is_success:
                failure = f"status {status}: {response.text[:2000]}"
                if status < 500:
                    raise RemoteGenerateError(f"POST {self._url}: {failure}", status)
                continue
            body = response.content
            try:
                if len(body) > OFFLOAD_BYTES:
                    return await asyncio.to_thread(read_generation, body, self._sizes, prompt_count, cursor)
                return read_generation(body, self._sizes, prompt_count, cursor)
            except UndecodableError as error:
                failure, cause = str(error), error
        failure = f"{self._retries + 1} attempts failed, the last with {failure}"
        raise RemoteGenerateError(f"POST {self._url}: {failure}", status) from cause

    async def _pool(self) -> Any:
        """Return this loop's pool, opened where there is none."""
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._pools if other.is_closed()]:
                del self._pools[other]
            if loop in self._pools:
                return self._pools[loop][0]
        # A loop ends its asynchronous generators, and one that is dropped is ended by its loop: this one holds the
        # pool, so that it is closed on its own loop in both cases. Nothing here waits, so no other task comes between.
        holder = _hold(self._open(), weakref.ref(self), loop)
        pool = await holder.__anext__()
        with self._lock:
            self._pools[loop] = pool, holder
        return pool

    def _open(self) -> Any:
        httpx = _import_httpx()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE)
        timeout = httpx.Timeout(self._timeout, connect=_CONNECT_SECONDS, pool=None)
        return httpx.AsyncClient(limits=limits, timeout=timeout, headers=self._headers, trust_env=self._trust_env)

    async def aclose(self) -> None:
        """Close this event loop's connections; a later call opens new ones."""
        with self._lock:
            held = self._pools.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[1].aclose()

    async def __aenter__(self) -> RemoteGenerateClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_pools", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._no_pools()

    def __repr__(self) -> str:
        return f"RemoteGenerateClient({self._url!r})"


async def _hold(pool: Any, client: Any, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Any, None]:
    try:
        yield pool
    finally:
        owner = client()
        if owner is not None:
            with owner._lock:
                owner._pools.pop(loop, None)
        await pool.aclose()


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ImportError("RemoteGenerateClient needs httpx: pip install 'r3numba[client]'") from None
    return httpx


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {kind(value)}, need a number of seconds")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}, need at least 0 seconds")
    return float(value)


def _cursor(params: Mapping[str, Any], prompt_start: int | None, prompt_count: int) -> int:
    """Return the cursor, stated in one place or in both alike."""
    stated = [(f"sampling_params[{_CURSOR!r}]", params.get(_CURSOR)), ("prompt_start", prompt_start)]
    found = [(name, integer(name, value, 0)) for name, value in stated if value is not None] or [("", 0)]
    for name, value in found:
        if value > prompt_count:
            raise ValueError(f"{name} is {value}, need at most the {prompt_count} tokens of the prompt")
    if found[0][1] != found[-1][1]:
        raise ValueError(f"prompt_start is {found[1][1]}, need {found[0][1]} as {found[0][0]} says")
    return found[0][1]
