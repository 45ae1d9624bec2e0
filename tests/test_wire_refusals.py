"""The wire refuses: bad base64, headers, shapes and lists, and hostile sizes, each with format, field, need and got."""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
import time
import tracemalloc

import numpy as np
import pytest
from support import captured
from wire_support import (
    IDS,
    body_of,
    event,
    npy,
    raw_npy,
    refused,
    skyrl,
    text,
)

from r3numba import _base64, _formats
from r3numba.wire import ENCODABLE_FORMATS, decode_response, decode_routes, encode_routes

# ---- base64 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["pybase64 where it is", "standard library"])
def base64_library(request, monkeypatch):
    if request.param == "standard library":
        monkeypatch.setitem(sys.modules, "pybase64", None)
    _base64.library.cache_clear()
    yield
    monkeypatch.undo()
    _base64.library.cache_clear()


GOOD = text([[[3, 7, 1, 5]]], "<i4")  # 16 bytes: 22 digits and two of padding
BAD_BASE64 = {
    "unpadded": GOOD[:-2],
    "half-padded": GOOD[:-1],
    "over-padded": GOOD + "=",
    "four-too-many": GOOD + "====",
    "padding-inside": GOOD[:4] + "AA==" + GOOD[4:],
    "padding-first": "=" + GOOD[1:],
    "newline": GOOD[:8] + "\n" + GOOD[8:],
    "newlines": GOOD[:8] + "\n\n\n\n" + GOOD[8:],
    "trailing-newline": GOOD + "\n",
    "spaces": GOOD[:8] + "    " + GOOD[8:],
    "url-safe": "-_" + GOOD[2:],
    "non-ascii": "\u00e9" + GOOD[1:],
    "surrogate": "\ud800" + GOOD[1:],
    "nul": "\0" + GOOD[1:],
    "last-bits": GOOD[:-3] + "B==",
    "only-padding": "====",
    "one": "A",
    "two-texts": GOOD + GOOD,
    "percent": "%2B" + GOOD[3:],
}


@pytest.mark.parametrize("case", BAD_BASE64)
def test_bad_base64(case, base64_library):
    bad = BAD_BASE64[case]
    shape = {"shape": [1, 1, 4], "dtype": "int32"}
    forms = {
        "sglang": bad,
        "skyrl": {"data": bad, **shape},
        "nemo-rl": f"nrlre1:int32:1x1x4:{bad}",
        "rllm": [{"shape": [1, 4], "dtype": "int32"}, bad],
        "vllm": npy([[[3, 7, 1, 5]]], "<i4")[:-24] + bad,
    }
    for form, payload in forms.items():
        refused(lambda payload=payload: decode_routes(payload, num_layers=1, topk=4), form, kind=ValueError)
        if isinstance(payload, str) and bad.isascii():
            refused(lambda payload=payload: decode_routes(payload.encode(), num_layers=1, topk=4), form)


def test_base64_longer_than_a_piece(base64_library):
    """The standard library decodes piece by piece: padding may stand at the very end alone."""
    piece = _base64._PIECE
    data = np.random.default_rng(0).integers(0, 256, piece * 2, np.uint8)
    whole = piece // 4 * 3
    for size in (whole - 1, whole, whole + 1, 2 * whole, 2 * whole + 2):
        encoded = encode_routes(data[:size].reshape(-1, 1, 1), "skyrl")
        assert np.array_equal(decode_routes(encoded).indices.ravel(), data[:size])
        if size > whole:
            for padding in ("AA==", "AAA="):
                bad = encoded["data"][: piece - 4] + padding + encoded["data"][piece:]
                refused(
                    lambda bad=bad, encoded=encoded: decode_routes({**encoded, "data": bad}), "skyrl", kind=ValueError
                )
                short = [size - 5 + len(padding.rstrip("=")), 1, 1]
                refused(
                    lambda bad=bad, short=short: decode_routes(skyrl(data=bad, shape=short)), "skyrl", kind=ValueError
                )


def test_base64_on_both_libraries(base64_library):
    for size in (*range(1, 9), 1000):
        data = bytes(range(256)) * 4
        ids = np.frombuffer(data[:size], np.uint8).reshape(size, 1, 1)
        encoded = encode_routes(ids, "skyrl")
        assert encoded["data"] == base64.b64encode(data[:size]).decode()
        for given in (encoded["data"], *(kind(encoded["data"].encode()) for kind in (bytes, bytearray, memoryview))):
            decoded = decode_routes({**encoded, "data": given})
            assert np.array_equal(decoded.indices, ids)
            assert decoded.indices.flags.writeable
    for bad in (
        None,
        3,
        ["AAAA"],
        np.zeros(4, np.uint8),
        memoryview(np.zeros(4, np.int32)),
        memoryview(b"AAAAAAAA")[::2],
    ):
        refused(lambda bad=bad: decode_routes({**encoded, "data": bad}), "skyrl payload: data is a", kind=TypeError)


# ---- shapes and sizes ------------------------------------------------------------------------------------------------

BAD_SHAPES = {
    "bool": ([True, 2, 3], TypeError),
    "bool-topk": ([2, 2, True], TypeError),
    "float": ([2.0, 2, 3], TypeError),
    "float-layers": ([2, 2.0, 3], TypeError),
    "text": (["2", 2, 3], TypeError),
    "null": ([None, 2, 3], TypeError),
    "negative": ([-2, 2, -3], ValueError),
    "all-negative": ([-2, -2, 3], ValueError),
    "two": ([4, 3], ValueError),
    "four": ([1, 2, 2, 3], ValueError),
    "none": ([], ValueError),
    "no-layers": ([2, 0, 3], ValueError),
    "no-topk": ([2, 2, 0], ValueError),
    "too-few": ([1, 2, 3], ValueError),
    "too-many": ([3, 2, 3], ValueError),
    "huge": ([2**31, 2, 3], ValueError),
    "huger": ([10**30, 10**30, 10**30], ValueError),
    "a-number": (12, TypeError),
    "a-string": ("223", TypeError),
    "an-object": ({"0": 2}, TypeError),
    "nested": ([[2], 2, 3], TypeError),
    "wide-and-empty": ([0, 2**30, 2**30], ValueError),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_bad_shapes(case):
    shape, kind = BAD_SHAPES[case]
    refused(lambda: decode_routes(skyrl(shape=shape)), "skyrl payload", "need", kind=kind)
    refused(lambda: decode_routes(skyrl(shape=shape, start=0)), "prime-rl payload", "need", kind=kind)
    if case == "wide-and-empty":
        refused(
            lambda: decode_routes(skyrl(shape=shape, data="")), "need rows of less than 2147483648 bytes", kind=kind
        )


@pytest.mark.parametrize(
    "shape",
    [
        [True, 3],
        [2, 3.0],
        [2, None],
        [-2, -3],
        [2],
        [2, 2, 3],
        [],
        [0, 3],
        [2, 0],
        [5, 3],
        [2**31, 1],
        "23",
        6,
        None,
        {},
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_bad_rllm_headers(shape, as_text):
    header = {"shape": shape, "dtype": "uint8"}
    payload = [json.dumps(header) if as_text else header, text(IDS, np.uint8)]
    refused(lambda: decode_routes(payload), "rllm payload", "need")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"x"',
        '{"shape": [2, 3]}',
        '{"dtype": "uint8"}',
        "[" * 99999,
        '{"a":' * 99999,
        b"\xff\xfe",
        None,
        3,
        [2, 3],
        '{"shape": [2, NaN], "dtype": "uint8"}',
    ],
)
def test_rllm_headers_that_are_none(header):
    refused(lambda: decode_routes([header, text(IDS, np.uint8)]), "rllm payload", "need")


@pytest.mark.parametrize(
    "head",
    [
        "nrlre1:",
        "nrlre1:int16",
        "nrlre1:int16:2x2x3",
        "nrlre1:int16:2x2:",
        "nrlre1:int16:2x2x3x1:",
        "nrlre1:int16:-2x2x3:",
        "nrlre1:int16:2.0x2x3:",
        "nrlre1:int16: 2x2x3:",
        "nrlre1:int16:2X2X3:",
        "nrlre1:int16:x2x3:",
        "nrlre2:int16:2x2x3:",
        "NRLRE1:int16:2x2x3:",
        " nrlre1:int16:2x2x3:",
        "nrlre1::2x2x3:",
        "nrlre1:int16:99999999999x2x3:",
        "nrlre1:int16:0x0x3:",
        "nrlre1:int16:\u0662x2x3:",
        "nrlre1:int16:1x2x3:",
        "nrlre1:int32:2x2x3:",
        "nrlre1:float16:2x2x3:",
        "other:int16:2x2x3:",
    ],
)
def test_bad_nemo_headers(head):
    refused(lambda: decode_routes(head + text(IDS, "<i2")), "nemo-rl payload", "need")


def test_every_byte_counts():
    """One byte more or less is refused by every format, and so is data behind the end."""
    data = np.array(IDS, np.uint8).tobytes()
    for wrong in (data[:-1], data + b"\0", b"", data * 2):
        encoded = base64.b64encode(wrong).decode()
        refused(lambda encoded=encoded: decode_routes(skyrl(data=encoded)), "skyrl", f"has {len(wrong)} bytes, need 12")
        payload = f"nrlre1:uint8:2x2x3:{encoded}"
        refused(lambda payload=payload: decode_routes(payload), "nemo-rl", f"has {len(wrong)} bytes, need 12")
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), }\n"
        refused(lambda wrong=wrong, header=header: decode_routes(raw_npy(header, wrong)), "vllm", "need 12")
        if len(wrong) % 6:
            pair = [{"shape": [2, 3], "dtype": "uint8"}, encoded]
            refused(lambda pair=pair: decode_routes(pair), "rllm", f"has {len(wrong)} bytes, need a multiple of 6")
            refused(
                lambda encoded=encoded: decode_routes(encoded, num_layers=2, topk=3, dtype="uint8"),
                "sglang",
                f"has {len(wrong)} bytes, need a multiple of 6",
            )
    message = refused(lambda: decode_routes(text(IDS, "<i4")), "sglang payload has 48 bytes without a header")
    assert "need num_layers= and topk=" in message
    refused(lambda: decode_routes(text(IDS, "<i4"), topk=3), "need num_layers= and topk=")


@pytest.mark.parametrize("form", ["sglang", "vllm", "skyrl", "prime-rl", "nemo-rl", "rllm", "array"])
@pytest.mark.parametrize("num_experts", [None, 8, 300])
def test_zero_rows(form, num_experts):
    empty = np.zeros((0, 2, 3), np.int16)
    payload = {
        "sglang": "",
        "vllm": npy(empty, np.int16),
        "skyrl": {"data": "", "shape": [0, 2, 3], "dtype": "int16"},
        "prime-rl": {"data": "", "shape": [0, 2, 3], "start": 9},
        "nemo-rl": "nrlre1:int8:0x2x3:",
        "rllm": [{"shape": [2, 3], "dtype": "uint16"}, ""],
        "array": empty,
    }[form]
    decoded = decode_routes(payload, num_layers=2, topk=3, num_experts=num_experts)
    assert decoded.format == form
    assert decoded.indices.shape == (0, 2, 3)
    assert decoded.start == (9 if form == "prime-rl" else None)
    (counted,) = decode_response(body_of(payload, 7, 3), num_layers=2, topk=3)
    assert counted.start == 9  # tokens - 1


@pytest.mark.parametrize("payload", [[], (), [[]], [[], []], [[[]]], [[[1]], []], [[[1, 2]], [[]]]])
def test_empty_nested_lists(payload):
    refused(lambda: decode_routes(payload), "nested payload", "need", kind=ValueError)


BAD_NESTED = {
    "flat": ([1, 2, 3], TypeError),
    "two-levels": ([[1, 2], [3, 4]], TypeError),
    "four-levels": ([[[[1]]]], TypeError),
    "ragged-rows": ([[[1, 2]], [[1, 2], [3, 4]]], ValueError),
    "ragged-layers": ([[[1, 2]], [[1]]], ValueError),
    "bool": ([[[1, True]]], TypeError),
    "all-bools": ([[[True, False]]], TypeError),
    "float": ([[[1, 2.0]]], TypeError),
    "text": ([[["1", "2"]]], TypeError),
    "null": ([[[None, 1]]], TypeError),
    "null-row": ([[[1]], None], TypeError),
    "string-row": ([[[1]], "1", "2"], TypeError),
    "object": ([[[1]], {}], TypeError),
    "2^31": ([[[1, 2**31]]], ValueError),
    "2^63": ([[[1, 2**63]]], ValueError),
    "2^1000": ([[[1, 2**1000]]], ValueError),
    "-2^70": ([[[1, -(2**70)]]], ValueError),
    "array-row": ([np.zeros((1, 2), np.int32)], TypeError),
    "np.bool": ([[[np.True_]]], TypeError),
    "nan": ([[[float("nan")]]], TypeError),
}


@pytest.mark.parametrize("case", BAD_NESTED)
def test_bad_nested_lists(case):
    payload, kind = BAD_NESTED[case]
    refused(lambda: decode_routes(payload), "nested payload", "need", kind=kind)
    split = {"prompt_routed_experts": [[[1, 2]]], "routed_experts": payload}
    refused(lambda: decode_routes(split), "split payload")


def test_nested_lists_name_the_place():
    refused(lambda: decode_routes([[[1, 2]], [[1, 2.5]]]), "nested payload[1, 0, 1] is a float, need an integer")
    refused(lambda: decode_routes([[[1, 2]], [[1]]]), "nested payload[1, 0] has 1 entries, need 2")
    refused(lambda: decode_routes([[[1, 2]], 5]), "nested payload[1] is a int, need a list")
    decoded = decode_routes(((np.int64(3), 4),) and [((np.int64(3), 4),)])
    assert decoded.indices.tolist() == [[[3, 4]]]


def test_split_parts():
    prompt, completion = [[[1, 2]], [[3, 4]]], [[[5, 6]]]
    body = {**body_of(completion, 2, 2), "prompt_routed_experts": prompt}
    (decoded,) = decode_response(body)
    assert (decoded.format, decoded.start, decoded.indices.tolist()) == ("split", 0, prompt + completion)
    (one,) = decode_response({**body_of([], 2, 1), "prompt_routed_experts": prompt})  # one token: no row of its own
    assert (one.start, one.indices.tolist()) == (0, prompt)
    # A row lost at either end must not shift the other part.
    refused(lambda: decode_response({**body_of(completion, 2, 3), "prompt_routed_experts": prompt}), "3 rows, need 4")
    refused(
        lambda: decode_response({**body_of(completion, 1, 2), "prompt_routed_experts": prompt}),
        "is -1, need at least 0",
    )
    (later,) = decode_response({**body_of(completion, 3, 2), "prompt_routed_experts": prompt})
    assert later.start == 1
    refused(
        lambda: decode_response({**body_of(completion, 3, 2), "prompt_routed_experts": prompt}, start=0),
        "is 1, need 0 as start says",
    )
    (unknown,) = decode_response({**body_of(completion), "prompt_routed_experts": prompt})
    assert unknown.start is None
    refused(lambda: decode_routes({"prompt_routed_experts": [], "routed_experts": []}), "split payload has no rows")
    refused(
        lambda: decode_routes({"prompt_routed_experts": [[[1]]], "routed_experts": [[[1, 2]]]}), "split", "need [1, 1]"
    )
    refused(lambda: decode_routes({"prompt_routed_experts": [[[1]]], "routed_experts": "AAAA"}), "split", "is a str")
    both = {
        "choices": [{"token_ids": [1], "routed_experts": []}, {"token_ids": [1, 2], "routed_experts": completion}],
        "prompt_token_ids": [8, 9],
        "prompt_routed_experts": prompt,
    }
    assert [one.indices.tolist() for one in decode_response(both)] == [prompt, prompt + completion]
    assert [one.start for one in decode_response(both)] == [0, 0]


# ---- .npy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_npy_versions_and_orders(dtype, order, version):
    decoded = decode_routes(npy(IDS, dtype, order, version))
    assert decoded.format == "vllm"
    assert decoded.indices.tolist() == IDS
    assert decoded.indices.flags.c_contiguous
    assert decoded.indices.flags.aligned


HEADERS_TO_ACCEPT = {
    "as-numpy": b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), }     \n",
    "no-trailing-comma": b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3)}",
    "other-order": b"{'shape': (2, 2, 3), 'descr': '|u1', 'fortran_order': False}\n",
    "double-quotes": b'{"descr": "<u1", "fortran_order": False, "shape": (2,2,3,)}\n',
    "odd-length": b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), } \n",
}


@pytest.mark.parametrize("case", HEADERS_TO_ACCEPT)
def test_npy_headers_of_other_writers(case):
    decoded = decode_routes(raw_npy(HEADERS_TO_ACCEPT[case], bytes(range(12))))
    assert decoded.indices.ravel().tolist() == list(range(12))


def test_npy_ids_at_any_address_come_out_aligned():
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 3), }"
    for pad in range(5):
        decoded = decode_routes(raw_npy(header + b" " * pad + b"\n", np.arange(6, dtype="<i4").tobytes()))
        assert decoded.indices.ravel().tolist() == list(range(6))
        assert decoded.indices.flags.aligned
        assert decoded.indices.flags.writeable


FIELDS = "'descr': '|u1', 'fortran_order': False, 'shape': (2, 2, 3), "
HEADERS_TO_REFUSE = {
    "empty": "",
    "no-fields": "{}",
    "no-brace": FIELDS,
    "open": "{" + FIELDS,
    "behind": "{" + FIELDS + "} x",
    "twice": "{" + FIELDS * 2 + "}",
    "object": "{" + FIELDS.replace("|u1", "|O") + "}",
    "float": "{" + FIELDS.replace("|u1", "<f4") + "}",
    "bool": "{" + FIELDS.replace("|u1", "|b1") + "}",
    "int64": "{" + FIELDS.replace("|u1", "<i8") + "}",
    "int8": "{" + FIELDS.replace("|u1", "|i1") + "}",
    "big-endian": "{" + FIELDS.replace("|u1", ">i2") + "}",
    "void": "{" + FIELDS.replace("|u1", "|V1") + "}",
    "fields": "{" + FIELDS.replace("'|u1'", "[('a', '|u1')]") + "}",
    "no-descr": "{'fortran_order': False, 'shape': (2, 2, 3), }",
    "no-shape": "{'descr': '|u1', 'fortran_order': False, }",
    "order-is-text": "{" + FIELDS.replace("False", "'False'") + "}",
    "order-is-0": "{" + FIELDS.replace("False", "0") + "}",
    "list-shape": "{" + FIELDS.replace("(2, 2, 3)", "[2, 2, 3]") + "}",
    "negative": "{" + FIELDS.replace("(2, 2, 3)", "(-2, -2, 3)") + "}",
    "two-sizes": "{" + FIELDS.replace("(2, 2, 3)", "(4, 3)") + "}",
    "no-sizes": "{" + FIELDS.replace("(2, 2, 3)", "()") + "}",
    "comma": "{" + FIELDS.replace("(2, 2, 3)", "(,)") + "}",
    "product": "{" + FIELDS.replace("(2, 2, 3)", "(2, 2, 2+1)") + "}",
    "more": "{" + FIELDS.replace("(2, 2, 3)", "(99999999, 2, 3)") + "}",
    "zero-layers": "{" + FIELDS.replace("(2, 2, 3)", "(2, 0, 3)") + "}",
    "code": "{" + FIELDS.replace("False", "__import__('os')") + "}",
    "huge": "{" + FIELDS.replace("2, 2, 3", "9" * 50) + "}",
    "huger": "{" + FIELDS.replace("2, 2, 3", "9" * 500) + "}",
    "extra": "{" + FIELDS + "'x': 1, }",
    "extra-shape": "{" + FIELDS + "'shape': (2, 2, 3), }",
    "not-utf8": "{" + FIELDS + "\xff}",
    "deep": "{" + FIELDS.replace("(2, 2, 3)", "(" * 4000) + "}",
    "minus": "{" + FIELDS.replace("False", "-" * 4000 + "1") + "}",
    "spaces": "{" + " " * 9000,
}


@pytest.mark.parametrize("case", HEADERS_TO_REFUSE)
def test_bad_npy_headers(case):
    header = HEADERS_TO_REFUSE[case].encode("latin-1")
    message = refused(lambda: decode_routes(raw_npy(header)), "vllm payload", "need")
    if case == "object":
        assert "objects are never unpickled" in message


def test_a_row_has_a_bound_and_the_number_of_rows_has_none(monkeypatch):
    monkeypatch.setattr(_formats, "_LARGEST_ROW", 7)
    for ids in (IDS, IDS * 100):
        for order in "CF":
            assert decode_routes(npy(ids, np.uint8, order)).indices.tolist() == ids
        for wide in (npy(ids, np.int16), npy(ids, np.int16, "F"), skyrl(data=text(ids, "<i2"), dtype="int16")):
            refused(lambda wide=wide: decode_routes(wide), "need rows of less than 7 bytes", kind=ValueError)
        refused(
            lambda ids=ids: decode_routes(text(ids, "<i4"), num_layers=2, topk=3), "less than 7 bytes", kind=ValueError
        )


def test_npy_lengths_and_versions():
    header = f"{{{FIELDS}}}\n".encode()
    for version in (b"\x00\x00", b"\x01\x01", b"\x04\x00", b"\xff\xff"):
        refused(
            lambda version=version: decode_routes(raw_npy(header, version=version)), "vllm", "version 1.0, 2.0 or 3.0"
        )
    for version, lengths in ((b"\x01\x00", (0, 1, 10, 200, 65535)), (b"\x02\x00", (200, 2**31, 2**32 - 1))):
        for length in lengths:
            refused(
                lambda version=version, length=length: decode_routes(raw_npy(header, version=version, length=length)),
                "vllm",
            )
    for size in range(6, 13):
        start = base64.b64encode((b"\x93NUMPY\x01\x00\x76\x00" + header)[:size]).decode()
        refused(lambda start=start: decode_routes(start, num_layers=1, topk=1), "vllm")


def test_nothing_is_ever_unpickled():
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('unpickled')",))

    array = np.empty((1, 1, 1), object)
    array[0, 0, 0] = Bomb()
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    payload = base64.b64encode(stream.getvalue()).decode()
    refused(lambda: decode_routes(payload), "vllm", "descr is '|O'", "never unpickled", kind=TypeError)
    refused(lambda: decode_routes(base64.b64encode(pickle.dumps(Bomb())).decode(), num_layers=1, topk=1))


# ---- hostile sizes ---------------------------------------------------------------------------------------------------


def peak_of(call):
    tracemalloc.start()
    try:
        with pytest.raises((TypeError, ValueError)):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HUGE = 2**31 - 1
DECLARED = {
    "skyrl": skyrl(shape=[HUGE, HUGE, HUGE]),
    "skyrl-rows": skyrl(shape=[HUGE, 2, 3]),
    "skyrl-empty": skyrl(shape=[0, HUGE, HUGE], data=""),
    "prime-rl": skyrl(shape=[HUGE, HUGE, HUGE], dtype=...),
    "nemo-rl": f"nrlre1:int32:{HUGE}x{HUGE}x{HUGE}:AAAA",
    "nemo-rl-empty": f"nrlre1:int32:0x{HUGE}x{HUGE}:",
    "rllm": [{"shape": [HUGE, HUGE], "dtype": "int32"}, "AAAA"],
    "rllm-empty": [{"shape": [HUGE, HUGE], "dtype": "int32"}, ""],
    "vllm": raw_npy(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({HUGE}, {HUGE}, {HUGE}), }}\n".encode()),
    "vllm-fortran": raw_npy(f"{{'descr': '<i4', 'fortran_order': True, 'shape': ({HUGE}, 1, 1), }}\n".encode()),
    "vllm-header": raw_npy(b"", version=b"\x02\x00", length=2**32 - 1),
}


@pytest.mark.parametrize("case", DECLARED)
def test_a_declared_shape_allocates_nothing(case):
    payload = DECLARED[case]
    refused(lambda: decode_routes(payload))  # warm: imports and caches are not the payload's
    assert peak_of(lambda: decode_routes(payload)) < 64 << 10


def test_a_large_payload_allocates_no_more_than_its_bytes(base64_library):
    routes = captured(200_000, 4, 8)
    size = routes.nbytes
    encoded = {form: encode_routes(routes, form) for form in ENCODABLE_FORMATS[:2]}
    wrong = {**encoded["skyrl"], "shape": [200_001, 4, 8]}
    assert peak_of(lambda: decode_routes(wrong)) < 64 << 10
    for payload in encoded.values():
        decode_routes(payload)
        tracemalloc.start()
        decoded = decode_routes(payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The decoded bytes are the result; the standard library decodes in pieces of 1 MiB.
        assert size <= peak < size + (64 << 10 if _base64.library() else 4 << 20)
        assert np.array_equal(decoded.indices, routes)


def test_no_quadratic_work():
    """Ten times the payload may not take more than some ten times the time, in forms that invite worse."""

    def stream(count):
        return "".join(event(choices=[{"index": 0, "token_ids": [1]}]) for _ in range(count))

    def header(count):
        return raw_npy(b"{" + b" " * count)

    def lists(count):
        return [[[1, 2]]] * count + [[[1, 2.0]]]

    for make, small, call in (
        (stream, 2_000, decode_response),
        (header, 900, decode_routes),
        (lists, 20_000, decode_routes),
    ):
        seconds = []
        for count in (small, 10 * small):
            value, best = make(count), float("inf")
            for _ in range(3):
                begin = time.perf_counter()
                refused(lambda value=value, call=call: call(value))
                best = min(best, time.perf_counter() - begin)
            seconds.append(best)
        assert seconds[1] < 40 * seconds[0] + 0.05, (make.__name__, seconds)
