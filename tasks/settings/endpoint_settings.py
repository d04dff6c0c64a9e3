"""The [endpoint] table of a job file, and the settings of an endpoint, with values of its job. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from staleflow.tasks.settings.knobs import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """The HTTP endpoint at which agents request turns of the model; docs/agents.md."""

    host: str = knob("127.0.0.1", "name or address that each environment host listens on for its agents")
    port: int = knob(0, "port; 0: a free one, as it must be with several environment hosts", low=0, high=65_535)
    sampling: str = knob(
        "override",
        "how a temperature, top_p and the like other than the job's are handled: override ignores them, and the reply "
        "names them; refuse replies 400",
        choices=("override", "refuse"),
    )
    changed_past: str = knob(
        "branch",
        "how a request that changes earlier messages is handled: branch starts a context branch, which is trained on, "
        "too; refuse replies 400",
        choices=("branch", "refuse"),
    )
    max_body_kib: int = knob(8192, "KiB of a request's body; a longer one is answered 413", low=1, high=1_048_576)
    max_session_kib: int = knob(
        32_768,
        "KiB of all pending requests of one session; one that would exceed it is answered 429, but a session may "
        "always have one",
        low=1,
        high=1_048_576,
    )
    body_s: float = knob(
        10.0, "seconds for a request's head to arrive, and for its body; a later one is answered 408", above=0
    )
    max_requests: int = knob(
        1024,
        "requests in flight, and bodies read at once; further ones are answered 429, except those of sessions, which "
        "wait",
        low=1,
        high=65_536,
    )
    max_connections: int = knob(8192, "open connections; further ones are answered 503", low=1, high=1_048_576)
    tls_cert: str = knob("", "file of a TLS certificate, PEM; with it the endpoint speaks https")
    tls_key: str = knob("", "file of that certificate's private key, PEM")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Settings of an endpoint: its table in the job file, and values of the job."""

    config: EndpointConfig = EndpointConfig()
    model: str = "policy"
    """The model's name in replies."""
    temperature: float = 1.0
    """The job's sampling temperature."""
    vocabulary: int = 0
    """Number of tokens in the model's vocabulary; 0 if unknown."""
    unknown_key_grace_s: float = 0.0
    """Seconds from the start in which unknown keys may belong to the endpoint that this one replaces; 0: none."""

    @property
    def local(self) -> EndpointSettings:
        """A copy for an endpoint that only agents of the same process use, such as while prompts are drawn."""
        return replace(self, config=replace(self.config, host="127.0.0.1", port=0, tls_cert="", tls_key=""))
