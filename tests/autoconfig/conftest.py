"""A folder in which recipes are copied."""

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch, cache):
    """A folder to work in, in which paths begin."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
