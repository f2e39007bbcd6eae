"""A worker's figures as a file, for `zkv run --report`, and its spans, for `zkv trace run`: written
once, when the worker closes.

Each life of a worker has a file of its own, so that one which comes back under the same rank loses
nothing, and so that a program's own report (`worker-RANK.json`) is never overwritten. Nobody's
training may fail because of it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from zkv_net import tracing
from zkv_workers import faces
from zkv_workers.config import SessionConfig
from zkv_workers.driver import Driver
from zkv_workers.encoding import Encoder
from zkv_workers.signals import Membership

log = logging.getLogger("zkv.worker")


def wanted(config: SessionConfig) -> bool:
    """Return whether somebody has asked for this worker's figures."""
    return bool(config.report) and not config.observer


def write(
    config: SessionConfig,
    member: Membership,
    driver: Driver,
    ledger: faces.Ledger,
    encoder: Encoder,
) -> None:
    """Leave `figures-RANK-INCARNATION.json` in the report folder, if there is one to be left, and
    the spans in theirs.

    The file is complete or not there. A folder that cannot be written to is a warning.
    """
    _write_spans(config, member, driver, ledger)
    if not wanted(config):
        return
    plain: dict[str, Any] = faces.stats(driver, ledger, encoder)
    plain |= {
        "rank": member.number,
        "incarnation": member.incarnation,
        "began": ledger.began,
        "ended": time.time(),
        "updates": ledger.updates,
    }
    path = Path(config.report, f"figures-{member.number}-{member.incarnation}.json")
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(plain), "utf-8")
        os.replace(part, path)
    except OSError as error:
        log.warning("the figures of worker %d are lost: %s", member.number, error)


def before_sigterm(
    config: SessionConfig, member: Membership, driver: Driver, ledger: faces.Ledger
) -> None:
    """See to it that a worker's spans are left when SIGTERM ends its process, too."""
    if ledger.spans is not None:
        tracing.before_sigterm(lambda: _write_spans(config, member, driver, ledger))


def _write_spans(
    config: SessionConfig, member: Membership, driver: Driver, ledger: faces.Ledger
) -> None:
    """Leave the worker's spans in the folder of ZKV_TRACE, if some were recorded."""
    if ledger.spans is None or not config.trace:
        return
    about = {"name": config.name, "host": config.host, "incarnation": member.incarnation}
    role = "observer" if config.observer else "worker"
    alignment = driver.session.round_trips.alignment
    tracing.write(config.trace, role, member.number, ledger.spans, alignment, about)
