"""Tables of this folder's TOML files, and the presets: published model shapes by name (`presets.toml`)."""

from pathlib import Path
from typing import Any

from shardwise.files import parse_toml


def read_tables(name: str) -> dict[str, dict[str, Any]]:
    """Returns the tables of a file. `like` names one before it whose values are taken over, also those of subtables;
    tables whose name begins with an underscore are only for that."""
    found: dict[str, dict[str, Any]] = {}
    for key, table in parse_toml((Path(__file__).parent / name).read_text(encoding="utf-8")).items():
        base = found.get(table.pop("like", ""), {})
        subtables = {name: {**base.get(name, {}), **value} for name, value in table.items() if isinstance(value, dict)}
        found[key] = {**base, **table, **subtables}
    return {key: table for key, table in found.items() if not key.startswith("_")}


PRESETS = read_tables("presets.toml")
