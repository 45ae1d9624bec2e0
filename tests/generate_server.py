"""A generate server for tests: on the loopback device, in a thread, one scripted action for each request.

The rows it sends are a function of token index, layer and column alone, so that a test can tell any row from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass, field

import numpy as np

from r3numba.wire import encode_routes

LAYERS, TOPK, EXPERTS, VOCABULARY = 3, 2, 64, 512


def rows_of(begin, end):
    """Return the rows of tokens begin to end - 1, uint8 ``[end - begin, LAYERS, TOPK]``."""
    token, layer, column = np.ogrid[begin:end, :LAYERS, :TOPK]
    return ((token * 7 + layer * 3) % (EXPERTS - TOPK) + column).astype(np.uint8)


def sampled(prompt, count):
    """Return the tokens that the server generates after a prompt."""
    return [(sum(prompt) + 31 * i) % VOCABULARY for i in range(count)]


def answer(path, asked, **changes):
    """Return the body that answers a request, as vLLM or SkyRL (or vLLM's OpenAI endpoints) would write it."""
    inner = asked.get("sampling_params", asked)  # the OpenAI endpoints take everything at the top level
    prompt = asked.get("token_ids") or asked.get("prompt")
    if prompt is None:
        prompt = [ord(letter) for message in asked["messages"] for letter in message["content"]]
    count, cursor = inner.get("max_tokens", 4), inner.get("routed_experts_prompt_start", 0)
    tokens = sampled(prompt, count)
    content = [{"token": f"token_id:{token}", "logprob": -0.25 * (i + 1)} for i, token in enumerate(tokens)]
    rows = rows_of(cursor, len(prompt) + count - 1)
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "length",
        "logprobs": {"content": content},
        "routed_experts": encode_routes(rows, "skyrl" if path.startswith("/skyrl") else "vllm"),
    }
    body = {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}}
    if path.startswith("/skyrl"):
        del body["usage"], choice["index"]
    if path == "/v1/chat/completions":
        text = "".join(chr(97 + token % 26) for token in tokens)
        choice["message"] = {"role": "assistant", "content": text}
    if asked.get("return_token_ids"):
        (body if path == "/v1/chat/completions" else choice)["prompt_token_ids"] = prompt
    choice.update(changes)
    return body


@dataclass
class Asked:
    """One request as the server saw it."""

    path: str
    headers: dict
    body: dict
    connection: int
    closed_early: bool = False


@dataclass
class GenerateServer:
    """Serves while it is entered; ``script`` holds one action for each coming request, "ok" when it runs out.

    An action is "ok", "drop" (close without a byte), "cut" (close in the middle of the body), "hang" (never answer),
    a tuple (status, bytes), bytes (a body of status 200), or a callable (path, request body) -> body.
    """

    script: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    open_connections: int = 0
    connections: int = 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *exception):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def wait(self, holds, seconds=5.0):
        """Wait until ``holds()``; used for what the server learns a moment after the client."""
        for _ in range(int(seconds / 0.01)):
            if holds():
                return True
            threading.Event().wait(0.01)
        return False

    def _run(self, ready):
        try:
            self._loop.run_until_complete(self._serve(ready))
        finally:
            self._loop.close()

    async def _serve(self, ready):
        self._end, self._tasks = asyncio.Event(), set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        self.open_connections += 1
        number = self.connections
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            self._tasks.discard(asyncio.current_task())
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader, writer, number):
        """Answer one request; say whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        asked = Asked(head[0].split()[1], headers, body, number)
        self.asked.append(asked)
        action = self.script.pop(0) if self.script else "ok"
        if action == "drop":
            return False
        if action == "hang":
            asked.closed_early = not await reader.read(1)
            return False
        status, content = 200, b""
        if isinstance(action, tuple):
            status, content = action
        elif isinstance(action, bytes):
            content = action
        else:
            made = answer(asked.path, body) if action in ("ok", "cut") else action(asked.path, body)
            content = json.dumps(made).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n".encode())
        writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode())
        writer.write(content[: len(content) // 2] if action == "cut" else content)
        await writer.drain()
        return action != "cut"
