"""Compiled programs of these tests are made in a hurry and kept in a folder of their own, for their processes too."""

import os

import jax
import pytest

from apportion.control import cache


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("xla")
    os.environ["APPORTION_CACHE"] = str(path)
    cache.enable()
    return path


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """Most of the time of these tests is XLA's: half of it goes without its optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
