"""Refuse Megatron settings under which replay silently trains the wrong experts (standard library alone).

Some settings let a router run as if nothing were replayed, others hand it another microbatch's routes; neither raises
anything. Call :func:`check_replay_config` once, before training, on the **resolved** config.

Users of ``-W error``: doubts arrive as one :class:`UnsafeReplayWarning`, which ``-W error`` turns into an exception of
that class. A refusal is never lost to it: the :class:`UnsafeReplayError` is raised all the same, and lists the doubts
too. To keep them warnings, call ``warnings.filterwarnings("default", category=UnsafeReplayWarning)`` in the program, or
put ``default::r3numba.guards.UnsafeReplayWarning`` into pytest's ``filterwarnings``. (Python's own ``-W`` option looks
its categories up before site-packages can be imported, so it cannot name this class.)

Source of the conventions: ``TransformerConfig``, the schedules and the router of megatron-core 0.16.1, and the argument
validation of Megatron-LM. Settings that only its main branch has are known too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from r3numba._layout_grammar import Settings, as_flag, as_integer, as_items, as_number, as_word, spellings

__all__ = [
    "Finding",
    "UnsafeReplayError",
    "UnsafeReplayWarning",
    "check_replay_config",
    "inspect_replay_config",
    "interleaved_stages",
]

Verdict = Literal["refuse", "warn"]


class UnsafeReplayError(ValueError):
    """The config holds settings under which replay would silently train the wrong experts.

    Examples
    --------
    >>> issubclass(UnsafeReplayError, ValueError)
    True
    """


class UnsafeReplayWarning(UserWarning):
    """The config holds settings that deserve a look while replay is on, or no replay switch that is known here.

    Under ``-W error`` it is raised as an exception; the module's docstring says how to keep it a warning.

    Examples
    --------
    >>> issubclass(UnsafeReplayWarning, UserWarning)
    True
    """


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting that is unsafe, or doubtful, beside replay. Immutable, so safe to share between threads.

    Attributes
    ----------
    setting : str
        The setting's name, in the spelling that the config uses; ``"replay"`` where no replay switch was recognised.
    value : object
        What the config holds there, as it is.
    verdict : {"refuse", "warn"}
        ``"refuse"``: wrong experts are trained. ``"warn"``: the ids are right, something near them is not.
    why : str
        What goes wrong.
    instead : str
        What to use instead.

    Examples
    --------
    >>> Finding("moe_router_fusion", True, "refuse", "replay has no effect", "moe_router_fusion=False").verdict
    'refuse'
    """

    setting: str
    value: object
    verdict: Verdict
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting} = {_shown(self.value)}: {self.why}. Instead: {self.instead}."


def _shown(value: object) -> str:
    """Return a value as the messages show it; a layout of hundreds of layers is cut short."""
    shown = repr(value)
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


def inspect_replay_config(
    config: object,
    *,
    replay: bool | None = None,
    pipeline_size: int | None = None,
    handles: Iterable[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Return what is unsafe in a resolved Megatron config while replay is on.

    Parameters
    ----------
    config : mapping or object
        A mapping, or any object with the settings as attributes: a ``TransformerConfig``, a Bridge provider, an
        ``argparse.Namespace``, an OmegaConf node. Only read. A setting that is absent, None, or missing (``???``) in
        OmegaConf is not set.
    replay : bool, optional
        Whether replay is on. None looks for the switches that trainers use: on if any is on (R2 and R3 alike, as both
        replay through Megatron); with none present, one finding ``"replay"`` warns and says what would be refused.
    pipeline_size : int, optional
        The pipeline-parallel size, where the config does not hold ``pipeline_model_parallel_size``.
    handles : iterable of str
        What the caller's installer copes with: ``"interleaved"``, ``"mtp"``, ``"partial_recompute"``. The rules that
        name it are skipped.

    Returns
    -------
    tuple of Finding
        In the order of the rules; empty when replay is off.

    Raises
    ------
    TypeError
        If a setting has a value of a type that its meaning does not allow (a replay switch that is the string
        ``"false"``, a virtual pipeline size that is a bool), or an argument has a wrong type (``handles="mtp"``).
    ValueError
        If ``handles`` holds an unknown word, a setting has an impossible value, a layout is malformed, a setting needs
        the pipeline size or the number of layers and the config has none, or two pipeline sizes are given and differ.
    RuntimeError
        If the config raises while a setting is read (anything but AttributeError, which means absent).

    Notes
    -----
    Keeps no state, so safe to call from any thread.

    Examples
    --------
    >>> inspect_replay_config({"moe_enable_routing_replay": True, "moe_router_fusion": True})[0].setting
    'moe_router_fusion'
    """
    if replay is not None and not isinstance(replay, bool):
        raise TypeError(f"replay is {replay!r}, need True, False or None")
    handled = _known_handles(handles)
    settings = Settings(config, pipeline_size)
    if replay is None:
        replay = _replay_switch(settings)
    if replay is False:
        return ()
    settings.pipeline_size()  # two sizes that differ are an error even where no rule needs one
    findings = tuple(_apply_rules(settings, handled))
    return findings if replay else _without_a_switch(findings)


def check_replay_config(
    config: object,
    *,
    replay: bool | None = None,
    pipeline_size: int | None = None,
    handles: Iterable[str] = frozenset(),
) -> None:
    """Raise when a resolved Megatron config would let replay silently train the wrong experts.

    The parameters, and the TypeError, ValueError and RuntimeError of a config that makes no sense, are those of
    :func:`inspect_replay_config`.

    Raises
    ------
    UnsafeReplayError
        If a setting is refused; one error lists every refusal, and the warnings after them.

    Warns
    -----
    UnsafeReplayWarning
        If a setting deserves a look, or no replay switch was recognised; one warning lists them all. ``-W error`` turns
        it into an exception, unless there is a refusal, which is raised in its place.

    Notes
    -----
    Keeps no state, so safe to call from any thread.

    Examples
    --------
    >>> check_replay_config({"moe_enable_routing_replay": True, "virtual_pipeline_model_parallel_size": 1})
    """
    findings = inspect_replay_config(config, replay=replay, pipeline_size=pipeline_size, handles=handles)
    refusals = [f"\n- {finding}" for finding in findings if finding.verdict == "refuse"]
    doubts = [f"\n- {finding}" for finding in findings if finding.verdict == "warn"]
    if doubts:
        try:
            warnings.warn("check before training with replay:" + "".join(doubts), UnsafeReplayWarning, stacklevel=2)
        except UnsafeReplayWarning:
            if not refusals:
                raise
    if refusals:
        also = "\nand check before training:" if doubts else ""
        listed = "".join([*refusals, also, *doubts])
        raise UnsafeReplayError(f"replay would silently train the wrong experts ({len(refusals)} refused):{listed}")


def interleaved_stages(config: object, *, pipeline_size: int | None = None) -> int:
    """Return the virtual pipeline size that a config resolves to, 1 when there is no interleaving.

    It can be spelled ``virtual_pipeline_model_parallel_size``, ``num_virtual_stages_per_pipeline_rank``,
    ``num_layers_per_virtual_pipeline_stage`` or ``pipeline_model_parallel_layout`` (a string, a list of lists, or the
    object it is resolved to). None and 0 mean not set. Megatron builds nothing from spellings that disagree; here the
    largest counts, so that a guard errs on the safe side.

    Parameters
    ----------
    config : mapping or object
        As for :func:`inspect_replay_config`.
    pipeline_size : int, optional
        The pipeline-parallel size, where the config does not hold ``pipeline_model_parallel_size``.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for :func:`inspect_replay_config`.

    Notes
    -----
    Keeps no state, so safe to call from any thread.

    Examples
    --------
    >>> interleaved_stages({"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"}, pipeline_size=2)
    2
    """
    return max((spelling.stages for spelling in spellings(Settings(config, pipeline_size))), default=1)


# ---- is replay on? ---------------------------------------------------------------------------------------------------

#: verl's modes. R2 replays the trainer's own earlier forward, through the same routers as R3.
_MODES: Final = {"disabled": False, "r2": True, "r3": True}


def _mode(name: str, value: object) -> bool:
    word = as_word(name, value)
    if word not in _MODES:
        raise ValueError(f"{name} is {value!r}, need disabled, R2 or R3")
    return _MODES[word]


_SWITCHES: Final[dict[str, Callable[[str, object], bool]]] = {
    "moe_enable_routing_replay": as_flag,
    "enable_routing_replay": as_flag,
    "use_routing_replay": as_flag,
    "use_rollout_routing_replay": as_flag,
    "enable_router_replay": as_flag,
    "router_replay.enabled": as_flag,
    "router_replay.mode": _mode,
}


def _replay_switch(settings: Settings) -> bool | None:
    """Return whether any known switch is on, None when the config has none of them."""
    found = [is_on(name, value) for name, is_on in _SWITCHES.items() for value in settings.read_dotted(name)]
    return any(found) if found else None


def _without_a_switch(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Turn the refusals into one warning: a guard that did not see the switch must not look like a pass."""
    refused = [f"{finding.setting} = {_shown(finding.value)}" for finding in findings if finding.verdict == "refuse"]
    why = (
        f"no replay switch was recognised (known: {', '.join(_SWITCHES)}), so nothing is refused; "
        f"were replay on, these would be: {', '.join(refused) or 'none'}"
    )
    unknown = Finding("replay", None, "warn", why, "pass replay=True or replay=False")
    return (unknown, *(finding for finding in findings if finding.verdict == "warn"))


# ---- the rules -------------------------------------------------------------------------------------------------------


class _Offence(NamedTuple):
    """A setting that a rule objects to, with what the config says beyond its value."""

    setting: str
    value: object
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One row of the guard table. ``handled_by`` is the word of ``handles`` that switches it off."""

    find: Callable[[Settings], _Offence | None]
    verdict: Verdict
    why: str
    instead: str
    handled_by: str | None = None


def _when(setting: str, offends: Callable[[str, object], bool]) -> Callable[[Settings], _Offence | None]:
    """Return a finder for a rule that looks at the value of one setting."""

    def find(settings: Settings) -> _Offence | None:
        value = settings.read(setting)
        return _Offence(setting, value) if value is not None and offends(setting, value) else None

    return find


def _is_positive_count(name: str, value: object) -> bool:
    return as_integer(name, value) > 0


def _is_capacity(name: str, value: object) -> bool:
    return not as_number(name, value) < 0  # Megatron resolves a negative factor to None; NaN is refused


def _is_any_bias(name: str, value: object) -> bool:
    # Megatron's main asks `is not None`, so a standard deviation of 0.0 counts
    return value is not False and (value is True or as_number(name, value) is not None)


def _is_noise(name: str, value: object) -> bool:
    return as_number(name, value) != 0


def _has_positive(name: str, value: object) -> bool:
    numbers = [as_number(name, item) for item in as_items(value)]
    return any(number > 0 for number in numbers)


def _interleaved(settings: Settings) -> _Offence | None:
    found = spellings(settings)
    largest = max(found, key=lambda spelling: spelling.stages, default=None)
    if largest is None or largest.stages <= 1:
        return None
    detail = f"virtual pipeline size {largest.stages}"
    if any(spelling.stages != largest.stages for spelling in found):
        said = ", ".join(f"{spelling.setting} says {spelling.stages}" for spelling in found)
        detail += f", the largest of spellings that disagree: {said}"
    return _Offence(largest.setting, largest.value, detail)


def _overlap(settings: Settings) -> _Offence | None:
    setting = "overlap_moe_expert_parallel_comm"
    if not settings.flag(setting):
        return None
    size = settings.pipeline_size_for(setting)
    return _Offence(setting, True, f"pipeline size {size}") if size > 1 else None


def _bypassing_balance(settings: Settings) -> _Offence | None:
    setting = "moe_router_load_balancing_type"
    bypasses = {"sinkhorn", "quantile_balancing"} & settings.words(setting)
    return _Offence(setting, settings.read(setting)) if bypasses else None


#: Scopes with the router in the graph. ``moe_preprocess`` comes with ``moe_router``: Megatron adds or demands it.
_ROUTER_SCOPES: Final = frozenset({"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})
_OTHER_SCOPES: Final = frozenset({"attn", "mlp", "mamba"})


def _cuda_graphs(settings: Settings) -> Iterator[_Offence]:
    """Yield every switch by which CUDA graphs are on, with the scope as the detail."""
    scope = f"cuda_graph_scope = {_shown(settings.read('cuda_graph_scope'))}"
    setting = "cuda_graph_impl"
    if settings.words(setting) - {"none"}:
        yield _Offence(setting, settings.read(setting), scope)
    for setting in ("enable_cuda_graph", "external_cuda_graph"):
        if settings.flag(setting):
            yield _Offence(setting, True, scope)


def _captured_router(settings: Settings) -> _Offence | None:
    scopes = settings.words("cuda_graph_scope")
    return next(_cuda_graphs(settings), None) if not scopes or scopes & _ROUTER_SCOPES else None


def _unknown_scope(settings: Settings) -> _Offence | None:
    setting = "cuda_graph_scope"
    unknown = settings.words(setting) - _ROUTER_SCOPES - _OTHER_SCOPES
    if not unknown or next(_cuda_graphs(settings), None) is None:
        return None
    return _Offence(setting, settings.read(setting), f"not known here: {', '.join(sorted(unknown))}")


_RULES: Final = (
    _Rule(
        _interleaved,
        "refuse",
        "every forward pushes to the queue of every local router, but the backward of a model chunk pops only its own: "
        "recomputation gets another microbatch's routes",
        "no interleaving (virtual size None or 1, as many stages as pipeline ranks)",
        handled_by="interleaved",
    ),
    _Rule(
        _overlap,
        "refuse",
        "across pipeline stages it needs the interleaved schedule, whose backward pops another microbatch's routes",
        "overlap_moe_expert_parallel_comm=False",
        handled_by="interleaved",
    ),
    _Rule(
        _when("moe_router_fusion", as_flag),
        "refuse",
        "the fused top-k returns before replay is asked: replay has no effect",
        "moe_router_fusion=False",
    ),
    _Rule(
        _bypassing_balance,
        "refuse",
        "this routing chooses experts without asking replay",
        "'none', 'aux_loss', 'seq_aux_loss' or 'global_aux_loss'",
    ),
    _Rule(
        _when("num_microbatches_with_partial_activation_checkpoints", _is_positive_count),
        "refuse",
        "microbatches that do not recompute leave their routes in the queue: later ones pop the wrong routes",
        "num_microbatches_with_partial_activation_checkpoints=None",
        handled_by="partial_recompute",
    ),
    _Rule(
        _when("mtp_num_layers", _is_positive_count),
        "refuse",
        "routers of multi-token prediction register for replay too and restart their layer numbers at 1: they take, or "
        "shift, the routes of decoder layers",
        "mtp_num_layers=None",
        handled_by="mtp",
    ),
    _Rule(
        _captured_router,
        "refuse",
        "replay targets are Python attributes, so the graph keeps the routes of its capture for ever",
        "cuda_graph_impl='none', or a cuda_graph_scope without the router, such as ['attn']",
    ),
    _Rule(
        _when("moe_expert_capacity_factor", _is_capacity),
        "refuse",
        "replayed routes over an expert's capacity are dropped after the replay",
        "moe_expert_capacity_factor=None",
    ),
    _Rule(
        _when("moe_pad_expert_input_to_capacity", as_flag),
        "refuse",
        "experts run at a fixed capacity: replayed routes over it are dropped after the replay",
        "moe_pad_expert_input_to_capacity=False",
    ),
    _Rule(
        _when("moe_router_force_load_balancing", as_flag),
        "refuse",
        "the gates come from random logits",
        "moe_router_force_load_balancing=False",
    ),
    _Rule(
        _when("moe_router_force_biased", _is_any_bias),
        "refuse",
        "the gates come from randomly biased logits",
        "moe_router_force_biased=None",
    ),
    _Rule(
        _unknown_scope,
        "warn",
        "a graph that holds the router keeps the routes of its capture for ever",
        "a scope that does not hold the router",
    ),
    _Rule(
        _when("moe_input_jitter_eps", _is_noise),
        "warn",
        "the router's input is multiplied by noise: the expert ids stay, the gates differ",
        "moe_input_jitter_eps=None",
    ),
    _Rule(
        _when("moe_aux_loss_coeff", _has_positive),
        "warn",
        "the auxiliary loss is computed from the live top-k, not from the replayed routes",
        "moe_aux_loss_coeff=0",
    ),
    _Rule(
        _when("moe_router_enable_expert_bias", as_flag),
        "warn",
        "the expert counts behind the bias include padding rows unless they are masked",
        "pass the router padding mask (True = dummy row), or moe_router_enable_expert_bias=False",
    ),
)

_HANDLES: Final = tuple(sorted({rule.handled_by for rule in _RULES if rule.handled_by is not None}))


def _known_handles(handles: Iterable[str]) -> frozenset[str]:
    """Return ``handles`` as a set, once every word in it is known."""
    if isinstance(handles, (str, bytes)) or not isinstance(handles, Iterable):
        raise TypeError(f"handles is {handles!r}, need a collection of words, such as {{'mtp'}}")
    words = list(handles)
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"handles has {word!r}, need words out of {', '.join(_HANDLES)}")
        if word not in _HANDLES:
            raise ValueError(f"handles has {word!r}, need words out of {', '.join(_HANDLES)}")
    return frozenset(words)


def _apply_rules(settings: Settings, handled: frozenset[str]) -> Iterator[Finding]:
    for rule in _RULES:
        offence = None if rule.handled_by in handled else rule.find(settings)
        if offence is not None:
            why = f"{rule.why} ({offence.detail})" if offence.detail else rule.why
            instead = rule.instead
            if rule.handled_by is not None:
                instead += f", or handles={{{rule.handled_by!r}}} for an installer that copes with it"
            yield Finding(offence.setting, offence.value, rule.verdict, why, instead)
