"""The cost model of a job's model: the closed form of decoders, or the operator costs of any other family."""

from shardwise.models.config import ModelConfig
from shardwise.models.registry import family_of
from shardwise.planner.costs.decoder_shape import ModelShape
from shardwise.planner.costs.operator_list import OperatorListModel


def shape_of(config: ModelConfig, itemsize: int = 4) -> ModelShape:
    """Returns the shape from which the planner predicts a model; `itemsize`: bytes per element of an activation."""
    family = family_of(config)
    decoder = family.decoder_shape(config)
    if decoder is not None:
        return ModelShape(**decoder)
    refused = family.refusals(config)
    splits_layers, splits_heads = "pipeline" not in refused, "tensor" not in refused
    make_operators = family.operator_costs(config, itemsize)
    return OperatorListModel(
        layers=len(make_operators(1)) - 2 * splits_layers, make_operators=make_operators, has_ends=splits_layers,
        heads=int(getattr(config, "heads", 1)) if splits_heads else 1, sequence=config.length if splits_heads else 1,
        width=1, kv_heads=1, head_dim=1, ffn=0, vocab=0, tables=family.tables(config),
    )  # fmt: skip
