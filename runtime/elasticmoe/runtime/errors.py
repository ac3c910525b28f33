"""What can go wrong in the runtime, one tree; every message says what was wanted, what there was, what to do."""


class ElasticMoEError(Exception):
    """Any fault that elasticmoe raises on purpose."""


class ConfigError(ElasticMoEError):
    """A setting has a value that can't be used."""


class UnsupportedError(ElasticMoEError):
    """A combination of model and flags that elasticmoe does not serve."""


class CheckpointError(ElasticMoEError):
    """The checkpoint does not hold what its config promises."""


class PoolTooSmallError(ElasticMoEError):
    """The arena can't hold what one layer or one request needs."""


class OutOfPagesError(ElasticMoEError):
    """Fewer pages are free than an allocation wants; nothing was changed."""


class CoordinatorError(ElasticMoEError):
    """No coordinator answers, it refuses, or what was handed over is not what was asked for."""
