"""A dry run leaves no fake tensor in the caches of other libraries."""

import pytest

import memlab

functional = pytest.importorskip("bitsandbytes.functional")


def test_a_librarys_cache_is_empty_in_a_dry_run_and_restored_after_it(monkeypatch):
    cached = {"dynamic": "from outside"}
    monkeypatch.setattr(functional, "name2qmap", cached)
    with memlab.dry_run():
        assert functional.name2qmap == {}
        functional.name2qmap["dynamic"] = functional.name2qmap["other"] = "fake"
    assert functional.name2qmap is cached
    assert cached == {"dynamic": "from outside"}
