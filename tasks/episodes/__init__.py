"""Running episodes: hosts, agents, sandboxes, environments of known packages."""
