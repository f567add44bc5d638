"""What a comparison says of itself in words: names, numbers, the test and its sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedveil.accounting.formatting import epsilon, number
from fedveil.statement.statement import Assumption
from fedveil.statement.statement_text import Item, TextSection
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.statistics import LEVEL, seeds_needed, smallest_rank_sum, smallest_signed_rank


def short_names(methods: Sequence[str]) -> dict[str, str]:
    """Each method under its bare name where that names it alone, else with its options."""
    bare = [m.split(":")[0] for m in methods]
    return {m: b if bare.count(b) == 1 else m.replace(":", " ", 1).replace(":", ", ") for m, b in zip(methods, bare, strict=True)}


def mean_and_sd(row: Row) -> str:
    """The mean with the sample standard deviation over the seeds."""
    return row.column.text(row.mean, row.sd)


def count(row: Row) -> str:
    """How many of the seeds gave a number."""
    return f"{len(row.values)} of {row.seeds}"


def claimed(row: Row) -> str:
    """The epsilon that the paper claims, `none` where it claims nothing."""
    claim = row.statement.claimed if row.statement else None
    return "none" if claim is None else epsilon(claim.epsilon, "∞", number)


def proven(row: Row) -> str:
    """The proven epsilon of the run's own scope."""
    return epsilon(row.statement.proven.epsilon, "∞") if row.statement else "–"


def verdict(row: Row) -> str:
    """How the row stands to the best of its block."""
    if not row.values:
        return "no result"
    if not row.complete:
        return f"only {count(row)} seeds"
    if row.rank is None:
        return "alone"
    if row.against is None:
        return "best" if row.rank == 1 else "not tested"
    p = f"p = {row.against.holm:.3f}" if row.against.holm >= 0.001 else "p < 0.001"
    return f"{'worse' if row.against.holm < LEVEL else 'unclear'}, {p}"


def guarantee(partition: str, at: float, by: str) -> str:
    """The heading of a block."""
    promise = "without noise (no guarantee)" if math.isinf(at) else f"{by} epsilon = {at:g}"
    return f"{partition}, {promise}" if partition else promise


def problem_sentences(rows: Sequence[Row], names: Mapping[str, str], by: str) -> dict[str, list[str]]:
    """What was not run or went wrong, each with the guarantees at which it did. names: of the methods, short."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for problem in row.problems:
            said.setdefault(f"{names[row.method]}: {problem}", []).append(guarantee(row.partition, row.epsilon, by))
    return said


def sample_sentences(seeds: Sequence[int], most: int, what: str) -> list[str]:
    """The test, its sample, and what such a sample cannot show.

    Args:
        most: methods in the largest block. what: the number that is compared.
    """
    n = len(seeds)
    sample = (
        f"Sample: one number a seed ({what}, n = {n}, seeds {', '.join(map(str, seeds))}); rounds of one run are never a sample."
    )
    if n < 2:
        return [sample, "One seed is no sample: there is no spread and no test. Give --seeds 3 or more."]
    if most < 2:
        return [sample]
    others = most - 1
    needed, needed_all = seeds_needed(1), seeds_needed(others)
    test = (
        "Test: two-sided paired t-test by seed (both methods have the same initial model, partition and batch order) against "
        f"the best mean at the same guarantee, p after Holm's correction for {others} comparison{'s' * (others != 1)} in a block."
    )
    limits = (
        "The t-test takes the differences between seeds for normal, which so few numbers cannot show. "
        if n < 10
        else "The t-test takes the differences between seeds for normal. "
    )
    if n < needed_all:
        limits += (
            f"Rank tests assume less, but with {n} seeds they cannot reach {LEVEL}: the least possible p is "
            f"{smallest_signed_rank(n):.3g} (Wilcoxon signed-rank) or {smallest_rank_sum(n):.3g} (Mann-Whitney) before "
            f"correction; signed-rank needs {needed} seeds for one comparison"
            + (f", {needed_all} for {others}. " if others > 1 else ". ")
        )
    limits += "The best was chosen by these same numbers, which favours it: confirm a close result with fresh seeds."
    return [sample, test, limits]


def assumptions_of(rows: Sequence[Row], names: Mapping[str, str]) -> TextSection:
    """What the proven numbers rest on; a line begins with its methods where it is not that of all. names: short."""
    resting: dict[Assumption, dict[str, None]] = {}
    proved: dict[str, None] = {}
    for name, statement in ((names[row.method], s) for row in rows for s in row.statements):
        if math.isfinite(statement.proven.epsilon):
            proved[name] = None
            for assumption in statement.assumptions:
                resting.setdefault(assumption, {})[name] = None
    items = [Item(f"{', '.join(who)}: {a.what}" if who != proved else a.what, a.why) for a, who in resting.items()]
    return TextSection("What the proven numbers rest on", items=tuple(items))


def promise_sentences(rows: Sequence[Row], by: str) -> list[str]:
    """What the epsilons of the table mean, and where they do not mean the same."""
    own = list(dict.fromkeys(f"{r.statement.scope}, delta = {r.statement.delta:g}" for r in rows if r.statement))
    said = [f"Proven: {'; '.join(own)}."] if own else []
    seen: dict[str, dict[str, None]] = {}
    for r in rows:
        if r.statement and (e := r.statement.own.seen_count):
            seen.setdefault(proven(r), {})[epsilon(e)] = None
    if seen:
        worse = ", ".join(f"{hidden} becomes {' or '.join(others)}" for hidden, others in seen.items())
        said.append(f"Proven against those who do not see how many clients take part in a round; else {worse}.")
    claims: dict[str, dict[str, None]] = {}
    for r in rows:
        if claim := r.statement and r.statement.claimed:
            claims.setdefault(f"{claim.scope}, delta = {claim.delta:.3g}", {})[r.method.split(":")[0]] = None
    if claims:
        said.append("Claimed by the papers: " + "; ".join(f"{', '.join(m)}: {scope}" for scope, m in claims.items()) + ".")
    if by == "claimed":
        said.append(
            "Compared at equal claimed epsilon: a claim may be wrong, and claims of different scopes do not promise the same; "
            "the proven column says what each run is known to keep. A method without a claim of its own is run at its proof."
        )
    return said
