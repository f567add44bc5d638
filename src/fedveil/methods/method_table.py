"""Built-in methods: the name in a configuration and the place of the class. A new method is one line here."""

"""The general methods: the name in a configuration, and where the class is. Those of papers are in their own tables."""

METHOD_TABLE = {
    "fedavg": "fedveil.methods.fedavg:FedAvg",
    "dp-fedavg": "fedveil.methods.fedavg:DPFedAvg",
    "adaptive-clipping": "fedveil.methods.adaptive_clipping:AdaptiveClipping",
    "scaffold": "fedveil.methods.dp_scaffold:Scaffold",
    "dp-scaffold": "fedveil.methods.dp_scaffold:DPScaffold",
    "dp-fedsam": "fedveil.methods.dp_fedsam:DPFedSAM",
    "time-adaptive": "fedveil.methods.time_adaptive:TimeAdaptive",
    "banded-mf": "fedveil.methods.banded_mf:BandedMF",
    "gradient-compression": "fedveil.methods.gradient_compression:GradientCompression",
}
