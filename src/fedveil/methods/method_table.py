"""The methods of fedveil: the name in a configuration, and where its class is. A new method is one line here."""

METHOD_TABLE = {
    "fedavg": "fedveil.methods.fedavg:FedAvg",
    "dp-fedavg": "fedveil.methods.dp_fedavg:DPFedAvg",
    "adaptive-clipping": "fedveil.methods.adaptive_clipping:AdaptiveClipping",
    "dp-scaffold": "fedveil.methods.dp_scaffold:DPScaffold",
    "banded-mf": "fedveil.methods.banded_mf:BandedMF",
    "fedglp-adp": "fedveil.methods.fedglp_adp:FedGLPADP",
    "fedanc": "fedveil.methods.fedanc:FedANC",
    "ladp-fl": "fedveil.methods.ladp_fl:LaDPFL",
    "noisy-fedavg": "fedveil.methods.noisy_fedavg:NoisyFedAvg",
    "noisy-fedprox": "fedveil.methods.noisy_fedprox:NoisyFedProx",
    "aldp-fl": "fedveil.methods.aldp_fl:ALDPFL",
    "ldp-fed": "fedveil.methods.ldp_fed:LDPFed",
    "gfl-aldpa": "fedveil.methods.gfl_aldpa:GFLALDPA",
    "adap-dp-fl": "fedveil.methods.adap_dp_fl:AdapDPFL",
    "nbafl": "fedveil.methods.nbafl:NbAFL",
    "time-varying-dp": "fedveil.methods.time_varying_dp:TimeVaryingDP",
    "dpa-ldp": "fedveil.methods.dpa_ldp:DPALDP",
    "sensitive-dp": "fedveil.methods.sensitive_dp:SensitiveDP",
    "adapldp": "fedveil.methods.adapldp:AdapLDP",
}
