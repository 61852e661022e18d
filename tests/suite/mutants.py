"""Small changes of the package's code that a good suite notices: an operator, a constant, a condition, a statement.

A mutant is drawn by a seed from all places inside functions. Annotations, docstrings and the texts of messages are left
alone: what they say is no behaviour that a number could show."""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one function."""

    file: str
    line: int
    function: str
    """The outermost function around the change, by its qualified name: its code is what is replaced."""
    before: str
    after: str
    source: str
    """The whole file with the change."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def describe(self) -> str:
        return f"{self.place} in {self.function}: {_one_line(self.before)}  ->  {_one_line(self.after)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:100]


def draw_mutants(files: Sequence[Path], root: Path, count: int, seed: int) -> list[Mutant]:
    """Returns mutants of these files, drawn by a seed, in a random order. A new place in the code moves others."""
    changes = [change for file in sorted(files) for change in changes_of(file)]
    random.Random(seed).shuffle(changes)
    viable = (mutant for mutant in (make_mutant(change, root) for change in changes) if mutant is not None)
    return list(islice(viable, count))


@dataclass(frozen=True)
class Change:
    """What might take the place of a node."""

    file: Path
    function: str
    node: ast.expr | ast.stmt
    after: str


def changes_of(file: Path) -> Iterator[Change]:
    """Yields every change of a file, of which some may not be valid code."""
    for function, qualified_name in _outer_functions(ast.parse(file.read_text())):
        for statement in function.body:
            for node in _nodes_with_behaviour(statement):
                for after in _mutations(node):
                    assert isinstance(node, ast.expr | ast.stmt)
                    yield Change(file, qualified_name, node, after)


def make_mutant(change: Change, root: Path) -> Mutant | None:
    """Returns the mutant of a change; None if it is not valid code, or the same as before."""
    source = change.file.read_text()
    place = _place(change.node)
    before = ast.get_source_segment(source, place)
    changed = _replaced(source, place, change.after)
    if before is None or before == change.after or not _compiles(changed):
        return None
    return Mutant(str(change.file.relative_to(root)), place.lineno, change.function, before, change.after, changed)


def code_of(source: str, file: str, qualified_name: str) -> CodeType:
    """Returns the code of a function in a source."""
    pending = [compile(source, file, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if code.co_qualname == qualified_name:
            return code
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    raise LookupError(f"{file} has no function {qualified_name}.")


def _outer_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yields the functions and methods that are not within another function, with their qualified names."""
    pending: list[tuple[ast.AST, str]] = [(node, "") for node in tree.body]
    while pending:
        node, prefix = pending.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, f"{prefix}{node.name}"
        elif isinstance(node, ast.ClassDef):
            pending += [(child, f"{prefix}{node.name}.") for child in node.body]


def _nodes_with_behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and those below it, without annotations, docstrings and the texts of messages."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from _nodes_with_behaviour(child)


def _mutations(node: ast.AST) -> Iterator[str]:
    """Yields what may take the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
        yield f"({ast.unparse(other)})"
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left, node.right):
        yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    if isinstance(node, ast.BoolOp):
        swapped = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield repr(2 * node.value + 1)
    if isinstance(node, ast.If | ast.While):
        yield f"not ({ast.unparse(node.test)})"
    if isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass"
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return None"


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or _is_string(node) for node in nodes)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _place(node: ast.expr | ast.stmt) -> ast.expr | ast.stmt:
    """Returns what of a node is replaced: of a condition its test, of anything else all of it."""
    return node.test if isinstance(node, ast.If | ast.While) else node


def _replaced(source: str, place: ast.expr | ast.stmt, after: str) -> str:
    """Returns a source with another text in the place of a node. The number of lines stays, so that functions keep
    theirs."""
    lines = source.encode().split(b"\n")
    assert place.end_lineno is not None and place.end_col_offset is not None
    head = lines[place.lineno - 1][: place.col_offset]
    tail = lines[place.end_lineno - 1][place.end_col_offset :]
    kept_lines = [b""] * (place.end_lineno - place.lineno)
    if kept_lines and isinstance(place, ast.expr):
        after = f"({after})"  # so that the tail may stand on a later line
    if kept_lines and not isinstance(place, ast.expr):
        changed = [head + after.encode(), *kept_lines[:-1], tail.strip()]
    else:
        changed = [head + after.encode() + tail, *kept_lines]
    return b"\n".join(lines[: place.lineno - 1] + changed + lines[place.end_lineno :]).decode()


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
