"""Noise of a larger federation, added in this one: it shows what accuracy the larger one might have, and protects nobody here."""

from __future__ import annotations

from fedveil.accounting.types import Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.method import Method
from fedveil.methods.one_price import known_plans
from fedveil.methods.setting import Setting


def check_noise_cohort(method: Method, s: Setting) -> None:
    """Refuse noise of a larger federation where it is not one number that is added to the sum of a round.

    Raises:
        ConfigError: a federation that is not larger, a guarantee beside it, or releases of another kind.
    """
    larger = s.noise_cohort
    if larger is None:
        return
    if larger.clients < s.clients or not s.cohort <= larger.clients_per_round <= larger.clients:
        raise ConfigError(
            f"privacy.noise_cohort = {larger.clients} clients, {larger.clients_per_round} a round: it describes a federation at "
            f"least as large as this one ({s.clients} clients, {s.cohort} a round), with a round no larger than the whole"
        )
    plans = known_plans(method, s)
    if not plans or s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER or any(p.place != "sum" for p in plans):
        raise ConfigError(
            f"privacy.noise_cohort scales the noise on the sum of a round, and {method.name} with privacy.unit = "
            f"'{s.scope.unit}' and privacy.view = '{s.scope.view}' has other noise: take dp-fedavg, dp-fedsam or time-adaptive "
            f"with privacy.unit = 'client' and privacy.view = 'aggregate'"
        )
