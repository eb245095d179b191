"""The plan of the house holds: floors, lazy imports, public names, file sizes."""

import ast
import functools
import graphlib
import importlib
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
    "groups": 0,
    "measures": 0,
    "sampling": 0,
    "privacy": 0,
    "tan": 0,
    "compiling": 1,
    "keys": 1,
    "grid": 1,
    "noise": 1,
    "adaptive": 1,
    "transformation": 1,
    "parallel": 1,
    "clipping": 1,
    "models": 2,
    "data": 2,
    "report": 2,
    "training": 3,
    "use": 3,
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
    "gradient": 0,
    "rules": 1,
    "planning": 2,
    "per_example": 2,
    "book_keeping": 2,
    "transform": 3,
    "__init__": 4,
}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def imported(path):
    """Yield names below tanager that a file imports, in functions too."""
    for node in nodes(path):
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


def test_imports_go_down_the_floors_only():
    up = [
        f"{path} imports {name}"
        for path in MODULES
        if path != SOURCE / "__init__.py"
        for name in imported(path)
        if not name.startswith("__")
        if FLOORS[name.partition(".")[0]] > FLOORS[room(path)]
    ]
    assert not up


def test_imports_within_clipping_go_down_its_floors_only():
    up = []
    for path in (path for path in MODULES if room(path) == "clipping"):
        own = path.relative_to(SOURCE / "clipping").parts[0].removesuffix(".py")
        for name in imported(path):
            place, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if place != "clipping" or other == own:
                continue
            if CLIPPING[other] >= CLIPPING[own]:
                up.append(f"{path} imports {name}")
    assert not up


def test_no_files_import_one_another_in_a_circle():
    """Not even within functions, or for types alone."""
    graph = {path: {*imported_files(path)} - {path} for path in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises what goes round


def test_no_path_ends_in_an_error_of_python_where_a_user_is_unknown():
    """`Path.expanduser` raises `RuntimeError` there; `_cache.expanded` does not."""
    assert not [path for path in MODULES if ").expanduser()" in path.read_text()]


def test_files_stay_short_enough_to_be_one_idea():
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lines.items() if count > 450} == {}


def run(program):
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


PLAN = ["--examples", "50000", "--batch-size", "4096", "--steps", "2500"]
PLAN += ["--epsilon", "8", "--json"]
HELP = ["plan", "train", "train digits", "search digits", "search data digits"]
HELP += ["audit digits", "bench step", "export", "recipe", "models", "account"]
HELP += ["account limit", "account add", "account accept", "predict", "evaluate"]


def test_planning_and_help_do_not_wait_for_what_commands_would_use():
    run(f"""
import sys
import tanager
import tanager.cli
import tanager.commands.plan
import tanager.report.card
tanager.Mechanism(0.1, 1.0, 10), tanager.PoissonSampler
assert 'jinja2' not in sys.modules
tanager.commands.plan.run({PLAN})
slow = {{'jax', 'equinox', 'matplotlib', 'orbax', 'pyarrow', 'sklearn', 'optuna'}}
assert not slow & set(sys.modules), slow & set(sys.modules)
tanager.cli.main(["train", "--list"])
for words in {HELP}:
    try:
        tanager.cli.main([*words.split(), "--help"])
    except SystemExit as left:
        assert not left.code, left.code
    assert not slow & set(sys.modules), (words, slow & set(sys.modules))
""")


def test_help_needs_nothing_that_is_not_pythons_own():
    run("""
import sys
before = set(sys.modules)
import tanager.cli
for words in ([], ["--help"], ["--version"]):
    tanager.cli.main(words)
loaded = {name.partition('.')[0] for name in set(sys.modules) - before}
foreign = loaded - set(sys.stdlib_module_names) - {'tanager'}
assert not foreign, foreign
""")


def test_every_public_name_exists_and_is_documented():
    assert sorted(tanager.__all__) == sorted({*tanager.__all__}) == dir(tanager)
    for name in tanager.__all__:
        value = getattr(tanager, name)
        assert isinstance(value, str) or value.__doc__, name


def test_public_modules_are_imported_by_name_too():
    for name in tanager._MODULES:
        assert importlib.import_module(f"tanager.{name}") is getattr(tanager, name)
    found = vars(importlib.import_module("tanager.privacy.tan"))
    own = [n for n, v in found.items() if getattr(v, "__module__", "").endswith(".tan")]
    assert own
    for name in (*own, "PRIVACY_WALL"):
        assert getattr(tanager.tan, name) is found[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tanager.nothing


def test_no_public_function_takes_more_than_ten_arguments():
    long = set()
    for path in MODULES:
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef):
                continue
            if node.name.startswith("_") and node.name != "__init__":
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(each.arg not in ("self", "cls") for each in given)
            if count > 10:
                long.add(f"{path.relative_to(SOURCE)}: {node.name} takes {count}")
    assert not long
