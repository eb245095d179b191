"""The launch files start what they say, where that can be tried."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


LAUNCH = Path(__file__).parent.parent / "launch"


def free_port():
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


@pytest.mark.slow
def test_ssh_trains_on_all_machines(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    settings = {
        "SSH": str(ssh),
        "PORT": str(free_port()),
        "TANAGER": str(Path(sys.executable).with_name("tanager")),
        "JAX_PLATFORMS": "cpu",
    }
    words = ["digits", "--model", "linear", "--steps", "3", "--batch-size", "64"]
    done = subprocess.run(
        [LAUNCH / "ssh.sh", "127.0.0.1 localhost", *words, "--out", tmp_path / "run"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("was spent") == 1
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["hosts"] == 2
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 3


@pytest.mark.slow
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
