import os
import platform
import subprocess
import sys

import pytest


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


def faults(word):
    command = [sys.executable, "-c", FAULTS, word]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(found.stdout)


PROGRAM = """
import resource
from tanager._heap import keep_freed_memory, run_in_place
KEEP
import jax
import jax.numpy as jnp
run_in_place()

x = jnp.ones((2048, 4096))
work = jax.jit(lambda x: jnp.sum(jnp.cumsum(jnp.cumsum(x, 0), 1)[::2]))
for _ in range(3):
    work(x).block_until_ready()
for _ in range(7):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_jax(keep, flags):
    """Return how many pages each of seven calls maps, the fewest first."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("KEEP", keep)],
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted(map(int, done.stdout.split()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_programs_of_jax_find_their_memory_again():
    # Temporary memory of 66 MiB, more than glibc keeps for other threads; a page is
    # 4 KiB or 2 MiB. A call maps them all or none, but on a busy machine the heap grows
    # once more now and then (in 3 of 50 processes): so the median call counts.
    keep, two = "keep_freed_memory()", "--xla_force_host_platform_device_count=2"
    assert faults_of_jax("", "")[0] >= 33
    assert faults_of_jax(keep, "")[3] < 11
    # Devices of one CPU would wait for each other: they are left as they are.
    assert faults_of_jax(keep, two)[0] >= 33
    late = "import jax; keep_freed_memory()"
    assert faults_of_jax(late, "")[3] < 11


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_program_keeps_memory_by_one_call():
    assert faults_of_jax("import tanager; tanager.keep_memory()", "")[3] < 11
    alone = os.environ | {"XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", KEPT], check=True, env=alone)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_used_again_is_not_mapped_again():
    # 200 MB are 48 829 pages of 4 KiB, or 96 of 2 MiB.
    assert faults("give back") >= 3 * 95
    assert faults("keep") < 95
