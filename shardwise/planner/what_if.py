"""What a plan costs in money and energy, and what other hardware would change: `plan --price`, `--set cluster.KEY`."""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.cluster import GB, GIB, Cluster
from shardwise.console import format_count
from shardwise.errors import JobError, suggest
from shardwise.planner.plan import Plan, make_estimator

# Keys of `--set cluster.KEY=VALUE`, each with its unit. `flops`: in bf16, other precisions in proportion.
UNITS = {"inner": GB, "outer": GB, "node_link": GB, "memory": GIB, "bandwidth": GB, "flops": 1e12}


def with_settings(cluster: Cluster, settings: list[str]) -> Cluster:
    """Returns the cluster with `cluster.KEY=VALUE` settings applied; `node_link` is the link between nodes, `outer`."""
    for setting in settings:
        key, _, text = setting.removeprefix("cluster.").partition("=")
        if key not in UNITS:
            raise JobError(f"--set {setting}: unknown key of a cluster: {suggest(key, UNITS)}")
        if not text.replace(".", "", 1).isdecimal() or not 0.0 < float(text) < 1e9:
            raise JobError(f"--set {setting}: cluster.{key} must be a positive number.")
        cluster = changed(cluster, key, float(text) * UNITS[key])
    return cluster


def changed(cluster: Cluster, key: str, value: float) -> Cluster:
    device = cluster.device
    if key in ("inner", "outer", "node_link"):
        link = "inner" if key == "inner" else "outer"
        return replace(cluster, **{link: replace(getattr(cluster, link), bandwidth=value)})
    peaks = {name: rate * value / device.peak_flops("bf16") for name, rate in device.peak_by_precision.items()}
    return replace(cluster, device=replace(device, **{"peak_by_precision": peaks} if key == "flops" else {key: value}))


def bottlenecks(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yields kinds of hardware with how much faster the best layout's step is with twice of each, the largest first."""
    cluster, device = plan.cluster, plan.cluster.device
    kinds = {
        "matmul FLOP/s": ("flops", device.peak_flops("bf16")), "memory bandwidth": ("bandwidth", device.bandwidth),
        "bandwidth within a node": ("inner", cluster.inner.bandwidth),
        "bandwidth between nodes": ("outer", cluster.outer.bandwidth),
    }  # fmt: skip
    doubled = {name: changed(cluster, key, 2 * value) for name, (key, value) in kinds.items()}
    seconds = {name: make_estimator(plan.job, c).predict_seconds(plan.best.layout) for name, c in doubled.items()}
    yield from ((name, 1.0 - seconds[name] / plan.best.seconds) for name in sorted(seconds, key=seconds.__getitem__))


def cost_lines(plan: Plan, price: float | None) -> Iterator[str]:
    """Yields what the run costs and what would make it faster. `price`: of a device for an hour."""
    hours, power = plan.training_seconds / 3600 * plan.devices, plan.cluster.device.power
    if price is not None:
        yield f"Cost at {price:g} for an hour of a device: {hours * price:,.2f}."
    if power:
        yield f"Energy at the devices' rated {power:.0f} W, without hosts and cooling: {format_count(hours * power)}Wh."
    (name, gain), *others = bottlenecks(plan)
    rest = "; ".join(f"{other} {100 * share:.0f}%" for other, share in others if share >= 0.01)
    yield f"Bottleneck: {name}. Twice of it would save {100 * gain:.0f}% of the step{f' ({rest})' if rest else ''}."
