"""The client against a server on the loopback device: what it sends, retries, closes and refuses."""

import asyncio
import gc
import json
import math
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("httpx", reason="needs the client extra")

from generate_server import EXPERTS, LAYERS, TOPK, GenerateServer, answer, rows_of, sampled

from r3numba import _generation, client
from r3numba.client import LOGPROB_FLOOR, RemoteGenerateClient, RemoteGenerateError
from r3numba.trace import RoutedExpertTrace
from r3numba.wire import encode_routes

PROMPT = list(range(100, 120))
CURSOR = "routed_experts_prompt_start"


@pytest.fixture
def server():
    with GenerateServer() as running:
        yield running


@pytest.fixture
def delays(monkeypatch):
    """Record the pauses between attempts in place of waiting."""
    found, sleep = [], asyncio.sleep

    async def record(seconds):
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client.asyncio, "sleep", record)
    return found


def generate(server, prompt=PROMPT, *, max_tokens=4, client_options=None, **options):
    """Make one request on a loop of its own."""

    async def call():
        options.setdefault("sampling_params", {"max_tokens": max_tokens})
        async with RemoteGenerateClient(server.url, **(client_options or {})) as remote:
            return await remote.generate(prompt, **options)

    return asyncio.run(call())


def changed(**changes):
    return lambda path, asked: answer(path, asked, **changes)


# --- What is sent, and what comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "path"), [("vllm", "/inference/v1/generate"), ("skyrl", "/skyrl/v1/generate")])
def test_both_endpoints(server, kind, path):
    found = generate(server, prompt_start=7, client_options={"server": kind})
    (asked,) = server.asked
    assert asked.path == path
    assert asked.body == {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, CURSOR: 7, "logprobs": 0}}
    assert found.token_ids == sampled(PROMPT, 4)
    assert all(type(token) is int for token in found.token_ids)
    assert found.logprobs.tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert (found.floored, found.finish_reason) == (0, "length")
    assert found.routes.format == kind
    assert (found.routes.start, found.routes.prompt_token_count, found.routes.generated_token_count) == (7, 20, 4)
    np.testing.assert_array_equal(found.routes.indices, rows_of(7, 23))


def test_optional_fields_are_sent(server):
    generate(
        server,
        np.array(PROMPT),
        sampling_params={"max_tokens": 2, "logprobs": 3, "temperature": 0.5},
        session_id="trajectory-7",
        extra={"cache_salt": "s", "priority": 2},
        client_options={"model": "adapter", "headers": {"Authorization": "Bearer x"}},
    )
    (asked,) = server.asked
    params = {"max_tokens": 2, "logprobs": 3, "temperature": 0.5, CURSOR: 0}
    wanted = {"token_ids": PROMPT, "sampling_params": params, "model": "adapter", "cache_salt": "s", "priority": 2}
    assert asked.body == wanted
    assert asked.headers["x-session-id"] == "trajectory-7"
    assert asked.headers["authorization"] == "Bearer x"
    assert asked.headers["accept-encoding"] == "identity"


def test_the_callers_sampling_params_stay_as_they_are(server):
    params = {"max_tokens": 3}
    generate(server, sampling_params=params, prompt_start=5)
    assert params == {"max_tokens": 3}


def test_skyrls_nested_lists(server):
    server.script = [changed(routed_experts=rows_of(7, 23).tolist())]
    found = generate(server, prompt_start=7, client_options={"server": "skyrl", "num_experts": EXPERTS})
    assert (found.routes.format, found.routes.indices.dtype, found.routes.start) == ("nested", np.uint8, 7)
    np.testing.assert_array_equal(found.routes.indices, rows_of(7, 23))


def test_rows_that_the_engine_did_not_record_stay_marked(server):
    rows = rows_of(0, 23).astype(np.int16)
    rows[4] = -1
    server.script = [changed(routed_experts=rows.tolist())]
    found = generate(server, client_options={"server": "skyrl"})
    assert np.flatnonzero(found.routes.missing).tolist() == [4]


def test_environment_proxies_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert generate(server).token_ids


def test_three_turns_into_a_trace(server):
    async def converse():
        tokens, trace, mask = [], RoutedExpertTrace(), []
        async with RemoteGenerateClient(server.url) as remote:
            for turn in range(3):
                tokens += [200 + turn] * (5 + turn)
                mask += [0] * (5 + turn)
                prompt = list(tokens)
                found = await remote.generate(
                    prompt, sampling_params={"max_tokens": 3}, prompt_start=trace.prompt_start
                )
                trace.record_generation(
                    prompt_token_count=len(prompt),
                    generated_token_count=len(found.token_ids),
                    routed_experts=found.routes,
                    prompt_token_ids=prompt,
                    generated_token_ids=found.token_ids,
                )
                tokens += found.token_ids
                mask += [1] * 3
        return trace.finalize(token_count=len(tokens), loss_mask=mask)

    np.testing.assert_array_equal(asyncio.run(converse()), rows_of(0, 26))
    assert [asked.body["sampling_params"][CURSOR] for asked in server.asked] == [0, 7, 16]
    assert server.connections == 1  # the pool keeps it between turns


# --- The cursor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("cursor", "error", "got"),
    [
        (True, TypeError, "is a bool, need an integer"),
        (False, TypeError, "is a bool, need an integer"),
        (np.True_, TypeError, "is a bool, need an integer"),
        (1.0, TypeError, "is a float, need an integer"),
        ("3", TypeError, "is a str, need an integer"),
        ([3], TypeError, "is a list, need an integer"),
        (-1, ValueError, "is -1, need at least 0"),
        (21, ValueError, "is 21, need at most the 20 tokens of the prompt"),
    ],
)
def test_bad_cursors_are_refused_before_sending(server, cursor, error, got, inside):
    options = {"sampling_params": {CURSOR: cursor}} if inside else {"prompt_start": cursor}
    with pytest.raises(error) as caught:
        generate(server, **options)
    name = f"sampling_params['{CURSOR}']" if inside else "prompt_start"
    assert str(caught.value) == f"{name} {got}"
    assert server.asked == []


@pytest.mark.parametrize("cursor", [0, 1, 19, 20, np.int64(20)])
def test_cursors_within_the_prompt(server, cursor):
    found = generate(server, prompt_start=cursor)
    assert server.asked[0].body["sampling_params"][CURSOR] == cursor
    np.testing.assert_array_equal(found.routes.indices, rows_of(int(cursor), 23))


def test_a_cursor_in_both_places(server):
    assert generate(server, sampling_params={CURSOR: 6}, prompt_start=6).routes.start == 6
    assert generate(server, sampling_params={CURSOR: 6, "max_tokens": 2}).routes.start == 6
    with pytest.raises(ValueError, match=r"prompt_start is 5, need 6 as sampling_params\['routed"):
        generate(server, sampling_params={CURSOR: 6}, prompt_start=5)
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": []}, ValueError, "prompt_token_ids is empty, need at least 1 token"),
        ({"prompt": [1.5]}, TypeError, r"prompt_token_ids\[0\] is a float"),
        ({"prompt": [True]}, TypeError, r"prompt_token_ids\[0\] is a bool"),
        ({"prompt": "text"}, TypeError, "prompt_token_ids"),
        ({"sampling_params": {"n": 2}}, ValueError, r"sampling_params\['n'\] is 2, need 1"),
        ({"sampling_params": {"temperature": math.nan}}, ValueError, "JSON"),
        ({"extra": {"stream": True}}, ValueError, "extra has 'stream', need fields other than"),
        ({"extra": {"sampling_params": {}}}, ValueError, "extra has 'sampling_params'"),
    ],
)
def test_bad_requests_are_refused_before_sending(server, options, error, message):
    with pytest.raises(error, match=message):
        generate(server, **options)
    assert server.asked == []


# --- Retries ---------------------------------------------------------------------------------------------------------

WHOLE = json.dumps(answer("/inference/v1/generate", {"token_ids": PROMPT})).encode()
UNDECODABLE = {
    "truncated JSON": WHOLE[:-30],
    "empty": b"",
    "not UTF-8": b"\xff" + WHOLE,
    "a page of a proxy": b"<html>gateway</html>",
    "null": b"null",
    "a list": b"[]",
    "no choices": b'{"choices": []}',
    "an error of status 200": b'{"error": {"message": "engine is dead"}}',
    "broken base64": WHOLE.replace(WHOLE[WHOLE.index(b"k05V") + 200 :][:4], b"AA*A"),
    "a lost part of the payload": json.dumps(
        answer("/", {"token_ids": PROMPT}, routed_experts=encode_routes(rows_of(0, 23), "vllm")[:-4])
    ).encode(),
}


@pytest.mark.parametrize("action", ["drop", "cut", (500, b"oops"), (502, b""), (503, b"{}"), *UNDECODABLE.values()])
def test_one_failure_is_retried(server, delays, action):
    server.script = [action]
    np.testing.assert_array_equal(generate(server).routes.indices, rows_of(0, 23))
    assert len(server.asked) == 2
    assert server.asked[0].body == server.asked[1].body
    assert len(delays) == 1


@pytest.mark.parametrize(
    ("action", "text", "status"),
    [
        ("drop", "RemoteProtocolError: Server disconnected", None),
        ("cut", "RemoteProtocolError: peer closed", None),
        ((503, b"no engine is alive"), "status 503: no engine is alive", 503),
        (UNDECODABLE["truncated JSON"], "body is not JSON", 200),
        (UNDECODABLE["an error of status 200"], "engine is dead", 200),
        (UNDECODABLE["broken base64"], "is not base64", 200),
    ],
)
@pytest.mark.parametrize("retries", [0, 2])
def test_failures_have_a_bound(server, delays, action, text, status, retries):
    server.script = [action] * 10
    with pytest.raises(RemoteGenerateError) as caught:
        generate(server, client_options={"retries": retries})
    assert len(server.asked) == retries + 1
    assert f"{retries + 1} attempts failed" in str(caught.value)
    assert text in str(caught.value)
    assert server.url in str(caught.value)
    assert caught.value.status == status
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_refused_connection_is_retried_and_bounded(delays):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = type("Nobody", (), {"url": f"http://127.0.0.1:{probe.getsockname()[1]}"})
        with pytest.raises(RemoteGenerateError, match="4 attempts failed, the last with ConnectError"):
            generate(server)
    assert len(delays) == 3


def test_pauses_grow_and_are_spread(server, delays, monkeypatch):
    spread = []
    monkeypatch.setattr(client.random, "uniform", lambda *limits: spread.append(limits) or 1.0)
    server.script = ["drop"] * 9
    generate(server, client_options={"retries": 9, "backoff": 0.25})
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert spread == [(0.5, 1.0)] * 9


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 429, 301])
def test_refusals_of_the_server_are_not_retried(server, delays, status):
    server.script = [(status, b'{"error": {"message": "routed_experts_prompt_start must be between 0 and 20"}}')] * 9
    with pytest.raises(RemoteGenerateError, match="routed_experts_prompt_start must be between 0 and 20") as caught:
        generate(server)
    assert f"status {status}" in str(caught.value)
    assert caught.value.status == status
    assert len(server.asked) == 1
    assert delays == []


def test_a_timeout_is_not_retried(server, delays):
    server.script = ["hang"] * 9
    with pytest.raises(RemoteGenerateError, match=r"no byte for 0.2 s"):
        generate(server, client_options={"timeout": 0.2})
    assert len(server.asked) == 1
    assert server.wait(lambda: server.asked[0].closed_early)


# --- A whole response that answers another request: never retried, never an array ------------------------------------


def without_usage(path, asked):
    return {"choices": answer(path, asked)["choices"]}


def ignoring_the_cursor(path, asked):
    return answer(path, {**asked, "sampling_params": {**asked["sampling_params"], CURSOR: 0}})


def counting_otherwise(path, asked):
    body = answer(path, asked)
    body["usage"]["prompt_tokens"] = 19
    rows = encode_routes(rows_of(5, 22), "vllm")
    body["choices"][0]["routed_experts"] = rows
    return body


def twice(path, asked):
    body = answer(path, asked)
    return {"choices": body["choices"] * 2}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (ignoring_the_cursor, "has 23 rows, need 18 (prompt 20 - prompt_start 5 + generated 4 - 1)"),
        (changed(routed_experts=encode_routes(rows_of(5, 22), "skyrl")), "has 17 rows, need 18"),
        (changed(routed_experts=[[[1, 2]] * 3] * 19), "has 19 rows, need 18"),
        (changed(routed_experts={**encode_routes(rows_of(5, 23), "skyrl"), "start": 4}), "start"),
        (counting_otherwise, "the server counts 19 prompt tokens, need the 20 sent"),
        (twice, "choices has 2 entries, need 1"),
        (changed(routed_experts=None), "no routed_experts, need them: start vLLM with --enable-return-routed-experts"),
        (changed(routed_experts=None, finish_reason="length"), "no routed_experts"),
        (changed(token_ids=None), "choices[0].token_ids is a NoneType"),
        (changed(token_ids=[1, 2, 3, True]), "choices[0].token_ids[3] is a bool"),
        (changed(logprobs={"content": [{"logprob": -1.0}] * 3}), "logprobs.content has 3 entries, need 4"),
        (changed(logprobs={"content": "abcd"}), "logprobs.content has a str, need 4"),
        (changed(logprobs={"content": [{"logprob": "-1.0"}] * 4}), "logprobs.content[0] is a str, need a number"),
        (changed(logprobs={"content": [{"logprob": True}] * 4}), "logprobs.content[0] is a bool, need a number"),
    ],
)
@pytest.mark.parametrize("counted", [True, False])
def test_misfits(server, delays, action, message, counted):
    def act(path, asked):
        body = action(path, asked)
        if not counted and action is not counting_otherwise:
            body.pop("usage", None)
        return body

    server.script = [act] * 9
    with pytest.raises((TypeError, ValueError, RemoteGenerateError)) as caught:
        generate(server, prompt_start=5)
    assert message in str(caught.value)
    if not isinstance(caught.value, RemoteGenerateError):  # what the payload itself contradicts does not decode
        assert len(server.asked) == 1


def test_sizes_are_checked(server, delays):
    for name, value in (("num_layers", LAYERS + 1), ("topk", TOPK + 1), ("num_experts", 8)):
        server.script = []
        with pytest.raises(RemoteGenerateError, match="attempts failed, the last with choices"):
            generate(server, client_options={name: value, "retries": 0})


def test_aborted_turns_have_no_routes(server):
    server.script = [
        changed(routed_experts=None, finish_reason="abort"),
        changed(routed_experts=None, token_ids=[], logprobs=None),
        changed(token_ids=[], logprobs={"content": []}, finish_reason="abort"),
    ]
    trace = RoutedExpertTrace()
    for count in (4, 0, 0):
        found = generate(server)
        assert found.routes is None
        assert len(found.token_ids) == len(found.logprobs) == count
        recorded = trace.record_generation(
            prompt_token_count=20, generated_token_count=count, routed_experts=found.routes
        )
        assert recorded.appended == 0
    assert trace.prompt_start == 0


# --- Log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logprobs", "wanted", "floored"),
    [
        (None, [LOGPROB_FLOOR] * 4, 4),
        ({}, [LOGPROB_FLOOR] * 4, 4),
        ({"content": None}, [LOGPROB_FLOOR] * 4, 4),
        ({"content": [{"logprob": -1.5}, {"logprob": None}, {}, None]}, [-1.5] + [LOGPROB_FLOOR] * 3, 3),
        ({"content": [{"logprob": math.nan}, {"logprob": -1}, {"logprob": -0.0}, {"logprob": math.inf}]},
         [LOGPROB_FLOOR, -1.0, 0.0, LOGPROB_FLOOR], 2),
        ({"content": [{"logprob": -math.inf}, {"logprob": -9999.0}, {"logprob": -1e9}, {"logprob": -9998.5}]},
         [LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR, -9998.5], 3),
    ],
)  # fmt: skip
def test_logprobs_are_floored_and_counted(server, logprobs, wanted, floored):
    server.script = [changed(logprobs=logprobs)]
    found = generate(server)
    assert LOGPROB_FLOOR == -9999.0
    assert found.logprobs.dtype == np.float64
    assert found.logprobs.tolist() == wanted
    assert found.floored == floored


def test_numbers_that_overflow(server):
    server.script = [WHOLE.replace(b"-0.25", b"-1e999").replace(b"-0.5", b"-" + b"9" * 400)]
    found = generate(server)
    assert found.logprobs.tolist() == [LOGPROB_FLOOR, LOGPROB_FLOOR, -0.75, -1.0]
    assert found.floored == 2


# --- Cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_closes_the_request(server):
    async def call():
        server.script = ["hang", "ok"]
        async with RemoteGenerateClient(server.url) as remote:
            task = asyncio.create_task(remote.generate(PROMPT))
            while not server.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.wait, lambda: server.asked[0].closed_early)
            return await remote.generate(PROMPT)  # on a connection of its own

    assert asyncio.run(call()).token_ids
    assert [asked.connection for asked in server.asked] == [1, 2]


def test_cancelling_one_call_leaves_the_others(server):
    async def call():
        server.script = ["hang"]
        async with RemoteGenerateClient(server.url) as remote:
            first = asyncio.create_task(remote.generate(PROMPT))
            while not server.asked:
                await asyncio.sleep(0.01)
            others = [asyncio.create_task(remote.generate(PROMPT, prompt_start=i)) for i in range(8)]
            first.cancel()
            return await asyncio.gather(*others)

    assert [found.routes.start for found in asyncio.run(call())] == list(range(8))


def test_cancelling_in_a_pause_sends_nothing_more(server):
    async def call():
        server.script = ["drop"] * 9
        async with RemoteGenerateClient(server.url, backoff=30) as remote:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(remote.generate(PROMPT), 0.3)

    asyncio.run(call())
    assert len(server.asked) == 1


# --- Loops and pools -------------------------------------------------------------------------------------------------


def closes_all(server, remote):
    return server.wait(lambda: server.open_connections == 0) and not remote._pools


def test_one_pool_a_loop_and_it_ends_with_the_loop(server):
    remote = RemoteGenerateClient(server.url)
    loops = []

    async def call():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(remote.generate(PROMPT) for _ in range(3)))
        assert len(remote._pools) == 1
        await remote.generate(PROMPT)

    for _ in range(2):  # the second loop finds no pool of the first
        asyncio.run(call())
        assert closes_all(server, remote)
    gc.collect()
    assert [loop() for loop in loops] == [None, None]
    assert server.connections == 6  # the fourth request of each loop took a connection of its pool


def test_many_threads_with_loops_of_their_own(server):
    remote, together, sizes = RemoteGenerateClient(server.url), threading.Barrier(4, timeout=20), []

    async def call(number):
        await remote.generate(PROMPT)
        await asyncio.to_thread(together.wait)
        sizes.append(len(remote._pools))
        found = [await remote.generate(PROMPT, prompt_start=number) for _ in range(5)]
        await asyncio.to_thread(together.wait)
        return {each.routes.start for each in found}

    with ThreadPoolExecutor(4) as threads:
        starts = list(threads.map(lambda number: asyncio.run(call(number)), range(4)))
    assert starts == [{0}, {1}, {2}, {3}]
    assert sizes == [4] * 4
    assert closes_all(server, remote)
    assert server.connections == 4


def test_closing_is_of_this_loop_and_a_later_call_opens_anew(server):
    remote = RemoteGenerateClient(server.url)

    async def call():
        await remote.aclose()  # nothing to close yet
        await remote.generate(PROMPT)
        await remote.aclose()
        assert closes_all(server, remote)
        await remote.aclose()
        await remote.generate(PROMPT)
        assert server.connections == 2

    asyncio.run(call())
    assert closes_all(server, remote)


def test_a_client_that_is_dropped_closes_its_connections(server):
    async def call():
        remote = RemoteGenerateClient(server.url)
        await remote.generate(PROMPT)
        assert server.open_connections == 1
        del remote
        gc.collect()
        for _ in range(200):
            if not server.open_connections:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the connection is still open")

    asyncio.run(call())


def test_a_loop_closed_without_its_generators_is_forgotten(server):
    remote = RemoteGenerateClient(server.url)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(remote._pool())  # no connection yet
    loop.close()
    assert len(remote._pools) == 1

    async def call():
        await remote.generate(PROMPT)
        assert list(remote._pools) == [asyncio.get_running_loop()]

    asyncio.run(call())
    assert not remote._pools


def test_as_many_connections_as_requests(server):
    async def call():
        server.script = ["hang"] * 120
        async with RemoteGenerateClient(server.url) as remote:
            tasks = [asyncio.create_task(remote.generate(PROMPT)) for _ in range(120)]
            while len(server.asked) < 120:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(call(), 30))
    assert server.wait(lambda: all(asked.closed_early for asked in server.asked))


def test_pickling(server):
    remote = RemoteGenerateClient(server.url, server="skyrl", model="m", retries=1, num_layers=LAYERS)

    async def call():
        await remote.generate(PROMPT)  # with an open pool, a running loop and a lock
        copy = pickle.loads(pickle.dumps(remote))
        assert not copy._pools
        assert len(remote._pools) == 1
        return copy

    copy = asyncio.run(call())

    async def again():
        async with copy:
            return await copy.generate(PROMPT, prompt_start=3)

    assert asyncio.run(again()).routes.start == 3
    assert repr(copy) == repr(remote) == f"RemoteGenerateClient('{server.url}/skyrl/v1/generate')"
    assert server.asked[1].body["model"] == "m"
    assert {**vars(copy), "_pools": 0, "_lock": 0} == {**vars(remote), "_pools": 0, "_lock": 0}


# --- Large bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "off_the_loop"), [(0, False), (1, True)])
def test_large_bodies_are_decoded_off_the_loop(server, monkeypatch, more, off_the_loop):
    size = client.OFFLOAD_BYTES + more
    server.script = [WHOLE + b" " * (size - len(WHOLE))]
    threads, read = [], _generation.read_generation

    def record(body, *arguments):
        threads.append((threading.get_ident(), len(body)))
        return read(body, *arguments)

    monkeypatch.setattr(client, "read_generation", record)
    assert generate(server).token_ids == sampled(PROMPT, 4)
    ((thread, length),) = threads
    assert length == size
    assert (thread != threading.get_ident()) is off_the_loop


def test_a_large_body_that_does_not_decode_is_retried(server, delays):
    server.script = [b"{" + b" " * client.OFFLOAD_BYTES]
    assert generate(server).token_ids
    assert len(server.asked) == 2


# --- The extra, and the arguments ------------------------------------------------------------------------------------


def test_httpx_is_imported_late_and_named_when_it_is_missing():
    code = """
import sys
import r3numba.client
assert "httpx" not in sys.modules and "numba" not in sys.modules and "torch" not in sys.modules
sys.modules["httpx"] = None
try:
    r3numba.client.RemoteGenerateClient("http://localhost:1")
except ImportError as error:
    assert "r3numba[client]" in str(error), error
else:
    raise SystemExit("no ImportError")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"base_url": 8000}, TypeError, "base_url is a int, need a str"),
        ({"base_url": "localhost:8000"}, ValueError, "base_url is 'localhost:8000', need http"),
        ({"server": "sglang"}, ValueError, "server is 'sglang', need 'vllm' or 'skyrl'"),
        ({"retries": -1}, ValueError, "retries is -1, need at least 0"),
        ({"retries": True}, TypeError, "retries is a bool"),
        ({"backoff": -0.5}, ValueError, "backoff is -0.5, need at least 0 seconds"),
        ({"backoff": math.nan}, ValueError, "backoff is nan"),
        ({"backoff": None}, TypeError, "backoff is a NoneType, need a number of seconds"),
        ({"timeout": True}, TypeError, "timeout is a bool"),
    ],
)
def test_arguments(options, error, message):
    with pytest.raises(error, match=message):
        RemoteGenerateClient(**{"base_url": "http://localhost:1", **options})


def test_a_slash_at_the_end_of_the_url():
    assert repr(RemoteGenerateClient("http://h:1/")) == "RemoteGenerateClient('http://h:1/inference/v1/generate')"
