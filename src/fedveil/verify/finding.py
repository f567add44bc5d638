"""What a verification found: one line a finding, and the outcome of all of them."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One check: right; wrong, with what was expected; impossible to make here; or what no file of a run can show."""

    kind: Literal["verified", "contradicted", "unknown", "trust"]
    subject: str
    text: str


class Findings(list[Finding]):
    """Findings so far."""

    def check(self, right: bool, subject: str, expected: object, found: object) -> None:
        """Add the outcome of one check."""
        text = f"{found}" if right else f"expected {expected}, found {found}"
        self.append(Finding("verified" if right else "contradicted", subject, text))

    def agree(self, subject: str, pairs: Mapping[str, tuple[object, object]]) -> None:
        """Add one check of many: of each name the number that follows, and the number that is stated; floats to six digits."""
        close = {k for k, (a, b) in pairs.items() if type(a) is type(b) is float and math.isclose(a, b, rel_tol=1e-6)}
        wrong = [f"{name} = {a!r}, not {b!r}" for name, (a, b) in pairs.items() if a != b and name not in close]
        self.check(not wrong, subject, "; ".join(wrong), "other values" if wrong else f"agrees on {', '.join(pairs)}")


class Verification(NamedTuple):
    """All findings about a run, and its closing digest (empty where there is none)."""

    findings: tuple[Finding, ...]
    closing: str = ""

    @property
    def exit_status(self) -> int:
        """1 if anything is contradicted, else 2 if a check could not be made, else 0."""
        kinds = {finding.kind for finding in self.findings}
        return 1 if "contradicted" in kinds else 2 if "unknown" in kinds else 0

    @property
    def outcome(self) -> str:
        """`verified`, `contradicted` or `cannot tell`."""
        return ("verified", "contradicted", "cannot tell")[self.exit_status]
