"""What is freed is given back to the system."""

import subprocess
import sys

import pytest

SCRIPT = """
from apportion.lm.memory import release

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

blocks = [b"x" * 100_000 for _ in range(2_000)]  # below the size that gets pages of its own
del blocks[::2], blocks[:-1]                       # the last one keeps the heap's end in place
before = resident()
release()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_given_back():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert float(out.stdout) > 100, "of the 190 MiB that were freed"
