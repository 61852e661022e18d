"""The family of transformers' models: built from a config, trained as transformers' own module."""

import copy
import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationError
from torch import nn

from shardwise.adapters.anatomy import Anatomy
from shardwise.adapters.huggingface import replacements
from shardwise.adapters.module_family import ModuleConfig, ModuleFamily, check_context, meta_chain
from shardwise.adapters.split_attention import SPLIT, context_refusal
from shardwise.adapters.task import Task
from shardwise.adapters.tensor_plan import NAMES, guess_plan, make_sharding_plan
from shardwise.errors import JobError, suggest
from shardwise.models.family import reasons
from shardwise.models.layers import positions_in_documents
from shardwise.models.objectives import MaskedLM, Objective, SpanCorruption, next_token
from shardwise.models.preference import plain_targets
from shardwise.models.pretrained import ModuleWeights
from shardwise.models.pretrained_config import read_config_file
from shardwise.models.quantize import round_quantized
from shardwise.models.sharding import ShardingPlan
from shardwise.models.t5_family import T5Config

FIELDS = NAMES["transformers"]
# Experts without data-dependent shapes and in any dtype; on a GPU in bf16 `configure` chooses the grouped kernel.
TRACEABLE = {"experts_implementation": "batched_mm"}
MAX_LAYERS = 10_000


def _smaller(hf: Any, bounds: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of a config that exceed their bounds, at the bounds."""
    values = {key: getattr(hf, key, None) for key in bounds}
    return {key: bounds[key] for key, value in values.items() if isinstance(value, int) and value > bounds[key]}


def _smaller_widths(hf: Any) -> dict[str, Any]:
    """Returns narrower sizes: at most 4 heads of 8 features, in the same groups."""
    heads = int(getattr(hf, "num_attention_heads", 0) or 0)
    if not heads:
        return _smaller(hf, FIELDS["small_widths"])
    groups = heads // int(getattr(hf, "num_key_value_heads", None) or heads)
    kv_heads = 1 if groups >= 4 else 2
    width = "hidden_size" if "hidden_size" in hf.to_dict() else "n_embd"
    names = {"num_attention_heads" if width == "hidden_size" else "n_head": kv_heads * min(groups, 4)}
    if "num_key_value_heads" in hf.to_dict():
        names["num_key_value_heads"] = kv_heads
    return _smaller(hf, FIELDS["small_widths"]) | names | {width: 8 * kv_heads * min(groups, 4)}


class HuggingFaceConfig(ModuleConfig):
    """A model of the transformers library."""

    description = "a transformers model"
    name: str = "hf:llama"
    args: dict[str, Any] = {}
    """Fields of the model's config, which override those of the folder or the defaults of the type."""
    vocab: int = Field(0, ge=0, le=10**7)  # Number of token ids; 0: that of the config
    mask_token_id: int = Field(-1, ge=-1)
    """For models that fill in masks: the id of the mask. -1: that of the tokenizer, or else the last id is reserved."""
    blocks: int = Field(0, ge=0, le=0)  # Not used: the number of layers is a field of `args`

    @property
    def hf(self) -> Any:
        """The transformers config."""
        return load_config(self)

    @property
    def weights_folder(self) -> Path | None:
        folder = self.pretrained_folder
        has_weights = folder and any(".safetensors" in file.name or file.suffix == ".bin" for file in folder.iterdir())
        return folder if has_weights and not self.weights else super().weights_folder

    @property
    def pretrained_folder(self) -> Path | None:
        folder = Path(self.name.removeprefix("hf:"))
        return folder if folder.is_dir() else None

    @property
    def task(self) -> Task:
        return make_task(self)

    @property
    def kind(self) -> str:
        return model_kind(self)[0]

    @property
    def vocab_size(self) -> int:
        known = int(getattr(self.hf, "vocab_size", 0))
        if self.vocab > known > 0:
            raise JobError(f"model.vocab = {self.vocab} exceeds the model's {known}; set model.args.vocab_size.")
        return self.vocab or known

    @property
    def sample_kind(self) -> Any:  # type: ignore[override]
        return "images" if self.kind == "image classification" else "tokens"

    @property
    def heads(self) -> int:
        heads = getattr(self.hf, "num_attention_heads", None)
        return heads if isinstance(heads, int) and heads > 0 else 1

    @property
    def image_size(self) -> int:
        return int(getattr(self.hf, "image_size", 224))

    @property
    def num_classes(self) -> int:
        return int(self.hf.num_labels)

    @property
    def sequence_length(self) -> int:
        return 1 if self.sample_kind == "images" else self.sequence

    @property
    def targets_are_text(self) -> bool:  # type: ignore[override]
        return self.kind == "causal language model"

    @property
    def span_corruption(self) -> T5Config | None:
        """The sizes of the samples of an encoder-decoder; None for other models."""
        if self.kind != "encoder-decoder":
            return None
        try:
            sizes = T5Config(vocab=self.vocab_size, sequence=self.sequence, target_sequence=self.sequence + 8)
        except ValidationError as error:
            raise JobError(f"[model]: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None
        noise_tokens, spans = sizes.noise_counts(sizes.text_window)
        return sizes.model_copy(update={"target_sequence": noise_tokens + spans + 1})

    @property
    def length(self) -> int:
        return super().length if self.span_corruption is None else self.span_corruption.length

    @property
    def text_window(self) -> int:
        return super().text_window if self.span_corruption is None else self.span_corruption.text_window

    @property
    def reserved_ids(self) -> int:  # type: ignore[override]
        if self.span_corruption is not None:
            return self.span_corruption.reserved_ids
        return int(self.kind == "masked language model" and self.mask_token_id < 0)

    @property
    def resolved_mask_id(self) -> int:
        size = self.vocab_size
        if self.mask_token_id >= size:
            raise JobError(f"model.mask_token_id = {self.mask_token_id} must be below the vocabulary's {size}.")
        return size - 1 if self.mask_token_id < 0 else self.mask_token_id

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        return replacements.expert_count(meta_chain(self).root)

    @property
    def max_predictions(self) -> int:
        return max(1, round(0.15 * self.sequence))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise JobError('models named "hf:..." need transformers: pip install "shardwise[hf]".') from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _refusal(what: str, error: Exception) -> JobError:
    """Returns, in a sentence, why transformers does not make a config or a model."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')[:400]}"
    return error if isinstance(error, JobError) else JobError(f"{what}: {reason}.")


@lru_cache(maxsize=8)
def load_config(config: HuggingFaceConfig) -> Any:
    """Returns the transformers config of a folder or a model type, with the job's fields."""
    transformers, source = _transformers(), config.name.removeprefix("hf:")
    place, settings = Path(source, "config.json"), {"use_cache": False, **TRACEABLE, **config.args}
    try:
        if place.is_file():
            options = {"local_files_only": True, "trust_remote_code": False}
            found = transformers.AutoConfig.from_pretrained(source, **options, **settings)
        elif source in transformers.CONFIG_MAPPING:
            found = transformers.CONFIG_MAPPING[source](**settings)
        else:
            hint = "." if "/" in source else f"; {suggest(source, list(transformers.CONFIG_MAPPING))}"
            what = "neither a folder with a config.json nor a model type of transformers"
            raise JobError(f'model.name = "hf:{source}" is {what}{hint}')
        layers = max(size for key in FIELDS["small_depths"] if isinstance(size := getattr(found, key, 0), int))
        if layers > MAX_LAYERS or "NaN" in found.to_json_string(use_diff=False):
            raise ValueError(f"it has a field that is NaN, or more than {MAX_LAYERS} layers")
        if getattr(found, "quantization_config", None):
            raise JobError(f"{place} has a quantization_config; save the model without quantization.")
        places = getattr(found, "max_position_embeddings", None)
        if found.model_type in FIELDS["learned_positions"] and isinstance(places, int) and places < config.sequence:
            raise JobError(f"{config.name} has {places} learned positions; set model.sequence to at most that.")
    except Exception as error:  # noqa: BLE001 - transformers raises what it likes
        raise _refusal(f"{place} cannot be read" if place.is_file() else f"{config.name}, model.args", error) from None
    for key in FIELDS["attention_dropouts"]:
        if key not in config.args and getattr(found, key, None):
            setattr(found, key, 0.0)
    defaults = type(found)().to_dict()
    for key in config.args:
        if key not in defaults and not hasattr(type(found)(), key):
            raise JobError(f"[model.args]: {type(found).__name__} has no field {key!r}; {suggest(key, list(defaults))}")
    return found


def model_kind(config: HuggingFaceConfig) -> tuple[str, Any]:
    """Returns what a model is trained for, and the transformers class that builds it."""
    transformers, hf = _transformers(), load_config(config)
    kinds = {kind: getattr(transformers, name) for kind, name in FIELDS["kinds"].items()}
    fitting = [kind for kind, model_class in kinds.items() if type(hf) in model_class._model_mapping]
    if getattr(hf, "is_decoder", False) and "causal language model" in fitting:
        fitting = ["causal language model"]  # BERT can be both, and else is trained to fill in masks
    if fitting:
        return fitting[0], kinds[fitting[0]]
    what = f"{type(hf).__name__} is no language model, encoder-decoder or image classifier"
    remedy = 'build it in a function of your own and name that: "python:package.module:function"'
    raise JobError(f"model.name = {config.name!r}: {what}; {remedy}.")


class HuggingFaceFamily(ModuleFamily):
    config = HuggingFaceConfig

    def objective(self, config: Any, seed: int) -> Objective:
        if config.span_corruption is not None:
            eos, pad = getattr(config.hf, "eos_token_id", None), getattr(config.hf, "pad_token_id", None)
            start = getattr(config.hf, "decoder_start_token_id", None)
            return SpanCorruption(config.span_corruption, seed, eos, pad if start is None else start)
        return MaskedLM(config, seed) if config.kind == "masked language model" else next_token

    def pretrained_weights(self, config: Any, chain: Any) -> ModuleWeights | None:
        return None if config.weights_folder is None else ModuleWeights.of_folder(config.weights_folder, chain.root)

    def reference(self, config: Any) -> nn.Module | None:
        raise JobError(f"{config.name} is transformers' own module, the reference of every layout; omit --against.")

    def export_weights(self, config: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        root: Any = meta_chain(config).root
        return revert_weight_conversion(root, dict(weights))  # type: ignore[no-any-return]

    def export_config(self, config: Any) -> dict[str, Any]:
        folder = config.pretrained_folder
        found = read_config_file(folder) | config.args if folder else config.hf.to_diff_dict() | {"use_cache": True}
        return found | {"architectures": [type(meta_chain(config).root).__name__]}

    def build_reference(self, config: Any, seed: int, dtype: torch.dtype) -> nn.Module:
        module = super().build_reference(config, seed, dtype)
        if config.weights_folder is not None:  # as transformers reads them
            model_class = model_kind(config)[1]
            read = model_class.from_pretrained(config.weights_folder, config=copy.deepcopy(config.hf), dtype=dtype)
            module.load_state_dict(read.state_dict(), strict=config.lora is None)  # without the adapters
            round_quantized(module, meta_chain(config).sharding_plan)
        return module

    def shrink(self, config: Any) -> Any:
        layers = _smaller(config.hf, FIELDS["small_depths"])
        for args in (layers | _smaller_widths(config.hf), layers):
            changes = {"sequence": min(config.sequence, 32), "args": {**config.args, **args}, "weights": "random"}
            small = config.model_copy(update=changes)
            with suppress(Exception):  # sizes that do not go together; transformers raises what it likes
                meta_chain(small)
                return small
        return config

    def _plan(self, config: Any, module: nn.Module, anatomy: Anatomy) -> ShardingPlan:
        given = self.task(config).plan
        heads = config.heads
        head_dim = getattr(config.hf, "head_dim", None) or int(getattr(config.hf, "hidden_size", heads)) // heads
        hint = FIELDS["tensor_plans"].get(config.hf.model_type) or translate_plan(module) or guess_plan(module, anatomy)
        return make_sharding_plan(module, anatomy, given or hint, head_dim, is_hint=not given)

    def refusals(self, config: Any) -> dict[str, str]:
        refused = super().refusals(config)
        dropout = next((key for key in FIELDS["attention_dropouts"] if getattr(config.hf, key, 0)), "")
        if meta_chain(config).anatomy.random_module and dropout:
            refused |= reasons("attention dropout", key=dropout, value=getattr(config.hf, dropout))
        if config.kind == "causal language model" and "context" not in refused:
            del refused["pack"]  # attention goes through an interface that gets the documents
        if config.num_experts:
            del refused["expert"]
        return refused

    def example_inputs(self, config: Any, samples: int, limit: int) -> dict[str, torch.Tensor]:
        if config.sample_kind == "images":
            size = (samples, 3, config.image_size, config.image_size)
            return {"pixel_values": torch.randn(size, generator=torch.Generator(), dtype=torch.float64)}
        inputs = super().example_inputs(config, samples, limit)
        return inputs if config.span_corruption is None else inputs | {"decoder_input_ids": inputs["input_ids"]}

    def context_refusal(self, config: Any) -> str:
        chain = meta_chain(config)
        module: Any = chain.root
        if config.sample_kind == "images":
            return "its samples are images"
        if "position_ids" not in inspect.signature(module.forward).parameters:
            return "its forward takes no position_ids"
        batch = {"input_ids": torch.zeros(2, config.sequence, dtype=torch.int64)}
        interface, trial = "transformers' attention interface", replacements.trial(module)
        return context_refusal(module, chain.anatomy.blocks, batch, lambda b: module(**b), interface, trial)


@lru_cache(maxsize=8)
def make_task(config: Any) -> Task:
    hf, (kind, model_class) = config.hf, model_kind(config)

    def build() -> nn.Module:
        own = copy.deepcopy(hf)
        own.architectures = own.architectures or []  # of several heads (DeiT), the first
        try:
            module: nn.Module = model_class.from_config(own, dtype=torch.float32)  # else it rounds its buffers
        except Exception as error:  # noqa: BLE001 - transformers raises what it likes
            raise _refusal(f"transformers cannot build {config.name}", error) from None
        if replacements.expert_count(module):
            for part in module.modules():
                if hasattr(part, "_is_expert_parallel"):
                    part.__dict__["stacks_experts"] = True
        return module

    current: dict[str, torch.Tensor] = {}  # the labels of the batch in the forward

    def loss(output: Any, batch: Any) -> torch.Tensor:
        logits, labels = output.logits, batch["labels"]
        if logits.dim() == 0:  # the head computed the loss
            return logits
        labels = labels[:, -logits.shape[1] :] if kind == "encoder-decoder" else labels
        if (weigh := replacements.weigh_pairs(labels)) is None:
            return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        losses = F.cross_entropy(logits.flatten(0, -2), plain_targets(labels).flatten(), reduction="none")
        value, weights = weigh(losses.detach())
        weighted = (losses * weights).sum()
        return weighted + (value - weighted).detach()

    name = "pixel_values" if kind == "image classification" else "input_ids"

    def inputs(batch: Any) -> dict[str, Any]:
        if kind == "encoder-decoder":
            tokens = batch["input_ids"]
            return {"input_ids": tokens[:, : config.sequence], "decoder_input_ids": tokens[:, config.sequence :]}
        positions, current["labels"] = SPLIT.local_positions, batch["labels"]
        split = {} if positions is None else {"position_ids": positions.expand(batch["labels"].shape[0], -1)}
        if SPLIT.document_ids is not None:
            replacements.register()
            restarted = positions_in_documents(SPLIT.document_ids)
            split = {"position_ids": restarted if positions is None else restarted[:, positions]}
        return {name if key == "input_ids" else key: value for key, value in batch.items() if key != "labels"} | split

    def example_batch(samples: int) -> dict[str, torch.Tensor]:
        if kind != "image classification":
            return dict.fromkeys(("input_ids", "labels"), torch.zeros(samples, config.length, dtype=torch.int64))
        images = torch.zeros(samples, 3, config.image_size, config.image_size)
        return {"input_ids": images, "labels": torch.zeros(samples, 1, dtype=torch.int64)}

    def configure(module: Any, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda" and dtype is torch.bfloat16:
            module.config._experts_implementation = "grouped_mm"
        if kind != "causal language model":
            return
        # While a CUDA graph is captured, transformers' own causal mask is a matrix, which rules out fast kernels.
        if device.type == "cuda" and not check_context(config)[0]:
            replacements.attend_through_shardwise(module)
        if replacements.can_fuse_loss(module, meta_chain(config).root, config.sequence):
            replacements.fuse_loss(module, current)

    return Task(build, loss, count=lambda batch: (batch["labels"] != -100).sum(), inputs=inputs, configure=configure,
                casts_inputs=False, split_sequence=replacements.attend_through_shardwise, trunk=config.trunk,
                dispatch_tokens=replacements.dispatch_tokens, plan=config.tensor_plan,
                example_batch=example_batch)  # fmt: skip


def translate_plan(module: Any) -> dict[str, str]:
    """Returns the tensor plan of a transformers model in our styles. A module next to one with an unknown style, or
    whose partner is missing, stays whole."""
    prefix, styles = module.base_model_prefix, FIELDS["styles"]
    base: Mapping[str, str] = getattr(module.config, "base_model_tp_plan", None) or {}
    plan = {f"{prefix}.{pattern}": style for pattern, style in base.items()}
    plan |= getattr(type(module), "_tp_plan", None) or {}
    head = module.get_output_embeddings() if "lm_head" in plan else None
    embedding = None if head is None else module.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is embedding.weight:
        plan |= {name: "embedding_rowwise" for name, part in module.named_modules() if part is embedding}
    unknown = {pattern.rpartition(".")[0] for pattern, style in plan.items() if style not in styles}
    unknown |= {pattern for pattern, style in plan.items() if style not in styles}
    known = {pattern: styles.get(style) for pattern, style in plan.items() if pattern.rpartition(".")[0] not in unknown}
    return {pattern: style for pattern, style in known.items() if style}
