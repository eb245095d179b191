"""The workflows, forms and container say what the project really has."""

import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def steps(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def targets():
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([\w-]+):", makefile, flags=re.M))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_targets_and_files_that_exist(path):
    asked = set()
    for step in steps(path):
        for line in step.get("run", "").splitlines():
            for named in re.findall(r"^make ([\w -]+)", line):
                asked.update(named.split())
        file = step.get("with", {}).get("cache-dependency-path", "pyproject.toml")
        assert (ROOT / file).exists(), file
    assert asked <= targets()
    if path.stem == "ci":
        assert asked == {"lint", "pytest", "docs", "dist"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_uses_pinned_actions(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
    for step in steps(path):
        if action := step.get("uses"):
            assert re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action), action
            if "checkout" in action:
                assert step["with"]["persist-credentials"] is False


def test_the_oldest_and_the_newest_jax_and_python_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (d[3:] for d in project["dependencies"] if d.startswith("jax>"))
    match = re.fullmatch(r">=([\d.]+)(?:,(<[\d.]+))?", bounds)
    assert match
    oldest, newest = match.groups()
    if newest is None:  # taken off by weekly.yml, whose run this is
        assert os.environ.get("GITHUB_WORKFLOW") == "Weekly"
    last = "Programming Language :: Python :: "
    pythons = [c[len(last) :] for c in project["classifiers"] if c.startswith(last)]
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    matrix = ci["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in matrix] == pythons
    assert project["requires-python"] == f">={pythons[0]}"
    assert matrix[0]["jax"] == f"=={oldest}"
    if newest is not None:
        assert {row["jax"] for row in matrix[1:]} == {newest}


def test_the_weekly_run_takes_any_jax_and_passes_these_tests(tmp_path):
    weekly = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())
    steps = [step["run"] for step in weekly["jobs"]["newest"]["steps"] if "run" in step]
    for name in ("pyproject.toml", ".github", "tests/test_workflows.py"):
        whole = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        whole(ROOT / name, tmp_path / name)
    subprocess.run(["bash", "-euc", steps[0]], cwd=tmp_path, check=True)
    bounds = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert not [d for d in bounds["dependencies"] if d.startswith("jax") and "<" in d]
    test = "test_the_oldest_and_the_newest_jax_and_python_are_tested"
    module = runpy.run_path(str(tmp_path / "tests/test_workflows.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_WORKFLOW", weekly["name"])
        module[test]()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_asks_of_it(path):
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= form.keys()
    names = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(names) == len({*names}) > 0
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "checkboxes")
        assert part["attributes"].keys() & {"label", "value"}
    if "bug" in path.stem:
        assert "SECURITY.md" in path.read_text()
        assert (ROOT / "SECURITY.md").exists()


def test_an_image_is_built_from_the_source_and_never_from_runs():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    lines = [line for line in ignored if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    dockerfile = (ROOT / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, flags=re.M)
    assert allowed == {name for names in copied for name in names.split()}
    assert all((ROOT / name).exists() for name in allowed)
    assert re.search(r"^USER (?!root|0)", dockerfile, flags=re.M)


def test_the_accounts_of_an_image_outlive_its_containers():
    dockerfile = (ROOT / "Dockerfile").read_text()
    [mounted] = {*re.findall(r'-v "\S+:(\S+)"', dockerfile)}
    [state] = re.findall(r"^ENV TANAGER_STATE_DIR=(\S+)$", dockerfile, flags=re.M)
    assert state.startswith(f"{mounted}/")
    # Beside data in a folder that it cannot write to, no account is begun.
    assert re.findall(r"chown (?:-R )?tanager (\S+)", dockerfile) == [mounted]


def test_no_page_installs_the_other_program_called_tanager():
    folders = ("docs", "examples", ".github", "src", "launch", "benchmarks")
    files = [path for name in folders for path in (ROOT / name).rglob("*")]
    files += [ROOT / "Dockerfile", *ROOT.glob("*.md")]
    wrong = re.compile(r"pip3? install (?:-\S+ )*[\"']?tanager(?![\w-])")
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix
        in (".py", ".md", ".ipynb", ".yml", ".yaml", ".sbatch", ".sh", "")
        and path.is_file()
        and "_build" not in path.parts
        and wrong.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert wrong.search('run pip install "tanager[hub]" first')
