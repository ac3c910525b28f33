"""Where a result comes from."""

from bench.serving.meta import collect_meta, find_versions, parse_cpu_model


def test_the_meta_data_name_this_machine_and_tree() -> None:
    """Everything that a comparison needs is there."""
    meta = collect_meta()
    assert meta.num_cores >= 1
    assert meta.memory_gib > 0
    assert meta.time_utc.endswith("+00:00")
    assert meta.python.startswith("3.")


def test_versions_are_those_of_installed_packages() -> None:
    """A package that is not there is left out, not an error."""
    assert set(find_versions(("pytest", "no-such-package"))) == {"pytest"}


def test_the_cpu_model_is_read_from_cpuinfo() -> None:
    """Architectures without a model name give their own."""
    assert parse_cpu_model("processor\t: 0\nmodel name\t: Fast CPU @ 2GHz\n") == "Fast CPU @ 2GHz"
    assert parse_cpu_model("processor\t: 0\n")
