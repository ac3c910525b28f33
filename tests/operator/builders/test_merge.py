"""A user's pod template on top of ours."""

from elasticmoe.operator.builders.merge import merge


def test_objects_are_merged_and_all_else_replaced() -> None:
    """Neither side is changed."""
    ours, theirs = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}
    assert merge(ours, theirs) == {"a": {"b": 1, "c": 3}, "d": [2]}
    assert ours == {"a": {"b": 1, "c": 2}, "d": [1]}


def test_named_things_are_merged_by_name() -> None:
    """In our order; new ones after them."""
    ours = {"env": [{"name": "a", "value": "1"}, {"name": "b", "value": "2"}]}
    theirs = {"env": [{"name": "c"}, {"name": "a", "value": "3"}]}
    assert merge(ours, theirs)["env"] == [{"name": "a", "value": "3"}, {"name": "b", "value": "2"}, {"name": "c"}]


def test_mounts_are_merged_by_path_and_nameless_things_added() -> None:
    """What can't be merged is the API server's to judge."""
    ours = {"volumeMounts": [{"mountPath": "/a", "name": "x"}]}
    theirs = {"volumeMounts": [{"name": "y"}, {"mountPath": "/a", "name": "z"}]}
    assert merge(ours, theirs)["volumeMounts"] == [{"mountPath": "/a", "name": "z"}, {"name": "y"}]


def test_a_list_in_place_of_an_object_replaces_it() -> None:
    """And the other way round."""
    assert merge({"env": {"a": 1}}, {"env": []}) == {"env": []}
    assert merge({"env": [{"name": "a"}]}, {"env": {}}) == {"env": {}}
