"""Scans of patients with several findings: private per patient, AUROC per finding."""

# %% [markdown]
# # Several findings, several scans a patient
#
# Medical data sets often come as images and one CSV file. Each image can have several
# findings, and each patient several images. This draws such a set, and trains on it
# with the `tanager` command. The guarantee is per patient: it covers all scans of a
# patient together. Then it writes predictions for new scans as a CSV file.
#
# The scans are drawn from a fixed seed. Sampling and noise are not, so figures differ
# from run to run. Everything is written to `runs/examples/patients`. To start over,
# delete the folder.

# %%
import csv
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import tanager
from tanager.cli import main


OUT = Path("runs/examples/patients")
SCANS, NEW, RUN = OUT / "scans", OUT / "new", OUT / "run"
FINDINGS = ("effusion", "nodule", "fibrosis")
PATIENTS = 1000

# %% [markdown]
# ## The data
#
# Each patient has one to four grey scans of 24 × 24 pixels. An effusion is a bright
# bottom, a nodule a bright spot, fibrosis a pattern of stripes. Findings go together:
# who has an effusion has a nodule more often. `scans/labels.csv` has a row for each
# scan: the file, the patient, and one column of 0 and 1 for each finding.


# %%
def draw(findings, random):
    """Draw one scan: two dark lungs, the findings and noise."""
    y, x = np.mgrid[:24, :24]
    pixels = np.full((24, 24), 150.0)
    for side in (7, 16.5):
        pixels[((x - side) / 4) ** 2 + ((y - 12) / 9) ** 2 < 1] = 70
    effusion, nodule, fibrosis = findings
    if effusion:
        pixels[y > random.uniform(15, 18)] += 25
    if nodule:
        across, down = random.choice((7, 16.5)), random.uniform(7, 15)
        pixels += 85 * np.exp(-((x - across) ** 2 + (y - down) ** 2) / 5)
    if fibrosis:
        pixels += 20 * np.sin(2 * (x + y) + random.uniform(0, 6))
    noisy = pixels + random.normal(0, 25, pixels.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def patient(random):
    """Return the findings of each scan of one patient."""
    effusion = random.random() < 0.4
    nodule = random.random() < (0.6 if effusion else 0.25)
    ill = np.array([effusion, nodule, random.random() < 0.3])
    scans = random.integers(1, 5)
    return ill & (random.random((scans, 3)) < 0.9)  # a scan may miss a finding


if not (SCANS / "labels.csv").exists():
    random = np.random.default_rng(0)
    SCANS.mkdir(parents=True, exist_ok=True)
    NEW.mkdir(exist_ok=True)
    rows = []
    for number in range(PATIENTS):
        for scan, found in enumerate(patient(random)):
            name = f"p{number:04d}-{scan}.png"
            draw(found, random).save(SCANS / name)
            rows.append([name, f"p{number:04d}", *map(int, found)])
    for number in range(20):
        draw(patient(random)[0], random).save(NEW / f"new-{number:02d}.png")
    with (SCANS / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "patient", *FINDINGS], *rows])

with (SCANS / "labels.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
print(f"{len(rows)} scans of {len({row['patient'] for row in rows})} patients")
figure, axes = plt.subplots(1, 6, figsize=(9, 1.9), layout="constrained")
for axis, row in zip(axes, rows, strict=False):
    axis.imshow(Image.open(SCANS / row["image"]), cmap="gray", vmin=0, vmax=255)
    found = [name for name in FINDINGS if row[name] == "1"]
    axis.set_title("\n".join([row["patient"], *found]), fontsize=8)
    axis.axis("off")
figure.savefig(OUT / "scans.png", dpi=120)

# %% [markdown]
# ## Training
#
# On a command line this is
#
#     tanager train folder --data runs/examples/patients/scans --multi-label \
#         --groups patient --unit group --examples-per-group 2 --epsilon 4 ...
#
# `--groups` names the column of the patient, and `--unit group` protects a patient as
# a whole. Each step uses at most two scans of a patient. About a fifth of the patients
# are held out for testing, with all of their scans.

# %%
words = ["train", "folder", "--data", str(SCANS), "--out", str(RUN)]
words += ["--multi-label", "--groups", "patient", "--unit", "group"]
words += ["--examples-per-group", "2", "--epsilon", "4", "--delta", "1e-4"]
words += ["--model", "small-cnn", "--batch-size", "200", "--steps", "40"]
words += ["--learning-rate", "1", "--ema-decay", "0.9", "--evaluate-every", "10"]
words += ["--augmentation", "none", "--physical-batch-size", "64"]
assert main(words) == 0

# %% [markdown]
# ## AUROC and average precision
#
# `tanager evaluate` measures both for each finding, on the held-out patients. A model
# that guesses has an AUROC of 0.5, and the share of scans with the finding as average
# precision. ε does not cover these figures: they depend on the test scans exactly.

# %%
assert main(["evaluate", str(RUN)]) == 0
result = json.loads((RUN / "result.json").read_text())
print(f"ε = {result['epsilon']:.2f} at δ = {result['delta']:g} for a {result['unit']}")

# %% [markdown]
# ## Predictions for new scans
#
# `tanager predict RUN FOLDER > submission.csv` prints a probability for each finding.
# In Python you choose the columns yourself. The picture shows the four scans whose
# findings are the most probable.

# %%
model = tanager.load(RUN)
files = sorted(NEW.iterdir())
probabilities = [each["probabilities"] for each in model.predict(files)]
with (OUT / "submission.csv").open("w", newline="") as file:
    write = csv.writer(file)
    write.writerow(["image", *FINDINGS])
    for path, each in zip(files, probabilities, strict=True):
        write.writerow([path.name, *(f"{each[name]:.4f}" for name in FINDINGS)])
print("\n".join((OUT / "submission.csv").read_text().splitlines()[:5]))

surest = np.argsort([-max(each.values()) for each in probabilities])
figure, axes = plt.subplots(2, 4, figsize=(9, 3.6), layout="constrained")
for number, (top, bottom) in zip(surest, axes.T, strict=False):
    top.imshow(Image.open(files[number]), cmap="gray", vmin=0, vmax=255)
    top.set_title(files[number].name, fontsize=8)
    top.axis("off")
    bottom.barh(FINDINGS, [probabilities[number][name] for name in FINDINGS])
    bottom.set_xlim(0, 1)
    bottom.invert_yaxis()
for axis in axes[1, 1:]:
    axis.set_yticks([])
figure.savefig(OUT / "predictions.png", dpi=100)
