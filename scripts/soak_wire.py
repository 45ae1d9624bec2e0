"""Soak of the wire: random payloads, valid, mutated or hostile, against the oracle in ``tests/wire_oracle.py``.

``check_case(seed, index)`` draws everything from its two numbers, so that a failure is reproduced by them alone:

    python scripts/soak_wire.py --count 100000
    python scripts/soak_wire.py --only 12345
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import wire_oracle as oracle  # noqa: E402  (tests/ is not a package)

from r3numba.wire import decode_response, decode_routes, encode_routes  # noqa: E402

OBJECT_DTYPES = ("uint8", "int16", "uint16", "int32")
FORMATS = ("sglang", "vllm", "nested", "skyrl", "prime-rl", "nemo-rl", "rllm")
JUNK = (
    None, True, False, 0, 1, 2, -1, 1.0, 3.5, 1 << 31, 1 << 63, -(1 << 70), "", "2", "uint8", "int64", "float32",
    "AAAA", "nrlre1:", [], [1], [1, 1], [1, 1, 1], [True] * 3, [[1]], [[[1]]], [[[0, 1]]], {},
    {"data": "AA==", "shape": [1, 1, 1]},
)  # fmt: skip
TEXT = "ABab01+/=-_ \n{}:x'(),|<uiO\u00e9"


def to_base64(data):
    """Return base64 text; the standard library writes it, the oracle reads it on its own."""
    return base64.b64encode(data).decode("ascii")


def draw_ids(rng, rows, layers, topk, dtype):
    """Return nested ids of a dtype: small or at its edge, with missing or partly negative rows now and then."""
    _, signed, limit = oracle.WIDTHS[dtype]
    most = rng.choice((4, 127, limit - 1))
    ids = [[[rng.randint(0, min(most, limit - 1)) for _ in range(topk)] for _ in range(layers)] for _ in range(rows)]
    if signed and rng.random() < 0.3:
        for row in ids:
            if rng.random() < 0.5:
                row[:] = [[-1] * topk for _ in range(layers)]
    if signed and rows and rng.random() < 0.1:
        rng.choice(rng.choice(ids))[rng.randrange(topk)] = rng.choice((-1, -2, -limit))
    return ids


def npy(ids, dtype, rng):
    """Return a .npy stream, usually as NumPy writes it."""
    shape = (len(ids), len(ids[0]) if ids else 2, len(ids[0][0]) if ids else 3)
    flat, fortran = oracle.flatten(ids), rng.random() < 0.2
    if fortran:
        flat = [ids[i][j][k] for k in range(shape[2]) for j in range(shape[1]) for i in range(shape[0])]
    descr = {"uint8": "|u1", "int16": "<i2", "uint16": "<u2", "int32": "<i4"}[dtype]
    fields = [f"'descr': '{descr}'", f"'fortran_order': {fortran}", f"'shape': {shape}"]
    if rng.random() < 0.1:
        rng.shuffle(fields)
    version = rng.choice((1, 1, 1, 2, 3))
    text = f"{{{', '.join(fields)}, }}"
    header = (text.ljust(127 - (10 if version == 1 else 12)) + "\n").encode()
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + size + header + oracle.to_bytes(flat, dtype)


def draw_payload(rng, form, rows, layers, topk):
    """Return a valid payload of a format (unless its ids are not), and the dtype to declare beside it."""
    dtype = rng.choice((*OBJECT_DTYPES, "int8") if form == "nemo-rl" else OBJECT_DTYPES)
    if form == "sglang" and rng.random() < 0.5:
        dtype = "int32"
    ids = draw_ids(rng, rows, layers, topk, dtype)
    declared = dtype if dtype != "int8" and rng.random() < 0.2 else None
    if form == "nested":
        return ids, declared
    if form == "vllm":
        data = npy(ids, dtype, rng)
        return to_base64(mutate_bytes(rng, data) if rng.random() < 0.2 else data), declared
    data = to_base64(oracle.to_bytes(oracle.flatten(ids), dtype))
    if form == "sglang":
        return data, None if dtype == "int32" else dtype
    if form == "nemo-rl":
        return f"nrlre1:{dtype}:{rows}x{layers}x{topk}:{data}", declared
    if form == "rllm":
        header = {"shape": [layers, topk], "dtype": dtype}
        return [json.dumps(header) if rng.random() < 0.5 else header, data], declared
    payload = {"data": data, "shape": [rows, layers, topk], "dtype": dtype}
    if form == "prime-rl":
        payload["start"] = rng.randrange(3)
        if dtype == "uint8" and rng.random() < 0.5:
            del payload["dtype"]
    return payload, declared


def mutate_bytes(rng, data):
    """Return bytes with one place changed, dropped, doubled or cut."""
    data = bytearray(data)
    place, kind = rng.randrange(min(len(data), 140)), rng.randrange(4)
    if kind == 0:
        data[place] = rng.choice((rng.randrange(256), *b" ,'()0123456789Ou\n"))
    elif kind == 1:
        del data[place]
    elif kind == 2:
        data.insert(place, data[place])
    else:
        del data[place:]
    return bytes(data)


def mutate_text(rng, text):
    """Return text with one place changed, dropped, inserted, doubled or cut."""
    place, kind = rng.randrange(len(text) + 1), rng.randrange(6)
    if kind == 0:
        return text[:place] + rng.choice(TEXT) + text[place + 1 :]
    if kind == 1:
        return text[:place] + text[place + 1 :]
    if kind == 2:
        return text[:place] + rng.choice(TEXT) + text[place:]
    if kind == 3:
        return text[:place]
    if kind == 4:
        return text + rng.choice(("=", "==", "AAAA", "\n", "AA=="))
    return text[:place] + text[place : place + 4] * 2 + text[place + 4 :]


def mutate(rng, value):
    """Return a value with one thing wrong somewhere in it, or possibly not wrong at all."""
    if rng.random() < 0.1:
        return rng.choice(JUNK)
    if isinstance(value, str):
        return mutate_text(rng, value)
    if isinstance(value, dict) and value:
        key, kind = rng.choice(list(value)), rng.randrange(5)
        if kind == 0:
            return {name: item for name, item in value.items() if name != key}
        if kind == 1:
            return {**value, rng.choice(("start", "dtype", "shape", "data", "other")): rng.choice(JUNK)}
        return {**value, key: mutate(rng, value[key])}
    if isinstance(value, list) and value:
        place, kind = rng.randrange(len(value)), rng.randrange(6)
        if kind == 0:
            return value[:place] + value[place + 1 :]
        if kind == 1:
            return [*value, value[place]]
        if kind == 2:
            return [*value[:place], rng.choice(JUNK), *value[place + 1 :]]
        return [*value[:place], mutate(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and rng.random() < 0.6:
        return value + rng.choice((-2, -1, 1, 250, 1 << 15, 1 << 31, 1 << 62))
    return rng.choice(JUNK)


def draw_body(rng, form, rows, layers, topk):
    """Return a response body around payloads of a format."""
    count = rng.choice((1, 1, 1, 2, 3))
    begin = rng.randrange(3)
    tokens = rows + 1 + begin
    prompt = rng.randint(min(begin, tokens), tokens)
    generated = tokens - prompt
    entries = []
    for index in range(count):
        payload, declared = draw_payload(rng, form, rows, layers, topk)
        if isinstance(payload, dict) and "start" in payload:
            payload["start"] = begin
        entry = {"routed_experts": payload}
        if declared is not None:
            entry["routed_experts_dtype"] = declared
        if rng.random() < 0.3:
            entry[rng.choice(("routed_experts_start_len", "routed_experts_prompt_start"))] = begin
        entries.append((index, entry))
    style = rng.choice(("own", "ids", "usage", "none", "sgl_ext", "split"))
    if style == "own":
        made = [
            {"text": "", "meta_info": {"prompt_tokens": prompt, "completion_tokens": generated, **entry}}
            for _, entry in entries
        ]
        return made if count > 1 or rng.random() < 0.3 else made[0]
    body = {"id": "x"}
    choices = [{"index": index, **({"sgl_ext": entry} if style == "sgl_ext" else entry)} for index, entry in entries]
    if style == "split" and rows:
        ids = draw_ids(rng, rows, layers, topk, "int16")
        cut = rng.randint(0, rows)
        part, prompt, generated = ids[:cut], cut, rows - cut + 1
        body["prompt_routed_experts"] = part
        choices = [{"index": index, "routed_experts": ids[cut:]} for index in range(count)]
    if style in ("ids", "split"):
        for choice in choices:
            choice["token_ids"] = [5] * generated
        if rng.random() < 0.5:
            body["prompt_token_ids"] = [7] * prompt
        else:
            choices[0]["prompt_token_ids"] = [7] * prompt
    if style != "none" and rng.random() < 0.8:
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": generated}
    return {**body, "choices": choices}


def stream_of(rng, body):
    """Return the event stream that adds up to a body: token ids in pieces, all else with the last of them."""
    end = rng.choice(("\n", "\r\n"))
    if "choices" not in body:
        events = body if isinstance(body, list) else [body]
        events = [{**event, "index": index} for index, event in enumerate(events)]
    else:
        events, rest = [], {key: value for key, value in body.items() if key != "choices"}
        for choice in body["choices"]:
            ids = choice.get("token_ids")
            cut = rng.randint(0, len(ids)) if ids else 0
            first = {"index": choice["index"], "token_ids": ids[:cut] if ids else None, "routed_experts": None}
            last = {**choice, "token_ids": ids[cut:]} if ids else choice
            events += [{"choices": [first], "usage": None}, {"choices": [last]}]
        events.insert(rng.choice((0, len(events))), {**rest, "choices": []})
    lines = [f"data: {json.dumps(event)}{end}{end}" for event in events]
    return ": a comment" + end + "".join(lines) + rng.choice(("", f"data: [DONE]{end}{end}", "data: [DONE]"))


def draw_options(rng, layers, topk, needed):
    """Return what the caller knows: nothing, the truth, or now and then something else."""
    options = {}
    if needed or rng.random() < 0.4:
        options = {"num_layers": layers, "topk": topk}
        if rng.random() < 0.1:
            options[rng.choice(("num_layers", "topk"))] = rng.randint(1, 5)
    if rng.random() < 0.4:
        options["num_experts"] = rng.choice((1, topk, 5, 128, 255, 256, 257, 512, 1 << 15, (1 << 15) + 1, 1 << 31))
    if rng.random() < 0.3:
        options["start"] = rng.randrange(3)
    return options


def outcome(call, *arguments, **options):
    """Return what a call returns, or the exception that it raised; no other exception than these may come."""
    try:
        return call(*arguments, **options)
    except (TypeError, ValueError) as error:
        return error


def compare(label, decoded, wanted):
    """Raise AssertionError where a decoded payload is not exactly what the oracle says."""
    form, dtype, ids, start, missing, counts = wanted
    array = decoded.indices
    got = decoded.missing
    checks = {
        "format": decoded.format == form,
        "dtype": str(array.dtype) == dtype,
        "ids": array.tolist() == ids,
        "order": array.ndim == 3 and array.flags.c_contiguous and array.dtype.isnative,
        "start": decoded.start == start and type(decoded.start) is type(start),
        "missing": (None if got is None else got.tolist()) == missing,
        "counts": (decoded.prompt_token_count, decoded.generated_token_count) == counts,
    }
    wrong = [name for name, right in checks.items() if not right]
    if wrong:
        raise AssertionError(f"{label}: wrong {', '.join(wrong)}: {decoded!r}, need {wanted}")


def check(label, call, reference, value, options):
    """Compare one call with the oracle: both refuse, or both agree on everything."""
    got = outcome(call, value, **options)
    try:
        wanted = reference(value, **options)
    except oracle.RefusedError:
        wanted = None
    refused = isinstance(got, Exception)
    if refused != (wanted is None) or (refused and len(str(got)) > 5_000):
        raise AssertionError(
            f"{label}: {got!r:.5000} from {value!r:.300} {options}, need {wanted or 'a short refusal'}"
        )
    if not refused:
        pairs = zip(got, wanted, strict=True) if isinstance(wanted, list) else [(got, wanted)]
        for one, expected in pairs:
            compare(label, one, expected)


def check_encoding(label, rng, rows, layers, topk):
    """Compare the three encodings with the oracle's, and decode them again."""
    dtype = rng.choice(("uint8", "int16", "int32"))
    ids = draw_ids(rng, rows, layers, topk, dtype)
    flat = oracle.flatten(ids)
    routes = np.array(flat, dtype).reshape(rows, layers, topk)
    if rng.random() < 0.3:
        routes = np.asfortranarray(routes)
    as_sent = rng.choice((None, *OBJECT_DTYPES))
    for form, options in (("skyrl", {}), ("vllm", {}), ("sglang", {"dtype": as_sent})):
        sent = as_sent or "int32" if form == "sglang" else dtype
        got = outcome(encode_routes, routes, form, **options)
        if min(flat, default=0) < 0 or max(flat, default=0) >= oracle.WIDTHS[sent][2]:
            if not isinstance(got, ValueError):
                raise AssertionError(f"{label}: {form} {got!r} for {ids}, need a refusal")
            continue
        if form == "skyrl":
            data = to_base64(oracle.to_bytes(flat, dtype))
            text = f'{{"data": "{data}", "shape": [{rows}, {layers}, {topk}], "dtype": "{dtype}"}}'
            right = json.dumps(got) == text
        elif form == "vllm":
            right = oracle.read_npy(oracle.from_base64(got)) == (dtype, (rows, layers, topk), ids)
        else:
            right = got == to_base64(oracle.to_bytes(flat, sent))
        again = decode_routes(got, num_layers=layers, topk=topk, dtype=sent)
        if not right or again.indices.tolist() != ids or again.format != form:
            raise AssertionError(f"{label}: {form} {got!r} for {ids}")


def check_case(seed, index):
    """Draw one payload, body or array from the two numbers, and compare the package with the oracle."""
    rng = random.Random(seed * 1_000_003 + index)
    label = f"case {index}"
    rows, layers, topk = rng.choice((0, 1, 1, 2, 3, 4)), rng.randint(1, 3), rng.randint(1, 4)
    form = rng.choice(FORMATS)
    kind = rng.random()
    if kind < 0.1:
        check_encoding(label, rng, rows, layers, topk)
        return
    options = draw_options(rng, layers, topk, form == "sglang")
    if kind < 0.4:
        body, faults = draw_body(rng, form, rows, layers, topk), rng.choice((0, 0, 0, 1, 2))
        for _ in range(faults):
            body = mutate(rng, body)
        check(label, decode_response, oracle.response, body, options)
        if isinstance(body, (dict, list)):
            as_text = (stream_of(rng, body) if not faults and rng.random() < 0.5 else json.dumps(body)).encode()
            check(label, lambda _, **known: decode_response(as_text, **known), oracle.response, body, options)
            torn = mutate_bytes(rng, as_text)
            outcome(decode_response, torn, **options)  # whatever it is now, only a refusal may come of it
        return
    payload, declared = draw_payload(rng, form, rows, layers, topk)
    if declared is not None:
        options["dtype"] = declared
    for _ in range(rng.choice((0, 1, 1, 2))):
        payload = mutate(rng, payload)
    if isinstance(payload, dict) and "data" not in payload and ("choices" in payload or "routed_experts" in payload):
        return
    if isinstance(payload, str) and rng.random() < 0.2:
        payload = payload.encode()
    check(label, decode_routes, oracle.decode, payload, options)


def main():
    """Run a number of cases, or one again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    for index in [arguments.only] if arguments.only is not None else range(arguments.count):
        try:
            check_case(arguments.seed, index)
        except Exception as error:
            print(f"{type(error).__name__}: {error} (--seed {arguments.seed} --only {index})")
            return 1
    seconds = time.perf_counter() - begin
    print(f"passed, {seconds:.1f} s, {seconds / arguments.count * 1e3:.3f} ms a case")
    return 0


if __name__ == "__main__":
    sys.exit(main())
