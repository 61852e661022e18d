"""The core stays under its line budget: every feature states its price. Exits 1 when it does not."""

from __future__ import annotations

import sys
from pathlib import Path

BUDGET = 15_000
LONGEST = 450

root = Path(__file__).parent.parent / "shardwise"
sizes = {path: len(path.read_text().splitlines()) for path in sorted(root.rglob("*.py"))}
total = sum(sizes.values())
long = [f"{path.relative_to(root)} ({size})" for path, size in sizes.items() if size > LONGEST]
print(f"{total} lines in {len(sizes)} files, of {BUDGET}")
if long:
    print(f"longer than {LONGEST} lines: {', '.join(long)}")
sys.exit(total > BUDGET or bool(long))
