"""`shardwise export`: writes the weights of a run as a folder that transformers loads.

Weights are read and written a file at a time, so host memory holds one file, not the model. The folder appears under
its name once it is complete.
"""

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.adapters.function_modes import KeepFloat64
from shardwise.console import format_count
from shardwise.errors import CheckpointError, JobError, RunError
from shardwise.files import write_text
from shardwise.job import Job
from shardwise.models.chain import Chain, init_slice
from shardwise.models.pretrained import INDEX_FILE, open_folder
from shardwise.train import checkpoint_folder
from shardwise.train.checkpoint import weight_pieces
from shardwise.train.dcp_storage import Index, Pieces, dtype_name, read_index, read_pieces
from shardwise.train.local_machine import require_memory
from shardwise.train.run_folder import RunFolder

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
# What travels with the weights of a folder: tokenizer, chat template, generation settings.
COPIED_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
                "chat_template*", "generation_config.json", "preprocessor_config.json")  # fmt: skip
CHECKED_TOKENS = 64
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Export:
    """A checkpoint of a run, to be written in the format of Hugging Face."""

    job: Job
    checkpoint: Path
    step: int
    dtype: torch.dtype

    @cached_property
    def model(self) -> Chain:
        return self.job.family.build_on_meta(self.job.model, self.job.seed)

    @cached_property
    def index(self) -> Index:
        return read_index(self.checkpoint)

    def write(self, folder: Path, max_file_bytes: int) -> int:
        """Writes config and weights; returns the bytes of the weights."""
        from safetensors.torch import save_file

        job, source = self.job, self.job.model.pretrained_folder
        config = job.family.export_config(job.model) | {"dtype": dtype_name(self.dtype)}
        write_text(folder / "config.json", json.dumps({**config, "torch_dtype": config["dtype"]}, indent=2) + "\n")
        for pattern in COPIED_FILES if source is not None else ():
            for file in source.glob(pattern):  # type: ignore[union-attr]
                shutil.copy(file, folder)
        files = list(self._files(max_file_bytes))
        total, places = 0, dict[str, str]()
        for number, shapes in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            tensors = self.job.family.export_weights(job.model, self.read(shapes))
            total += sum(tensor.nbytes for tensor in tensors.values())
            places |= dict.fromkeys(tensors, name)
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
            (folder / name).chmod(0o644)  # it is written for its owner alone
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_text(folder / INDEX_FILE, json.dumps(index, indent=1))
        return total

    def _files(self, limit: int) -> Iterator[dict[str, torch.Size]]:
        """Yields name and shape of the tensors of each file: parameters, and buffers that belong to the state."""
        state, buffers = set(self.model.state_dict()), self.model.named_buffers()
        shapes = {name: parameter.shape for name, parameter in self.model.named_unique_parameters()}
        shapes |= {name: b.shape for name, b in buffers if name in state and f"buffers.{name}" in self.index}
        file: dict[str, torch.Size] = {}
        for name, shape in shapes.items():
            if file and sum(one.numel() for one in (*file.values(), shape)) * self.dtype.itemsize > limit:
                yield file
                file = {}
            file[name] = shape
        yield file

    def read(self, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Reads tensors from the checkpoint; parameters that nothing trained have their initial values."""
        tensors: dict[str, Tensor] = {}
        pieces: Pieces = {}
        for name, shape in shapes.items():
            key = next((f"{kind}.{name}" for kind in ("weights", "buffers") if f"{kind}.{name}" in self.index), "")
            tensors[name] = torch.empty(shape, dtype=getattr(torch, self.index[key]["dtype"]) if key else None)
            if key:
                pieces |= weight_pieces({key: tensors[name]})
            else:
                init_slice(self.model, name, tensors[name], shape, (0,) * len(shape), self.job.seed)
        read_pieces(self.checkpoint, self.index, pieces, checkpoint_folder.CheckpointGroup())
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    @torch.no_grad()
    def check(self, folder: Path) -> str:
        """Loads the folder with transformers; raises RunError if its logits are not those of the run's model."""
        try:
            import transformers
        except ImportError:
            raise JobError('--check needs transformers: pip install "shardwise[hf]".') from None
        job = self.job
        require_memory(job, 24)  # bytes per parameter: three models in float64
        ours = job.family.build_reference(job.model, job.seed, torch.float64).eval()
        parameters = dict(ours.named_unique_parameters() if isinstance(ours, Chain) else ours.named_parameters())
        for name, stored in self.read({name: weight.shape for name, weight in parameters.items()}).items():
            parameters[name].copy_(stored)
        theirs = getattr(transformers, json.loads((folder / "config.json").read_bytes())["architectures"][0])
        transformers.utils.logging.disable_progress_bar()
        module = theirs.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval()
        exact: Any = job.family.reference(job.model) if isinstance(ours, Chain) else ours
        for name, buffer in exact.named_buffers():
            if name not in module.state_dict():  # frequencies, which it makes in float32
                module.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
        module.config._experts_implementation = "eager"  # the grouped kernel refuses float64
        exact.config._experts_implementation = "eager"
        batch = job.family.example_inputs(job.model, samples=2, limit=CHECKED_TOKENS)
        with KeepFloat64():
            expected = module(**batch).logits
            found = ours(batch["input_ids"], ids=torch.arange(2)) if isinstance(ours, Chain) else ours(**batch).logits
        difference = float((found - expected).norm() / expected.norm())
        if not difference <= TOLERANCE:
            raise RunError(f"transformers computes other logits than the run's model: they differ by {difference:.1e}.")
        return f"checked: {type(module).__name__} loads it, and its logits differ from the run's by {difference:.1e}."


def export_run(
    run: Path, out: Path, step: int | None, dtype: str, max_file_bytes: int, check: bool = False
) -> Iterator[str]:
    """Exports the newest valid checkpoint of a run, or that of `step`. Yields what was done, in sentences."""
    if dtype not in ("auto", *DTYPES):
        raise JobError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}.")
    if out.exists():
        raise JobError(f"{out} exists; give a folder that does not, so that nothing is overwritten.")
    folder = RunFolder.open(run, weights=True, step=step)
    choice = checkpoint_folder.find_newest_valid(folder.checkpoints, checkpoint_folder.CheckpointGroup(), step)
    if choice.path is None:
        raise CheckpointError(f"{run} has no checkpoint to export; train it first.")
    job = folder.job()
    export = Export(job, choice.path, choice.manifest["step"], DTYPES.get(dtype) or _folder_dtype(job))
    temporary = out.with_name(f"{out.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir()
    except OSError as error:
        raise JobError(f"{out} cannot be created: {error.strerror}.") from None
    try:
        size = export.write(temporary, max_file_bytes)
        if folder.tokenizer.exists() and not (temporary / "tokenizer.json").exists():
            shutil.copy(folder.tokenizer, temporary)
        checked = export.check(temporary) if check else ""
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    yield f"exported: step {export.step} of {run} to {out}, {format_count(size)}B in {dtype_name(export.dtype)}."
    if checked:
        yield checked


def _folder_dtype(job: Job) -> torch.dtype:
    """Returns the dtype of the weights that a run started from; float32 if it started from random ones or a run."""
    source = job.model.weights_folder
    dtypes = {entry[:0].dtype for entry in open_folder(source, "").values() if entry.shape} if source else set()
    dtypes = {dtype for dtype in dtypes if dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
