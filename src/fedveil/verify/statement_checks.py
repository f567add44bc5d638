"""Checks of a statement against the configuration, the ledger's rows, and a second computation of every epsilon."""

import math
import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from typing import Any

from fedveil.verify.finding import Finding, Findings
from fedveil.verify.row_costs import Expected, RowCosts
from fedveil.verify.second_path import Curve, gaussian_epsilon

EXACT, NUMERIC = 1e-6, 1e-3  # relative tolerance of epsilons in closed form, and by loss distributions on two grids
_LEFT = 0.98  # least share of delta that remains after the charge for the noise sampler
_SHARP = ("pld", "profile")  # accountants; the others are less sharp, and still bounds, as is every one of large losses
_VIEWS = ("server", "aggregate", "final")
_MECHANISMS = {"dp-fedavg": "independent", "noisy-fedavg": "independent", "noisy-fedprox": "independent", "banded-mf": "banded"}
_BUILT_IN = (  # other methods are user-defined; only their rows tell how noise is added
    "adap-dp-fl adapldp adaptive-clipping aldp-fl banded-mf blur-lus censor dp-fedavg dp-fedsam dp-scaffold dpa-ldp fed-addp"
    " fed-dpa fed-smp fedanc fedavg fedglp-adp gfl-aldpa gradient-compression ladp-fl ldp-fed nbafl noisy-fedavg noisy-fedprox"
    " scaffold sensitive-dp soteria time-adaptive time-varying-dp"
)
_IN_SHARES = {(method, variant) for method in ("noisy-fedavg", "noisy-fedprox") for variant in ("published", "proven")}
_IN_SHARES |= {(method, "published") for method in ("dpa-ldp", "nbafl", "time-varying-dp")}
Json = Mapping[str, Any]


def expected(statement: Json, config: Json) -> Expected:
    """Return the expected rows of the ledger, with a plan if all releases of the method have one clip and one noise."""
    privacy, steps, method = config["privacy"], config["training"]["local"] == "dp-sgd", statement["method"]
    clip, z = (statement["learnability"] or {}).get("clip") or 0.0, statement["noise_multiplier"] or 0.0
    scope = tuple(statement["scope"][name] for name in ("unit", "adjacency", "view"))
    shared = privacy.get("noise_place") == "shares"
    sharers = statement["cohort"] if statement["sampling"] == "fixed" else statement["clients"]
    if scope[2] == "server":  # for priced sums of uploads that are not released
        sharers = privacy.get("min_survivors", statement["cohort"] if statement["sampling"] == "fixed" else 1)
    elif not shared and method in _BUILT_IN.split() and (method, statement["variant"]) not in _IN_SHARES:  # noise is added once
        sharers = 1
    shares, known = [1], (0 if scope[2] == "final" else max(privacy["colluders"], 1), privacy["colluders"])  # the last up to 0.2
    if scope[2] != "server" and sharers > 1:
        least = 1 if shared else privacy.get("min_survivors", sharers)  # a set may be smaller than a round, with larger shares
        shares = [
            n - colluders for n in range(least, max(least, sharers if shared else 0) + 1) for colluders in known if n > colluders
        ]
    part, most = (privacy.get("evaluation", {}).get(key, 0) for key in ("share", "examples"))  # of counts with each update
    noises = [(z * clip / math.sqrt(n * (1 - part)), most * z / math.sqrt(n * part or 1)) for n in shares]
    plan = (clip, most, noises, _MECHANISMS[method]) if method in _MECHANISMS and clip * z and not steps else None
    kinds = frozenset((r["event"], r["rate"]) for r in statement["views"][min(_VIEWS.index(scope[2]), 1)]["releases"])
    best = privacy.get("selection", {"runs": 1})
    search = (best["runs"], best["shape"]) if "shape" in best else None
    noise, last = best.get("score_noise"), statement["rounds"]
    score = (last, (0.5, 0, [(0.5 * noise,)], "independent")) if noise else (-1, None)
    runs = 1 if search else int(best["runs"])
    return Expected(scope, statement["clients"], privacy["colluders"], steps, kinds, plan, sharers, score, runs, search, shared)


def check_configuration(findings: Findings, statement: Json, config: Json, card: Json) -> None:
    """Compare the statement with the configuration and the data card."""
    privacy, training, clients, target = config["privacy"], config["training"], card["clients"], statement["target_epsilon"]
    each = 1 if privacy["unit"] == "client" else max(card["nominal_examples_per_client"], 1)
    pairs = {
        "method.name": (config["method"]["name"], statement["method"]),
        "privacy.epsilon": (None if target is None and statement["variant"] == "published" else privacy.get("epsilon"), target),
        "privacy.delta": (privacy["delta"], statement["delta"]),
        "training.clients_per_round": (training.get("clients_per_round", clients), statement["cohort"]),
        "number of clients": (clients, statement["clients"]),
        "number of units": (clients * each, statement["units"]),
        **{f"training.{key}": (training.get(key, statement[key]), statement[key]) for key in ("rounds", "sampling")},
        **{f"privacy.{key}": (privacy[key], statement["scope"][key]) for key in ("unit", "adjacency", "view")},
    }
    if privacy.get("noise_place") == "shares":
        spare = privacy.get("spare_attempts", max(2, -(-statement["rounds"] // 20)))
        planned = sum(release["count"] for release in statement["views"][1]["releases"])
        pairs["planned releases"] = (statement["rounds"] + spare, planned)
    for view, numbers in zip(_VIEWS, statement["views"], strict=True):
        pairs[f"scope ({view})"] = ({**statement["scope"], "view": view}, numbers["proven"]["scope"])
        pairs[f"delta ({view})"] = (statement["delta"], numbers["proven"]["delta"])
        for rate in (release["rate"] for release in numbers["releases"] if release["rate"] and privacy["unit"] == "client"):
            pairs[f"sampling rate ({view})"] = (statement["cohort"] / clients, rate)
    findings.agree("statement and configuration", pairs)


def check_statement(findings: Findings, statement: Json, page: str, x: Expected | None = None) -> None:
    """Recompute every proven number from the listed releases by a second path, and check the page."""
    mus = list[float]()
    for view, numbers in zip(_VIEWS, statement["views"], strict=True):
        subject, stated = f"proven epsilon ({view} view)", float(numbers["proven"]["epsilon"])
        curve = RowCosts(x, numbers["releases"]).curve(statement["delta"], _pair(statement))
        tolerance, tpr = EXACT if curve.exact else NUMERIC, curve.true_positives(0.05)
        blunt = not curve.exact and (numbers["proven"]["accountant"] not in _SHARP or stated > 100)
        right = math.isclose(stated, curve.epsilon, rel_tol=tolerance) or (blunt and curve.epsilon < stated < math.inf)
        if not right and curve.epsilon < stated:
            dearest = RowCosts(x, numbers["releases"]).curve(statement["delta"] * _LEFT, _pair(statement)).epsilon
            right = stated <= dearest * (1 + tolerance)
        findings.check(right, subject, f"{curve.epsilon:.9g} by a second path", f"{stated:.9g}")
        tpr = tpr if curve.exact else min(max(numbers["tpr"], tpr * (1 - tolerance)), 1.0)
        mu = curve.mu if curve.exact and math.isfinite(stated) else None
        findings.agree(f"mu and tpr ({view} view)", {"mu": (mu, numbers["mu"]), "tpr": (tpr, numbers["tpr"])})
        mus.append(curve.mu if curve.exact else 0.0)
    if statement["scope"]["view"] == "server" and x and x.search is None and 0 < mus[1] < mus[0] < math.inf:
        least, most = (max(x.sharers - known, 1) for known in (max(x.colluders, 1), x.colluders))  # noises that hide a client
        credited, dearer = (mus[0] / mus[1]) ** 2 * (1 - 1e-9), gaussian_epsilon(mus[0] / math.sqrt(least), statement["delta"])
        findings.check(credited <= most, "noises of a sum", f"at most {most}", f"{credited:.9g}")
        _beside_fellows(findings, "aggregate", credited > least, dearer)
    on_page = {float(text.rstrip(".")) for text in re.findall(r"\d[\d.]*(?:e[+-]?\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", page))}
    halves = {n: 10.0 ** (math.log10(abs(n)) // 1 - 3) / 2.000002 if 0 < abs(n) < math.inf else 0.0 for n in _numbers(statement)}
    lacking = [n for n, up in halves.items() if on_page.isdisjoint({n, *map(float, (f"{n:g}", f"{n:.4g}", f"{n + up:.4g}"))})]
    right = not lacking and page.startswith(f"# Privacy statement: {statement['method']} (")
    findings.check(right, "statement.md", "the numbers of statement.json", "the same numbers" if right else f"no {lacking}")


def check_rows(findings: Findings, spent: RowCosts, statement: Json, complete: bool, history: list[Json], whole: bool) -> None:
    """Check the rows, and compare their sum with the proven epsilon (equal in a complete run of sums) and the history."""
    findings.check(not spent.wrong, "rows", "scope, costs and plan as they follow", spent.wrong or "each as it should be")
    place, target, delta = _VIEWS.index(view := statement["scope"]["view"]), statement["target_epsilon"], statement["delta"]
    own, subject, pair = statement["views"][min(place, 1)], f"epsilon spent ({view} view)", _pair(statement)
    needed = [{**r, "count": statement["rounds"]} if spent.expected.shared else r for r in own["releases"]]  # without spare ones
    curve, plan = spent.curve(delta, pair), RowCosts(spent.expected, needed).curve(delta, pair)
    epsilon, most, tolerance = curve.epsilon, float(own["proven"]["epsilon"]), EXACT if curve.exact else NUMERIC
    dearer = Curve((), curve.mu**2 + spent.fellow, delta, pair, spent.expected.search).epsilon if spent.fellow else 0.0
    _beside_fellows(findings, view, spent.fellow > 0, dearer)
    slack = NUMERIC if spent.expected.steps else tolerance  # the grid's share in the price of a step depends on its clip
    least = (1 - slack) * plan.epsilon if complete and view != "server" and math.isfinite(plan.epsilon) else 0.0
    findings.check(least <= epsilon <= most * (1 + tolerance), subject, f"{least:.9g} to {most:.9g}", f"{epsilon:.9g}")
    rounds = sorted(spent.so_far)[:: max(1, len(spent.so_far) // (1000 if curve.exact else 4))]  # composition of losses is slow
    costs = [(n, Curve(*spent.so_far[n], delta, pair, spent.expected.search).epsilon) for n in rounds]
    for row in history if most < math.inf and view != "final" else []:
        before, text = bisect(costs, (int(row["round"]), math.inf)), row.get("epsilon_spent") or "nan"
        least = epsilon if whole and row is history[-1] else costs[before - 1][1] if before else 0.0
        right = float(text) >= least - tolerance * epsilon
        if not right or row is history[-1]:
            findings.check(right, "epsilon spent in the history", f"at least {least:.9g} in round {row['round']}", text)
            break
    proven = float(statement["views"][place]["proven"]["epsilon"])
    right = target is None or proven <= target * (1 + EXACT) or proven == math.inf
    findings.check(right, "target epsilon", f"at most {target}", f"{proven:.9g}")


def _beside_fellows(findings: Findings, view: str, wrong: bool, epsilon: float) -> None:
    """Name what runs up to version 0.2 leave out for a sum of noisy uploads: a client knows the noise that it drew itself."""
    text = f"counted as if no client knew its own noise: against a fellow client it is {epsilon:.9g} (advisory A-2026-03)"
    findings.extend([Finding("unknown", f"epsilon of sums ({view} view)", text)] * wrong)


def _numbers(value: Any) -> Iterator[float]:
    """Return every number of the statement that its page also shows; the others are recomputed."""
    yield from [value] if isinstance(value, int | float) else []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key not in ("mu", "tpr", "releases", "units", "target_ratio"):
            yield from _numbers(item)


def _pair(statement: Json) -> str:
    """Return the worst-case pair of a sampled release: replace-one if one record moves the clipped update of its client."""
    steps = any(release["event"] == "sampled_gaussian" for release in statement["views"][0]["releases"])
    return str(statement["scope"]["adjacency"]) if statement["scope"]["unit"] == "client" or steps else "replace_one"
