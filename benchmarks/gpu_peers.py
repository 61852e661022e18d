"""Compares the training step with other libraries on one GPU: same shapes, random tokens, random weights.

    python benchmarks/gpu_peers.py                     1.5b and 3.6b with every installed library
    python benchmarks/gpu_peers.py --shape 1.5b --json

bf16 compute with float32 weights and Adam state, gradient clipping; medians of 12 steps (3 for very long steps) after 5
warmup steps. Libraries that are not installed are listed as such; on out-of-memory, smaller batches are tried.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch

from shardwise.bench.train_step import bench_step
from shardwise.cluster import GIB
from shardwise.job import make_job

LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "tied": False, "vocab": 128256}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {**LLAMA, "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "sequence": 8192},
    "3.6b": {**LLAMA, "layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "sequence": 8192},
    "8b": {**LLAMA, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "sequence": 8192},
}
SHAPES["gpt2"] = SHAPES["gpt2-16"] = {"name": "gpt2", "vocab": 50257, "sequence": 1024}
SHAPES["1.5b-128k"] = {**SHAPES["1.5b"], "sequence": 131072}
SHAPES["1.5b-moe"] = {**SHAPES["1.5b"], "name": "moe", "experts": 8, "experts_per_token": 2, "expert_ffn": 4096}
BATCH = {"gpt2": 64, "gpt2-16": 16, "1.5b": 4, "3.6b": 2, "8b": 1, "1.5b-128k": 1, "1.5b-moe": 4}
# Settings that a shape needs to fit in memory.
MEMORY_SETTINGS: dict[str, dict[str, Any]] = {
    "8b": {"optimizer": {"state_dtype": "bf16"}},
    "1.5b-128k": {"layout": "recompute=full"},
}
STEPS, WARMUP_STEPS = 12, 5
FEWER_STEPS = {"1.5b-128k": 3}  # for shapes whose steps take many seconds
ONLY_BF16 = ("8b", "1.5b-128k", "1.5b-moe")


def ours(shape: str, batch: int, precision: str) -> dict[str, float]:
    job = make_job(
        {"precision": precision, "model": SHAPES[shape], "batch": {"samples": batch}, **MEMORY_SETTINGS.get(shape, {})}
    )
    report = bench_step(job, torch.device("cuda"), FEWER_STEPS.get(shape, STEPS))
    return {"tokens_per_second": report.tokens_per_second, "peak_memory_gib": report.peak_memory_gib,
            "flops": report.flops_per_second, "mfu": report.mfu, "parts": report.time_breakdown}  # type: ignore[dict-item]  # fmt: skip


def hugging_face(shape: str, batch: int, liger: bool) -> dict[str, float]:
    """Runs transformers' Llama, compiled block by block, or with Liger's fused operators and head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    s = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=s["width"], intermediate_size=s["ffn"], num_hidden_layers=s["layers"], vocab_size=s["vocab"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], max_position_embeddings=s["sequence"],
        tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",  # type: ignore[call-arg]
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).float()
    if not liger:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, s["vocab"], (batch, s["sequence"]), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, batch * s["sequence"])


def gpt2(shape: str, batch: int, vocab: int) -> dict[str, float]:
    """Runs transformers' GPT-2, compiled as a whole; a vocabulary of 50,304 is padded by hand."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa"  # type: ignore[call-arg]
    )  # fmt: skip
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled = torch.compile(model, dynamic=False)
    tokens = torch.randint(0, SHAPES[shape]["vocab"], (batch, SHAPES[shape]["sequence"]), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, tokens.numel())


def torchtitan(shape: str, batch: int, liger: bool) -> dict[str, float]:
    """Runs torchtitan's Llama 3 as its trainer does on one device: compiled blocks and loss, autocast, fused AdamW; or
    with Liger's fused head and loss. Packages that its data loaders import may be missing, since no data is loaded."""
    for name in ("datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader", "tyro", "einops",
                 "torch.utils.tensorboard"):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError:
            stub: Any = types.ModuleType(name)
            stub.__path__, stub.constructors, stub.conf = [], MagicMock(), MagicMock()
            for used in ("Dataset", "load_dataset", "split_dataset_by_node", "StatefulDataLoader", "SummaryWriter"):
                setattr(stub, used, type(used, (), {}))
            sys.modules[name] = stub
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    s = SHAPES[shape]
    arguments = TransformerModelArgs(
        dim=s["width"], n_layers=s["layers"], n_heads=s["heads"], n_kv_heads=s["kv_heads"], vocab_size=s["vocab"],
        max_seq_len=s["sequence"], ffn_dim_multiplier=(s["ffn"] - 0.5) / int(8 * s["width"] / 3), rope_theta=500000,
    )  # fmt: skip
    with torch.device("meta"):
        model = Transformer(arguments)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))
    assert model.layers["0"].feed_forward.w1.weight.shape[0] == s["ffn"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, s["vocab"], (batch, s["sequence"]), device="cuda")
    count = float(tokens.numel())
    loss_fn = torch.compile(cross_entropy_loss)
    if liger:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused, head = LigerFusedLinearCrossEntropyLoss(reduction="sum"), model.output.weight
        model.output = torch.nn.Identity()

        def loss_fn(x, y):  # type: ignore[no-untyped-def]
            return fused(head, x.flatten(0, 1), y.flatten(0, 1))

    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn(model(tokens), tokens) / count
        loss.backward()
        clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return timed(step, tokens.numel())


def timed(
    step: Callable[[], None], tokens: int, steps: int = STEPS, warmup_steps: int = WARMUP_STEPS
) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(warmup_steps):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    seconds = statistics.median(a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:]))
    return {"tokens_per_second": tokens / seconds, "peak_memory_gib": torch.cuda.max_memory_allocated() / GIB}


Peers = dict[str, tuple[str, Callable[[str, int], dict[str, float]]]]
PEERS: Peers = {
    "transformers": ("transformers", lambda shape, batch: hugging_face(shape, batch, liger=False)),
    "transformers + liger": ("liger_kernel", lambda shape, batch: hugging_face(shape, batch, liger=True)),
    "torchtitan": ("torchtitan", lambda shape, batch: torchtitan(shape, batch, liger=False)),
    "torchtitan + liger": ("torchtitan", lambda shape, batch: torchtitan(shape, batch, liger=True)),
}
GPT2_PEERS: Peers = {
    "transformers": ("transformers", lambda shape, batch: gpt2(shape, batch, 50257)),
    "transformers, 50,304": ("transformers", lambda shape, batch: gpt2(shape, batch, 50304)),
}


def attempt(run: Callable[[str, int], dict[str, float]], shape: str) -> dict[str, Any]:
    """Runs a shape, halving the batch on out-of-memory."""
    batch = BATCH[shape]
    while batch:
        try:
            return {"batch": batch, **run(shape, batch)}
        except torch.cuda.OutOfMemoryError:
            batch //= 2
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    return {"problem": "out of memory"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["ours", "peers"])
    parser.add_argument("--peer", choices=[*PEERS, *GPT2_PEERS], action="append", help="only these peers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA GPU.\n")
    results: dict[str, dict[str, Any]] = {}
    for shape in options.shape or ["1.5b", "3.6b"]:
        rows: dict[str, Any] = {}
        if options.only != "peers":
            for precision in ("bf16",) if shape in ONLY_BF16 else ("bf16", "fp8"):
                rows[f"shardwise, {precision}"] = attempt(lambda s, b, p=precision: ours(s, b, p), shape)
        if options.only != "ours":
            for name, (module, run) in (GPT2_PEERS if shape.startswith("gpt2") else PEERS).items():
                if options.peer and name not in options.peer:
                    continue
                installed = importlib.util.find_spec(module) is not None
                if "experts" in SHAPES[shape]:
                    rows[name] = {"problem": "this script does not run it with experts"}
                else:
                    rows[name] = attempt(run, shape) if installed else {"problem": "not installed"}
        results[shape] = rows
        if not options.json:
            show(shape, rows)
    if options.json:
        print(json.dumps(results))


def show(shape: str, rows: dict[str, Any]) -> None:
    versions = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    for module in ("transformers", "liger_kernel"):
        if importlib.util.find_spec(module):
            versions += f", {module} {importlib.metadata.version(module)}"
    print(f"\n{shape}, batch {BATCH[shape]}, sequence {SHAPES[shape]['sequence']} ({versions})")
    best = max((row["tokens_per_second"] for name, row in rows.items()
                if "problem" not in row and not name.startswith("shardwise")), default=None)  # fmt: skip
    for name, row in rows.items():
        if "problem" in row:
            print(f"  {name:22s} {row['problem']}")
            continue
        ratio = f"  {row['tokens_per_second'] / best:.2f}x the fastest peer" if best else ""
        batch = f" at batch {row['batch']}" if row["batch"] != BATCH[shape] else ""
        print(
            f"  {name:22s} {row['tokens_per_second']:9,.0f} tokens/s  {row['peak_memory_gib']:6.1f} GiB{batch}{ratio}"
        )
        if "flops" in row:
            print(f"      {row['flops'] / 1e12:.0f} model TFLOP/s, {100 * row['mfu']:.0f}% MFU")
        for part, seconds in row.get("parts", {}).items():
            print(f"      {part:16s} {1e3 * seconds:8.1f} ms")


if __name__ == "__main__":
    main()
