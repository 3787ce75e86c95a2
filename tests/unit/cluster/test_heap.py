"""Freed memory that stays in the process, in a child: the setting cannot be taken back."""

import os
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from hvdtrain.cluster.machine import memory
def settle():
    return memory.map_large(settles=True) and memory.end_mapping()

does = {"keep": memory.keep_freed, "map": memory.map_large, "settle": settle}
print(does.get(sys.argv[1], lambda: None)())

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    for made in [np.ones(1 << 19) for _ in range(8)]:
        made += 1

step(); step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
held = open("/proc/self/statm").read().split()[1]
memory.give_back()
print(int(held) - int(open("/proc/self/statm").read().split()[1]))
"""


def ran(word, **env):
    done = subprocess.run([sys.executable, "-c", CODE, word], capture_output=True, text=True, timeout=60, check=True,
                          env={**os.environ, **env})
    took, faults, pages = done.stdout.split()
    return took, int(faults), int(pages)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or not hasattr(os, "confstr")
                    or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="the C library is not glibc")
def test_steps_that_free_what_they_made_find_it_again():
    took, faults, pages = ran("keep")
    assert took == "True" and faults < 500 and pages > 4096, "it can be given back"
    assert ran("leave")[1] > 5 * (faults + 100), "32 MiB a step from the system"
    assert ran("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False", "the environment's own setting stays"
    assert ran("settle")[0] == "True" and ran("settle")[1] < 500, "smaller ones are kept once all has its place"
    assert ran("map")[0] == "True" and ran("map")[1] > 5 * (faults + 100), "large blocks go back at once"
