"""The HTTP server's figures for Prometheus: `headwater_api_...`, and `headwater_redis_...`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ApiMetrics:
    """One set of figures per server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headwater_api_requests",
            "Requests by route, method and status",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "headwater_api_request_seconds",
            "From a request's arrival to the end of its answer",
            ["route"],
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.jobs = Counter(
            "headwater_api_jobs", "Jobs submitted", ["model"], registry=self.registry
        )
        self.streams = Gauge(
            "headwater_api_open_streams", "Clients that read a stream", registry=self.registry
        )
        self.cancelled = Counter(
            "headwater_api_disconnect_cancels",
            "Jobs cancelled because their client went away",
            registry=self.registry,
        )
        self.queue_depth = self._gauge(
            "api_queue_depth", "Jobs that wait; read when asked for", "model", "queue"
        )
        self.oldest_wait = self._gauge(
            "api_oldest_wait_seconds",
            "How long a queue's first job has waited; read when asked for",
            "model",
            "queue",
        )
        self.workers = self._gauge(
            "api_live_workers", "Workers whose lease holds; read when asked for", "model"
        )
        self.quarantined = self._gauge(
            "api_quarantined_jobs", "Ids whose jobs could not be read, in the list of them", "model"
        )
        self.redis_up = self._gauge("redis_up", "1 when Redis answered this scrape, else 0")
        self.redis_memory = self._gauge("redis_used_memory_bytes", "What Redis takes")
        self.redis_max_memory = self._gauge("redis_max_memory_bytes", "Its limit; 0 for none")
        self.redis_persists = self._gauge("redis_aof_enabled", "1 when Redis writes an AOF")
        self.redis_aof_ok = self._gauge("redis_aof_ok", "1 when the AOF's last write succeeded")
        self.redis_refusals = self._gauge(
            "redis_refused_commands", "Commands refused since Redis started, by error", "error"
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"headwater_{name}", text, labels, registry=self.registry)
