"""Worlds whose tensors lie on a GPU that their processes share. Skipped where there is none; what they stage through
the host is tested everywhere."""

import gc
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nccl_ranks import train_over_nccl

from shardwise.comm import collectives
from shardwise.comm.collectives import Axis, all_gather_json
from shardwise.comm.world import run_world
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.optim import adamw
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.prepare import prepare
from shardwise.step import make_step_fn, step
from shardwise.verify import parity
from shardwise.verify.parity import verify

JOB = """
steps = 4
precision = "float64"
compile = false
[model]
layers = 4
width = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 61
sequence = 16
dropout = 0.1
[data]
source = "synthetic"
samples = 64
[batch]
samples = 8
[checkpoint]
every = 0
"""
EXPERTS = ["model.name=moe", "model.experts=4", "model.expert_ffn=24"]
LAYOUTS = [
    ("tensor=2", []),
    ("pipeline=2", []),
    ("shard=2 zero=3", []),
    ("replicate=2", []),
    ("pipeline=2 tensor=2", []),
    ("pipeline=2 shard=2 zero=3 schedule=interleaved virtual=2", []),
    ("shard=2 tensor=2 zero=2", []),
    ("shard=2 expert=2", EXPERTS),
    ("shard=4 expert=2 zero=3", [*EXPERTS, "model.experts=2"]),
    ("replicate=4", []),
    ("replicate=2 tensor=2", []),
    ("context=2 tensor=2", []),
    ("context=2 pipeline=2 context_method=ulysses", []),
]
NCCL_LAYOUTS = [
    ("replicate=2", []),
    ("shard=2 zero=3", []),
    ("context=2 micro_batch=2", []),
    ("tensor=2", []),
    ("pipeline=2 shard=2 schedule=interleaved virtual=2", []),
    ("pipeline=2 tensor=2 schedule=zero-bubble", []),
    ("replicate=2 shard=2 zero=2", []),
    ("shard=4 expert=4", EXPERTS),
    ("pipeline=4 schedule=1f1b", []),
    ("pipeline=2 shard=2 tensor=2", []),
    ("shard=8 zero=3", []),
]
CLICKS = """
steps = 4
precision = "float64"
[model]
name = "dlrm"
tables = 5
rows = 400
width = 8
bottom = [16]
top = [16]
[data]
source = "synthetic"
samples = 64
[batch]
samples = 16
[checkpoint]
every = 0
"""


def losses(folder: Path, device: str, layout: str, settings: list[str], job: str = JOB) -> list[tuple[float, float]]:
    (folder / "job.toml").write_text(job)
    run = folder / f"{device}-{layout.replace(' ', '-')}"
    asked = [f"run.device={device}", f"run.folder={run}", "run.processes=4", f"layout={layout}", *settings]
    command = [sys.executable, "-m", "shardwise", "train", str(folder / "job.toml")]
    done = subprocess.run(
        [*command, *(word for setting in asked for word in ("--set", setting))], capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("layout", "settings"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
def test_processes_that_share_a_gpu_compute_what_one_cpu_does(layout, settings, tmp_path):
    expected = losses(tmp_path, "cpu", "replicate=1", settings)
    found = losses(tmp_path, "cuda", layout, settings)
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("number", range(len(NCCL_LAYOUTS)), ids=[layout for layout, _ in NCCL_LAYOUTS])
def test_a_run_of_several_nccl_ranks_ends_once(number, tmp_path):
    """A rank leaves only when what it queued has arrived; otherwise its peers would wait for it and start again."""
    layout, settings = NCCL_LAYOUTS[number]
    expected = losses(tmp_path, "cpu", "replicate=1", settings)

    asked = [f"layout={layout}", *settings]
    run = train_over_nccl(tmp_path / "job.toml", Layout.parse(layout).world, 29600 + 10 * number, asked)
    print(f"{layout}: {run.seconds_after_last_step:.2f} s from the last step to the end")  # shown by -rP

    assert set(run.exit_codes) == {0}, run.output
    kinds = [event["event"] for event in run.events]
    assert kinds.count("finished") == 1 and "resumed" not in kinds, kinds
    assert not any("restart" in event for event in run.events), run.events
    found = [(record["loss"], record["grad_norm"]) for record in run.records if "loss" in record]
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lora", [False, True])
def test_what_a_bf16_run_exports_is_checked(lora, tmp_path):
    adapters = "\nlora = { rank = 4, alpha = 8 }" if lora else ""
    (tmp_path / "job.toml").write_text(
        f'steps = 2\nprecision = "bf16"\n[model]\nname = "hf:qwen3"\nsequence = 32{adapters}\n'
        "[model.args]\nhidden_size = 64\nintermediate_size = 96\nnum_hidden_layers = 2\nnum_attention_heads = 4\n"
        "num_key_value_heads = 2\nhead_dim = 16\nvocab_size = 256\n"
        '[batch]\nsamples = 4\n[run]\nfolder = "run"\ndevice = "cuda"\n'
    )
    outputs = []
    for words in (["train", "job.toml"], ["merge" if lora else "export", "run", "out", "--check"]):
        command = [sys.executable, "-m", "shardwise", *words]
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert "its logits differ from the run's by" in outputs[-1]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["replicate=1", "shard=2", "replicate=2"])
def test_tables_beside_or_on_a_gpu_train_as_on_a_cpu(layout, device, tmp_path):
    expected = losses(tmp_path, "cpu", "replicate=1", [], CLICKS)
    found = losses(tmp_path, "cuda", layout, [f"embedding_tables.device={device}"], CLICKS)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "layout", ["recompute=full", "recompute=selective", "recompute=0.5", "tensor=2 recompute=full"]
)
def test_compiled_blocks_that_are_recomputed_compute_what_one_cpu_does(layout, tmp_path):
    expected = losses(tmp_path, "cpu", "replicate=1", [])
    found = losses(tmp_path, "cuda", layout, ["compile=true"])
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_selective_recomputation_repeats_no_matmul_of_experts():
    """They are one kernel for all experts on a GPU, another operator than elsewhere."""
    model = {"name": "moe", "layers": 2, "width": 64, "heads": 4, "vocab": 128, "sequence": 64,
             "experts": 4, "experts_per_token": 2, "expert_ffn": 64}  # fmt: skip
    job = make_job({"model": model, "precision": "bf16", "compile": False, "batch": {"samples": 4}})

    def matmuls(recompute: str) -> tuple[int, float]:
        engine = parallelize(prepare(job, Layout(recompute=recompute)), torch.device("cuda"))
        batch = SampleStream(synthetic_source(job, 4), 0).read(rank_positions(0, 4, 1, 0)).to("cuda")
        with torch.profiler.profile() as profiler:
            loss = float(step(engine, engine.make_optimizer(job), batch, 1.0).loss)
        kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(
            any(word in kernel.name.lower() for word in ("gemm", "cutlass", "nvjet")) for kernel in kernels
        ), loss

    assert matmuls("selective") == matmuls("none")
    assert matmuls("full")[0] > matmuls("none")[0]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_a_sequence_cut_over_ranks_goes_through_the_gpus_kernels(way, tmp_path):
    narrow = ["precision=bf16", "model.width=128", "model.sequence=256", "model.dropout=0"]
    expected = losses(tmp_path, "cuda", "replicate=1", narrow)
    found = losses(tmp_path, "cuda", f"context=2 context_method={way}", narrow)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-2)


@pytest.mark.thin(2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="computes on CPU processes, forked from one that uses CUDA")
@pytest.mark.parametrize(
    "layout",
    [
        "tensor=2 recompute=selective",
        "shard=2 zero=3",
        "shard=2 expert=2",
        "pipeline=2 shard=2 schedule=zbv",
        "replicate=2",
    ],
)
def test_what_travels_through_the_host_arrives(layout, monkeypatch):
    monkeypatch.setattr(parity, "run_world", partial(run_world, backend="host_staged"))
    model = {"layers": 4, "width": 16, "heads": 2, "vocab": 31, "sequence": 8}
    experts = {"name": "moe", "experts": 4, "expert_ffn": 24} if "expert" in layout else {}
    job = make_job({"precision": "float64", "batch": {"samples": 8}, "model": {**model, **experts}})
    (record,) = verify(job, [Layout.parse(layout)])
    assert record.ok, record.describe()


def refused_tensors() -> list[str]:
    matrix = torch.ones(4, 4)
    wrong = [(matrix.t()[:2], "SUM"), (matrix.short(), "SUM"), (matrix.int(), "BXOR"), (matrix.int(), "MAX")]
    problems = []
    for tensor, operation in wrong:
        try:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
            problems.append("")
        except ValueError as error:
            problems.append(str(error))
    return problems


@pytest.mark.skipif(torch.cuda.is_available(), reason="computes on CPU processes, forked from one that uses CUDA")
def test_processes_that_share_a_gpu_are_refused_what_nccl_refuses():
    for strides, dtype, operation, fine in run_world(refused_tensors, 2, backend="host_staged"):
        assert "contiguous" in strides and "torch.int16" in dtype and "BXOR" in operation and not fine


def call_every_collective() -> dict[str, float]:
    """Calls through NCCL what layouts call: every collective, with the dtypes and reductions that they use."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda")
    axis = Axis(2, 0, dist.group.WORLD)  # of a size that calls NCCL; its group has one rank
    worst = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        x = torch.arange(24, device=device).to(dtype).view(4, 6)
        out = torch.empty_like(x)
        results = {}
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            y = x.clone()
            collectives.all_reduce(y, operation, axis=axis)
            results[f"all_reduce {operation}"] = y
        collectives.all_reduce_coalesced([y := x.clone()], axis)
        results["all_reduce_coalesced"] = y
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            args = (out, x) if name != "all_to_all" else (out, x, [4], [4])
            getattr(collectives, name)(*args, axis=axis)
            results[name] = out.clone()
        dist.broadcast(y := x.clone(), 0)
        results["broadcast"] = y
        sent = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, out.zero_(), 0)]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        results["send and receive"] = out.clone()
        if dtype.is_floating_point:
            for name in ("all_gather_with_grad", "reduce_scatter_with_grad"):
                z = x.clone().requires_grad_()
                (y := getattr(collectives, name)(z, 0, axis)).backward(x)
                results |= {name: y.detach(), f"{name}: gradient": z.grad}
            z = x.clone().requires_grad_()
            collectives.all_to_all_with_grad(z, [4], [4], axis).backward(x)
            results["all_to_all_with_grad: gradient"] = z.grad
        worst |= {f"{name} {dtype}": float((y.double() - x.double()).abs().max()) for name, y in results.items()}
    worst["objects"] = float(all_gather_json({"a": [1, None]}) != [{"a": [1, None]}])
    dist.barrier()
    return worst


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_collective_goes_through_nccl():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) > 50 and set(differences.values()) == {0.0}, differences


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["gpt", "gpt, nf4", "gpt, dpo", "hf:llama", "bert", "resnet-50", "t5", "moe"])
def test_the_commands_a_user_types(model, tmp_path):
    """Trains with the defaults of a GPU (compiled blocks, CUDA graph), resumes and benchmarks."""
    model, _, way = model.partition(", ")
    data = 'source = "synthetic"\n'
    if way == "dpo":
        pairs = [{"prompt": f"Say {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no"} for n in range(64)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        data = 'source = "chat"\npath = "pairs.jsonl"\n[loss]\ndpo_beta = 0.3\n'
    sizes = {
        "hf:llama": "sequence = 128\nargs = {num_hidden_layers = 2, hidden_size = 128, intermediate_size = 256, "
        "num_attention_heads = 2, num_key_value_heads = 2, vocab_size = 512}",
        "resnet-50": "image_size = 64",
    }.get(model, "sequence = 128\nlayers = 2\nwidth = 128\nheads = 2\nvocab = 512")
    sizes += '\nlora = {rank = 4, quantize = "nf4"}' if way == "nf4" else ""
    (tmp_path / "job.toml").write_text(
        f'precision = "bf16"\nsteps = 12\n[model]\nname = "{model}"\n{sizes}\n[data]\n{data}'
        '[batch]\nsamples = 8\n[checkpoint]\nevery = 6\n[run]\nfolder = "run"\n'
    )

    def call(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *command], cwd=tmp_path, text=True, capture_output=True, timeout=300
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stdout

    call("train", "job.toml")
    call("train", "--resume", "run", "--set", "steps=16")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert rows[-1]["gpu_power"] > 10 and rows[-1]["gpu_temperature"] > 10 and 0 <= rows[-1]["gpu_utilization"] <= 100
    assert "ms per step" in call("bench", "step", "job.toml")
    if model == "gpt":
        call("calibrate", "--out", "here.toml")
        assert torch.cuda.get_device_name().split()[-1] in (tmp_path / "here.toml").read_text()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", ["pipeline=1", "replicate=2", "shard=2 zero=3", "pipeline=2", "tensor=2"])
@pytest.mark.parametrize("compiled", ["false", "auto"])
def test_the_parts_of_a_step_add_up_on_a_gpu(layout, compiled, tmp_path):
    (tmp_path / "job.toml").write_text(JOB.replace('"float64"', '"bf16"').replace("compile = false\n", ""))
    world = Layout.parse(layout).world
    settings = [f"compile={compiled}", "steps=12", "model.width=256", "model.sequence=256", f"run.processes={world}"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "job.toml", "--layout", layout, "--set", "run.folder=run",
         *[part for setting in settings for part in ("--set", setting)]],
        cwd=tmp_path, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record in records[6:]:
        parts = record["phase_seconds"] | {
            f"wait_seconds {axis}": value for axis, value in record.get("wait_seconds", {}).items()
        }
        assert sum(parts.values()) == pytest.approx(record["seconds"], rel=1e-3)
        assert min(parts.values()) > -0.01 * record["seconds"], parts
        assert parts["compute"] > 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "ranks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13)) and len(rows[-1]["seconds"]) == world
    if world > 1:
        assert any(rows[-2]["wait_seconds"].values())
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fault", ["none", "sgd", "another thread pins memory", "the host reads a value"])
def test_steps_with_and_without_a_graph_give_the_same_numbers(fault):
    model = {"layers": 2, "width": 64, "heads": 2, "vocab": 61, "sequence": 32, "tied": True}
    job = make_job({"precision": "bf16", "compile": False, "sdpa_backend": "math", "model": model,
                    "batch": {"samples": 4}, "optimizer": {"name": "sgd" if fault == "sgd" else "adamw"}})  # fmt: skip
    batches = SampleStream(synthetic_source(job, 64), 0)
    done, told = {}, []
    for graph in (False, True):
        engine = parallelize(prepare(job, Layout()), torch.device("cuda"))
        optimizer, stop = engine.make_optimizer(job), threading.Event()
        take = make_step_fn(engine, optimizer, 1.0, graph, on_capture_failure=told.append)
        if fault == "the host reads a value":
            engine.chains[0].register_forward_hook(lambda module, args, out: float(out.detach()) and None)

        def pin(stop=stop):
            while not stop.is_set():
                torch.empty(1 << 20).pin_memory()

        thread = threading.Thread(target=pin)
        if fault == "another thread pins memory":
            thread.start()
        try:
            samples = [batches.read(rank_positions(number, 4, 1, 0)).to(torch.device("cuda")) for number in range(8)]
            done[graph] = []
            for number, batch in enumerate(samples):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (number + 1)  # which a graph must read
                result = take(batch)
                done[graph].append((result.loss.item(), result.grad_norm.item()))
        finally:
            stop.set()
            if thread.ident:
                thread.join()
        if graph:
            assert (take.graph is None) == (fault == "the host reads a value"), told
    for one, other in zip(done[True], done[False], strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert len(told) == (fault == "the host reads a value")
    assert all("capture" in sentence and sentence.endswith(".") for sentence in told)
    torch.randn(1 << 20, device="cuda").sum().item()  # the device and its allocator work on


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("state_dtype", ["float32", "bf16"])
@pytest.mark.parametrize("graph", [False, True])
def test_moments_in_host_memory_give_the_same_weights(state_dtype, graph, monkeypatch):
    monkeypatch.setattr(adamw, "PART", 1000)  # so that weights are updated in several parts
    model = {"layers": 2, "width": 64, "heads": 2, "vocab": 61, "sequence": 32}
    weights = {}
    for offloads in (False, True):
        settings = {"precision": "bf16", "compile": False, "sdpa_backend": "math", "batch": {"samples": 4}}
        optimizer = {"offload": offloads, "state_dtype": state_dtype}
        job = make_job({**settings, "model": model, "optimizer": optimizer})
        batches = SampleStream(synthetic_source(job, 64), 0)
        engine = parallelize(prepare(job, Layout()), torch.device("cuda"))
        optimizer = engine.make_optimizer(job)
        take = make_step_fn(engine, optimizer, 1.0, graph)
        for number in range(8):
            take(batches.read(rank_positions(number, 4, 1, 0)).to(torch.device("cuda")))
        assert {str(state["exp_avg"].device) for state in optimizer.state.values()} == {"cpu" if offloads else "cuda:0"}
        assert not graph or take.graph is not None
        torch.cuda.synchronize()
        weights[offloads] = {shard.name: shard.tensor.cpu() for shard in engine.param_shards}
    for name, weight in weights[False].items():
        assert torch.equal(weights[True][name], weight), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", ["recompute=none", "recompute=full", "micro_batch=2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_activations_in_host_memory_give_the_same_weights(words: str, compiled: bool) -> None:
    model = {"layers": 8, "width": 512, "heads": 8, "vocab": 1024, "sequence": 1024}
    weights, peaks = {}, {}
    for offloads in (False, True):
        settings = {"precision": "bf16", "compile": compiled, "offload_activations": offloads, "model": model}
        job = make_job({**settings, "batch": {"samples": 8}})
        batches = SampleStream(synthetic_source(job, 64), 0)
        engine = parallelize(prepare(job, Layout.parse(words)), torch.device("cuda"))
        optimizer = engine.make_optimizer(job)
        before = torch.cuda.memory_allocated()
        for number in range(5):
            if number == 2:  # the first steps compile
                torch.cuda.reset_peak_memory_stats()
            step(engine, optimizer, batches.read(rank_positions(number, 8, 1, 0)).to(torch.device("cuda")), 1.0)
        peaks[offloads] = torch.cuda.max_memory_allocated() - before
        weights[offloads] = {shard.name: shard.tensor.cpu() for shard in engine.param_shards}
        del engine, optimizer
        gc.collect()
    for name, weight in weights[False].items():
        assert torch.equal(weights[True][name], weight), name
    assert peaks[True] < (1.0 if "full" in words else 0.7) * peaks[False], peaks


if __name__ == "__main__":
    print(json.dumps(call_every_collective()))
