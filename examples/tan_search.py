"""TAN search in miniature: cheap simulations, a prediction, and the real run."""

# %% [markdown]
# # A TAN search in miniature
#
# A good private run has large batches and takes long. Divide the batch size and the
# noise by the same factor: every update keeps its signal-to-noise ratio, and the run
# trains much alike at a fraction of the cost (Sander et al. 2023, *TAN Without a
# Burn*). It loses the guarantee.
#
# This tries four learning rates at batch size 16. It repeats the best at 16, 32 and
# 64, and predicts what batch size 512 will reach. Then it makes that one private run.
# `docs/searching.md` says what this protects and what it does not.
#
# Everything is written to `runs/examples/tan_search`. If this was killed, the same
# program resumes. If it had finished, it finds all runs. To search again, delete the
# folder. Secrets come from the operating system, so figures differ from run to run.

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
# The private run: the embedded digits, 60 updates at batch size 512, ε = 3. The
# simulations are compared on 360 training images that are held out. Test images are
# not read.
#
# The simulations are not private, and the chosen settings depend on them. The ε they
# would spend is printed below. On truly private data this is common practice, but no
# theorem covers it. `tanager search --private` has a proof.

# %%
words = ["search", "digits", "--steps", "60", "--out", str(SEARCH)]
words += ["--simulation-batch-sizes", "16", "32", "64", "--repeats", "2"]
words += ["--vary", "learning-rate=0.125..4", "--trials", "4", "--pruner", "none"]
words += ["--validation-examples", "360", "--evaluate-every", "20"]
words += ["--account", str(OUT / "account.jsonl")]  # of all runs of this example
assert tanager(words) == 0

# %% [markdown]
# `report.html` in the study's folder shows the search. `result.json` has the same for
# programs:

# %%
found = json.loads((SEARCH / "result.json").read_text())
for trial in found["trials"]:
    rate = trial["values"]["learning_rate"]
    print(f"learning rate {rate:<6.3g} {100 * trial['accuracy']:.1f} %")
for size, epsilon in found["privacy"]["simulations_epsilon"].items():
    print(f"at batch size {size} a simulation spends ε = {epsilon:,.0f}")

# %% [markdown]
# ## The private run
#
# One run, with the best settings, at the batch size and noise fixed at the start. Only
# this run is private. It trains on the held-out images too, and is evaluated on the
# test images.

# %%
assert tanager(["train", "--from-study", str(SEARCH)]) == 0

# %% [markdown]
# ## Predicted and obtained
#
# The dashed line is accuracy against the logarithm of the batch size, fitted to the
# crosses. The interval should hold one more run, in 95 of 100 such searches. It is
# wide, because there are only six short simulations.

# %%
prediction = found["prediction"]
obtained = json.loads((REFERENCE / "result.json").read_text())
accuracy, low, high = (100 * prediction[name] for name in ("accuracy", "low", "high"))
reached = 100 * obtained["test_accuracy_ema"]

figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
axis.imshow(plt.imread(SEARCH / "scaling.png"))
axis.axis("off")

print(
    f"predicted {accuracy:.1f} % ({low:.1f} to {high:.1f} %), obtained {reached:.1f} %"
)
print(f"by a run of ε = {obtained['epsilon']:.2f} at δ = {obtained['delta']:g}")
for doubt in prediction["doubts"]:
    print(f"the search said not to trust it: {doubt}")

# %% [markdown]
# ## What the search cost
#
# The unit is the operations of that one run. Real batches are larger and the shares
# smaller: for a run at 4096, a trial at batch size 32 costs a 128th.

# %%
cost = found["cost"]
print(f"trials: {100 * cost['trials_share']:.0f} % of the run")
print(f"the best again: {100 * cost['winner_share']:.0f} % of the run")
