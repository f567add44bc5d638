"""`fedveil reproduce`: the papers' tables and figures as recipes, ours beside theirs."""
