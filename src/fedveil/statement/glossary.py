"""The glossary: what the words of statements, reports and commands mean."""

from __future__ import annotations

import difflib
import textwrap

from fedveil.errors import ConfigError

TERMS = {
    "adjacency": "Which two data sets count as neighbours: those that a promise makes hard to tell apart. See zero-out, "
    "replace-one and add-remove.",
    "aggregate view": "The promise holds against anyone who sees the sum of each round, and so every global model, but no "
    "single upload. A trusted server has to hide the uploads; under secure aggregation the promise holds against the "
    "server, too.",
    "attack": "An attempt to learn something about single people from what a run released. A failed attack proves nothing.",
    "attempt": "A try to add up the masked vectors of a round. If a client vanishes, the next attempt has a smaller set. "
    "Each costs a release; spare ones are priced.",
    "AUC": "From 0.5 (guessing) to 1: how often the model ranks a positive example above a negative one."
    " It is the area under the ROC curve.",
    "audited": "An epsilon that an attack reached, with its confidence. It is a lower bound: the true epsilon is at least as "
    "large. If it exceeds the claimed or proven epsilon, that number is wrong.",
    "budget": "The largest epsilon that may be spent. The ledger refuses a release that would exceed it.",
    "canary": "Made-up data that an audit inserts, to see whether an attack can tell that they were used.",
    "claimed": "The epsilon that a paper's formula or a method's author states. fedveil reports it and does not vouch for it.",
    "client": "A participant that holds data and trains on them: a hospital, a phone, a person. With unit client the promise "
    "covers everything that one client contributes.",
    "clip": "The largest length that an update may have. Longer updates are scaled down to it, so that the noise can hide any "
    "of them.",
    "cohort": "The clients that take part in one round.",
    "colluders": "Clients that work together, or with the server. The shares of noise that they know protect nobody.",
    "coordinates": "The numbers that are trained and released. More of them need more noise in total.",
    "delta": "The chance that the promise of epsilon does not hold. It should be well below 1 divided by the number of people.",
    "door": "The one place in fedveil through which data leave a client. It clips, adds noise, charges the ledger and releases.",
    "DP-SGD": "Training in which every single example's gradient is clipped and noise is added at each step. It protects "
    "records.",
    "epsilon": "How much a run can reveal about one client or record. 0 reveals nothing. At 1 no attack finds that client more "
    "than about 14 % of the time (e times 5 %) at 5 % false alarms; the statement gives the exact figure.",
    "false alarm": "An attacker says that someone took part who did not.",
    "final view": "The promise holds against those who see the last model only, and nothing of the training.",
    "fingerprint": "A digest of the whole run (64 hex digits). Write it down: fedveil verify RUN --pin FINGERPRINT later proves "
    "that nothing was changed.",
    "leak test": "fedveil replay: it changes one client's data and keeps the released values. If anything else that is public "
    "changes, data leave by another way.",
    "ledger": "The record of every release of a run and its cost. Rows are chained, so that none can be changed or removed "
    "without notice.",
    "mask": "A random vector that two clients share. One adds it to what it sends and the other subtracts it, so that it "
    "hides both and is gone from the sum.",
    "neighbours": "Two data sets that differ in one client or record. See adjacency.",
    "noise multiplier": "The standard deviation of the noise, divided by the clip. A larger one means a smaller epsilon.",
    "Poisson sampling": "Each client joins each round by chance, independently of the others. It lowers epsilon if nobody learns "
    "who took part.",
    "proven": "The epsilon that follows from a proof, for the bits that are released, under the assumptions that are listed.",
    "record": "One example of a client: a row of a table, an image. With unit record the promise covers single examples.",
    "release": "Whatever leaves a client or a round and may be seen by the adversary of the view.",
    "replace-one": "Neighbours differ in the data of one client or record, which are replaced by any others.",
    "roster": "The numbers, names and public keys of a federation's clients. Institutions compare its digest without the "
    "server's help, since whoever has a key on it counts as a client.",
    "round": "One pass of training: clients train on the global model, and their updates make the next one.",
    "sampling": "How the clients of a round are chosen: fixed (all, or a fixed number) or Poisson.",
    "secure aggregation": "A protocol by which a server learns the sum of the uploads and none of them: clients send "
    "their vectors under masks that cancel in the sum.",
    "sensitivity": "How far one client or record can move what is released. Noise is measured against it.",
    "server view": "The promise holds against the server, which sees each upload.",
    "share of noise": "The noise that one client adds to its vector, so that a sum has enough noise although nobody adds "
    "all of it. It is larger than an equal part, since clients that work together know theirs.",
    "unit": "Who is protected: each client with all its data, or each record.",
    "update": "The difference that a client's training makes to the model.",
    "view": "What the adversary sees: each upload (server), the sum of each round (aggregate) or the last model (final).",
    "zero-out": "Neighbours differ in one client, whose contribution is replaced by zero. That this client exists, and took "
    "part, is not hidden; what it contributed is.",
}
"""Each term with its meaning, in the order of the alphabet."""


def meaning(term: str) -> tuple[str, str]:
    """Return a term as the glossary spells it, and its meaning.

    Raises:
        ConfigError: the glossary does not have it; names the nearest terms.
    """
    spelled = {_plain(name): name for name in TERMS}
    wanted = _plain(term)
    among = [wanted, f"{wanted} view", wanted.removesuffix("s")]
    name = next((spelled[one] for one in among if one in spelled), "")
    if not name:
        near = [spelled[one] for one in difflib.get_close_matches(wanted, spelled, n=3)]
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise ConfigError(f"{term!r} is not in the glossary{hint}; `fedveil explain` lists all terms", value=term, allowed=TERMS)
    return name, TERMS[name]


def _plain(term: str) -> str:
    return " ".join(term.lower().replace("_", " ").replace("-", " ").split())


def glossary_page() -> str:
    """Return the glossary as a page in Markdown."""
    terms = "\n".join(textwrap.fill(f"- **{name}**: {text}", 120, subsequent_indent="  ") for name, text in TERMS.items())
    return f"# Glossary\n\nThe words of statements, reports and commands. `fedveil explain TERM` prints one of them.\n\n{terms}\n"
