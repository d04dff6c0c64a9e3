"""What a notebook or script calls: starting, submitting and simulating jobs, with Python objects in them."""
