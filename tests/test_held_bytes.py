"""What each ZeRO stage holds, in bytes of real memory at each moment of a step, not by its flags.

Every live tensor is found through the garbage collector, and each storage counted once. W are the bytes of a rank's
weights, cut for nobody; n is the shard degree.

    moment                       zero=1             zero=2             zero=3
    after any forward            weights W          W + W/n            W/n
    after any backward           weights W          W + W/n            W/n
                                 gradients W        W/n                W/n
    before the optimizer         gradients W/n      W/n                W/n
    after the step               weights W          W/n                W/n
    always                       states 2 W/n       2 W/n              2 W/n

PyTorch's FSDP keeps a rank's own piece beside the whole weights, hence W + W/n. Inside a forward or backward zero=3
holds the block in use and the next one besides, zero=2 and 3 the gradients of as many.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from shardwise.comm.world import run_world
from shardwise.data.sample_stream import rank_positions
from shardwise.job import Job, make_job
from shardwise.layout import Layout
from shardwise.optim.optimizer_factory import make_optimizer
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import StepResult, step
from shardwise.verify.parity import make_stream

LAYERS, MICRO_BATCHES = 4, 4
LITTLE = 0.2  # the share of the weights that activations may come to

# Sizes that divide by 4, weights much larger than activations: a micro-batch is one sample of two tokens.
MODEL = {"layers": LAYERS, "width": 64, "heads": 4, "ffn": 128, "vocab": 64, "sequence": 2, "tied": False}

Moments = dict[str, list[dict[str, int]]]


class Census:
    """Bytes held in this process by role: weights, gradients, optimizer states, all else."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # what was there before is not looked through again and again
        self.states: dict[Any, Any] = {}

    def count(self) -> dict[str, int]:
        roles: dict[str, list[Tensor]] = defaultdict(list)
        pieces = {id(piece) for piece in self.states}
        for found in gc.get_objects():
            if issubclass(type(found), FakeTensor):
                continue  # of a traced model: it has no memory
            if issubclass(type(found), Tensor) and found.device.type == "cpu":
                if isinstance(found, nn.Parameter) or id(found) in pieces:
                    roles["weights"].append(found)
                    roles["gradients"] += [] if found.grad is None else [found.grad]
                else:
                    roles["else"].append(found)
        for state in self.states.values():
            roles["states"] += [value for value in state.values() if value.numel() > 1]
        seen: set[int] = set()
        held = {}
        for role in ("weights", "gradients", "states", "else"):
            local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in roles[role]]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
            held[role] = sum(size for place, size in storages.items() if place not in seen)
            seen |= storages.keys()
        return held


def watched_step(job: Job, layout: Layout) -> tuple[dict[str, int], Moments]:
    """Bytes of this rank's weights (`all`, and those of one `block`), and what is held at each moment."""
    census = Census()
    engine = parallelize(prepare(job, layout), torch.device("cpu"))
    optimizer = make_optimizer(job.optimizer, engine.param_shards)
    census.states = optimizer.state
    whole = {param_shard.name: param_shard.shape.numel() * 8 for param_shard in engine.param_shards}
    sizes = {"all": sum(whole.values())}
    block = next(name for name in whole if name.startswith("block")).partition(".")[0]
    sizes["block"] = sum(size for name, size in whole.items() if name.startswith(f"{block}."))
    moments: Moments = defaultdict(list)

    def note(moment: str) -> None:
        if len(census.states) == 0:
            return  # the optimizer's states exist only from the second step on
        count = census.count()
        for _ in range(200):
            if moment.startswith("inside") or count["else"] < LITTLE * sizes["all"]:
                break
            time.sleep(0.01)  # gloo's threads let go of what they sent a moment after all have it
            count = census.count()
        moments[moment].append(count)

    def after(moment: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            note(moment)
            return result

        return noted

    def watch(mlp: nn.Module, args: Any, output: Tensor) -> None:
        note("inside forward")
        output.register_hook(lambda grad: note("inside backward"))

    for chain in engine.chains:
        for name, module in chain.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_hook(watch)
    if layout.pipeline > 1:
        PipelineStage.forward_one_chunk = after("after forward", PipelineStage.forward_one_chunk)
        PipelineStage.backward_one_chunk = after("after backward", PipelineStage.backward_one_chunk)
        second_half = after("after the weight half", PipelineStage.backward_weight_one_chunk)
        PipelineStage.backward_weight_one_chunk = second_half
    else:
        engine.data.modules[0].register_forward_hook(lambda *args: note("after forward"))
        Tensor.backward = after("after backward", Tensor.backward)
    stream = make_stream(job)
    for number in range(2):
        moments.clear()  # of the end of the first step
        samples = stream.read(rank_positions(number, job.samples, layout.data, engine.mesh["data"].index))

        def observe(outcome: StepResult) -> None:
            note("before the optimizer")

        step(engine, optimizer, samples, 1.0, observe)
        note("after the step")
    return sizes, dict(moments)


def run(text: str) -> list[tuple[dict[str, int], Moments]]:
    layout = Layout.parse(f"{text} micro_batch=1")
    batch = {"samples": layout.data * MICRO_BATCHES}
    job = make_job({"precision": "float64", "model": MODEL, "batch": batch})
    prepare(job, layout)  # once, for all ranks
    ranks = run_world(watched_step, layout.world, job, layout)
    for _, moments in ranks:
        chunks = MICRO_BATCHES * layout.stages_per_rank
        assert len(moments["after forward"]) == len(moments["after backward"]) == chunks
        assert len(moments["inside forward"]) == len(moments["inside backward"]) >= chunks
    return ranks


def held(moments: Moments, role: str, *names: str) -> set[int]:
    """The different numbers of bytes that were held in a role at some moments."""
    return {count[role] for name in names for count in moments[name]}


CUTS = {"shard=4": 4, "pipeline=2 shard=2": 2, "pipeline=2 shard=2 schedule=interleaved": 2}
AFTER = ("after forward", "after backward")
SPLIT = ["pipeline=2 shard=2 schedule=zero-bubble", "pipeline=2 shard=2 schedule=zbv"]


@pytest.mark.thin(17)
@pytest.mark.parametrize("cut", [*CUTS, "pipeline=2 shard=2 schedule=zbv"])
def test_zero_1_holds_whole_weights_and_gradients(cut: str) -> None:
    for sizes, moments in run(f"{cut} zero=1"):
        whole, piece = sizes["all"], sizes["all"] // CUTS.get(cut, 2)
        assert held(moments, "weights", *moments) == {whole}
        assert max(held(moments, "gradients", "after backward")) == whole
        assert held(moments, "gradients", "before the optimizer") == {piece}
        assert held(moments, "gradients", "after the step") == {0}
        assert held(moments, "states", *moments) == {2 * piece}
        assert_little_else(sizes, moments)


@pytest.mark.thin(4)
@pytest.mark.parametrize("cut", CUTS)
def test_zero_2_holds_whole_weights_and_pieces_of_gradients(cut: str) -> None:
    for sizes, moments in run(f"{cut} zero=2"):
        whole, piece = sizes["all"], sizes["all"] // CUTS[cut]
        assert held(moments, "weights", "after backward", "before the optimizer") == {whole + piece}
        assert max(held(moments, "weights", "after forward")) == whole + piece
        assert held(moments, "weights", "after the step") == {piece}
        assert max(held(moments, "gradients", *AFTER)) == piece
        assert max(held(moments, "gradients", "inside backward")) <= piece + 2 * sizes["block"] < whole + piece
        assert held(moments, "gradients", "before the optimizer") == {piece}
        assert held(moments, "states", *moments) == {2 * piece}
        assert_little_else(sizes, moments)


@pytest.mark.thin(7)
@pytest.mark.parametrize("cut", CUTS)
def test_zero_3_holds_pieces_of_weights_and_gradients(cut: str) -> None:
    for sizes, moments in run(f"{cut} zero=3"):
        whole, piece = sizes["all"], sizes["all"] // CUTS[cut]
        assert held(moments, "weights", *AFTER, "before the optimizer", "after the step") == {piece}
        inside = max(held(moments, "weights", "inside forward", "inside backward"))
        assert piece + sizes["block"] <= inside <= piece + 2 * sizes["block"] < whole + piece
        assert max(held(moments, "gradients", *AFTER)) == piece
        assert max(held(moments, "gradients", "inside backward")) <= piece + 2 * sizes["block"]
        assert held(moments, "gradients", "before the optimizer") == {piece}
        assert held(moments, "states", *moments) == {2 * piece}
        assert_little_else(sizes, moments)


@pytest.mark.thin(4)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("cut", SPLIT)
def test_between_the_halves_of_a_split_backward(cut: str, zero: int) -> None:
    """The same as for a whole one; only inside of a half a stage is whole."""
    for sizes, moments in run(f"{cut} zero={zero}"):
        whole, piece = sizes["all"], sizes["all"] // 2
        after = (*AFTER, "after the weight half")
        assert max(held(moments, "weights", *after)) == (whole + piece if zero == 2 else piece)
        assert held(moments, "weights", "after the step") == {piece}
        assert max(held(moments, "gradients", *after)) == piece
        assert held(moments, "gradients", "before the optimizer") == {piece}
        assert max(held(moments, "else", *after, "after the step")) < LITTLE * whole


def assert_little_else(sizes: dict[str, int], moments: Moments) -> None:
    """Between micro-batches nothing else of the size of the weights is alive: no gradient hides in a buffer."""
    assert max(held(moments, "else", *AFTER, "after the step")) < LITTLE * sizes["all"]
