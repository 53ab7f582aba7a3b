import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads; a pool of threads does not survive a fork

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def profiles_of_these_tests_only(tmp_path_factory):
    """Neither reads nor fills the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield
