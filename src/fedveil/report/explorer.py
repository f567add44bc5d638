"""The privacy explorer: one self-contained HTML page with sliders and curves."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.accounting.finite_precision import norm_excess
from fedveil.accounting.learnability import HALF, HARDLY, LEARNS, POWER
from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.grid import DEFAULT_BITS
from fedveil.methods.method import Method
from fedveil.methods.method_registry import METHODS, method_from
from fedveil.methods.setting import Setting
from fedveil.registry import registered_files
from fedveil.report.web_page import render, write_html
from fedveil.training.local import LocalSpec
from fedveil.training.params import Layout

_DP_FEDAVG = {
    "title": "DP-FedAvg",
    "source": "McMahan et al. 2018",
    "about": "Clip each update as a whole, add Gaussian noise, average. Its accounting is a proof; nothing else is claimed.",
}
_DP_SGD = {
    "title": "Silo DP-SGD",
    "source": "Abadi et al. 2016",
    "about": "Each example's gradient is clipped and every local step is noised: "
    "record-level privacy inside each silo, in every view.",
    "uses": ["records", "batch", "steps"],
}


_PLAIN = ("dp-fedavg", "silo-dp-sgd")
"""The methods that the page offers at once; the others are behind a choice."""
_FORMS = {"sum": "dp-fedavg", "shares": "noisy-fedavg"}
"""For each place of the noise, the method whose releases the page computes."""


def explorer_values() -> dict[str, Any]:
    """Return everything that the explorer's page needs from Python."""
    rounding = {"bits": DEFAULT_BITS, "excess": norm_excess(1, "float64")}
    learning = {"half": HALF, "power": POWER, "learns": LEARNS, "hardly": HARDLY}
    return {"methods": explorer_methods(), "rounding": rounding, "learning": learning}


def explorer_methods() -> dict[str, dict[str, Any]]:
    """Return, by name, the methods whose releases the page can compute: description, place of the noise, claim and limits."""
    files = registered_files("notes/*.toml")
    notes = {"dp-fedavg": _DP_FEDAVG} | {name: tomllib.loads(path.read_text("utf-8")) for name, path in files.items()}
    described = {name: _method(name, notes.get(name, _own_words(name))) for name in METHODS}
    methods = {name: values for name, values in described.items() if values} | {"silo-dp-sgd": _silo()}
    return {name: {**values, "expert": name not in _PLAIN} for name, values in methods.items()}


def _method(name: str, notes: dict[str, Any]) -> dict[str, Any] | None:
    variant = {"variant": "published"} if "variant" in METHODS[name].model_fields else {}
    try:
        method = method_from({"name": name})
        costs = _costs(method)
        noise = next((form for form, known in _FORMS.items() if costs == _costs(method_from({"name": known}))), None)
        if noise is None or _unequal_rounds(method):
            return None
        server = _reason(method.releases(_setting(noise_multiplier=1.0), View.SERVER))
        claim, unbounded = _published(method_from({"name": name, **variant, **notes.get("claim_options", {})}))
    except ConfigError:  # a method that refuses the explorer's plain setting
        return None
    if "refuted" not in notes:  # the page has formulas of the claims that it speaks of
        claim = None
    return _values(notes, noise, server, claim, unbounded)


def _costs(method: Method) -> list[list[tuple[str, str, int]]]:
    """Return the releases of a run in each scope and view: kind, mu and count."""
    scopes = [Scope(Unit.CLIENT, adjacency, view) for adjacency in Adjacency for view in View]
    settings = [replace(_setting(noise_multiplier=1.5), scope=scope) for scope in scopes]
    events = [method.releases(setting, view) for setting in settings for view in View]
    return [[(type(e).__name__, f"{getattr(e, 'mu', 0.0):.9g}", getattr(e, "count", 0)) for e in each] for each in events]


def _unequal_rounds(method: Method) -> bool:
    """Return whether rounds differ in price, so that under sampling one noise multiplier cannot describe them."""
    try:
        return len(method.releases(replace(_setting(noise_multiplier=1.0), sampling="poisson"), View.AGGREGATE)) > 1
    except ConfigError:
        return False


def _published(method: Method) -> tuple[Claim | None, str | None]:
    """Return the claim of the published form, and the reason why nothing is proven for it."""
    setting = method.calibrate(_setting(View.SERVER, epsilon=1.0))
    return method.claim(setting), _reason(method.releases(setting, View.SERVER))


def _silo() -> dict[str, Any]:
    """Return the values for DP-SGD inside each client, as DP-FedAvg counts it."""
    events = method_from({"name": "dp-fedavg"}).releases(_setting(noise_multiplier=1.0, example_clip=1.0), View.FINAL)
    return _values(_DP_SGD, "steps", _reason(events), None, None)


def _values(notes: dict[str, Any], noise: str, reason: str | None, claim: Claim | None, unbounded: str | None) -> dict[str, Any]:
    """Return the page's values for one method.

    Args:
        noise: added to uploads or once to their `sum`, in `shares` by each client, or to the local `steps`.
        reason: why the server view (or, with noise in local steps, a client) has no proof.
        unbounded: why the published form proves nothing.
    """
    scope = claim and {"unit": claim.scope.unit, "adjacency": claim.scope.adjacency, "view": claim.scope.view}
    words = {key: notes.get(key, "") for key in ("title", "source", "about", "refuted", "floor")}
    claimed = scope and {**scope, "note": notes.get("claim_note", ""), "needs": notes.get("claim_needs", "")}
    return {
        **words,
        "uses": notes.get("uses", []),
        "linear": notes.get("linear", False),
        "noise": noise,
        "reason": reason,
        "claim": claimed,
        "unbounded": unbounded,
    }


def _own_words(name: str) -> dict[str, Any]:
    """Describe a method without notes: its name and the first sentence of its documentation."""
    return {"title": name, "source": name, "about": (inspect.getdoc(METHODS[name]) or "").partition("\n")[0]}


def _setting(view: View = View.AGGREGATE, **noise: Any) -> Setting:
    """Return the setting of a small run, of which only the kinds of releases and claims are read, never their sizes."""
    local = LocalSpec(steps=2, batch_size=10, batch_clip=1.0)
    public: dict[str, Any] = {"clients": 100, "cohort": 10, "rounds": 3, "records": 50, "classes": 10, "delta": 1e-5}
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    return Setting(**public, sampling="fixed", local=local, layout=Layout.of({"w": (50,)}), scope=scope, **noise)


def _reason(events: list[Event]) -> str | None:
    return next((event.reason for event in events if isinstance(event, Unbounded)), None)


def write_explorer(path: Path) -> Path:
    """Write the privacy explorer and return its path; it opens from disk and sends nothing anywhere.

    Args:
        path: the HTML file to write, or a folder, which then gets `explore.html`; parent folders are made.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path = Path(path)
    page = render("explore.js", explorer_values(), "explore.html")
    return write_html(path / "explore.html" if path.is_dir() else path, page, "explorer")
