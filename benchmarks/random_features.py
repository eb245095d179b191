"""Write features of MNIST by random convolutions, for `tanager train features`.

    python benchmarks/random_features.py DIR features
    tanager train features --features-from features --train-examples 5000

1024 features of an image: 256 random 7×7 filters at stride 2, ReLU, and the means over
the four overlapping quarters.
"""

import sys

import numpy as np

from tanager import data


FILTERS = np.random.default_rng(0).normal(size=(49, 256)).astype(np.float32)
FILTERS -= FILTERS.mean(axis=0)
FILTERS /= np.linalg.norm(FILTERS, axis=0)
HALVES = (slice(0, 6), slice(5, 11))


def features(batch):
    """Return float32[b, 1024] of uint8[b, 28, 28, 1]."""
    pixels = batch["image"][..., 0].astype(np.float32) / 255
    views = np.lib.stride_tricks.sliding_window_view(pixels, (7, 7), axis=(1, 2))
    patches = views[:, ::2, ::2].reshape(len(pixels), 11, 11, 49)
    active = np.maximum(patches @ FILTERS - 0.3, 0)
    quarters = [active[:, top, left] for top in HALVES for left in HALVES]
    return np.concatenate([part.mean(axis=(1, 2)) for part in quarters], axis=1)


if __name__ == "__main__":
    folder, out = sys.argv[1:]
    print(data.write_features(features, data.load("mnist", folder), out))
