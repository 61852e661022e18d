"""Compares four ways to train one model data-parallel on CIFAR-10 with four processes:

    all-reduce           all-reduces gradients in every step (`layout replicate=4`)
    local SGD            averages weights every 20 steps (`local_sgd.every=20`)
    server, sync         a parameter server sums all gradients in every step
    server, async        a parameter server applies gradients as they arrive, with a staleness of at most 2 rounds

Bytes sent are those of gradients and weights. With all-reduce, batch norm statistics cover the global batch, so the
result equals that of one device; with a server each rank uses the statistics of its own images. Without --data, the
script generates images in CIFAR-10's format: a noisy wave pattern per class, easier than photographs.

Run: python examples/cifar10/compare.py [--data FOLDER] [--steps 100]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from async_server import ParameterServerWorker
from torch import Tensor

from shardwise.comm.world import run_world
from shardwise.data.images import TEST_FILE, TRAIN_FILES, SyntheticImages
from shardwise.data.make_sources import make_sources
from shardwise.data.sample_stream import SampleStream, rank_positions
from shardwise.errors import JobError
from shardwise.job import Job, load_job
from shardwise.models.chain import init_weights
from shardwise.models.resnet import ClassifierHead

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))
import allreduce  # noqa: E402
from allreduce import push_pull_schedule  # noqa: E402

RANKS, EVERY, STALENESS = 4, 20, 2
WARMUP_STEPS = 3  # not timed


def generate(folder: Path, per_file: int = 600) -> None:
    """Writes six files in CIFAR-10's binary format."""
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        source = SyntheticImages(per_file, 32, 10, seed=0, first_index=number * per_file)
        images, classes = source.read_images(np.arange(per_file))
        pixels = (images * 48 + 128).clip(0, 255).astype(np.uint8).reshape(per_file, -1)
        (folder / f"{name}.bin").write_bytes(np.hstack([classes[:, None].astype(np.uint8), pixels]).tobytes())


def train(settings: list[str]) -> tuple[float, float]:
    """Returns the steps per second and the accuracy of `shardwise train`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardwise", "train", str(HERE / "compare.toml"), "--layout", "replicate=4"]
        for setting in (*settings, f"run.folder={folder}/run", "run.device=cpu"):
            command += ["--set", setting]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if result.returncode:
            raise JobError(result.stderr.strip())
        files = (Path(folder, "run", name).read_text().splitlines() for name in ("metrics.jsonl", "events.jsonl"))
        metrics, events = ([json.loads(line) for line in lines] for lines in files)
    times = [record["seconds"] for record in metrics[WARMUP_STEPS:]]
    return len(times) / sum(times), next(event["accuracy"] for event in events[::-1] if "accuracy" in event)


def train_with_server(job: Job, asynchronous: bool) -> tuple[float, float]:
    """Trains one rank with a parameter server on rank 0; returns steps per second and accuracy."""
    rank = torch.distributed.get_rank()
    training, held_out, _ = make_sources(job)
    stream = SampleStream(training, job.seed)
    model = job.family.build(job.model, job.seed)
    init_weights(model, job.seed)
    weights = torch.cat([weight.detach().view(-1) for weight in model.parameters()])
    settings = job.optimizer
    optimizers: list[torch.optim.Optimizer] = []

    def update(parameters: Tensor, gradient: Tensor) -> None:
        if not optimizers:  # asynchronous servers make one update per rank and step
            lr = settings.lr / (RANKS if asynchronous else 1)
            optimizers.append(torch.optim.AdamW([parameters], lr, settings.betas, settings.eps, weight_decay=0.0))
        parameters.grad = gradient
        optimizers[0].step()

    worker = ParameterServerWorker(weights, update, 1, STALENESS, job.total_steps) if asynchronous else None
    begin = time.perf_counter()
    for number in range(job.total_steps):
        if number == WARMUP_STEPS:
            begin = time.perf_counter()
        samples = stream.read(rank_positions(number, job.samples, RANKS, rank))
        (model(samples.tokens, targets=samples.targets) / len(samples.targets)).backward()
        gradient = torch.cat([weight.grad.view(-1) for weight in model.parameters()])
        if worker is not None:
            worker.push_pull(gradient)
        else:
            allreduce.run_schedule(gradient, partial(push_pull_schedule, servers=1), "server")
            update(weights, gradient / RANKS)
        load_weights(weights, model)
    if worker is not None:
        worker.join()
        if worker.server is not None:
            load_weights(worker.server.weights, model)
    rate = (job.total_steps - WARMUP_STEPS) / (time.perf_counter() - begin)
    return rate, accuracy(model, SampleStream(held_out, job.seed, shuffle=False), job)


@torch.no_grad()
def load_weights(weights: Tensor, model: torch.nn.Module) -> None:
    parts = weights.split([weight.numel() for weight in model.parameters()])
    for weight, part in zip(model.parameters(), parts, strict=True):
        weight.copy_(part.view_as(weight))
        weight.grad = None


@torch.no_grad()
def accuracy(model: torch.nn.Module, stream: SampleStream, job: Job) -> float:
    count = min(job.validation.samples, len(stream.source))
    model.eval()
    samples = stream.read(np.arange(count))
    model(samples.tokens, targets=samples.targets)
    (head,) = [module for module in model.modules() if isinstance(module, ClassifierHead)]
    return int(head.num_correct) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with CIFAR-10's files")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as generated:
        if options.data is None:
            generate(Path(generated))
            print("no --data: using generated images in CIFAR-10's format, easier than the real ones")
        settings = [f"data.path={options.data or generated}", f"steps={options.steps}"]
        job = load_job(HERE / "compare.toml", settings)
        size = 4 * sum(weight.numel() for weight in job.family.build(job.model, 0).parameters())
        schedules = allreduce.ring_schedule, partial(push_pull_schedule, servers=1)
        ring, server = (
            [allreduce.sent_bytes(schedule, rank, RANKS, size // 4, 4, size) for rank in range(RANKS)]
            for schedule in schedules
        )
        print(f"{RANKS} processes, {job.total_steps} steps of {job.samples} images, {size / 1e6:.2f} MB of weights")
        print(f"{'':20s} {'steps/s':>8s} {'MB sent per step and rank':>28s} {'accuracy':>9s}")
        print(f"{'':20s} {'':8s} {'mean':>14s} {'max':>13s}")

        def show(name: str, result: tuple[float, float], sent: list[int], every: int = 1) -> None:
            mean, highest = (size / every / 1e6 for size in (sum(sent) / RANKS, max(sent)))
            print(f"{name:20s} {result[0]:8.2f} {mean:14.3f} {highest:13.3f} {100 * result[1]:8.1f}%", flush=True)

        show("all-reduce", train(settings), ring)
        show("local SGD", train([*settings, f"local_sgd.every={EVERY}"]), ring, EVERY)
        show("server, sync", run_world(train_with_server, RANKS, job, False, timeout=3600)[0], server)
        show("server, async", run_world(train_with_server, RANKS, job, True, timeout=3600)[0], server)


if __name__ == "__main__":
    main()
