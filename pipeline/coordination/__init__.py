"""The decision core: events in, commands out. Pure."""
