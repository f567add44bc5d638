"""The round: sampling, client round, server round, engines, evaluation."""
