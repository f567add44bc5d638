"""LaDP-FL: layer-wise adaptive noise."""

REGISTERED = {
    "files.ladp-fl": "fedveil.papers.ladp_fl",
    "method.ladp-fl": "fedveil.papers.ladp_fl.method:LaDPFL",
    "method.adap-dp-fl": "fedveil.papers.ladp_fl.baselines:AdapDPFL",
    "method.nbafl": "fedveil.papers.ladp_fl.baselines:NbAFL",
    "method.time-varying-dp": "fedveil.papers.ladp_fl.noise_schedules:TimeVaryingDP",
    "method.dpa-ldp": "fedveil.papers.ladp_fl.noise_schedules:DPALDP",
    "method.sensitive-dp": "fedveil.papers.ladp_fl.baselines:SensitiveDP",
    "method.adapldp": "fedveil.papers.ladp_fl.adapldp:AdapLDP",
    "measure.budget-after": "fedveil.papers.ladp_fl.measurements:BUDGET_AFTER",
}
