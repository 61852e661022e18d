"""Adapters as the files of peft: `adapter_config.json` and `adapter_model.safetensors`.

A file calls the matrices of a layer `base_model.model.<layer>.lora_A.weight`. Those of stacked experts have the experts
side by side, and the name of the module that has them; if several of its weights have adapters, all but the last are
below as many `base_layer`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import JobError
from shardwise.files import parse_json, parse_toml, write_text
from shardwise.models.sharding import base_weight

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN = re.compile(r"[\w.-]+")  # names of layers; peft also takes regular expressions
FILE_NAMES = parse_toml(Path(__file__).with_name("file_names.toml").read_text(encoding="utf-8"))


def file_names(root: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yields, for each parameter of an adapter: our name, that of the file, and the number of experts, 0 if none."""
    for owner, module in root.named_modules():
        leaves = [name.removesuffix("lora_A") for name, _ in module.named_parameters(recurse=False)
                  if name.endswith("lora_A")]  # fmt: skip
        for number, leaf in enumerate(leaves):
            for matrix in ("lora_A", "lora_B"):
                experts = module._parameters[f"{leaf}{matrix}"].shape[0] if leaf else 0  # type: ignore[union-attr]
                below = ".base_layer" * (len(leaves) - 1 - number)
                yield f"{owner}.{leaf}{matrix}", f"{PREFIX}{owner}{below}.{matrix}.weight", experts


def to_file(tensor: Tensor, name: str, experts: int) -> Tensor:
    """Returns a matrix of ours as that of the file: of experts, A (E rank, in) and B (out, rank E)."""
    if not experts:
        return tensor
    return tensor.flatten(0, 1) if name.endswith("lora_A") else tensor.permute(1, 2, 0).flatten(1).contiguous()


def from_file(tensor: Tensor, name: str, experts: int) -> Tensor:
    if not experts:
        return tensor
    if name.endswith("lora_A"):
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)


def write_adapter(folder: Path, root: nn.Module, tensors: Mapping[str, Tensor], base: str) -> None:
    """Writes the adapters of a module, whose parameters `tensors` has by name."""
    from safetensors.torch import save_file

    modules, parameters = dict[str, tuple[int, float]](), dict[str, tuple[int, float]]()
    for ours in tensors:
        if ours.endswith("lora_A"):
            name, leaf = base_weight(ours).rpartition(".")[::2]
            scale = root.get_submodule(name).__dict__[ours.rpartition(".")[2].removesuffix("A") + "scale"]
            rank = tensors[ours].shape[-2]
            (modules if leaf == "weight" else parameters)[name if leaf == "weight" else f"{name}.{leaf}"] = rank, scale
    layers = modules | parameters
    rank, scale = max(layers.values(), key=list(layers.values()).count)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": rank * scale, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(modules), "target_parameters": sorted(parameters) or None,
        "rank_pattern": {name: own for name, (own, _) in layers.items() if own != rank},
        "alpha_pattern": {name: own * by for name, (own, by) in layers.items() if (own, by) != (rank, scale)},
    }  # fmt: skip
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    named = {file: to_file(tensors[ours], ours, experts) for ours, file, experts in file_names(root)}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns the keys of `model.lora` that an adapter of peft has."""
    try:
        config = parse_json((folder / CONFIG_FILE).read_bytes())
        found = {"rank": config["r"], "alpha": config["lora_alpha"]}
        targets = config.get("target_modules") or []
        targets = [targets] if isinstance(targets, str) else list(targets)
        found["targets"] = targets + (config.get("target_parameters") or [])
        found["ranks"], found["alphas"] = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        asked = {field: config.get(field) for field in FILE_NAMES["unsupported_by_adapters"]}
        unsupported = [name for name, value in asked.items() if value not in (None, [], "none") and value is not False]
        names = (*found["targets"], *found["ranks"], *found["alphas"])
        patterns = [name for name in names if not PLAIN.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"model.lora.adapter: {folder / CONFIG_FILE} cannot be read: {error}.") from None
    if config.get("peft_type") != "LORA" or unsupported or patterns:
        reason = f"{unsupported[0]} = {config[unsupported[0]]!r}" if unsupported else ", ".join(patterns)
        what = f"{folder / CONFIG_FILE} has {reason or 'another type'}"
        raise JobError(f"model.lora.adapter: {what}; only plain LoRA of layers that are named can be trained.")
    return found


def read_adapter(folder: Path, root: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of an adapter by our names; raises JobError if they are not those of the module."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise JobError(f"model.lora.adapter: {folder / WEIGHTS_FILE} cannot be read: {error}.") from None
    shapes, found = {name: parameter.shape for name, parameter in root.named_parameters()}, {}
    for ours, file, experts in file_names(root):
        if file not in stored:
            raise JobError(f"model.lora.adapter: {folder} has no {file}, which this model needs.")
        found[ours] = from_file(stored.pop(file), ours, experts)
        if found[ours].shape != shapes[ours]:
            sizes = f"{list(found[ours].shape)}, not {list(shapes[ours])}"
            raise JobError(f"model.lora.adapter: {file} has the shape {sizes}.")
    if stored:
        raise JobError(f"model.lora.adapter: {folder} has {next(iter(stored))}, which this model does not have.")
    return found
