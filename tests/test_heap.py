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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_used_again_is_not_mapped_again():
    # 200 MB are 48 829 pages of 4 KiB, or 96 of 2 MiB.
    assert faults("give back") >= 3 * 95
    assert faults("keep") < 95
