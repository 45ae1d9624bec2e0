"""The audit against a naive oracle on every path, and the captures that went wrong elsewhere."""

from __future__ import annotations

import numpy as np
import paths
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import examples

from r3numba import audit_routes, backend_info, collate_routes, compare_routes, pack_routes
from r3numba.audit import LONG_RUN, CorruptRoutesError

PATHS = paths.available()
KINDS = ("out_of_range", "duplicate", "zero", "zero_row", "zero_layer", "repeated_row")


@pytest.fixture(autouse=True)
def three_cpus(monkeypatch):
    monkeypatch.setattr("r3numba._dispatch.permitted_cpus_cached", lambda: 3)


def legal(rng, rows, layers, topk, experts, dtype=np.uint8):
    """Return routes with distinct ids in every row."""
    return rng.random((rows, layers, experts)).argsort(axis=2)[:, :, :topk].astype(dtype)


def oracle(routes, num_experts, moe, missing=None):
    """Count pair by pair: {kind: (count, first token, first layer, longest)} of one trajectory."""
    rows, _, topk = routes.shape
    limit = num_experts or np.iinfo(routes.dtype).max + 1
    seen = {kind: [] for kind in KINDS}
    audited = 0
    for t in range(rows):
        if missing is not None and missing[t]:
            continue
        audited += 1
        zero_layers = 0
        for layer in np.flatnonzero(moe):
            values = routes[t, layer].tolist()
            if any(v < 0 or v >= limit for v in values):
                seen["out_of_range"].append((t, layer))
            if topk > 1 and not any(values):
                seen["zero"].append((t, layer))
                zero_layers += 1
            elif len(set(values)) < topk:
                seen["duplicate"].append((t, layer))
        if zero_layers == sum(moe):
            seen["zero_row"].append((t, -1))
    for layer in np.flatnonzero(moe):
        if audited and sum(1 for _, other in seen["zero"] if other == layer) == audited:
            seen["zero_layer"].append((-1, layer))
    t, longest = 0, 0
    while t < rows:
        stop = t + 1
        while stop < rows and (routes[stop] == routes[t]).all():
            stop += 1
        gone = missing is not None and missing[t]
        if stop - t >= LONG_RUN and not gone:
            seen["repeated_row"].append((t, -1))
            longest = max(longest, stop - t)
        t = stop
    return {
        kind: (len(found), int(found[0][0]), int(found[0][1]), longest if kind == "repeated_row" else 0)
        for kind, found in seen.items()
        if found
    }


def found(audit, trajectory):
    return {f.kind: (f.count, f.token, f.layer, f.longest) for f in audit.findings if f.trajectory == trajectory}


def check(routes, num_experts=None, moe=None, missing=None, dtype=None, **policy):
    """Audit alone and in the pass of both collations, on every path, and compare each with the oracle."""
    layers = next(r for r in routes if r is not None).shape[1]
    dtype = dtype or max((r.dtype for r in routes if r is not None), key=lambda held: held.itemsize)
    mask = [True] * layers if moe is None else moe
    expected = [
        {} if r is None else oracle(np.asarray(r), num_experts, mask, None if missing is None else missing[i])
        for i, r in enumerate(routes)
    ]
    lengths = [2 if r is None else len(r) + 1 for r in routes]
    for path in PATHS:
        forced = paths.forced(path, **{**paths.TINY_PIECES, **policy})
        options = {"num_experts": num_experts, "moe_layers": moe, "_policy": forced}
        reports = []
        reports.append(audit_routes(routes, missing=missing, **options))
        plain = collate_routes(routes, lengths, missing=missing, dtype=dtype)
        for threads in (1, 3):
            both = {**options, "dtype": dtype, "missing": missing, "audit": True}
            batch = collate_routes(routes, lengths, num_threads=threads, **both)
            assert backend_info()["path"] in paths.may_report(path)
            np.testing.assert_array_equal(batch.array, plain.array)
            np.testing.assert_array_equal(batch.padding_mask, plain.padding_mask)
            reports.append(batch.audit)
            reports.append(pack_routes(routes, lengths, num_threads=threads, **both).audit)
        for audit in reports:
            assert [found(audit, i) for i in range(len(routes))] == expected, path
    return reports[-1]


@st.composite
def captures(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, topk = draw(st.sampled_from([1, 2, 3, 4, 8, 9, 17])), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 22]))
    routes, missing = [], []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.sampled_from([1, 2, 7, 40, 90]))
        dtype = draw(st.sampled_from([np.uint8, np.int16, np.int32]))
        r = legal(rng, rows, layers, topk, 30, dtype)
        for _ in range(draw(st.integers(0, 4))):
            fault, at = draw(st.integers(0, 5)), int(rng.integers(rows))
            layer, k = int(rng.integers(layers)), int(rng.integers(topk))
            if fault == 0:
                r[at, layer, k] = r[at, layer, (k + 1) % topk]
            elif fault == 1:
                r[at, layer, k] = draw(st.sampled_from([29, 30, 127, 128, 200, 255]))
            elif fault == 2:
                r[at] = 0
            elif fault == 3:
                r[:, layer] = 0
            elif fault == 4:
                r[at : at + LONG_RUN + int(rng.integers(-1, 3))] = r[at]
            elif dtype is not np.uint8:
                r[at, layer, k] = -1 - int(rng.integers(3))
        how = draw(st.integers(0, 3))
        if how == 1:
            r = np.asfortranarray(r)
        elif how == 2:
            r = np.repeat(r, 2, axis=2)[:, :, ::2]
        routes.append(r)
        missing.append(rng.random(rows) < 0.2 if draw(st.booleans()) else None)
    moe = [True, *(bool(x) for x in rng.random(layers - 1) < 0.7)] if draw(st.booleans()) else None
    return routes, draw(st.sampled_from([None, 30, 128, 129, 256])), moe, missing if draw(st.booleans()) else None


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    captures(), st.sampled_from([1, 64, 1024]), st.sampled_from([1, 256, 2048, 256 << 10]),
    st.sampled_from([None, np.int32]),
)  # fmt: skip
def test_any_capture(capture, align, block, dtype):
    routes, num_experts, moe, missing = capture
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
