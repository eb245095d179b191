"""A run is a folder: everything about it, public and private, in one place.

    config.json            the settings
    ledger.jsonl           what was spent
    metrics.jsonl          what may be released: test results, ε so far
    tensorboard/           the same, to look at
    checkpoints/           parameters, their average, the optimizer's state
    model.safetensors      the final parameters; model-ema.safetensors their average
    result.json            the guarantee and the test results
    report.html            all of it on one page
    private/               mode 0700: the secret seed, training losses, batch sizes

Everything outside `private/` depends on the training examples through noise only,
except timings: they tell how many physical batches a step took.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shlex
import shutil
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

from tanager import _validate as validate
from tanager._files import write_json, write_json_once
from tanager._reading import read_json, reading
from tanager._record import Maybe, read_record
from tanager._text import in_bytes
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
_REMEDY = "train into another folder"
_SEED = {"secret": str, "private": bool, "used": bool, "place": Maybe(str)}
_LOGS = (".out", ".err", ".log")  # of jobs, such as slurm-123.out
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def naming_full_disks(path: str | os.PathLike | None) -> Iterator[None]:
    """Say which run a full disk stopped, and how it resumes.

    A file that is named may be elsewhere: then the error says it.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if path is None or error.errno not in _FULL:
            raise
        named = Path(os.fsdecode(error.filename or path)).absolute()
        if not named.is_relative_to(Path(path).absolute()):
            raise
        raise OSError(
            f"a disk is full, likely that of run folder {path} ({error.strerror}): "
            "free it, and run the same command again with --out "
            f"{shlex.quote(os.fspath(path))}, which resumes"
        ) from error


def refuse_foreign(
    path: str | os.PathLike, own: Collection[str], what: str = "run"
) -> None:
    """Refuse a folder that holds other files: people share the folder of a run.

    Raises:
        ValueError: it holds something, and nothing with a name in `own`, those of a run
            or of `what` it is for.
    """
    path = Path(path)
    found = [each.name for each in path.iterdir()] if path.is_dir() else []
    found = [name for name in found if not name.startswith((".", "lost+found"))]
    if found and not set(own).intersection(found):
        rule = f"must be new, be empty or hold a {what}, but it holds {min(found)}"
        remedy = "move that elsewhere, or name another folder"
        if all(name.endswith(_LOGS) for name in found):
            # It may hold more than the guarantee covers, such as a traceback.
            remedy = "if that is the log of this job, let the job write it elsewhere, "
            remedy += f"or name a folder beside it, such as --out {path / what}"
        validate.refuse("out", str(path), rule, remedy)


def numbered(name: str, parent: str | os.PathLike = "runs") -> Path:
    """Return the first folder ``parent/NAME-1``, ``-2``, … after those that are there.

    It is made, so that no other run takes it.
    """
    number = 1 + max(_numbers(name, parent), default=0)
    while True:
        path = Path(parent) / f"{name}-{number}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = f"{reason}: name a folder elsewhere (--out)"
            validate.refuse("out", str(path), "cannot be written", remedy)


@contextlib.contextmanager
def removed_if_refused(
    path: str | os.PathLike, *inner: Path, new: bool = False
) -> Iterator[None]:
    """Remove a new folder, and those in it, if a run is refused before it begins.

    It is made, and kept while another process is in it. `new` counts one that is there.
    """
    path, file = Path(path), None
    made = [each for each in (*inner, path) if not each.exists()] + [path] * new
    with contextlib.suppress(OSError):  # Else the run says what is wrong with it.
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # Others hold it, or the disk has no locks.
            if file is not None and made:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for each in made:
                    remove_unused(each)
        raise
    finally:
        if file is not None:
            os.close(file)


def remove_unused(path: str | os.PathLike) -> None:
    """Remove the folder of a run that was refused: empty, or with an unused seed."""
    path = Path(path)
    private, seed = path / "private", path / "private/seed.json"
    with contextlib.suppress(
        OSError, ValueError
    ):  # A folder with other files is not removed.
        files = {*path.iterdir(), *(private.iterdir() if private.exists() else ())}
        if not files - {private, seed} and not (seed.exists() and _read_seed(seed)[1]):
            shutil.rmtree(path)


def unfinished(name: str, parent: str | os.PathLike = "runs") -> Path:
    """Return the last ``parent/NAME-…`` that has a seed and no result.

    Raises:
        ValueError: there is none.
    """
    folders = [Path(parent) / f"{name}-{number}" for number in _numbers(name, parent)]
    found = [*filter(_is_unfinished, folders)]
    if not found:
        others = sorted(filter(_is_unfinished, Path(parent).glob("*")))
        rule = f"finds no unfinished {name}-… in {parent}"
        remedy = "name the run's folder with --out instead"
        remedy += "".join(f", such as {each}" for each in others[:1])
        validate.refuse("resume", True, rule, remedy)
    return found[-1]


def begun(out: str | os.PathLike | None) -> bool:
    """Return whether a folder holds a run, or repeats of one."""
    files = ("config.json", "1/config.json")
    return out is not None and any(Path(out, file).exists() for file in files)


def _is_unfinished(folder: Path) -> bool:
    begun = (folder / "private/seed.json").exists()
    return begun and not (folder / "result.json").exists()


def _numbers(name: str, parent: str | os.PathLike) -> list[int]:
    """Return the numbers of the folders of this name, in order."""
    found = Path(parent).glob(f"{name}-*")
    ends = [each.name.removeprefix(f"{name}-") for each in found]
    return sorted(int(end) for end in ends if end.isascii() and end.isdigit())


class RunFolder:
    """Paths and atomic files of one run.

    Args:
        path: the folder, created when missing.
        of_search: it is a private search's, which releases its best as a run does.

    Attributes:
        config, ledger, result: public files of the run.
        private: the folder that must not be released.

    Raises:
        ValueError: `path` is a file, is not valid UTF-8, cannot be written, or holds
            other things.
    """

    def __init__(self, path: str | os.PathLike, of_search: bool = False):
        self.path = Path(path)
        self.config, self.ledger, self.result = (
            self.path / name for name in ("config.json", "ledger.jsonl", "result.json")
        )
        self.private = self.path / "private"
        self._seed_file = self.private / "seed.json"
        self._of_search = of_search
        if self.path.exists() and not self.path.is_dir():
            self._refuse("must be a folder, not a file")
        self._refuse_other_things()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.private.mkdir(mode=0o700, exist_ok=True)
            if self.private.stat().st_mode & 0o777 != 0o700:
                os.chmod(self.private, 0o700)
            shown = self.private.stat().st_mode & 0o077
        except OSError as error:
            self._refuse("cannot be written", str(error))
        if shown:
            rule = "is on a disk that keeps no permissions"
            remedy = "others may read the seed in private/: name a folder elsewhere"
            text = validate.message("out", str(self.path), rule, remedy)
            warnings.warn(text, stacklevel=2)

    def _refuse_other_things(self) -> None:
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError:
            self._refuse(
                "must be a path that is valid UTF-8, like the folders above it",
                "name another folder, or set PYTHONUTF8=1 if it is valid",
            )
        if (self.private / "identity.json").exists():
            self._refuse(
                "holds a run that tanager 0.1 began, which this version cannot resume",
                f"finish it with tanager 0.1, or {_REMEDY}",
            )
        if not self._of_search and (self.path / "study.json").exists():
            self._refuse("holds a search; its result would be overwritten", _REMEDY)
        begun = self._seed_file.exists() or self.ledger.exists()
        others = [name for name in _WRITTEN if (self.path / name).exists()]
        if others and not begun:
            if is_exported(self.path):
                self._refuse("holds an exported model, not a run", _REMEDY)
            self._refuse(f"holds a {others[0]} that tanager did not write", _REMEDY)
        if not begun:
            refuse_foreign(self.path, (self.private.name, "job.lock"))
            refuse_foreign(self.private, (self._seed_file.name,))

    def _refuse(self, rule: str, remedy: str = "") -> NoReturn:
        validate.refuse("out", str(self.path), rule, remedy)

    def began(self) -> str | None:
        """Return when the run began, in UTC, as config.json says; now if it begins.

        None if a version of tanager began it that did not record the time.
        """
        with contextlib.suppress(OSError, ValueError):
            return read_record(self.config, {"began": Maybe(str)})["began"]
        return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def seed(self, given: int | None, make: bool = True) -> Seed:
        """Return the run's secret, made on first use and kept in mode 0600.

        Args:
            given: a person's number, which makes the run reproducible and NOT
                private; None draws the secret from the operating system.
            make: False where another host has made it.

        Raises:
            ValueError: the folder has another seed; it lost a file after the seed was
                used, or is a copy of a run that is still there; or the other host's
                seed is missing.
        """
        path = self._seed_file
        if not path.exists():
            self._make_seed(given, make)
        # Of processes that begin at once, all read what the first has written.
        seed, used, place = _read_seed(path)
        if used:
            self._require_whole()
        if seed.private and place is not None and not self.result.exists():
            self._refuse_a_copy(seed, place)
        changed = given is None and not seed.private
        if changed or (given is not None and Seed.from_int(given) != seed):
            validate.refuse(
                "seed",
                given,
                "differs from the seed of this run folder",
                f"give that seed to resume {self.path}, or train into another folder",
            )
        return seed

    def seed_is_used(self) -> None:
        """Record that the seed was used, and where now: it needs the other files."""
        kept = json.loads(self._seed_file.read_text())
        now = kept | {"used": True, "place": str(self.path.absolute())}
        if now != kept:
            write_json(self._seed_file, now, mode=0o600)

    def _make_seed(self, given: int | None, make: bool) -> None:
        if not make:
            self._refuse(
                "must be on a file system that all hosts share",
                "this host does not see what host 0 wrote there",
            )
        if _has_content(self.ledger):
            raise ValueError(
                f"run folder {self.path} has a ledger but its secret seed is missing "
                f"({self._seed_file}): this run cannot be resumed; train into another "
                "folder"
            )
        seed = Seed.from_os() if given is None else Seed.from_int(given)
        kept = {"secret": seed.secret.hex(), "private": seed.private, "used": False}
        kept["place"] = str(self.path.absolute())
        write_json_once(self._seed_file, kept, mode=0o600)

    def _require_whole(self) -> None:
        names = ("config.json", "ledger.jsonl", "private/fingerprint.json")
        if self._of_search:
            names = ("study.json", "private/runs")
        lost = [name for name in names if not _has_content(self.path / name)]
        if lost:
            raise ValueError(
                f"run folder {self.path} lost {' and '.join(lost)}, but its secret "
                "seed has been used. Training here would add the same noise to other "
                "sums: train into another folder"
            )

    def _refuse_a_copy(self, seed: Seed, place: str) -> None:
        """Refuse to use a seed that another folder has, which can use it too."""
        found = None
        with contextlib.suppress(OSError, ValueError):
            if not os.path.samefile(place, self.path):
                found = seed_of(place)
        if found == seed:
            self._refuse(
                f"is a copy of the run in {place}: if both resumed, the same noise "
                "would hide other sums, and subtracting them would remove it",
                "resume that one, or train into another folder; if nobody was shown "
                "anything of it, you may delete it instead",
            )

    def require_space(self, needed: int) -> None:
        """Refuse to begin when the disk has fewer than `needed` bytes left."""
        free = shutil.disk_usage(self.path).free
        if free < needed:
            self._refuse(
                f"is on a disk with {in_bytes(free)} left, but the run needs about "
                f"{in_bytes(needed)}",
                "free some space, or train into a folder on another disk",
            )


def is_exported(folder: Path) -> bool:
    """Return whether a folder holds a model that `tanager export` wrote."""
    with contextlib.suppress(ValueError, OSError):
        return "tanager" in read_json(folder / "config.json")
    return False


def seed_of(folder: str | os.PathLike) -> Seed | None:
    """Return the secret of a run's folder; None if it has none. Nothing is made.

    Raises:
        ValueError: its file is damaged, or another user's.
    """
    path = Path(folder) / "private/seed.json"
    with reading(path):
        there = path.exists()
    return _read_seed(path)[0] if there else None


def _read_seed(path: Path) -> tuple[Seed, bool, str | None]:
    """Return the secret in a file, whether it was used, and in which folder it was."""
    kept = read_record(path, _SEED, _REMEDY)
    with reading(path, "holds no seed", _REMEDY):
        seed = Seed(bytes.fromhex(kept["secret"]), kept["private"])
        return seed, kept["used"], kept["place"]


def _has_content(path: Path) -> bool:
    return path.is_dir() or (path.exists() and path.stat().st_size > 0)
