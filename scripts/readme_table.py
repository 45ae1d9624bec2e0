"""Put docs/benchmarks.md between the marks of the README; ``make bench-table`` runs it after the bench."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- bench: begin (make bench-table) -->", "<!-- bench: end -->"

table = (ROOT / "docs" / "benchmarks.md").read_text().strip()
readme = ROOT / "README.md"
text, count = re.subn(
    f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{table}\n{END}", readme.read_text(), flags=re.S
)
if count != 1:
    raise SystemExit("README.md does not have the two marks of the benchmark table, once each")
readme.write_text(text)
