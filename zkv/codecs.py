"""`zkv.codecs`: codecs and plans as Python values. A thin re-export.

Whatever takes a codec as text takes these too (`zkv.local(codec=...)`, `worker.set(codec=...)`);
the text of each is its `text`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from zkv_codecs.auto import Auto as Auto
from zkv_codecs.bits import BitController
from zkv_codecs.bits import Heuristic as Heuristic
from zkv_codecs.bits import Schedule as Schedule
from zkv_codecs.bits_learned import Learned as Learned
from zkv_codecs.chain import Chain as Chain
from zkv_codecs.feedback import Codec as Codec
from zkv_codecs.feedback import Dgc as Dgc
from zkv_codecs.feedback import ErrorFeedback as ErrorFeedback
from zkv_codecs.plan import Plan as Plan
from zkv_codecs.plan import plan as plan
from zkv_codecs.spec import codec as codec
from zkv_codecs.spec import stage as stage

Chosen: TypeAlias = Plan | Codec | Auto | BitController[Any]
"""What may stand for a codec's text."""

__all__ = [
    "Auto",
    "Chain",
    "Chosen",
    "Codec",
    "Dgc",
    "ErrorFeedback",
    "Heuristic",
    "Learned",
    "Plan",
    "Schedule",
    "codec",
    "plan",
    "stage",
]
