"""A family of models as one object: everything that the rest of the package asks about a kind of model.

Every other package calls these methods; none checks which family it has. To add a family, subclass `Family` and
`ModelConfig` and list it in `shardwise.models.registry`; another package registers its own under the entry point group
`shardwise.families`.

The built-in families keep the config and the `Family` in one file and the network in another (`gpt_family.py` and
`gpt.py`), so that a typo in a job is reported without importing PyTorch. Your own family may be a single file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.errors import JobError
from shardwise.models.config import ModelConfig, read_tables

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from shardwise.models.chain import Chain, InitialValues
    from shardwise.models.objectives import Objective
    from shardwise.models.operator_costs import OperatorCosts

REFUSALS = read_tables("refusals.toml")


def reasons(table: str, **facts: Any) -> dict[str, str]:
    """Returns a table of refusals.toml, its sentences filled in."""
    entries = REFUSALS[table].items()
    return {key: sentence.format(**facts) for keys, sentence in entries for key in keys.split(", ")}


@dataclass(frozen=True)
class TableSpec:
    """An embedding table that is sharded over the memory of all ranks."""

    name: str
    rows: int
    width: int
    lookups_per_sample: float = 1.0
    init_std: float = 1.0

    @property
    def size(self) -> int:
        return self.rows * self.width


class Family:
    """A model family. The `config` that its methods take is the job's `[model]` section."""

    config: ClassVar[type[ModelConfig]]  # the `[model]` section
    builder: ClassVar[str]
    """The function that `build` calls, as `package.module:function`, so that it is imported only when it is needed."""
    objective_class: ClassVar[str] = ""  # that of the training objective, likewise; empty: next-token prediction
    verify_layouts: ClassVar[str] = "default"  # those that `shardwise verify` proves by default, in its layouts.toml
    refused: ClassVar[str] = "default"  # what no model of the family supports, in refusals.toml

    def build(self, config: Any, seed: int) -> Chain:
        """Returns the model on the current default device, uninitialized. `seed` keys its dropout masks."""
        chain: Chain = resolve_name(self.builder)(config, seed)
        chain.initial = self.pretrained_weights(config, chain)
        if config.lora is not None:
            from shardwise.models.lora import adapt_chain, add_adapters

            if config.lora.adapter:
                raise JobError("model.lora.adapter: adapters of peft need transformers' module: hf:FOLDER.")
            add_adapters(chain, config.lora)
            adapt_chain(chain, chain, config.lora)
        return chain

    def build_on_meta(self, config: Any, seed: int = 0) -> Chain:
        """Returns the model on the meta device: shapes without memory."""
        import torch

        with torch.device("meta"):
            return self.build(config, seed)

    def objective(self, config: Any, seed: int) -> Objective:
        """Returns the function that turns token windows into inputs and targets."""
        if not self.objective_class:
            return resolve_name("shardwise.models.objectives:next_token")  # type: ignore[no-any-return]
        return resolve_name(self.objective_class)(config, seed)  # type: ignore[no-any-return]

    def reference(self, config: Any) -> nn.Module | None:
        """Returns transformers' module of the same shape in float64; None if there is none or it is not installed."""
        return None

    def pretrained_weights(self, config: Any, chain: Chain) -> InitialValues | None:
        """Returns the weights of the Hugging Face folder `config.weights_folder`; None: random weights."""
        if config.weights_folder is not None:
            raise JobError(f"model.weights = {config.weights!r}: {config.description} can start from runs only.")
        return None

    def export_weights(self, config: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns our weights, or gradients, under the names and in the shapes of a Hugging Face folder."""
        return dict(weights)

    def export_config(self, config: Any) -> dict[str, Any]:
        """Returns the config.json of a Hugging Face folder of this model."""
        raise JobError(f"{config.description} has no form that transformers knows; only its own checkpoints hold it.")

    def has_huggingface_form(self, config: Any) -> bool:
        try:
            return bool(self.export_config(config))
        except JobError:
            return False

    def shrink(self, config: Any) -> Any:
        """Returns a small config of the same family, for `shardwise verify`."""
        return config.model_validate(config.model_dump() | config._shrunk_values() | {"weights": ""})

    def refusals(self, config: Any) -> dict[str, str]:
        """Returns the settings that this model does not support, each with the reason. Keys: an axis of a layout,
        "recompute", "compile", a precision, "local_sgd", "pack" (data) or "split_backward" (such as zero-bubble)."""
        return reasons(self.refused, config=config)

    def example_batch(self, config: Any, samples: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns a micro-batch on the meta device, as keyword arguments of the chain's `forward`."""
        import torch

        tokens = torch.empty(samples, config.length, dtype=torch.int64, device="meta")
        return {"x": tokens, "ids": tokens[:, 0], "targets": tokens}

    def example_inputs(self, config: Any, samples: int, limit: int) -> dict[str, torch.Tensor]:
        """Returns random inputs of transformers' module, of at most `limit` tokens."""
        import torch

        length = min(config.sequence_length, limit)
        return {"input_ids": torch.randint(0, config.vocab_size, (samples, length), generator=torch.Generator())}

    def forward_flops(self, config: Any) -> list[float]:
        """Returns the forward FLOPs per sample of each module of the chain, by tracing it on fake tensors. A module
        without matmuls, such as an embedding, counts 8 per output element for the memory that it moves."""
        import torch

        batch = self.example_batch(config, 1, torch.float32)
        batch.pop("targets", None)  # the fused loss computes gradients
        chain = self.build_on_meta(config).eval()  # in training, a batch norm refuses a single value per channel
        costs = resolve_name("shardwise.models.trace:trace_module")(chain, has_equal_children=True, **batch)
        flops = [module.flops or 2.0 * module.output_bytes for module in costs]  # of 4 bytes per element
        if not costs[-1].name:  # what the chain computes outside of its modules
            flops[-2:] = [sum(flops[-2:])]
        return flops

    def decoder_shape(self, config: Any) -> dict[str, Any] | None:
        """Returns the sizes that the planner's closed-form decoder model needs; None: it uses `operator_costs`."""
        return None

    def operator_costs(self, config: Any, itemsize: int) -> Callable[..., tuple[OperatorCosts, ...]]:
        """Returns a function from micro-batch size (and tensor degree) to the costs of each module, by tracing."""
        return resolve_name("shardwise.models.trace:trace_family")(self, config, itemsize)  # type: ignore[no-any-return]

    def untraceable(self, config: Any) -> str:
        """Returns why `operator_costs` are a rough estimate from the parameters alone; empty if they are traced."""
        return ""

    def trace_costs(self, config: Any, samples: int, dtype: torch.dtype) -> tuple[OperatorCosts, ...]:
        """Returns the costs of each module for a micro-batch."""
        model, batch = self.build_on_meta(config).to(dtype), self.example_batch(config, samples, dtype)
        trace = resolve_name("shardwise.models.trace:trace_module")
        return trace(model, has_equal_children=True, **batch)  # type: ignore[no-any-return]

    def stage_shapes(self, config: Any, layout: Any, samples: int) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the first stage's input on the meta device, and the shape of what stages exchange."""
        import torch

        positions = config.length // layout.context
        tokens = torch.empty(samples, positions, dtype=torch.int64, device="meta")
        return tokens, (samples, positions // layout.tensor, config.width)

    def task(self, config: Any) -> Any:
        """Returns the user's task (`shardwise.Task`): own data, loss, optimizer, callbacks; None for our models."""
        return None

    def sources(self, config: Any) -> Any:
        """Returns training and validation source of a model that brings its own data; None: see `[data]`."""
        return None

    def tables(self, config: Any) -> Sequence[TableSpec]:
        """Returns the embedding tables, which are kept outside the chain."""
        return ()

    def build_reference(self, config: Any, seed: int, dtype: torch.dtype) -> nn.Module:
        """Returns the model that `verify` takes for the truth, initialized."""
        model = self.build(config, seed).to(dtype)
        resolve_name("shardwise.models.chain:init_weights")(model, seed)
        return model

    def reference_loss(self, config: Any, model: nn.Module, samples: Any, document_ids: Any = None) -> Tensor | None:
        """Returns the mean loss of a batch; None: the cross-entropy of the model's logits."""
        return None

    def reference_logits(self, config: Any, model: nn.Module, samples: Any, document_ids: Any = None) -> Tensor:
        documents = {} if document_ids is None else {"document_ids": document_ids}
        return model(samples.tokens, ids=samples.ids, **documents)  # type: ignore[no-any-return]

    def explain_difference(self, config: Any, layout: Any, kind: str) -> str:
        """Returns a likely cause of a difference that `verify` found first in this kind of quantity, or ""."""
        return ""
