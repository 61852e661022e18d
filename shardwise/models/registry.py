"""The families by name, built-in and from installed packages, and the parser of the `[model]` section."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

from shardwise.errors import JobError, suggest
from shardwise.models.bert_family import BertFamily
from shardwise.models.config import PRESETS, ModelConfig
from shardwise.models.dlrm_family import DLRMFamily
from shardwise.models.family import Family
from shardwise.models.gpt_family import GPTFamily, MoEFamily
from shardwise.models.pretrained_config import starting_values
from shardwise.models.resnet_family import ResNetFamily
from shardwise.models.t5_family import T5Family

ADAPTERS = {"python:": "shardwise.adapters.module_family:ModuleFamily",
            "hf:": "shardwise.adapters.huggingface.huggingface_family:HuggingFaceFamily",
            "script:": "shardwise.adapters.module_family:ModuleFamily"}  # fmt: skip
"""The families of models that are not ours, by the prefix of `model.name`; imported when first used."""
ENTRY_POINTS = "shardwise.families"
BUILT_IN: dict[str, Family] = {"gpt": GPTFamily(), "moe": MoEFamily(), "bert": BertFamily(), "t5": T5Family(),
                               "resnet": ResNetFamily(), "dlrm": DLRMFamily()}  # fmt: skip


@cache
def families() -> dict[str, Family]:
    """Returns all families by name; loads those of other packages on the first call."""
    registered = dict(BUILT_IN)
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name in registered:
            raise JobError(f"the entry point {entry.value!r} redefines the family {entry.name!r}; rename one of them.")
        try:
            family = entry.load()
        except Exception as error:  # noqa: BLE001 - a third-party package may raise anything on import
            raise JobError(f"cannot load the family {entry.name!r} from {entry.value!r}: {error}.") from error
        registered[entry.name] = family() if isinstance(family, type) else family
    return registered


def family_name(name: str) -> str:
    """Returns the family of a model or preset name; raises ValueError if the name is unknown."""
    if prefix := next((prefix for prefix in ADAPTERS if name.startswith(prefix)), None):
        return prefix
    if name in PRESETS:
        return str(PRESETS[name]["family"])
    if name in BUILT_IN or name in families():
        return name
    raise ValueError(f"unknown model {name!r}; {suggest(name, [*families(), *PRESETS])}")


def family_of(config: ModelConfig) -> Family:
    """Returns the family that a config belongs to."""
    return named_family(family_name(config.name))


@cache
def named_family(name: str) -> Family:
    """Returns the family of a name that `family_name` returned."""
    if name in ADAPTERS:
        return resolve_name(ADAPTERS[name])()  # type: ignore[no-any-return]
    return BUILT_IN[name] if name in BUILT_IN else families()[name]


def parse_model(values: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a `[model]` section. A preset, or the model that `weights` names, provides missing keys."""
    values = starting_values(values)
    name = values.get("name", "gpt")
    return named_family(family_name(name) if isinstance(name, str) else "gpt").config.model_validate(values)
