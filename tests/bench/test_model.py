"""The tiny model's cache: one folder per version of its maker."""

from pathlib import Path

from bench.serving.model import cache_folder, hash_files


def test_the_cache_folder_can_be_chosen() -> None:
    """ELASTICMOE_CACHE wins over the user's cache."""
    assert cache_folder({"ELASTICMOE_CACHE": "/somewhere"}) == Path("/somewhere")
    assert cache_folder({}) == Path.home() / ".cache" / "elasticmoe"


def test_the_hash_follows_names_and_contents(tmp_path: Path) -> None:
    """A changed maker makes a new model; the order of the files does not matter."""
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("b")
    before = hash_files([one, two])
    assert hash_files([two, one]) == before
    one.write_text("c")
    assert hash_files([one, two]) != before
