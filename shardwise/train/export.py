"""`shardwise export`: writes the weights of a run as a folder that transformers loads.

Weights are read and written a file at a time, so host memory holds one file, not the model. The folder appears under
its name once it is complete.
"""

import json
import shutil
import uuid
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, JobError
from shardwise.files import write_text
from shardwise.models.chain import Chain, init_slice
from shardwise.train import checkpoint_folder
from shardwise.train.checkpoint import weight_pieces
from shardwise.train.dcp_storage import Index, Pieces, read_index, read_pieces
from shardwise.train.run_folder import RunFolder

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def export_run(run: Path, out: Path, step: int | None, dtype: str, max_file_bytes: int) -> str:
    """Exports the newest valid checkpoint of a run, or that of `step`. Returns what was written, as a sentence."""
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise JobError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}.")
    if out.exists():
        raise JobError(f"{out} exists; give a folder that does not, so that nothing is overwritten.")
    folder = RunFolder.open(run)
    job = folder.job()
    group = checkpoint_folder.CheckpointGroup()
    choice = checkpoint_folder.find_newest_valid(folder.checkpoints, group, step)
    if choice.path is None:
        raise CheckpointError(f"{run} has no checkpoint to export; train it first.")
    index = read_index(choice.path)
    model = job.family.build_on_meta(job.model, job.seed)
    temporary = out.with_name(f"{out.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise JobError(f"{out} cannot be created: {error.strerror}.") from None
    try:
        job.family.write_pretrained_config(job.model, temporary, DTYPES[dtype])
        if folder.tokenizer.exists() and not (temporary / "tokenizer.json").exists():
            shutil.copy(folder.tokenizer, temporary)
        files = _split_into_files(model, index, DTYPES[dtype], max_file_bytes)
        names = [SINGLE_FILE] if len(files) == 1 else [
            f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
        ]  # fmt: skip
        total = 0
        for name, shapes in zip(names, files, strict=True):
            tensors = _read_tensors(choice.path, index, model, shapes, job.seed)
            tensors = {key: value.to(DTYPES[dtype]) if value.is_floating_point() else value
                       for key, value in tensors.items()}  # fmt: skip
            total += sum(value.nbytes for value in tensors.values())
            save_file(tensors, temporary / name, metadata={"format": "pt"})
            (temporary / name).chmod(0o644)  # it is written for its owner alone
        if len(files) > 1:
            places = {key: name for name, shapes in zip(names, files, strict=True) for key in shapes}
            content = {"metadata": {"total_size": total}, "weight_map": places}
            write_text(temporary / INDEX_FILE, json.dumps(content, indent=1))
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return f"wrote step {choice.manifest['step']} of {run} to {out}: {total / 1e9:.3g} GB in {dtype}."


def _split_into_files(model: Chain, index: Index, dtype: torch.dtype, limit: int) -> list[dict[str, torch.Size]]:
    """Returns name and shape of the tensors of each file: parameters, and buffers that belong to the state."""
    state = set(model.state_dict())
    shapes = {name: parameter.shape for name, parameter in model.named_unique_parameters()}
    shapes |= {name: b.shape for name, b in model.named_buffers() if name in state and f"buffers.{name}" in index}
    files: list[dict[str, torch.Size]] = [{}]
    size = 0
    for name, shape in shapes.items():
        bytes_ = shape.numel() * dtype.itemsize
        if files[-1] and size + bytes_ > limit:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += bytes_
    return files


def _read_tensors(
    path: Path, index: Index, model: Chain, shapes: dict[str, torch.Size], seed: int
) -> dict[str, Tensor]:  # fmt: skip
    """Reads tensors from a checkpoint; parameters that nothing trained have their initial values."""
    tensors: dict[str, Tensor] = {}
    pieces: Pieces = {}
    for name, shape in shapes.items():
        key = next((f"{kind}.{name}" for kind in ("weights", "buffers") if f"{kind}.{name}" in index), "")
        if key:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, index[key]["dtype"]))
            pieces |= weight_pieces({key: tensors[name]})
        else:
            tensors[name] = torch.empty(shape)
            init_slice(model, name, tensors[name], shape, (0,) * len(shape), seed)
    read_pieces(path, index, pieces, checkpoint_folder.CheckpointGroup())
    return tensors
