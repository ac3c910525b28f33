"""An older bus: fetches slowed down to a given rate."""


def throttle(gb_s: float) -> None:
    """Have every fetch of this process take at least as long as at `gb_s` (10⁹ bytes a second)."""
    raise NotImplementedError(f"fetches can't be throttled to {gb_s} GB/s yet: leave --bus-gb-s out")
