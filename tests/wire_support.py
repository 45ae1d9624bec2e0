"""What the tests of the wire share: one payload of every format, and the form that every refusal has."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from r3numba.wire import WIRE_FORMATS

DATA = Path(__file__).parent / "data"
BODIES = ("chat", "completions", "completions_batch", "completions_n2_start15", "generate", "generate_start20")
IDS = [[[3, 7, 1], [5, 2, 0]], [[4, 4, 100], [9, 8, 7]]]  # [2 rows, 2 layers, topk 3]


def text(ids, dtype):
    return base64.b64encode(np.array(ids, dtype).tobytes()).decode()


def npy(ids, dtype, order="C", version=(1, 0), allow_pickle=False):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array(ids, dtype, order=order), version=version, allow_pickle=allow_pickle)
    return base64.b64encode(stream.getvalue()).decode()


def raw_npy(header, data=bytes(12), version=b"\x01\x00", length=None):
    size = (len(header) if length is None else length).to_bytes(2 if version[0] == 1 else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + version + size + header + data).decode()


def skyrl(**changes):
    payload = {"data": text(IDS, np.uint8), "shape": [2, 2, 3], "dtype": "uint8", **changes}
    return {key: value for key, value in payload.items() if value is not ...}


def body_of(payload, prompt=None, generated=None, **fields):
    """Return a body of one choice, its counts in ``usage``."""
    usage = None if prompt is None else {"prompt_tokens": prompt, "completion_tokens": generated}
    return {"choices": [{"index": 0, "routed_experts": payload, **fields}], "usage": usage}


def recorded(name):
    return json.loads((DATA / f"{name}.json").read_text())


def numpy_reads(encoded):
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)


#: format: (payload, what the caller must add, dtype of the result)
PAYLOADS = {
    "sglang": (text(IDS, "<i4"), {"num_layers": 2, "topk": 3}, np.int32),
    "vllm": (npy(IDS, np.uint8), {}, np.uint8),
    "nested": (IDS, {}, np.uint8),
    "split": ({"prompt_routed_experts": IDS[:1], "routed_experts": IDS[1:]}, {}, np.uint8),
    "skyrl": (skyrl(), {}, np.uint8),
    "prime-rl": (skyrl(dtype=..., start=4), {}, np.uint8),
    "nemo-rl": (f"nrlre1:int8:2x2x3:{text(IDS, np.int8)}", {}, np.uint8),
    "rllm": ([json.dumps({"shape": [2, 3], "dtype": "uint8"}), text(IDS, np.uint8)], {}, np.uint8),
    "array": (np.array(IDS, np.int32), {}, np.int32),
}
every_format = pytest.mark.parametrize("form", WIRE_FORMATS)


def refused(call, *needles, kind=(TypeError, ValueError)):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) in (TypeError, ValueError)
    for needle in needles:
        assert needle in message, message
    assert len(message) < 1_000
    return message


def event(**fields):
    return "data: " + json.dumps(fields) + "\n\n"


#: wire dtype: (payload of ids) for each format that names it
NAMED = {
    "skyrl": lambda ids, dtype: {"data": text(ids, dtype), "shape": list(np.shape(ids)), "dtype": dtype},
    "rllm": lambda ids, dtype: [{"shape": list(np.shape(ids)[1:]), "dtype": dtype}, text(ids, dtype)],
    "nemo-rl": lambda ids, dtype: f"nrlre1:{dtype}:{'x'.join(map(str, np.shape(ids)))}:{text(ids, dtype)}",
    "vllm": npy,
    "sglang": lambda ids, dtype: {"routed_experts": text(ids, dtype), "routed_experts_dtype": dtype},
}
