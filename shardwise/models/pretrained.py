"""Weights of Hugging Face folders as ours, and back, or as those of transformers' modules: names and shapes, as data.

Files are read one slice or one parameter at a time. Our fused QKV projection stores its rows by KV head: the queries of
a group, then its key and value. Experts are one tensor here and one file entry each there."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.files import parse_json
from shardwise.models.adapter_files import FILE_NAMES
from shardwise.models.chain import Chain, InitialValues
from shardwise.models.gpt_family import DecoderConfig
from shardwise.models.layers import rope_frequencies
from shardwise.models.pretrained_config import FORMATS, PretrainedFormat, find_format, make_config
from shardwise.models.sharding import is_adapter

WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")


def their_name(form: PretrainedFormat, ours: str) -> str:
    block, _, rest = ours.partition(".")
    prefix, key = ("", ours) if ours in form.names else (f"{form.block}{block.removeprefix('block')}.", rest)
    return prefix + form.names[key]


def split_parameter(
    form: PretrainedFormat, config: DecoderConfig, ours: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yields the entries of a file that make one parameter of ours."""
    name = their_name(form, ours)
    if ".bank." in ours:
        yield from ((name.format(number), expert) for number, expert in enumerate(tensor))
    elif ".qkv." in ours and not form.transposed:
        yield from zip((name.format(part) for part in "qkv"), split_qkv(config, tensor), strict=True)
    else:
        whole = torch.cat(split_qkv(config, tensor)) if ".qkv." in ours else tensor
        yield name, whole.T if _is_transposed(form, ours, whole.dim()) else whole


def _is_transposed(form: PretrainedFormat, ours: str, dims: int) -> bool:
    return form.transposed and dims == 2 and ours.startswith("block")


def split_qkv(config: DecoderConfig, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection (or its bias) into queries, keys and values, each by head."""
    group = config.heads // config.kv_heads
    rows = fused.unflatten(0, (config.kv_heads, group + 2, config.head_dim))
    return rows[:, :group].flatten(0, 2), rows[:, group].flatten(0, 1), rows[:, group + 1].flatten(0, 1)


def join_qkv(config: DecoderConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.unflatten(0, (config.kv_heads, -1, config.head_dim)) for part in (q, k, v))
    return torch.cat((q, k, v), 1).flatten(0, 2)


def export_weights(config: DecoderConfig, weights: Mapping[str, Tensor], folder: Path | None) -> dict[str, Tensor]:
    """Returns our weights, or gradients, as the entries of a file."""
    form = FORMATS[find_format(config, folder)]
    return dict(entry for name, tensor in weights.items() for entry in split_parameter(form, config, name, tensor))


def reference_decoder(config: DecoderConfig) -> nn.Module | None:
    """Returns transformers' module of the same shape in float64; None if it has none or is not installed."""
    kind = find_format(config)
    if not kind or find_spec("transformers") is None:
        return None
    import transformers

    values = make_config(config) | {"attn_implementation": "eager", "experts_implementation": "eager"}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    ends = {"bos_token_id": None, "eos_token_id": None}  # theirs would be beyond a small vocabulary
    theirs = transformers.AutoConfig.for_model(**{**values, **dropouts, **ends})
    model: Any = transformers.AutoModelForCausalLM.from_config(theirs).double()
    if config.positions == "rotary":
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        model.model.rotary_emb.inv_freq = frequencies  # which it made in float32
    return model  # type: ignore[no-any-return]


class Entry:
    """An entry of a safetensors file, read when it is indexed."""

    def __init__(self, file: Any, name: str):
        self.view, self.read = file.get_slice(name), partial(file.get_tensor, name)
        self.shape = torch.Size(self.view.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        return self.view[index] if len(self.shape) else self.read()


class StackedExperts:
    """Weights of experts, stored one by one, as the stacked parameter (experts, rows, columns) that a module has."""

    def __init__(self, experts: list[list[Any]]):
        self.experts = experts  # of each expert: the matrices whose rows follow each other
        shapes = [part.shape for part in experts[0]]
        self.shape = torch.Size([len(experts), sum(shape[0] for shape in shapes), *shapes[0][1:]])

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, rows, columns = index
        return torch.stack([torch.cat([part[:, columns] for part in one])[rows] for one in self.experts[experts]])


def weight_file_names(folder: Path) -> list[str]:
    """Returns the names of the files that a folder's weights are read from."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if WHOLE_FILE in names:
        names = [WHOLE_FILE]  # as transformers does; a folder may have the weights in another form beside it
    elif (folder / INDEX_FILE).is_file():
        try:
            listed = set(parse_json((folder / INDEX_FILE).read_bytes())["weight_map"].values())
            names = sorted(Path(name).name for name in listed)  # no file of another folder is read
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise JobError(f"{folder / INDEX_FILE} cannot be read: {error}.") from None
    if not names:
        raise JobError(f"{folder} has no *.safetensors files; save the model again with save_pretrained.")
    return names


def open_folder(folder: Path, prefix: str) -> dict[str, Entry]:
    """Returns the entries of a folder's safetensors files. `prefix` joins their names if none has it: models without a
    head were saved so."""
    from safetensors import SafetensorError, safe_open

    names = weight_file_names(folder)
    entries: dict[str, Entry] = {}
    for name in names:
        try:
            if not (folder / name).is_file():  # opening a pipe would wait for its writer
                raise OSError("it is no file")
            file = safe_open(folder / name, "pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise JobError(f"{folder / name} cannot be read: {error}.") from None
        found = {key: Entry(file, key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
        if twice := sorted(entries.keys() & found.keys()):
            raise JobError(f"{folder} has the weight {twice[0]!r} in two files; remove one of them.")
        entries |= found
    if prefix and not any(name.startswith(prefix) for name in entries):
        entries = {name if name.startswith("lm_head.") else prefix + name: entry for name, entry in entries.items()}
    return entries


def check_shapes(folder: Path, needed: Mapping[str, torch.Size], found: Mapping[str, Any], unused: set[str]) -> None:
    """Raises JobError if weights are missing, have other shapes, or if there are weights that nothing uses."""
    for name, shape in needed.items():
        if name not in found:
            missing = f"weight {name!r} of shape {tuple(shape)} (but {next(iter(found), 'nothing')!r})"
            raise JobError(f'{folder} has no {missing}; for random weights, set model.weights = "random".')
        if found[name].shape != shape:
            shapes = f"{tuple(found[name].shape)}, but the model needs {tuple(shape)}"
            raise JobError(f"{folder}: {name} has shape {shapes}; check the [model] section against its config.json.")
        if isinstance(found[name], Entry) and (code := found[name].view.get_dtype()) not in FLOATS:
            raise JobError(f"{folder}: {name} is stored as {code}; save the model in bf16 or float32.")
    if unused := {name for name in unused if not any(fnmatchcase(name, one) for one in FILE_NAMES["no_weights"])}:
        raise JobError(f"{folder} has the weight {min(unused)!r}, which the model has not; is its config.json right?")


class PretrainedWeights(InitialValues):
    """The initial values of one of our models, from a Hugging Face folder."""

    def __init__(self, config: DecoderConfig, folder: Path):
        kind = find_format(config, folder)
        if not kind:
            raise JobError(f"the [model] section changes the form of the model of {folder}; remove such keys.")
        self.config, self.folder, self.form = config, folder, FORMATS[kind]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        return open_folder(self.folder, self.form.block.partition(".")[0] + ".")

    def check(self, chain: Chain) -> None:
        """Raises JobError if the folder does not have just the weights of a chain on the meta device."""
        own = [named for named in chain.named_unique_parameters() if not is_adapter(named[0])]
        entries = (entry for named in own for entry in split_parameter(self.form, self.config, *named))
        needed = {name: tensor.shape for name, tensor in entries}
        unused = self.entries.keys() - needed.keys() - ({"lm_head.weight"} if self.config.tied else set())
        check_shapes(self.folder, needed, self.entries, unused)

    def value(self, name: str) -> Any:
        """Returns a parameter, to be indexed by slices."""
        theirs = their_name(self.form, name)
        if ".bank." in name:
            return StackedExperts([[self.entries[theirs.format(number)]] for number in range(self.config.num_experts)])
        if self.form.transposed:
            whole = self.entries[theirs][:]
            whole = whole.T if _is_transposed(self.form, name, whole.dim()) else whole
            return join_qkv(self.config, *whole.chunk(3)) if ".qkv." in name else whole
        if ".qkv." in name:
            return join_qkv(self.config, *(self.entries[theirs.format(part)][:] for part in "qkv"))
        return self.entries[theirs]


class ModuleWeights(InitialValues):
    """The entries of files, or tensors under the same names, as the parameters of a transformers module."""

    def __init__(self, entries: Mapping[str, Any], module: Any):
        """`module`: the model, on the meta device. Files may have older names, which transformers knows."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [one for one in get_model_conversion_mapping(module) if isinstance(one, WeightRenaming)]
        self.found: dict[str, Any] = {}
        for key, entry in entries.items():
            for renaming in renamings:
                key = renaming.rename_source_key(key)[0]
            self.found[key] = entry
        self.unused = set(self.found)
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            self.unused -= {name}
            if name not in self.found:
                self._stack_experts(name)

    @classmethod
    def of_folder(cls, folder: Path, module: Any) -> "ModuleWeights":
        """Checks the weights of a folder, and copies the buffers that it has into the module."""
        prefix = f"{module.base_model_prefix}."
        has_prefix = any(name.startswith(prefix) for name, _ in module.named_parameters())
        weights = cls(open_folder(folder, prefix if has_prefix else ""), module)
        ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
        unused = {name for name in weights.unused if not any(pattern.search(name) for pattern in ignored)}
        shapes = {name: one.shape for name, one in module.named_parameters() if not is_adapter(name)}
        check_shapes(folder, shapes, weights.found, unused)
        for name, buffer in module.named_buffers():  # such as running averages
            if name in weights.found:
                buffer.copy_(weights.found[name][...])
        return weights

    def _stack_experts(self, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        for parts in FILE_NAMES["expert_parts"].get(leaf, ()):
            experts: list[list[str]] = []
            while all(f"{owner}.{len(experts)}.{part}.weight" in self.found for part in parts):
                experts.append([f"{owner}.{len(experts)}.{part}.weight" for part in parts])
            if experts:
                self.found[name] = StackedExperts([[self.found[part] for part in one] for one in experts])
                self.unused -= {part for one in experts for part in one}

    def value(self, name: str) -> Any:
        """Returns a parameter, to be indexed by slices; only these are read."""
        return self.found[name]
