"""What can go wrong in the operator, one tree; every message says what was wanted, what there was, what to do."""


class OperatorError(Exception):
    """Any fault that the operator raises on purpose."""


class SpecError(OperatorError):
    """A custom resource asks for what can't be; the children of its last good spec keep serving."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class ForeignObjectError(OperatorError):
    """An object has the name of one that we need and belongs to somebody else."""


class RefusedObjectError(OperatorError):
    """The API server finds an object that a spec asks for invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


class ScrapeError(OperatorError):
    """A pod's metrics can't be had now."""


class SettingsError(OperatorError):
    """The operator's own environment lacks something."""
