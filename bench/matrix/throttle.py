"""An older bus: fetches slowed down to about a given rate, by fewer thread blocks with less on its way at once."""

from bench.serving.errors import BadScenario
from bench.serving.progress import say
from elasticmoe.kernels.fetch import Tuning

RATES = {
    17.8: Tuning(2, 16384, 4, 1),
    25.1: Tuning(2, 16384, 4, 3),
    32.5: Tuning(2, 32768, 16, 1),
    38.0: Tuning(2, 32768, 4, 3),
}
"""GB/s (10⁹ bytes a second) of launches of the fetch kernel, as `bench/fetch_gpu.py` measured them on an H200."""
NEAR = 0.1


def throttle(gb_s: float) -> None:
    """Have every fetch of this process that the device drives run at the rate nearest to `gb_s`.

    Loads that the adjuster plans go by the copy engine and are as fast as ever. Raises BadScenario if no rate is near.
    """
    from elasticmoe.runtime.device.device_fetches import DeviceFetches

    rate = min(RATES, key=lambda known: abs(known - gb_s))
    if abs(rate - gb_s) > NEAR * gb_s:
        raise BadScenario(f"wanted fetches at {gb_s} GB/s, known are {', '.join(map(str, RATES))}: add a launch")
    DeviceFetches.tuning = RATES[rate]
    say(f"fetches at {rate} GB/s")
