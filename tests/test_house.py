"""The rooms of ARCHITECTURE.md: each imports only rooms below it, and every file is in one of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rooms() -> dict[str, int]:
    """Room and floor, counted from the ground."""
    table = re.findall(r"^\| (`shardwise/.*?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {room.rstrip("/"): floor for floor, cell in enumerate(table) for room in re.findall(r"`(.*?)`", cell)}


def floor_of(path: str, house: dict[str, int]) -> int | None:
    return next((floor for room, floor in house.items() if path == room or path.startswith(room + "/")), None)


def imported(path: Path) -> set[str]:
    """Files and folders of ours that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
    places = {name.replace(".", "/") for name in names if name.startswith("shardwise.")}
    return {place + ".py" if (ROOT / f"{place}.py").exists() else place for place in places if (ROOT / place).exists()
            or (ROOT / f"{place}.py").exists()}  # fmt: skip


def test_no_room_imports_one_above_it() -> None:
    house = rooms()
    assert len(house) > 15
    for path in sorted((ROOT / "shardwise").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if path.parent == ROOT / "shardwise" and path.name.startswith("__"):
            continue
        own = floor_of(name, house)
        assert own is not None, f"{name} is in no room of ARCHITECTURE.md"
        for other in imported(path):
            floor = floor_of(other, house)
            assert floor is None or floor <= own, f"{name} imports {other}, which lies above it"
