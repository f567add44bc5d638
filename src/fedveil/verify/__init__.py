"""Verification of a run without trust in the run or in the code that made it; no torch, no code of the run."""

from fedveil.verify.check_run import verify_ledger as verify_ledger
from fedveil.verify.check_run import verify_run as verify_run
from fedveil.verify.finding import Finding as Finding
from fedveil.verify.finding import Verification as Verification
