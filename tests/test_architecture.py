"""Laws of the source tree that no linter states: sizes, folders, banned calls, traces of a machine.

Patterns that must not occur in any file are put together from pieces here, so that this file does
not match itself.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "zkv",
    "codecs/zkv_codecs",
    "workers/zkv_workers",
    "brokers/zkv_brokers",
    "brokers/zkv_net",
    "scripts/zkv_cli",
)
PURE_PACKAGES = ("zkv", "codecs/zkv_codecs")
SOURCE_ROOTS = ("codecs", "workers", "brokers", "scripts")
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 59

BANNED_NAMES = {"eval", "exec", "recv_pyobj", "send_pyobj", "pickle", "marshal", "shelve"}
# Joined at run time: a formatter would join neighbouring literals.
UNFINISHED = re.compile("|".join(rf"\b{a}{b}\b" for a, b in [("TO", "DO"), ("FIX", "ME")]))
UNFINISHED_ERROR = "".join(["NotImplemented", "Error"])

_FOLDERS = ["work", "root", "home", "Users", "tmp/zv", "opt/wheels", "opt/pypi"]
_HOSTS = [
    rf"{name}{rest}"
    for name, rest in [
        ("py", r"pi\.org"),
        ("python", r"hosted\.org"),
        ("registry", r"\.npmjs\."),
        ("deb", r"\.debian\."),
        ("download", r"\.pytorch\."),
    ]
]
MACHINE_TRACES = re.compile(
    r"(?<![\w.~-])/(?:" + "|".join(_FOLDERS) + r")/|" + "|".join(_HOSTS), re.IGNORECASE
)


def modules(packages: tuple[str, ...] = PACKAGES) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def tracked_files() -> list[Path]:
    """Every file that travels with the project, new ones that nobody has committed yet included."""
    if (ROOT / ".git").exists() and shutil.which("git") is not None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    else:
        hidden = re.compile(r"^(\.(?!ci$|gitignore$).*|__pycache__|build|dist|.*\.egg-info)$")
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(hidden.match(part) for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file())


def short(path: Path, node: ast.AST | None = None) -> str:
    line = f":{node.lineno}" if isinstance(node, ast.stmt | ast.expr) else ""
    return f"{path.relative_to(ROOT)}{line}"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


def called_name(call: ast.Call) -> str:
    """The dotted name of what is called, as far as it is written out: `asyncio.wait_for`."""
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def test_every_package_is_there_typed_and_says_what_it_is_for():
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file(), f"{package}/py.typed is missing"
        assert (ROOT / package / "__init__.py").is_file(), f"{package}/__init__.py is missing"


@pytest.mark.parametrize("folder", SOURCE_ROOTS)
def test_a_source_root_is_never_a_package(folder):
    # codecs/__init__.py would stand in for the standard library's codecs, which the interpreter
    # imports before anything else; the other three would claim names that are not ours.
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_module_says_what_it_is_for():
    silent = [short(path) for path in modules() if not ast.get_docstring(parse(path))]
    assert not silent, f"no module docstring: {silent}"


def test_modules_and_functions_are_short():
    long: list[str] = []
    for path in modules():
        lines = len(path.read_text("utf-8").splitlines())
        if lines > MODULE_LINES_MAX:
            long.append(f"{short(path)}: {lines} lines, at most {MODULE_LINES_MAX}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    where = f"{short(path, node)} {node.name}"
                    long.append(f"{where}: {lines} lines, at most {FUNCTION_LINES_MAX}")
    assert not long, "\n".join(long)


def test_no_bytes_become_code():
    guilty: list[str] = []
    for path in [*modules(), *sorted((ROOT / "scripts").glob("*.py"))]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call):
                name = called_name(node)
                if name in ("eval", "exec") or name.split(".")[-1] in ("recv_pyobj", "send_pyobj"):
                    guilty.append(f"{short(path, node)}: {name}")
                for keyword in node.keywords:
                    denied = (
                        isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    )
                    if keyword.arg == "allow_pickle" and not denied:
                        guilty.append(f"{short(path, node)}: allow_pickle must be False")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                if isinstance(node, ast.ImportFrom):
                    names.append(node.module or "")
                found = BANNED_NAMES.intersection(name.split(".")[0] for name in names)
                guilty += [f"{short(path, node)}: import of {name}" for name in sorted(found)]
    assert not guilty, "\n".join(guilty)


def test_the_pure_packages_draw_no_unseeded_chance():
    guilty = [
        f"{short(path, node)}: {called_name(node)}"
        for path in modules(PURE_PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and (
            (called_name(node).endswith("default_rng") and not node.args and not node.keywords)
            or re.match(
                r"(np|numpy)\.random\.(?!default_rng|Generator|PCG64|SeedSequence|Philox)",
                called_name(node),
            )
        )
    ]
    assert not guilty, f"chance comes in as a seed or a generator: {guilty}"


def receives(node: ast.AST) -> bool:
    """Does this expression call a socket's recv…?"""
    return any(
        isinstance(inner, ast.Call) and called_name(inner).split(".")[-1].startswith("recv")
        for inner in ast.walk(node)
    )


def cancelled_receives(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node).split(".")[-1] == "wait_for":
            if any(receives(argument) for argument in node.args):
                yield node
        elif isinstance(node, ast.AsyncWith):
            for item in node.items:
                call = item.context_expr
                if (
                    isinstance(call, ast.Call)
                    and called_name(call) in ("asyncio.timeout", "asyncio.timeout_at", "timeout")
                    and any(receives(statement) for statement in node.body)
                ):
                    yield call


def test_no_deadline_cancels_a_receive():
    # A receive that is cancelled after the message was taken from the socket loses the message.
    found = [short(path, node) for path in modules() for node in cancelled_receives(parse(path))]
    assert not found, f"close over a deadline instead of cancelling a receive: {found}"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("async def f(s):\n    await asyncio.wait_for(s.recv_multipart(), 1)", 1),
        ("async def f(s):\n    async with asyncio.timeout(1):\n        await s.recv()", 1),
        ("async def f(s, e):\n    await asyncio.wait_for(e.wait(), 1)\n    await s.recv()", 0),
    ],
)
def test_the_check_for_cancelled_receives_sees_them(source, count):
    assert len(list(cancelled_receives(ast.parse(source)))) == count


def test_no_test_sleeps():
    sleepy: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and called_name(node) == "time.sleep":
                sleepy.append(short(path, node))
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                sleepy += [short(path, node) for alias in node.names if alias.name == "sleep"]
    assert not sleepy, f"wait for an event instead: {sleepy}"


def test_nothing_is_left_unfinished():
    left: list[str] = []
    for path in tracked_files():
        if path.suffix in (".py", ".sh", ".toml", ".cu") or path.parent.name in ("scripts", ".ci"):
            for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
                if UNFINISHED.search(line) or UNFINISHED_ERROR in line:
                    left.append(f"{short(path)}:{number}: {line.strip()}")
    assert not left, "\n".join(left)


def test_no_file_names_the_machine_it_was_written_on():
    found: list[str] = []
    for path in tracked_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture or a recorded frame
        for number, line in enumerate(text.splitlines(), start=1):
            match = MACHINE_TRACES.search(line)
            if match is not None:
                found.append(f"{short(path)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_the_check_for_machine_traces_sees_them():
    for pieces in (["cd /", "work/main"], ["/", "root/.cache"], ["https://py", "pi.org/simple"]):
        assert MACHINE_TRACES.search("".join(pieces))
    assert not MACHINE_TRACES.search("see docs/work/notes.md and $HOME/.config")


DISTRIBUTIONS = {"cupy": "cupy-cuda12x", "sklearn": "scikit-learn", "zmq": "pyzmq"}
"""What installs a module, where it has another name."""


def name_of(requirement: str) -> str:
    """The distribution's name alone, in lower case."""
    return re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-")


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level names of what a module imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_whatever_is_imported_is_a_dependency_of_ours():
    """Another package's dependency may be gone with its next release, as typer's click was."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups = [*about["project"]["optional-dependencies"].values()]
    groups += [about["project"]["dependencies"], *about["dependency-groups"].values()]
    named = [one for group in groups for one in group if isinstance(one, str)]
    # A system that zkv is measured against is installed in an environment of its own.
    from peer_places import PEERS

    measured = {one for peer in PEERS.values() for one in peer.requirements}
    declared = {name_of(one) for one in named}
    python = [path for path in tracked_files() if path.suffix == ".py"]
    ours = {path.stem for path in python} | {Path(package).name for package in PACKAGES}
    for path in python:
        others = set(imported(path)) - ours - {"peers"} - sys.stdlib_module_names
        if path.parent == ROOT / "scripts" / "peers":
            others -= {name_of(one) for one in measured}
        missing = {
            name
            for name in others
            if DISTRIBUTIONS.get(name, name).lower().replace("_", "-") not in declared
        }
        assert not missing, f"{path.relative_to(ROOT)} imports {missing}: name it in pyproject.toml"
