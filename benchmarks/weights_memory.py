"""Memory of importing and exporting weights: how much more than its share of the model a process ever holds.

    python benchmarks/weights_memory.py --size 8               a Llama of 8 GB in bf16; needs 32 GB of disk in --folder
    python benchmarks/weights_memory.py --size 8 --hf          the same as transformers' own module
    python benchmarks/weights_memory.py --experts 8            a Mixtral instead

A folder of that size is written tensor by tensor. Then
- import: the ranks of a layout build their engine as `shardwise train` does before its first step, then save it;
- start: the ranks of another layout load the weights of that checkpoint, as a run does that starts from a run;
- export: `shardwise export` writes the checkpoint as a folder, whose every tensor must have the bits of the first one.

Nothing is trained, which would take gradients and optimizer states too.
Memory is the peak of RssAnon + RssShmem of each process, sampled every 5 ms. VmHWM would also count pages of mapped
files, which the system can take back at any time. The share is what a rank's float32 weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.world import run_world
from shardwise.job import make_job
from shardwise.layout import Layout
from shardwise.parallel.prepare import prepare
from shardwise.train.checkpoint import CheckpointManager
from shardwise.train.checkpoint_folder import CheckpointGroup
from shardwise.train.export import write_safetensors
from shardwise.train.loop import make_engine
from shardwise.train.run_folder import RunFolder
from shardwise.train.warm_start import load_start, name_step

GB = 1e9
FILE_BYTES = 2 * GB
WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM = 3072, 8192, 24, 8, 128


class PeakMemory:
    """Samples the memory of a process within a `with` block."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes = pid, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, own_bytes(self.pid))


def own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def make_config(size: float, vocab: int, experts: int) -> dict[str, Any]:
    """Returns the config.json of a model of about this size, in GB of bf16."""
    block = WIDTH * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * FFN * max(1, experts) + 2 * WIDTH
    layers = max(1, round((size * GB / 2 - 2 * vocab * WIDTH) / block))
    kind: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if experts:
        kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
        kind |= {"num_local_experts": experts, "num_experts_per_tok": 2, "sliding_window": None}
    return kind | {
        "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "rope_theta": 5e5, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
    }  # fmt: skip


def weight_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (config["vocab_size"], WIDTH)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield f"{name}input_layernorm.weight", (WIDTH,)
        yield f"{name}post_attention_layernorm.weight", (WIDTH,)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{name}self_attn.{part}_proj.weight", (heads * HEAD_DIM, WIDTH)
        yield f"{name}self_attn.o_proj.weight", (WIDTH, HEADS * HEAD_DIM)
        experts = config.get("num_local_experts", 0)
        if experts:
            yield f"{name}block_sparse_moe.gate.weight", (experts, WIDTH)
        for expert in range(max(1, experts)):
            owner = f"{name}block_sparse_moe.experts.{expert}." if experts else f"{name}mlp."
            gate, up, down = ("w1", "w3", "w2") if experts else ("gate_proj", "up_proj", "down_proj")
            yield f"{owner}{gate}.weight", (FFN, WIDTH)
            yield f"{owner}{up}.weight", (FFN, WIDTH)
            yield f"{owner}{down}.weight", (WIDTH, FFN)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (config["vocab_size"], WIDTH)


def write_folder(folder: Path, config: dict[str, Any]) -> int:
    """Writes random weights, one tensor in memory at a time; returns their bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, Tensor]] = [{}]
    for name, shape in weight_shapes(config):
        entry = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        if sum(one.nbytes for one in files[-1].values()) + entry.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = entry
    places: dict[str, str] = {}
    for number, entries in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        values = (torch.empty_like(entry, device="cpu").normal_(0, 0.02) for entry in entries.values())
        write_safetensors(folder / name, entries, values)
        places |= dict.fromkeys(entries, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(entry.nbytes for entries in files for entry in entries.values())


def make_run_job(run: Path, layout: str, model: dict[str, Any]) -> Any:
    return make_job({
        "model": model, "layout": layout, "precision": "bf16", "steps": 1, "batch": {"samples": 4},
        "data": {"source": "synthetic", "samples": 64}, "run": {"folder": str(run), "device": "cpu"},
    })  # fmt: skip


def load_rank(job: Any, save_to: str) -> dict[str, float]:
    """One rank: what `train` does before the first step; then saves a checkpoint if asked to."""
    begin = time.perf_counter()
    with PeakMemory(os.getpid()) as memory:
        engine = make_engine(prepare(job, Layout.parse(job.layout)), torch.device("cpu"))
        optimizer = engine.make_optimizer(job)
        load_start(job, engine, optimizer, CheckpointGroup.create())
    seconds = time.perf_counter() - begin
    if save_to:
        CheckpointManager(Path(save_to), 1, asynchronous=False).save(1, engine, optimizer, {"seed": job.seed})
    share = sum(shard.tensor.nbytes for shard in engine.param_shards)
    return {"share": share, "peak": memory.bytes, "seconds": seconds}


def measure_ranks(job: Any, save_to: Path | None) -> list[dict[str, float]]:
    return run_world(load_rank, Layout.parse(job.layout).world, job, str(save_to or ""), timeout=3600.0)


def measure_export(run: Path, out: Path) -> tuple[int, float]:
    begin = time.perf_counter()
    command = subprocess.Popen([sys.executable, "-m", "shardwise", "export", str(run), str(out)])
    with PeakMemory(command.pid) as memory:
        assert command.wait() == 0
    return memory.bytes, time.perf_counter() - begin


def compare(one: Path, other: Path) -> int:
    """Returns the number of tensors of the folders; raises AssertionError if one differs in a bit."""
    from shardwise.models.pretrained import open_folder

    first, second = open_folder(one, ""), open_folder(other, "")
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())[:3]
    for name, entry in first.items():
        assert torch.equal(entry[:].view(torch.int16), second[name][:].view(torch.int16)), name
    return len(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=8.0, help="GB of the folder, in bf16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--hf", action="store_true", help="as transformers' own module")
    parser.add_argument("--layout", default="shard=2 zero=3")
    parser.add_argument("--second-layout", default="tensor=2 shard=1")
    parser.add_argument("--skip-start", action="store_true", help="do not start from the run: it takes longest")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    Path("/proc/self/oom_score_adj").write_text("1000")  # rather this than another process of the machine
    place = Path(tempfile.mkdtemp(prefix="weights-memory-", dir=args.folder))
    try:
        base, run = place / "base", place / "run"
        size = write_folder(base, make_config(args.size, args.vocab, args.experts))
        print(f"folder: {size / GB:.2f} GB", flush=True)
        model = {"name": f"hf:{base}"} if args.hf else {"weights": str(base)}
        job = make_run_job(run, args.layout, model | {"sequence": 64})
        folder = RunFolder.create(job)
        show("import", args.layout, measure_ranks(job, folder.checkpoints))
        if not args.skip_start:
            start = {**({"name": f"hf:{base}"} if args.hf else {}), "weights": str(run)}
            job = name_step(make_run_job(place / "second", args.second_layout, start))
            show("start from a run", args.second_layout, measure_ranks(job, None))
        peak, seconds = measure_export(run, place / "out")
        print(f"export: peak {peak / GB:.2f} GB, {seconds:.0f} s", flush=True)
        print(f"compared: {compare(base, place / 'out')} tensors, bit by bit the same")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def show(what: str, layout: str, ranks: list[dict[str, float]]) -> None:
    for number, rank in enumerate(ranks):
        over = rank["peak"] - rank["share"]
        figures = f"share {rank['share'] / GB:.2f} GB, peak {rank['peak'] / GB:.2f} GB, over {over / GB:.2f} GB"
        print(f"{what} ({layout}), rank {number}: {figures}, {rank['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
