"""Verification of a run by somebody who trusts neither it nor the code that made it; no torch, no code of the run."""

from fedveil.verify.check_run import verify_ledger as verify_ledger
from fedveil.verify.check_run import verify_run as verify_run
from fedveil.verify.finding import Finding as Finding
from fedveil.verify.finding import Verification as Verification
