"""Settings shared by all tests."""

from hypothesis import HealthCheck, settings

# The same examples on every machine, and no deadline: the first call of a jitted function takes as long as it takes.
settings.register_profile(
    "apportion",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("apportion")
