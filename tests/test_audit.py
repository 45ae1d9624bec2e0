"""The audit against a naive oracle on every path, and the captures that went wrong elsewhere."""

from __future__ import annotations

import numpy as np
import paths
import pytest
from audit_model import check, draw, found, legal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import examples

from r3numba import audit_routes, collate_routes, compare_routes
from r3numba.audit import CorruptRoutesError


@pytest.fixture(autouse=True)
def three_cpus(monkeypatch):
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 3)


@settings(
    max_examples=examples(120 if paths.jit_runs() else 25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(0, 2**63), st.sampled_from([1, 64, 1024]), st.sampled_from([1, 256, 2048, 256 << 10]),
    st.sampled_from([None, np.int32]),
)  # fmt: skip
def test_any_capture(seed, align, block, dtype):
    routes, num_experts, moe, missing = draw(np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("r3numba.audit.AUDIT_BLOCK_BYTES", block)
        check(routes, num_experts, moe, missing, dtype, piece_align=align)


@pytest.mark.parametrize("experts", [100, 128, 129, 200, 256])
def test_every_pair_and_every_limit_of_eight_bytes(experts):
    """The word test finds each of the 28 pairs, at both ends of each limit, and passes everything legal."""
    rng = np.random.default_rng(1)
    routes = legal(rng, 400, 3, 8, experts)
    assert audit_routes(routes, num_experts=experts).findings == ()
    for a in range(8):
        for b in range(a):
            bad = routes.copy()
            bad[77, 1, a] = bad[77, 1, b]
            assert [f.kind for f in audit_routes(bad, num_experts=experts).findings] == ["duplicate"], (a, b)
        if experts < 256:
            for value in (experts, 255):
                bad = routes.copy()
                bad[5, 2, a] = value
                finding = audit_routes(bad, num_experts=experts).findings[0]
                assert (finding.kind, finding.count, finding.token, finding.layer) == ("out_of_range", 1, 5, 2)


def test_case_16_a_capture_of_zeros():
    audit = check([np.zeros((40, 3, 8), np.uint8)], 64)
    assert (audit.count("zero_row"), audit.count("zero_layer"), audit.count("duplicate")) == (40, 3, 0)
    with pytest.raises(CorruptRoutesError, match=r"routes\[0\]: 40 tokens with zeros in every layer, first at token 0"):
        audit.raise_if_bad()


def test_case_17_zero_prompt_rows():
    rng = np.random.default_rng(2)
    routes = [legal(rng, 50, 4, 8, 64) for _ in range(2)]
    routes[1][:17] = 0
    audit = check(routes, 64)
    assert found(audit, 1)["zero_row"] == (17, 0, -1, 0)
    assert found(audit, 0) == {}


def test_case_18_a_repeated_row():
    rng = np.random.default_rng(3)
    routes = legal(rng, 200, 4, 8, 64)
    routes[70:137] = routes[70]
    audit = check([None, routes], 64)
    assert found(audit, 1) == {"repeated_row": (1, 70, -1, 67)}


def test_a_missing_row_ends_a_run_and_its_ids_count_for_nothing():
    rng = np.random.default_rng(3)
    for gone, expected in (
        ([0], {"repeated_row": (1, 1, -1, 99)}),
        ([99], {"repeated_row": (1, 0, -1, 99)}),
        ([50], {"repeated_row": (2, 0, -1, 50)}),
        ([31, 63, 95], {}),
        (range(1, 100), {}),
    ):
        mask = np.zeros(100, bool)
        mask[list(gone)] = True
        routes = np.repeat(legal(rng, 1, 9, 8, 64), 100, axis=0)
        for rows_of in (routes[0], 0, 255):  # what a missing row holds
            routes[mask] = rows_of
            assert found(check([routes], 64, missing=[mask]), 0) == expected


def test_dense_layers_are_zero_by_design():
    rng = np.random.default_rng(4)
    routes = legal(rng, 60, 5, 8, 64)
    routes[:, :2] = 0
    assert check([routes], 64, moe=[False, False, True, True, True]).findings == ()
    audit = check([routes], 64)
    assert found(audit, 0)["zero_layer"] == (2, -1, 0, 0)


def test_one_id_a_row_cannot_be_judged_and_says_so():
    audit = check([np.zeros((40, 2, 1), np.uint8)], 4)
    assert [f.kind for f in audit.findings] == ["repeated_row"]
    assert any("topk = 1" in spot for spot in audit.blind_spots)


def test_expert_zero_is_a_real_id():
    rng = np.random.default_rng(5)
    routes = legal(rng, 500, 2, 4, 4)  # every row holds expert 0
    assert audit_routes(routes, num_experts=4).findings == ()


@pytest.mark.parametrize(
    ("moe", "error", "message"),
    [
        ([1, 0], TypeError, "moe_layers has dtype int64, need a bool for each layer"),
        ([True], ValueError, r"moe_layers has shape \[1\], need \[2\]"),
        ([False, False], ValueError, "moe_layers is False everywhere"),
        ("yes", TypeError, "moe_layers is a str"),
    ],
)
def test_bad_moe_layers(moe, error, message):
    routes = np.zeros((3, 2, 2), np.uint8)
    with pytest.raises(error, match=message):
        audit_routes(routes, moe_layers=moe)
    with pytest.raises(error, match=message):
        collate_routes([routes], [4], moe_layers=moe)


def test_bad_audit_arguments():
    with pytest.raises(TypeError, match="audit is a int, need a bool"):
        collate_routes([np.zeros((3, 2, 2), np.uint8)], [4], audit=1)
    with pytest.raises(ValueError, match="num_experts is 1, need at least 2"):
        audit_routes(np.zeros((3, 2, 2), np.uint8), num_experts=1)


def test_compare_routes_counts_sets():
    rng = np.random.default_rng(6)
    a = legal(rng, 5000, 6, 8, 64)
    b = np.flip(a, axis=2).astype(np.int64)
    assert compare_routes(a, b).pairs == 0.0
    b[4000, 3, 0] = 63 if 63 not in b[4000, 3] else next(i for i in range(64) if i not in b[4000, 3])
    b[4500, 3, 1] = next(i for i in range(64) if i not in b[4500, 3])
    b[4500, 5, 1] = next(i for i in range(64) if i not in b[4500, 5])
    mismatch = compare_routes(a, b)
    assert (mismatch.pairs, mismatch.tokens, mismatch.first) == (3 / 30_000, 2 / 5000, (4000, 3))
    assert mismatch.by_layer.tolist() == [0, 0, 0, 2 / 5000, 0, 1 / 5000]
    shifted = compare_routes(a[1:], a[:-1])
    assert shifted.tokens > 0.99
    for bad, error, message in (
        (a[:, :5], ValueError, "b has shape"),
        (a.astype(float), TypeError, "b has dtype float64"),
        (a[0], ValueError, "b has 2 dimensions"),
        (a.tolist(), TypeError, "b is a list"),
    ):
        with pytest.raises(error, match=message):
            compare_routes(a, bad)
