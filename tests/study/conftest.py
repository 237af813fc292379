"""A study of four runs of a second each, run once where nothing disturbs it."""

import pytest
from small_study import FILE

from apportion.study.files import read
from apportion.study.runner import run


@pytest.fixture(scope="package")
def cache(tmp_path_factory):
    """Compiled programs of these tests are kept in a folder of their own, for their processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APPORTION_CACHE", str(tmp_path_factory.mktemp("xla")))
        yield


@pytest.fixture(scope="session")
def study_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "small.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="package")
def undisturbed(cache, tmp_path_factory):
    """The study's folder after it ran with two processes, one runner, no trouble."""
    out = tmp_path_factory.mktemp("undisturbed") / "study"
    run(read(FILE), out, workers=2, source=FILE, quiet=True)
    return out
