"""What every test gets: two event loops, Hypothesis profiles, and skips that say what is missing.

It knows nothing of brokers, servers or workers; fixtures that start them stand beside their tests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = [ROOT, *(ROOT / name for name in ("codecs", "workers", "brokers", "scripts"))]

# The machine's load decides how long an example takes, so no profile has a deadline. `ci` draws the
# same examples each time: a red run there is a red run everywhere. `few` draws some of them, for
# another Python; `nightly` looks for new ones.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=100, **_COMMON)
settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("few", max_examples=25, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("ZKV_HYPOTHESIS", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    """Lets the processes that tests start import what this one imports, and keeps their journals
    out of the home of whoever runs the tests: another run must not go on from them."""
    state = tempfile.TemporaryDirectory(prefix="zkv-tests-state-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    if (ROOT / "zkv" / "__init__.py").exists():
        inherited = os.environ.get("PYTHONPATH", "")
        paths = [str(path) for path in SOURCE_ROOTS]
        paths += [path for path in inherited.split(os.pathsep) if path and path not in paths]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # Whoever tests may have keys of their own: tests have those that they make.
    os.environ["XDG_CONFIG_HOME"] = str(ROOT / "tests" / "no-configuration")
    for package in ("torch", "jax"):
        required = os.environ.get(f"ZKV_REQUIRE_{package.upper()}")
        if required and importlib.util.find_spec(package) is None:
            # Where it is promised, its tests must not vanish in silence.
            raise pytest.UsageError(
                f"ZKV_REQUIRE_{package.upper()} is set and {package} cannot be imported; install "
                "a CPU build of it"
            )


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every async test runs on asyncio's own loop and, where it is installed, on uvloop, unless it
    is marked `one_loop`."""
    del config
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop
    }
    if item.get_closest_marker("one_loop") is None and importlib.util.find_spec("uvloop"):
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, by the name of what it lacks."""
    probes: dict[str, Callable[[], str | None]] = {
        "gpu": _missing_gpu,
        "netns": _missing_namespaces,
        "slow": lambda: None if config.getoption("--slow") else "slow: run with --slow",
        "torch": partial(_missing, "torch"),
        "jax": partial(_missing, "jax", "optax"),
    }
    for marker, probe in probes.items():
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        # A probe may be dear (it imports CuPy, it makes a namespace), so only where it matters.
        reason = probe() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(*packages: str) -> str | None:
    gone = [one for one in packages if importlib.util.find_spec(one) is None]
    return f"{' and '.join(gone)} not installed" if gone else None


def _missing_gpu() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    import cupy

    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if devices else "no CUDA device"


def _missing_namespaces() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(command) is None:
            return f"the {command} command ({package}) is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    # Root in a container may still not be allowed to make one.
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace: {made.stderr.strip()}" if made.returncode else None
