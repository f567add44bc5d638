"""FedGLP-ADP: personalised masks, adaptive clipping and noise."""

REGISTERED = {
    "files.fedglp-adp": "fedveil.papers.fedglp_adp",
    "method.fedglp-adp": "fedveil.papers.fedglp_adp.method:FedGLPADP",
    "method.blur-lus": "fedveil.papers.fedglp_adp.sparse_baselines:BlurLus",
    "method.fed-dpa": "fedveil.papers.fedglp_adp.fisher_baselines:FedDPA",
    "method.fed-addp": "fedveil.papers.fedglp_adp.fisher_baselines:FedADDP",
    "method.fed-smp": "fedveil.papers.fedglp_adp.sparse_baselines:FedSMP",
}
