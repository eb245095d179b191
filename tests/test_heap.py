import os
import platform
import subprocess
import sys

import pytest

from forks import Fork


pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="a setting of glibc"
)


@pytest.fixture
def run(tmp_path):
    """Run a program in which JAX is imported, but has not started."""

    def start(program, *words, flags=""):
        (tmp_path / "program.py").write_text(program)
        surroundings = os.environ | {"XLA_FLAGS": flags}
        fork = Fork(tmp_path / "program.py", words, environment=surroundings)
        fork.wait()
        assert fork.code == 0, fork.errors
        return numbers(fork.out)

    return start


def numbers(printed):
    return sorted(map(int, printed.split()))


FAULTS = """
import resource
import sys
import numpy as np
from tanager._heap import keep_freed_memory

def touch():
    np.ones(25_000_000)

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(3):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
LEFT = """
import os
from types import SimpleNamespace
import numpy as np
import tanager
from tanager._heap import keep_freed_memory

def run():
    one = SimpleNamespace(data=np.ones(25_000_000))
    one.itself = one

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

assert keep_freed_memory()
run()
above = bytearray(100_000)
before = resident()
try:
    tanager.train(None, None)
except ValueError:
    print(before - resident())
"""
PROGRAM = """
import resource
from tanager._heap import keep_freed_memory, run_in_place
KEEP
import jax
import jax.numpy as jnp
from jax import lax
run_in_place()

x, y = jnp.ones((550_000, 16)), jnp.ones((16, 32))
work = jax.jit(lambda x: jnp.sum(jnp.sin(lax.optimization_barrier(x @ y))))
for _ in range(3):
    work(x).block_until_ready()
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints how many pages each of twelve calls maps."""
KEPT = """
import threading
import tanager
import jax
from jax._src.xla_bridge import _CPU_ENABLE_ASYNC_DISPATCH

def aside():
    return _CPU_ENABLE_ASYNC_DISPATCH.value

def message():
    try:
        tanager.keep_memory()
    except RuntimeError as error:
        said.append(str(error))

said = []
thread = threading.Thread(target=message)
thread.start()
thread.join()
assert "main thread" in said[0]
assert aside()  # importing tanager set nothing, nor did the call
assert tanager.keep_memory()
assert not aside()
jax.numpy.ones(3)
message()
assert "right after `import tanager`" in said[1]
"""


def test_programs_of_jax_find_their_memory_again(run):
    # Temporary memory of 67 MiB, more than glibc keeps for other threads; a page is
    # 4 KiB or 2 MiB. A call maps it all or not, but on a busy machine the heap grows
    # once more now and then, over several calls: so most of twelve calls count.
    mapped = run(PROGRAM.replace("KEEP", ""))[0]
    assert mapped >= 33
    few = max(11, mapped / 100)  # what other memory takes, in JAX 0.12
    keep = PROGRAM.replace("KEEP", "keep_freed_memory()")
    assert run(keep)[6] < few
    # One call does the same in your own program.
    assert run(PROGRAM.replace("KEEP", KEPT))[6] < few
    # Devices of one CPU would wait for each other: they are left as they are.
    assert run(keep, flags="--xla_force_host_platform_device_count=2")[0] >= mapped / 2
    early = subprocess.run(
        [sys.executable, "-c", keep],
        env=os.environ | {"XLA_FLAGS": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert numbers(early.stdout)[6] < few


def test_memory_used_again_is_not_mapped_again(run):
    # 200 MB are 48 829 pages of 4 KiB, or 96 of 2 MiB.
    assert run(FAULTS, "give back")[0] >= 3 * 95
    assert run(FAULTS, "keep")[0] < 95


def test_what_a_run_leaves_is_given_back_before_the_next(run):
    assert run(LEFT)[0] > 190_000_000
