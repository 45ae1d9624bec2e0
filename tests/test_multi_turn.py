"""The code of docs/multi_turn.md, run as it stands there."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("httpx", reason="needs the client extra")

import httpx
from generate_server import GenerateServer, rows_of

from r3numba.trace import RoutedExpertTrace

PAGE = Path(__file__).resolve().parent.parent / "docs" / "multi_turn.md"


@pytest.fixture
def server():
    with GenerateServer() as running:
        yield running


@pytest.fixture(scope="module")
def page():
    """What the blocks of the page define, one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name} block {number}", "exec"), names)
    return names


class Environment:
    """Answers each turn with the tokens that come next; None at the end."""

    def __init__(self, *observations):
        self.observations = list(observations)

    def reset(self):
        return self.step(None)

    def step(self, action):
        return self.observations.pop(0) if self.observations else None


def test_the_client_loop(page, server):
    environments = [Environment([5] * (3 + i), *([[7] * 4] * i)) for i in range(3)]  # 1, 2 and 3 turns
    batch = asyncio.run(page["rollouts"](server.url, environments))
    lengths = [3 + 64, 4 + 64 + 4 + 64, 5 + 64 + 4 + 64 + 4 + 64]
    assert batch.sequence_lengths.tolist() == lengths
    for index, length in enumerate(lengths):
        begin = batch.starts[index]
        np.testing.assert_array_equal(batch.array[index, begin : begin + length - 1], rows_of(0, length - 1))
    assert batch.captured_lengths.tolist() == [length - 1 for length in lengths]
    cursors = {}
    for asked in server.asked:
        cursor = asked.body["sampling_params"]["routed_experts_prompt_start"]
        cursors.setdefault(asked.headers["x-session-id"], []).append(cursor)
    assert cursors == {"episode-0": [0], "episode-1": [0, 67], "episode-2": [0, 68, 136]}


def test_an_aborted_turn_is_made_up_for(page, server):
    def abort(path, asked):
        return {"choices": [{"token_ids": [], "finish_reason": "abort", "logprobs": None, "routed_experts": None}]}

    server.script = ["ok", abort]

    async def play():
        async with page["RemoteGenerateClient"](server.url) as client:
            return await page["rollout"](client, Environment([1] * 5, [2] * 6, [3] * 7), "one")

    tokens, loss_mask, logprobs, routes, missing = asyncio.run(play())
    assert len(tokens) == len(loss_mask) == len(logprobs) == 5 + 64 + 6 + 7 + 64
    assert sum(loss_mask) == 128
    assert missing is None
    np.testing.assert_array_equal(routes, rows_of(0, len(tokens) - 1))


def test_completions(page, server):
    async def play():
        trace, tokens = RoutedExpertTrace(), [11, 12, 13]
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            for _ in range(3):
                tokens += await page["complete"](http, trace, list(tokens))
                tokens += [9, 9]
        return trace

    trace = asyncio.run(play())
    assert [asked.path for asked in server.asked] == ["/v1/completions"] * 3
    assert [asked.body["routed_experts_prompt_start"] for asked in server.asked] == [0, 66, 132]
    np.testing.assert_array_equal(
        trace.finalize(token_count=trace.prompt_start, loss_mask=[0] * trace.prompt_start), rows_of(0, 198)
    )


def test_chat_that_renders_its_history_anew(page, server):
    def render(messages):
        return [ord(letter) for message in messages for letter in message["content"]]

    async def play():
        trace, messages, rewound = RoutedExpertTrace(), [], []
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            for question in ("what is it", "are you sure"):
                messages.append({"role": "user", "content": question})
                prompt, generated, gone = await page["chat"](http, trace, messages, render)
                rewound.append(gone)
        return trace, prompt + generated, rewound

    trace, tokens, rewound = asyncio.run(play())
    assert [asked.path for asked in server.asked] == ["/v1/chat/completions"] * 2
    assert [asked.body["routed_experts_prompt_start"] for asked in server.asked] == [0, 10]
    assert rewound == [0, 63]  # no sampled token of the first answer came back as it was
    assert trace.prompt_start == len(tokens) - 1
    mask = [0] * (len(tokens) - 64) + [1] * 64
    np.testing.assert_array_equal(trace.finalize(token_count=len(tokens), loss_mask=mask), rows_of(0, len(tokens) - 1))


def test_the_account_of_rows():
    """The table of the page, turn by turn."""
    rows = re.findall(
        r"^\| \d \| (\d+) \| (\d+) \| (\d+) \| ([-\d +]+) = (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE
    )
    trace = RoutedExpertTrace()
    assert len(rows) == 2
    for prompt, cursor, generated, sum_of, came, held in rows:
        assert trace.prompt_start == int(cursor)
        assert sum_of == f"{prompt} - {cursor} + {generated} - 1"
        recorded = trace.record_generation(
            prompt_token_count=int(prompt),
            generated_token_count=int(generated),
            routed_experts=rows_of(0, int(came)),
        )
        assert recorded.prompt_start == int(held)
