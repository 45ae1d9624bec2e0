"""Fuzz of the wire: whatever comes in, only a TypeError, a ValueError or a right array comes out."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support import DTYPES, examples
from wire_support import BODIES, DATA, IDS, PAYLOADS, skyrl

from r3numba.wire import ENCODABLE_FORMATS, WIRE_FORMATS, DecodedRoutes, decode_response, decode_routes, encode_routes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import soak_wire

many = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAYERS_AND_TOPK = {"num_layers": 2, "topk": 3}
RECORDED = [(DATA / f"{name}.json").read_bytes() for name in BODIES] + [(DATA / "stream_generate.txt").read_bytes()]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["int32", "AAAA"])
)
keys = st.sampled_from(
    ["data", "shape", "dtype", "start", "choices", "routed_experts", "meta_info", "sgl_ext", "usage", "prompt_tokens",
     "completion_tokens", "token_ids", "prompt_token_ids", "prompt_routed_experts", "routed_experts_dtype", "index"]
) | st.text(max_size=3)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=25
)
routes = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(
        dtype,
        st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 5)),
        elements=st.integers(0, int(np.iinfo(dtype).max)),
    )
)


def survives(call, *arguments, **options):
    """Call, and check that what comes out is a refusal (any other exception is a failure) or well-formed routes."""
    try:
        result = call(*arguments, **options)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    results = result if isinstance(result, list) else [result]
    for decoded in results:
        assert isinstance(decoded, DecodedRoutes)
        assert decoded.format in WIRE_FORMATS
        assert decoded.indices.ndim == 3
        assert decoded.indices.dtype in DTYPES
        assert decoded.indices.flags.c_contiguous
        assert not decoded.indices.size or decoded.indices.min() >= 0
        assert decoded.start is None or decoded.start >= 0
        assert decoded.missing is None or decoded.missing.shape == (len(decoded.indices),)
    return "accepted"


@many
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(data, framed):
    data = base64.b64encode(data) if framed else data
    for payload in (data, data.decode("latin-1"), bytearray(data), memoryview(data)):
        survives(decode_routes, payload, **LAYERS_AND_TOPK)
        survives(decode_response, payload, **LAYERS_AND_TOPK)


@many
@given(st.text(max_size=200))
def test_random_text(text):
    for payload in (text, "nrlre1:" + text, "data: " + text, "{" + text, "k05VTVBZ" + text):
        survives(decode_routes, payload, **LAYERS_AND_TOPK)
        survives(decode_response, payload, **LAYERS_AND_TOPK)
    survives(decode_routes, skyrl(data=text))
    survives(decode_routes, [text, "AAAA"])


@many
@given(st.binary(min_size=1, max_size=120), st.integers(0, 3), st.sampled_from([b"\x01\x00", b"\x02\x00", b"\x03\x00"]))
def test_random_npy_headers(header, cut, version):
    wide = 2 if version == b"\x01\x00" else 4
    stream = b"\x93NUMPY" + version + (len(header) - min(cut, len(header))).to_bytes(wide, "little") + header
    survives(decode_routes, base64.b64encode(stream).decode())


@many
@given(st.data())
def test_mutated_npy_headers(data):
    header = bytearray(b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), }\n")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(header) - 1))
        header[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    stream = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + bytes(header) + bytes(range(12))
    survives(decode_routes, base64.b64encode(stream).decode())


@many
@given(values)
def test_random_json(value):
    survives(decode_routes, value, **LAYERS_AND_TOPK)
    survives(decode_response, value, **LAYERS_AND_TOPK)
    as_text = json.dumps(value)
    survives(decode_response, as_text, **LAYERS_AND_TOPK)
    survives(decode_response, f"data: {as_text}\n\ndata: [DONE]\n\n", **LAYERS_AND_TOPK)
    survives(decode_response, {"choices": [{"routed_experts": value}]}, **LAYERS_AND_TOPK)
    survives(decode_response, {"choices": [value], "usage": value, "prompt_routed_experts": value})


@many
@given(st.sampled_from(WIRE_FORMATS), values, st.data())
def test_one_field_replaced(form, value, data):
    payload, options, _ = PAYLOADS[form]
    if isinstance(payload, dict):
        payload = {**payload, data.draw(st.sampled_from(sorted(payload))): value}
    elif isinstance(payload, list) and form == "rllm":
        payload = [{**json.loads(payload[0]), data.draw(st.sampled_from(["shape", "dtype"])): value}, payload[1]]
    elif isinstance(payload, list):
        payload = [payload[0], [payload[1][0], value]] if data.draw(st.booleans()) else [payload[0], value]
    survives(decode_routes, payload, **options)
    survives(decode_routes, PAYLOADS[form][0], **options, start=value)
    survives(decode_routes, PAYLOADS[form][0], **options, num_experts=value)
    survives(decode_routes, PAYLOADS[form][0], num_layers=value, topk=value, dtype=value)


@many
@given(st.sampled_from(RECORDED), st.data())
def test_mutated_recorded_bodies(body, data):
    torn = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(torn) - 1))
        torn[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    survives(decode_response, bytes(torn), num_layers=4, topk=4)


@many
@given(routes, st.sampled_from(ENCODABLE_FORMATS), st.sampled_from([None, 1 << 8, 1 << 15, 1 << 31]))
def test_round_trips(array, form, num_experts):
    rows, layers, topk = array.shape
    encoded = json.loads(json.dumps(encode_routes(array, form)))
    options = {"num_layers": layers, "topk": topk} if form == "sglang" else {}
    if num_experts is not None and array.size and array.max() >= num_experts:
        with pytest.raises(ValueError, match=f"{form} payload: routes.* need less than num_experts = {num_experts}"):
            decode_routes(encoded, **options, num_experts=num_experts)
        num_experts = None
    decoded = decode_routes(encoded, **options, num_experts=num_experts)
    assert decoded.format == form
    assert decoded.indices.shape == array.shape
    assert np.array_equal(decoded.indices, array)
    assert decoded.missing is None
    choice = {"routed_experts": encoded, "token_ids": [1] * 2, "prompt_token_ids": [1] * (rows + 3)}
    (inside,) = decode_response({"choices": [choice]}, **options)
    assert inside.start == 4


@many
@given(routes, st.data())
def test_missing_rows_survive_signed_formats(array, data):
    rows, layers, topk = array.shape
    missing = data.draw(arrays.arrays(np.bool_, rows))
    sent = array.astype(np.int64)
    sent[missing] = -1
    payloads = [sent] if not rows else [sent, sent.tolist()]
    for dtype in ("int8", "int16", "int32"):
        if not array.size or array.max() <= np.iinfo(dtype).max:
            data_ = base64.b64encode(sent.astype(dtype).tobytes()).decode()
            payloads.append(f"nrlre1:{dtype}:{rows}x{layers}x{topk}:{data_}")
    for payload in payloads:
        decoded = decode_routes(payload)
        got = np.zeros(rows, bool) if decoded.missing is None else decoded.missing
        assert (decoded.missing is None) == (not missing.any())
        assert np.array_equal(got, missing)
        assert np.array_equal(decoded.indices[~missing], array[~missing])
        assert (decoded.indices[missing] == np.arange(topk)).all()


@pytest.mark.parametrize("depth", [10, 900, 990, 100_000])
def test_depth(depth):
    deep = "[" * depth + "]" * depth
    for text in (
        deep, f'{{"choices": {deep}}}', f'{{"choices": [{{"routed_experts": {deep}}}]}}', f"data: {deep}\n\n",
        f'{{"error": {deep}}}', f'data: {{"error": {deep}}}\n\n', '{"meta_info":' * depth + "1" + "}" * depth,
        f'{{"choices": [{{"routed_experts": {{"data": "", "shape": {deep}, "dtype": {deep}}}}}]}}',
    ):  # fmt: skip
        survives(decode_response, text)
        survives(decode_routes, [text, "AAAA"])
    nested: list = []
    for _ in range(depth):
        nested = [nested]
    for value in (nested, [nested], [[nested]], [[[nested]]], {"data": nested}, {"choices": nested}, {"error": nested}):
        survives(decode_routes, value)
        survives(decode_response, value)
    while nested:  # taken apart level by level
        nested = nested[0]


@pytest.mark.parametrize("part", range(4))
def test_the_soak_against_the_oracle(part):
    for index in range(part * 1_000, (part + 1) * 1_000):
        soak_wire.check_case(20261129, index)


def test_the_soak_would_notice():
    """The check that the check works: one id, one start, one format, one missing row off, and it raises."""
    wanted = ("nested", "uint8", IDS, None, None, (None, None))
    soak_wire.compare("", decode_routes(IDS), wanted)
    wrongs = ("vllm", "int16", [*IDS[:1], IDS[0]], 0, [False, False], (1, None))
    for place, wrong in enumerate(wrongs):
        with pytest.raises(AssertionError):
            soak_wire.compare("", decode_routes(IDS), (*wanted[:place], wrong, *wanted[place + 1 :]))
    with pytest.raises(AssertionError):  # accepted, where the oracle refuses
        soak_wire.check("", decode_routes, lambda _: soak_wire.oracle.need(False), IDS, {})
    with pytest.raises(AssertionError):  # refused, where the oracle accepts
        soak_wire.check("", decode_routes, lambda _: wanted, [], {})
