import gc
import hashlib
import os
from collections import defaultdict
from pathlib import Path

from switch import (
    FULL,
    ON_CPU,
    XLA_FLAGS,
    check_shapes,
    forget_contexts,
    share_contexts,
    take_own_cores,
)


os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests, and processes that tests start, compile the same small programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).parent.parent / ".pytest_cache/xla"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# To note where each operation was written takes a quarter of the time of a test.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Never the user's own remembered timings.
os.environ["TANAGER_CACHE_DIR"] = str(
    Path(__file__).parent.parent / ".pytest_cache/timings"
)

import jax
import jaxtyping
import pytest
from PIL import Image


take_own_cores()
check_shapes()
share_contexts()

# Tracing makes many objects that live on; to look through all of them as often as
# Python does by default takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if not ON_CPU:  # where products of float32 are rounded, sums are of other losses
    jax.config.update("jax_default_matmul_precision", "highest")
MEASURE = "tanager.clipping.planning.autotune.Timings.measure"
# The folders with the tests of what has shapes in its annotations: to check them takes
# a tenth of the time. Of clipping, test_clipped_grad runs as in `make test-full`.
SHAPED = {"data", "models", "rules"}
# Here nobody looks at pictures, or at how wide the intervals of a run are; and
# there, at the ε of persons with several images.
NOT_LOOKED_AT = {"audit", "commands", "privacy", "recipes", "search", "training", "use"}
NOT_LOOKED_AT |= {"test_adaptive", "test_examples", "test_pages"}
NO_PERSONS = {"audit", "commands", "recipes", "search", "use"}
NO_PERSONS |= {"test_examples", "test_pages"}


def thinned(items):
    """Return the tests that are not just one more case of what others test.

    Where five strategies meet several cases, each case is run by two of them (three,
    of two cases), and every strategy runs some case.
    """
    grids = defaultdict(lambda: ({}, {}))
    places = {}
    for item in items:
        case = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if "strategy" in case and len(case) > 1:
            strategies, cases = grids[item.function]
            row = strategies.setdefault(case.pop("strategy"), len(strategies))
            places[item] = row, cases.setdefault(repr(case), len(cases))

    def kept(item):
        if item.get_closest_marker("full") is not None:
            return False
        if item not in places:
            return True
        strategies, cases = grids[item.function]
        if len(strategies) != 5 or len(cases) == 1:
            return True
        turns = {0, 2, 3} if len(cases) == 2 else {0, 2}
        return sum(places[item]) % 5 in turns

    return [item for item in items if kept(item)]


def pytest_collection_modifyitems(config, items):
    """Begin with the files that take long, so that no worker is left alone with one."""
    named = any("::" in argument for argument in config.args)
    if not FULL and not named:
        most = thinned(items)
        config.hook.pytest_deselected(items=list({*items} - {*most}))
        items[:] = most
    if not ON_CPU:
        for item in items:
            if item.get_closest_marker("cpu") is not None:
                item.add_marker(pytest.mark.skip(reason="not on an accelerator"))
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Forget the programs of a file that has ended: they would take 7 GB in all."""
    if nextitem is not None and nextitem.path != item.path:
        jax.clear_caches()
        forget_contexts()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk():
    """A process that is killed loses nothing it wrote; no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        if not FULL:
            patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _memory_is_not_given_back():
    """After a command, each run would look through all objects of all tests for it."""
    with pytest.MonkeyPatch.context() as patch:
        if not FULL:
            patch.setattr("tanager.training.loop.give_back", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _accounts_are_not_the_users(tmp_path_factory):
    os.environ["TANAGER_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _every_test_has_its_own_accounts(request, monkeypatch):
    digest = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    folder = Path(os.environ["TANAGER_STATE_DIR"]) / digest
    monkeypatch.setenv("TANAGER_STATE_DIR", str(folder))


@pytest.fixture(autouse=True)
def _methods_are_chosen_by_cost(request, monkeypatch):
    """Measuring every group again takes half of the time of a short run."""
    if not FULL and "measures" not in request.keywords:
        monkeypatch.setattr(MEASURE, lambda *arguments, **options: False)


@pytest.fixture(scope="module", autouse=True)
def _one_device_by_default(request):
    """What runs on two, or may be split over them, is traced and compiled twice."""
    from tanager.parallel.layout import Layout

    def layout(runtime):
        return Layout(runtime.devices or 1, runtime.shard_parameters)

    with pytest.MonkeyPatch.context() as patch:
        if not FULL and request.path.parent.name != "parallel":
            patch.setattr("tanager.training.problem.Runtime.layout", layout)
            split = "tanager.clipping.analysis.batches.may_be_split"
            patch.setattr(split, lambda leaves: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def _shapes_are_checked_where_they_are_at_issue(request):
    shaped = FULL or SHAPED & {*request.path.parent.parts}
    jaxtyping.config.update("jaxtyping_disable", not shaped)


def _leave_undrawn(figure, file, **options):
    if "format" in options:  # into memory
        file.write("<svg/>")
    elif Path(file).suffix == ".svg":
        Path(file).write_text("<svg/>")
    else:
        Image.new("L", (1, 1)).save(file)


@pytest.fixture(scope="module", autouse=True)
def _what_nobody_looks_at_is_left_out(request):
    with pytest.MonkeyPatch.context() as patch:
        here = set() if FULL else {request.path.parent.name, request.path.stem}
        if here & NOT_LOOKED_AT:
            if "commands" not in here:  # which look whether there are any
                patch.setattr("matplotlib.figure.Figure.savefig", _leave_undrawn)
            patch.setattr("tanager.report.run_figures.curves", lambda *_: "")
            patch.setattr("tanager.measures.RESAMPLES", 10)
        if here & NO_PERSONS:
            patch.setattr("tanager.training.result.PERSON_SIZES", (2,))
        yield


@pytest.fixture
def stops_when_charged(monkeypatch):
    """Runs are charged and then stop: little of them is compiled."""
    from tanager.training import beginning, charging, loop
    from tanager.training.estimate import Estimate

    charge = charging.charge

    def charge_and_stop(*given):
        charge(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(charging, "charge", charge_and_stop)
    monkeypatch.setattr(beginning, "try_out", lambda *_: None)
    monkeypatch.setattr(loop, "_estimate", lambda *_: Estimate(1, 1.0, 0, 0.0, 10**9))


@pytest.fixture
def no_audit_pictures(monkeypatch):
    if not FULL:
        monkeypatch.setattr("tanager.report.audit_page._figures", lambda *_: [])
