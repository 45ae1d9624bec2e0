"""Whole responses: the recorded bodies, where routes, starts and counts come from, and event streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
from wire_support import (
    BODIES,
    DATA,
    IDS,
    PAYLOADS,
    body_of,
    event,
    numpy_reads,
    recorded,
    refused,
    skyrl,
    text,
)

from r3numba.wire import decode_response, decode_routes, encode_routes

# ---- the recorded bodies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("given", ["parsed", "str", "bytes"])
def test_recorded_bodies(name, given):
    """NumPy reads the same arrays, and what we encode again is the same text."""
    body = recorded(name)
    source = {"parsed": body, "str": json.dumps(body, indent=1), "bytes": json.dumps(body).encode()}[given]
    decoded = decode_response(source, num_layers=4, topk=4)
    assert len(decoded) == len(body["choices"])
    for choice, one in zip(body["choices"], decoded, strict=True):
        assert one.format == "vllm"
        assert one.indices.dtype == np.uint8
        assert np.array_equal(one.indices, numpy_reads(choice["routed_experts"]))
        assert encode_routes(one.indices, format="vllm") == choice["routed_experts"]
        assert np.array_equal(decode_routes(choice["routed_experts"]).indices, one.indices)


@pytest.mark.parametrize(
    ("name", "starts", "counts"),
    [
        ("chat", [0], [(11, 6)]),
        ("completions", [0], [(20, 6)]),
        ("completions_batch", [None] * 2, [(None, None)] * 2),  # usage is a sum over two prompts
        ("completions_n2_start15", [None] * 2, [(None, None)] * 2),
        ("generate", [0], [(20, 6)]),
        ("generate_start20", [20], [(20, 6)]),
    ],
)
def test_starts_and_counts_of_recorded_bodies(name, starts, counts):
    decoded = decode_response(recorded(name))
    assert [one.start for one in decoded] == starts
    assert [(one.prompt_token_count, one.generated_token_count) for one in decoded] == counts


def test_the_tail_of_a_recorded_body_is_what_was_asked_from_its_start():
    (whole,), (tail,) = decode_response(recorded("generate")), decode_response(recorded("generate_start20"))
    assert np.array_equal(whole.indices[tail.start :], tail.indices)
    (completions,) = decode_response(recorded("completions"))
    assert np.array_equal(completions.indices, whole.indices)
    first, second = decode_response(recorded("completions_n2_start15"), start=15)
    assert (first.start, second.start) == (15, 15)
    assert np.array_equal(first.indices[:4], whole.indices[15:19])  # the rest of one prompt
    assert np.array_equal(first.indices[:5], second.indices[:5])


def test_recorded_stream():
    source = (DATA / "stream_generate.txt").read_text()
    (decoded,) = decode_response(source)
    (whole,) = decode_response(recorded("generate"))
    assert np.array_equal(decoded.indices, whole.indices[:23])  # same prompt, two tokens fewer
    assert decoded.start is None  # the prompt's length is nowhere in the stream
    assert (decoded.prompt_token_count, decoded.generated_token_count) == (None, 4)
    (stated,) = decode_response(source.encode(), start=0)
    assert stated.start == 0
    usage = '"usage":{"prompt_tokens":20,"completion_tokens":4}'
    (counted,) = decode_response(source.replace('"usage":null', usage))
    assert (counted.start, counted.prompt_token_count) == (0, 20)
    refused(lambda: decode_response(source.replace('"usage":null', usage), start=1), "23 rows, need 22")


@pytest.mark.parametrize("engine", ["bf16", "fp32"])
def test_recorded_rollouts_survive_every_format(engine):
    with np.load(DATA / f"rollouts_{engine}.npz") as rollouts:
        for index in range(16):
            routes = rollouts[f"r{index}"]
            rows, layers, topk = routes.shape
            prompt, generated = len(rollouts[f"p{index}"]), len(rollouts[f"c{index}"])
            forms = {
                "skyrl": encode_routes(routes, "skyrl"),
                "vllm": encode_routes(routes, "vllm"),
                "sglang": encode_routes(routes, "sglang"),
                "nested": routes.tolist(),
                "prime-rl": {**encode_routes(routes, "skyrl"), "start": 0},
                "nemo-rl": f"nrlre1:int16:{rows}x{layers}x{topk}:{text(routes, '<i2')}",
                "rllm": [{"shape": [layers, topk], "dtype": "uint8"}, text(routes, np.uint8)],
                "array": routes,
            }
            for form, payload in forms.items():
                (decoded,) = decode_response(
                    body_of(payload, prompt, generated), num_layers=layers, topk=topk, num_experts=16
                )
                assert decoded.format == form
                assert decoded.start == 0
                assert decoded.indices.dtype == np.uint8
                assert np.array_equal(decoded.indices, routes)
            parts = body_of(routes[prompt:].tolist(), prompt, generated)
            (split,) = decode_response({**parts, "prompt_routed_experts": routes[:prompt].tolist()})
            assert (split.format, split.start) == ("split", 0)
            assert np.array_equal(split.indices, routes)


# ---- starts and counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["routed_experts_start_len", "routed_experts_prompt_start"])
def test_a_start_beside_the_routes(key):
    sglang = {"routed_experts": text(IDS, "<i4"), key: 3, "prompt_tokens": 4, "completion_tokens": 2}
    options = {"num_layers": 2, "topk": 3}
    for body in ({"text": "", "meta_info": sglang}, [{"meta_info": sglang}]):
        (decoded,) = decode_response(body, **options)
        assert (decoded.start, decoded.prompt_token_count, decoded.generated_token_count) == (3, 4, 2)
    assert decode_routes(sglang, **options).start == 3
    # An engine that ignores the start it was asked for sends all rows: caught by the counts.
    refused(
        lambda: decode_response({"meta_info": {**sglang, key: 2}}, **options),
        "2 rows, need 3 (prompt 4 + completion 2 - 1",
    )
    refused(lambda: decode_response({"meta_info": sglang}, **options, start=0), "start is 0, need 3 as routed_experts")
    for bad in (True, "3", 3.0, -1):
        refused(lambda bad=bad: decode_response({"meta_info": {**sglang, key: bad}}, **options), key)
    prime = skyrl(start=2)
    refused(lambda: decode_response(body_of(prime, **{key: 3})), "is 3, need 2 as the payload's start says")
    assert decode_response(body_of(prime, **{key: 2}))[0].start == 2


def test_the_start_is_never_0_by_default():
    for form, (payload, options, _) in PAYLOADS.items():
        if form not in ("prime-rl", "split"):
            (decoded,) = decode_response(body_of(payload), **options)
            assert decoded.start is None
    assert decode_response(body_of(skyrl(start=None)))[0].start is None


def test_where_counts_come_from():
    choice = {"index": 0, "routed_experts": IDS}

    def start(choices, **body):
        return [one.start for one in decode_response({"choices": choices, **body})]

    usage = {"prompt_tokens": 6, "completion_tokens": 2}
    ids = {"prompt_token_ids": [1] * 6, "token_ids": [1] * 2}
    assert start([choice], usage=usage) == [5]
    assert start([{**choice, **ids}]) == [5]
    assert start([{**choice, "token_ids": [1] * 2}], prompt_token_ids=[1] * 6) == [5]
    assert start([{**choice, "token_ids": [1] * 2}], usage=usage) == [5]
    assert start([{**choice, "token_ids": [1] * 2}]) == [None]
    assert start([choice], usage={"prompt_tokens": 6}) == [None]
    assert start([choice], usage={}) == [None]
    # usage is a sum over the choices, and says nothing of one of them; nor where the one choice is not the first
    assert start([choice, {**choice, "index": 1}], usage=usage) == [None, None]
    assert start([{**choice, **ids}, {**choice, "index": 1, "token_ids": [1]}], usage=usage) == [5, None]
    assert start([{**choice, "index": 1}], usage=usage) == [None]
    assert start([choice, choice], prompt_token_ids=[[1], [2]], usage=usage) == [None, None]


def test_counts_that_cannot_be():
    refused(
        lambda: decode_response(body_of(IDS, 1, 1)),
        "nested payload has 2 rows, need at most 1 (prompt 1 + completion 1",
    )
    refused(lambda: decode_response(body_of(IDS, 0, 0)), "need at most -1")
    refused(
        lambda: decode_response(body_of(IDS, 6, 2), start=4), "2 rows, need 3 (prompt 6 + completion 2 - 1 - start 4)"
    )
    # Rows of generated tokens are lost: whether at the end or at the start, nobody knows.
    message = refused(lambda: decode_response(body_of(IDS, 6, 5)), "start is 8 for 2 rows, need at most the 6 tokens")
    assert "prompt" in message
    assert decode_response(body_of(IDS, 6, 3))[0].start == 6  # the prompt's length itself is allowed
    refused(lambda: decode_response(body_of(IDS, 6, 2, token_ids=[1])), "usage.completion_tokens is 2, need 1")
    refused(lambda: decode_response(body_of(IDS, 6, 2, prompt_token_ids=[1])), "usage.prompt_tokens is 6, need 1")
    for bad in (True, 1.0, "6", -1, [6]):
        refused(lambda bad=bad: decode_response(body_of(IDS, bad, 2)), "usage.prompt_tokens is")
        meta = {"routed_experts": IDS, "prompt_tokens": 3, "completion_tokens": bad}
        refused(lambda meta=meta: decode_response({"meta_info": meta}), "body.meta_info.completion_tokens is")
    refused(lambda: decode_response(body_of(IDS, token_ids="12")), "choices[0].token_ids is a str", kind=TypeError)
    refused(lambda: decode_response({**body_of(IDS), "usage": [1]}), "usage is a list", kind=TypeError)


# ---- bodies ----------------------------------------------------------------------------------------------------------


def test_where_the_routes_are():
    extension = {"routed_experts": IDS}
    for choice in ({"sgl_ext": extension}, {"sglext": extension}, {"meta_info": extension}, extension):
        (decoded,) = decode_response({"choices": [choice]})
        assert decoded.indices.tolist() == IDS
    assert decode_response({"choices": [{}], "sglext": extension})[0].indices.tolist() == IDS
    refused(
        lambda: decode_response({"choices": [{}, {}], "sglext": extension}), "choices[0] has routed_experts in no place"
    )
    two = {"choices": [{**extension, "sgl_ext": extension}]}
    refused(lambda: decode_response(two), "choices[0] and choices[0].sgl_ext, need one")
    refused(
        lambda: decode_response({"choices": [extension, {"routed_experts": None}]}),
        "choices[1] has routed_experts in no place",
    )
    broken = {"choices": [extension, {"sgl_ext": {"routed_experts": [[[1.5]]]}}]}
    refused(lambda: decode_response(broken), "choices[1].sgl_ext.routed_experts: nested payload[0, 0, 0] is a float")


BAD_BODIES = {
    "none": None,
    "number": 3,
    "set": {1},
    "empty-text": "",
    "blank": " \n",
    "number-text": "3",
    "null-text": "null",
    "text": '"x"',
    "html": "<html>502 Bad Gateway</html>",
    "cut": '{"choices": [{"routed_exp',
    "not-utf8": b"{\xff}",
    "utf16": '{"choices": []}'.encode("utf-16"),
    "list": [],
    "list-of-lists": [[]],
    "list-of-null": [None],
    "empty": {},
    "error": {"error": {"message": "x" * 99999, "code": 500}},
    "vllm-error": {"object": "error", "message": "no such model"},
    "no-choices": {"choices": []},
    "null-choices": {"choices": None},
    "number-choices": {"choices": 3},
    "text-choices": {"choices": "x"},
    "null-choice": {"choices": [None]},
    "list-choice": {"choices": [[]]},
    "empty-choice": {"choices": [{}]},
    "meta-null": {"meta_info": None},
    "meta-list": {"meta_info": []},
    "meta-empty": {"meta_info": {}},
    "deep": "[" * 200_000,
    "deep-object": '{"choices":' * 100_000,
    "deep-routes": '{"choices": [{"routed_experts": ' + "[" * 900 + "]" * 900 + "}]}",
    "bare-nan": '{"choices": [{"routed_experts": NaN}]}',
    "digits": '{"choices": [{"routed_experts": [[[' + "9" * 5000 + "]]]}]}",
    "trailing": '{"choices": []} {}',
    "holder": {"choices": [{"routed_experts": {"routed_experts": "AAAA"}}]},
    "deep-error": {"error": json.loads("[" * 500 + "]" * 500)},
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_bodies(case):
    refused(lambda: decode_response(BAD_BODIES[case]), "need")
    if isinstance(BAD_BODIES[case], (dict, list)):
        refused(lambda: decode_response(json.dumps(BAD_BODIES[case])))


def test_streams():
    first = event(choices=[{"index": 0, "token_ids": [1], "routed_experts": None}], prompt_token_ids=[5, 6])
    last = event(choices=[{"index": 0, "token_ids": [2], "routed_experts": IDS, "finish_reason": "stop"}])
    done = "data: [DONE]\n\n"
    plain = first + last + done
    for text_ in (
        plain,
        first + last,
        plain.strip(),
        plain.replace("\n", "\r\n"),
        plain.replace("\n", "\r"),
        "\ufeff" + plain,
        ": keep-alive\n\nevent: message\nid: 3\nretry: 5\n" + plain,
        plain.replace("data: ", "data:"),
        plain + event(choices=[], usage=None).replace("data", ":x"),
        # an event's data may come on several lines
        plain.replace('data: {"choices"', 'data: {\ndata: "choices"'),
    ):
        (decoded,) = decode_response(text_)
        assert decoded.indices.tolist() == IDS
        assert (decoded.start, decoded.prompt_token_count, decoded.generated_token_count) == (1, 2, 2)
    both = event(choices=[{"index": 1, "routed_experts": IDS[:1]}]) + event(
        choices=[{"index": 0, "routed_experts": IDS}]
    )
    assert [len(one.indices) for one in decode_response(both)] == [2, 1]
    own = "".join(event(index=i % 2, meta_info={"routed_experts": [IDS[0]] * (i + 1)}) for i in range(4)) + done
    assert [len(one.indices) for one in decode_response(own)] == [3, 4]
    # characters at which str.splitlines would cut, but the standard does not
    odd = 'data: {"choices": [{"routed_experts": [[[1]]], "text": "a\u2028b\x85c"}]}\n\n'
    assert decode_response(odd)[0].indices.tolist() == [[[1]]]


def test_streams_that_are_wrong():
    good = event(choices=[{"index": 0, "token_ids": [1], "routed_experts": IDS}])
    for wrong, needle in (
        (good[:-20], "is not JSON"),
        (good[:9], "is not JSON"),
        ("data: [DONE]\n\n", "choices is empty"),
        (good + "ata: {}\n\n", "line 2"),
        (good + "data: [DONE]\n\n" + good, "after [DONE]"),
        (good + event(error={"message": "engine died"}), "engine died"),
        (good + "data: 3\n\n", "event 1 is a int"),
        (good + event(choices=None), "choices is a NoneType"),
        (good + event(choices=[3]), "a choice is a int"),
        (good + event(choices=[{"index": -1}]), "index is -1"),
        (good + event(choices=[{"index": True}]), "index is a bool"),
        (good + event(choices=[{"token_ids": "x"}]), "token_ids is a str"),
        (good + event(choices=[{"token_ids": [7]}]), "after its routes"),
        (good + event(choices=[{"index": 1}]), "choices[1] has routed_experts in no place"),
        (good + event(meta_info={"routed_experts": IDS}), "need one kind"),
        ("data: " + "[" * 100_000, "nested too deeply"),
    ):
        refused(lambda wrong=wrong: decode_response(wrong), needle)
