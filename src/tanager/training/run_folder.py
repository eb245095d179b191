"""A run is a folder: everything about it, public and private, in one place.

    config.json            what was asked for
    ledger.jsonl           what was spent
    metrics.jsonl          what may be released: test results, ε so far
    tensorboard/           the same, to look at
    checkpoints/           parameters, their average, the optimizer's state
    model.safetensors      the final parameters; model-ema.safetensors their average
    result.json            the guarantee and the test results
    report.html            all of it on one page
    private/               mode 0700: the secret seed, training losses, batch sizes

Nothing outside `private/` depends on the training examples except through noise; but
for the seconds that steps took, which tell how many physical batches there were.
"""

import os
import shutil
from pathlib import Path

from tanager import _validate as validate
from tanager._files import write_json_once
from tanager._reading import reading
from tanager._record import read_record
from tanager.seed import Seed


_WRITTEN = (
    "config.json",
    "metrics.jsonl",
    "result.json",
    "report.html",
    "model.safetensors",
    "model-ema.safetensors",
    "checkpoints",
)


class RunFolder:
    """Paths and atomic files of one run.

    Args:
        path: the folder, created when missing.
        of_search: it is a private search's, which releases its best as a run does.

    Raises:
        ValueError: `path` is a file, cannot be written, or holds other things.
    """

    def __init__(self, path: str | os.PathLike, of_search: bool = False):
        self.path = Path(path)
        self._of_search = of_search
        if self.path.exists() and not self.path.is_dir():
            validate.refuse("out", str(path), "must be a folder, not a file")
        self._refuse_other_things()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(mode=0o700, exist_ok=True)
            os.chmod(self.private, 0o700)
        except OSError as error:
            validate.refuse("out", str(path), "cannot be written", str(error))

    def _refuse_other_things(self) -> None:
        if not self._of_search and (self.path / "study.json").exists():
            validate.refuse(
                "out",
                str(self.path),
                "holds a search, whose result would be overwritten",
                "train into another folder",
            )
        begun = (self.private / "seed.json").exists() or self.ledger.exists()
        others = [name for name in _WRITTEN if (self.path / name).exists()]
        if others and not begun:
            validate.refuse(
                "out",
                str(self.path),
                f"holds a {others[0]} that is no run's, and would be overwritten",
                "train into another folder",
            )

    @property
    def private(self) -> Path:
        """The folder that must not be released."""
        return self.path / "private"

    @property
    def config(self) -> Path:
        """What was asked for."""
        return self.path / "config.json"

    @property
    def ledger(self) -> Path:
        """What was spent."""
        return self.path / "ledger.jsonl"

    @property
    def result(self) -> Path:
        """The guarantee and the test results, there once the run is complete."""
        return self.path / "result.json"

    def seed(self, given: int | None, make: bool = True) -> Seed:
        """Return the run's secret, made on first use and kept in mode 0600.

        Args:
            given: a person's number, which makes the run reproducible and NOT
                private; None draws the secret from the operating system.
            make: False where another host has made it.

        Raises:
            ValueError: the folder was begun with another seed, or has a ledger and no
                seed; or the other host's is not there.
        """
        path = self.private / "seed.json"
        if not path.exists():
            self._make_seed(path, given, make)
        # Of processes that begin at once, all read what the first has written.
        remedy = "restore it from a copy, or train into another folder"
        kept = read_record(path, {"secret": str, "private": bool}, remedy)
        with reading(path, "holds no seed", remedy):
            seed = Seed(bytes.fromhex(kept["secret"]), kept["private"])
        changed = given is None and not seed.private
        if changed or (given is not None and Seed.from_int(given) != seed):
            validate.refuse(
                "seed",
                given,
                "differs from the seed this run folder was begun with",
                f"resume with the same seed, or train into another folder than "
                f"{self.path}",
            )
        return seed

    def _make_seed(self, path: Path, given: int | None, make: bool) -> None:
        if not make:
            validate.refuse(
                "out",
                str(self.path),
                "must be on a file system that all hosts share",
                "this host does not see what host 0 wrote there",
            )
        if self.ledger.exists() and self.ledger.stat().st_size:
            raise ValueError(
                f"run folder {self.path} has a ledger but its secret seed "
                f"({path}) is missing, so the run cannot go on: restore the file, or "
                "train into another folder"
            )
        seed = Seed.from_os() if given is None else Seed.from_int(given)
        kept = {"secret": seed.secret.hex(), "private": seed.private}
        write_json_once(path, kept, mode=0o600)

    def require_space(self, needed: int) -> None:
        """Refuse to begin when the disk has fewer than `needed` bytes left."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            validate.refuse(
                "out",
                str(self.path),
                f"is on a disk with {free / 1e6:.0f} MB left, but the run needs about "
                f"{needed / 1e6:.0f} MB",
                "free some space or choose another folder",
            )
