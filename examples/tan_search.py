"""TAN search in miniature: cheap simulations, a prediction, and the run it is of."""

# %% [markdown]
# # A TAN search in miniature
#
# A private run that works has large batches and takes long. At a smaller batch, with
# the noise scaled by the same factor, every update keeps its signal-to-noise ratio,
# and the run trains much alike at a fraction of the price (Sander et al. 2023, *TAN
# Without a Burn*). What it loses is the guarantee.
#
# Here: four learning rates at batch size 16, the best of them again at 16, 32 and 64,
# a prediction of what batch size 512 will reach, and the one run that is private.
# `docs/searching.md` says what this protects, and what not.
#
# Everything is written below `runs/examples/tan_search`. Killed, it goes on where it
# was; started again, it finds all runs there and makes none anew. Delete the folder
# to search anew. Secrets come from the operating system: figures differ from run to
# run.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

from tanager.cli import main as tanager


OUT = Path("runs/examples/tan_search")
SEARCH, REFERENCE = OUT / "search", OUT / "search-reference"

# %% [markdown]
# ## The search
#
# The run in question: the embedded digits, 60 updates at batch size 512, ε = 3. 360
# training images are held out to compare the simulations on; test images are not
# read.
#
# The simulations are not private (what they would spend is printed below), and what
# is chosen depends on them. On data that are private in earnest that is a common and
# unproven practice; `tanager search --private` is the proven one.

# %%
words = ["search", "digits", "--steps", "60", "--out", str(SEARCH)]
words += ["--simulation-batch-sizes", "16", "32", "64", "--repeats", "2"]
words += ["--vary", "learning-rate=0.125..4", "--trials", "4", "--pruner", "none"]
words += ["--validation-examples", "360", "--evaluate-every", "20"]
assert tanager(words) == 0

# %% [markdown]
# `report.html` in the study's folder has all of it, and `result.json` has it for
# programs:

# %%
found = json.loads((SEARCH / "result.json").read_text())
for trial in found["trials"]:
    rate = trial["values"]["learning_rate"]
    print(f"learning rate {rate:<6.3g} {100 * trial['accuracy']:.1f} %")
for size, epsilon in found["privacy"]["simulations_epsilon"].items():
    print(f"at batch size {size} a simulation spends ε = {epsilon:,.0f}")

# %% [markdown]
# ## The run it is for
#
# One run, with the best choices, at the batch size and noise that were settled at the
# start. It alone is private. It trains on the held-out images too, and is evaluated
# on the test images.

# %%
assert tanager(["train", "--from-study", str(SEARCH)]) == 0

# %% [markdown]
# ## Predicted and obtained
#
# The dashed line is accuracy against the logarithm of the batch size, fitted to the
# crosses; the interval is that of one more run, in 95 of 100 such searches. Six
# simulations of so short a run leave it wide.

# %%
prediction, law = found["prediction"], found["law"]
obtained = json.loads((REFERENCE / "result.json").read_text())
accuracy, low, high = (100 * prediction[name] for name in ("accuracy", "low", "high"))
size = prediction["reference_batch_size"]

figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
simulated = [(run["batch_size"], 100 * run["accuracy"]) for run in law["runs"]]
axis.plot(*zip(*simulated, strict=True), "x", color="#0072b2", label="simulated")
line = [(batch_size, 100 * height) for batch_size, height, *_ in found["bands"]]
axis.plot(*zip(*line, strict=True), "--", color="#0072b2", linewidth=1)
axis.errorbar(
    [size],
    [accuracy],
    [[accuracy - low], [high - accuracy]],
    fmt="o",
    color="#d55e00",
    capsize=4,
    label="predicted, 95 %",
)
reached = 100 * obtained["test_accuracy_ema"]
axis.plot(size, reached, "*", color="#009e73", markersize=13, label="obtained")
axis.set_xscale("log", base=2)
sizes = sorted({batch_size for batch_size, _ in simulated} | {size})
axis.set_xticks(sizes, [f"{batch_size:g}" for batch_size in sizes])
axis.set_xlabel("batch size B, at constant σ/B and number of updates")
axis.set_ylabel("accuracy (%)")
axis.grid(alpha=0.4)
axis.legend(loc="lower left")
figure.savefig(OUT / "predicted.png", dpi=150)

print(
    f"predicted {accuracy:.1f} % ({low:.1f} to {high:.1f} %), obtained {reached:.1f} %"
)
print(f"by a run of ε = {obtained['epsilon']:.2f} at δ = {obtained['delta']:g}")
for doubt in prediction["doubts"]:
    print(f"the search said not to trust it: {doubt}")

# %% [markdown]
# ## What the search cost
#
# In the operations of that one run. In earnest the batches are larger, and the shares
# smaller: a 128th for a trial at batch size 32 for a run at 4096.

# %%
cost = found["cost"]
print(f"trials: {100 * cost['trials_share']:.0f} % of the run")
print(f"the best again: {100 * cost['winner_share']:.0f} % of the run")
