"""Weights of transformers models in safetensors files, read one slice at a time."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import JobError
from shardwise.files import parse_json

INDEX_FILE = "model.safetensors.index.json"
# transformers stacks experts that files have one by one: by parameter, the names that an expert's parts may have.
EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


def has_weights(folder: Path) -> bool:
    return any(True for kind in ("safetensors", "bin") for _ in folder.glob(f"*.{kind}"))


class StackedExperts:
    """Weights of experts, stored one by one, as the stacked parameter (experts, rows, columns) that a module has."""

    def __init__(self, experts: list[list[Any]]):
        self.experts = experts  # of each expert: the matrices whose rows follow each other

    def get_shape(self) -> list[int]:
        shapes = [part.get_shape() for part in self.experts[0]]
        return [len(self.experts), sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        experts, rows, columns = index
        return torch.stack([torch.cat([part[:, columns] for part in one])[rows] for one in self.experts[experts]])


class FolderWeights:
    """The initial values of parameters from the safetensors files of a folder."""

    def __init__(self, folder: Path, module: Any):
        """`module`: the model, on the meta device. Files may have older names, which transformers knows."""
        from safetensors import SafetensorError, safe_open
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [one for one in get_model_conversion_mapping(module) if isinstance(one, WeightRenaming)]

        names = sorted(file.name for file in folder.glob("*.safetensors"))
        if (folder / INDEX_FILE).is_file():
            try:
                names = sorted(set(parse_json((folder / INDEX_FILE).read_bytes())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise JobError(f"{folder / INDEX_FILE} cannot be read: {error}.") from None
        if not names:
            raise JobError(f"{folder} has no *.safetensors files; save the model again with save_pretrained.")
        self.slices: dict[str, Any] = {}
        self.whole: dict[str, Callable[[], Tensor]] = {}
        for name in names:
            try:
                file = safe_open(folder / name, "pt")
            except (OSError, SafetensorError) as error:
                raise JobError(f"{folder / name} cannot be read: {error}.") from None
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                stored = file.get_slice(key), partial(file.get_tensor, key)
                for renaming in renamings:
                    key = renaming.rename_source_key(key)[0]
                self.slices[key], self.whole[key] = stored
        for name, parameter in module.named_parameters():
            shape = parameter.shape
            if name not in self.slices:
                self._stack_experts(name)
            found = self.slices.get(name)
            if found is None:
                known = next(iter(self.slices), "nothing")
                raise JobError(
                    f"{folder} has no weight {name!r} of shape {tuple(shape)} (it has {len(self.slices)}, such as "
                    f'{known!r}); to start from random weights, set model.weights = "random".'
                )
            if list(found.get_shape()) != list(shape):
                raise JobError(
                    f"{folder}: {name} has shape {tuple(found.get_shape())}, but the model needs {tuple(shape)}; "
                    "check [model.args] against its config.json."
                )

    def _stack_experts(self, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        for parts in EXPERT_PARTS.get(leaf, ()):
            experts: list[list[Any]] = []
            while all(f"{owner}.{len(experts)}.{part}.weight" in self.slices for part in parts):
                experts.append([self.slices[f"{owner}.{len(experts)}.{part}.weight"] for part in parts])
            if experts:
                self.slices[name] = StackedExperts(experts)

    def value(self, name: str) -> Any:
        """Returns a parameter, to be indexed by slices; only these are read."""
        return self.slices[name]

    def load_buffers(self, module: nn.Module) -> None:
        """Copies the buffers that the folder has, such as running averages."""
        for name, buffer in module.named_buffers():
            if name in self.whole:
                buffer.copy_(self.whole[name]())
