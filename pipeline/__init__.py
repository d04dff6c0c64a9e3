"""What decides and drives: coordinator, strategies, driver, cluster."""
