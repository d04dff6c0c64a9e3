"""The deciding core: events in, commands out. Pure."""
