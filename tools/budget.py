"""The core stays under its line budget: every feature states its price. Exits 1 when it does not.

The core is what a job runs through, from its file to trained weights and their proof. The rooms and files of `AROUND`
advise and show: a run's numbers do not depend on them. They have a budget of their own.
"""

from __future__ import annotations

import sys
from pathlib import Path

CORE = 15_000
WHOLE = 28_000
AROUND = ("planner", "bench", "laws", "watch", "guard", "chaos", "cluster.py", "draw.py")
LONGEST = 450

root = Path(__file__).parent.parent / "shardwise"
sizes = {path: len(path.read_text().splitlines()) for path in sorted(root.rglob("*.py"))}
total = sum(sizes.values())
around = sum(size for path, size in sizes.items() if path.relative_to(root).parts[0] in AROUND)
long = [f"{path.relative_to(root)} ({size})" for path, size in sizes.items() if size > LONGEST]
print(f"{total - around} lines of core, of {CORE}; {total} with {', '.join(AROUND)}, of {WHOLE}")
if long:
    print(f"longer than {LONGEST} lines: {', '.join(long)}")
sys.exit(total - around > CORE or total > WHOLE or bool(long))
