"""Serving under load for a minute: 50 clients at once, right and malformed requests; every answer right, memory flat."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import serving
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]
PATH = "/v1/completions"
NUM_CLIENTS, SECONDS, WARM_SECONDS = 50, 60, 15
PROMPTS = ["def main", "import", "class A(", "x = 1"]
WRONG = [
    b"{",
    b"\x00" * 1000,
    b"[" * 50_000,
    b" " * (2**20 + 1),
    json.dumps({"model": "gpt", "prompt": "x" * 100_000}).encode(),
    json.dumps({"model": "gpt", "prompt": "x", "max_tokens": -1}).encode(),
    json.dumps({"model": "other", "prompt": "x"}).encode(),
    b'{"model": "gpt", "prompt": "x", "temperature": NaN}',
]


def body_of(prompt, **fields):
    return {"model": "gpt", "prompt": prompt, "max_tokens": 16, "temperature": 0} | fields


def resident_bytes(client):
    page = client.get("/metrics").text
    (line,) = (
        line for line in page.splitlines() if line.startswith("process_resident_memory_bytes")
    )
    return float(line.split()[1])


@pytest.mark.slow
def test_50_clients_for_a_minute_get_right_answers_clear_errors_or_503_and_memory_stays(tmp_path):
    serving.write_gpt_run(tmp_path / "gpt")
    words = [
        sys.executable,
        "-m",
        "jaxpar",
        "serve",
        str(tmp_path / "gpt"),
        "--port",
        "0",
        "--max-waiting",
        "8",
    ]
    env = os.environ | {"XLA_FLAGS": ""}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        client = serving.Client(int(process.stderr.readline().split(":")[-1].split("/")[0]))
        assert process.stderr.readline() == "ready\n"
        right = [
            client.post(PATH, body_of(prompt)).json["choices"][0]["text"] for prompt in PROMPTS
        ]
        end, counts, memory = time.monotonic() + SECONDS, {}, []

        def ask(seed):
            draw = random.Random(seed)
            while time.monotonic() < end:
                status = ask_once(client, draw, right)
                counts[status] = counts.get(status, 0) + 1

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            running = [pool.submit(ask, seed) for seed in range(NUM_CLIENTS)]
            time.sleep(WARM_SECONDS)
            memory.append(resident_bytes(client))
            while time.monotonic() < end:
                time.sleep(5)
                memory.append(resident_bytes(client))
            for each in running:
                each.result()
        print(counts, [f"{each / 2**20:.0f} MiB" for each in memory])
        assert {200, 400, 404, 413, 503} <= set(counts)
        assert max(memory) - memory[0] < 32 * 2**20, "memory stays flat"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        lines = process.stderr.read().splitlines()
        assert [
            line for line in lines if not line.startswith("SIGTERM: answering 0 requests")
        ] == []


def ask_once(client, draw, right):
    """Sends a request of some kind; returns the status, once the answer is found to be right."""
    if draw.random() < 0.2:
        found = client.post(PATH, draw.choice(WRONG))
        assert found.status in (400, 404, 413, 503), found.text
        assert found.json["error"]["message"]
        return found.status
    i, stream = draw.randrange(len(PROMPTS)), draw.random() < 0.5
    found = client.post(PATH, body_of(PROMPTS[i], stream=stream))
    if found.status == 503:
        assert 1 <= int(found.headers["Retry-After"]) <= 60
        return 503
    assert found.status == 200, found.text
    events = found.events if stream else [found.json]
    assert "".join(event["choices"][0]["text"] for event in events) == right[i]
    return 200
