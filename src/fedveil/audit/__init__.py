"""Audits: statistical lower bounds on epsilon, computed from a mechanism's releases.

`subject` defines what is audited, `two_world` repeats a run on two neighbouring inputs, and `canaries` needs one run only.
`single_upload` and `low_bits` test single releases, `dp_sgd_audit` and `training_audit` real training; `adapter` builds a subject
from a method, and `worlds` has known faulty mechanisms. World 0 and world 1 are the two neighbouring inputs of an audit.
"""
