"""Thousands of hostile bodies for every endpoint with a body: each gets an answer, and none a 500."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from fakes import client, run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from hostile_requests import mutated

N = 1_000  # benchmarks/hostile.py sends 10,000 to a real server


@pytest.mark.slow
def test_hostile_bodies_get_clear_errors() -> None:
    async def work() -> Counter[int]:
        rng = random.Random(20240607)
        seen: Counter[int] = Counter()
        async with client() as http:
            http.engine.answer = "ab"  # type: ignore[attr-defined]
            for i in range(N):
                path, body = mutated(rng)
                response = await http.post(path, content=body)
                seen[response.status_code] += 1
                assert response.status_code in (200, 400, 404, 501), (i, path, body[:2000], response.text)
                if response.status_code != 200:
                    error = response.json()["error"]
                    assert error["code"] == response.status_code and error["type"] and error["message"]
                elif response.headers["content-type"].startswith("text/event-stream"):
                    assert "server_error" not in response.text, (i, path, body[:2000], response.text)
            assert (await http.get("/health")).status_code == 200
        return seen

    seen = run(work())
    # Some mutations must pass the first checks.
    assert seen[200] > N // 10 and seen[400] > N // 10
