"""Every room of the operator that decides is under the contract that forbids frameworks."""

from tests.test_layout import ROOT, list_rooms, read_contracts

EDGE_ROOMS = {"apply", "handlers", "loop", "reconcile", "scrape"}


def test_every_room_is_an_edge_or_pure() -> None:
    """A new room is put under the contract, or named here as an edge."""
    contract = read_contracts()["what decides in the operator imports no framework"]
    pure = {name.rsplit(".", 1)[1] for name in contract["source_modules"]}
    assert pure == list_rooms(ROOT / "operator" / "elasticmoe" / "operator") - EDGE_ROOMS
