"""Recipes that were tuned for accuracy at a proven epsilon; see docs/utility.md."""

REGISTERED = {
    "files.utility": "fedveil.papers.utility",
}
