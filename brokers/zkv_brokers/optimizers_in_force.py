"""Which optimizers a server's keys are updated with."""

from __future__ import annotations

from dataclasses import dataclass, field

from zkv.optimizer_spec import OptimizerSpec, optimizer
from zkv.staleness import Staleness

PLAIN_DEFAULT = "assign"
MODEL_DEFAULT = "sgd:lr=0.01"


@dataclass(slots=True)
class Settings:
    """The optimizers in force: for the model, and for plain keys."""

    model: OptimizerSpec
    plain: OptimizerSpec
    staleness: Staleness = field(default_factory=Staleness)

    @staticmethod
    def default() -> Settings:
        """Return the settings of a cluster that was told nothing."""
        return Settings(optimizer(MODEL_DEFAULT), optimizer(PLAIN_DEFAULT))
