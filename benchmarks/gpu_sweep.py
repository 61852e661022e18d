"""Finds shapes that train slower here than in plain PyTorch: each shape by us and by a compiled peer, on one GPU.

    python benchmarks/gpu_sweep.py                    every shape; a table of tokens (or samples) per second, and ratios
    python benchmarks/gpu_sweep.py --shape bert-base --shape "heads of 96" --json

The peer is the same model from transformers (torchvision for ResNet, a plain module for DLRM), compiled as a whole,
with autocast, a fused optimizer and clipping. Each library runs in a process of its own. Several processes compile at
once, but all others are stopped while one is timed; medians of 10 to 12 steps (3 of the longest).
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gpu_peers
import torch

from shardwise.bench import train_step
from shardwise.job import make_job

STEPS, AT_ONCE, TIMEOUT = 10, 3, 280
LONG_STEP = 100_000  # tokens of a step of which a peer takes only five: each may take it ten seconds


def decoder(batch: int, sequence: int, width: int, heads: int, layers: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"width": width, "heads": heads, "kv_heads": heads, "ffn": 4 * width, "layers": layers, "vocab": vocab}
    return {"peer": "llama", "batch": batch, "model": {**gpu_peers.LLAMA, **sizes, "sequence": sequence, **more}}


MOE = {"experts": 16, "experts_per_token": 2, "expert_ffn": 2048}
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": decoder(16, 2048, 1024, 16, 12, 32000),
    "heads of 96": decoder(16, 2048, 1536, 16, 8, 50257),
    "heads of 128": decoder(8, 4096, 2048, 16, 8, 128256),
    "heads of 256": decoder(8, 4096, 2048, 8, 8, 151936),
    "prime vocabulary": decoder(32, 1024, 768, 12, 12, 32003),
    "tiny vocabulary": decoder(64, 1024, 768, 12, 12, 61),
    "batch 1, sequence 512": decoder(1, 512, 1024, 16, 12, 32000),
    "batch 1, sequence 32768": decoder(1, 32768, 1024, 16, 12, 32000),
    "sequence 131072": decoder(1, 131072, 1024, 8, 6, 32000),
    "bert-base": {"peer": "bert", "batch": 64, "model": {"name": "bert-base"}},
    "t5-base": {"peer": "t5", "batch": 64, "model": {"name": "t5"}},
    "resnet-50": {"peer": "resnet", "batch": 256, "model": {"name": "resnet-50"}, "optimizer": {"name": "sgd"}},
    "moe, 16 experts": {**decoder(8, 2048, 1024, 16, 8, 32000, name="moe", **MOE), "peer": "mixtral"},
    "dlrm": {
        "peer": "dlrm", "batch": 16384, "model": {"name": "dlrm", "rows": 200_000}, "optimizer": {"name": "sgd"}
    },
}  # fmt: skip


def make_peer(shape: dict[str, Any]) -> tuple[Callable[[], torch.Tensor], torch.nn.Module, int]:
    """Returns a function that computes the loss, the model, and the tokens (or samples) of a step."""
    import transformers as hf

    batch = shape["batch"]
    m: Any = make_job({"model": shape["model"], "batch": {"samples": batch}}).model
    attention = {"attn_implementation": "sdpa", "use_cache": False}
    with torch.device("cuda"):
        if shape["peer"] == "resnet":
            import torchvision

            model = torchvision.models.resnet50().to(memory_format=torch.channels_last)
            images = torch.randn(batch, 3, m.image_size, m.image_size).to(memory_format=torch.channels_last)
            classes = torch.randint(0, m.num_classes, (batch,))
            compiled = torch.compile(model, dynamic=False)
            return lambda: torch.nn.functional.cross_entropy(compiled(images), classes), model, batch
        if shape["peer"] == "dlrm":
            model = PlainDLRM(m)
            dense = torch.randn(batch, m.dense_features)
            rows = torch.randint(0, min(m.table_rows), (batch, m.tables))
            clicks = torch.randint(0, 2, (batch,)).float()
            compiled = torch.compile(model, dynamic=False)
            bce = torch.nn.functional.binary_cross_entropy_with_logits
            return lambda: bce(compiled(dense, rows), clicks), model, batch
        if shape["peer"] == "t5":
            config = hf.T5Config(  # type: ignore[call-arg]
                d_model=m.width, d_kv=m.head_dim, d_ff=m.ffn, num_layers=m.layers, num_heads=m.heads,
                vocab_size=m.vocab, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
            )  # fmt: skip
            model = hf.T5ForConditionalGeneration(config)
        elif shape["peer"] == "bert":
            config = hf.BertConfig(
                hidden_size=m.width, num_hidden_layers=m.layers, num_attention_heads=m.heads, vocab_size=m.vocab,
                intermediate_size=4 * m.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                max_position_embeddings=m.sequence, **attention,
            )  # fmt: skip
            model = hf.BertForMaskedLM(config)
        else:
            sizes = {
                "hidden_size": m.width, "num_hidden_layers": m.layers, "num_attention_heads": m.heads,
                "num_key_value_heads": m.kv_heads, "vocab_size": m.vocab, "max_position_embeddings": m.sequence,
                "tie_word_embeddings": False, **attention,
            }  # fmt: skip
            if shape["peer"] == "mixtral":
                config = hf.MixtralConfig(  # type: ignore[call-arg]
                    **sizes, intermediate_size=m.expert_ffn, num_local_experts=m.experts,
                    num_experts_per_tok=m.experts_per_token, experts_implementation="grouped_mm",
                )  # fmt: skip
                model = hf.MixtralForCausalLM(config)
            else:
                model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=m.ffn))
        tokens = torch.randint(0, m.vocab - 1, (batch, m.sequence))
        labels = tokens
        if shape["peer"] == "bert":
            labels = torch.where(torch.rand(batch, m.sequence) < m.mlm_probability, tokens, -100)
        if shape["peer"] == "t5":
            labels = torch.randint(0, m.vocab - 1, (batch, m.target_sequence))
        compiled = torch.compile(model.float(), dynamic=False)
        return lambda: compiled(input_ids=tokens, labels=labels).loss, model, batch * m.sequence_length


class PlainDLRM(torch.nn.Module):
    """Tables on the GPU, dot products of all pairs, two MLPs."""

    def __init__(self, m: Any):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(rows, m.width, sparse=True) for rows in m.table_rows)
        pairs = (m.tables + 1) * m.tables // 2
        self.bottom = self.mlp([m.dense_features, *m.bottom, m.width])
        self.top = self.mlp([m.width + pairs, *m.top, 1])
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(m.tables + 1, m.tables + 1, -1))

    @staticmethod
    def mlp(sizes: list[int]) -> torch.nn.Sequential:
        layers = [part for a, b in zip(sizes, sizes[1:]) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers[:-1])

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(rows[:, i]).to(x.dtype) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1).float()


def run_peer(shape: dict[str, Any]) -> dict[str, float]:
    loss_fn, model, tokens = make_peer(shape)
    tables = [p for module in model.modules() if isinstance(module, torch.nn.Embedding) and module.sparse
              for p in module.parameters()]  # fmt: skip
    dense = [p for p in model.parameters() if not any(p is table for table in tables)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=3e-4, fused=True)]
    if shape.get("optimizer", {}).get("name") == "sgd":
        optimizers = [torch.optim.SGD(dense, lr=0.1, momentum=0.9, fused=True)]
    if tables:
        optimizers.append(torch.optim.Adagrad(tables, lr=0.01))

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    long = tokens > LONG_STEP
    for _ in range(1 if long else 4):
        step()
    torch.cuda.synchronize()
    with alone():
        return gpu_peers.timed(step, tokens, **({"steps": 3, "warmup_steps": 1} if long else {}))


def run_ours(shape: dict[str, Any], precision: str) -> dict[str, Any]:
    settings: dict[str, Any] = {key: shape[key] for key in ("model", "optimizer") if key in shape}
    job = make_job({"precision": precision, "batch": {"samples": shape["batch"]}, **settings})
    time_steps = train_step._time_steps

    def timed_alone(*args: Any) -> list[float]:
        with alone():
            return time_steps(*args)

    train_step._time_steps = timed_alone
    report = train_step.bench_step(job, torch.device("cuda"), STEPS)
    return {"tokens_per_second": report.tokens_per_second, "peak_memory_gib": report.peak_memory_gib,
            "graph": report.uses_cuda_graph, "parts": report.time_breakdown}  # fmt: skip


@contextmanager
def alone() -> Iterator[None]:
    """Stops the other processes of the sweep, and their compilers, while this one is timed."""
    folder = Path(os.environ["SWEEP_FOLDER"])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        others = [int(path.name) for path in (folder / "groups").iterdir() if int(path.name) != os.getpgid(0)]
        for group in others:
            send(group, signal.SIGSTOP)
        time.sleep(0.5)
        try:
            yield
        finally:
            for group in others:
                send(group, signal.SIGCONT)


def send(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def end_all(processes: Iterable[subprocess.Popen[str]]) -> None:
    for process in processes:
        send(process.pid, signal.SIGKILL)


def sweep(names: list[str], libraries: list[str]) -> dict[str, dict[str, Any]]:
    waiting = [(name, library) for name in names for library in libraries]
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        groups = Path(folder, "groups")
        groups.mkdir()
        running: dict[tuple[str, str], tuple[subprocess.Popen[str], float]] = {}
        atexit.register(lambda: end_all(process for process, _ in running.values()))
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name, library = task = waiting.pop(0)
                process = subprocess.Popen(
                    [sys.executable, __file__, "--one", name, library], text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                    env={**os.environ, "SWEEP_FOLDER": folder},
                )  # fmt: skip
                (groups / str(process.pid)).touch()
                running[task] = process, time.monotonic()
            time.sleep(0.2)
            for task, (process, begin) in list(running.items()):
                if process.poll() is None and time.monotonic() - begin < TIMEOUT:
                    continue
                send(process.pid, signal.SIGKILL)
                lines = (process.stdout.read() if process.stdout else "").splitlines()
                ended = process.wait()
                result = json.loads(lines[-1]) if ended == 0 and lines else {"problem": f"exit {ended}"}
                results[task[0]][task[1]] = result
                print(task, json.dumps(result), file=sys.stderr, flush=True)
                (groups / str(process.pid)).unlink()
                del running[task]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--library", choices=["ours", "ours, fp8", "peer"], action="append")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one:
        shape, library = SHAPES[options.one[0]], options.one[1]
        with Path(os.environ["SWEEP_FOLDER"], "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one that was being timed when this process started has not stopped it
        try:
            result: dict[str, Any] = (
                run_peer(shape) if library == "peer" else run_ours(shape, "fp8" if "fp8" in library else "bf16")
            )
        except Exception as error:  # noqa: BLE001 - the table says it
            result = {"problem": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(result))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = sweep(options.shape or list(SHAPES), options.library or ["ours", "peer"])
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'shape':26s} {'ours':>12s} {'GiB':>6s} {'peer':>12s} {'GiB':>6s} {'ratio':>6s}")
    for name, row in results.items():
        ours, peer = row.get("ours", {}), row.get("peer", {})
        cells = [f"{one['tokens_per_second']:12,.0f} {one['peak_memory_gib']:6.1f}" if "problem" not in one
                 else f"{one['problem'][:60]:19s}" for one in (ours, peer) if one]  # fmt: skip
        both = all("tokens_per_second" in one for one in (ours, peer))
        ratio = f"{ours['tokens_per_second'] / peer['tokens_per_second']:6.2f}" if both else ""
        print(f"{name:26s} {' '.join(cells)} {ratio}")


if __name__ == "__main__":
    main()
