"""Two processors with other instructions are told apart, wherever the system says."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tanager import _processor


INTEL = """\
processor\t: 0
model name\t: Some Xeon @ 2.50GHz
flags\t\t: fpu sse2 avx2 avx512f constant_tsc amx_tile

processor\t: 1
model name\t: Another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd sve i8mm crc32\n"


@pytest.fixture
def told(monkeypatch):
    def tell(text):
        def read(self):
            if text is None:
                raise FileNotFoundError(self)
            return text

        _processor._line.cache_clear()
        monkeypatch.setattr(Path, "read_text", read)

    yield tell
    _processor._line.cache_clear()


def test_a_processor_has_a_name_and_vector_instructions(told):
    told(INTEL)
    assert _processor.name() == "Some Xeon @ 2.50GHz"
    assert _processor.instructions() == ("amx_tile", "avx2", "avx512f", "sse2")


def test_an_arm_processor_tells_its_features(told):
    told(ARM)
    assert _processor.instructions() == ("asimd", "i8mm", "sve")
    assert _processor.name()


def test_a_system_that_says_nothing_is_no_error(told):
    told(None)
    assert _processor.instructions() == ()
    assert _processor.name()


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert _processor.cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert _processor.cores() == 64


def test_a_container_has_no_more_memory_than_its_limit(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(_processor, "_CONTAINER", limit)
    whole = _processor.memory()
    assert whole > 2**28
    for text, memory in (("max\n", whole), (f"{2**80}\n", whole), ("4096\n", 4096)):
        limit.write_text(text)
        assert _processor.memory() == memory


def test_time_that_threads_waited_is_a_share_of_what_they_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(_processor, "_THREADS", tmp_path)

    def tell(*threads):
        for number, text in enumerate(threads):
            (tmp_path / str(number)).mkdir(exist_ok=True)
            (tmp_path / str(number) / "schedstat").write_text(text)

    tell("100 50 3\n", "0 0 0\n")
    before = _processor.times()
    assert before == (100, 50)
    tell("180 60 3\n", "20 15 1\n")
    assert _processor.share_waited(before) == 0.25
    tell("not numbers")
    assert _processor.times() is None
    assert _processor.share_waited(before) == _processor.share_waited(None) == 0


def test_a_process_beside_others_waits():
    if _processor.times() is None:
        pytest.skip("this system does not tell how long threads wait")
    burn = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: 0"
    others = [
        subprocess.Popen([sys.executable, "-c", burn])
        for _ in range(2 * _processor.cores())
    ]
    try:
        before, end = _processor.times(), time.monotonic() + 1
        while time.monotonic() < end:
            pass
        assert _processor.share_waited(before) > 0.25
    finally:
        for other in others:
            other.kill()
            other.wait()
