"""Exact and replicated reports of bias, variance and target, and the ledger of one group, on the toy language."""

from apportion.audit.report import Report, audit
from apportion.audit.trace import trace

__all__ = ["Report", "audit", "trace"]
