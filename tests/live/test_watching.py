"""A server that is not there, answers something else, comes back, and is not asked more than need be."""

from __future__ import annotations

import pytest

from sglang_mamba_mtp.live.asking import Asked, Trouble, checked_url
from sglang_mamba_mtp.live.reading import Served
from sglang_mamba_mtp.live.watching import PATIENCE, Watcher

from .conftest import INFO, METRICS


@pytest.mark.parametrize("text", ["http://127.0.0.1:30000", "https://gpu.example", "http://[::1]:30000"])
def test_urls(text):
    assert checked_url(text) == checked_url(text + "/") == text


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:30000", "localhost", "ftp://x", "http://", "http://x:port", "http://x:99999", "file:///etc/passwd"],
)
def test_bad_urls_are_told_from_good_ones(text):
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        checked_url(text)


def test_what_goes_wrong_is_said(fake):
    asked = Asked(fake.url, timeout=1)
    fake.answers["/metrics"] = (404, "Not Found")
    with pytest.raises(Trouble, match="--enable-metrics"):
        asked.sample()
    fake.answers["/metrics"] = (503, "")
    with pytest.raises(Trouble, match="status 503"):
        asked.sample()
    fake.answers["/metrics"] = (200, "<html>")
    with pytest.raises(Trouble, match="is it SGLang"):
        asked.sample()
    fake.answers["/metrics"] = (200, "")
    with pytest.raises(Trouble, match="none of SGLang's metrics yet"):
        asked.sample()
    fake.stop()
    with pytest.raises(Trouble, match="No server answers at"):
        asked.sample()
    fake.start_again()


def test_this_machine_is_asked_without_a_proxy(fake, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Asked(fake.url).sample().has_plugin


def test_a_server_that_keeps_its_start_to_itself_is_watched_all_the_same(fake):
    fake.answers["/server_info"] = (401, "Unauthorized")
    clock = [0.0]
    watcher = Watcher(Asked(fake.url), 2.0, clock=lambda: clock[0])
    for _ in range(3):
        watcher.look()
    assert watcher.view(0).trouble == "" and watcher.view(0).served == Served()
    assert fake.asked.count("/server_info") == 1
    fake.answers["/server_info"] = (200, INFO)
    clock[0] = PATIENCE + 1
    watcher.look()
    assert watcher.view(0).served.radix == "rewind"


def test_it_goes_away_and_comes_back(fake):
    watcher = Watcher(Asked(fake.url), 2.0)
    assert watcher.view(0).trouble and watcher.view(0).sample is None
    watcher.look()
    watcher.look()
    view = watcher.view(0)
    assert (view.trouble, len(view.rows), view.served.sglang_version) == ("", 2, "0.5.23")
    assert fake.asked.count("/server_info") == 1, "what does not change is asked once"
    fake.stop()
    watcher.look()
    assert "No server answers" in watcher.view(0).trouble
    fake.start_again()
    fake.answers["/server_info"] = (200, INFO.replace("0.5.23", "0.5.17"))
    watcher.look()
    view = watcher.view(2)
    assert (view.trouble, len(view.rows), view.served.sglang_version) == ("", 2, "0.5.17")


def test_a_server_that_was_started_again_between_two_readings_is_asked_again(fake):
    watcher = Watcher(Asked(fake.url), 2.0)
    watcher.look()
    fewer = [line for line in METRICS["colons"].splitlines() if "mtp_verifies_total" not in line]
    fake.answers["/metrics"] = (200, "\n".join(fewer))
    fake.answers["/server_info"] = (200, INFO.replace("0.5.23", "0.5.17"))
    watcher.look()
    assert watcher.view(0).served.sglang_version == "0.5.17"


def test_an_answer_nobody_expected_does_not_end_the_watch():
    class Odd:
        url = "http://odd"

        def sample(self):
            raise KeyError("odd")

        served = sample

    watcher = Watcher(Odd(), 2.0)
    watcher.look()
    assert "KeyError('odd')" in watcher.view(0).trouble
