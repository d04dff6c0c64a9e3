"""Counts of verified, unverified and contradicted weights of a run's instances. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from staleflow.stores.auditing.findings import Finding
from staleflow.stores.trajectories.records import CommitRecord
from staleflow.stores.weights.weight_report import WeightCheck

CHECK = "fingerprints"
"""The name of this check in findings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Counts of verified, unverified and contradicted pulls of a run, and of the compared parts of weights."""

    verified: int = 0
    """Pulls after which every part of the instance's weights was equal to the published one, bit for bit."""
    not_verified: int = 0
    """Pulls after which some part, or all, could not be compared."""
    unpublished: int = 0
    """Of the pulls that are not verified, those of versions whose fingerprint no record has."""
    contradicted: int = 0
    """Pulls after which the instance was taken out of service, because a part or its logprobs differed."""
    parts_verified: int = 0
    parts_not_verified: int = 0
    parts_contradicted: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Parts that were not verified, by reason."""
    unchecked_tokens: int = 0
    """Sampled tokens of the run under a version of which no pull by their instance is stored: the checks of pulls since
    the last commit are lost with a driver that is killed."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The counts as lines of text.

        >>> WeightCounts(verified=8, parts_verified=96).lines
        ('weights of instances: 8 pulls verified, 0 not verified, 0 contradicted',
         '96 parts verified, 0 not verified, 0 contradicted')
        """
        lines = [
            f"weights of instances: {self.verified} pulls verified, {self.not_verified} not verified, "
            f"{self.contradicted} contradicted",
            f"{self.parts_verified} parts verified, {self.parts_not_verified} not verified, "
            f"{self.parts_contradicted} contradicted",
        ]
        if not self.verified:
            lines[0] = f"weights of instances: NOT VERIFIED at any pull ({lines[0].partition(': ')[2]})"
        lines += [f"not verified: {count} parts, {reason}" for reason, count in sorted(self.reasons.items())]
        if self.unpublished:
            lines.append(f"not verified: {self.unpublished} pulls, no step that published their version is stored")
        if self.verified and self.unchecked_tokens:
            lines.append(f"not verified: {self.unchecked_tokens} sampled tokens, no pull of their version is stored")
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedInstance:
    """An instance taken out of service at a version, whose tokens of that version must not be stored."""

    instance: str
    version: int
    first_accepted_row: int | None
    """Number of the first row after the commit in which an instance of that name had the correct weights at that
    version. Tokens of that row and of all later ones are not reported, since another start of the run may have sampled
    them. None: no row may have such tokens."""

    def count_tokens(self, row_number: int, spans: Iterable[tuple[str, int, int]]) -> int:
        """Count the tokens of a row that the instance sampled at that version. spans: (instance, version, number of
        tokens) of the row."""
        if self.first_accepted_row is not None and row_number >= self.first_accepted_row:
            return 0
        return sum(size for instance, version, size in spans if (instance, version) == (self.instance, self.version))


def refused_token_findings(
    location: str, row_number: int, spans: Sequence[tuple[str, int, int]], refusals: Iterable[RefusedInstance]
) -> Iterator[Finding]:
    """Report tokens of a row that were sampled by instances out of service.

    Args:
        location: Name of the row, for the findings.
        row_number: Number of the row in the store.
        spans: Instance, version and number of tokens of each span.
        refusals: Instances that were taken out of service.
    """
    for refusal in refusals:
        if count := refusal.count_tokens(row_number, spans):
            sampler = f"{refusal.instance} at version {refusal.version}"
            message = f"{count} tokens of {sampler}, at which it was taken out of service"
            yield Finding(check=CHECK, location=location, message=message)


class WeightCheckCounter:
    """The weight checks of a run's records, which are added in the order of the commits. Memory: a few numbers for each
    pull, and the checks that contradict or precede the stored fingerprint of their version."""

    def __init__(self, records: Iterable[CommitRecord] = ()) -> None:
        self._published: dict[int, str] = {}
        """Fingerprint of each version by the records, of version 0 by the inputs of the first step."""
        self._refused: dict[tuple[str, int], None] = {}
        self._accepted_rows: dict[tuple[str, int], int] = {}
        self._num_rows = 0
        self._pulls, self._parts, self._reasons = Counter[str](), Counter[str](), Counter[str]()
        self._doubtful: list[tuple[str, WeightCheck]] = []
        """(commit, check) of those that contradict the published weights, or whose version's fingerprint is unknown."""
        for record in records:
            self.add(record)

    def add(self, record: CommitRecord) -> None:
        """Add the checks of the next commit."""
        if record.step == 0 and "weights" in record.inputs:
            self._published[0] = record.inputs["weights"]
        if record.kind == "step":
            self._published[record.step + 1] = record.weight_fingerprint
        for check in record.weight_checks:
            key = str(check.instance), int(check.version)
            if check.refused:
                self._refused[key] = None
            else:
                self._accepted_rows.setdefault(key, self._num_rows)
            if check.outcome == "contradicted" or check.fingerprint != self._published.get(check.version):
                self._doubtful.append((f"{record.kind} {record.step}", check))
            else:
                self._pulls[check.outcome] += 1
            self._parts.update(verified=check.weights.verified, contradicted=check.weights.contradicted)
            self._reasons.update(check.weights.not_verified)
        self._num_rows += record.num_rows

    @property
    def refusals(self) -> tuple[RefusedInstance, ...]:
        """The instances that were taken out of service."""
        return tuple(
            RefusedInstance(
                instance=instance, version=version, first_accepted_row=self._accepted_rows.get((instance, version))
            )
            for instance, version in self._refused
        )

    def findings(self) -> Iterator[Finding]:
        """Report the instances whose weights differed from the published ones."""
        for location, check in self._doubtful:
            fingerprint = self._published.get(check.version, check.fingerprint)
            if check.outcome == "contradicted" or check.fingerprint != fingerprint:
                differences = []
                if check.fingerprint != fingerprint or check.weights.contradicted:
                    differences.append(f"it had {check.fingerprint}, {fingerprint} was published; {check.weights.line}")
                if not check.drift <= check.limit:  # nor NaN
                    differences.append(f"its logprobs differed by {check.drift:.3g} nats, limit {check.limit:.3g}")
                why = check.refused or "; ".join(differences)
                event = "was taken out of service" if check.refused else "had wrong weights and kept sampling"
                message = f"{check.instance} {event} at version {check.version}: {why}"
                yield Finding(check=CHECK, location=location, message=message)

    def counts(self, sampled_tokens: Mapping[tuple[str, int], int] = MappingProxyType({})) -> WeightCounts:
        """Count the outcomes of all pulls. sampled_tokens: number of sampled tokens by (instance, version)."""
        pulls = Counter(self._pulls)
        for _, check in self._doubtful:
            fingerprint = self._published.get(check.version)
            if check.outcome == "contradicted" or fingerprint not in (None, check.fingerprint):
                pulls["contradicted"] += 1
            else:
                pulls["not verified" if fingerprint is None else check.outcome] += 1
                pulls["unpublished"] += fingerprint is None
        pulled = self._refused.keys() | self._accepted_rows.keys()
        return WeightCounts(
            verified=pulls["verified"],
            not_verified=pulls["not verified"],
            contradicted=pulls["contradicted"],
            unpublished=pulls["unpublished"],
            parts_verified=self._parts["verified"],
            parts_not_verified=self._reasons.total(),
            parts_contradicted=self._parts["contradicted"],
            reasons={reason: count for reason, count in self._reasons.items() if count},
            unchecked_tokens=sum(count for sampler, count in sampled_tokens.items() if sampler not in pulled),
        )
