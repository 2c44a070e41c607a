"""The worker's figures for Prometheus, under names that start with `headwater_`."""

from headwater.schemas import End, Failed
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class WorkerMetrics:
    """One set of figures per worker, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.queue_wait = self._histogram("queue_wait_seconds", "From enqueueing to the start")
        self.ttft = self._histogram("ttft_seconds", "From the start to the first token")
        self.itl = self._histogram("itl_seconds", "Between two tokens of a sequence")
        self.step = self._histogram("step_seconds", "One engine step, launch to launch")
        self.host = self._histogram("step_host_seconds", "Host work of one engine step")
        self.batch = self._gauge("batch_size", "Sequences that run")
        self.waiting = self._gauge("waiting_sequences", "Sequences that wait in this worker")
        self.kv_bytes = self._gauge("kv_bytes", "Keys and values of running sequences")
        self.kv_padding = self._gauge("kv_padding_ratio", "Of kv_bytes, what is held for no token")
        self.prefill_padding = self._gauge(
            "prefill_padding_ratio", "Of all tokens that prefills have computed, the pads"
        )
        self.cache_bytes = self._gauge("prefix_cache_bytes", "Keys and values in the prefix cache")
        self.computed = self._counter("prompt_tokens_computed", "Prompt tokens computed")
        self.reused = self._counter("prompt_tokens_reused", "Prompt tokens taken from the cache")
        self.generated = self._counter("generated_tokens", "Tokens generated")
        self.preemptions = self._counter("preemptions", "Rows preempted for memory")
        self.attempts = self._labelled(
            "attempts", "Attempts: started, resumed, or restarted over void text", "kind"
        )
        self.cached = self._labelled(
            "cached_tokens", "Prompt tokens not computed, by where they were", "source"
        )
        self.publish_lag = self._histogram(
            "publish_lag_seconds", "From a token to Redis' word that it is there; a trip's oldest"
        )
        self.backlog_seconds = self._gauge(
            "publish_backlog_seconds", "Age of the oldest token that Redis has not confirmed"
        )
        self.backlog_bytes = self._gauge("publish_backlog_bytes", "What waits for Redis")
        self.ready = self._gauge("ready", "1 while /readyz says ok, else 0")
        self.lease_age = self._gauge("lease_age_seconds", "Since Redis last confirmed the lease")
        self.disk_tier_off = self._gauge("disk_tier_off", "1 once the disk of the cache has failed")
        self.disk_bytes = self._gauge("disk_cache_bytes", "Files of prefixes, as last counted")
        self.ends = self._labelled("jobs", "Jobs by how they ended", "end")
        self.failures = self._labelled("failed_jobs", "Failed jobs by their code", "code")
        self._begin_at_zero()

    def ended(self, end: End) -> None:
        """Count a job's end."""
        self.ends.labels(end.type).inc()
        if isinstance(end, Failed):
            self.failures.labels(end.code).inc()

    def _begin_at_zero(self) -> None:
        """Show what alerts wait for from the start: a first one is no increase otherwise."""
        for kind in ("started", "resumed", "restarted"):
            self.attempts.labels(kind)
        for end in ("finished", "failed", "cancelled", "expired"):
            self.ends.labels(end)
        for code in ("poisoned", "malformed_job", "engine_error"):
            self.failures.labels(code)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headwater_{name}", text, registry=self.registry, buckets=_SECONDS)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"headwater_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"headwater_{name}", text, registry=self.registry)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"headwater_{name}", text, [label], registry=self.registry)
