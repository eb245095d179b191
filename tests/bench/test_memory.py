import re

import jax
import pytest

from tanager.bench import memory
from tanager.bench.workload import Workload


WORKLOAD = Workload("linear", (6,), classes=3)


@pytest.mark.parametrize("ceiling", [1, 3, 8, 40])
@pytest.mark.parametrize("start", [1, 2, 9, 30, 1000])
def test_the_boundary_is_found_exactly(ceiling, start):
    for boundary in range(45):
        asked = []

        def fits(rows, boundary=boundary, asked=asked):
            asked.append(rows)
            return rows <= boundary

        answer = min(boundary, ceiling)
        assert memory.largest(fits, ceiling, start) == answer
        assert len(set(asked)) == len(asked)
        assert min(asked) >= 1
        assert max(asked) <= ceiling
        if start == 1:
            assert len(asked) <= 2 * max(boundary, 1).bit_length() + 1
        if min(start, ceiling) == answer:
            assert len(asked) == (1 if answer == ceiling else 2)


@pytest.fixture
def bench(monkeypatch):
    """Search with batches that fit as `fits(name, rows)` says."""

    def run(fits, names=("sgd", "per_example"), **options):
        monkeypatch.setattr(memory, "_trial", lambda *words: fits)
        return memory.bench_memory(WORKLOAD, names, **options)

    return run


def test_the_largest_batch_of_each_strategy_and_its_share_of_sgds(bench, monkeypatch):
    boundaries = {"sgd": 300, "per_example": 75}
    rows, stopped = bench(lambda name, rows: rows <= boundaries[name])
    assert not stopped
    assert [row["physical_batch"] for row in rows] == [300, 75]
    assert [row["ratio_to_sgd"] for row in rows] == [1.0, 0.25]
    assert not any(row["at_ceiling"] or row["error"] for row in rows)
    rows, _ = bench(lambda name, rows: False)
    assert (rows[0]["physical_batch"], rows[0]["error"]) == (0, None)
    monkeypatch.setattr(memory, "CEILING", 64)
    rows, _ = bench(lambda name, rows: True)
    assert (rows[0]["physical_batch"], rows[0]["at_ceiling"]) == (64, True)


def test_failing_and_stopping_keep_the_other_rows(bench):
    def fits(name, rows):
        if name == "sgd":
            raise RuntimeError("no such tap")
        return rows <= 3

    rows, _ = bench(fits)
    assert rows[0]["error"] == "RuntimeError: no such tap"
    assert (rows[1]["physical_batch"], rows[1]["ratio_to_sgd"]) == (3, None)

    def stop(text):
        if text.startswith("per_example"):
            raise KeyboardInterrupt

    rows, stopped = bench(lambda name, rows: rows <= 5, report=stop)
    assert stopped
    assert rows[0]["physical_batch"] == 5
    assert rows[1]["error"] == "stopped before it was found"


def test_on_a_cpu_xlas_analysis_decides():
    limit = 20_000
    rows, _ = memory.bench_memory(WORKLOAD, ["sgd"], limit_bytes=limit)
    found = rows[0]["physical_batch"]
    assert memory.bytes_needed(WORKLOAD, "sgd", found) <= limit
    assert memory.bytes_needed(WORKLOAD, "sgd", found + 1) > limit


def test_where_rows_take_alike_few_programs_are_compiled(monkeypatch):
    compiled = []

    def needed(workload, name, rows):
        compiled.append(rows)
        return 500 + 40 * rows

    monkeypatch.setattr(memory, "bytes_needed", needed)
    rows, _ = memory.bench_memory(WORKLOAD, ["bk"], limit_bytes=100_000)
    assert rows[0]["physical_batch"] == (100_000 - 500) // 40
    assert len(compiled) == 4
    rows, _ = memory.bench_memory(WORKLOAD, ["bk"], limit_bytes=539)
    assert rows[0]["physical_batch"] == 0


def test_on_an_accelerator_batches_are_tried(monkeypatch):
    tried = []

    def run_once(workload, name, rows):
        tried.append(rows)
        if rows > 11:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        if name == "sgd" and rows > 2:
            raise jax.errors.JaxRuntimeError("INTERNAL: launch failed")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(memory, "_run_once", run_once)
    monkeypatch.setattr(memory, "bytes_needed", lambda *words: 1000 * words[-1])
    # The tests' programs stay compiled; and to look through all objects takes seconds.
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(memory.gc, "collect", lambda: None)
    rows, _ = memory.bench_memory(WORKLOAD, ["sgd", "per_example"])
    assert rows[0]["error"] == "JaxRuntimeError: INTERNAL: launch failed"
    assert rows[1]["physical_batch"] == 11
    tried.clear()
    rows, _ = memory.bench_memory(WORKLOAD, ["per_example"], limit_bytes=7000)
    assert rows[0]["physical_batch"] == 7
    assert max(tried) == 7


def test_one_batch_can_be_run_here():
    memory._run_once(WORKLOAD, "per_example", 3)


@pytest.mark.parametrize(
    ("error", "out_of_memory"),
    [
        (MemoryError(), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while allocating"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR: out of memory"), True),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shape"), False),
    ],
)
def test_running_out_of_memory_is_told_from_failing(error, out_of_memory):
    assert memory.is_out_of_memory(error) == out_of_memory


def test_what_cannot_be_searched_is_refused():
    message = "--limit-gib (=None) must be given on a CPU: for example 8"
    with pytest.raises(ValueError, match=re.escape(message)):
        memory.bench_memory(WORKLOAD, ["sgd"])
    with pytest.raises(ValueError, match="limit_bytes"):
        memory.bench_memory(WORKLOAD, ["sgd"], limit_bytes=0)
    with pytest.raises(ValueError, match="did you mean sgd"):
        memory.bench_memory(WORKLOAD, ["sdg"], limit_bytes=1000)
