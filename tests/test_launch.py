"""The launch files start what they say, where that can be tried."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

import pages


LAUNCH = Path(__file__).parent.parent / "launch"
STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" >"words ${*: -1}"
"""


def test_ssh_starts_the_command_on_all_machines(tmp_path, monkeypatch):
    """`examples/two_hosts.py` trains with the same words."""
    own = {"SSH": '#!/bin/sh\nshift\nexec sh -c "$*"\n', "TANAGER": STAND_IN}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = ["digits", "--model", "linear", "--out", "a folder"]
    subprocess.run(
        [LAUNCH / "ssh.sh", "one two", *words],
        env=os.environ | {name: str(tmp_path / name) for name in own} | {"PORT": "99"},
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    together = ["--distributed", "--coordinator", "one:99", "--hosts", "2", "--host"]
    for host in range(2):
        started = (tmp_path / f"words {host}").read_text().splitlines()
        assert started == ["train", *words, *together, str(host)]
        pages.takes(started, monkeypatch, "ssh.sh")


def test_ssh_hands_on_what_went_wrong(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    done = subprocess.run(
        [LAUNCH / "ssh.sh", "one two", "digits"], env=os.environ | {"SSH": str(ssh)}
    )
    assert done.returncode == 255
    nobody = subprocess.run([LAUNCH / "ssh.sh"], capture_output=True, text=True)
    assert nobody.returncode != 0
    assert "say the machines" in nobody.stderr


@pytest.mark.parametrize("name", ["ssh.sh", "slurm.sbatch"])
def test_the_scripts_are_scripts(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)


def test_the_job_set_counts_its_hosts_alike():
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    command = spec["template"]["spec"]["containers"][0]["args"][0].split()
    hosts = int(command[command.index("--hosts") + 1])
    assert spec["parallelism"] == spec["completions"] == hosts
    coordinator = command[command.index("--coordinator") + 1]
    name = job_set["metadata"]["name"]
    assert coordinator.partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
