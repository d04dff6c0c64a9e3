"""Stand-ins for models and environments, for simulation and dry runs."""
