"""Metrics of an endpoint, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper limits of the histogram's buckets, in seconds."""


class EndpointMetrics:
    """The metrics of one endpoint."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "staleflow_endpoint_requests", "Requests answered, by status", ["status"], registry=self._registry
        )
        self._turn_s = Histogram(
            "staleflow_endpoint_turn_seconds",
            "Seconds from a request to its turn",
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._tokens = Counter("staleflow_endpoint_tokens", "Sampled tokens returned", registry=self._registry)
        self._sessions = Gauge("staleflow_endpoint_sessions", "Open sessions", registry=self._registry)
        self._in_flight = Gauge("staleflow_endpoint_in_flight", "Requests in flight", registry=self._registry)

    def count(self, status: int) -> None:
        self._requests.labels(str(status)).inc()

    def observe_turn(self, seconds: float, tokens: int) -> None:
        self._turn_s.observe(seconds)
        self._tokens.inc(tokens)

    def text(self, *, sessions: int, in_flight: int) -> str:
        """Return all metrics as text."""
        self._sessions.set(sessions)
        self._in_flight.set(in_flight)
        return generate_latest(self._registry).decode()
