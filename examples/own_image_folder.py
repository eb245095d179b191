"""Your own images: from a folder of PNG files to a private model that can be sent."""

# %% [markdown]
# # Your own images
#
# tanager reads images from one folder for each class. This draws such a folder, trains
# on it with the `tanager` command and exports the model. Then it loads the exported
# model and classifies one file.
#
# The images are drawn from a fixed seed. Sampling and noise are not, so accuracies
# differ from run to run. Everything is written to `runs/examples/own_image_folder`.
# If you start this again, it finds images, run and exported model there. To start
# over, delete the folder.

# %%
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw

from tanager import models
from tanager.cli import main as tanager


OUT = Path("runs/examples/own_image_folder")
PHOTOS, RUN, EXPORTED = OUT / "photos", OUT / "run", OUT / "exported"
CLASSES = ("circle", "square", "triangle")

# %% [markdown]
# ## A folder of images
#
# 400 images of 16 × 16 pixels in each of three classes: a dark shape of random size,
# place and colour on a noisy background. The format is `photos/circle/*.png` and so
# on. To choose the split yourself, make `photos/train/circle/` and
# `photos/test/circle/`. Otherwise a hash of a file's name makes about a fifth of the
# images test images.


# %%
def draw(name, random):
    """Draw one image of a class: four times as large, and shrunk."""
    image = Image.new("RGB", (64, 64), (200, 200, 200))
    pen = ImageDraw.Draw(image)
    x, y = random.uniform(26, 38, 2)
    radius = random.uniform(16, 26)
    colour = tuple(random.integers(0, 100, 3).tolist())
    if name == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        sides, turned = 4 if name == "square" else 3, int(random.integers(-15, 16))
        pen.regular_polygon((x, y, radius), sides, rotation=turned, fill=colour)
    pixels = np.asarray(image.resize((16, 16), Image.Resampling.BOX))
    noisy = pixels + random.normal(0, 20, pixels.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


if not PHOTOS.exists():
    random = np.random.default_rng(0)
    for name in CLASSES:
        (PHOTOS / name).mkdir(parents=True)
        for number in range(400):
            draw(name, random).save(PHOTOS / name / f"{number:03d}.png")

figure, axes = plt.subplots(3, 10, figsize=(8, 2.7), layout="constrained")
for row, name in zip(axes, CLASSES, strict=True):
    for axis, path in zip(row, sorted((PHOTOS / name).iterdir()), strict=False):
        axis.imshow(Image.open(path))
        axis.axis("off")
    row[0].set_title(name, loc="left", fontsize=10)
figure.savefig(OUT / "images.png", dpi=150)

# %% [markdown]
# ## Training
#
# The recipe `folder` is a start and is not tuned. Each of its fields is a flag. On a
# command line this is
#
#     tanager train folder --data runs/examples/own_image_folder/photos --epsilon 2 ...
#
# and `tanager.cli.main` takes the same words. If the run is killed, the same words
# resume it.

# %%
words = ["train", "folder", "--data", str(PHOTOS), "--out", str(RUN)]
words += ["--model", "small-cnn", "--epsilon", "2", "--delta", "1e-4"]
words += ["--batch-size", "256", "--steps", "60", "--learning-rate", "1"]
words += ["--ema-decay", "0.9", "--evaluate-every", "10"]
words += ["--physical-batch-size", "128"]
assert tanager(words) == 0

# %% [markdown]
# 960 images are few for a private model, because the noise on an update does not
# shrink with the data. At ε = 2 it can only learn simple shapes like these. The
# results are in the run's folder: `report.html` for people, `result.json` for
# programs.

# %%
result = json.loads((RUN / "result.json").read_text())
print(f"ε = {result['epsilon']:.2f} at δ = {result['delta']:g}")
for each in result["per_class"]:
    print(f"{each['class']:<9}{each['examples']:>4} test images", end=" ")
    print(f"{100 * each['accuracy_ema']:5.1f} % right")

# %% [markdown]
# ## Export
#
# The exported folder has the weights, what is needed to build the model again, and a
# model card with the guarantee. It is made only from the run's public files. The
# run's folder has a `private/` with its secrets, and the exported one does not.

# %%
if not EXPORTED.exists():
    words = ["export", str(RUN), "--to", str(EXPORTED), "--licence", "apache-2.0"]
    assert tanager(words) == 0
card = (EXPORTED / "README.md").read_text()
print(card[card.index("## Guarantee") : card.index("## Use")])

# %% [markdown]
# ## Use
#
# The exported folder is enough to use the model. The input is an image as it was
# read, uint8 of height × width × channels. The output is logits. This file is a new
# one.

# %%
path = OUT / "new.png"
draw("triangle", np.random.default_rng(1)).save(path)

pretrained = models.load_pretrained(EXPORTED)
image = np.asarray(Image.open(path))
probabilities = np.asarray(jax.nn.softmax(pretrained(image)))

figure, (left, right) = plt.subplots(1, 2, figsize=(5.5, 2.2), layout="constrained")
left.imshow(image)
left.axis("off")
left.set_title(path.name, fontsize=10)
right.barh(pretrained.classes, probabilities, color="#0072b2")
right.set_xlim(0, 1)
right.set_xlabel("probability, says the model")
figure.savefig(OUT / "prediction.png", dpi=150)
print(
    f"{path.name} is a {pretrained.classes[np.argmax(probabilities)]}, says the model"
)
