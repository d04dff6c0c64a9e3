"""What tests of several rooms need: virtual time, actors inside the test's own process, whole runs over them."""
