"""`shardwise inspect`: the anatomy of a model, and which axes of a layout work on it."""

from typing import Any

from shardwise.console import format_count, pluralize
from shardwise.errors import UserError
from shardwise.job import BatchConfig, Job
from shardwise.layout import Layout
from shardwise.parallel.prepare import meta_model, prepare

LAYOUTS = {
    "replicate": "replicate=2", "shard": "shard=2 zero=3", "pipeline": "pipeline=2", "context": "context=2",
    "tensor": "tensor=2", "expert": "shard=2 expert=2", "recompute": "recompute=full",
}  # fmt: skip


def inspect_job(job: Job) -> dict[str, Any]:
    """Returns plain values: what was found, and for each axis "works" or why it does not."""
    chain: Any = meta_model(job.model, job.seed)
    weights = list(chain.named_unique_parameters())
    count = sum(weight.numel() for _, weight in weights)
    frozen = [name for name, weight in weights if not weight.requires_grad]
    found: dict[str, Any] = {"model": job.model.name, "parameters": f"{format_count(count)} in {len(weights)} tensors"}
    anatomy = getattr(chain, "anatomy", None)
    if anatomy is not None:
        prologue = [name for name, parts in anatomy.parts_of.items() if parts[0] == 0]
        epilogue = [name for name, parts in anatomy.parts_of.items() if parts[-1] == len(anatomy.blocks) + 1]
        trunk = anatomy.blocks[0].rpartition(".")[0] if anatomy.blocks else "none found"
        found |= {
            "trunk": f"{trunk} ({pluralize(len(anatomy.blocks), 'block')})" if anatomy.blocks else trunk,
            "prologue": ", ".join(prologue) or "no parameters", "epilogue": ", ".join(epilogue) or "no parameters",
            "tied": ", ".join(f"{a} = {b}" for a, b in chain.sharding_plan.ties) or "none",
            "frozen": ", ".join(frozen) or "none",
        }  # fmt: skip
    else:
        found["blocks"] = pluralize(len(chain.blocks()), "block")
    found["axes"] = {axis: _try(job, layout) for axis, layout in LAYOUTS.items()}
    return found


def _try(job: Job, layout: str) -> str:
    small = job.model_copy(update={"batch": BatchConfig(samples=max(4, 4 * (job.samples // 4)))})
    try:
        prepare(small, Layout.parse(layout))
    except UserError as error:
        return f"no: {str(error).partition(': ')[2] or error}"
    return "works"
