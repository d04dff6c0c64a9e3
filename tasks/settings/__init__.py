"""Settings, the registry of named classes, and loading of user code."""
