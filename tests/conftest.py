"""Settings shared by all tests."""

import os

from hypothesis import HealthCheck, settings

# Ray's workers stand back behind everything else (niceness 15), and here the other tests would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

# The same examples on every machine, and no deadline: the first call of a jitted function takes as long as it takes.
settings.register_profile(
    "apportion",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("apportion")
