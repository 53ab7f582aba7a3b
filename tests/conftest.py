import pytest


@pytest.fixture(scope="session", autouse=True)
def profiles_of_these_tests_only(tmp_path_factory):
    """Neither reads nor fills the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield
