"""Write what Kymatio gives for images drawn by a rule.

    python tests/models/references/make_scattering.py

needs Kymatio 0.3.0 (BSD-3) and nothing of this library. The tests need neither: they
draw the same images and read scattering.json, which stands beside.

The library does not depend on Kymatio: `import kymatio.numpy` fails with SciPy 1.15 and
later, which have no `sph_harm`.
"""

import json
import pathlib

import numpy as np


SHAPES = ((12, 9, 2), (32, 32, 1))  # not square, odd, and that of CIFAR-10


def draw(shape: tuple[int, ...]) -> np.ndarray:
    """Return the image of a shape, float32 ``[H, W, C]``."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def main() -> None:
    """Compute and write; of the last image, every third row and column."""
    from kymatio.scattering2d.frontend import numpy_frontend

    found = {}
    for shape, step in zip(SHAPES, (1, 3), strict=True):
        scattering = numpy_frontend.ScatteringNumPy2D(2, shape[:2])
        planes = scattering(np.moveaxis(draw(shape), -1, 0))
        features = np.moveaxis(planes.reshape(-1, *planes.shape[-2:]), 0, -1)
        key = "x".join(map(str, shape))
        found[key] = np.round(features[::step, ::step], 5).tolist()
    path = pathlib.Path(__file__).with_name("scattering.json")
    path.write_text(json.dumps({"models": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
