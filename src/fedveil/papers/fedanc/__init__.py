"""FedANC: an LSTM schedules sparse noise."""

REGISTERED = {
    "files.fedanc": "fedveil.papers.fedanc",
    "method.fedanc": "fedveil.papers.fedanc.method:FedANC",
    "method.soteria": "fedveil.papers.fedanc.baselines:Soteria",
    "method.censor": "fedveil.papers.fedanc.baselines:Censor",
}
