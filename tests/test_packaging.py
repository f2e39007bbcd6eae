"""What is built is what a user gets: six typed packages, the licence, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"zkv", "zkv_codecs", "zkv_workers", "zkv_brokers", "zkv_net", "zkv_cli"}
FOLDERS = ("zkv", "codecs", "workers", "brokers", "scripts/zkv_cli")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """A wheel and an sdist of this tree, built without an index."""
    for tool in ("build", "hatchling"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not (ROOT / "README.md").exists():
        pytest.skip("README.md, which the metadata names, is not written yet")
    folder = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return wheel, sdist


def wheel_names(built: tuple[Path, Path]) -> set[str]:
    with zipfile.ZipFile(built[0]) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_six_packages_and_nothing_else(built):
    top = {name.split("/")[0] for name in wheel_names(built)}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1


def test_the_wheel_holds_every_module_of_the_tree(built):
    expected = {
        str(path.relative_to(ROOT / folder if folder in FOLDERS[1:4] else (ROOT / folder).parent))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert expected
    assert expected <= wheel_names(built)


def test_the_wheel_holds_the_text_of_cudas_kernels(built):
    texts = sorted((ROOT / "codecs/zkv_codecs").rglob("*.cu"))
    assert texts
    expected = {path.relative_to(ROOT / "codecs").as_posix() for path in texts}
    assert expected <= wheel_names(built)


def test_every_package_in_the_wheel_is_typed(built):
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names(built)


def test_the_wheel_is_pure_and_carries_the_licence_and_the_command(built):
    assert built[0].name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built[0]) as archive:
        names = {name.split("/", 1)[-1]: name for name in archive.namelist() if "dist-info" in name}
        assert "licenses/LICENSE" in names
        assert "zkv = zkv_cli.main:app" in archive.read(names["entry_points.txt"]).decode()


def test_the_sdist_has_the_licence_the_tests_and_what_runs_them(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "tests/conftest.py", "scripts/test", ".ci/run"} <= names
    assert not any("__pycache__" in name or name.startswith(".venv") for name in names)


def test_the_version_is_the_changelogs_or_still_unreleased():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## {version}" in changes or "## Unreleased" in changes


def test_a_folder_with_files_is_never_made_into_an_environment(tmp_path):
    """Whoever names a folder in ZKV_VENV may mean an environment of his own."""
    (tmp_path / "mine").write_text("kept")
    result = subprocess.run(
        [
            "bash",
            "-c",
            'source scripts/venv.sh; zkv_make_venv "$1" "$2"',
            "-",
            sys.executable,
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"{tmp_path} has files in it" in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]
