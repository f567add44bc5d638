"""Everything drawn: report, comparison and explorer pages, figures."""
