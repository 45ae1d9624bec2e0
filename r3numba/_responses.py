"""A response body to its choices: where the routes are, what stands beside them, and how many tokens there were.

Three families: a body with ``choices`` (vLLM, SkyRL, SGLang's OpenAI endpoints), SGLang's own ``/generate`` with
``meta_info`` (one, or a list), and a server-sent-event stream of either.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ._checks import integer, kind
from ._formats import load_json

#: Where a choice may hold its routes: in itself, or one level down. SGLang has spelled its extension both ways.
_HOLDERS: Final = ("meta_info", "sgl_ext", "sglext")
#: How a start is spelled beside the routes: SGLang's, and vLLM's sampling parameter where a server echoes it.
_STARTS: Final = ("routed_experts_start_len", "routed_experts_prompt_start")
_REPR: Final = reprlib.Repr()
_REPR.maxstring = 200


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a body: its routes as they came, and what the body says about them."""

    where: str
    payload: object
    prompt_part: object = None
    dtype: object = None
    #: (how a message calls it, value), for each start that is stated beside the routes.
    starts: tuple[tuple[str, object], ...] = ()
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


def read_choices(body: object) -> list[Choice]:
    """Return the choices of a body: a mapping, a list of them, JSON, or an event stream (str or bytes)."""
    if isinstance(body, (bytes, bytearray, memoryview)):
        try:
            body = bytes(body).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"body is not text, need UTF-8: {error}") from None
    if isinstance(body, str):
        text = body.lstrip("\ufeff \t\r\n")
        body = load_json("body", text) if text[:1] in ("{", "[") else _merge(_events(text))
    if isinstance(body, (list, tuple)):
        if not body:
            raise ValueError("body is an empty list, need at least one response")
        return [_own_choice(f"body[{index}]", item) for index, item in enumerate(body)]
    if not isinstance(body, Mapping):
        raise TypeError(f"body is a {kind(body)}, need a dict (of a model: .model_dump()), JSON or an event stream")
    if "choices" not in body:
        return [_own_choice("body", body)]
    choices = body["choices"]
    if not isinstance(choices, (list, tuple)):
        raise TypeError(f"choices is a {kind(choices)}, need a list")
    if not choices:
        raise ValueError("choices is empty, need at least one")
    return [_choice(f"choices[{index}]", choice, body, len(choices) == 1) for index, choice in enumerate(choices)]


def read_holder(holder: Mapping[Any, Any]) -> Choice:
    """Return the one choice of a mapping that holds ``routed_experts``: SGLang's ``meta_info``, or a choice itself."""
    counts = _meta_counts("payload", holder) if "prompt_tokens" in holder else _counts("payload", holder, {}, False)
    part, dtype = holder.get("prompt_routed_experts"), holder.get("routed_experts_dtype")
    return Choice("", holder["routed_experts"], part, dtype, _starts(holder), *counts)


def brief(value: object) -> str:
    """Return a short form of any value; ``repr`` would walk and print all of it."""
    return _REPR.repr(value)


def _own_choice(where: str, item: object) -> Choice:
    """Return the choice that a ``/generate`` response is."""
    if not isinstance(item, Mapping):
        raise TypeError(f"{where} is a {kind(item)}, need an object with meta_info")
    if not isinstance(item.get("meta_info"), Mapping):
        said = item.get("error", item.get("message"))
        got = f"its keys are {brief(list(item))}" if said is None else f"it says {brief(said)}"
        raise ValueError(f"{where} has neither choices nor meta_info, need one of them: {got}")  # noqa: TRY004  # a key
    return _choice(where, item, {}, alone=False)


def _choice(where: str, choice: object, body: Mapping[Any, Any], alone: bool) -> Choice:
    if not isinstance(choice, Mapping):
        raise TypeError(f"{where} is a {kind(choice)}, need an object")
    # A lone choice with another index than 0 was cut out of a larger response, whose usage is a sum.
    alone = alone and choice.get("index") in (None, 0)
    places = [(where, choice)]
    for key in _HOLDERS:
        places += [(f"{where}.{key}", choice[key])] if isinstance(choice.get(key), Mapping) else []
        places += [(key, body[key])] if alone and isinstance(body.get(key), Mapping) else []
    found = [(name, place) for name, place in places if place.get("routed_experts") is not None]
    if len(found) != 1:
        names = " and ".join(name for name, _ in found) or "no place"
        raise ValueError(f"{where} has routed_experts in {names}, need one (does the engine return routes?)")
    name, holder = found[0]
    meta = choice.get("meta_info")
    if isinstance(meta, Mapping):
        counts = _meta_counts(f"{where}.meta_info", meta)
    else:
        counts = _counts(where, choice, body, alone)
    prompt_part = choice.get("prompt_routed_experts")
    return Choice(
        f"{name}.routed_experts: ",
        holder["routed_experts"],
        prompt_part if prompt_part is not None else body.get("prompt_routed_experts"),
        holder.get("routed_experts_dtype"),
        _starts(holder) + (_starts(choice) if holder is not choice else ()),
        *counts,
    )


def _starts(holder: Mapping[Any, Any]) -> tuple[tuple[str, object], ...]:
    return tuple((key, holder[key]) for key in _STARTS if holder.get(key) is not None)


def _meta_counts(where: str, meta: Mapping[Any, Any]) -> tuple[int | None, int | None]:
    """Return SGLang's counts, which are the choice's own."""
    return (
        _count(f"{where}.prompt_tokens", meta.get("prompt_tokens")),
        _count(f"{where}.completion_tokens", meta.get("completion_tokens")),
    )


def _counts(
    where: str, choice: Mapping[Any, Any], body: Mapping[Any, Any], alone: bool
) -> tuple[int | None, int | None]:
    """Return tokens of prompt and completion: from token ids, else from the usage of a body with this one choice."""
    prompt = _length(f"{where}.prompt_token_ids", choice.get("prompt_token_ids"))
    if prompt is None:
        prompt = _length("prompt_token_ids", body.get("prompt_token_ids"))
    generated = _length(f"{where}.token_ids", choice.get("token_ids"))
    usage = body.get("usage")
    if not alone or usage is None:
        return prompt, generated
    if not isinstance(usage, Mapping):
        raise TypeError(f"usage is a {kind(usage)}, need an object")
    counts = []
    for key, own in (("prompt_tokens", prompt), ("completion_tokens", generated)):
        stated = _count(f"usage.{key}", usage.get(key))
        if own is not None and stated is not None and own != stated:
            raise ValueError(f"usage.{key} is {stated}, need {own}, the number of token ids of {where}")
        counts.append(stated if own is None else own)
    return counts[0], counts[1]


def _count(name: str, value: object) -> int | None:
    return None if value is None else integer(name, value, 0)


def _length(name: str, ids: object) -> int | None:
    """Return the number of token ids; None where there are none, or one list for each of several prompts."""
    if ids is None:
        return None
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{name} is a {kind(ids)}, need a list of token ids")
    return None if ids and isinstance(ids[0], (list, tuple)) else len(ids)


# --- Streams ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stream:
    body: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    own: dict[int, Mapping[Any, Any]] = field(default_factory=dict)  # SGLang's /generate, by index


def _events(text: str) -> Iterator[Any]:
    """Yield the JSON value of each event. A stream that was cut in an event is a ValueError."""
    data: list[str] = []
    done = False
    # Lines end as the standard says; str.splitlines would also cut at characters that JSON may hold unescaped.
    for number, line in enumerate([*re.split("\r\n|\n|\r", text), ""]):
        if not line:
            event, data = "\n".join(data), []
            if event and done:
                raise ValueError("body has an event after [DONE], need one stream")
            if event == "[DONE]":
                done = True
            elif event:
                yield load_json("body: event", event)
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line.startswith((":", "event:", "id:", "retry:")):
            raise ValueError(f"body: line {number} begins with {line[:20]!r}, need JSON or an event stream")


def _merge(events: Iterator[Any]) -> Any:
    """Return the body that a stream adds up to: token ids joined, of everything else the last."""
    stream = _Stream()
    for number, event in enumerate(events):
        if not isinstance(event, Mapping):
            raise TypeError(f"event {number} is a {kind(event)}, need an object")
        if event.get("error") is not None:
            raise ValueError(f"event {number} is an error of the engine: {brief(event['error'])}")
        if event.get("meta_info") is not None and "choices" not in event:
            stream.own[_index(number, event)] = event
            continue
        choices = event.get("choices")
        if not isinstance(choices, (list, tuple)):
            raise TypeError(f"event {number}: choices is a {kind(choices)}, need a list")
        for choice in choices:
            _merge_choice(number, choice, stream.choices)
        stream.body.update({key: value for key, value in event.items() if value is not None})
    if stream.own and stream.choices:
        raise ValueError("body has events with choices and events with meta_info, need one kind")
    if stream.own:
        return [stream.own[index] for index in sorted(stream.own)]
    return {**stream.body, "choices": [stream.choices[index] for index in sorted(stream.choices)]}


def _merge_choice(number: int, choice: object, choices: dict[int, dict[str, Any]]) -> None:
    if not isinstance(choice, Mapping):
        raise TypeError(f"event {number}: a choice is a {kind(choice)}, need an object")
    index = _index(number, choice)
    merged = choices.setdefault(index, {"index": index})
    ids = choice.get("token_ids")
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise TypeError(f"event {number}: token_ids is a {kind(ids)}, need a list of token ids")
    if ids and "routed_experts" in merged and choice.get("routed_experts") is None:
        raise ValueError(f"event {number} has tokens of choice {index} after its routes, need the routes last")
    if ids is not None:
        merged.setdefault("token_ids", []).extend(ids)
    merged.update({key: value for key, value in choice.items() if value is not None and key != "token_ids"})


def _index(number: int, item: Mapping[Any, Any]) -> int:
    index = item.get("index")
    return 0 if index is None else integer(f"event {number}: index", index, 0)
