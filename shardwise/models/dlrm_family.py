"""The config and family of DLRM: recommenders with embedding tables sharded over the memory of all ranks."""

import math
from typing import Annotated, Any

from pydantic import Field

from shardwise.models.config import Count, ModelConfig
from shardwise.models.family import Family, TableSpec


class DLRMConfig(ModelConfig):
    """A recommender: one embedding table per categorical feature, and two MLPs (Naumov et al. 2019)."""

    description = "a DLRM"
    sample_kind = "clicks"
    is_recomputable_elsewhere = False
    supports_muon = False
    name: str = "dlrm"
    tables: int = Field(26, ge=1, le=10_000)
    rows: Annotated[Count, Field(ge=1, le=10**11)] | tuple[Annotated[Count, Field(ge=1, le=10**11)], ...] = 1_000_000
    width: int = Field(128, ge=1, le=10**6)
    lookups: int = Field(1, ge=1, le=10_000)
    dense_features: int = Field(13, ge=1, le=10**6)
    bottom: tuple[Annotated[int, Field(ge=1, le=10**6)], ...] = (512, 256)
    top: tuple[Annotated[int, Field(ge=1, le=10**6)], ...] = (1024, 1024, 512, 256)

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.rows, tuple) and len(self.rows) != self.tables:
            raise ValueError(f"rows lists {len(self.rows)} sizes for {self.tables} tables; give one size per table")

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Number of rows of each table."""
        return self.rows if isinstance(self.rows, tuple) else (self.rows,) * self.tables

    def _shrunk_values(self) -> dict[str, Any]:
        tables = min(self.tables, 5)
        rows = [min(size, 41) for size in self.table_rows[:tables]]
        return {
            "tables": tables, "rows": rows if isinstance(self.rows, tuple) else rows[0], "width": min(self.width, 8),
            "lookups": min(self.lookups, 3), "bottom": [min(size, 16) for size in self.bottom[:2]],
            "top": [min(size, 16) for size in self.top[:2]],
        }  # fmt: skip


class DLRMFamily(Family):
    config = DLRMConfig
    builder = "shardwise.models.dlrm:DenseDLRM"
    verify_layouts = refused = "dlrm"

    def example_batch(self, config: DLRMConfig, samples: int, dtype: Any) -> dict[str, Any]:
        import torch

        return {
            "numbers": torch.empty(samples, config.dense_features, dtype=dtype, device="meta"),
            "vectors": torch.empty(samples, config.tables, config.width, dtype=dtype, device="meta").requires_grad_(),
            "labels": torch.empty(samples, device="meta"),
        }

    def tables(self, config: DLRMConfig) -> list[TableSpec]:
        # Naumov et al. initialize uniformly in +-1 / sqrt(rows); ours is normal with the same standard deviation.
        return [
            TableSpec(f"table{number}", rows, config.width, config.lookups, 1.0 / math.sqrt(3.0 * rows))
            for number, rows in enumerate(config.table_rows)
        ]
