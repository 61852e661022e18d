"""`shardwise export`: writes the weights of a run as a folder that transformers loads.

Weights are read and written one by one, so host memory holds the largest of them, not the model. The folder appears
under its name once it is complete. Models that transformers does not know become a program of `torch.export`: one file,
which needs PyTorch alone, for any number of samples. `reference.safetensors` holds inputs and the run's outputs."""

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.adapters.module_chain import KeepFloat64
from shardwise.data.criteo import ClickBatch
from shardwise.data.make_sources import synthetic_source
from shardwise.data.sample_stream import job_stream
from shardwise.errors import CheckpointError, JobError, RunError
from shardwise.files import os_errors_as, write_text
from shardwise.job import Job
from shardwise.models.adapter_files import write_adapter
from shardwise.models.chain import Chain, init_slice
from shardwise.models.config import LoRA, ModelConfig
from shardwise.models.lora import is_transposed, mark_quantized, matches
from shardwise.models.pretrained import INDEX_FILE, open_folder
from shardwise.models.sharding import is_adapter
from shardwise.train.base_weights import check_base_of_use
from shardwise.train.checkpoint import check_matches_model
from shardwise.train.checkpoint_folder import CheckpointGroup, find_newest_valid
from shardwise.train.dcp_storage import Index, Pieces, dtype_name, read_index, read_pieces, read_tensor, weight_pieces
from shardwise.train.local_machine import require_memory
from shardwise.train.run_folder import RunFolder, copy_tokenizer_files
from shardwise.train.task_record import check_module_of_use, has_own_task
from shardwise.train.warm_start import run_weights

DTYPE_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
               torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
PROGRAM, REFERENCE = "model.pt2", "reference.safetensors"
PROGRAM_TOLERANCE = 1e-5  # relative; in another process, kernels may sum in another order
CHECKED_TOKENS = 64
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Export:
    """A checkpoint of a run, to be written in the format of Hugging Face."""

    job: Job  # without adapters, which are merged into the weights
    checkpoint: Path
    step: int
    dtype: torch.dtype
    lora: LoRA | None = None

    @cached_property
    def model(self) -> Chain:
        model = self.job.family.build_on_meta(self.job.model, self.job.seed)
        if self.lora is not None:
            model.initial = run_weights(self.job) or model.initial
            mark_quantized(model, getattr(model, "root", model), self.lora)
        return model

    @cached_property
    def index(self) -> Index:
        return read_index(self.checkpoint)

    def write(self, folder: Path, max_file_bytes: int) -> int:
        """Writes config and weights, or else a program; returns the bytes of the weights."""
        job, source = self.job, self.job.model.pretrained_folder
        if not job.family.has_huggingface_form(job.model):
            require_memory(job, 3 * self.dtype.itemsize)  # with its tables: the model, the program and its file's copy
            with torch.no_grad():
                return write_program(folder, *deployable(job, self.load(self.dtype), self.read, self.dtype))
        config = job.family.export_config(job.model) | {"dtype": dtype_name(self.dtype)}
        write_text(folder / "config.json", json.dumps({**config, "torch_dtype": config["dtype"]}, indent=2) + "\n")
        if source is not None:
            copy_tokenizer_files(source, folder)
        files = list(self._files(max_file_bytes))
        total, places = 0, dict[str, str]()
        for number, units in enumerate(files, start=1):
            name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            entries = {key: tensor for unit in units for key, tensor in self._convert(unit).items()}
            values = chain.from_iterable(self._convert(self.read(unit)).values() for unit in units)
            write_safetensors(folder / name, entries, values)
            total += sum(entry.nbytes for entry in entries.values())
            places |= dict.fromkeys(entries, name)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_text(folder / INDEX_FILE, json.dumps(index, indent=1))
        return total

    def _convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.job.family.export_weights(self.job.model, tensors)

    def _files(self, limit: int) -> Iterator[list[dict[str, Tensor]]]:
        """Yields what each file holds, on the meta device: weights and saved buffers, in units converted together."""
        state, buffers = set(self.model.state_dict()), self.model.named_buffers()
        found: dict[str, Tensor] = dict(self.model.named_unique_parameters())
        found |= {name: b for name, b in buffers if name in state and f"buffers.{name}" in self.index}
        meta = {name: torch.empty(one.shape, dtype=self._dtype(one), device="meta") for name, one in found.items()}
        whole, unit, file = self._convert(meta), dict[str, Tensor](), list[dict[str, Tensor]]()
        for name, tensor in meta.items():
            unit[name] = tensor
            if any(key not in whole or part.shape != whole[key].shape for key, part in self._convert(unit).items()):
                continue  # files have one entry for this and the next parameters, such as q, k and v
            if file and sum(one.nbytes for part in (*file, unit) for one in part.values()) > limit:
                yield file
                file = []
            file, unit = [*file, unit], {}
        yield [*file, unit] if unit else file

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if tensor.is_floating_point() else tensor.dtype

    def read(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reads tensors from the checkpoint; parameters that nothing trained have their initial values."""
        tensors: dict[str, Tensor] = {}
        pieces: Pieces = {}
        for name, tensor in like.items():
            key = next((f"{kind}.{name}" for kind in ("weights", "buffers") if f"{kind}.{name}" in self.index), "")
            tensors[name] = torch.empty(tensor.shape, dtype=self._dtype(tensor) if key else None)
            if key:
                pieces |= weight_pieces({key: tensors[name]})
            else:
                init_slice(self.model, name, tensors[name], tensor.shape, (0,) * tensor.dim(), self.job.seed)
        read_pieces(self.checkpoint, {key: self.index[key] for key in pieces}, pieces, CheckpointGroup())
        for name in tensors if self.lora is not None else ():
            if (update := self._update(name)) is not None:
                tensors[name] = tensors[name].double() + update
        return {name: t.to(self._dtype(t)) for name, t in tensors.items()}

    def _update(self, name: str) -> Tensor | None:
        """Returns what an adapter adds to a weight, if it has one."""
        assert self.lora is not None
        owner, _, leaf = name.rpartition(".")
        prefix, layer = (f"{owner}.", owner) if leaf == "weight" else (f"{name}_", name)
        if f"weights.{prefix}lora_A" not in self.index:
            return None
        down, up = (self._read_adapter(f"{prefix}{matrix}").double() for matrix in ("lora_A", "lora_B"))
        update = self.lora.alpha_of(layer, matches) / down.shape[-2] * (up @ down)
        root: Any = getattr(self.model, "root", self.model)
        return update.mT if is_transposed(root.get_submodule(owner)) else update

    def _read_adapter(self, name: str) -> Tensor:
        return read_tensor(self.checkpoint, self.index, f"weights.{name}")

    def write_adapter(self, folder: Path, config: ModelConfig) -> int:
        """Writes the adapters, for peft; returns their bytes."""
        chain: Any = self.job.family.build_on_meta(config, self.job.seed)
        if not hasattr(chain, "root"):
            raise JobError("peft knows adapters of transformers' modules only (hf:FOLDER); use `shardwise merge`.")
        names = [name for name, _ in chain.root.named_parameters() if is_adapter(name)]
        tensors = {name: self._read_adapter(name).to(self.dtype) for name in names}
        write_adapter(folder, chain.root, tensors, str(config.pretrained_folder or ""))
        return sum(tensor.nbytes for tensor in tensors.values())

    @torch.no_grad()
    def load(self, dtype: torch.dtype) -> nn.Module:
        """Returns the whole model, or transformers' own module, with the weights of the checkpoint."""
        with torch.enable_grad():  # what it depends on is looked at
            model = self.job.family.build_reference(self.job.model, self.job.seed, dtype).eval()
        parameters = model.named_unique_parameters() if isinstance(model, Chain) else model.named_parameters()
        found: dict[str, Tensor] = dict(parameters)
        found |= {name: buffer for name, buffer in model.named_buffers() if f"buffers.{name}" in self.index}
        for name, tensor in found.items():
            tensor.copy_(self.read({name: tensor})[name])
        return model

    @torch.no_grad()
    def check(self, folder: Path) -> str:
        """Loads the folder with transformers; raises RunError if its logits are not those of the run's model."""
        if (folder / PROGRAM).exists():
            return check_program(folder)
        try:
            import transformers
        except ImportError:
            raise JobError('--check needs transformers: pip install "shardwise[hf]".') from None
        job = self.job
        require_memory(job, 24)  # bytes per parameter: three models in float64
        ours = self.load(torch.float64)
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


def write_safetensors(path: Path, entries: Mapping[str, Tensor], values: Iterable[Tensor]) -> None:
    """Writes tensors one by one, which safetensors' own function does not; `entries` are they, on the meta device."""
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, entry in entries.items():
        header[name] = {"dtype": DTYPE_CODES[entry.dtype], "shape": list(entry.shape)}
        header[name]["data_offsets"] = [end, end := end + entry.nbytes]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
            del value  # before the next one is read


def open_checkpoint(
    folder: RunFolder, step: str | None = "", dtype: torch.dtype = torch.float32, model: ModelConfig | None = None
) -> Export:
    """Returns the newest valid checkpoint of a run, that of a step, or the `best` one, to be loaded into the model of
    its job or into the `model` given. Raises an error if that is another one than was trained."""
    step = step or ""
    if step not in ("", "best") and not step.isdecimal():
        raise CheckpointError(f"--step {step}: give the number of a step, or best.")
    saved, number = folder.best if step == "best" else folder.checkpoints, int(step) if step.isdecimal() else None
    choice, job = find_newest_valid(saved, CheckpointGroup(), number), folder.job()
    if choice.path is None:
        remedy = "train it with validation.keep_best = true" if step == "best" else "train it first"
        raise CheckpointError(f"{folder.path} has no {'best ' if step else ''}checkpoint; {remedy}.")
    if model is not None:
        job = job.model_copy(update={"model": model})
    check_base_of_use(folder, job)
    _check_trained(folder, job, choice.path)
    plain = job.model_copy(update={"model": job.model.model_copy(update={"lora": None})})
    return Export(plain, choice.path, choice.manifest["step"], dtype, job.model.lora)


def _check_trained(folder: RunFolder, job: Job, checkpoint: Path) -> None:
    """Raises an error if a module whose code is not ours is another one than the run has trained: what a checkpoint
    lacks would keep random values."""
    if not job.model.passes_batch:
        return
    chain = job.family.build_on_meta(job.model, job.seed)
    stored = {
        f"weights.{name}": weight.shape
        for name, weight in chain.named_unique_parameters()
        if weight.requires_grad or name in chain.written_weights
    }
    check_matches_model(checkpoint, read_index(checkpoint), stored, CheckpointGroup())
    if has_own_task(job):
        check_module_of_use(folder, job, chain)


def export_run(run: Path, out: Path, step: str | None, dtype: str, max_file_bytes: int, check: bool = False,
               merge: bool = False, before: Callable[[Export], None] = lambda export: None,
               after: Callable[[Export, Path, str], str] = lambda export, folder,
               checked: "") -> Iterator[str]:  # fmt: skip
    """Exports the newest valid checkpoint of a run, or that of `step`. Yields what was done, in sentences. Adapters are
    exported by themselves, or with `merge` as part of the weights. `before` may refuse what is to be written; `after`
    adds to the folder before it gets its name, and gets the sentence of a check."""
    if dtype not in ("auto", *DTYPES):
        raise JobError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}.")
    if out.exists():
        raise JobError(f"{out} exists; give a folder that does not, so that nothing is overwritten.")
    folder = RunFolder.open(run, weights=True, step=int(step) if step and step.isdecimal() else None)
    job = folder.job()
    is_whole = job.model.lora is None or merge
    if job.model.lora is None and merge:
        raise JobError(f"{run} has no adapters to merge; use `shardwise export`.")
    if check and not is_whole:
        raise JobError("--check compares whole models; use it with `shardwise merge`.")
    auto = _folder_dtype(job) if is_whole else torch.float32
    export = open_checkpoint(folder, step, DTYPES.get(dtype) or auto)
    before(export)
    temporary = out.with_name(f"{out.name}.partial-{uuid.uuid4().hex[:8]}")
    with os_errors_as(JobError, f"{out} cannot be created"):
        temporary.mkdir(parents=True)
    with os_errors_as(RunError, f"{out} could not be written"), ExitStack() as leaving:
        leaving.callback(shutil.rmtree, temporary, ignore_errors=True)
        copy_tokenizer_files(folder.path, temporary)  # before those of the weights that it started from
        size = export.write(temporary, max_file_bytes) if is_whole else export.write_adapter(temporary, job.model)
        checked = export.check(temporary) if check else ""
        added = after(export, temporary, checked)
        temporary.rename(out)  # of which nothing is left to remove
    amount = f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    yield f"exported: step {export.step} of {run} to {out}, {amount} in {dtype_name(export.dtype)}."
    yield from filter(None, (checked, *added.splitlines()))


def _folder_dtype(job: Job) -> torch.dtype:
    """Returns the dtype of the weights that a run started from; float32 if it started from random ones or a run."""
    source = job.model.weights_folder
    dtypes = {entry[:0].dtype for entry in open_folder(source, "").values() if entry.shape} if source else set()
    dtypes = {dtype for dtype in dtypes if dtype.is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


class ClickModel(nn.Module):
    def __init__(self, dense: nn.Module, tables: list[Tensor]):
        super().__init__()
        self.dense, self.tables = dense, nn.ParameterList(tables)

    def forward(self, numbers: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        weights = weights * (ids >= 0)
        looked_up = [F.embedding(ids[:, n].clamp(min=0), table) for n, table in enumerate(self.tables)]
        vectors = [(rows * weights[:, n].unsqueeze(2)).sum(1) for n, rows in enumerate(looked_up)]
        return self.dense(numbers, torch.stack(vectors, 1))  # type: ignore[no-any-return]


def deployable(job: Job, model: nn.Module, read: Any, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model with everything that it needs, and two samples for it. `read` reads embedding tables."""
    if job.model.passes_batch:
        job.family.export_config(job.model)  # raises why there is none
    samples = job_stream(job, synthetic_source(job, 2)).read(np.arange(2))
    if not (tables := job.family.tables(job.model)):
        inputs = samples.tokens.to(dtype) if samples.tokens.is_floating_point() else samples.tokens
        return nn.Sequential(model, nn.Flatten()) if job.model.sample_kind == "images" else model, (inputs,)
    like = {table.name: torch.empty(table.rows, table.width, device="meta") for table in tables}
    batch = ClickBatch.unpack(samples, job.model)  # type: ignore[arg-type]
    of_clicks = (batch.dense_features.to(dtype), batch.sparse_ids, batch.weights.to(dtype))
    return ClickModel(model, [weight.to(dtype) for weight in read(like).values()]), of_clicks


def write_program(folder: Path, model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Writes the program and its reference; returns the bytes of the program."""
    model = model.eval().requires_grad_(False)
    expected, batch = model(*inputs), torch.export.Dim("batch", min=1)
    program = torch.export.export(model, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs)))
    torch.export.save(program, folder / PROGRAM)
    tensors = {f"input_{number}": tensor.contiguous() for number, tensor in enumerate(inputs)}
    save_file({**tensors, "output": expected.contiguous()}, folder / REFERENCE)
    return (folder / PROGRAM).stat().st_size


def check_program(folder: Path) -> str:
    """Raises RunError unless a fresh process gets from the program what the run's model gave, for any batch."""
    command = [sys.executable, "-m", "shardwise.train.export", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RunError(f"a fresh process does not get the reference from the program: {done.stderr.strip()[-500:]}")
    return f"checked: a fresh process loads {PROGRAM}, and its logits differ from the run's by {done.stdout.strip()}."


def compare(folder: Path) -> float:
    """Returns by how much the program's results differ from the reference; the samples together and one by one."""
    program, tensors = torch.export.load(folder / PROGRAM).module(), load_file(folder / REFERENCE)
    expected = tensors.pop("output")
    inputs = [tensors[f"input_{number}"] for number in range(len(tensors))]
    found = [program(*inputs), torch.cat([program(*(x[n : n + 1] for x in inputs)) for n in range(len(expected))])]
    return max(float((one - expected).norm() / expected.norm()) for one in found)


if __name__ == "__main__":
    error = compare(Path(sys.argv[1]))
    print(f"{error:.1e}")
    sys.exit(0 if error <= PROGRAM_TOLERANCE else f"its logits differ by {error:.1e}.")
