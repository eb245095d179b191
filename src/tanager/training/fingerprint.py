"""The fingerprint of a run: what may not change between start and resume.

A resumed step must be the same function of the same data and the same randomness, or
the guarantee of the ledger would be about another algorithm than the one that ran. So
readable settings are compared one by one, and what cannot be read (the loss, the
optimizer, the data, the first parameters) by fingerprints keyed with the run's secret.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from tanager import _processor
from tanager._files import write_json
from tanager._reading import reading
from tanager._record import Each, Maybe, check_record
from tanager._version import __version__
from tanager.clipping.analysis.batches import example_of
from tanager.data import ArraySource, Source, UnreadableExample, gather
from tanager.data.source import unfolded
from tanager.keys import is_key
from tanager.seed import Seed
from tanager.training.problem import Runtime
from tanager.training.run_folder import RunFolder
from tanager.training.step import Step


_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_SAMPLED_EXAMPLES = 1024
_BLOCK = 1 << 22  # bytes digested at once
_MAY_CHANGE = {field.name for field in dataclasses.fields(Runtime)} | {
    "account",
    "automatic",
    "began",
    "changes",
    "charge",
    "chosen_from",
    "clipping",
    "data",
    "evaluate_every",
    "features",
    "features_from",
    "hosts",
    "labels",
    "noisy_counts",
    "not_read",
    "out",
    "private",
    "stream",
    "test_views",
    "unreadable",
    "versions",
}

_OF_A_HOST = {"account", "began", "charge", "data", "features_from", "labels", "out"}
_OF_A_HOST |= {"workers"}


_PREFIXES = (
    *("XLA_", "JAX_", "PJRT_", "LIBTPU_", "TPU_", "TF_", "NPROC"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "EIGEN", "DNNL_", "ONEDNN_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "NVIDIA_", "ROCM_", "HIP_"),
)
# They name files, logs, peers, secrets, or which of several equal devices to use.
# scikit-learn sets two of KMP_ when it is imported; no number depends on them.
_HARMLESS_VARIABLE = re.compile(
    r"CACHE|LOG|TRACEBACK|TOKEN|SECRET|PASSWORD|_KEY$|_DIR$|_PATH$|_HOME$"
    r"|ADDRESS|_PORT$|_ID$|HOSTNAME|VISIBLE_DEVICES"
    r"|KMP_DUPLICATE_LIB_OK|KMP_INIT_AT_FORK|TRANSFER_GUARD"
)
_HARMLESS_SETTING = re.compile(
    r"cache|log|dump|trace|debug|report|warn|pprint|source|location|error"
    r"|address|timeout|distributed|preemption|recoverability|async|guard|leak"
    r"|visible_devices"
)

_RECORD = {
    "prints": Each(str),
    "environment": {"versions": Each(str)},
    "streams": Maybe([str]),
}


def versions() -> dict[str, str]:
    """Return the versions of the packages a run's numbers depend on."""
    names = ("jax", "jaxlib", "numpy", "optax", "equinox", "dp-accounting")
    others = {name: importlib.metadata.version(name) for name in names}
    return {"tanager": __version__, **others}


def environment(rows: int, clipping: str) -> dict[str, Any]:
    """Return what may change between start and resume, at the price of lost steps.

    The same steps computed in another environment can differ in the last bits; on a
    GPU even in the same one, unless XLA is made deterministic. The number of devices
    and hosts is not part of it: their sums are whole numbers. A device computes on
    `rows` at once, clipped by the methods of the fingerprint `clipping`.
    """
    device = jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    name = _DETERMINISTIC.partition("=")[0]
    last = [flag for flag in flags if flag.partition("=")[0] == name][-1:]
    return {
        "versions": versions(),
        "platform": device.platform,
        "device": device.device_kind,
        "cpus": _processor.cores(),
        "processor": [_processor.name(), *_processor.instructions()],
        # NPROC, for instance, sets how many threads XLA divides a sum among.
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not _HARMLESS_VARIABLE.search(name)
        },
        "jax": {
            name: str(getattr(jax.config, name, None))
            for name in sorted(jax.config.values)
            if not _HARMLESS_SETTING.search(name)
        },
        "deterministic": device.platform != "gpu" or last == [_DETERMINISTIC],
        "rows": rows,
        "clipping": clipping,
    }


def of_settings(config: Mapping[str, Any]) -> str:
    """Return a digest of all settings that must be the same on every host."""
    text = json.dumps(_without(_OF_A_HOST, config), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprints(seed: Seed, step: Step, source: Any, one: Any) -> dict[str, str]:
    """Return keyed fingerprints of all that has no readable form.

    The loss, the augmentation and the optimizer are compared by the computation that
    JAX traces of them; data by `sample`. `one` is an example on a leading axis of 1.
    """
    example = example_of(one)
    params = step.params
    gradient = jax.tree.map(jnp.zeros_like, params)
    optimizer_state = step.optimizer.init(params)
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
    view, augmentation = example, b"none"
    if step.unit.augment is not None:
        view = jax.eval_shape(step.unit.augment, key, example)
        augmentation = computation(step.unit.augment, key, example)
    groups = step.sampler.groups
    parts = {
        # Its gradient, which may have rules of its own.
        "loss": computation(jax.grad(step.example_loss), params, step.frozen, view),
        "optimizer": computation(
            step.optimizer.update, gradient, optimizer_state, params
        ),
        "augmentation": augmentation,
        "initial parameters": contents(params),
        "initial state of the optimizer": contents(optimizer_state),
        "fixed parameters": contents(step.fixed),
        "data": sample(source),
        "owners": b"" if groups is None else contents(groups.numbers),
    }
    return {name: seed.fingerprint(content) for name, content in parts.items()}


def check_fingerprint(
    folder: RunFolder,
    seed: Seed,
    config: Mapping[str, Any],
    prints: Mapping[str, str],
    surroundings: Mapping[str, Any],
) -> list[str]:
    """Record what this run is, or refuse another one than the run of this folder.

    It returns the streams that the run may have charged in its ledger: one for each
    environment that it trained in. The last one is for this environment.
    """
    file = folder.private / "fingerprint.json"
    streams: list[str] = []
    now = {"prints": dict(prints), "environment": dict(surroundings)}
    if folder.config.exists() and file.exists():
        before = _recorded(file, _RECORD)
        streams = before["streams"] or []
        begun_with = _recorded(folder.config, {"unreadable": Maybe(str)})
        changes = _differences(begun_with, config)
        # From "error" to "skip" the steps so far are the same: nothing was skipped.
        if begun_with.get("unreadable") == "skip" != config["unreadable"]:
            changes.append(f"unreadable was 'skip' and is {config['unreadable']!r}")
        # Another version of JAX may trace the same function otherwise.
        comparable = before["environment"]["versions"] == surroundings["versions"]
        changes += [
            f"{name} changed"
            for name, value in prints.items()
            if before["prints"].get(name) != value
            and (comparable or name not in ("loss", "optimizer", "augmentation"))
        ]
        _refuse_changes(folder, changes)
    text = json.dumps([_without(_MAY_CHANGE, config), now], sort_keys=True)
    stream = seed.fingerprint(text.encode())[:16]
    streams = [name for name in streams if name != stream] + [stream]
    write_json(folder.config, config)
    write_json(file, now | {"streams": streams}, mode=0o600)
    return streams


def require_settings(folder: RunFolder, known: Mapping[str, Any]) -> None:
    """Refuse a run that began with other settings than these, which may be some."""
    begun = _recorded(folder.config, {})
    _refuse_changes(folder, _differences({n: begun.get(n) for n in known}, known))


def _refuse_changes(folder: RunFolder, changes: Sequence[str]) -> None:
    if changes:
        file, begun = folder.private / "fingerprint.json", __version__
        if file.exists():
            found = _recorded(file, _RECORD)["environment"]["versions"]
            begun = found.get("tanager", begun)
        by = "" if begun == __version__ else f", with tanager {begun}"
        raise ValueError(
            f"out (={str(folder.path)!r}) holds a run of another configuration: "
            + "; ".join(changes)
            + f": repeat what began it{by}, or give another folder"
        )


def _recorded(file: Path, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of a run holds, to the letter, since it is compared."""
    remedy = "this run cannot be resumed; train into another folder"
    with reading(file, "is damaged", remedy):
        content = json.loads(file.read_bytes())
    check_record(file, content, shape, remedy)
    return content


def sample(source: Any) -> bytes:
    """Return what tells this source's examples from others'.

    That is its `identity`, if it has one; of arrays in memory a digest of every byte;
    or else the number of examples and a digest of 1024 of them.
    """
    own = getattr(source, "identity", None)
    if own is not None:
        return own()
    length = len(source)
    in_memory = isinstance(unfolded(source)[0], ArraySource)
    if in_memory and length > _SAMPLED_EXAMPLES:
        return str(length).encode() + _every_row(source)
    some = np.linspace(0, length - 1, min(length, _SAMPLED_EXAMPLES)).astype(np.int64)
    while len(some):
        try:
            return str(length).encode() + contents(gather(source, some))
        except UnreadableExample as error:
            if error.index not in some:  # it would be asked for again, without end
                raise
            some = some[some != error.index]
    return str(length).encode()


def _every_row(source: Source) -> bytes:
    """Return a digest of all examples of arrays, in blocks by all cores."""
    row = sum(leaf.nbytes for leaf in jax.tree.leaves(source[0]))
    size = max(1, _BLOCK // max(1, row))

    def block(start: int) -> bytes:
        rows = np.arange(start, min(start + size, len(source)))
        return contents(gather(source, rows))

    with ThreadPoolExecutor(_processor.cores()) as threads:
        blocks = threads.map(block, range(0, len(source), size))
        return hashlib.blake2b(b"".join(blocks)).digest()


def computation(function: Callable, *arguments: Any) -> bytes:
    """Return the text of what JAX traces of a function, and a digest of constants.

    Those of the calls within it too, which the text does not show.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    return text.encode() + contents(_constants(closed))


def _constants(closed: Any) -> list[Any]:
    found = list(getattr(closed, "consts", ()))
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                found += _constants(value)
    return found


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def contents(tree: PyTree) -> bytes:
    """Return a digest of a pytree's arrays and numbers and where they stand in it."""
    digest = hashlib.blake2b()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
            array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
            digest.update(jax.tree_util.keystr(path).encode())
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _without(names: Collection[str], config: Any) -> Any:
    if isinstance(config, Mapping):
        kept = (name for name in config if name not in names)
        return {name: _without(names, config[name]) for name in kept}
    return list(config) if isinstance(config, tuple) else config


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    before, now = _without(_MAY_CHANGE, before), _without(_MAY_CHANGE, now)
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*before, *now})
            for line in _differences(before.get(key), now.get(key), f"{name}.{key}")
        ]
    if before == now:
        return []
    return [f"{name.lstrip('.')} was {before!r} and is {now!r}"]
