"""The HTTP server's figures for Prometheus, under names that start with `headwater_api_`."""

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
        self.queue_depth = Gauge(
            "headwater_api_queue_depth",
            "Jobs that wait, by queue; read when asked for",
            ["queue"],
            registry=self.registry,
        )
        self.workers = Gauge(
            "headwater_api_live_workers",
            "Workers whose lease holds; read when asked for",
            registry=self.registry,
        )
