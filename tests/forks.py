"""Python programs in processes of their own that need not import everything again.

Imports take three seconds; small runs, one. Each process is forked from one that has
imported what most of them do, and in which JAX has not started.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from switch import FULL


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "dp_accounting.pld.privacy_loss_distribution",
        "dp_accounting.rdp",
        "equinox",
        "jinja2",
        "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg",
        "matplotlib.figure",
        "optax",
        "orbax.checkpoint",
        "pyarrow.dataset",
        "scipy.stats",
        "sklearn.datasets",
        "sklearn.metrics",
        "tanager.commands.train",
        "tanager.training.loop",
        "tensorboardX",
    ]
)
PATIENCE = 600 if FULL else 180
# Two devices would compile all twice.
ONE_DEVICE = "--xla_force_host_platform_device_count=1"


class Fork:
    """`python script *arguments`, started.

    Args:
        script, arguments: what and with which words.
        environment: its variables.
        folder: where it runs; here, by default.
        strict: whether a warning is an error.

    Attributes:
        out, errors: what it printed, once it has ended.
        code: its exit code; below 0, if a signal ended it.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str | Path] = (),
        *,
        environment: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        strict: bool = False,
    ):
        self._said = tempfile.TemporaryDirectory()
        self._process = FORKS.Process(
            target=_run,
            args=(
                [str(script), *map(str, arguments)],
                dict(environment),
                folder or Path.cwd(),
                Path(self._said.name),
                strict,
            ),
        )
        self._process.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    @classmethod
    def computing(cls, words: Sequence[str | Path], folder: Path | None = None):
        """The script that is the first of the words, with less to compile.

        Exactly as a user would start it, but for what costs time and changes last
        digits only: optimising programs in full, and measuring how to clip.
        """
        flags = os.environ["XLA_FLAGS"]
        if not FULL:
            flags = f"{flags} {ONE_DEVICE}"
            words = [Path(__file__).parent / "by_cost.py", *words]
        surroundings = os.environ | {"MPLBACKEND": "Agg", "XLA_FLAGS": flags}
        script, *arguments = words
        return cls(
            Path(script),
            arguments,
            environment=surroundings,
            folder=folder,
            strict=True,
        )

    def kill(self) -> None:
        """Kill it, with SIGKILL."""
        self._process.kill()

    def wait(self) -> None:
        """Wait for its end, and keep what it printed."""
        self._process.join(PATIENCE)
        late = self.running
        self.kill()
        assert not late, f"it runs for more than {PATIENCE} s"
        self.code = self._process.exitcode
        self.out, self.errors = (
            Path(self._said.name, name).read_text() for name in ("out", "errors")
        )
        self._said.cleanup()


def _run(
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    said: Path,
    strict: bool,
) -> None:
    """Be that program, from its first line to what is done at exit."""
    for stream, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if strict:
        warnings.simplefilter("error")
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
