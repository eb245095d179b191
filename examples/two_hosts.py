"""Two hosts train one model; it has the same parameters as one host's."""

# %% [markdown]
# # Two hosts, one model
#
# Start the same command on every host, each with its own `--host`, and tanager trains
# one model on all of them. Nothing is federated: every host reads the same data, and
# the guarantee is that of one run. Here two processes on one machine are the hosts.
# Then one process trains alone, and the parameters are compared.
#
# The three runs share a fixed `--seed`, so that they can be compared. Anyone who knows
# the seed knows the noise, so **this is not private**: leave out `--seed` for data
# that must be protected. Everything is written to `runs/examples/two_hosts`. To start
# over, delete the folder.

# %%
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

from tanager import models


OUT = Path("runs/examples/two_hosts")
OUT.mkdir(parents=True, exist_ok=True)
WORDS = ["train", "digits", "--model", "linear", "--epsilon", "3", "--steps", "40"]
WORDS += ["--evaluate-every", "10", "--seed", "1", "--account", "none", "--fast"]

# %% [markdown]
# ## The hosts
#
# On two machines, the command of the first is
#
#     tanager train digits ... --out /shared/run \
#         --distributed --coordinator first:9876 --hosts 2 --host 0
#
# and that of the second ends with `--host 1`. `--out` is a folder that both see. The
# port must be free on the first. Every process here has one CPU device. A physical
# batch has 128 images, so each host computes 64 of them. The single process gets
# physical batches of 64. With equal rows for each device, the sums round alike.


# %%
def start(folder, rows, *more):
    """Start one process of a run."""
    words = ["--out", str(OUT / folder), "--physical-batch-size", str(rows), *more]
    environment = {
        **os.environ,
        "FORCE_COLOR": "",  # a notebook asks for colours
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tanager", *WORDS, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    """Wait for its end, and return what it printed."""
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{one.getsockname()[1]}"
together = ["--distributed", "--coordinator", address, "--hosts", "2", "--host"]
hosts = [start("two", 128, *together, str(host)) for host in range(2)]
for number, printed in enumerate(map(end, hosts)):
    steps = [line for line in printed.splitlines() if line.startswith("step")]
    print(f"host {number} printed {len(printed.splitlines())} lines", *steps, sep="\n")
alone = end(start("one", 64))

# %% [markdown]
# The first host writes the report, the metrics and the ledger, so the second prints
# little.
#
# ## The same model
#
# Sums of clipped gradients are whole numbers, and the noise follows from the seed. So
# the number of hosts does not change them, and the parameters agree to the last bit.

# %%
found = {}
for folder in ("two", "one"):
    params = models.load_pretrained(OUT / folder).model
    found[folder] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
largest = np.max(np.abs(found["two"] - found["one"]))
print(f"{found['one'].size} parameters, largest difference {largest}")
assert largest == 0

# %%
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
for folder, style in (("two", "-"), ("one", "o")):
    lines = (OUT / folder / "metrics.jsonl").read_text().splitlines()
    curve = [each for each in map(json.loads, lines) if "test_accuracy" in each]
    steps = [each["step"] for each in curve]
    label = {"two": "two hosts", "one": "one process"}[folder]
    axis.plot(steps, [each["test_accuracy"] for each in curve], style, label=label)
axis.set_xlabel("step")
axis.set_ylabel("accuracy on the test images")
axis.legend()
figure.savefig(OUT / "accuracy.png", dpi=100)
