"""Convergent f-DP analysis of Noisy-FedAvg and Noisy-FedProx."""

REGISTERED = {
    "files.convergent-dp": "fedveil.papers.convergent_dp",
    "method.noisy-fedavg": "fedveil.papers.convergent_dp.method:NoisyFedAvg",
    "method.noisy-fedprox": "fedveil.papers.convergent_dp.method:NoisyFedProx",
    "measure.worst-privacy": "fedveil.papers.convergent_dp.measurements:WORST_PRIVACY",
    "measure.sensitivity-terms": "fedveil.papers.convergent_dp.measurements:SENSITIVITY_TERMS",
}
