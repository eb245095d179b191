"""Time private training side by side: tanager, Opacus, JAX-Privacy, vmap and plain SGD.

    make bench-peers
    python benchmarks/peers/run.py --work wrn-16-4:32 mlp:64 --rounds 5

Every system is a process of its own in an environment of its own (`make` lays them in
.venv-NAME) and is given the same parameters, examples and physical batch. All get ready
first; then they take turns, a step untimed and a step timed, so that a slow minute of
the machine slows all of them. A system that fails is a row with its error. What was
measured is written after each piece of work, and not measured again.

FastDP and private_vision are on no registry: give their checkouts with --fastdp PATH
and --private-vision PATH (docs/benchmarks.md names the commits).
"""

import argparse
import datetime
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from workers import Failed, Workers, say


SYSTEMS = (
    "torch-sgd",
    "torch-sgd:nhwc",
    "jax-sgd",
    "jax-sgd:options",
    "tanager:auto",
    "tanager:auto:low",
    "opacus:hooks",
    "opacus:hooks:nhwc",
    "opacus:ghost",
    "jax-privacy",
    "jax-privacy:options",
    "jax-vmap",
    "jax-vmap:options",
)
"""What is timed unless ``--systems`` says otherwise. Slower ways to use the same
libraries: "opacus:functorch", and "jax-privacy:8" for microbatches of 8.
"""
WORK = (
    *(f"wrn-16-4-plain:{rows}" for rows in (8, 16, 32, 64)),
    *(f"wrn-16-4:{rows}" for rows in (8, 16, 32, 64)),
    *(f"vit-tiny-16:{rows}" for rows in (8, 16, 32)),
    "bit-50x1:8",
    *(f"mlp:{rows}" for rows in (8, 64, 256)),
    *(f"linear:{rows}" for rows in (64, 256, 2048)),
)
"""What is measured unless ``--work`` says otherwise. Wide ResNets at 128 and 256 need
fewer ``--systems``: all of them ready at once do not fit in 24 GB.
"""
SHAPES = {
    "wrn-16-4": (32, 32, 3),
    "wrn-16-4-plain": (32, 32, 3),
    "vit-tiny-16": (224, 224, 3),
    "vit-base-16": (224, 224, 3),
    "bit-50x1": (224, 224, 3),
    "mlp": (3072,),
    "linear": (2048,),
}
CLIP_NORM = 1.0
_POISSON_STEPS = 8
_POISSON_BATCHES = 8
_TRAIN = {
    "steps": 100,
    "expected_batch": 256,
    "learning_rate": 1.0,
    "noise_multiplier": 1.0,
}
_SAME_LOSS = 1e-3
# A ReLU whose input is 0 but for rounding has another slope in another library.
_SAME_SUM = 0.02
# Products in TF32 have errors of 5e-4, and no two libraries have the same.
_SLACK = {"float32": 1, "tf32": 5}
# The first that ran is what the others are held against. Vmap by hand is the
# definition; it needs the memory of all gradients, which large batches lack.
_LOSSES_OF = ("jax-sgd", "jax-sgd:options")
_SUMS_OF = (
    "jax-vmap",
    "jax-vmap:options",
    "jax-privacy",
    "jax-privacy:options",
    "tanager:auto",
    "tanager:auto:low",
)


def measure(spec: str, folder: Path, options) -> dict[str, Any]:
    """Time one piece of work, MODEL:ROWS, system by system in turns."""
    model, _, rows = spec.partition(":")
    work = lay_out(model, int(rows), int(rows), folder)
    systems = [name for name in options.systems if suits(name, model, int(rows))]
    workers = Workers(tuple(systems), work, options)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(options.rounds):
        say(f"{spec}: round {number + 1} of {options.rounds}")
        for name, answer in workers.each("step").items():
            times[name].append(answer["seconds"])
    sums = {}
    for name in list(workers.ready):
        if not name.startswith(("torch-sgd", "jax-sgd")):
            path = folder / "sum.npz"
            try:
                workers.ready[name].ask("sum", to=str(path))
                with np.load(path) as found:
                    sums[name] = dict(found)
            except Failed as failure:
                workers.rows[name]["sum_error"] = str(failure)
    workers.end()
    for name, row in workers.rows.items():
        row |= {"system": name, "seconds": times[name]}
    references = compare(workers.rows, sums, _SLACK[options.precision])
    return {
        "work": spec,
        "model": model,
        "physical_batch": int(rows),
        "held_against": references,
        "rows": list(workers.rows.values()),
    }


def compare(
    rows: dict[str, dict[str, Any]],
    sums: dict[str, dict[str, np.ndarray]],
    slack: float = 1,
) -> dict[str, str | None]:
    """Hold losses and clipped sums against a reference; another function is an error.

    `slack` times as much is allowed as in float32.

    Returns:
        The reference of "losses" and of "sums"; None where there is nothing to compare.
    """
    losses = {
        name: np.array(found)
        for name, row in rows.items()
        if (found := row.pop("losses", None))
    }
    by = next((name for name in _LOSSES_OF if name in losses), None)
    for name in losses if by else ():
        difference = float(abs(losses[name] - losses[by]).max())  # pyrefly: ignore[bad-index]
        rows[name]["loss_difference"] = difference
        if difference > slack * _SAME_LOSS:
            first = losses[name][:2]
            rows[name]["error"] = f"another function: losses differ, {first}"
    against = next((name for name in _SUMS_OF if name in sums), None)
    for name in sums if against else ():
        difference = relative(sums[name], sums[against])  # pyrefly: ignore[bad-index]
        rows[name]["sum_difference"] = difference
        if difference > slack * _SAME_SUM:
            rows[name]["error"] = f"another sum: {difference:.2f} of its length away"
    return {"losses": by, "sums": against}


def relative(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return ‖found − wanted‖ / ‖wanted‖ over all leaves, in float64."""
    error = size = 0.0
    for name, leaf in wanted.items():
        leaf = leaf.astype(np.float64)
        error += float(np.square(found[name].astype(np.float64) - leaf).sum())
        size += float(np.square(leaf).sum())
    return (error / size) ** 0.5


def suits(system: str, model: str, rows: int) -> bool:
    """Return whether to try: vectors have no layout, few rows no microbatches."""
    if system == "jax-privacy:8" and rows <= 8:
        return False
    return not (system.endswith(":nhwc") and len(SHAPES[model]) == 1)


def lay_out(model: str, rows: int, examples: int, folder: Path) -> dict[str, Any]:
    """Write examples of noise and initial parameters; return a worker's `work`."""
    import jax_worker

    shape = SHAPES[model]
    generator = np.random.default_rng(0)
    images = generator.standard_normal((examples, *shape), np.float32)
    labels = generator.integers(10, size=examples, dtype=np.int32)
    np.savez(folder / "data.npz", images=images, labels=labels)
    params = jax_worker.named(jax_worker.create(model, 10, shape))
    arrays: dict[str, Any] = {k: np.asarray(v) for k, v in params.items()}
    np.savez(folder / "params.npz", **arrays)
    return {
        "model": model,
        "physical_batch": rows,
        "classes": 10,
        "clip_norm": CLIP_NORM,
        "data": str(folder / "data.npz"),
        "params": str(folder / "params.npz"),
    }


def poisson(spec: str, folder: Path, options) -> dict[str, Any]:
    """Time logical batches of Poisson sizes, compiling included: MODEL:ROWS.

    The expected logical batch is `_POISSON_BATCHES` physical ones, of 50 000 examples.
    """
    model, _, text = spec.partition(":")
    rows = int(text)
    expected = _POISSON_BATCHES * rows
    generator = np.random.default_rng(0)
    sizes = generator.binomial(50_000, expected / 50_000, _POISSON_STEPS).tolist()
    work = lay_out(model, rows, max(sizes), folder)
    systems = tuple(
        name for name in options.systems if not name.endswith((":nhwc", ":8"))
    )
    workers = Workers(systems, work, options)
    say(f"{spec}: {_POISSON_STEPS} logical batches of {min(sizes)} to {max(sizes)}")
    settings = {"expected_batch": expected, "noise_multiplier": 1.0}
    answers = workers.each("poisson", sizes=sizes, learning_rate=0.1, **settings)
    workers.end()
    found = []
    for name, row in workers.rows.items():
        row.pop("losses", None)
        found.append({"system": name, **row, **answers.get(name, {})})
    return {"work": spec, "sizes": sizes, "rows": found}


def training(folder: Path, options) -> dict[str, Any]:
    """Train a small MLP on scanned digits alike in all; only the noise is their own.

    Once without noise, where the parameters must agree, and once with.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    x, x_test, y, y_test = train_test_split(
        images, labels.astype(np.int32), test_size=360, random_state=0
    )
    np.savez(folder / "data.npz", images=x, labels=y)
    np.savez(folder / "test.npz", images=x_test, labels=y_test)
    import jax_worker

    params = jax_worker.named(jax_worker.create("mlp-small", 10, (64,)))
    arrays: dict[str, Any] = {k: np.asarray(v) for k, v in params.items()}
    np.savez(folder / "params.npz", **arrays)
    generator = np.random.default_rng(0)
    rate = _TRAIN["expected_batch"] / len(x)
    samples: dict[str, Any] = {
        str(step): np.flatnonzero(generator.random(len(x)) < rate)
        for step in range(_TRAIN["steps"])
    }
    np.savez(folder / "samples.npz", **samples)
    work = {
        "model": "mlp-small",
        "physical_batch": 64,
        "classes": 10,
        "clip_norm": CLIP_NORM,
        "data": str(folder / "data.npz"),
        "params": str(folder / "params.npz"),
    }
    private = tuple(
        name
        for name in options.systems
        if not name.endswith((":nhwc", ":8")) and "-sgd" not in name
    )
    rows: dict[str, dict[str, Any]] = {name: {"system": name} for name in private}
    ends = {}
    for noise in (0.0, _TRAIN["noise_multiplier"]):
        workers = Workers(private, work, options)
        for name in list(workers.ready):
            to = folder / f"end-{name}.npz"
            paths = {"samples": folder / "samples.npz", "test": folder / "test.npz"}
            asked = _TRAIN | {"noise_multiplier": noise, "to": str(to)}
            asked |= {key: str(path) for key, path in paths.items()}
            try:
                accuracy = workers.ready[name].ask("train", **asked)["accuracy"]
            except Failed as failure:
                workers.fail(name, failure)
                continue
            if noise:
                rows[name]["accuracy"] = accuracy
            else:
                with np.load(to) as found:
                    ends[name] = dict(found)
                rows[name]["accuracy_without_noise"] = accuracy
        for name, row in workers.rows.items():
            if "error" in row:
                rows[name]["error"] = row["error"]
        workers.end()
    for name, end in ends.items():
        if "jax-vmap" in ends:
            rows[name]["parameter_difference"] = relative(end, ends["jax-vmap"])
    return {"settings": _TRAIN, "rows": list(rows.values())}


def largest(model: str, folder: Path, options) -> dict[str, Any]:
    """Find each system's largest physical batch on an accelerator, by trying."""
    from tanager.bench.memory import largest as search

    rows = []
    for system in options.systems:

        def fits(count: int, system: str = system) -> bool:
            work = lay_out(model, count, count, folder)
            workers = Workers((system,), work, options)
            error = workers.rows[system].get("error")
            workers.end()
            if error and "memory" not in error.lower() and "EXHAUSTED" not in error:
                raise Failed(error)
            return not error

        try:
            rows.append({"system": system, "physical_batch": search(fits, 4096)})
        except Failed as failure:
            rows.append({"system": system, "error": str(failure)})
    return {"model": model, "rows": rows}


def main() -> None:
    """Measure what is asked for and not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="*", default=list(WORK), metavar="MODEL:ROWS")
    parser.add_argument(
        "--poisson", nargs="*", default=["wrn-16-4-plain:32"], metavar="MODEL:ROWS"
    )
    parser.add_argument("--largest", nargs="*", default=[], metavar="MODEL")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--precision",
        choices=[*_SLACK],
        default="float32",
        help="of products and convolutions on a GPU, in all systems",
    )
    parser.add_argument("--fastdp", metavar="PATH")
    parser.add_argument("--private-vision", metavar="PATH")
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"))
    options = parser.parse_args()
    options.checkouts = {}
    for library, modes in {
        "fastdp": ("MixOpt",),
        "private-vision": ("ghost", "mixed"),
    }.items():
        path = getattr(options, library.replace("-", "_"))
        if path:
            options.checkouts[library] = path
            options.systems += [f"{library}:{mode}" for mode in modes]

    record: dict[str, Any] = {"works": [], "poisson": [], "largest": []}
    if options.out.exists():
        record = json.loads(options.out.read_text())
    if record.setdefault("precision", options.precision) != options.precision:
        parser.error(f"{options.out} is in {record['precision']}: another --out")
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        record.update(_circumstances())
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, do, specs in (
            ("works", measure, options.work),
            ("poisson", poisson, options.poisson),
            ("largest", largest, options.largest),
        ):
            for spec in specs:
                if spec not in [
                    one.get("work", one.get("model")) for one in record[key]
                ]:
                    record[key].append(do(spec, folder, options) | _when())
                    keep()
        if not options.no_training and "training" not in record:
            record["training"] = training(folder, options) | _when()
            keep()
    say(f"written: {options.out}; the tables: python benchmarks/peers/tables.py")


def _circumstances() -> dict[str, Any]:
    from tanager.bench import machine

    return {"machine": machine.machine(), "versions": machine.versions(), **_when()}


def _when() -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": now.isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()
