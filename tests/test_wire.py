"""The wire: every format both ways, dtypes and missing rows, arrays, and the module itself."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import wire_oracle as oracle
from support import DTYPES, captured, need_torch
from wire_support import (
    DATA,
    IDS,
    NAMED,
    PAYLOADS,
    body_of,
    every_format,
    npy,
    raw_npy,
    recorded,
    refused,
    skyrl,
    text,
)

from r3numba import backend_info, collate_routes, wire
from r3numba.wire import ENCODABLE_FORMATS, WIRE_FORMATS, DecodedRoutes, decode_response, decode_routes, encode_routes

# ---- every format ----------------------------------------------------------------------------------------------------


def test_a_payload_of_every_format_is_here():
    assert tuple(PAYLOADS) == WIRE_FORMATS
    assert set(ENCODABLE_FORMATS) < set(WIRE_FORMATS)


@every_format
def test_every_format_decodes(form):
    payload, options, dtype = PAYLOADS[form]
    decoded = decode_routes(payload, **options)
    assert isinstance(decoded, DecodedRoutes)
    assert decoded.format == form
    assert decoded.indices.dtype == dtype
    assert decoded.indices.tolist() == IDS
    assert decoded.indices.flags.c_contiguous
    assert decoded.indices.flags.writeable
    assert decoded.missing is None
    assert decoded.start == (4 if form == "prime-rl" else None)
    assert (decoded.prompt_token_count, decoded.generated_token_count) == (None, None)
    assert form in repr(decoded)


@every_format
@pytest.mark.parametrize(("num_experts", "dtype"), [(101, "uint8"), (256, "uint8"), (257, "int16"), (1 << 16, "int32")])
def test_num_experts_fixes_the_dtype_of_every_format(form, num_experts, dtype):
    payload, options, _ = PAYLOADS[form]
    decoded = decode_routes(payload, **options, num_experts=num_experts)
    assert decoded.indices.dtype == dtype
    assert decoded.indices.tolist() == IDS
    message = refused(lambda: decode_routes(payload, **options, num_experts=100), form, "is 100", kind=ValueError)
    assert "need less than num_experts = 100" in message
    refused(lambda: decode_routes(payload, **options, num_experts=2), form, "topk = 3", kind=ValueError)


@every_format
@pytest.mark.parametrize("wrong", [{"num_layers": 3}, {"topk": 2}, {"num_layers": 3, "topk": 2}])
def test_layers_and_topk_are_checked_where_they_are_given(form, wrong):
    payload, _, _ = PAYLOADS[form]
    if form == "sglang":  # 12 ids: rows of 6 ids each fit transposed, as nothing in the payload says otherwise
        wrong = {"num_layers": 5, "topk": 3}
        refused(lambda: decode_routes(payload, **wrong), form, "multiple of 60", "5 layers x topk 3", kind=ValueError)
        return
    what, value = next(iter(wrong.items()))
    refused(lambda: decode_routes(payload, **wrong), form, f"need {what} = {value}", kind=ValueError)


def test_a_swapped_capture_is_refused():
    """Case 23: layers and tokens swapped, so that the number of bytes still fits."""
    ids = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)  # 4 tokens of 2 layers
    swapped = np.ascontiguousarray(ids.transpose(1, 0, 2))
    for payload in (encode_routes(swapped, "skyrl"), encode_routes(swapped, "vllm"), swapped.tolist(), swapped):
        assert decode_routes(payload).indices.shape == (2, 4, 3)  # nothing in it says so
        refused(
            lambda payload=payload: decode_routes(payload, num_layers=2), "need num_layers = 2, got 4", kind=ValueError
        )
    transposed = encode_routes(np.ascontiguousarray(ids.transpose(0, 2, 1)), "skyrl")
    refused(lambda: decode_routes(transposed, topk=3), "need topk = 3, got 2", kind=ValueError)


@every_format
def test_a_start_of_the_caller_is_kept_and_compared(form):
    payload, options, _ = PAYLOADS[form]
    assert decode_routes(payload, **options, start=4).start == 4
    if form == "prime-rl":
        refused(lambda: decode_routes(payload, start=5), form, "start is 5, need 4", kind=ValueError)
    for start in (True, 1.0, "1", [1]):
        refused(lambda start=start: decode_routes(payload, **options, start=start), form, "start is a", kind=TypeError)
    refused(lambda: decode_routes(payload, **options, start=-1), form, "start is -1", kind=ValueError)


@every_format
def test_every_format_inside_a_body(form):
    payload, options, dtype = PAYLOADS[form]
    body = {**body_of(payload, 5, 2), "prompt_routed_experts": None}
    if form == "split":
        body = {**body_of(payload["routed_experts"], 1, 2), "prompt_routed_experts": payload["prompt_routed_experts"]}
    (decoded,) = decode_response(body, **options)
    assert decoded.format == form
    assert decoded.indices.dtype == dtype
    assert decoded.indices.tolist() == IDS
    assert decoded.start == (0 if form == "split" else 4)
    assert decoded.generated_token_count == 2
    again = decode_routes(body, **options)
    assert (again.start, again.indices.tolist()) == (decoded.start, IDS)


def test_what_is_given_in_place_of_a_payload():
    for value in (None, 3, 1.5, True, object(), {1}, iter([])):
        refused(lambda value=value: decode_routes(value), "payload is a", type(value).__name__, kind=TypeError)
    refused(lambda: decode_routes({}), "no 'data'", kind=ValueError)
    refused(lambda: decode_routes('{"choices": []}'), "call decode_response", kind=ValueError)
    refused(lambda: decode_routes("data: {}"), "call decode_response", kind=ValueError)
    refused(lambda: decode_routes(recorded("completions_batch")), "2 choices", "decode_response", kind=ValueError)
    for option in ("num_layers", "topk", "num_experts"):
        for value, kind in ((0, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError)):
            refused(lambda option=option, value=value: decode_routes(IDS, **{option: value}), option, kind=kind)
    for dtype in ("int8", "float32", "int64", "O", 3, np.int32):
        refused(lambda dtype=dtype: decode_routes(text(IDS, "<i4"), dtype=dtype), "dtype", "int32", kind=TypeError)


def test_the_result_is_frozen_pickles_and_collates():
    decoded = decode_routes([[[1, 2]], [[-1, -1]], [[2, 0]]], start=0)
    with pytest.raises(AttributeError):
        decoded.start = 3
    again = pickle.loads(pickle.dumps(decoded))
    assert again.indices.tolist() == decoded.indices.tolist()
    batch = collate_routes([decoded.indices], [4], missing=[decoded.missing])
    assert batch.array[0].tolist() == [[[1, 2]], [[0, 1]], [[2, 0]], [[0, 1]]]
    assert batch.padding_mask.tolist() == [[False, True, False, True]]
    assert repr(decoded) == "DecodedRoutes(nested, uint8 [3, 1, 2], start=0, missing=1)"


# ---- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ENCODABLE_FORMATS)
def test_encoding_against_the_oracle_and_back(form, dtype, rows):
    routes = captured(rows, 2, 3, dtype)
    name, flat = np.dtype(dtype).name, routes.ravel().tolist()
    encoded = encode_routes(routes, format=form)
    if form == "skyrl":
        data = oracle.to_bytes(flat, name)
        wanted = f'{{"data": "{base64.b64encode(data).decode()}", "shape": [{rows}, 2, 3], "dtype": "{name}"}}'
        assert json.dumps(encoded) == wanted
    elif form == "vllm":
        assert encoded == npy(routes, dtype)
        assert oracle.read_npy(oracle.from_base64(encoded)) == (name, (rows, 2, 3), routes.tolist())
    else:
        assert oracle.from_base64(encoded) == oracle.to_bytes(flat, "int32")
    decoded = decode_routes(json.loads(json.dumps(encoded)), num_layers=2, topk=3)
    assert decoded.format == form
    assert decoded.indices.dtype == (np.int32 if form == "sglang" else dtype)
    assert decoded.indices.tolist() == routes.tolist()


@pytest.mark.parametrize("form", ENCODABLE_FORMATS)
def test_encoding_reads_any_layout_and_tensors(form):
    wide = captured(6, 3, 8, np.int16)
    for routes in (wide[::2, :, 1::2], wide.transpose(1, 0, 2), np.asfortranarray(wide), wide[::-1, ::-1, ::-1]):
        assert encode_routes(routes, form) == encode_routes(routes.copy(order="C"), form)
    torch = need_torch()
    assert encode_routes(torch.from_numpy(wide.copy()), form) == encode_routes(wide, form)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_sglang_as_the_declared_dtype(dtype):
    encoded = encode_routes(np.array(IDS, np.int32), "sglang", dtype=dtype)
    assert encoded == text(IDS, dtype)
    assert decode_routes(encoded, num_layers=2, topk=3, dtype=dtype).indices.tolist() == IDS
    meta = {"routed_experts": encoded, "routed_experts_dtype": dtype, "prompt_tokens": 2, "completion_tokens": 1}
    assert decode_routes(meta, num_layers=2, topk=3).start == 0
    (undeclared,) = decode_response(body_of(encoded), num_layers=2, topk=3, dtype=dtype)
    assert undeclared.indices.tolist() == IDS
    (decoded,) = decode_response({"meta_info": meta}, num_layers=2, topk=3)
    assert decoded.indices.tolist() == IDS


def test_encoding_refusals():
    routes = np.array(IDS, np.int32)
    refused(lambda: encode_routes(routes, "nested"), "format is 'nested'", "skyrl", kind=ValueError)
    refused(lambda: encode_routes(routes, None), "format is None", kind=ValueError)
    for dtype in (np.int64, np.uint16, np.int8, np.float32, bool):
        refused(lambda dtype=dtype: encode_routes(routes.astype(dtype), "skyrl"), "compact_routes", kind=TypeError)
    for shape in ((12,), (4, 3), (1, 2, 2, 3), (12, 1, 0), (3, 0, 4)):
        array = np.zeros(shape, np.uint8)
        refused(lambda array=array: encode_routes(array, "skyrl"), "need [rows, layers, topk]", kind=ValueError)
    refused(lambda: encode_routes(routes.tolist(), "skyrl"), "routes is a list", kind=TypeError)
    for form in ENCODABLE_FORMATS:
        refused(lambda form=form: encode_routes(routes - 5, form), "id of -5, need at least 0", kind=ValueError)
    refused(lambda: encode_routes(routes + 200, "sglang", dtype="uint8"), "300, need at most 255", kind=ValueError)
    refused(lambda: encode_routes(routes, "sglang", dtype="int64"), "dtype is 'int64'", kind=TypeError)
    refused(lambda: encode_routes(routes, "skyrl", dtype="uint8"), "dtype is 'uint8', need None", kind=ValueError)


# ---- dtypes, negatives and missing rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize(
    ("dtype", "largest", "result"),
    [
        ("uint8", 255, "uint8"),
        ("int16", 3, "int16"),
        ("int16", 32767, "int16"),
        ("uint16", 3, "int16"),
        ("uint16", 32767, "int16"),
        ("uint16", 32768, "int32"),
        ("uint16", 65535, "int32"),
        ("int32", 3, "int32"),
        ("int32", 2**31 - 1, "int32"),
    ],
)
def test_the_dtype_is_the_payloads_and_ids_never_wrap(form, dtype, largest, result):
    ids = [[[0, largest]], [[largest - 1, 1]]]
    decoded = decode_routes(NAMED[form](ids, dtype), num_layers=1, topk=2)
    assert decoded.format == form
    assert decoded.indices.dtype == result
    assert decoded.indices.tolist() == ids


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32", "bool", "object", "O", ">i4", "Uint8", "", None, 8])
def test_unknown_dtypes(form, dtype):
    payload = NAMED[form](IDS, "uint8")
    if form == "skyrl":
        payload["dtype"] = dtype
    elif form == "rllm":
        payload[0]["dtype"] = dtype
    elif form == "nemo-rl":
        payload = payload.replace("uint8", str(dtype))
    elif form == "vllm":
        payload = raw_npy(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (2, 2, 3), }}\n".encode())
    elif dtype is None:
        return  # nothing declared: int32
    else:
        payload["routed_experts_dtype"] = dtype
    refused(lambda: decode_routes(payload, num_layers=2, topk=3), "" if form == "sglang" else form)


def test_dtypes_that_only_one_format_sends():
    for form in NAMED:
        if form != "nemo-rl":
            refused(lambda form=form: decode_routes(NAMED[form](IDS, "int8"), num_layers=2, topk=3), kind=TypeError)
    assert decode_routes(skyrl(dtype=..., start=0)).indices.dtype == np.uint8  # prime-rl: missing means uint8
    refused(lambda: decode_routes(skyrl(dtype=None, start=0)), "prime-rl", "dtype is a NoneType", kind=TypeError)
    message = refused(lambda: decode_routes(skyrl(), dtype="int16"), "dtype is uint8, need int16", kind=TypeError)
    assert "declared" in message
    meta = {"routed_experts": text(IDS, "<i4"), "routed_experts_dtype": "int32"}
    refused(lambda: decode_routes(meta, dtype="uint16"), "int32, need dtype = uint16", kind=ValueError)


@pytest.mark.parametrize("form", [*NAMED, "nested", "array", "split"])
@pytest.mark.parametrize("num_experts", [None, 10, 300])
def test_missing_rows(form, num_experts):
    ids = [[[3, 7], [5, 2]], [[-1, -1], [-1, -1]], [[4, 9], [9, 8]], [[-1, -1], [-1, -1]]]
    dtypes = ("int16", "int32") if form in NAMED else (None,)
    for dtype in (*dtypes, "int8") if form == "nemo-rl" else dtypes:
        payload = (
            {
                "nested": ids,
                "array": np.array(ids, np.int16),
                "split": {"prompt_routed_experts": ids[:2], "routed_experts": ids[2:]},
            }.get(form)
            or NAMED[form](ids, dtype)
            if form != "array"
            else np.array(ids, np.int16)
        )
        decoded = decode_routes(payload, num_layers=2, topk=2, num_experts=num_experts)
        assert decoded.format == form
        assert decoded.missing.tolist() == [False, True, False, True]
        assert decoded.missing.dtype == np.bool_
        assert decoded.indices.tolist() == [ids[0], [[0, 1]] * 2, ids[2], [[0, 1]] * 2]
        if num_experts is not None:
            assert decoded.indices.dtype == ("uint8" if num_experts == 10 else "int16")
        everything = [[[-1, -1]] * 2] * 4
        if form in NAMED:
            gone = decode_routes(NAMED[form](everything, dtype), num_layers=2, topk=2, num_experts=num_experts)
            assert gone.missing.all()
            assert gone.indices.tolist() == [[[0, 1]] * 2] * 4


@pytest.mark.parametrize("form", [*NAMED, "nested", "array"])
@pytest.mark.parametrize(
    "row",
    [
        [[-1, 2], [3, 4]],
        [[-1, -1], [3, 4]],
        [[3, 4], [5, -1]],
        [[-2, -2], [-2, -2]],
        [[-56, 1], [2, 3]],
        [[-1, -1], [-1, -2]],
    ],
)
def test_partly_negative_rows_are_corrupt(form, row):
    ids = [[[3, 7], [5, 2]], row]
    payload = (
        {"nested": ids, "array": np.array(ids, np.int32)}[form] if form not in NAMED else NAMED[form](ids, "int16")
    )
    message = refused(lambda: decode_routes(payload, num_layers=2, topk=2), form, "routes[1, ", kind=ValueError)
    assert "missing" in message or "need at least 0" in message


def test_an_id_of_200_in_int8_is_refused():
    """Case 15: 200 stored as int8 is -56."""
    ids = np.array([[[200, 3]]], np.uint8).view(np.int8)
    payload = f"nrlre1:int8:1x1x2:{text(ids, np.int8)}"
    refused(lambda: decode_routes(payload), "nemo-rl", "is -56, need at least 0", kind=ValueError)


@pytest.mark.parametrize("largest", [255, 256, 300])
def test_ids_past_a_byte_are_never_wrapped(largest):
    """Case 14, for what arrives as lists or wide arrays."""
    for payload in ([[[0, largest]]], np.array([[[0, largest]]], np.int64), np.array([[[0, largest]]], np.uint32)):
        decoded = decode_routes(payload)
        assert decoded.indices.dtype == ("uint8" if largest == 255 else "int16")
        assert decoded.indices.tolist() == [[[0, largest]]]
        refused(lambda payload=payload: decode_routes(payload, num_experts=largest), f"is {largest}", kind=ValueError)


def test_a_topk_that_no_row_of_the_dtype_can_fill():
    ids = [[[1] * 257]]
    refused(lambda: decode_routes(NAMED["skyrl"](ids, "uint8")), "skyrl", "topk is 257, need at most 256")
    refused(lambda: decode_routes(NAMED["nemo-rl"]([[[1] * 129]], "int8")), "topk is 129, need at most 128")
    assert decode_routes(NAMED["skyrl"](ids, "int16")).indices.shape == (1, 1, 257)


# ---- arrays and tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_canonical_arrays_are_taken_as_they_are(dtype):
    routes = captured(5, 2, 3, dtype)  # read-only
    assert decode_routes(routes).indices is routes
    writable = routes.copy()
    assert decode_routes(writable).indices is writable
    torch = need_torch()
    tensor = torch.from_numpy(writable)
    assert np.shares_memory(decode_routes(tensor).indices, writable)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int64", "uint64", ">i4", ">u2"])
def test_other_arrays_are_compacted(dtype):
    routes = np.array(IDS, dtype)
    before = routes.tobytes()
    decoded = decode_routes(routes)
    assert str(decoded.indices.dtype) in ("uint8", "int16", "int32")
    assert decoded.indices.dtype.isnative
    assert decoded.indices.tolist() == IDS
    assert routes.tobytes() == before


def test_arrays_that_are_none():
    for array, kind in (
        (np.zeros((2, 2, 3), np.float32), TypeError),
        (np.zeros((2, 2, 3), bool), TypeError),
        (np.zeros((2, 2, 3), object), TypeError),
        (np.zeros((2, 3), np.uint8), ValueError),
        (np.zeros((2, 0, 3), np.uint8), ValueError),
        (np.zeros((2, 3, 0), np.uint8), ValueError),
        (np.zeros((), np.uint8), ValueError),
        (np.ma.zeros((2, 2, 3), np.uint8), TypeError),
    ):
        refused(lambda array=array: decode_routes(array), "array payload", "need", kind=kind)
    refused(lambda: decode_routes(np.full((1, 1, 2), 2**31, np.int64)), "array payload", "need less than 2^31")
    torch = need_torch()
    refused(lambda: decode_routes(torch.zeros(2, 2, 3)), "array payload has dtype float32", kind=TypeError)
    refused(lambda: decode_routes(torch.zeros(2, 2, 3, device="meta")), "call .cpu() first", kind=TypeError)


# ---- the module ------------------------------------------------------------------------------------------------------


def test_import_is_light_and_uint8_never_needs_numba():
    code = (
        "import sys, json, r3numba, r3numba.wire as wire\n"
        "loaded = [name for name in ('numba', 'torch', 'pybase64') if name in sys.modules]\n"
        f"decoded = wire.decode_response(open({str(DATA / 'chat.json')!r}).read())\n"
        "print(loaded, len(decoded), 'numba' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "[] 1 False False", done.stderr


def test_a_payload_stays_on_one_thread(monkeypatch):
    """Two threads that spin on busy CPUs took ten times as long, and trainers decode many payloads at once."""
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 8)
    large = encode_routes(captured(100_000, 4, 8, np.int16), "skyrl")  # 6.4 MB: past the serial thresholds
    assert backend_info()["threads"] == 1
    assert decode_routes(large).indices.shape == (100_000, 4, 8)
    assert backend_info()["threads"] == 1
    decode_routes(large, num_experts=1 << 15)
    assert backend_info()["threads"] == 1


def test_threads_share_nothing():
    payloads = {form: (payload, options) for form, (payload, options, _) in PAYLOADS.items()}
    failures = []

    def work():
        for _ in range(50):
            for payload, options in payloads.values():
                if decode_routes(payload, **options).indices.tolist() != IDS:
                    failures.append(payload)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_public_names_have_docstrings():
    for name in wire.__all__:
        assert name in ("WIRE_FORMATS", "ENCODABLE_FORMATS") or "Examples" in getattr(wire, name).__doc__
