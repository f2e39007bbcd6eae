"""What the log's `Configure` says to a server. Pure."""

from __future__ import annotations

from zkv import control as c
from zkv.optimizer_spec import OptimizerSpec
from zkv.staleness import staleness
from zkv_brokers.store import Settings
from zkv_codecs.deltas import down_plan
from zkv_codecs.plan import Plan, plan


def settings_of(entry: c.Configure) -> Settings:
    """Return the optimizers, and the rule for stale gradients."""
    plain = entry.optimizer
    return Settings(
        OptimizerSpec.from_plain(plain["model"]),
        OptimizerSpec.from_plain(plain["plain"]),
        staleness(plain.get("staleness", "none")),
        norms=bool(plain.get("norms")),
    )


def down_of(entry: c.Configure) -> Plan:
    """Return how grants are sent."""
    return down_plan(entry.optimizer.get("codec_down", "none"))


def up_of(entry: c.Configure) -> Plan:
    """Return how gradients come."""
    return plan(entry.optimizer.get("codec", "none"))
