"""What the intake is told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """Names and times of one worker's intake."""

    worker_id: str
    model: str
    """The alias whose queues it serves."""
    sampler_version: int
    max_claims: int
    """Jobs that it holds at once: those that run, and a small look-ahead."""
    lease_s: float = 15.0
    max_wait_s: float = 30.0
    """A queue that waits longer while higher classes are served comes first."""
    running_ttl_ms: int = 3_600_000
    """How long a stream outlives its newest entry while its job runs."""
    stream_ttl_ms: int = 3_600_000
    """How long a stream can be read after its end."""
    retention_s: int = 14_400
    """How long RQ's records of ended jobs are kept; longer than streams are."""
    longest_pause_s: float = 0.25
    """Between two looks at the queues while no bell can be heard."""
    longest_trust_s: float = 1.0
    """Between two looks while one can: for those who ring none."""

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats."""
        return self.lease_s / 4

    @property
    def maintenance_s(self) -> float:
        """Time between two searches for jobs of dead workers."""
        return self.lease_s / 3
