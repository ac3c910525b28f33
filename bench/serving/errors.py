"""What can go wrong between a bench script and the servers it starts."""


class BenchError(Exception):
    """Any failure that a bench script reports in one message and stops at."""


class ServerFailed(BenchError):
    """A server ended, or did not become healthy in time."""


class RequestFailed(BenchError):
    """A request was refused, broke off, or took longer than allowed."""


class BadScenario(BenchError):
    """The requests, the context and the model's sizes do not go together."""
