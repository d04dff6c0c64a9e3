"""GPU memory needed by the roles of a job. Pure."""
