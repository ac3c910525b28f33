"""The children of each example as golden files: `python -m tests.operator.write_golden` writes them anew."""

from pathlib import Path
from typing import Any

import yaml

from elasticmoe.operator.builders.pod import DefaultImages
from elasticmoe.operator.desired import build_desired
from elasticmoe.operator.observed import Identity
from elasticmoe.operator.spec.model import Image
from elasticmoe.operator.spec.parse import parse_spec

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
GOLDEN = Path(__file__).resolve().parent / "golden"
IMAGES = DefaultImages(
    Image(repository="elasticmoe-runtime", tag="0.1.0"), Image(repository="elasticmoe-coordinator", tag="0.1.0")
)


def build_example(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the children of an example, as if it had been applied to the namespace default."""
    resource = yaml.safe_load(path.read_text(encoding="utf-8"))
    identity = Identity(resource["metadata"]["name"], "default", "00000000-0000-0000-0000-000000000001")
    return build_desired(identity, parse_spec(resource["spec"]), IMAGES)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 -- yaml's signature
        return True


def dump(manifests: tuple[dict[str, Any], ...]) -> str:
    """Return manifests as one YAML file."""
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=False, width=120)


if __name__ == "__main__":
    for example in EXAMPLES:
        (GOLDEN / example.name).write_text(dump(build_example(example)), encoding="utf-8")
