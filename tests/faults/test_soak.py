"""The soak: its verdict on real faults, and on faults that are planted in its streams."""

import json
import subprocess
import sys

from headwater.producer.client import Producer
from headwater.producer.soak.load import Load
from headwater.producer.soak.verdict import Inspection, lasting_keys
from headwater.schemas import Cancelled
from headwater.worker.streams import JobStreams

from tests.faults.conftest import ROOT


def test_a_short_soak_is_good() -> None:
    faults_of = ["--minutes", "0.1", "--kill-every", "2", "--redis-restart-every", "3"]
    options = [*faults_of, "--undisturbed-s", "3", "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "headwater.producer.cli", "soak", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=240,
    )

    assert run.returncode == 0, run.stderr
    verdict = json.loads(run.stdout)
    faults = ("lost", "duplicated", "stuck", "keys_without_expiry", "different", "open_in_rq")
    assert [verdict[name] for name in faults] == [0] * len(faults)
    assert verdict["jobs"] > 0
    assert verdict["kills"] >= 2
    assert verdict["redis_restarts"] >= 1


def test_the_verdict_names_lost_stuck_and_lasting(producer: Producer) -> None:
    load = Load(producer, seed=1)
    load.fill()
    first, second, *_ = load.submitted
    for job_id in list(load.submitted)[2:]:
        del load.submitted[job_id]
    JobStreams(producer.redis).close(first, Cancelled(), 60_000)
    load.open_jobs = {second}
    producer.redis.set("left", 1)

    inspection = Inspection(producer, load)
    inspection.run()

    assert (inspection.counts["lost"], inspection.counts["stuck"]) == (1, 1)
    assert inspection.counts["open_in_rq"] == 1
    assert "left" in lasting_keys(producer.redis)
