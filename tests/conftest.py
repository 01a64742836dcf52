"""Random data is the same in every run, whatever order the workers take the tests in; another seed gives other data.

``FU_TEST_SEED=7 make test`` draws all of it anew. With the default a failure can be had again by running that test.
"""

import os
import zlib

import pytest
import torch
from hypothesis import settings

SEED = int(os.environ.get("FU_TEST_SEED", "0"))

settings.register_profile("fixed", derandomize=True)
if SEED == 0:
    settings.load_profile("fixed")


def pytest_configure(config):
    if SEED and config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    torch.manual_seed(zlib.crc32(f"{SEED} {item.nodeid}".encode()))
