"""Which tests run, by the marks at the tests.

`@pytest.mark.thin(N)`: `make test` runs about every Nth case, `make test-all` all. Whether a case is among them follows
from a hash of its own name, so that a new case moves no other. A test of which no case would run keeps one.
`@pytest.mark.thin(by_kind=True)`: one case of each kind, which is the first word of the case's name.

`@pytest.mark.cluster`: real schedulers, nodes, object stores, the wheel, the site, up to a minute each. `make
test-clusters` runs them, and so does naming their file.

A test that is named with its case always runs. `--share 3/10` runs the fourth tenth of what both `make test` and `make
test-clusters` leave out."""

import random
import re
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

Share = tuple[int, int]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thin(every, by_kind): only some cases run, unless --all is given")
    config.addinivalue_line(
        "markers", "cluster: runs for long, or needs what few machines have; see `make test-clusters`"
    )
    if config.getoption("share"):
        parse_share(config.getoption("share"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order drawn by this seed")
    parser.addoption("--share", metavar="K/N", help="part K, from 0, of N parts of the cases that are thinned out")


def parse_share(text: str) -> Share:
    """Returns number and count of the parts in `K/N`. Raises UsageError if there is no such part."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise pytest.UsageError(f"--share {text}: write K/N, as 0/10 for the first of ten parts.")
    return int(match[1]), int(match[2])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("all"):
        leave_out(config, items)
    seed = config.getoption("shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes what does not run without `--all`."""
    chosen = chosen_cases(items)
    of_clusters = {item for item in items if item.get_closest_marker("cluster") is not None}
    plain = chosen - of_clusters

    if config.getoption("share"):
        part, parts = parse_share(config.getoption("share"))
        kept = {item for item in items if item not in chosen and name_hash(item) % parts == part}
    else:
        kept = plain | {item for item in items if is_named(item, config)}
        kept |= {item for item in chosen & of_clusters if asks_for_clusters(item, config)}

    left = [item for item in items if item not in kept]
    config.stash[LEFT_OUT] = sum(item not in plain for item in left)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left = config.stash.get(LEFT_OUT, 0)
    if left:
        terminalreporter.write_line(
            f"not run: {left:,} cases of thinned tests and tests for clusters; `make test-all` runs them."
        )


LEFT_OUT = pytest.StashKey[int]()


def chosen_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that are not thinned, and of the others the cases that run without an option."""
    chosen: set[pytest.Item] = set()
    cases: dict[tuple[Path, str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("thin")
        if mark is None:
            chosen.add(item)
            continue
        kind = kind_of(item) if mark.kwargs.get("by_kind") else ""
        cases[item.path, function_name(item), kind].append(item)

    for group in cases.values():
        mark = group[0].get_closest_marker("thin")
        assert mark is not None
        by_hash = sorted(group, key=name_hash)
        every = mark.args[0] if mark.args else 0
        selected = [item for item in by_hash if every and name_hash(item) % every == 0]
        chosen.update(selected or by_hash[:1])
    return chosen


def asks_for_clusters(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names the mark of the tests for clusters, or the file of this one."""
    names = {Path(argument.partition("::")[0]).name for argument in config.args}
    return "cluster" in config.getoption("markexpr") or item.path.name in names


def is_named(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the command line names this very case."""
    asked = [argument.partition("::") for argument in config.args]
    file, _, case = item.nodeid.partition("::")
    return any(name == case and Path(path).name == Path(file).name for path, _, name in asked)


def function_name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", None) or item.name)


def kind_of(item: pytest.Item) -> str:
    """Returns the first word of a case's name: of `test_x[deaf-shard=2]`, `deaf`."""
    case = item.name.removeprefix(f"{function_name(item)}[").removesuffix("]")
    return re.split("[ -]", case)[0]


def name_hash(item: pytest.Item) -> int:
    """Returns a number that depends on the names of test and case alone: files may move."""
    return zlib.crc32(item.name.encode())
