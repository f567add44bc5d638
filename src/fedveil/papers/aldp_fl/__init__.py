"""ALDP-FL: sliding-window clipping and bounded noise."""

REGISTERED = {
    "files.aldp-fl": "fedveil.papers.aldp_fl",
    "method.aldp-fl": "fedveil.papers.aldp_fl.method:ALDPFL",
    "method.ldp-fed": "fedveil.papers.aldp_fl.baselines:LDPFed",
    "method.gfl-aldpa": "fedveil.papers.aldp_fl.baselines:GFLALDPA",
}
