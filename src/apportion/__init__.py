"""apportion: every policy-gradient method as one sampler q and one weight w.

Domains are imported by name (`from apportion import control`), so that `import apportion` stays light.
"""

__version__ = "0.1.0"
