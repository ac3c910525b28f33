"""Specs that turn out wrong only against the cluster, over whole passes: what is told, and what goes on."""

from tests.fakes.kube_bench import Bench
from tests.fakes.kube_objects import offload as memory_with


def valid(bench: Bench) -> str:
    """Return what ConfigValid says."""
    (found,) = [found for found in bench.resource["status"]["conditions"] if found["type"] == "ConfigValid"]
    return str(found["message"])


def test_a_pool_that_the_api_server_writes_in_other_words_stops_no_pass() -> None:
    """It stores 1000000000000000000 as 1E; a mended spec then takes its place."""
    bench = Bench(memory={"hostPool": {"size": "1000P", "headroom": "0"}})
    bench.run()
    (main,) = bench.kube.find("DaemonSet", "tiny-coordinator")["spec"]["template"]["spec"]["containers"]
    main["resources"]["requests"]["memory"] = main["resources"]["limits"]["memory"] = "1E"
    bench.run()
    assert bench.condition("HostMemoryFit") == ("False", "InsufficientMemory")
    bench.edit(memory=memory_with())
    bench.run()
    assert bench.condition("HostMemoryFit") == ("True", "Fits")


def test_a_name_that_is_no_string_is_told() -> None:
    """It could not be merged by."""
    bench = Bench(podTemplate={"spec": {"containers": [{"name": {"a": "b"}}]}})
    bench.run()
    assert bench.condition("ConfigValid") == ("False", "InvalidSpec")
    assert valid(bench) == "spec.podTemplate.spec.containers.0.name: want a string, it is {'a': 'b'}"
