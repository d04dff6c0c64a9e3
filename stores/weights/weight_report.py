"""Results of verifying an engine's weights after a load.

Weights are compared part by part with the published ones. A part is a published tensor, or a piece of one on a worker
of the engine: rows of a fused tensor, an expert, a shard. There are three outcomes for a part:

- Verified: it is equal, bit for bit.
- Not verified: it could not be compared, for a stated reason.
- Contradicted: it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from staleflow.stores.trajectory import InstanceId, PolicyVersion

MAX_NAMES = 8
"""Maximum number of contradicted parts that a report names; all are counted."""
NO_PARTS = "the engine compares nothing"
"""Reason in a report without any part, which does not count as verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """The result of comparing an engine's weights with the published ones."""

    verified: int = 0
    """Parts that are equal, bit for bit."""
    not_verified: dict[str, int] = field(default_factory=dict)
    """Parts that could not be compared, by reason."""
    contradicted: int = 0
    """Parts that differ."""
    names: tuple[str, ...] = ()
    """Names of the first contradicted parts."""

    @property
    def outcome(self) -> str:
        """The result as a text: "contradicted" if any part is; "verified" if all parts are and there is at least one;
        otherwise "not verified"."""
        if self.contradicted:
            return "contradicted"
        return "verified" if self.verified and not self.not_verified else "not verified"

    @property
    def line(self) -> str:
        """The counts and reasons as one line of text.

        >>> WeightReport(verified=3, not_verified={"packed": 1}, contradicted=1, names=("norm.weight",)).line
        '3 parts verified, 1 not verified (packed), 1 contradicted (norm.weight)'
        """
        reasons = "; ".join(self.not_verified) or ("" if self.verified or self.contradicted else NO_PARTS)
        names = ", ".join(self.names) + (", ..." if self.contradicted > len(self.names) else "")
        return (
            f"{self.verified} parts verified, {sum(self.not_verified.values())} not verified"
            f"{f' ({reasons})' if reasons else ''}, {self.contradicted} contradicted{f' ({names})' if names else ''}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheck:
    """The result of an instance's checks after it pulled a version, as stored with the next commit."""

    instance: InstanceId
    version: PolicyVersion
    fingerprint: str
    """Fingerprint of the published weights, with which the instance's own were compared."""
    weights: WeightReport
    drift: float
    """Mean absolute difference of the probe's logprobs from the trainer's, nats; 0 without a probe."""
    limit: float
    """Maximum allowed `drift`."""
    refused: str = ""
    """Why the instance was taken out of service before its next token; empty if it serves the version."""

    @property
    def outcome(self) -> str:
        """The outcome for the weights; "contradicted" for an instance that was taken out of service, or whose logprobs
        differed too much."""
        return "contradicted" if self.refused or not self.drift <= self.limit else self.weights.outcome


def sum_reports(reports: Iterable[WeightReport]) -> WeightReport:
    """Sum the reports of all workers of an engine."""
    reports = tuple(reports)
    unknown = Counter[str]()
    for report in reports:
        unknown.update(report.not_verified)
    return WeightReport(
        verified=sum(report.verified for report in reports),
        not_verified=dict(unknown),
        contradicted=sum(report.contradicted for report in reports),
        names=tuple(name for report in reports for name in report.names)[:MAX_NAMES],
    )
