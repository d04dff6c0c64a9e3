"""The run page: one run's store and journal in a browser, live or finished."""
