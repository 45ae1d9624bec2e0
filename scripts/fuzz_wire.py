"""Coverage-guided fuzz of the wire with atheris (not a dependency: ``pip install atheris``).

    python scripts/fuzz_wire.py -max_total_time=600          libFuzzer's options; a crash file reproduces itself
    python scripts/fuzz_wire.py crash-0123abcd

The input's first byte chooses the door, the rest is the payload. Any exception but TypeError and ValueError, and any
result that is not well-formed, is a crash.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent

with atheris.instrument_imports(include=["r3numba"]):
    from r3numba import _base64, _formats, _npy, _responses, wire  # noqa: F401  (instrumented here)

KNOWN = {"num_layers": 2, "topk": 3}


def doors(data: bytes) -> list[object]:
    """Return the values that one input stands for."""
    text = data.decode("latin-1")
    coded = base64.b64encode(data).decode()
    values: list[object] = [data, text, coded, f"nrlre1:{text}"]
    values += [{"data": coded, "shape": [len(data) // 6, 2, 3], "dtype": "uint8"}, [text, coded]]
    with contextlib.suppress(ValueError, RecursionError):
        values.append(json.loads(text))
    return values


def one_input(data: bytes) -> None:
    """Try one input at every door."""
    if not data:
        return
    for value in doors(data[1:]):
        for call in (wire.decode_routes, wire.decode_response):
            try:
                result = call(value, num_experts=None if data[0] & 1 else 300, **(KNOWN if data[0] & 2 else {}))
            except (TypeError, ValueError):
                continue
            for decoded in result if isinstance(result, list) else [result]:
                array = decoded.indices
                if (
                    array.ndim != 3
                    or array.dtype.name not in ("uint8", "int16", "int32")
                    or not array.flags.c_contiguous
                ):
                    raise RuntimeError(f"{decoded!r} is not canonical")
                if array.size and array.min() < 0:
                    raise RuntimeError(f"{decoded!r} has a negative id")


def seeds() -> str:
    """Write a corpus of the recorded bodies and of one payload of every format; return its directory."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz_wire_"))
    sys.path.insert(0, str(ROOT / "tests"))
    import wire_support

    found = [path.read_bytes() for path in (ROOT / "tests" / "data").glob("*.json")]
    found.append((ROOT / "tests" / "data" / "stream_generate.txt").read_bytes())
    found.append(base64.b64decode(wire_support.npy(wire_support.IDS, "uint8")))
    found += [
        json.dumps(payload).encode() for form, (payload, _, _) in wire_support.PAYLOADS.items() if form != "array"
    ]
    for index, data in enumerate(found):
        (directory / str(index)).write_bytes(b"\x02" + data)
    return str(directory)


if __name__ == "__main__":
    arguments = list(sys.argv)
    if not any(Path(argument).exists() for argument in arguments[1:]):
        arguments.append(seeds())
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()
