"""The spec of an ElasticMoEDeployment: one frozen pydantic model, the only source of the CRD's schema.

Fields are camelCase in the resource. What one field alone can't say is a CEL rule for the API server beside the same
check here: an object that was stored before a rule came is still judged.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from elasticmoe.operator.spec.fields import AnyObject, Duration, Limit, Quantity, resolve_limit
from elasticmoe.operator.spec.quantity import QUANTITY_END, parse_quantity
from elasticmoe.runtime.contract.config import PolicyName


def rule(cel: str, message: str, *fields: str) -> dict[str, Any]:
    """Return what puts a CEL rule and its message into the schema of an object.

    The API server judges an object's default, {}, before the defaults of its fields are there: so each is asked for.
    """
    unless = "".join(f"!has(self.{name}) || " for name in fields)
    return {"x-kubernetes-validations": [{"rule": unless + cel, "message": message}]}


class Section(BaseModel):
    """A part of the spec; what it doesn't know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Model(Section):
    """Which model is served, and under which name."""

    uri: str = Field(
        pattern=r"^(path:///.+|hf://.+|pvc://[a-z0-9][-a-z0-9.]*(/.+)?)$",
        description="path://FOLDER on the node or pvc://CLAIM/FOLDER (hf://OWNER/NAME is not served yet)",
    )
    served_name: str | None = Field(None, min_length=1, description="name in the API; default: the resource's name")


class Image(Section):
    """A container image."""

    repository: str = Field(min_length=1, description="the image's name without tag and digest")
    tag: str = Field("latest", min_length=1, description="which of its versions, unless digest says so")
    digest: str | None = Field(None, pattern=r"^sha256:[0-9a-f]{64}$", description="wins over the tag")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field("IfNotPresent", description="as in a pod")

    @property
    def reference(self) -> str:
        """Return the image as a pod names it."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"


class Parallelism(Section):
    """How one replica is spread over GPUs."""

    tensor: int = Field(1, ge=1, le=64, description="GPUs that share each layer, all of one node")


class Autotune(Section):
    """The loop that moves the offload limit while serving."""

    enabled: bool = Field(True, description="false: the limit is what expertOffload.limit says")
    interval: Duration = Field("15s", description="how often metrics are judged")
    cooldown: Duration = Field("1m", description="least time between two changes")
    tolerance_percent: int = Field(10, ge=0, le=100, description="gain in goodput below which a raise is taken back")


class ExpertOffload(Section):
    """How many experts of a layer may be offloaded, and who decides."""

    model_config = ConfigDict(
        json_schema_extra=rule(
            "type(self.min) != int || type(self.max) != int || int(self.min) <= int(self.max)",
            "min must not exceed max",
            *("min", "max"),
        )
    )
    limit: Limit | None = Field(
        None,
        description="experts of a layer, as a number or a share; where the autotuner starts; "
        "default: the least that fits, + 10; if it is taken away, running workers keep theirs until they start anew",
    )
    min: Limit = Field(0, description="the autotuner goes no lower; experts of a layer, as a number or a share")
    max: Limit = Field("100%", description="the autotuner goes no higher; experts of a layer, as a number or a share")
    policy: PolicyName = Field(
        "goodput",
        description="who leaves when: goodput (where that is predicted to serve more tokens/s), "
        "threshold (when memory is short), fixed (always as many as limit says)",
    )
    autotune: Autotune = Autotune()

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        of_hundred = (resolve_limit(self.min, 100), resolve_limit(self.max, 100))
        if type(self.min) is type(self.max) and of_hundred[0] > of_hundred[1]:  # type: ignore[operator]  # both known
            message = f"min must not exceed max, they are {self.min} and {self.max}"
            raise ValueError(message)
        return self


class HostPool(Section):
    """All experts of the model in the memory of each node."""

    size: Quantity = Field(description="bytes of all experts; the coordinator requests this and the headroom")
    headroom: Quantity = Field("1Gi", description="what the coordinator needs beside the pool")
    hugepages: Literal["none"] = Field("none", description="size of the pool's pages; only the node's own yet")

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if parse_quantity(self.size) + parse_quantity(self.headroom) >= QUANTITY_END:
            message = f"size + headroom must be less than 8Ei, they are {self.size!r} and {self.headroom!r}"
            raise ValueError(message)
        return self


class Memory(Section):
    """Memory on the GPU and on the node."""

    arena: Quantity | None = Field(None, description="bytes that experts and KV cache share; default: all that is left")
    expert_offload: ExpertOffload = ExpertOffload()
    host_pool: HostPool
    shm_size: Quantity = Field("2Gi", description="shared memory of the worker")


class Slo(Section):
    """What requests are promised."""

    tpot_milliseconds: int | None = Field(
        None,
        ge=1,
        description="greatest time per output token: the autotuner keeps it for nine of ten requests, the policy "
        "goodput lets experts leave for no request whose start would break it; default: the autotuner keeps none, "
        "goodput 100; a change starts the workers anew",
    )
    ttft_milliseconds: int | None = Field(
        None,
        ge=1,
        description="greatest time to the first token: for a request that has waited half of it and is not late yet, "
        "the policy goodput lets experts leave as long as tokens/s stay above those with every expert resident, though "
        "fewer away would bring more; default: none, tokens/s alone decide; a change starts the workers anew",
    )


class Resources(Section):
    """Requests and limits of a container."""

    requests: dict[str, Quantity] = Field({}, description="what the scheduler sets aside, by resource")
    limits: dict[str, Quantity] = Field({}, description="the most that the container may use, by resource")


class Coordinator(Section):
    """The process on each node that owns the host pool."""

    mode: Literal["daemonset"] = Field("daemonset", description="one on each node that nodeSelector matches")
    image: Image | None = Field(None, description="the coordinator's; default: the operator's")
    resources: Resources = Field(Resources(), description="beside memory, which hostPool gives")

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if "memory" in {**self.resources.requests, **self.resources.limits}:
            message = "resources must not name memory: it is memory.hostPool.size + headroom, change those"
            raise ValueError(message)
        return self


class Termination(Section):
    """How a worker's pod ends."""

    model_config = ConfigDict(
        json_schema_extra=rule(
            "self.gracePeriodSeconds >= self.drainSeconds + self.shutdownTimeoutSeconds",
            "gracePeriodSeconds must be at least drainSeconds + shutdownTimeoutSeconds",
            *("gracePeriodSeconds", "drainSeconds", "shutdownTimeoutSeconds"),
        )
    )
    drain_seconds: int = Field(
        15,
        ge=0,
        le=3600,
        description="seconds from leaving the Service to the signal to end; requests that still come are served",
    )
    shutdown_timeout_seconds: int = Field(
        30, ge=0, le=3600, description="seconds that requests in flight have after that signal to be finished"
    )
    grace_period_seconds: int = Field(
        60, ge=1, le=7200, description="seconds until the pod is killed, counted from its deletion: drain included"
    )

    @model_validator(mode="after")
    def _check_grace(self) -> Self:
        need = self.drain_seconds + self.shutdown_timeout_seconds
        if self.grace_period_seconds < need:
            message = f"gracePeriodSeconds must be at least {need}, it is {self.grace_period_seconds}"
            raise ValueError(message)
        return self


class Probes(Section):
    """How long a start may take."""

    startup_budget_seconds: int = Field(
        3600, ge=10, le=86400, description="seconds in which a worker must answer, else its container is started anew"
    )


class Toleration(Section):
    """A taint that pods of this deployment accept."""

    key: str | None = Field(None, description="the taint's key; none, with Exists: any")
    operator: Literal["Equal", "Exists"] | None = Field(None, description="default: Equal; Exists asks for no value")
    value: str | None = Field(None, description="the taint's value, for Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="the taint's effect; default: any"
    )
    toleration_seconds: int | None = Field(
        None, description="seconds that a pod stays under a NoExecute taint; default: for ever"
    )


class EnvVar(Section):
    """An environment variable of the worker."""

    name: str = Field(min_length=1, description="the variable's name")
    value: str | None = Field(None, description="its value; default: empty")
    value_from: AnyObject | None = Field(None, description="where its value comes from, as in a pod, in place of value")


class ElasticMoESpec(Section):
    """What a user asks for; frozen, complete with defaults."""

    model: Model
    image: Image | None = Field(None, description="the runtime; default: the operator's")
    image_pull_secrets: tuple[str, ...] = Field((), description="names of Secrets in the same namespace")
    replicas: int = Field(1, ge=0, le=1000, description="workers, each a whole model; 0 keeps the coordinators alone")
    parallelism: Parallelism = Parallelism()
    memory: Memory
    slo: Slo = Slo()
    coordinator: Coordinator = Coordinator()
    termination: Termination = Termination()
    probes: Probes = Probes()
    resources: Resources | None = Field(None, description="of the worker; default: one nvidia.com/gpu a tensor rank")
    node_selector: dict[str, str] = Field(
        {"nvidia.com/gpu.present": "true"}, description="each node that matches reserves memory for the host pool"
    )
    tolerations: tuple[Toleration, ...] = Field((), description="taints that workers and coordinators accept")
    engine_args: tuple[str, ...] = Field((), description="further flags of vllm serve")
    env: tuple[EnvVar, ...] = Field((), description="further environment variables of the worker; they win over ours")
    pod_template: AnyObject = Field({}, description="merged into the worker's pod; its container is called main")
