"""Where a container finds the model."""

from elasticmoe.operator.builders.pod import find_model


def test_a_path_is_a_folder_of_the_node() -> None:
    """It must be there: a mistyped one must not be served as an empty model."""
    source = find_model("path:///srv/tiny")
    assert source.volume == {"name": "model", "hostPath": {"path": "/srv/tiny", "type": "Directory"}}
    assert source.mount == {"name": "model", "mountPath": "/models/checkpoint", "readOnly": True}


def test_a_claim_may_hold_several_models() -> None:
    """The rest of the URI is the folder in it."""
    source = find_model("pvc://models/qwen/3")
    assert source.volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert source.mount["subPath"] == "qwen/3"
    assert "subPath" not in find_model("pvc://models").mount
