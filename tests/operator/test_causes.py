"""What keeps pods from being ready, as the kubelet, the scheduler and the controllers put it."""

from typing import Any

import pytest

from elasticmoe.operator.causes import Cause, explain_no_pods, find_cause, find_refusal
from elasticmoe.operator.observed import Container, End
from tests.fakes.kube_objects import make_deployment, make_pod

SHORT_S, LONG_S = 599.0, 600.0
UNKNOWN_FLAG = "usage: vllm serve [...]\nvllm serve: error: unrecognized arguments: --no-such-flag\n"


def end(code: int = 2, *, reason: str = "Error", message: str = "", ran_s: float = 1.0) -> End:
    """Return how a container ended."""
    return End(code, reason, message, ran_s)


def cause_of(*containers: Container, **fields: Any) -> Cause | None:  # noqa: ANN401 -- any field
    """Return why a pod with such containers is not ready."""
    return find_cause([make_pod(is_ready=False, containers=containers, **fields)], "ns")


def main(**fields: Any) -> Container:  # noqa: ANN401 -- any field
    """Return the main container, which is not ready."""
    return Container("main", is_ready=False, **fields)


def reason_of(*containers: Container) -> str | None:
    """Return the reason where there must be a cause."""
    cause = cause_of(*containers)
    assert cause is not None
    return cause.reason


def test_a_crash_loop_is_told_with_its_exit_code_the_line_that_says_why_and_the_command() -> None:
    """Between two runs the kubelet says how the last one ended."""
    looping = main(waiting="CrashLoopBackOff", restarts=3, past_end=end(message=UNKNOWN_FLAG))
    assert cause_of(looping) == Cause(
        "CrashLooping",
        "w: main ended with exit code 2: vllm serve: error: unrecognized arguments: --no-such-flag, restarts: 3; "
        "see `kubectl -n ns logs w -c main --previous`",
    )


def test_the_end_of_this_run_is_not_the_previous_one() -> None:
    """`--previous` would show another run, or fail."""
    cause = cause_of(main(end=end(3), past_end=end(4), restarts=1))
    assert cause is not None
    assert cause.message == "w: main ended with exit code 3, restarts: 1; see `kubectl -n ns logs w -c main`"


@pytest.mark.parametrize(
    ("container", "reason"),
    [
        (main(waiting="CrashLoopBackOff", past_end=end(ran_s=LONG_S)), "CrashLooping"),
        (main(end=end()), "Restarting"),
        (main(restarts=1, past_end=end()), "Restarting"),
        (main(restarts=2, past_end=end(ran_s=SHORT_S)), "CrashLooping"),
        (main(restarts=2, past_end=end(ran_s=LONG_S)), "Restarting"),
        (main(restarts=2, end=end(ran_s=SHORT_S), past_end=end(ran_s=LONG_S)), "CrashLooping"),
    ],
)
def test_who_ends_again_and_again_soon_is_in_a_crash_loop(container: Container, reason: str) -> None:
    """Also while it runs once more; one that ran long is just restarted, say after its node was."""
    assert reason_of(container) == reason


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        (end(137, reason="OOMKilled"), "exit code 137 (OOMKilled),"),
        (end(0, reason="Completed"), "exit code 0,"),
        (end(1, reason=""), "exit code 1,"),
        (end(message="first\nlast\n\n"), "exit code 2: last,"),
        (
            end(message="Traceback:\n  x\nValueError: it is so\n[W1] a leaked object"),
            "exit code 2: ValueError: it is so,",
        ),
        (end(message="an error, then\nelasticmoe: /m/config.json can't be read\nbye"), "2: elasticmoe: /m/config.json"),
        (end(message="KeyError: 1\nduring it:\n TypeError: 2"), "exit code 2: TypeError: 2,"),
        (end(message="errors: 0"), "exit code 2: errors: 0,"),
        (end(message="x" * 999), f"exit code 2: {'x' * 400},"),
    ],
)
def test_of_a_log_the_last_line_that_names_an_error_is_shown(ended: End, shown: str) -> None:
    """Else the last one; with the kubelet's word where the code alone says too little."""
    cause = cause_of(main(end=ended))
    assert cause is not None
    assert shown in cause.message


@pytest.mark.parametrize("waiting", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
def test_an_image_that_is_not_there_is_told(waiting: str) -> None:
    """With what the kubelet says of it; the end of a former image's run says nothing of this one."""
    assert cause_of(main(waiting=waiting, waiting_message='"x:9": not found', past_end=end())) == Cause(
        "ImagePullFailed",
        f'w: main has no image ({waiting}): "x:9": not found; mend its name or spec.imagePullSecrets',
    )


def test_what_else_the_kubelet_can_not_start_is_told_in_its_words() -> None:
    """As a Secret that spec.env names and that isn't there."""
    cause = cause_of(main(waiting="CreateContainerConfigError", waiting_message='secret "s" not found'))
    assert cause == Cause(
        "StartFailed",
        'w: main can\'t be started (CreateContainerConfigError): secret "s" not found; '
        "see `kubectl -n ns describe pod w`",
    )
    assert cause_of(main(waiting="CrashLoopBackOff")) == Cause(
        "StartFailed", "w: main can't be started (CrashLoopBackOff); see `kubectl -n ns describe pod w`"
    )


@pytest.mark.parametrize("waiting", ["", "ContainerCreating", "PodInitializing"])
def test_a_container_that_is_being_made_may_just_take_time(waiting: str) -> None:
    """No reason of its own, but where to look: a folder that isn't there is told in events alone."""
    assert cause_of(main(waiting=waiting)) == Cause(
        None,
        "w: main waits for its image, its volumes (is the model's folder there?) or another container; "
        "if that lasts, `kubectl -n ns describe pod w` tells for which",
    )


def test_a_container_that_runs_for_the_first_time_has_no_cause() -> None:
    """It loads its model; neither has an init container that has done its work, nor a pod without a kubelet."""
    assert cause_of(main()) is None
    assert cause_of(Container("own-folder", is_ready=True, end=end(0, reason="Completed")), main()) is None
    assert cause_of() is None


def test_an_init_container_that_fails_is_named_and_not_who_waits_for_it() -> None:
    """Whatever their order."""
    owner = Container("own-folder", is_ready=False, waiting="CrashLoopBackOff", past_end=end(1))
    for containers in ((owner, main(waiting="PodInitializing")), (main(waiting="PodInitializing"), owner)):
        cause = cause_of(*containers)
        assert cause is not None
        assert cause.message.startswith("w: own-folder ended with exit code 1")


def test_the_pod_that_failed_goes_before_those_that_wait() -> None:
    """Of those that failed the first is told; ready and leaving ones have no say."""
    failed = (main(end=end()),)
    pods = [
        make_pod("ready", containers=failed),
        make_pod("leaving", is_ready=False, is_leaving=True, unschedulable="", containers=failed),
        make_pod("waits", is_ready=False, containers=(main(waiting="ContainerCreating"),)),
        make_pod("fits", is_ready=False, node=None, unschedulable="nowhere"),
        make_pod("failed", is_ready=False, containers=failed),
    ]
    assert find_cause(pods, "ns") == Cause("Unschedulable", "fits: nowhere")
    assert find_cause(pods[:2], "ns") is None
    assert find_cause(pods[::-1], "ns") == cause_of_named("failed", failed)


def cause_of_named(name: str, containers: tuple[Container, ...]) -> Cause | None:
    """Return the cause of a pod alone."""
    return find_cause([make_pod(name, is_ready=False, containers=containers)], "ns")


def refused(message: str | None, status: str = "True") -> dict[str, Any]:
    """Return a Deployment whose pods the API server refuses."""
    deployment = make_deployment(ready=0)
    told = {} if message is None else {"message": message}
    available = {"type": "Available", "status": "True", "message": "not this one"}
    deployment["status"]["conditions"] = [available, {"type": "ReplicaFailure", "status": status, **told}]
    return deployment


def test_pods_that_are_refused_are_told_in_the_servers_words() -> None:
    """With what to do about Pod Security, if that is why."""
    assert find_refusal(refused("exceeded quota: q")) == Cause("PodsRefused", "exceeded quota: q")
    secured = find_refusal(refused('violates PodSecurity "baseline:latest": hostPath volumes'))
    assert secured is not None
    assert secured.message == (
        'violates PodSecurity "baseline:latest": hostPath volumes; pods here mount folders of the node, which only Pod '
        "Security level privileged allows: label the namespace pod-security.kubernetes.io/enforce=privileged "
        "or use another"
    )


def test_a_deployment_whose_pods_are_made_has_no_refusal() -> None:
    """Nor one that has no conditions yet, nor one whose former refusal is over."""
    assert find_refusal(refused("x", status="False")) is None
    assert find_refusal({}) is None
    assert find_refusal(make_deployment()) is None


def test_a_daemonset_without_pods_has_a_command_that_says_why() -> None:
    """And the likeliest reason."""
    message = explain_no_pods("tiny-coordinator", "ns")
    assert "`kubectl -n ns describe daemonset tiny-coordinator`" in message
    assert "pod-security.kubernetes.io/enforce=privileged" in message
