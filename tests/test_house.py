"""The plan of the house holds: floors, lazy imports, public names, file sizes."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import tanager


SOURCE = Path(tanager.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# A room stands only on rooms of its own floor or below.
FLOORS = {
    "_version": 0,
    "_validate": 0,
    "_cache": 0,
    "_files": 0,
    "_heap": 0,
    "_npy": 0,
    "_processor": 0,
    "_terminal": 0,
    "_reading": 0,
    "_record": 0,
    "_text": 0,
    "gaussian": 0,
    "seed": 0,
    "sampling": 0,
    "privacy": 0,
    "compiling": 1,
    "keys": 1,
    "grid": 1,
    "noise": 1,
    "parallel": 1,
    "clipping": 1,
    "models": 2,
    "data": 2,
    "report": 2,
    "training": 3,
    "recipes": 4,
    "bench": 5,
    "search": 5,
    "audit": 5,
    "commands": 6,
    "cli": 6,
    "__main__": 6,
}


# The same within clipping/, but a room imports none of its own floor.
CLIPPING = {
    "analysis": 0,
    "rules": 1,
    "planning": 2,
    "per_example": 2,
    "book_keeping": 2,
    "transform": 3,
    "__init__": 4,
}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path):
    """Yield names below tanager that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "tanager" and rest:
                yield rest


def imported_rooms(path):
    return (name.partition(".")[0] for name in imported(path))


def imported_files(path):
    for name in imported(path):
        # The last part is a file, or else something within it.
        for dotted in filter(None, (name, name.rpartition(".")[0])):
            module = SOURCE / dotted.replace(".", "/")
            file = module.with_suffix(".py")
            file = file if file.exists() else module / "__init__.py"
            if file.exists():
                yield file
                break


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down_the_floors_only(path):
    if path == SOURCE / "__init__.py":
        return
    for other in imported_rooms(path):
        if not other.startswith("__"):
            assert FLOORS[other] <= FLOORS[room(path)], f"{path} imports {other}"


CLIPPING_FILES = [path for path in MODULES if room(path) == "clipping"]


@pytest.mark.parametrize(
    "path", CLIPPING_FILES, ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_within_clipping_go_down_its_floors_only(path):
    own = path.relative_to(SOURCE / "clipping").parts[0].removesuffix(".py")
    for name in imported(path):
        place, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if place == "clipping" and other != own:
            assert CLIPPING[other] < CLIPPING[own], f"{path} imports {other}"


def test_no_files_import_one_another_in_a_circle():
    """Not even within functions, or for types alone."""
    graph = {path: {*imported_files(path)} - {path} for path in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises what goes round


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_short_enough_to_be_one_idea(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize(
    "statement",
    [
        "import tanager",
        "import tanager; tanager.Mechanism(0.1, 1.0, 10)",
        "import tanager; tanager.PoissonSampler",
        "import tanager.commands.plan",
        "import tanager.cli",
    ],
)
def test_planning_does_not_wait_for_jax(statement):
    check = f"{statement}\nimport sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"]])
def test_help_needs_nothing_that_is_not_pythons_own(words):
    check = f"""
import sys
before = set(sys.modules)
import tanager.cli
tanager.cli.main({words!r})
loaded = {{name.partition('.')[0] for name in set(sys.modules) - before}}
foreign = loaded - set(sys.stdlib_module_names) - {{'tanager'}}
assert not foreign, foreign
"""
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--help"],
        ["train", "--help"],
        ["train", "--list"],
        ["train", "digits", "--help"],
        ["search", "digits", "--help"],
        ["audit", "digits", "--help"],
        ["bench", "step", "--help"],
        ["export", "--help"],
    ],
    ids=" ".join,
)
def test_the_help_of_a_command_does_not_wait_for_what_it_would_use(words):
    check = f"""
import sys
import tanager.cli
try:
    tanager.cli.main({words!r})
except SystemExit as left:
    assert not left.code, left.code
slow = {{'jax', 'equinox', 'matplotlib', 'orbax', 'pyarrow', 'sklearn', 'optuna'}}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", check], check=True, capture_output=True)


def test_every_public_name_exists_and_is_documented():
    assert sorted(tanager.__all__) == sorted({*tanager.__all__}) == dir(tanager)
    for name in tanager.__all__:
        value = getattr(tanager, name)
        assert isinstance(value, str) or value.__doc__, name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tanager.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_no_public_function_takes_more_than_ten_arguments():
    long = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if node.name.startswith("_") and node.name != "__init__":
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(each.arg not in ("self", "cls") for each in given)
            if count > 10:
                long.add(f"{path.relative_to(SOURCE)}: {node.name} takes {count}")
    assert not long
