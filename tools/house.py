"""The rules of the package that no other linter knows, counted and enforced. Exits 1 if one is broken.

    python tools/house.py            a table of rules, and every violation by file and line

Each rule is a function that returns its violations; `RULES` lists them with what is allowed. `tests/test_house.py` runs
the same functions, also on small packages with planted violations.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED_BASENAMES = ("__init__.py", "command.py")  # every room may have one of each


@dataclass(frozen=True)
class Module:
    """A parsed file of the package."""

    path: Path
    name: str
    """Path below the repository: `shardwise/comm/world.py`."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 1)}: {what}"


class House:
    """The package below `root`, parsed once, and the floors that ARCHITECTURE.md gives its rooms."""

    def __init__(self, root: Path = ROOT, package: str = "shardwise") -> None:
        self.root, self.package = root, package
        paths = sorted((root / package).rglob("*.py"))
        self.modules = [Module(path, str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]
        self.names = {module.name for module in self.modules}

    @cached_property
    def floors(self) -> dict[str, int]:
        """Room and floor, counted from the ground."""
        page = (self.root / "ARCHITECTURE.md").read_text(encoding="utf-8")
        table = re.findall(rf"^\| (`{self.package}/.*?) \|", page, re.MULTILINE)
        return {room.rstrip("/"): floor for floor, cell in enumerate(table) for room in re.findall(r"`(.*?)`", cell)}

    def floor(self, name: str) -> int | None:
        return next((floor for room, floor in self.floors.items() if name == room or name.startswith(room + "/")), None)

    def imports(self, nodes: Iterator[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
        """Yields each import among the nodes with the file of the package that it imports."""
        for node in nodes:
            dotted: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    dotted.append(submodule if self._file(submodule) else node.module)
            elif isinstance(node, ast.Import):
                dotted = [alias.name for alias in node.names]
            for file in {self._file(name) for name in dotted} - {None}:
                assert file is not None
                yield node, file

    def _file(self, dotted: str) -> str | None:
        path = dotted.replace(".", "/")
        return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in self.names), None)


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run when the module is imported; not those for type checkers or for a script."""
    for statement in body:
        if isinstance(statement, ast.If) and re.search("TYPE_CHECKING|__main__", ast.unparse(statement.test)):
            continue
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from _module_level(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _module_level(handler.body)


def _root_name(node: ast.AST) -> str:
    """Returns the name that an expression such as `a.b(c).d[0]` starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _named(node: ast.AST) -> set[str]:
    """Returns every name and attribute in an expression."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:90]


# The rules.


def kind_checks(house: House) -> list[str]:
    """Checks of the model's kind outside models/: by its config class, or by comparing its name with a literal."""
    bases = {node.name: _named(ast.Tuple(elts=node.bases)) for module in house.modules for node in ast.walk(module.tree)
             if isinstance(node, ast.ClassDef)}  # fmt: skip
    kinds: set[str] = set()
    while grown := {name for name, parents in bases.items() if parents & (kinds | {"ModelConfig"})} - kinds:
        kinds |= grown

    def is_model_name(node: ast.expr) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "name" and ast.unparse(node.value).endswith("model")

    def is_check(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and _root_name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            return bool(_named(node.args[1]) & kinds)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(side, ast.Call) and _root_name(side) == "type" for side in sides):
                return any(_named(side) & kinds for side in sides)
            literals = any(isinstance(part, ast.Constant) and isinstance(part.value, str)
                           for side in sides for part in ast.walk(side))  # fmt: skip
            return literals and any(map(is_model_name, sides))
        if isinstance(node, ast.MatchClass):
            return bool(_named(node.cls) & kinds)
        return isinstance(node, ast.Match) and is_model_name(node.subject)

    outside = [module for module in house.modules if not module.name.startswith(f"{house.package}/models/")]
    found = [(module, node) for module in outside for node in ast.walk(module.tree) if is_check(node)]
    return [module.at(node, _first_line(node)) for module, node in found]


def duplicate_classes(house: House) -> list[str]:
    """Class names that are defined more than once."""
    places = defaultdict(list)
    for module in house.modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node, f"class {node.name}"))
    return [place for named in places.values() if len(named) > 1 for place in named]


def duplicate_basenames(house: House) -> list[str]:
    """Files with the name of another file."""
    places = defaultdict(list)
    for module in house.modules:
        places[module.path.name].append(module.name)
    return [", ".join(files) for name, files in places.items() if len(files) > 1 and name not in SHARED_BASENAMES]


def import_effects(house: House) -> list[str]:
    """What an import changes outside its own module: attributes of other modules, loggers, warnings, the environment.

    A module-level call whose value is dropped can only be made for its effect, so it counts unless it is a method of
    something that the module itself made (`app.add_typer(...)`).
    """
    violations = []
    for module in house.modules:
        if module.path.name == "__main__.py":
            continue
        statements = list(_module_level(module.tree.body))
        imported = {(alias.asname or alias.name).split(".")[0] for node in statements
                    if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
        own = {target.id for node in statements if isinstance(node, ast.Assign) for target in node.targets
               if isinstance(target, ast.Name)}  # fmt: skip
        for node in statements:
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
            targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
            patches = any(not isinstance(target, ast.Name) and _root_name(target) in imported for target in targets)
            is_call = (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _root_name(node.value) not in own
            )
            if patches or is_call:
                violations.append(module.at(node, _first_line(node)))
    return violations


def import_circles(house: House) -> list[str]:
    """Files that import each other at module level, directly or through others."""
    graph = {module.name: {file for _, file in house.imports(_module_level(module.tree.body)) if file != module.name}
             for module in house.modules}  # fmt: skip

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    reach = {name: reached(name) for name in graph}
    circles = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]
    }
    return sorted(" <-> ".join(sorted(circle)) for circle in circles)


def upward_imports(house: House) -> list[str]:
    """Imports, anywhere in a file, of a room above it in ARCHITECTURE.md's table; and files that are in no room."""
    violations = []
    for module in house.modules:
        if re.fullmatch(rf"{house.package}/__\w+__\.py", module.name):
            continue
        floor = house.floor(module.name)
        if floor is None:
            violations.append(f"{module.name}: is in no room of ARCHITECTURE.md")
            continue
        for node, file in house.imports(ast.walk(module.tree)):
            if (house.floor(file) or 0) > floor:
                violations.append(module.at(node, f"imports {file}"))
    return sorted(set(violations))


RULES: dict[Callable[[House], list[str]], tuple[str, int]] = {
    kind_checks: ("kind checks outside models/", 0),
    duplicate_classes: ("class names defined twice", 0),
    duplicate_basenames: ("file names used twice", 0),
    import_effects: ("import-time side effects", 0),
    import_circles: ("import circles", 0),
    upward_imports: ("imports of a higher room", 0),
}


def main() -> int:
    house = House()
    failed = False
    print(f"{'rule':<32}{'found':>7}{'allowed':>9}")
    lists = []
    for rule, (title, allowed) in RULES.items():
        violations = rule(house)
        failed |= len(violations) > allowed
        print(f"{title:<32}{len(violations):>7}{allowed:>9}{'  BROKEN' if len(violations) > allowed else ''}")
        lists += [f"\n{title}:", *(f"  {violation}" for violation in violations)] if violations else []
    print("\n".join(lists))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
