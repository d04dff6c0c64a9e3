"""Support for tests of several packages: virtual time, actors in the test's process, whole runs over them."""
