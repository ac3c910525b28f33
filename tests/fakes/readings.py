"""What workers' metrics may say to the autotuner, and the specs that it reads them by. Used by tests/operator."""

from elasticmoe.operator.autotuner import Signals
from tests.fakes.kube_objects import make_spec, offload

CALM = Signals(0.0, 0.0, 100.0, 0.0, 0.0, {})
SPEC = make_spec(memory=offload(limit=16))
SLO = make_spec(memory=offload(limit=16), slo={"tpotMilliseconds": 50})
SLOW = {0.05: 80.0, 0.1: 100.0}
"""Times per token, of which a fifth break the SLO."""
FAST = {0.05: 95.0, 0.1: 100.0}
