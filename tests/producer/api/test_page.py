"""The built-in page, in a real browser."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from .conftest import RunningApi

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


class Browser:
    """Chromium, spoken to through its debugging pipe."""

    def __init__(self, command: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        # It reads commands from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "browser", command, *flags, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._is_loaded = False
        self._rest = b""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str) -> str:
        """Open a page and return its session."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        self.call("Page.navigate", session, url=url)
        # Code that waits in the page before is lost with it.
        while not self._is_loaded:
            self._read()
        return str(session)

    def evaluate(self, session: str, code: str) -> Any:
        """Return what *code* comes to, a promise's value included."""
        result = self.call(
            "Runtime.evaluate", session, expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 65536)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found = dict(json.loads(message))
        self._is_loaded |= found.get("method") == "Page.loadEventFired"
        return found


@pytest.fixture
def browser() -> Iterator[Browser]:
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        pytest.skip("no Chromium here: apt-get install chromium-headless-shell")
    browser = Browser(command)
    yield browser
    browser.close()


WAIT_FOR_THE_END = """
new Promise(resolve => {
  const note = document.getElementById("note");
  const look = () => / new$/.test(note.textContent) && resolve(true);
  new MutationObserver(look).observe(note, {childList: true});
  look();
})
"""


def test_the_page_shows_what_goes_on_and_streams_a_prompt(
    api: RunningApi, browser: Browser
) -> None:
    session = browser.open(f"{api.url}/#prompt=Hello&tokens=24&run")
    assert browser.evaluate(session, WAIT_FOR_THE_END)

    def text(name: str) -> str:
        return str(browser.evaluate(session, f'document.getElementById("{name}").textContent'))

    assert text("output")
    assert "22 prompt tokens" in text("note")
    assert text("state") == "live"
    assert text("workers") == "1"
    assert "tiny" in text("worker-table")
    browser.evaluate(session, "refresh()")
    assert "tiny.normal.default" in text("queue-table")
    assert "finished" in text("job-table")


def test_the_page_says_why_a_prompt_does_not_run(
    api: RunningApi, browser: Browser, idle: str
) -> None:
    """A server that has never seen a worker, and a model that none serves any more."""
    session = browser.open(api.url)
    note = 'document.getElementById("note").textContent'

    browser.evaluate(session, 'at("model").replaceChildren(); run()')
    assert "start a worker" in browser.evaluate(session, note)

    chosen = f'refresh().then(() => {{ at("model").value = "{idle}"; run(); }})'
    browser.evaluate(session, chosen)
    assert "no worker serves idle" in browser.evaluate(session, note)


def test_the_page_loads_nothing_from_elsewhere(http: httpx2.Client) -> None:
    page = http.get("/")

    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "innerHTML" not in page.text


def test_health_and_figures_need_no_key(http: httpx2.Client) -> None:
    assert http.get("/healthz").text == http.get("/readyz").text == "ok\n"
    http.get("/v1/models")

    metrics = http.get("/metrics").text

    labels = 'method="GET",route="/v1/models",status="200"'
    assert f"headwater_api_requests_total{{{labels}}}" in metrics
    assert 'headwater_api_live_workers{model="tiny"} 1.0' in metrics
    assert "headwater_redis_up 1.0" in metrics
    assert re.search(r"^headwater_redis_used_memory_bytes [1-9]", metrics, re.MULTILINE)
