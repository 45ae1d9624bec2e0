"""The wire's oracle: every format read id by id in plain Python, independent of the package, NumPy and base64."""

from __future__ import annotations

import json

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
DIGIT = {character: index for index, character in enumerate(ALPHABET)}
#: name: (bytes, signed, exclusive limit of an id)
WIDTHS = {
    "int8": (1, True, 1 << 7),
    "uint8": (1, False, 1 << 8),
    "int16": (2, True, 1 << 15),
    "uint16": (2, False, 1 << 16),
    "int32": (4, True, 1 << 31),
}
DESCR = {"|u1": "uint8", "<u1": "uint8", "<i2": "int16", "<u2": "uint16", "<i4": "int32"}
SPACE = b" \t\n\r\f\v"


class RefusedError(Exception):
    """What the package has to answer with a TypeError or a ValueError."""


def need(condition):
    if not condition:
        raise RefusedError


# ---- base64 and bytes ------------------------------------------------------------------------------------------------


def from_base64(text):
    """Return the bytes of padded standard base64; every bit of the text must count."""
    if isinstance(text, (bytes, bytearray, memoryview)):
        text = bytes(text).decode("latin-1")
    need(isinstance(text, str) and len(text) % 4 == 0)
    digits = text[:-2] + text[-2:].rstrip("=")
    need(set(digits) <= DIGIT.keys())
    padding = len(text) - len(digits)
    bits = 0
    for digit in map(DIGIT.__getitem__, digits):
        bits = bits << 6 | digit
    need(bits & (1 << 2 * padding) - 1 == 0)
    return (bits >> 2 * padding).to_bytes(len(text) // 4 * 3 - padding, "big")


def to_bytes(flat, dtype):
    size, signed, _ = WIDTHS[dtype]
    return b"".join(value.to_bytes(size, "little", signed=signed) for value in flat)


def flatten(ids):
    return [value for row in ids for layer in row for value in layer]


def shaped(data, dtype, rows, layers, topk):
    size, signed, _ = WIDTHS[dtype]
    need(len(data) == rows * layers * topk * size)
    values = [int.from_bytes(data[at : at + size], "little", signed=signed) for at in range(0, len(data), size)]
    return [
        [values[(row * layers + layer) * topk : (row * layers + layer + 1) * topk] for layer in range(layers)]
        for row in range(rows)
    ]


# ---- parts of the formats --------------------------------------------------------------------------------------------


def is_size(value, least):
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 31


def sizes_of(value, count, least=1):
    need(isinstance(value, (list, tuple)) and len(value) == count)
    for axis, size in enumerate(value):
        need(is_size(size, 0 if count == 3 and axis == 0 else least))
    return list(value)


def named(value, names):
    need(isinstance(value, str) and value in names)
    return value


def row_fits(layers, topk, dtype):
    need(layers * topk * WIDTHS[dtype][0] < 1 << 31)


class Reader:
    """A cursor over a .npy header, one byte at a time."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def peek(self):
        return self.data[self.at : self.at + 1]

    def space(self):
        while self.peek() and self.peek() in SPACE:
            self.at += 1

    def take(self, wanted):
        need(self.data[self.at : self.at + len(wanted)] == wanted)
        self.at += len(wanted)

    def quoted(self):
        quote = self.peek()
        need(quote in (b"'", b'"'))
        self.at += 1
        text = b""
        while self.peek() not in (b"'", b'"', b""):
            text += self.peek()
            self.at += 1
        self.take(quote)
        return text


def npy_fields(header):
    reader, fields = Reader(header), {}
    reader.take(b"{")
    while True:
        reader.space()
        if reader.peek() == b"}":
            break
        key = reader.quoted()
        reader.space()
        reader.take(b":")
        reader.space()
        need(key not in fields)
        if key == b"descr":
            text = reader.quoted()
            need(len(text) <= 16)
            fields[key] = text.decode("latin-1")
        elif key == b"fortran_order":
            value = b"True" if reader.peek() == b"T" else b"False"
            reader.take(value)
            fields[key] = value == b"True"
        else:
            need(key == b"shape")
            reader.take(b"(")
            text = b""
            while reader.peek() != b")":
                need(reader.peek())
                text += reader.peek()
                reader.at += 1
            reader.take(b")")
            need(len(text) <= 60)
            parts = [part.strip(SPACE) for part in text.split(b",")]
            if parts[-1] == b"":
                del parts[-1]
            for part in parts:
                need(part and all(48 <= byte <= 57 for byte in part))
            fields[key] = [int(part) for part in parts]
        reader.space()
        if reader.peek() == b",":
            reader.at += 1
        else:
            need(reader.peek() == b"}")
    reader.take(b"}")
    need(not header[reader.at :].strip(SPACE))
    need(len(fields) == 3)
    return fields[b"descr"], fields[b"fortran_order"], fields[b"shape"]


def read_npy(data):
    need(data[:6] == b"\x93NUMPY" and data[6:8] in (b"\x01\x00", b"\x02\x00", b"\x03\x00"))
    begin = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:begin], "little")
    need(length <= 10_000 and begin + length <= len(data))
    descr, fortran, shape = npy_fields(data[begin : begin + length])
    need(descr in DESCR)
    dtype, (rows, layers, topk) = DESCR[descr], sizes_of(shape, 3)
    row_fits(layers, topk, dtype)
    rest = data[begin + length :]
    if not fortran:
        return dtype, (rows, layers, topk), shaped(rest, dtype, rows, layers, topk)
    turned = shaped(rest, dtype, topk, layers, rows)
    ids = [[[turned[k][j][i] for k in range(topk)] for j in range(layers)] for i in range(rows)]
    return dtype, (rows, layers, topk), ids


def read_nested(rows):
    need(isinstance(rows, (list, tuple)) and rows)
    for row in rows:
        need(isinstance(row, (list, tuple)) and row and len(row) == len(rows[0]))
        for layer in row:
            need(isinstance(layer, (list, tuple)) and layer and len(layer) == len(rows[0][0]))
            for value in layer:
                need(isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63)
    return (len(rows), len(rows[0]), len(rows[0][0])), [[list(layer) for layer in row] for row in rows]


# ---- one payload -----------------------------------------------------------------------------------------------------


def read(payload, num_layers, topk, declared):
    """Return (format, wire dtype or None, shape, ids, start that the payload states)."""
    if isinstance(payload, dict):
        form = "prime-rl" if "start" in payload or "dtype" not in payload else "skyrl"
        need("data" in payload and "shape" in payload)
        dtype = named(payload.get("dtype", "uint8"), ("uint8", "int16", "uint16", "int32"))
        shape = sizes_of(payload["shape"], 3)
        row_fits(shape[1], shape[2], dtype)
        need(isinstance(payload["data"], (str, bytes, bytearray, memoryview)))
        return form, dtype, shape, shaped(from_base64(payload["data"]), dtype, *shape), payload.get("start")
    if isinstance(payload, (str, bytes, bytearray, memoryview)):
        text = payload if isinstance(payload, str) else bytes(payload).decode("latin-1")
        if ":" in text[:64]:
            parts = text.split(":", 3)
            need(len(parts) == 4 and parts[0] == "nrlre1")
            dtype, sizes = named(parts[1], WIDTHS), parts[2].split("x")
            for part in sizes:
                need(0 < len(part) <= 10 and all(character in "0123456789" for character in part))
            shape = sizes_of([int(part) for part in sizes], 3)
            row_fits(shape[1], shape[2], dtype)
            return "nemo-rl", dtype, shape, shaped(from_base64(parts[3]), dtype, *shape), None
        data = from_base64(text)
        if data[:6] == b"\x93NUMPY":
            dtype, shape, ids = read_npy(data)
            return "vllm", dtype, shape, ids, None
        dtype = declared or "int32"
        need(num_layers is not None and topk is not None)
        row = num_layers * topk * WIDTHS[dtype][0]
        need(len(data) % row == 0)
        row_fits(num_layers, topk, dtype)
        shape = (len(data) // row, num_layers, topk)
        return "sglang", dtype, shape, shaped(data, dtype, *shape), None
    need(isinstance(payload, (list, tuple)))
    if len(payload) == 2 and isinstance(payload[1], (str, bytes, bytearray, memoryview)):
        header = payload[0]
        if isinstance(header, str):
            try:
                header = json.loads(header)
            except (ValueError, RecursionError):
                raise RefusedError from None
        need(isinstance(header, dict) and "dtype" in header)
        dtype = named(header["dtype"], ("uint8", "int16", "uint16", "int32"))
        layers, kept = sizes_of(header.get("shape"), 2)
        row_fits(layers, kept, dtype)
        data = from_base64(payload[1])
        rows, rest = divmod(len(data), layers * kept * WIDTHS[dtype][0])
        need(not rest)
        return "rllm", dtype, (rows, layers, kept), shaped(data, dtype, rows, layers, kept), None
    shape, ids = read_nested(payload)
    return "nested", None, shape, ids, None


def settle(ids, topk, dtype, num_experts):
    """Return (dtype, ids with dummies, missing rows): what the ids become."""
    limit = 1 << 31 if dtype is None else WIDTHS[dtype][2]
    need(topk <= limit)
    missing = []
    for row in ids:
        values = [value for layer in row for value in layer]
        gone = all(value == -1 for value in values)
        need(gone or min(values) >= 0)
        missing.append(gone)
    kept = [value for row, gone in zip(ids, missing, strict=True) for layer in row for value in layer if not gone]
    most = max(kept, default=0)
    need(most < 1 << 31)
    if num_experts is not None:
        need(topk <= num_experts and most < num_experts)
        largest = num_experts - 1
    elif dtype is None:
        largest = max(most, topk - 1 if any(missing) else 0)
    elif dtype == "uint16":
        largest = (1 << 15) - 1 if most < 1 << 15 else 1 << 15
    else:
        largest = {"int8": 255}.get(dtype, limit - 1)
    out = "uint8" if largest < 1 << 8 else "int16" if largest < 1 << 15 else "int32"
    filled = [[list(range(topk))] * len(row) if gone else row for row, gone in zip(ids, missing, strict=True)]
    return out, filled, missing if any(missing) else None


def begin_of(rows, stated, prompt, generated):
    """Return the start that everything agrees on, or None."""
    begin = None
    for value in stated:
        if value is not None:
            need(isinstance(value, int) and not isinstance(value, bool) and value >= 0)
            need(begin is None or begin == value)
            begin = value
    if prompt is not None and generated is not None:
        if begin is None:
            begin = prompt + generated - 1 - rows
            need(begin >= 0)
        need(begin + rows == prompt + generated - 1)
    need(not rows or begin is None or prompt is None or begin <= prompt)
    return begin


def decode(
    payload, *, num_layers=None, topk=None, num_experts=None, start=None, dtype=None, split=None, starts=(),
    prompt=None, generated=None,
):  # fmt: skip
    """Return (format, dtype, ids, start, missing, counts) of one payload; ``split`` is the prompt's part."""
    stated = [*starts, start]
    if split is None:
        form, wire, shape, ids, own = read(payload, num_layers, topk, dtype)
        need(dtype is None or wire is None or wire == dtype)
        stated = [own, *stated]
    else:
        need(isinstance(split, (list, tuple)) and isinstance(payload, (list, tuple)) and (split or payload))
        parts = [read_nested(part) for part in (split, payload) if part]
        need(len({shape[1:] for shape, _ in parts}) == 1)
        form, wire, ids = "split", None, [row for _, part in parts for row in part]
        shape = (len(ids), *parts[0][0][1:])
        if prompt is not None:
            stated.append(prompt - len(split))
    need(num_layers in (None, shape[1]) and topk in (None, shape[2]))
    begin = begin_of(len(ids), stated, prompt, generated)
    out, filled, missing = settle(ids, shape[2], wire, num_experts)
    return form, out, filled, begin, missing, (prompt, generated)


# ---- a whole body ----------------------------------------------------------------------------------------------------


def count(value):
    need(value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0))
    return value


def length(value):
    need(value is None or isinstance(value, list))
    return None if value is None or (value and isinstance(value[0], list)) else len(value)


def choice_of(choice, body, alone):
    """Return the arguments of ``decode`` for one choice."""
    need(isinstance(choice, dict))
    alone = alone and choice.get("index") in (None, 0)
    holders = [choice]
    for key in ("meta_info", "sgl_ext", "sglext"):
        holders += [choice[key]] if isinstance(choice.get(key), dict) else []
        holders += [body[key]] if alone and isinstance(body.get(key), dict) else []
    holders = [holder for holder in holders if holder.get("routed_experts") is not None]
    need(len(holders) == 1)
    holder = holders[0]
    meta = choice.get("meta_info")
    if isinstance(meta, dict):
        prompt, generated = count(meta.get("prompt_tokens")), count(meta.get("completion_tokens"))
    else:
        prompt, generated = length(choice.get("prompt_token_ids")), length(choice.get("token_ids"))
        if prompt is None:
            prompt = length(body.get("prompt_token_ids"))
        usage = body.get("usage")
        if alone and usage is not None:
            need(isinstance(usage, dict))
            stated = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
            need(None in (prompt, stated[0]) or prompt == stated[0])
            need(None in (generated, stated[1]) or generated == stated[1])
            prompt = stated[0] if prompt is None else prompt
            generated = stated[1] if generated is None else generated
    dtype = holder.get("routed_experts_dtype")
    if dtype is not None:
        named(dtype, ("uint8", "int16", "uint16", "int32"))
    keys = ("routed_experts_start_len", "routed_experts_prompt_start")
    starts = [place.get(key) for place in (holder, choice) for key in keys]
    split = choice.get("prompt_routed_experts")
    split = body.get("prompt_routed_experts") if split is None else split
    return holder["routed_experts"], {
        "dtype": dtype, "starts": starts, "split": split, "prompt": prompt, "generated": generated,
    }  # fmt: skip


def response(body, **options):
    """Return what ``decode`` returns for each choice of a parsed body."""
    if isinstance(body, list):
        need(body)
        for item in body:
            need(isinstance(item, dict) and isinstance(item.get("meta_info"), dict))
        return [decode_choice(item, {}, False, options) for item in body]
    need(isinstance(body, dict))
    if "choices" not in body:
        return response([body], **options)
    choices = body["choices"]
    need(isinstance(choices, list) and choices)
    return [decode_choice(choice, body, len(choices) == 1, options) for choice in choices]


def decode_choice(choice, body, alone, options):
    payload, found = choice_of(choice, body, alone)
    return decode(payload, **found, **options)
