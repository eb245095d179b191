"""What a run is told apart by: settings, data, loss, and its environment."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import contents, examples, first_params, loss, run

from tanager import data
from tanager._files import write_json
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training import fingerprint
from tanager.training.problem import DPSGD, Problem
from tanager.training.run_folder import RunFolder


# Event loops that orbax leaves behind say so whenever they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def weighing(*classes, back=1.0):
    """A loss with a constant in a function of its own, and with its own derivative."""
    weights = np.asarray(classes, np.float32)

    @jax.jit
    def weight(label):
        return jnp.asarray(weights)[label]

    @jax.custom_vjp
    def same_value(x):
        return x

    same_value.defvjp(lambda x: (x, None), lambda _, dx: (back * dx,))
    return lambda p, e: same_value(loss(p, e) * weight(e["label"]))


CHANGES = {
    "noise": ({"mechanism": Mechanism(0.4, 1.3, 12)}, "mechanism.noise_multiplier was"),
    "style": ({"style": "automatic"}, "clip_gamma was None and is 0.01"),
    "learning rate": ({"optimizer": optax.sgd(2.5, momentum=0.5)}, "optimizer"),
    "another optimizer": (
        {"optimizer": optax.sgd(2.0)},
        "configuration: optimizer changed; initial state of the optimizer changed",
    ),
    "loss": ({"loss": lambda p, e: 2 * loss(p, e)}, "configuration: loss"),
    "constant within": ({"loss": weighing(1.0, 1.0, 5.0)}, "configuration: loss"),
    "derivative": ({"loss": weighing(1.0, 1.0, 1.0, back=5.0)}, "configuration: loss"),
    "data": ({"data": examples(seed=4)}, "configuration: data"),
    "start": (
        {"params": jax.tree.map(lambda leaf: leaf + 1, first_params())},
        "initial parameters",
    ),
    "described": ({"description": {"model": "other"}}, "model was None and is 'other'"),
}


def begin(out, **settings):
    """Begin a run that stops before its first step, in which all is compiled."""
    with pytest.raises(ValueError, match=r"evaluate .* must be an Evaluation"):
        run(out, evaluate=lambda params: 0.5, **settings)
    return out


@pytest.fixture(scope="module")
def weighed(tmp_path_factory):
    """The folder of a run of another loss."""
    out = tmp_path_factory.mktemp("weighed") / "run"
    return begin(out, loss=weighing(1.0, 1.0, 1.0))


@pytest.mark.parametrize("name", CHANGES)
def test_another_configuration_in_the_same_folder_is_refused(dead, weighed, name):
    changes, message = CHANGES[name]
    if name in ("constant within", "derivative"):
        dead = weighed
    before = contents(dead)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(dead, **changes)
    assert contents(dead) == before


def test_no_setting_of_problem_or_algorithm_may_change(tmp_path):
    folder, mechanism = RunFolder(tmp_path / "run"), Mechanism(0.4, 1.2, 12)
    algorithm = DPSGD(mechanism, optax.sgd(1.0), delta=1e-3)
    settings = (
        algorithm.as_json(60) | Problem(loss, first_params(), examples()).as_json()
    )
    settings.pop("unreadable")  # "skip" may take the place of "error"
    write_json(folder.config, settings)
    fingerprint.require_settings(folder, settings)
    changes = [(name, {name: "other"}) for name in settings]
    for name in settings["mechanism"]:
        other = settings["mechanism"] | {name: 3}
        changes.append((f"mechanism.{name}", {"mechanism": other}))
    for name, changed in changes:
        with pytest.raises(ValueError, match=f"configuration: {name} was "):
            fingerprint.require_settings(folder, settings | changed)


@pytest.mark.parametrize("rows", [1, 1025, 3000])
def test_any_byte_of_examples_in_memory_tells_them_apart(monkeypatch, rows):
    monkeypatch.setattr(fingerprint, "_BLOCK", 4096)
    first = data.ArraySource(examples(rows))
    part = np.arange(rows)[::-1]
    for row in {0, rows // 3, rows - 1}:
        for leaf in ("x", "label"):
            changed = {name: array.copy() for name, array in first.tree.items()}
            changed[leaf][row] += 1
            other = data.ArraySource(changed)
            assert fingerprint.sample(first) != fingerprint.sample(other)
            same_part = fingerprint.sample(data.subset(first, part))
            assert same_part != fingerprint.sample(data.subset(other, part))
    copied = data.ArraySource(jax.tree.map(np.array, first.tree))
    assert fingerprint.sample(copied) == fingerprint.sample(first)
    renamed = {"y": first.tree["x"], "label": first.tree["label"]}
    assert fingerprint.contents(renamed) != fingerprint.contents(first.tree)


def test_one_example_that_changed_among_thousands_is_refused(tmp_path):
    before = examples(3000)
    after = {name: array.copy() for name, array in before.items()}
    after["x"][1] *= -1000
    begin(tmp_path / "run", data=before, delta=1e-4)
    with pytest.raises(ValueError, match="configuration: data"):
        run(tmp_path / "run", data=after, delta=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_threefry_partitionable", False),
        ("jax_enable_x64", True),
        ("jax_default_matmul_precision", "tensorfloat32"),
        ("jax_disable_jit", True),
    ],
)
def test_settings_of_jax_are_part_of_the_environment(name, value):
    before, here = getattr(jax.config, name), fingerprint.environment(16, "")
    try:
        jax.config.update(name, value)
        there = fingerprint.environment(16, "")
    finally:
        jax.config.update(name, before)
    assert there != here
    assert json.loads(json.dumps(there)) == there
    assert fingerprint.environment(16, "") == here


@pytest.mark.parametrize(
    "name", ["NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_NEW", "TF_X"]
)
def test_variables_that_can_change_sums_are_part_of_the_environment(monkeypatch, name):
    here = fingerprint.environment(16, "")
    monkeypatch.setenv(name, "--xla_cpu_enable_fast_math=false")
    assert fingerprint.environment(16, "") != here


@pytest.mark.parametrize(
    "name",
    ["JAX_COMPILATION_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "JAX_TRANSFER_GUARD", "A"],
)
def test_variables_that_cannot_are_not(monkeypatch, name):
    here = fingerprint.environment(16, "")
    monkeypatch.setenv(name, "1")
    assert fingerprint.environment(16, "") == here


@pytest.mark.parametrize(
    ("flags", "deterministic"),
    [("", False), ("{0}=true", True), ("{0}=true {0}=false", False)],
)
def test_a_gpu_repeats_a_step_only_if_it_is_told_to(monkeypatch, flags, deterministic):
    gpu = SimpleNamespace(platform="gpu", device_kind="a GPU")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    monkeypatch.setenv("XLA_FLAGS", flags.format("--xla_gpu_deterministic_ops"))
    assert fingerprint.environment(16, "")["deterministic"] is deterministic


def test_an_unreadable_example_under_another_index_is_not_asked_for_again():
    class Wrong:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise data.UnreadableExample("broken", index + 9)

    with pytest.raises(data.UnreadableExample, match="broken"):
        fingerprint.sample(Wrong())


def test_a_run_that_another_version_began_names_it(tmp_path):
    folder, seed = RunFolder(tmp_path / "run"), Seed.from_int(3)
    config = {"sigma": 1.25, "unreadable": "error"}
    versions = {"versions": {"tanager": "0.2.0"}}
    fingerprint.check_fingerprint(folder, seed, config, {}, versions)
    with pytest.raises(ValueError, match=r"what began it, with tanager 0\.2\.0, or"):
        fingerprint.require_settings(folder, {"sigma": 1.3})
