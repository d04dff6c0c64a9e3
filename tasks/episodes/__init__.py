"""Running episodes: hosts, agents, sandboxes, and environments of known packages."""
