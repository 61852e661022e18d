"""Configs of Hugging Face folders as our `[model]` section, and back. Imports no PyTorch.

`pretrained.toml` says, by `model_type`, which models our decoder computes. A field that it does not have is an error,
since a model trained without it (a softcap, a window) would be another model. Dropout and the auxiliary loss of routers
are settings of a run, which a folder does not change."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, shorten
from shardwise.files import parse_json, parse_toml, user_path
from shardwise.models.adapter_files import FILE_NAMES
from shardwise.models.config import PRESETS, ModelConfig, read_tables, split_step
from shardwise.run_job import check_job_file


@dataclass(frozen=True)
class PretrainedFormat:
    """How folders of a `model_type` describe and store a model of ours (`pretrained.toml`)."""

    family: str
    architecture: str
    block: str
    keys: Mapping[str, str]
    form: Mapping[str, Any]
    needs: Mapping[str, Any]
    defaults: Mapping[str, Any]
    names: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    transposed: bool = False


FORMATS = {kind: PretrainedFormat(**table) for kind, table in read_tables("pretrained.toml").items()}
IGNORED = re.compile("|".join(FILE_NAMES["ignored_fields"]))


def read_config_file(folder: Path) -> dict[str, Any]:
    try:
        found = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(f"{folder / 'config.json'} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise JobError(f"{folder / 'config.json'} is not a JSON object.")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the `[model]` section of a folder's model; raises JobError if it is not one of ours."""
    found, place = read_config_file(folder), folder / "config.json"
    whole = f'train it as transformers\' own module: model.name = "hf:{folder}"'
    kind = str(found.get("model_type"))
    if kind not in FORMATS:
        raise JobError(f"{place}: our decoders compute {', '.join(FORMATS)}, not {kind!r}; {whole}.")
    form = FORMATS[kind]
    values: dict[str, Any] = {"name": form.family, **form.form, **form.settings}
    if set(found.get("layer_types") or ()) <= {"full_attention"}:
        found.pop("layer_types", None)
    if not found.get("use_sliding_window", True):
        found.pop("sliding_window", None)
    for name, value in (dict(form.defaults) | found).items():
        if name in form.keys:
            values |= {} if value is None else {form.keys[name]: value}
        elif name in form.needs:
            needed = form.needs[name]
            if value is not None and value != needed:
                raise JobError(f"{place}: {name} = {shorten(value)}, but our decoder needs {needed!r}; {whole}.")
        elif name in ("rope_theta", "rope_scaling", "rope_parameters"):
            values |= _rope_keys(name, value)
        elif value is not None and not IGNORED.fullmatch(name):
            raise JobError(f"{place} has the field {name!r} = {shorten(value)}, which our decoder has not; {whole}.")
    return values


def _rope_keys(name: str, value: Any) -> dict[str, Any]:
    if name == "rope_theta":
        return {"rope_theta": value}
    scaling = dict(value or {})
    keys = {"rope_theta": scaling.pop("rope_theta")} if "rope_theta" in scaling else {}
    scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type", "default"))
    if scaling.get("partial_rotary_factor") == 1.0:
        del scaling["partial_rotary_factor"]
    return keys if scaling["rope_type"] == "default" else keys | {"rope_scaling": scaling}


def find_format(config: ModelConfig, folder: Path | None = None) -> str:
    """Returns the `model_type` that describes a model of ours, that of `folder` if it does; empty if none does."""
    preferred = str(read_config_file(folder).get("model_type")) if folder else ""
    values = config.model_dump()
    plain = not values.get("mup_base_width") and values.get("eod_token_id", -1) < 0
    if not plain or ("heads" in values and values["kv_heads"] != values["heads"] and values["positions"] == "learned"):
        return ""
    family = type(config).model_fields["name"].default
    fits = [kind for kind, form in FORMATS.items()
            if form.family == family and all(values.get(key) == value for key, value in form.form.items())]  # fmt: skip
    return preferred if preferred in fits else next(iter(fits), "")


def make_config(config: ModelConfig, folder: Path | None = None) -> dict[str, Any]:
    """Returns the config.json of a model of ours; what we do not know comes from the folder that it started from."""
    kind = find_format(config, folder)
    form, values = FORMATS[kind], config.model_dump()
    found = read_config_file(folder) if folder else {"max_position_embeddings": values["sequence"]}
    found |= {"model_type": kind, "architectures": [form.architecture]}
    needed = {name: None if value == "none" else value for name, value in form.needs.items()}
    found |= {name: value for name, value in needed.items() if name in found or not folder}
    found |= {name: values[key] for name, key in form.keys.items()}
    if "rope_theta" in values and values["positions"] == "rotary":
        scaling = values["rope_scaling"]
        rope = {"rope_type": "default"} if scaling["factor"] == 1.0 else scaling
        found |= {"rope_parameters": {**rope, "rope_theta": values["rope_theta"]}, "rope_theta": values["rope_theta"]}
        found.pop("rope_scaling", None)
        if scaling["factor"] != 1.0:
            found["rope_scaling"] = scaling
    return found


def starting_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `[model]` section with the keys of the model that `weights` names, where it has none itself."""
    weights, name = values.get("weights"), str(values.get("name", ""))
    is_folder = name.startswith("hf:") and not weights and Path(name[3:], "config.json").is_file()
    if is_folder and find_spec("transformers") is None:  # perhaps we can do without
        weights, name = name[3:], ""
        values = {**{key: value for key, value in values.items() if key != "name"}, "weights": weights}
    if not isinstance(weights, str) or weights in ("", "random") or ":" in name:
        return dict(values)
    folder, _ = split_step(weights)
    if (folder / "job.toml").is_file():
        check_job_file(folder)
        try:
            found = dict(parse_toml((folder / "job.toml").read_text(encoding="utf-8")).get("model", {}))
        except (OSError, ValueError, TypeError) as error:
            raise JobError(f"model.weights: {folder / 'job.toml'} cannot be read: {error}.") from None
    elif (folder / "config.json").is_file():
        try:
            found = read_config(folder)
        except (TypeError, AttributeError) as error:
            raise JobError(f"{folder / 'config.json'} has a field of a wrong type: {error}.") from None
        if name and PRESETS.get(name, {"family": name})["family"] != found["name"]:
            raise JobError(f"{folder} is a {found['name']!r} of ours, not a {name!r}; leave out model.name.")
    else:
        raise JobError(f"model.weights = {weights!r} is neither a run nor a folder with a config.json.")
    return {**found, **values}


def tokenizer_size(name: str) -> int:
    """Returns the number of ids of a tokenizer (`data.tokenizer`); 0 if it cannot be told."""
    if name.startswith("bpe:"):
        return int(name[4:]) if name[4:].isdecimal() and len(name) < 12 else 0
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # reading the data says what is wrong
        path = user_path(name)
        found = parse_json((path / "tokenizer.json" if path.is_dir() else path).read_bytes())
        pieces, added = found["model"]["vocab"], found.get("added_tokens") or ()
        ids = pieces.values() if isinstance(pieces, dict) else range(len(pieces))
        return 1 + max([*ids, *(token["id"] for token in added)])
    return 0


def mask_token(name: str) -> int:
    """Returns the id of a tokenizer's mask token; -1 if it has none."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        path = user_path(name)
        added = parse_json((path / "tokenizer.json" if path.is_dir() else path).read_bytes())["added_tokens"]
        return int(next(token["id"] for token in added if token["content"] in ("[MASK]", "<mask>")))
    return -1
