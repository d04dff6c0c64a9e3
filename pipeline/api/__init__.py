"""The public Python API, which `staleflow` exports: what notebooks, scripts and the command line call."""
