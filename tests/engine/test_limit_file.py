"""The limit's file as Kubernetes' downward API writes it: a link whose target is swapped at once."""

from pathlib import Path

from elasticmoe.runtime.engine.limit_file import LimitFile


def _publish(folder: Path, version: str, content: str) -> None:
    """Write a new version beside the old one, then swap the `..data` link over to it."""
    (folder / version).mkdir()
    (folder / version / "limit").write_text(content, encoding="utf-8")
    link = folder / "..new"
    link.symlink_to(version)
    link.replace(folder / "..data")


def test_a_swapped_link_is_a_new_limit(tmp_path: Path) -> None:
    """Each version is told once, also though the file's own path stays the same link."""
    path = tmp_path / "limit"
    path.symlink_to("..data/limit")
    watched = LimitFile(path, num_experts=32, on_change=lambda _: None)
    assert watched.poll() is None
    _publish(tmp_path, "..v1", "7")
    assert watched.poll() == 7
    assert watched.poll() is None
    _publish(tmp_path, "..v2", "3\n")
    assert watched.poll() == 3
