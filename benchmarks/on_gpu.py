"""What a GPU must show, within 25 minutes of one card: `make bench-gpu DATA=DIR`.

    python benchmarks/on_gpu.py --data CIFAR10_DIR [--out runs/on_gpu] [--minutes 25]

The essential parts come first: the tests that concern a GPU; a run that is killed under
deterministic operations; a step beside plain SGD in TF32; Opacus and plain PyTorch on
the same card. Then a step in float32 and bfloat16, without exact products and with
deterministic operations; whole training in TF32; memory in float32; what each way to
clip a layer takes; and the TAN paper's WRN-16-4 on CIFAR-10 (Table 5, last row, 74.0 ±
0.5 %).

XLA takes a minute and more for one program on a GPU, and that leaves the card idle. So
what is timed runs twice: several parts at a time to compile, the essential ones while
the tests run; and then each alone, with the programs that JAX has kept in OUT-programs.
XLA chose the kernels of those while others used the card.

--minutes is kept: a part gets its own limit or what is left, whichever is less. For
what had no time, or too little, give the same command again.

Everything goes to the folder: on_gpu.json after each part, its output beside it. The
folder is packed as one file, OUT.tar, at the end. On this or another machine the same
command continues with that file: parts that ended are not run again, and the training
resumes. It has the run's secret seed, so it is as private as the data.

`--dry-run` does the same in seconds on a CPU, with a linear model.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from tanager import models
from tanager._files import write_json
from tanager.cli import main as tanager


ROOT = Path(__file__).parent.parent
DETERMINISTIC = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
ON_GPU = {"JAX_PLATFORMS": "cuda,cpu"}
SHARED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several at a time share the card
}
PRECISIONS = ("float32", "tf32", "bfloat16")
MODELS = {"wrn-16-4": 256, "wrn-28-10": 64, "vit-base-16": 64, "bit-50x1": 32}
"""Each with the rows of its physical batch."""
TESTS = (
    "tests/clipping",
    "tests/test_noise.py",
    "tests/test_grid.py",
    "tests/training",
)
KILLED = (
    "tests/training/test_resume.py::test_killed_for_real_it_goes_on_bit_identically"
)
STRATEGIES = ("sgd", "auto", "auto:low", "per_example")
PEERS = ("torch-sgd", "opacus:hooks", "jax-sgd", "tanager:auto")
APART = ("tests", "killed")
"""Parts that time nothing."""
ESSENTIAL = (*APART, *(f"step {model} tf32" for model in MODELS), "peers")
_TO_PREPARE = 0.4
"""The most of the time left that compiling may take, of all parts of a kind."""
_TO_STOP, _TO_PACK = 60, 15
"""Seconds that a part has to end once it is interrupted, and for all that is after."""
_INEXACT = """
from tanager.clipping.rules.base import TapValues
TapValues.exactly = lambda self: self
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """A command, what it may take, and what is changed around it.

    Attributes:
        name: in the record.
        words: of ``tanager``, or of Python if `python` is True.
        seconds: after which it is stopped.
        python: whether the words are those of Python.
        patch: Python that runs before the words of ``tanager``.
        settings: of its environment.
    """

    name: str
    words: tuple[str, ...]
    seconds: float
    python: bool = False
    patch: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure a GPU.

    Attributes:
        data: folder of CIFAR-10; without it nothing is trained.
        out: folder of what was measured.
        minutes: for everything.
        dry_run: do it all on tiny inputs, to see that it works.
    """

    data: Path | None = None
    out: Path = Path("runs/on_gpu")
    minutes: float = 25.0
    dry_run: bool = False


def parts(options: Options) -> Iterator[Part]:
    """Return what is measured, the training last."""
    dry = options.dry_run
    rows_of, rounds = ({"linear": 8}, 1) if dry else (MODELS, 5)
    first, *_ = rows_of
    precisions = PRECISIONS[1:2] if dry else PRECISIONS
    strategies = "sgd auto" if dry else " ".join(STRATEGIES)
    pytest = "-m pytest -q --collect-only -n0" if dry else "-m pytest -q"

    def bench(what: str, model: str) -> str:
        small = "--features 6 --classes 3" if dry else ""
        return f"bench {what} --model {model} {small} --json"

    def step(model: str, precision: str, strategies: str) -> tuple[str, ...]:
        words = f"--physical-batch {rows_of[model]} --repeats {rounds}"
        words += f" --precision {precision} --strategies {strategies}"
        return _words(f"{bench('step', model)} {words}")

    tests = " ".join(TESTS[1:2] if dry else TESTS)
    yield Part("tests", _words(f"{pytest} {tests}"), 360, True, "", ON_GPU)
    for model in rows_of:
        for precision in precisions:
            words = step(model, precision, strategies)
            yield Part(f"step {model} {precision}", words, 90)
        words = step(model, "tf32", "sgd auto")
        yield Part(f"step {model} tf32, products not exact", words, 60, patch=_INEXACT)
    for model, rows in rows_of.items():
        words = f"{bench('throughput', model)} --examples {20 * rows} --precision tf32"
        words += f" --physical-batches {rows // 2} {rows}"
        words += " --strategies sgd auto auto:low"
        yield Part(f"throughput {model}", _words(words), 90)
    for model in rows_of:
        words = f"{bench('memory', model)} --strategies sgd auto:low"
        words += " --limit-gib 3e-6" if dry else ""
        yield Part(f"memory {model}", _words(words), 90)
    work = " ".join(f"{name}:{n}" for name, n in rows_of.items() if name != "wrn-28-10")
    words = f"benchmarks/peers/run.py --work {work} --systems {' '.join(PEERS)}"
    words += f" --poisson --no-training --rounds {rounds} --out"
    peers = (*_words(words), f"{options.out}/peers.json")
    yield Part("peers", peers, 300, True)
    words = step(first, "tf32", "sgd auto")
    yield Part(f"step {first} tf32, deterministic", words, 60, settings=DETERMINISTIC)
    model, rows = ("lenet", 1) if dry else (first, 128)
    words = f"benchmarks/costs.py --model {model} --rows {rows} --precision tf32"
    yield Part(f"costs {first}", _words(words), 300, True)
    both = ON_GPU | DETERMINISTIC
    yield Part("killed", _words(f"{pytest} {KILLED}"), 120, True, "", both)


def training(options: Options) -> Part:
    """Return the training run, which takes the time that is left."""
    words = ("cifar10-wrn-16-4-tan", "--data", str(options.data))
    if options.dry_run:
        words = _words("digits --model linear --steps 4")
    out = ("--out", f"{options.out}/run", "--account", "none", "--yes", "--json")
    words = ("train", *words, *out)
    return Part("training", words, float("inf"), settings=DETERMINISTIC)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def run(part: Part, seconds: float, options: Options) -> dict[str, Any]:
    """Run a part for at most some seconds; return what it printed and how it ended."""
    began = time.monotonic()
    if options.dry_run and not part.python:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = tanager(list(part.words))
        output = printed.getvalue()
    else:
        code, output = _apart(part, seconds, options)
    taken = round(time.monotonic() - began, 1)
    found: dict[str, Any] = {"code": code, "seconds": taken, "command": _command(part)}
    lines = output.strip().splitlines()
    with contextlib.suppress(ValueError):
        return found | {"result": json.loads(output)}
    return found | {"last_lines": lines[-12:]}


def prepare(
    parts: Sequence[Part], seconds: float, options: Options
) -> dict[str, dict[str, Any]]:
    """Run parts at the same time for at most some seconds, to compile.

    Return what those of `APART` found.
    """
    end = time.monotonic() + seconds
    if options.dry_run:  # two show how
        parts = parts[:2]

    def one(part: Part) -> dict[str, Any] | None:
        left = end - time.monotonic()
        return None if left <= 0 else run(part, min(part.seconds, left), options)

    every = [part if part.name in APART else _once(part) for part in parts]
    most = max((os.cpu_count() or 1) // 2, 1)
    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        # A dry run does not start processes, and prints what it catches itself.
        found = list(map(one, every) if options.dry_run else pool.map(one, every))
    pairs = zip(parts, found, strict=True)
    return {part.name: each for part, each in pairs if each and part.name in APART}


def _once(part: Part) -> Part:
    """Return a part that times one round, and writes elsewhere."""
    words = list(part.words)
    for name in ("--repeats", "--rounds"):
        if name in words:
            words[words.index(name) + 1] = "1"
    words = [word.replace("peers.json", "prepared.json") for word in words]
    seconds = float("inf")  # its own limit is for what is compiled
    name = f"{part.name}, prepared"
    return dataclasses.replace(part, name=name, words=tuple(words), seconds=seconds)


def programs_of(options: Options) -> Path:
    """Return the folder of compiled programs."""
    return options.out.with_name(f"{options.out.name}-programs")


def _command(part: Part) -> str:
    program = "python" if part.python else "tanager"
    settings = [f"{name}={value}" for name, value in part.settings.items()]
    return shlex.join([*settings, program, *part.words])


def _apart(part: Part, seconds: float, options: Options) -> tuple[int, str]:
    """Run a part in a process; interrupted at its end, it keeps what it has."""
    program = (sys.executable, *part.words)
    if not part.python:
        code = f"{part.patch}\nimport sys\nfrom tanager.cli import main\n"
        code += "sys.exit(main(sys.argv[1:]))"
        program = (sys.executable, "-c", code, *part.words)
    log = options.out / "logs" / f"{part.name.replace(' ', '-')}.txt"
    shared = SHARED | {"JAX_COMPILATION_CACHE_DIR": str(programs_of(options))}
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            program,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **shared, **part.settings},
            cwd=ROOT,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                output = ""  # its own processes may hold the pipe open
    return process.returncode, output


def unpack(options: Options) -> None:
    """Go on with what another machine measured, if its file is here."""
    packed = options.out.with_suffix(".tar")
    if packed.exists() and not options.out.exists():
        with tarfile.open(packed) as file:
            file.extractall(options.out.parent, filter="data")


def pack(options: Options) -> Path:
    """Put the whole folder in one file, which only its owner may read."""
    packed = options.out.with_suffix(".tar")
    packed.touch(mode=0o600)
    with tarfile.open(packed, "w") as file:
        file.add(options.out, options.out.name)
    return packed


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is not in the record yet; return 1 if a part failed."""
    options = tyro.cli(Options, args=words, config=(tyro.conf.OmitArgPrefixes,))
    options = dataclasses.replace(options, out=options.out.resolve())
    if options.data is not None:
        if not options.data.is_dir():
            raise SystemExit(f"--data (={options.data}) must be a folder of CIFAR-10")
        options = dataclasses.replace(options, data=options.data.resolve())
    for model in MODELS:
        models.find(model)  # a misspelt one is refused now
    unpack(options)
    options.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes - _TO_STOP - _TO_PACK
    path = options.out / "on_gpu.json"
    record: dict[str, Any] = {"parts": {}}
    if path.exists():
        record = json.loads(path.read_text())
    here = _machine()
    if record.setdefault("dry_run", options.dry_run) != options.dry_run:
        raise SystemExit(f"{options.out} mixes a dry run with a real one: other --out")
    if not options.dry_run and here["machine"]["backend"] != "gpu":
        raise SystemExit("JAX found no GPU: install tanager[cuda], or give --dry-run")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in the background of a shell, and children would ignore it too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    every = list(parts(options))
    kinds = [
        [part for part in every if part.name in ESSENTIAL],
        [part for part in every if part.name not in ESSENTIAL],
    ]
    if options.data is not None or options.dry_run:
        kinds.append([training(options)])
    todo = [part for kind in kinds for part in kind]

    def note(name: str, found: dict[str, Any]) -> None:
        record["parts"][name] = found | here
        now = datetime.datetime.now(datetime.UTC)
        record["date"] = now.isoformat(timespec="seconds")
        write_json(path, record)

    def waiting(some: Sequence[Part]) -> list[Part]:
        ended = record["parts"]
        return [part for part in some if ended.get(part.name, {}).get("code") != 0]

    for kind in kinds:
        ran: dict[str, dict[str, Any]] = {}
        left = end - time.monotonic()
        if kind[0].name != "training" and waiting(kind) and left > 0:
            print(
                f"compiling for {len(waiting(kind))} parts, {left:.0f} s left",
                flush=True,
            )
            ran = prepare(waiting(kind), _TO_PREPARE * left, options)
            for name, found in ran.items():
                note(name, found)
        for part in waiting(kind):
            if part.name in ran:  # and failed: once is enough
                continue
            left = end - time.monotonic()
            if left <= 0:
                print(
                    f"no time left for {part.name}: give the same command again",
                    flush=True,
                )
                continue
            number = 1 + todo.index(part)
            print(
                f"{number} of {len(todo)}: {part.name}, {left:.0f} s left", flush=True
            )
            note(part.name, run(part, min(part.seconds, left), options))
    print(f"measured: {path}; to go on elsewhere: {pack(options)}")
    return int(bool(waiting(todo)))


def _machine() -> dict[str, Any]:
    """Return machine and versions, asked in a process that leaves the card again."""
    code = "import json; from tanager.bench import machine as m\n"
    code += "print(json.dumps({'machine': m.machine(), 'versions': m.versions()}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
