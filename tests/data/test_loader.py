"""The stream of physical batches is the sampler's, from any place, by any worker."""

import itertools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_sources import Flaky

from tanager import Runtime
from tanager.data import ArraySource, UnreadableExample
from tanager.data.loader import ChunkPlan, an_example, portions
from tanager.data.unnamed import Unnamed
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed


N, STEPS, P = 50, 40, 4


def source():
    numbers = np.arange(N, dtype=np.int32)
    return ArraySource({"image": np.repeat(numbers[:, None], 3, 1), "label": numbers})


def sampler(rate=0.06):
    return PoissonSampler(Mechanism(rate, 1.0, STEPS), N, Seed.from_int(2))


def plan(data=None, rate=0.06, rows=None, begun=0, **changes):
    data = source() if data is None else data
    rows = np.arange(P) if rows is None else rows
    one = an_example(source())
    return ChunkPlan(data, one, sampler(rate), P, rows, begun, **changes)


def elements(made):
    """Everything of a plan, in order, by random access."""
    found = itertools.takewhile(
        lambda part: part.step >= 0, map(made.__getitem__, itertools.count())
    )
    return list(found)


def same(one, other):
    assert one[:3] == other[:3]
    jax.tree.map(np.testing.assert_array_equal, one.batch, other.batch)


def test_the_elements_are_the_sampler_s_batches():
    found = elements(plan())
    drawn = sampler()
    sizes = [len(drawn.indices(step)) for step in range(STEPS)]
    assert 0 in sizes
    assert max(sizes) > P
    for step, parts in itertools.groupby(found, lambda part: part.step):
        parts = list(parts)
        expected = list(drawn.batches(step, P))
        assert [part.chunk for part in parts] == list(range(max(1, len(expected))))
        assert {part.chunks for part in parts} == {len(expected)}
        indices = [part.batch.indices[part.batch.mask] for part in parts]
        np.testing.assert_array_equal(np.concatenate(indices), drawn.indices(step))
        for part in parts:
            values = np.where(part.batch.mask, part.batch.indices, 0)
            np.testing.assert_array_equal(part.batch.examples["label"], values)
            np.testing.assert_array_equal(
                part.batch.examples["image"], np.repeat(values[:, None], 3, 1)
            )
    assert {part.step for part in found} == set(range(STEPS))


def test_the_length_is_a_bound_that_no_draw_exceeds():
    assert len(plan()) == STEPS * 13 >= len(elements(plan()))
    everyone = plan(rate=1.0)
    assert len(elements(everyone)) == len(everyone)
    assert len(plan(begun=STEPS - 1)) == 13


def test_an_element_can_be_had_without_those_before_it():
    found = elements(plan())
    for index in (len(found) - 1, 3, 17, 0):
        same(plan()[index], found[index])
    backwards = plan()
    for index in reversed(range(len(found))):
        same(backwards[index], found[index])
    assert plan()[len(found)].step == -1
    assert plan()[10 * len(found)].step == -1


@pytest.mark.parametrize("begun", [1, 7, STEPS - 1])
def test_a_resumed_plan_goes_on_where_it_stopped(begun):
    rest = [part for part in elements(plan()) if part.step >= begun]
    again = elements(plan(begun=begun))
    assert len(rest) == len(again)
    for one, other in zip(rest, again, strict=True):
        same(one, other)


def test_hosts_read_disjoint_rows_that_make_up_the_whole():
    whole = elements(plan(rate=0.3))
    hosts = [
        elements(plan(rate=0.3, rows=rows)) for rows in (np.arange(2), np.arange(2, 4))
    ]
    assert len(hosts[0]) == len(hosts[1]) == len(whole)
    empty = 0
    for part, *shares in zip(whole, *hosts, strict=True):
        joined = np.concatenate([share.batch.indices for share in shares])
        np.testing.assert_array_equal(joined, part.batch.indices)
        joined = np.concatenate([share.batch.mask for share in shares])
        np.testing.assert_array_equal(joined, part.batch.mask)
        empty += part.batch.mask.any() and not shares[1].batch.mask.any()
    assert empty > 0


def test_padding_is_not_read():
    read = []

    class Noted:
        def __len__(self):
            return N

        def __getitem__(self, index):
            read.append(index)
            return source()[index]

    found = elements(plan(Noted()))
    drawn = np.concatenate([part.batch.indices[part.batch.mask] for part in found])
    np.testing.assert_array_equal(np.sort(read), np.sort(drawn))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_give_the_same_in_the_same_order(workers):
    expected = elements(plan(begun=3))
    stream = portions(plan(begun=3), workers)
    for part in expected:
        same(next(stream), part)
    stream.close()


def test_an_example_that_cannot_be_read_stops_the_run_with_its_name():
    with pytest.raises(UnreadableExample, match="example 7 of the test"):
        elements(plan(Flaky(source(), {7}), rate=0.5))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_whoever_reads_reaches_the_run(workers):
    stream = portions(plan(Flaky(source(), {7}), rate=0.5), workers)
    with pytest.raises(UnreadableExample, match="example 7 of the test"):
        list(itertools.islice(stream, 1000))


def test_a_skipped_example_is_padding_and_counted():
    bad = {7, 23}
    whole = elements(plan(rate=0.5))
    found = elements(plan(Flaky(source(), bad), rate=0.5, unreadable="skip"))
    skipped = 0
    for part, other in zip(whole, found, strict=True):
        assert part[:3] == other[:3]
        out = np.isin(part.batch.indices, list(bad)) & part.batch.mask
        np.testing.assert_array_equal(other.batch.mask, part.batch.mask & ~out)
        np.testing.assert_array_equal(other.batch.examples["label"][out], 0)
        kept = other.batch.mask
        np.testing.assert_array_equal(
            other.batch.examples["label"][kept], part.batch.indices[kept]
        )
        assert other.unreadable == out.sum()
        skipped += other.unreadable
    assert skipped > STEPS / 2


def test_the_first_example_that_can_be_read_gives_the_shapes():
    flaky = Flaky(source(), set(range(5)))
    assert an_example(flaky, "skip")["label"].tolist() == [5]
    with pytest.raises(UnreadableExample, match="example 0"):
        an_example(flaky)
    with pytest.raises(UnreadableExample, match="example 49"):
        an_example(Flaky(source(), set(range(N))), "skip")


READING = """
import os, sys, time
import numpy as np
from tanager.data import ArraySource
from tanager.data.loader import ChunkPlan, an_example, portions
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed

if __name__ == "__main__":
    source = ArraySource({"image": np.ones((500, 64, 64, 3), np.float32)})
    sampler = PoissonSampler(Mechanism(0.5, 1.0, 1000), 500, Seed.from_int(0))
    plan = ChunkPlan(source, an_example(source), sampler, 64, np.arange(64), 0)
    stream = portions(plan, 2)
    for _ in range(5):
        assert next(stream).batch.examples["image"].sum() > 0
    print("reading", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")
def test_killed_it_leaves_no_process_and_no_image_behind(tmp_path):
    (tmp_path / "reading.py").write_text(READING)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "reading.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"reading\n"
        family = [process.pid, *children(process.pid)]
        assert len(family) >= 3
        for member in family:
            assert "/dev/shm/psm_" not in Path(f"/proc/{member}/maps").read_text()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    end = time.monotonic() + 30
    while any(map(alive, family)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, family))
    assert [path.name for path in tmp_path.iterdir()] == ["reading.py"]


def children(process):
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def alive(process):
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_arrays_travel_in_memory_without_a_name():
    for size in (0, 10, 100_000):
        for array in (np.arange(size), np.arange(2 * size).reshape(2, -1).T):
            sent = pickle.loads(pickle.dumps(Unnamed(array))).open()
            np.testing.assert_array_equal(sent, array)
            assert sent.dtype == array.dtype


def test_workers_must_be_a_number():
    with pytest.raises(ValueError, match="workers"):
        Runtime(workers=-1)


@pytest.mark.parametrize("leaf", [np.zeros((1, 1)), np.zeros((1, 3), np.float64)])
def test_rows_of_another_shape_or_dtype_are_refused(leaf):
    """NumPy would repeat what is smaller."""

    class Own(ArraySource):
        def gather(self, indices):
            image = np.repeat(leaf, len(indices), 0)
            return {"image": image, "label": np.zeros(len(indices), np.int32)}

    with pytest.raises(ValueError, match=r"must be int32\(3,\) in every example"):
        next(iter(portions(plan(Own(source().tree), rate=0.5), 0)))
