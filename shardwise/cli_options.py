"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

JobFile = Annotated[Path | None, Argument(help="Job file (TOML); default: the built-in demo.", show_default=False)]
Overrides = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a job key; repeatable.")]
LayoutOption = Annotated[str | None, Option(help='Layout, e.g. "shard=4 tensor=2"; short for --set layout=...')]
JsonFlag = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
