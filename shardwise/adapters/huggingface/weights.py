"""Weights of transformers models under the names and in the shapes of its modules, from those of its files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.models.chain import InitialValues
from shardwise.models.pretrained import StackedExperts, check_shapes, open_folder

# transformers stacks experts that files have one by one: by parameter, the names that an expert's parts may have.
EXPERT_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}


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
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        check_shapes(folder, shapes, weights.found, unused)
        for name, buffer in module.named_buffers():  # such as running averages
            if name in weights.found:
                buffer.copy_(weights.found[name][...])
        return weights

    def _stack_experts(self, name: str) -> None:
        owner, _, leaf = name.rpartition(".")
        for parts in EXPERT_PARTS.get(leaf, ()):
            experts: list[list[str]] = []
            while all(f"{owner}.{len(experts)}.{part}.weight" in self.found for part in parts):
                experts.append([f"{owner}.{len(experts)}.{part}.weight" for part in parts])
            if experts:
                self.found[name] = StackedExperts([[self.found[part] for part in one] for one in experts])
                self.unused -= {part for one in experts for part in one}

    def value(self, name: str) -> Any:
        """Returns a parameter, to be indexed by slices; only these are read."""
        return self.found[name]
