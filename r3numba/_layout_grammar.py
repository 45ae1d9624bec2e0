"""How a Megatron config spells its settings, above all its pipeline layout (standard library alone).

Three parts: reading settings from a config of any kind, the virtual pipeline size behind its four spellings, and the
text form of ``pipeline_model_parallel_layout``. Conventions: ``TransformerConfig``, ``PipelineParallelLayerLayout`` of
megatron-core 0.16.1 and the argument validation of Megatron-LM; ``tests/test_guards.py`` compares with the classes.
Nothing here keeps state, so all of it is safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Final, NamedTuple

# ---- reading a config ------------------------------------------------------------------------------------------------


class Settings:
    """A config of any kind behind one way to read it; never writes to it."""

    __slots__ = ("_config", "_pipeline_size")

    def __init__(self, config: object, pipeline_size: int | None) -> None:
        """Take a mapping or an object with attributes, and the pipeline size where the caller states it.

        Raises
        ------
        TypeError
            If ``config`` can hold no settings, or ``pipeline_size`` is no integer.
        ValueError
            If ``pipeline_size`` is below 1.
        """
        if config is None or isinstance(config, (type, str, bytes, bool, int, float, list, tuple, set, frozenset)):
            raise TypeError(f"config is {config!r}, need a mapping or an object with the settings as attributes")
        self._config = config
        self._pipeline_size = None if pipeline_size is None else as_integer("pipeline_size", pipeline_size, 1)

    def read(self, name: str) -> object:
        """Return the value of a setting, None when it is not set."""
        return _lookup(self._config, name)

    def read_dotted(self, name: str) -> list[object]:
        """Return every value of ``outer.inner``: of the flat key with the dot, and of the nested one."""
        outer, dot, inner = name.partition(".")
        found = [self.read(name), _lookup(self.read(outer), inner) if dot else None]
        return [value for value in found if value is not None]

    def flag(self, name: str) -> bool:
        """Return a boolean setting, False when it is not set."""
        value = self.read(name)
        return value is not None and as_flag(name, value)

    def words(self, name: str) -> set[str]:
        """Return a setting that is a word, words with commas, an enum member or several of them, in lower case."""
        value = self.read(name)
        items = () if value is None else as_items(value)
        words = (word.strip() for item in items for word in as_word(name, item).split(","))
        return {word for word in words if word}

    def pipeline_size(self) -> int | None:
        """Return the pipeline size, None when neither the caller nor the config states it.

        Raises
        ------
        ValueError
            If both state it and differ.
        """
        name = "pipeline_model_parallel_size"
        value = self.read(name)
        size = None if value is None else as_integer(name, value, 1)
        if None not in (size, self._pipeline_size) and size != self._pipeline_size:
            raise ValueError(f"pipeline_size is {self._pipeline_size} and the config's {name} is {size}, need the same")
        return size if self._pipeline_size is None else self._pipeline_size

    def pipeline_size_for(self, setting: str) -> int:
        """Return the pipeline size; a ValueError names the setting that needs it when there is none."""
        size = self.pipeline_size()
        if size is None:
            raise ValueError(
                f"{setting} needs the pipeline size and the config has none, "
                "set pipeline_model_parallel_size or pass pipeline_size="
            )
        return size


def _lookup(config: object, name: str) -> object:
    """Return ``name`` of a mapping or an object; None when it is absent, None, or missing in OmegaConf."""
    try:
        if isinstance(config, Mapping):
            # keys() and get() behave alike for every OmegaConf node: struct mode, missing values, and interpolations
            # that do not resolve (which raise). get() also leaves a defaultdict as it was.
            value: object = config.get(name) if name in config.keys() else None  # noqa: SIM118
        else:
            value = getattr(config, name, None)
    except Exception as error:
        raise RuntimeError(f"reading {name} from the config failed: {error!r}") from error
    return None if isinstance(value, str) and value == "???" else value


def as_items(value: object) -> Collection[object]:
    """Return the members of a collection, or the one value that is none (a string is one value)."""
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping)):
        return value
    return [value]


def as_flag(name: str, value: object) -> bool:
    """Return a bool as it is; anything else is a TypeError, above all the string "false"."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, need a bool")
    return value


def as_integer(name: str, value: object, minimum: int = 0) -> int:
    """Return an integer of any integer type that is no bool, at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, need an integer")
    if value < minimum:
        raise ValueError(f"{name} is {value!r}, need at least {minimum}")
    return int(value)


def as_number(name: str, value: object) -> float:
    """Return a real number that is no bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, need a number")
    return float(value)


def as_word(name: str, value: object) -> str:
    """Return a string, or an enum member's, in lower case."""
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str) else value.name
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, need a word")
    return value.strip().lower()


# ---- the virtual pipeline size ---------------------------------------------------------------------------------------


class Spelling(NamedTuple):
    """One spelling of the virtual pipeline size that the config uses, and what it resolves to."""

    setting: str
    value: object
    stages: int


def _stages_given(settings: Settings, setting: str, value: object) -> int:
    return max(1, as_integer(setting, value))


#: Megatron refuses to count layers a virtual stage where the first or last rank has a number of its own.
_UNEVEN: Final = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)


def _stages_from_layers(settings: Settings, setting: str, value: object) -> int:
    layers_per_stage = as_integer(setting, value)
    if layers_per_stage == 0:
        return 1
    for name in _UNEVEN:
        if settings.read(name) is not None:
            raise ValueError(f"{setting} and {name} are both set, need num_virtual_stages_per_pipeline_rank instead")
    name = "num_layers" if settings.read("num_layers") is not None else "decoder_num_layers"
    layers = settings.read(name)
    if layers is None:
        raise ValueError(f"{setting} needs the number of layers and the config has none, set num_layers")
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    total = as_integer(name, layers, 1) + sum(map(settings.flag, ends))
    size = settings.pipeline_size_for(setting)
    stages, rest = divmod(total, size * layers_per_stage)
    if rest:
        raise ValueError(
            f"{setting} x pipeline size is {layers_per_stage} x {size}, need a divisor of the {total} layers "
            "(with embedding and loss where the config counts them)"
        )
    return stages


def _stages_from_layout(settings: Settings, setting: str, value: object) -> int:
    if isinstance(value, str):
        total = count_stages(setting, value)
    elif isinstance(value, Sequence):
        for position, row in enumerate(value):
            if isinstance(row, str) or not isinstance(row, Sequence):
                raise TypeError(f"{setting}[{position}] is {row!r}, need a list with the layers of one stage")
        total = len(value)
    else:
        name = "virtual_pipeline_model_parallel_size"
        resolved = _lookup(value, name)
        if resolved is None:
            raise TypeError(f"{setting} is {value!r}, need a string, a list of lists or an object with {name}")
        return max(1, as_integer(f"{setting}.{name}", resolved))
    size = settings.pipeline_size_for(setting)
    stages, rest = divmod(total, size)
    if rest or not total:
        raise ValueError(f"{setting} has {total} stages, need a multiple of the pipeline size {size}")
    return stages


_SPELLINGS: Final[dict[str, Callable[[Settings, str, object], int]]] = {
    "virtual_pipeline_model_parallel_size": _stages_given,
    "num_layers_per_virtual_pipeline_stage": _stages_from_layers,
    "num_virtual_stages_per_pipeline_rank": _stages_given,
    "pipeline_model_parallel_layout": _stages_from_layout,
}


def spellings(settings: Settings) -> list[Spelling]:
    """Return every spelling that the config uses, resolved, in a fixed order.

    Raises
    ------
    TypeError, ValueError
        If a value makes no sense, or needs a pipeline size or a number of layers that the config does not have.
    """
    settings.pipeline_size()  # two sizes that differ are an error even where no spelling needs one
    found = ((setting, settings.read(setting)) for setting in _SPELLINGS)
    return [
        Spelling(setting, value, _SPELLINGS[setting](settings, setting, value))
        for setting, value in found
        if value is not None
    ]


# ---- a layout as text ------------------------------------------------------------------------------------------------

#: A symbol and its index in the text, so that an error can point at it after the unrolling.
_Symbol = tuple[str, int]

_STAGE_END: Final = "|"
_LAYERS: Final = "EtmL"

#: No real pipeline comes near; a mistyped repeat count must not eat the host's memory.
_MAX_SYMBOLS: Final = 1_000_000

_HINTS: Final = {
    "(": "; a group is written (tt|)*2 and groups do not nest",
    ")": "; a group is written (tt|)*2 and groups do not nest",
    "*": "; a repeat is written t*3 or (tt|)*2",
}


def count_stages(setting: str, text: str) -> int:
    """Return the number of pipeline stages that a layout text describes, over all ranks and virtual stages.

    The text lists layers (``E`` embedding, ``t`` decoder, ``m`` multi-token prediction, ``L`` loss) with ``|`` between
    stages. ``x*3`` repeats one symbol, ``(tt|)*29`` a group; commas are ornament, even between digits. Groups do not
    nest. Groups are unrolled first and single symbols after, each once from left to right, which also fixes what odd
    texts mean: ``(tt)*2*3`` is six layers.

    Parameters
    ----------
    setting : str
        The name of the setting, for the messages.
    text : str
        The layout.

    Raises
    ------
    ValueError
        If the text does not follow the grammar (the message holds the text and the position, counted from 0), or if
        its repeats unroll to more than a million symbols.

    Examples
    --------
    >>> count_stages("layout", "Ettt|(tt|)*29,m|L")
    32
    """
    symbols = [(character, position) for position, character in enumerate(text) if character != ","]
    symbols = _unroll_symbols(_unroll_groups(symbols, setting, text), setting, text)
    for character, position in symbols:
        if character not in _LAYERS and character != _STAGE_END:
            hint = _HINTS.get(character, "")
            raise ValueError(
                f"{setting} {text!r} has {character!r} at position {position}, "
                f"need a layer ({', '.join(_LAYERS)}) or the end of a stage ({_STAGE_END}){hint}"
            )
    return 1 + sum(character == _STAGE_END for character, _ in symbols)


def _unroll_groups(symbols: list[_Symbol], setting: str, text: str) -> list[_Symbol]:
    """Return the symbols with every ``(...)*n`` written out; whatever is no such group stays and is judged later."""
    unrolled: list[_Symbol] = []
    index = 0
    while index < len(symbols):
        body: list[_Symbol] = []
        count, after = None, index
        if symbols[index][0] == "(":
            close = index + 1
            while close < len(symbols) and symbols[close][0] != ")":
                close += 1
            body = symbols[index + 1 : close]
            count, after = _repeat_count(symbols, close + 1)
        if count is None or not body:
            count, after, body = 1, index + 1, [symbols[index]]
        _extend(unrolled, body, count, setting, text)
        index = after
    return unrolled


def _unroll_symbols(symbols: list[_Symbol], setting: str, text: str) -> list[_Symbol]:
    """Return the symbols with every ``x*n`` written out; ``x`` may be the end of a stage too."""
    unrolled: list[_Symbol] = []
    index = 0
    while index < len(symbols):
        count, after = _repeat_count(symbols, index + 1)
        if count is None:
            count, after = 1, index + 1
        _extend(unrolled, [symbols[index]], count, setting, text)
        index = after
    return unrolled


def _repeat_count(symbols: list[_Symbol], index: int) -> tuple[int | None, int]:
    """Return the ``n`` of a ``*n`` that begins at ``index`` and the index after it; None where there is none."""
    if index >= len(symbols) or symbols[index][0] != "*":
        return None, index
    after = index + 1
    while after < len(symbols) and symbols[after][0].isdecimal():
        after += 1
    digits = "".join(character for character, _ in symbols[index + 1 : after])
    return (int(digits), after) if digits else (None, index)


def _extend(unrolled: list[_Symbol], body: list[_Symbol], count: int, setting: str, text: str) -> None:
    """Append ``body`` ``count`` times, unless that makes the layout absurdly long."""
    length = len(unrolled) + len(body) * count
    if length > _MAX_SYMBOLS:
        raise ValueError(
            f"{setting} {text!r} repeats to {length} symbols at position {body[0][1]}, need at most {_MAX_SYMBOLS}"
        )
    unrolled.extend(body * count)
