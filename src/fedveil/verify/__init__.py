"""Verification of a run by somebody who trusts neither it nor the code that made it; no torch, no code of the run."""

from fedveil.verify.check_run import verify_run
from fedveil.verify.finding import Finding, Verification

__all__ = ["Finding", "Verification", "verify_run"]
