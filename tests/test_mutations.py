"""Does `verify` see layout bugs, and does it name the right place? Each test plants one and asks.

A patch is made here and reaches the workers because they are forked. The truth is computed in such a process too, but
without a process group: patches of what the truth shares with the road (the model) ask for one first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_verify import tiny
from torch import Tensor

import shardwise.parallel.context as context
import shardwise.parallel.data_parallel as data
import shardwise.parallel.fsdp as sharded
import shardwise.parallel.parallelize as parallelize
import shardwise.parallel.tensor as tensor
import shardwise.parallel.torch_pipelining as pipeline
import shardwise.step as step
import shardwise.verify.parity as parity
from shardwise.layout import Layout
from shardwise.models import gpt, lora, loss
from shardwise.optim.param_shard import ParamShard
from shardwise.random import Dropout

Patch = pytest.MonkeyPatch
SMALL = {"layers": 3, "vocab": 61, "ffn": 50}
GPT2 = {**SMALL, "positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "heads": 4}
LLAMA = {**SMALL, "heads": 6, "kv_heads": 3, "tied": False}
LORA = {**LLAMA, "lora": {"rank": 3, "init_std": 0.1}}


@dataclass(frozen=True)
class Mutation:
    plant: Callable[[Patch], None]
    layout: str
    kind: str
    """Of the first difference; `problem` where the world breaks."""
    name: str
    """The module or parameter that must be named."""
    model: dict[str, Any]
    at: int
    """The step in which it must be seen."""
    precision: str


MUTATIONS: list[Mutation] = []


def caught(
    layout: str, kind: str, name: str = "", model: dict[str, Any] = GPT2, at: int = 0, precision: str = "float64"
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Says in which layout a bug shows, and where it must be found."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(plant, layout, kind, name or kind, model, at, precision))
        return plant

    return add


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# Gradients


@caught("tensor=2", "gradient", "head.norm.bias")
def no_sum_of_partial_gradients_over_the_tensor_axis(patch: Patch) -> None:
    patch.setattr(step, "all_reduce_tensor_grads", lambda engine: None)


@caught("tensor=2", "gradient", "block2.mlp.up.lora_A", model=LORA)
def the_matrix_a_of_an_adapter_not_summed_over_the_tensor_axis(patch: Patch) -> None:
    whole = step.all_reduce_tensor_grads

    def without_a(engine: Any) -> None:
        kept = {shard.name: shard.grad.clone() for shard in engine.param_shards if shard.name.endswith("lora_A")}
        whole(engine)
        for shard in engine.param_shards:
            if shard.name in kept:
                shard.grad.copy_(kept[shard.name])

    patch.setattr(step, "all_reduce_tensor_grads", without_a)


@caught("tensor=2", "output", "block0.attention", model=LORA)
def an_adapter_added_after_the_sum_over_the_tensor_axis(patch: Patch) -> None:
    """The row-split layer's whole B would be applied to the sum on every rank."""
    right = lora._add_update

    def doubled(module: Any, args: Any, y: Tensor) -> Tensor:
        is_split = dist.is_initialized() and module.lora_A.shape[1] < module.lora_B.shape[0]
        return right(module, args, y) + (right(module, args, y) - y if is_split else 0.0)

    patch.setattr(lora, "_add_update", doubled)


@caught("shard=2 zero=3", "output", "block0.attention", model=LORA)
def adapters_that_differ_from_rank_to_rank(patch: Patch) -> None:
    right = parallelize.init_param_shard

    def by_rank(shard: Any, chain: Any, seed: int) -> None:
        right(shard, chain, seed + rank() * shard.name.endswith("lora_B"))

    patch.setattr(parallelize, "init_param_shard", by_rank)


@caught("tensor=2", "gradient", "block1.norm2.weight", model=LLAMA)
def one_norm_weight_not_summed_under_sequence_parallelism(patch: Patch) -> None:
    whole = step.all_reduce_tensor_grads

    def without_one(engine: Any) -> None:
        spared = next(h for h in engine.param_shards if h.name == "block1.norm2.weight")
        kept = spared.grad.clone()
        whole(engine)
        spared.grad.copy_(kept)

    patch.setattr(step, "all_reduce_tensor_grads", without_one)


@caught("shard=2", "gradient", "block1.norm2.weight")
def one_gradient_that_is_not_a_number(patch: Patch) -> None:
    right: Any = ParamShard.full_grad

    def not_a_number(shard: ParamShard) -> Any:
        return right.fget(shard) * (float("nan") if shard.name == "block1.norm2.weight" else 1.0)

    patch.setattr(ParamShard, "full_grad", property(not_a_number))


@caught("pipeline=2 micro_batch=1", "gradient", "embed.tokens.weight")
@caught("pipeline=2 schedule=zbv micro_batch=1", "gradient", "embed.tokens.weight")
def a_tied_weight_not_summed_over_stages(patch: Patch) -> None:
    patch.setattr(step, "all_reduce_tied_grads", lambda engine: None)


@caught("replicate=2 shard=2", "gradient", "head.norm.bias")
def gradients_summed_over_shards_but_not_over_replicas(patch: Patch) -> None:
    patch.setattr(data, "all_reduce", lambda *args, **options: None)


@caught("pipeline=2 micro_batch=1", "gradient", "head.project.weight", model=LLAMA)
def gradients_scaled_by_micro_batches_as_pytorch_does(patch: Patch) -> None:
    class Scaling(pipeline.schedules.Schedule1F1B):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"scale_grads": True})

    patch.setitem(pipeline.SCHEDULE_CLASSES, "1f1b", Scaling)


@caught("tensor=2", "gradient", "block2.mlp.down.bias")
def the_bias_of_a_row_cut_added_on_every_rank(patch: Patch) -> None:
    def in_every_product(module: Any, row: Any, axis: Any) -> None:
        module.register_forward_pre_hook(lambda module, args: (tensor.all_gather_sequence(args[0], axis), *args[1:]))
        module.register_forward_hook(lambda module, args, y: tensor.reduce_scatter_sequence(y, axis))

    patch.setattr(tensor, "_apply_sequence_region", in_every_product)


@caught("tensor=2", "gradient", "head.norm.weight", model=LLAMA)
def the_gradient_of_a_gather_not_summed(patch: Patch) -> None:
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
            ctx.axis = axis
            return tensor.all_gather_with_grad(x.contiguous(), tensor.SEQUENCE_DIM, axis).clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad.chunk(ctx.axis.size, tensor.SEQUENCE_DIM)[ctx.axis.index].contiguous(), None

    patch.setattr(tensor, "all_gather_sequence", Gather.apply)


@caught("shard=2 zero=1", "problem", "block1.mlp.up.weight")
@caught("shard=2 zero=3", "problem", "block1.mlp.up.weight")
@caught("replicate=2", "problem", "block1.mlp.up.weight")
@caught("pipeline=2 tensor=2 micro_batch=1", "problem", "block1.mlp.up.weight")
def a_missing_gradient(patch: Patch) -> None:
    """One product uses a copy of its weight that autograd knows nothing of."""
    make, right = gpt.DecoderBlock.__init__, gpt.FeedForward.forward

    def mark(self: Any, model: Any, name: str, *rest: Any) -> None:
        make(self, model, name, *rest)
        self.mlp.cut_off = name == "block1"

    def forward(self: Any, x: Tensor) -> Tensor:
        if not (dist.is_initialized() and self.cut_off):
            return right(self, x)
        up = torch.nn.functional.linear(x, self.up.weight.detach(), self.up.bias)
        return self.down(torch.nn.functional.gelu(up, approximate="tanh"))

    patch.setattr(gpt.DecoderBlock, "__init__", mark)
    patch.setattr(gpt.FeedForward, "forward", forward)


@caught("pipeline=2 shard=2 schedule=zero-bubble zero=2 micro_batch=1", "gradient", "head.norm.bias")
@caught("pipeline=2 shard=2 schedule=zero-bubble zero=3 micro_batch=1", "problem", "block2.norm1.weight")
@caught("pipeline=2 shard=2 schedule=dualpipev zero=3 micro_batch=1", "gradient", "head.norm.bias")
def a_split_backward_whose_first_half_fsdp_takes_for_a_whole_one(patch: Patch) -> None:
    patch.setattr(
        pipeline.PatchedPipelineStage, "backward_maybe_with_nosync", pipeline.PipelineStage.backward_maybe_with_nosync
    )


# Loss and norm


@caught("replicate=2", "loss")
@caught("pipeline=2 shard=2 micro_batch=1", "loss")
def the_loss_averaged_per_rank_instead_of_per_token(patch: Patch) -> None:
    def own_count(engine: Any, samples: Any) -> Tensor:
        own = samples.num_targets.to(engine.scale.value.dtype)
        return own.clamp(min=1.0) * engine.mesh["data"].size

    patch.setattr(step, "count_targets", own_count)


@caught("shard=2 micro_batch=1", "loss")
def each_micro_batch_scaled_by_their_number(patch: Patch) -> None:
    right = parallelize.Engine.run
    patch.setattr(
        parallelize.Engine, "run", lambda self, samples, scale: right(self, samples, scale / self.batch.micro_batches)
    )


@caught("tensor=2", "loss")
def the_sums_of_a_cut_vocabulary_not_shared(patch: Patch) -> None:
    patch.setattr(tensor, "all_reduce", lambda *args, **kwargs: None)


@caught("replicate=2", "gradient", "head.norm.bias")
@caught("pipeline=2 micro_batch=1", "gradient", "head.norm.bias")
def a_loss_whose_gradient_is_not_scaled(patch: Patch) -> None:
    patch.setattr(loss, "scale_to_dtype", lambda x, scale, dtype: x.to(dtype))


@caught("tensor=2", "grad_norm")
@caught("replicate=2 shard=2 zero=3", "grad_norm")
def a_replicated_gradient_counted_twice_in_the_norm(patch: Patch) -> None:
    patch.setattr(data.DataParallel, "make_param_shards", _with_copies(lambda self: 1))


@caught("pipeline=2 micro_batch=1", "grad_norm")
def a_stage_left_out_of_the_norm(patch: Patch) -> None:
    left_out = _with_copies(lambda self: float("inf") if self.mesh["pipeline"].index == 0 else 1)
    patch.setattr(data.DataParallel, "make_param_shards", left_out)


@caught("pipeline=2 micro_batch=1", "grad_norm")
def a_tied_weight_counted_on_both_stages(patch: Patch) -> None:
    right = parallelize.parallelize

    def uncorrected(*args: Any, **keys: Any) -> Any:
        engine = right(*args, **keys)
        for tied in engine.tied:
            tied.num_replicas = 1
        return engine

    patch.setattr(parity, "parallelize", uncorrected)


def _with_copies(copies: Callable[[Any], float]) -> Callable[..., Any]:
    right = data.DataParallel.make_param_shards

    def wrong(self: Any, *args: Any) -> Any:
        held = right(self, *args)
        for one in held:
            one.num_replicas = copies(self)
        return held

    return wrong


# Outputs


@caught("shard=2", "output", "embed")
@caught("tensor=2", "output", "embed")
def dropout_by_rank(patch: Patch) -> None:
    right = Dropout.forward
    patch.setattr(Dropout, "forward", lambda self, x, ids: right(self, x, ids + 1000 * rank()))


@caught("pipeline=2 micro_batch=1", "output", "block1.norm2")
def dropout_of_another_micro_batch_in_a_later_stage(patch: Patch) -> None:
    right = Dropout.forward

    def forward(self: Dropout, x: Tensor, ids: Tensor) -> Tensor:
        return right(self, x, ids ^ 1 if dist.is_initialized() and self.site.startswith("block1") else ids)

    patch.setattr(Dropout, "forward", forward)


@caught("pipeline=2 micro_batch=1", "output", "block1.mlp")
def an_output_that_no_rank_shows(patch: Patch) -> None:
    right = parity.record_outputs

    def record(patterns: Any, model: Any, outputs: Any) -> Any:
        handles = right(patterns, model, outputs)
        for name, module in model.named_modules():
            if dist.is_initialized() and name == "block1.mlp":
                module._forward_hooks.clear()
        return handles

    patch.setattr(parity, "record_outputs", record)


@caught("tensor=2", "output", "embed")
def positions_counted_from_the_rank_s_own_first(patch: Patch) -> None:
    patch.setattr(context, "apply", lambda *args: None)


@caught("shard=2", "output", "embed")
def a_sample_read_twice(patch: Patch) -> None:
    right = parity.rank_positions

    def overlapping(*args: Any) -> Any:
        places = right(*args)
        places[0] -= rank()
        return places

    patch.setattr(parity, "rank_positions", overlapping)


@caught("tensor=2", "output", "embed")
@caught("shard=2 zero=1", "output", "embed")
@caught("shard=2 zero=3", "output", "embed")
def initial_weights_by_local_index(patch: Patch) -> None:
    right: Any = ParamShard.offset_and_shape

    def local(shard: ParamShard) -> Any:
        start, size = right.fget(shard)
        return (0,) * len(start), size

    patch.setattr(ParamShard, "offset_and_shape", property(local))


@caught("tensor=2", "output", "block0.attention", model=LLAMA)
def a_query_head_with_its_neighbour_s_key(patch: Patch) -> None:
    right = gpt._query_head_rows

    def wrong(model: Any, query: int) -> Any:
        rows, columns = right(model, query)
        other, _ = right(model, (query + 2) % model.heads)
        size = model.head_dim
        return rows[:size] + other[size : 2 * size] + rows[2 * size :], columns

    patch.setattr(gpt, "_query_head_rows", wrong)


# Weights


@caught("shard=2 zero=1", "weight", "head.norm.bias")
@caught("shard=2 tensor=2 zero=1", "weight", "head.norm.bias")
@caught("shard=2 zero=2", "weight", "head.norm.bias")
@caught("pipeline=2 shard=2 zero=2 micro_batch=1", "weight", "head.norm.bias")
def stale_weights_after_the_step(patch: Patch) -> None:
    """The first time, before any step, they are made whole as they should be."""

    def once(right: Callable[[Any], None]) -> Callable[[Any], None]:
        def spread(self: Any) -> None:
            if not hasattr(self, "done"):
                self.done = True
                right(self)

        return spread

    for kind in (data.Zero1, sharded.FSDP):
        patch.setattr(kind, "gather_weights", once(kind.gather_weights))


@caught("shard=2", "weight", "head.norm.bias")
@caught("tensor=2", "weight", "head.norm.bias")
@caught("tensor=2", "weight", "block2.mlp.down.weight", precision="fp16")  # norms and biases are below its limit
def ranks_that_disagree_on_an_overflow(patch: Patch) -> None:
    right = step.reduce_loss_and_norm

    def measure(engine: Any, loss: Tensor) -> Any:
        outcome = right(engine, loss)
        return step.StepResult(outcome.loss, outcome.grad_norm, outcome.skipped | torch.tensor(rank() == 1))

    patch.setattr(step, "reduce_loss_and_norm", measure)


@caught("shard=2", "weight", "head.norm.bias")
def gradients_clipped_by_each_rank_s_own_norm(patch: Patch) -> None:
    right = step.clip_and_update

    def update(engine: Any, optimizer: Any, outcome: Any, clip: float) -> None:
        own = torch.stack([held.grad.norm() for held in engine.param_shards]).norm()
        right(engine, optimizer, step.StepResult(outcome.loss, own, outcome.skipped), clip)

    patch.setattr(step, "clip_and_update", update)


# Sequences that are cut


@caught("context=2", "loss")
def targets_counted_by_each_rank_for_its_own_part(patch: Patch) -> None:
    right = step.count_targets

    def count(engine: Any, samples: Any) -> Tensor:
        return right(engine, replace(samples, targets=samples.targets[:, engine.positions]))

    patch.setattr(step, "count_targets", count)


@caught("context=2", "loss")
@caught("context=2 context_method=ulysses", "loss", model=LLAMA)
def targets_shifted_after_the_cut_so_that_seams_are_wrong(patch: Patch) -> None:
    right = context.shard_samples

    def shard_samples(samples: Any, where: Any) -> Any:
        found = right(samples, where)
        return type(found)(found.tokens, found.tokens.roll(-1, 1).where(found.targets != -100, -100), found.ids)

    patch.setattr(context, "shard_samples", shard_samples)


@caught("context=2", "output", "embed")
def learned_positions_one_off_behind_the_seam(patch: Patch) -> None:
    right = context.apply

    def apply(chain: Any, layout: Any, mesh: Any, length: int, device: Any) -> None:
        right(chain, layout, mesh, length, device)
        for module in chain.modules():
            if isinstance(module, gpt.LearnedPositions):
                jumps = module.position_ids.diff(prepend=module.position_ids[:1]) > 1
                module.position_ids = module.position_ids - jumps.cumsum(0)

    patch.setattr(context, "apply", apply)


@caught("context=2", "output", "block0.attention", model=LLAMA)
def keys_turned_by_their_place_in_the_part(patch: Patch) -> None:
    right = context.apply

    def apply(chain: Any, layout: Any, mesh: Any, length: int, device: Any) -> None:
        blocks = [module for module in chain.modules() if isinstance(module, gpt.SelfAttention)]
        kept = [block.rope_cos_sin for block in blocks]
        right(chain, layout, mesh, length, device)
        for block, turn in zip(blocks, kept):
            block.rope_cos_sin = turn

    patch.setattr(context, "apply", apply)


@caught("context=2", "gradient", "head.norm.bias")
@caught("context=2 tensor=2", "gradient", "head.norm.bias")
def gradients_not_summed_over_the_parts_of_a_sequence(patch: Patch) -> None:
    patch.setattr(data, "all_reduce", lambda *args, **options: None)


@caught("context=4", "output", "block0.attention")
def keys_of_the_back_chunk_seen_from_before_it(patch: Patch) -> None:
    everything = slice(None)
    patch.setattr(context, "visible_slices", lambda axis, turn, length, causal: (everything, everything, turn == 0))


@caught("context=2", "output", "block0.attention")
def parts_of_the_softmax_averaged(patch: Patch) -> None:
    patch.setattr(torch, "logaddexp", lambda a, b: torch.maximum(a, b))


@caught("context=4", "gradient", "block2.attention.qkv.bias")
def gradients_of_keys_and_values_that_do_not_come_home(patch: Patch) -> None:
    right = context.RingSendRecv

    class Short(right):
        def __init__(self, x: Tensor, axis: Any):
            super().__init__(x, axis)
            if torch._C._current_graph_task_id() != -1:  # in the backward
                self.received = self.sent.clone()

    patch.setattr(context, "RingSendRecv", Short)


@caught("context=2 context_method=ulysses", "output", "block0.attention")
def heads_that_come_back_out_of_order(patch: Patch) -> None:
    right = context.all_to_all_with_grad

    def exchange(x: Tensor, *rest: Any) -> Tensor:
        found = right(x, *rest)
        return found.flip(0) if x.shape[2] == 2 else found  # two heads a rank: on the way back

    patch.setattr(context, "all_to_all_with_grad", exchange)


@caught("shard=2 context=2 zero=1", "grad_norm")
def copies_along_the_context_axis_counted_twice_in_the_norm(patch: Patch) -> None:
    right = step.reduce_loss_and_norm

    def measure(engine: Any, loss: Tensor) -> Any:
        for held in engine.param_shards:
            held.num_replicas = 1 / engine.mesh["context"].size
        return right(engine, loss)

    patch.setattr(step, "reduce_loss_and_norm", measure)


@pytest.mark.thin(by_kind=True)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.plant.__name__} <{m.layout}>")
def test_caught(mutation: Mutation, monkeypatch: Patch) -> None:
    layout = Layout.parse(mutation.layout)
    job = tiny(4 * layout.data, **mutation.model).model_copy(update={"precision": mutation.precision})
    mutation.plant(monkeypatch)
    (record,) = parity.verify(job, [layout], steps=mutation.at + 1)
    assert not record.ok
    if mutation.kind == "problem":
        assert record.failure is not None and f"parameter {mutation.name} got no gradient" in record.failure
    else:
        first = record.first_difference
        assert first is not None, record.failure
        assert (first.kind, first.name, first.step) == (mutation.kind, mutation.name, mutation.at)


def test_enough() -> None:
    assert len({mutation.plant.__name__ for mutation in MUTATIONS}) >= 14
