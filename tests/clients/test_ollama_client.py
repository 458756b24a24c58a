"""Ollama's own client, used as its documents show, against this server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Say hello."}]
FEW = {"num_predict": 8, "seed": 1, "temperature": 0.5}


class Person(BaseModel):
    """Bounded, because a model this small may go on with a name for ever."""

    name: Literal["Alice", "Bob", "Carol"]
    age: int = Field(ge=0, le=150)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: the name of the city
    """
    return f"sunny in {city}"


@pytest.fixture
def client(url: str) -> Any:
    from ollama import Client

    return Client(host=url)


def test_chat(client: Any) -> None:
    answer = client.chat(model=MODEL, messages=HELLO, options=FEW, keep_alive="5m")
    assert answer.message.role == "assistant" and answer.message.content
    assert answer.done and answer.eval_count <= 8 and answer.prompt_eval_count > 0 and answer.total_duration > 0
    again = client.chat(model=MODEL, messages=HELLO, options=FEW)
    assert again.message.content == answer.message.content
    parts = list(client.chat(model=MODEL, messages=HELLO, options=FEW, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert parts[-1].done and parts[-1].done_reason in ("stop", "length") and not parts[0].done


def test_asynchronous(url: str) -> None:
    from ollama import AsyncClient

    async def work() -> None:
        client = AsyncClient(host=url)

        async def one() -> str:
            stream = await client.chat(model=MODEL, messages=HELLO, options=FEW, stream=True)
            return "".join([part.message.content async for part in stream])

        assert len(set(await asyncio.gather(*(one() for _ in range(3))))) == 1

    asyncio.run(work())


def test_structured(client: Any) -> None:
    about = [{"role": "user", "content": "Alice is 31 years old. Who is it, and how old?"}]
    schema = Person.model_json_schema()
    answer = client.chat(model=MODEL, messages=about, format=schema, options={"temperature": 0})
    assert isinstance(Person.model_validate_json(answer.message.content), Person)
    answer = client.generate(model=MODEL, prompt="Two numbers as JSON", format="json", options={"num_predict": 64})
    assert answer.response.lstrip().startswith("{")


def test_tools(client: Any) -> None:
    asked = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
    answer = client.chat(
        model=MODEL, messages=asked, tools=[get_weather], options={"temperature": 0, "num_predict": 200}
    )
    for call in answer.message.tool_calls or ():
        assert call.function.name == "get_weather" and isinstance(call.function.arguments["city"], str)
    history = [
        *asked,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "content": get_weather("Paris"), "tool_name": "get_weather"},
    ]
    assert client.chat(model=MODEL, messages=history, tools=[get_weather], options=FEW).done


def test_generate(client: Any) -> None:
    first = client.generate(model=MODEL, prompt="My name is Ann.", options=FEW, system="Be brief.")
    assert first.response and first.context and first.done_reason in ("stop", "length")
    again = client.generate(model=MODEL, prompt="Who am I?", options=FEW, context=first.context)
    assert list(again.context[: len(first.context)]) == list(first.context)
    raw = client.generate(model=MODEL, prompt="Once upon a time", raw=True, options=FEW, logprobs=True, top_logprobs=2)
    assert raw.context is None and len(raw.logprobs) == raw.eval_count and len(raw.logprobs[0].top_logprobs) == 2
    parts = list(client.generate(model=MODEL, prompt="Once upon a time", raw=True, options=FEW, stream=True))
    assert "".join(part.response for part in parts) == raw.response


def test_embeddings(embedding_url: str) -> None:
    from ollama import Client

    client = Client(host=embedding_url)
    found = client.embed(model=MODEL, input=["a llama", "a tax form"], dimensions=64)
    assert [len(vector) for vector in found.embeddings] == [64, 64] and found.prompt_eval_count > 0
    assert sum(x * x for x in found.embeddings[0]) == pytest.approx(1, abs=1e-4)
    assert len(client.embeddings(model=MODEL, prompt="a llama").embedding) == 576
    with pytest.raises(Exception, match="exceeds the context length"):
        client.embed(model=MODEL, input="word " * 9000, truncate=False)
    assert len(client.embed(model=MODEL, input="word " * 9000).embeddings[0]) == 576


def test_models(client: Any) -> None:
    (model,) = client.list().models
    assert model.model == f"{MODEL}:latest" and model.size > 90_000_000 and model.details.family == "llama"
    shown = client.show(model.model)
    assert shown.modelinfo["llama.context_length"] == 8192 and "completion" in shown.capabilities
    assert shown.license == "apache-2.0" and shown.template and shown.details.quantization_level == "Q4_1"
    (running,) = client.ps().models
    assert running.model == model.model and running.context_length == 2048 and running.expires_at.year > 2100


def test_errors(client: Any) -> None:
    from ollama import ResponseError

    for work, status, words in (
        (lambda: client.pull("llama3.2"), 501, "router"),
        (lambda: client.chat(model=MODEL, messages=HELLO, think=True), 400, "does not support thinking"),
        (lambda: client.chat(model=MODEL, messages=HELLO, options={"top_k": "x"}), 400, "top_k"),
        (lambda: list(client.generate(model=MODEL, prompt="x", suffix="y", stream=True)), 400, "insert"),
    ):
        with pytest.raises(ResponseError, match=words) as caught:
            work()
        assert caught.value.status_code == status
