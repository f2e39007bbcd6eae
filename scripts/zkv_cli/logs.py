"""How a process of the `zkv` command logs: to standard error, as text or as one JSON object a line.

Only processes that are ours are set up so; a user's program keeps its own logging.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and error if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        plain = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            plain["error"] = self.formatException(record.exc_info)
        return json.dumps(plain, ensure_ascii=False)


def set_up(form: str = "text", level: str = "info") -> None:
    """Log to standard error: "json", or "text" (in colour on a terminal only)."""
    handler: logging.Handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter())
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
    else:
        text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("zkv").setLevel(level.upper())
