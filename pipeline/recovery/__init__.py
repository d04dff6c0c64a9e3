"""What a run needs to continue after a crash or a stop: its folder, its journal, roles restored from stored state."""
