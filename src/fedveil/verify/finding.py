"""Findings of a verification, one per line, and their outcome."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One check: right; wrong, with the expected value; impossible here; or about a fact that no file of a run can show."""

    kind: Literal["verified", "contradicted", "unknown", "trust"]
    subject: str
    text: str


class Findings(list[Finding]):
    """A list of findings that grows with each check."""

    def check(self, right: bool, subject: str, expected: object, found: object) -> None:
        """Add the result of one check."""
        text = f"{found}" if right else f"expected {expected}, found {found}"
        self.append(Finding("verified" if right else "contradicted", subject, text))

    def agree(self, subject: str, pairs: Mapping[str, tuple[object, object]]) -> None:
        """Add one check of many numbers, each with its computed and its stated value; floats agree to six digits."""
        close = {k for k, (a, b) in pairs.items() if type(a) is type(b) is float and math.isclose(a, b, rel_tol=1e-6)}
        wrong = [f"{name} = {a!r}, not {b!r}" for name, (a, b) in pairs.items() if a != b and name not in close]
        self.check(not wrong, subject, "; ".join(wrong), "other values" if wrong else f"agrees on {', '.join(pairs)}")


class Verification(NamedTuple):
    """All findings about a run, and its closing digest (empty where there is none)."""

    findings: tuple[Finding, ...]
    closing: str = ""

    @property
    def exit_status(self) -> int:
        """1 if a check contradicts the run, else 2 if a check was impossible, else 0."""
        kinds = {finding.kind for finding in self.findings}
        return 1 if "contradicted" in kinds else 2 if "unknown" in kinds else 0

    @property
    def outcome(self) -> str:
        """`verified`, `contradicted` or `cannot tell`."""
        return ("verified", "contradicted", "cannot tell")[self.exit_status]
