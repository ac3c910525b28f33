"""An expertOffload against the number of experts that workers told: what it asks for may be more than there is."""

from elasticmoe.operator.errors import SpecError
from elasticmoe.operator.spec.fields import resolve_limit
from elasticmoe.operator.spec.model import ExpertOffload

_FIELD = "spec.memory.expertOffload"


def bounds(offload: ExpertOffload, num_experts: int) -> tuple[int, int]:
    """Return the autotuner's least and greatest limit in a layer with so many experts; they may cross."""
    least, most = resolve_limit(offload.min, num_experts), resolve_limit(offload.max, num_experts)
    assert least is not None, "a known number of experts resolves every share"
    assert most is not None, "a known number of experts resolves every share"
    return least, min(most, num_experts)


def find_misfit(offload: ExpertOffload, num_experts: int) -> SpecError | None:
    """Return what a layer with so many experts can't have; a greatest limit above it binds nothing, so it may be."""
    for name, value in (("limit", offload.limit), ("min", offload.min)):
        if isinstance(value, int) and value > num_experts:
            problem = f"want at most {num_experts}, the experts of a layer, or a share such as 40%; it is {value}"
            return SpecError(f"{_FIELD}.{name}", problem)
    least, most = bounds(offload, num_experts)
    if least > most:
        problem = (
            f"min must not exceed max, they are {offload.min} and {offload.max}: "
            f"at least {least} and at most {most} of the {num_experts} experts of a layer"
        )
        return SpecError(_FIELD, problem)
    return None
