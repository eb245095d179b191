"""What is handed out is whole: the archive, the wheel made of it, and its papers."""

import ast
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import tanager
from tanager.models import dead_leaves


ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"


def build(folder, kind, out):
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel of the archive, not of the work tree: the archive must be enough."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    # Python 3.11 before its fourth release, Debian's, has no filters in tarfile.
    subprocess.run(["tar", "-xzf", sdist, "-C", unpacked], check=True)
    (folder,) = unpacked.iterdir()
    return build(folder, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_archive_holds_what_a_packager_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= names
    assert {"Makefile", "tests/conftest.py", "docs/index.md"} <= names
    assert not [name for name in names if name.startswith(("runs/", ".venv"))]


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    own = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert set(names) == own
    assert "tanager/py.typed" in names
    assert wheel.stat().st_size - dead_leaves.FILE.stat().st_size < 2**20


@pytest.mark.slow
def test_the_wheel_works_where_it_is_installed(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    scheme = {"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}
    site = Path(sysconfig.get_path("purelib", vars=scheme))
    # Only what it depends on is taken from here, and after the wheel's own.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "env/bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index"]
    force = ["--ignore-installed", "--no-warn-script-location", "--no-compile"]
    subprocess.run([*install, *quiet, *force, wheel], check=True)

    def run(*words):
        done = subprocess.run(
            words, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    where = run(python, "-c", "import tanager; print(tanager.__file__)")
    assert Path(where).is_relative_to(site)
    command = tmp_path / "env/bin/tanager"
    assert run(command, "--version") == f"tanager {tanager.__version__}"
    run(command, "train", "digits", "--model", "linear", "--steps", "2", "--out", "out")
    assert (tmp_path / "out/report.html").exists()


def test_all_papers_tell_the_same_version():
    """Between two releases, the next minor version is under way."""
    released, _, _ = tanager.__version__.partition(".dev")
    cited = re.findall(
        r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M
    )
    changes = (ROOT / "CHANGELOG.md").read_text()
    dated = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", changes, flags=re.M)
    assert cited == dated[:1]
    if released == tanager.__version__:
        assert dated[0] == released
    else:
        major, minor, _ = map(int, dated[0].split("."))
        assert released == f"{major}.{minor + 1}.0" and "## [Unreleased]\n" in changes


def test_the_environments_of_peers_are_pinned():
    files = sorted((ROOT / "benchmarks/peers/environments").glob("*.txt"))
    assert [file.stem for file in files] == ["jax-privacy", "opacus"]
    for file in files:
        for line in file.read_text().splitlines():
            assert re.fullmatch(r"[a-z-]+==[\d.]+", line), line


OPTIONAL = {"pydicom": "dicom", "huggingface_hub": "hub", "optuna": "search"}
BROUGHT = {
    "absl": "grain",
    "docstring_parser": "tyro",
    "google": "protobuf, of orbax-checkpoint",
    "markupsafe": "jinja2",
    "sqlalchemy": "optuna",
}
"""What is imported to speak with a library, which brings it."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "dp_accounting": "dp-accounting",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
}


def test_what_is_imported_is_what_is_installed_with_it():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.split(r"[<>=!\[ ]", each)[0] for each in requirements}

    extras = {k: names(v) for k, v in declared["optional-dependencies"].items()}
    needed, optional = set(), set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for module in (each.partition(".")[0] for each in modules):
                if module in sys.stdlib_module_names or module == "tanager":
                    continue
                if extra := OPTIONAL.get(module):
                    assert module.replace("_", "-") in extras[extra]
                    optional.add(module)
                else:
                    needed.add(DISTRIBUTIONS.get(module, module))
    assert optional == OPTIONAL.keys()
    assert needed - BROUGHT.keys() == names(declared["dependencies"])
