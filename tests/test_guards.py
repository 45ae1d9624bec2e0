"""r3numba.guards: every row of the guard table both ways, every kind of config, and Megatron's own classes beside."""

from __future__ import annotations

import argparse
import doctest
import enum
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from r3numba import _layout_grammar, guards
from r3numba._layout_grammar import count_stages
from r3numba.guards import (
    Finding,
    UnsafeReplayError,
    UnsafeReplayWarning,
    check_replay_config,
    inspect_replay_config,
    interleaved_stages,
)

VIRTUAL = "virtual_pipeline_model_parallel_size"
PER_STAGE = "num_layers_per_virtual_pipeline_stage"
PER_RANK = "num_virtual_stages_per_pipeline_rank"
LAYOUT = "pipeline_model_parallel_layout"
PIPELINE = "pipeline_model_parallel_size"
PARTIAL = "num_microbatches_with_partial_activation_checkpoints"
BALANCE = "moe_router_load_balancing_type"
CAPACITY = "moe_expert_capacity_factor"
OVERLAP = "overlap_moe_expert_parallel_comm"
ON = {"moe_enable_routing_replay": True}


class Scope(enum.Enum):
    """Like Megatron's CudaGraphScope: the name is the word, the value a number."""

    full_iteration = 1
    attn = 2
    moe_router = 5


class Word(str, enum.Enum):
    """An enum whose value is the word."""

    SINKHORN = "sinkhorn"
    R3 = "R3"


def verdicts(config: object, **options: Any) -> list[tuple[str, str]]:
    return [(finding.setting, finding.verdict) for finding in inspect_replay_config(config, **options)]


# ---- the guard table: (config, the setting to be named, the word of `handles` that allows it) ------------------------

REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({VIRTUAL: 2}, VIRTUAL, "interleaved"),
    ({PER_RANK: 4}, PER_RANK, "interleaved"),
    ({PER_STAGE: 1, "num_layers": 8, PIPELINE: 4}, PER_STAGE, "interleaved"),
    ({LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 2}, LAYOUT, "interleaved"),
    ({LAYOUT: [["embedding"], ["decoder"], ["decoder"], ["loss"]], PIPELINE: 2}, LAYOUT, "interleaved"),
    ({LAYOUT: SimpleNamespace(**{VIRTUAL: 3})}, LAYOUT, "interleaved"),
    ({OVERLAP: True, PIPELINE: 2}, OVERLAP, "interleaved"),
    ({"moe_router_fusion": True}, "moe_router_fusion", None),
    ({BALANCE: "sinkhorn"}, BALANCE, None),
    ({BALANCE: "Sinkhorn"}, BALANCE, None),
    ({BALANCE: Word.SINKHORN}, BALANCE, None),
    ({BALANCE: ["aux_loss", "sinkhorn"]}, BALANCE, None),
    ({BALANCE: ("seq_aux_loss", "quantile_balancing")}, BALANCE, None),
    ({BALANCE: "quantile_balancing"}, BALANCE, None),
    ({PARTIAL: 1}, PARTIAL, "partial_recompute"),
    ({"mtp_num_layers": 1}, "mtp_num_layers", "mtp"),
    ({"cuda_graph_impl": "local"}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": None}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ""}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": Scope.full_iteration}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn, moe"}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn, Scope.moe_router]}, "cuda_graph_impl", None),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": {"attn", "moe_preprocess"}}, "cuda_graph_impl", None),
    ({"enable_cuda_graph": True}, "enable_cuda_graph", None),
    ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, "external_cuda_graph", None),
    ({"cuda_graph_impl": "none", "enable_cuda_graph": True}, "enable_cuda_graph", None),
    ({CAPACITY: 1.0}, CAPACITY, None),
    ({CAPACITY: 0.0}, CAPACITY, None),
    ({CAPACITY: 2}, CAPACITY, None),
    ({CAPACITY: float("nan")}, CAPACITY, None),
    ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity", None),
    ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing", None),
    ({"moe_router_force_biased": 0.5}, "moe_router_force_biased", None),
    ({"moe_router_force_biased": 0.0}, "moe_router_force_biased", None),
    ({"moe_router_force_biased": True}, "moe_router_force_biased", None),
]

WARNED: list[tuple[dict[str, Any], str]] = [
    ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps"),
    ({"moe_aux_loss_coeff": 0.001}, "moe_aux_loss_coeff"),
    ({"moe_aux_loss_coeff": [0.0, 1e-3]}, "moe_aux_loss_coeff"),
    ({"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "something_new"]}, "cuda_graph_scope"),
]

ALLOWED: list[dict[str, Any]] = [
    {},
    *({name: size} for name in (VIRTUAL, PER_RANK, PER_STAGE) for size in (None, 0)),
    {VIRTUAL: 1},
    {PER_RANK: 1},
    {PER_STAGE: 2, "num_layers": 8, PIPELINE: 4},
    {LAYOUT: None},
    {LAYOUT: "Ett|ttL", PIPELINE: 2},
    {LAYOUT: [["embedding"], ["loss"]], PIPELINE: 2},
    {LAYOUT: SimpleNamespace(**{VIRTUAL: 1})},
    {OVERLAP: True, PIPELINE: 1},
    {OVERLAP: False},
    {"moe_router_fusion": False},
    {BALANCE: "none"},
    {BALANCE: ["aux_loss", "global_aux_loss"]},
    {PARTIAL: None},
    {PARTIAL: 0},
    {"mtp_num_layers": None},
    {"mtp_num_layers": 0},
    {"cuda_graph_impl": "none"},
    {"cuda_graph_impl": "none", "cuda_graph_scope": "full", "enable_cuda_graph": False, "external_cuda_graph": False},
    {"cuda_graph_impl": None, "cuda_graph_scope": "moe"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [Scope.attn]},
    {"enable_cuda_graph": True, "cuda_graph_scope": ["attn", "mlp", "mamba"]},
    {"cuda_graph_impl": "none", "cuda_graph_scope": "something_new"},
    {CAPACITY: None},
    {CAPACITY: -1},
    {CAPACITY: -1.0},
    {"moe_pad_expert_input_to_capacity": False},
    {"moe_router_force_load_balancing": False},
    {"moe_router_force_biased": None},
    {"moe_router_force_biased": False},
    {"moe_input_jitter_eps": None},
    {"moe_input_jitter_eps": 0.0},
    {"moe_aux_loss_coeff": 0},
    {"moe_aux_loss_coeff": [0.0, 0.0]},
    {"moe_router_enable_expert_bias": False},
]


@pytest.mark.parametrize(("config", "setting", "handle"), REFUSED)
def test_refused_setting(config: dict[str, Any], setting: str, handle: str | None) -> None:
    (finding,) = inspect_replay_config(ON | config)
    assert (finding.setting, finding.verdict) == (setting, "refuse")
    assert finding.value is config[setting]
    with pytest.raises(UnsafeReplayError) as caught:
        check_replay_config(ON | config)
    for part in (f"{setting} = ", finding.why, finding.instead):
        assert part in str(caught.value)

    others = {"interleaved", "mtp", "partial_recompute"} - {handle}
    assert verdicts(ON | config, handles=others) == [(setting, "refuse")]
    if handle is not None:
        assert f"handles={{'{handle}'}}" in finding.instead
        assert verdicts(ON | config, handles={handle}) == []
        check_replay_config(ON | config, handles=[handle])


@pytest.mark.parametrize(("config", "setting"), WARNED)
def test_warned_setting(config: dict[str, Any], setting: str) -> None:
    (finding,) = inspect_replay_config(ON | config)
    assert (finding.setting, finding.verdict, finding.value) == (setting, "warn", config[setting])
    with pytest.warns(UnsafeReplayWarning, match=re.escape(f"{setting} = ")) as caught:
        check_replay_config(ON | config)
    assert finding.why in str(caught[0].message)
    assert finding.instead in str(caught[0].message)


@pytest.mark.parametrize("config", ALLOWED)
def test_allowed_setting(config: dict[str, Any]) -> None:
    assert inspect_replay_config(ON | config) == ()
    check_replay_config(ON | config)


@pytest.mark.parametrize("config", [*(row[0] for row in REFUSED), *(row[0] for row in WARNED), {VIRTUAL: "two"}])
def test_replay_off_refuses_nothing(config: dict[str, Any]) -> None:
    assert inspect_replay_config(config, replay=False) == ()
    assert inspect_replay_config(ON | config, replay=False) == ()
    assert inspect_replay_config({"moe_enable_routing_replay": False, **config}) == ()
    check_replay_config(config, replay=False)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        *(
            ({name: value}, TypeError)
            for name in (VIRTUAL, PER_RANK, PER_STAGE)
            for value in (True, "2", 2.0, 1.0, [2])
        ),
        *(({name: -1}, ValueError) for name in (VIRTUAL, PER_RANK, PER_STAGE, "mtp_num_layers", PARTIAL)),
        ({LAYOUT: SimpleNamespace(**{VIRTUAL: "2"})}, TypeError),
        ({LAYOUT: SimpleNamespace(**{VIRTUAL: -1})}, ValueError),
        ({LAYOUT: object()}, TypeError),
        ({LAYOUT: 4}, TypeError),
        ({PIPELINE: 2, LAYOUT: ["embedding", "loss"]}, TypeError),
        ({PIPELINE: 2, LAYOUT: [["embedding"], None]}, TypeError),
        ({PIPELINE: 2, LAYOUT: []}, ValueError),
        ({"mtp_num_layers": "1"}, TypeError),
        ({"mtp_num_layers": True}, TypeError),
        ({PARTIAL: 1.0}, TypeError),
        *(({name: value}, TypeError) for name in ("moe_router_fusion", OVERLAP) for value in ("false", 1, 0, 1.0)),
        ({"enable_cuda_graph": "false"}, TypeError),
        ({"cuda_graph_impl": False}, TypeError),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": 5}, TypeError),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [5]}, TypeError),
        ({BALANCE: 3}, TypeError),
        ({CAPACITY: "1.0"}, TypeError),
        ({CAPACITY: True}, TypeError),
        ({"moe_router_force_biased": "0.5"}, TypeError),
        ({"moe_input_jitter_eps": "0.1"}, TypeError),
        ({"moe_aux_loss_coeff": "0.0"}, TypeError),
        ({"moe_aux_loss_coeff": [0.1, "0.0"]}, TypeError),
        ({"moe_router_enable_expert_bias": "no"}, TypeError),
        ({PIPELINE: True}, TypeError),
        ({PIPELINE: "2"}, TypeError),
        ({PIPELINE: 0}, ValueError),
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_names_it(config: dict[str, Any], error: type[Exception]) -> None:
    *_, offender = config
    with pytest.raises(error, match=f"{offender}.* is |{offender} has ") as caught:
        inspect_replay_config(ON | config)
    assert type(caught.value) is error


# ---- is replay on? ---------------------------------------------------------------------------------------------------

FLAGS = (
    "moe_enable_routing_replay",
    "enable_routing_replay",
    "use_routing_replay",
    "use_rollout_routing_replay",
    "enable_router_replay",
)
SWITCHED: list[tuple[dict[str, Any], bool]] = [
    *(({name: on}, on) for name in (*FLAGS, "router_replay.enabled") for on in (True, False)),
    *(({"router_replay": {"enabled": on}}, on) for on in (True, False)),
    *(({"router_replay": SimpleNamespace(enabled=on)}, on) for on in (True, False)),
    *(({"router_replay.mode": mode}, True) for mode in ("R2", "R3", "r2", "r3", " R3 ", Word.R3)),
    *(({"router_replay.mode": mode}, False) for mode in ("disabled", "DISABLED")),
    *(({"router_replay": {"mode": mode}}, mode != "disabled") for mode in ("R2", "R3", "disabled")),
    *(({"router_replay": SimpleNamespace(mode=mode)}, mode != "disabled") for mode in ("R2", "R3", "disabled")),
    ({"router_replay": {"enabled": False, "mode": "R3"}}, True),
    ({"router_replay": {"enabled": True, "mode": "disabled"}}, True),
    ({"router_replay.mode": "disabled", "router_replay": {"mode": "R3"}}, True),
    ({"router_replay.mode": "R3", "router_replay": {"mode": "disabled"}}, True),
    ({"moe_enable_routing_replay": False, "use_rollout_routing_replay": True}, True),
    ({"moe_enable_routing_replay": False, "use_rollout_routing_replay": False}, False),
    ({"moe_enable_routing_replay": None, "enable_router_replay": False}, False),
]


@pytest.mark.parametrize("kind", [dict, MappingProxyType, lambda config: SimpleNamespace(**config)])
@pytest.mark.parametrize(("switch", "on"), SWITCHED)
def test_switch(switch: dict[str, Any], on: bool, kind: Any) -> None:
    config = kind(switch | {VIRTUAL: 2})
    assert verdicts(config) == ([(VIRTUAL, "refuse")] if on else [])
    assert verdicts(config, replay=True) == [(VIRTUAL, "refuse")]
    assert verdicts(config, replay=False) == []


@pytest.mark.parametrize(
    "switch",
    [{}, {"router_replay": None}, {"router_replay": {}}, {"router_replay": {"mode": None}}, {"router_replay": "R3"}]
    + [{name: None} for name in FLAGS]
    + [{name: "???"} for name in FLAGS],
)
def test_no_known_switch_is_a_warning_that_lists_what_would_be_refused(switch: dict[str, Any]) -> None:
    config = switch | {"moe_router_fusion": True, VIRTUAL: 4, "moe_aux_loss_coeff": 0.1}
    unknown, doubt = inspect_replay_config(config)
    assert (unknown.setting, unknown.value, unknown.verdict) == ("replay", None, "warn")
    assert f"{VIRTUAL} = 4, moe_router_fusion = True" in unknown.why
    assert "replay=True" in unknown.instead
    for name in (*FLAGS, "router_replay.enabled", "router_replay.mode"):
        assert name in unknown.why
    assert (doubt.setting, doubt.verdict) == ("moe_aux_loss_coeff", "warn")
    with pytest.warns(UnsafeReplayWarning, match="no replay switch was recognised") as caught:
        check_replay_config(config)
    assert len(caught) == 1


def test_no_known_switch_and_nothing_wrong_still_warns() -> None:
    (unknown,) = inspect_replay_config({})
    assert (unknown.setting, unknown.verdict) == ("replay", "warn")
    assert unknown.why.endswith("these would be: none")


@pytest.mark.parametrize("name", [*FLAGS, "router_replay.enabled"])
@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, 1.0, [True], np.bool_(True)])
def test_a_switch_that_is_no_bool_is_never_read_as_one(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=re.escape(name)):
        inspect_replay_config({name: value})


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("R4", ValueError),
        ("none", ValueError),
        ("off", ValueError),
        ("", ValueError),
        (True, TypeError),
        (3, TypeError),
    ],
)
def test_an_unknown_mode_is_an_error(mode: object, error: type[Exception]) -> None:
    for config in ({"router_replay.mode": mode}, {"router_replay": {"mode": mode}}):
        with pytest.raises(error, match=re.escape(f"router_replay.mode is {mode!r}")):
            inspect_replay_config(config)


@pytest.mark.parametrize("replay", ["R3", 1, 0])
def test_replay_that_is_no_bool(replay: Any) -> None:
    with pytest.raises(TypeError, match="replay is "):
        inspect_replay_config({}, replay=replay)


# ---- handles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handles", ["mtp", "interleaved", "", b"mtp", None, 3, [3], {"mtp", None}])
def test_handles_of_a_wrong_type(handles: Any) -> None:
    for call in (inspect_replay_config, check_replay_config):
        with pytest.raises(TypeError, match="handles"):
            call({}, replay=False, handles=handles)


@pytest.mark.parametrize("handles", [frozenset("mtp"), ["mtp", "pipeline"], ["MTP"], {""}])
def test_handles_with_an_unknown_word_names_the_known_ones(handles: Any) -> None:
    with pytest.raises(ValueError, match="interleaved, mtp, partial_recompute"):
        inspect_replay_config({}, replay=False, handles=handles)


# ---- the virtual pipeline size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        ({}, 1),
        ({VIRTUAL: None}, 1),
        ({VIRTUAL: 0}, 1),
        ({VIRTUAL: 1}, 1),
        ({VIRTUAL: 7}, 7),
        ({VIRTUAL: np.int64(3)}, 3),
        ({PER_RANK: 2}, 2),
        ({PER_STAGE: 0}, 1),
        ({PER_STAGE: 2, "num_layers": 16, PIPELINE: 4}, 2),
        ({PER_STAGE: 2, "decoder_num_layers": 16, "num_layers": None, PIPELINE: 4}, 2),
        ({PER_STAGE: 2, "num_layers": 15, PIPELINE: 4, "account_for_embedding_in_pipeline_split": True}, 2),
        ({PER_STAGE: 2, "num_layers": 15, PIPELINE: 4, "account_for_loss_in_pipeline_split": True}, 2),
        (
            {
                PER_STAGE: 4,
                "num_layers": 14,
                PIPELINE: 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            2,
        ),
        ({LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 2}, 2),
        ({LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 4}, 1),
        ({LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 1}, 4),
        ({LAYOUT: [["embedding"]] + [["decoder"]] * 6 + [("loss",)], PIPELINE: 2}, 4),
        ({LAYOUT: SimpleNamespace(**{VIRTUAL: 5})}, 5),
        ({LAYOUT: SimpleNamespace(**{VIRTUAL: 5}), VIRTUAL: 5}, 5),
        ({VIRTUAL: 1, LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 2}, 2),
        ({VIRTUAL: 4, LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 2, PER_RANK: 3}, 4),
    ],
)
def test_interleaved_stages(config: dict[str, Any], stages: int) -> None:
    assert interleaved_stages(config) == stages
    assert interleaved_stages(SimpleNamespace(**config)) == stages
    size = config.pop(PIPELINE, None)
    assert interleaved_stages(config, pipeline_size=size) == stages


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({LAYOUT: "Ett|ttL"}, f"{LAYOUT} needs the pipeline size.*pass pipeline_size="),
        ({LAYOUT: [["embedding"], ["loss"]]}, f"{LAYOUT} needs the pipeline size"),
        ({PER_STAGE: 2, "num_layers": 8}, f"{PER_STAGE} needs the pipeline size"),
        ({PER_STAGE: 2, PIPELINE: 2}, f"{PER_STAGE} needs the number of layers.*num_layers"),
        ({PER_STAGE: 3, PIPELINE: 2, "num_layers": 8}, r"3 x 2.*the 8 layers"),
        ({PER_STAGE: 2, PIPELINE: 2, "num_layers": 8, "account_for_loss_in_pipeline_split": True}, "the 9 layers"),
        ({PER_STAGE: 2, PIPELINE: 2, "num_layers": 8, "num_layers_in_first_pipeline_stage": 2}, "num_layers_in_first"),
        ({PER_STAGE: 2, PIPELINE: 2, "num_layers": 8, "decoder_last_pipeline_num_layers": 2}, PER_RANK),
        ({LAYOUT: "Ett|tt|ttL", PIPELINE: 2}, "has 3 stages, need a multiple of the pipeline size 2"),
        ({LAYOUT: [["embedding"], ["decoder"], ["loss"]], PIPELINE: 2}, "has 3 stages"),
    ],
)
def test_a_size_that_cannot_be_resolved(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interleaved_stages(config)
    with pytest.raises(ValueError, match=message):
        inspect_replay_config(config, replay=True)


def test_overlap_asks_for_the_pipeline_size_unless_it_is_handled() -> None:
    with pytest.raises(ValueError, match=f"{OVERLAP} needs the pipeline size"):
        inspect_replay_config({OVERLAP: True}, replay=True)
    assert verdicts({OVERLAP: True}, replay=True, pipeline_size=2) == [(OVERLAP, "refuse")]
    assert verdicts({OVERLAP: True}, replay=True, handles={"interleaved"}) == []


@pytest.mark.parametrize("call", [interleaved_stages, lambda *a, **k: inspect_replay_config(*a, replay=True, **k)])
def test_pipeline_size_argument(call: Any) -> None:
    for wrong in (True, "2", 2.0):
        with pytest.raises(TypeError, match="pipeline_size is "):
            call({}, pipeline_size=wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="pipeline_size is "):
            call({}, pipeline_size=wrong)
    call({PIPELINE: 4}, pipeline_size=4)
    with pytest.raises(ValueError, match=f"pipeline_size is 2 and the config's {PIPELINE} is 4"):
        call({PIPELINE: 4}, pipeline_size=2)


def test_spellings_that_disagree_are_refused_by_the_largest() -> None:
    (finding,) = inspect_replay_config(ON | {VIRTUAL: 1, LAYOUT: "Ett|tt|tt|ttL", PIPELINE: 2})
    assert (finding.setting, finding.value, finding.verdict) == (LAYOUT, "Ett|tt|tt|ttL", "refuse")
    assert f"{VIRTUAL} says 1, {LAYOUT} says 2" in finding.why


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Ett|tt|tt|ttL", 4),
        ("Ettt|(tt|)*29,m|L", 32),
        ("Et*3|t*2L", 2),
        ("E,t*3|(tt|)*2t*2,m,L", 4),
        ("E|(|tt)*3|L", 6),
        ("E|*3L", 4),
        ("E(t|)*0L", 1),
        ("Et*1,0|L", 2),
        ("E(t*2|)*3L", 4),
        ("EttL", 1),
        ("(tt)*2*3", 1),
    ],
)
def test_layout_text(text: str, stages: int) -> None:
    assert count_stages(LAYOUT, text) == stages


@pytest.mark.parametrize(
    ("text", "character", "position"),
    [
        ("Ett|xt", "x", 4),
        ("Ett|tt |ttL", " ", 6),
        ("ett|ttL", "e", 0),
        ("E,t,(tt|)*3,?", "?", 12),
        ("(tt|)", "(", 0),
        ("E(t(t|)*2)*3", "(", 3),
        ("Et)*2|L", ")", 2),
        ("E()*2", "(", 1),
        ("Et*|L", "*", 2),
        ("*2t", "*", 0),
        ("t*2*3", "*", 3),
        ("E2|L", "2", 1),
        ("[['E'],['L']]", "[", 0),
    ],
)
def test_malformed_layout_text_names_text_and_position(text: str, character: str, position: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{LAYOUT} {text!r} has {character!r} at position {position}")):
        interleaved_stages({LAYOUT: text}, pipeline_size=1)


@pytest.mark.parametrize("text", ["Et*99999999999|L", "E(t|)*500001L", "E(t*1000)*1001L"])
def test_a_mistyped_repeat_count_does_not_eat_the_memory(text: str) -> None:
    with pytest.raises(ValueError, match="need at most 1000000"):
        count_stages(LAYOUT, text)


# ---- kinds of config -------------------------------------------------------------------------------------------------

TYPICAL = {
    "use_rollout_routing_replay": True,
    "num_layers": 8,
    PIPELINE: 2,
    PER_STAGE: 2,
    BALANCE: ["aux_loss"],
    "moe_aux_loss_coeff": [0.0],
    "mtp_num_layers": 1,
    CAPACITY: None,
}
TYPICAL_VERDICTS = [(PER_STAGE, "refuse"), ("mtp_num_layers", "refuse")]


class Slotted:
    """Attributes in slots, some of them never assigned."""

    __slots__ = (*TYPICAL, "moe_router_fusion")


def slotted(config: dict[str, Any]) -> Slotted:
    instance = Slotted()
    for name, value in config.items():
        setattr(instance, name, value)
    return instance


class Forwarding:
    """Attributes that only exist through __getattr__."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.inner = config

    def __getattr__(self, name: str) -> Any:
        try:
            return self.inner[name]
        except KeyError:
            raise AttributeError(name) from None


class Lazy(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.inner = config

    def __getitem__(self, name: str) -> Any:
        return self.inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        MappingProxyType,
        Lazy,
        lambda config: defaultdict(lambda: "never", config),
        lambda config: SimpleNamespace(**config),
        lambda config: argparse.Namespace(**config),
        slotted,
        Forwarding,
    ],
    ids=["dict", "proxy", "Mapping", "defaultdict", "SimpleNamespace", "Namespace", "slots", "getattr"],
)
def test_kinds_of_config(kind: Any) -> None:
    config = kind(TYPICAL)
    assert verdicts(config) == TYPICAL_VERDICTS
    assert verdicts(config, handles={"mtp", "interleaved"}) == []
    assert interleaved_stages(config) == 2
    if isinstance(config, defaultdict):
        assert dict(config) == TYPICAL  # only read


def test_bridge_provider_that_is_not_resolved_yet() -> None:
    @dataclass
    class Provider:
        moe_enable_routing_replay: bool = True
        pipeline_model_parallel_size: int = 2
        pipeline_model_parallel_layout: str | None = "Et|t|t|tL"
        virtual_pipeline_model_parallel_size: int | None = None
        mtp_num_layers: int | None = None

    assert verdicts(Provider()) == [(LAYOUT, "refuse")]
    assert verdicts(Provider(pipeline_model_parallel_layout=None)) == []


@pytest.mark.parametrize("config", [None, "config.yaml", b"x", 3, 1.0, True, [1], (), {1}, SimpleNamespace])
def test_a_config_that_can_hold_no_settings(config: object) -> None:
    for call in (inspect_replay_config, check_replay_config, interleaved_stages):
        with pytest.raises(TypeError, match=r"config is .*need a mapping or an object"):
            call(config)


def test_a_property_that_raises() -> None:
    class Config:
        moe_enable_routing_replay = True

        @property
        def moe_router_fusion(self) -> bool:
            raise AttributeError("absent")

        @property
        def mtp_num_layers(self) -> int:
            raise ZeroDivisionError("inside")

    with pytest.raises(RuntimeError, match=r"reading mtp_num_layers .*ZeroDivisionError") as caught:
        inspect_replay_config(Config())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert verdicts(Config(), handles={"mtp"}) == []


@pytest.mark.parametrize("struct", [False, True])
def test_omegaconf(struct: bool) -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="needs omegaconf")
    create = omegaconf.OmegaConf.create

    def node(config: dict[str, Any]) -> Any:
        made = create(config)
        omegaconf.OmegaConf.set_struct(made, struct)
        return made

    assert verdicts(node(TYPICAL)) == TYPICAL_VERDICTS
    assert verdicts(node({"router_replay": {"mode": "R3"}, VIRTUAL: "${stages}", "stages": 2})) == [(VIRTUAL, "refuse")]
    assert verdicts(node({"router_replay": {"mode": "disabled"}, VIRTUAL: 2})) == []
    assert verdicts(node({"router_replay": "???", VIRTUAL: 2})) == [("replay", "warn")]
    assert verdicts(node({"enable_router_replay": "???", VIRTUAL: 2})) == [("replay", "warn")]
    assert verdicts(node({"enable_router_replay": True, VIRTUAL: "???", CAPACITY: None})) == []
    rows = [["embedding"], ["decoder"], ["decoder"], ["loss"]]
    assert verdicts(node({**ON, LAYOUT: rows, PIPELINE: 2})) == [(LAYOUT, "refuse")]
    assert verdicts(node({**ON, BALANCE: ["aux_loss", "sinkhorn"]})) == [(BALANCE, "refuse")]
    assert verdicts(node({**ON, "moe_aux_loss_coeff": [0.0, 0.1]})) == [("moe_aux_loss_coeff", "warn")]
    assert verdicts(node({**ON, "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]})) == []
    with pytest.raises(TypeError, match=VIRTUAL):
        inspect_replay_config(node({**ON, VIRTUAL: "2"}))
    with pytest.raises(RuntimeError, match=f"reading {VIRTUAL} .*nowhere"):
        inspect_replay_config(node({**ON, VIRTUAL: "${nowhere}"}))
    assert omegaconf.OmegaConf.is_missing(node({"a": "???"}), "a")
    plain = omegaconf.OmegaConf.to_container(node({"enable_router_replay": True, VIRTUAL: "???"}))
    assert verdicts(plain) == []


# ---- errors, warnings and findings -----------------------------------------------------------------------------------

BOTH = {**ON, VIRTUAL: 2, "moe_router_fusion": True, "moe_aux_loss_coeff": 0.1, "moe_input_jitter_eps": 0.1}


def test_one_error_holds_every_refusal_and_one_warning_every_doubt() -> None:
    with pytest.warns(UnsafeReplayWarning) as caught, pytest.raises(UnsafeReplayError) as error:
        check_replay_config(BOTH)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for name in ("moe_aux_loss_coeff = 0.1", "moe_input_jitter_eps = 0.1"):
        assert name in str(caught[0].message)
        assert name in str(error.value)
    for name in (f"{VIRTUAL} = 2", "moe_router_fusion = True", "2 refused"):
        assert name in str(error.value)
        assert name not in str(caught[0].message)


def test_warnings_as_errors_never_mask_a_refusal() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            UnsafeReplayError, match=r"(?s)moe_router_fusion = True.*moe_aux_loss_coeff = 0.1"
        ) as caught:
            check_replay_config(BOTH)
        assert caught.value.__context__ is None
        with pytest.raises(UnsafeReplayWarning, match="moe_aux_loss_coeff"):
            check_replay_config(ON | {"moe_aux_loss_coeff": 0.1})


def test_exceptions_survive_pickling() -> None:
    assert issubclass(UnsafeReplayError, ValueError)
    assert issubclass(UnsafeReplayWarning, UserWarning)
    with pytest.raises(UnsafeReplayError) as caught:
        check_replay_config(ON | {VIRTUAL: 2})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (UnsafeReplayError, str(caught.value))


def test_finding_is_a_frozen_slotted_record() -> None:
    finding = Finding("setting", 1, "warn", "why", "instead")
    assert not hasattr(finding, "__dict__")
    with pytest.raises(FrozenInstanceError):
        finding.value = 2  # type: ignore[misc]  # that is the test
    assert pickle.loads(pickle.dumps(finding)) == finding
    assert str(finding) == "setting = 1: why. Instead: instead."
    assert len(str(Finding("layout", ["decoder"] * 1000, "refuse", "", ""))) < 200


@pytest.mark.parametrize("module", [guards, _layout_grammar])
def test_docstring_examples(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_import_pulls_in_the_standard_library_alone() -> None:
    code = (
        "import sys, r3numba.guards; "
        "print([name for name in ('numpy', 'numba', 'torch', 'megatron', 'omegaconf') if name in sys.modules])"
    )
    root = str(Path(guards.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


# ---- CASES.md --------------------------------------------------------------------------------------------------------


def test_case_7_virtual_pipeline_size_1_with_replay_on() -> None:
    check_replay_config({VIRTUAL: 1}, replay=True)


def test_case_8_layout_that_resolves_to_a_virtual_size_of_2() -> None:
    with pytest.raises(UnsafeReplayError, match="virtual pipeline size 2"):
        check_replay_config({LAYOUT: "Ett|tt|tt|ttL"}, replay=True, pipeline_size=2)


def test_case_32_layout_with_a_repeated_group() -> None:
    config = {LAYOUT: "Ettt|(tt|)*29,m|L", PIPELINE: 8}
    assert interleaved_stages(config) == 4
    with pytest.raises(UnsafeReplayError, match="virtual pipeline size 4"):
        check_replay_config(config, replay=True)


def test_case_33_mode_of_verl() -> None:
    with pytest.raises(UnsafeReplayError, match=f"{VIRTUAL} = 2"):
        check_replay_config({"router_replay": {"mode": "R3"}, VIRTUAL: 2})
    check_replay_config({"router_replay": {"mode": "disabled"}, VIRTUAL: 2})


def test_case_34_no_known_switch() -> None:
    assert verdicts({VIRTUAL: 4}) == [("replay", "warn")]
    with pytest.warns(UnsafeReplayWarning, match=f"no replay switch was recognised.*{VIRTUAL} = 4"):
        check_replay_config({VIRTUAL: 4})


def test_case_35_capacity_factor_that_is_not_resolved() -> None:
    check_replay_config({CAPACITY: -1}, replay=True)


# ---- Megatron's own classes ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of optional packages while it is imported
        reason = "needs megatron-core"
        transformer = pytest.importorskip("megatron.core.transformer", reason=reason, exc_type=ImportError)
        layouts = pytest.importorskip(
            "megatron.core.transformer.pipeline_parallel_layer_layout", reason=reason, exc_type=ImportError
        )
    return SimpleNamespace(config=transformer.TransformerConfig, layout=layouts.PipelineParallelLayerLayout)


def real_config(megatron: SimpleNamespace, **options: Any) -> Any:
    """Build a resolved TransformerConfig of a small mixture-of-experts model, on CPU."""
    defaults: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 64,
        "add_bias_linear": False,
        "pipeline_dtype": "bf16",
        "moe_enable_routing_replay": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of its own fields
        return megatron.config(**(defaults | options))


def test_megatron_config_at_its_defaults(megatron: SimpleNamespace) -> None:
    config = real_config(megatron)
    assert verdicts(config) == []
    assert interleaved_stages(config) == 1
    off = real_config(megatron, moe_enable_routing_replay=False, moe_router_load_balancing_type="sinkhorn")
    assert verdicts(off) == []  # a switch that is off is recognised: no warning
    assert verdicts(off, replay=True) == [(BALANCE, "refuse")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({PIPELINE: 2, VIRTUAL: 2}, [(VIRTUAL, "refuse")]),
        ({PIPELINE: 2, VIRTUAL: 1}, []),
        ({BALANCE: "sinkhorn"}, [(BALANCE, "refuse")]),
        ({BALANCE: ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]}, [("moe_aux_loss_coeff", "warn")]),
        ({CAPACITY: -1.0}, []),
        ({CAPACITY: 1.0}, [(CAPACITY, "refuse")]),
        (
            {CAPACITY: 1.0, "moe_pad_expert_input_to_capacity": True},
            [(CAPACITY, "refuse"), ("moe_pad_expert_input_to_capacity", "refuse")],
        ),
        ({"mtp_num_layers": 1}, [("mtp_num_layers", "refuse")]),
        ({PARTIAL: 1}, [(PARTIAL, "refuse")]),
        ({"moe_router_fusion": True}, [("moe_router_fusion", "refuse")]),
        ({"moe_router_force_load_balancing": True}, [("moe_router_force_load_balancing", "refuse")]),
        ({"moe_input_jitter_eps": 0.1}, [("moe_input_jitter_eps", "warn")]),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
            [("moe_router_enable_expert_bias", "warn")],
        ),
        ({"cuda_graph_impl": "local"}, [("cuda_graph_impl", "refuse")]),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}, []),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "moe_router"]}, [("cuda_graph_impl", "refuse")]),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, [("cuda_graph_impl", "refuse")]),
        ({"enable_cuda_graph": True}, [("cuda_graph_impl", "refuse")]),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn"}, []),
    ],
)
def test_megatron_config(megatron: SimpleNamespace, options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert verdicts(real_config(megatron, **options)) == expected


LAYOUTS = [
    ("Ett|tt|tt|ttL", 2, 2),
    ("Ett|tt|tt|ttL", 4, 1),
    ("Et*2|(tt|)*2t*2L", 4, 1),
    ("Et*2|(tt|)*2t*2L", 2, 2),
    ("E|(t|)*8,L", 5, 2),
    ([["embedding", "decoder"], *([["decoder"] * 3] * 2), ["decoder", "loss"]], 2, 2),
    ([["embedding", *(["decoder"] * 4)], [*(["decoder"] * 4), "loss"]], 2, 1),
]


@pytest.mark.parametrize(("layout", "size", "stages"), LAYOUTS)
def test_layout_that_megatron_has_resolved(megatron: SimpleNamespace, layout: Any, size: int, stages: int) -> None:
    assert interleaved_stages({LAYOUT: layout, PIPELINE: size}) == stages
    config = real_config(megatron, **{LAYOUT: layout, PIPELINE: size})
    assert isinstance(config.pipeline_model_parallel_layout, megatron.layout)
    assert interleaved_stages(config) == stages
    assert interleaved_stages({LAYOUT: config.pipeline_model_parallel_layout}) == stages
    assert verdicts(config) == ([(VIRTUAL, "refuse")] if stages > 1 else [])
    assert verdicts({**ON, LAYOUT: config.pipeline_model_parallel_layout}) == (
        [(LAYOUT, "refuse")] if stages > 1 else []
    )


def of_megatron(megatron: SimpleNamespace, text: str) -> int | None:
    """Return the stages that Megatron's own parser counts, None where it refuses the text."""
    try:
        return int(megatron.layout.get_num_stages_from_str(text))
    except AssertionError:
        return None


def of_ours(text: str) -> int | None:
    try:
        return count_stages(LAYOUT, text)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "text",
    [
        *(layout for layout, _, _ in LAYOUTS if isinstance(layout, str)),
        "Ettt|(tt|)*29,m|L",
        "E|*3L",
        "E(t|)*0L",
        "Et*1,0|L",
        "(tt)*2*3",
        "t(*2t|)*2",
        "(*0t",
        "t)*0",
        "((t|)*0)*0",
        "((t|)*2)*3",
        "(t|)",
        "()*2",
        "t**2",
        "t*2*3",
        "",
        "|",
        "x*0t",
        "Ett tt",
    ],
)
def test_parser_agrees_with_megatron(megatron: SimpleNamespace, text: str) -> None:
    assert of_ours(text) == of_megatron(megatron, text)


def no_long_number(text: str) -> bool:
    """Keep Megatron's own parser from unrolling more than the limit of ours."""
    return re.search(r"\d{4}", text.replace(",", "")) is None


well_formed = st.lists(
    st.one_of(
        st.text("Etm|L,", max_size=6),
        st.builds("{}*{}".format, st.sampled_from("Etm|L"), st.integers(0, 12)),
        st.builds("({})*{},".format, st.text("tm|,", min_size=1, max_size=5), st.integers(0, 30)),
        st.builds("(t*{}|)*{}|".format, st.integers(1, 4), st.integers(1, 30)),
    ),
    max_size=6,
).map("".join)


@settings(max_examples=examples(300), deadline=None)
@given(text=well_formed)
def test_parser_agrees_with_megatron_on_random_layouts(megatron: SimpleNamespace, text: str) -> None:
    expected = of_megatron(megatron, text)
    assert of_ours(text) == expected


@settings(max_examples=examples(500), deadline=None)
@given(text=st.text("Etm|L(),**0123x", max_size=16).filter(no_long_number))
def test_parser_agrees_with_megatron_on_random_nonsense(megatron: SimpleNamespace, text: str) -> None:
    assert of_ours(text) == of_megatron(megatron, text)
