"""The staleness ledger: which group may train at which step."""
