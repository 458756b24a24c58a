"""Popular clients of OpenAI's and Anthropic's APIs, used against this server as their documentation shows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

MODEL = "smollm2"
HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(BaseModel):
    """Bounded, because a model this small may go on with a name for ever."""

    name: Literal["Alice", "Bob", "Carol"]
    age: int = Field(ge=0, le=150)


ABOUT = [{"role": "user", "content": "Alice is 31 years old. Who is it, and how old?"}]


def checked(arguments: str | dict[str, Any]) -> None:
    """Arguments of the call of get_weather hold to its schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(given["city"], str) and given["unit"] in ("celsius", "fahrenheit")


class TestOpenAI:
    @pytest.fixture
    def client(self, url: str) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{url}/v1", api_key="sk-no-key-required")

    def test_models(self, client: Any) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]

    def test_chat(self, client: Any) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, n=2, seed=1, logprobs=True, top_logprobs=3, stop=["\n\n\n"],
            logit_bias={"5": -100}, temperature=0.5,
        )  # fmt: skip
        assert len(answer.choices) == 2 and answer.choices[0].message.content
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        again = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=1, temperature=0.5)
        other = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=1, temperature=0.5)
        assert again.choices[0].message.content == other.choices[0].message.content

    def test_streaming(self, client: Any) -> None:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage.completion_tokens <= 8
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")

    def test_async_streams_beside_each_other(self, url: str) -> None:
        from openai import AsyncOpenAI

        async def one(client: AsyncOpenAI) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=12, stream=True, temperature=0
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        async def all_of_them() -> list[str]:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
                return await asyncio.gather(*(one(client) for _ in range(6)))

        assert len(set(asyncio.run(all_of_them()))) == 1

    def test_completions(self, client: Any) -> None:
        answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, logprobs=2)
        assert answer.choices[0].text
        chunks = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=4, stream=True)
        assert {c.choices[0].index for c in chunks} == {0, 1}

    def test_tools(self, client: Any) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        call = answer.choices[0].message.tool_calls[0]
        assert call.type == "function" and call.function.name == "get_weather" and call.id
        checked(call.function.arguments)
        back = [
            *ASK_WEATHER,
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
        ]
        final = client.chat.completions.create(model=MODEL, messages=back, tools=[WEATHER], max_tokens=8)
        assert final.choices[0].message

    def test_streamed_tools(self, client: Any) -> None:
        with client.chat.completions.stream(
            model=MODEL, messages=ASK_WEATHER, tools=[WEATHER], temperature=0, max_tokens=200,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
        ) as stream:  # fmt: skip
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        checked(message.tool_calls[0].function.arguments)

    def test_structured_output(self, client: Any) -> None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=ABOUT, response_format=Person, max_tokens=100, temperature=0
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        # Of any JSON object the model says how long it is: either it is whole, or it was cut and says so.
        loose = client.chat.completions.create(
            model=MODEL, messages=ABOUT, response_format={"type": "json_object"}, max_tokens=200, temperature=0
        )
        said, reason = loose.choices[0].message.content, loose.choices[0].finish_reason
        assert said.lstrip().startswith("{") and reason in ("stop", "length")
        if reason == "stop":
            assert isinstance(json.loads(said), dict)
        else:
            assert loose.usage.completion_tokens == 200

    def test_responses(self, client: Any) -> None:
        answer = client.responses.create(
            model=MODEL, instructions="Be brief.", input="Say hello.", max_output_tokens=16
        )
        assert answer.output_text and answer.usage.output_tokens <= 16
        events = list(client.responses.create(model=MODEL, input=HELLO, max_output_tokens=8, stream=True))
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta")

    def test_responses_parsed_and_tools(self, client: Any) -> None:
        parsed = client.responses.parse(
            model=MODEL, input=ABOUT[0]["content"], text_format=Person, max_output_tokens=100, temperature=0
        )
        assert isinstance(parsed.output_parsed, Person)
        tool = {"type": "function", **WEATHER["function"], "strict": True}
        called = client.responses.create(
            model=MODEL, input=ASK_WEATHER, tools=[tool], tool_choice="required", max_output_tokens=200, temperature=0
        )
        call = next(item for item in called.output if item.type == "function_call")
        checked(call.arguments)
        follow = [*ASK_WEATHER, call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        second = {"model": MODEL, "input": follow, "tools": [tool], "tool_choice": "none"}
        assert client.responses.create(max_output_tokens=8, **second).output_text

    def test_embeddings(self, embedding_url: str) -> None:
        from openai import OpenAI

        client = OpenAI(base_url=f"{embedding_url}/v1", api_key="x")
        packed = client.embeddings.create(model=MODEL, input=["hello", "world"])  # base64 on the wire
        plain = client.embeddings.create(model=MODEL, input=["hello", "world"], encoding_format="float")
        assert len(packed.data) == 2 and len(packed.data[0].embedding) == 576
        assert packed.data[1].embedding == pytest.approx(plain.data[1].embedding, abs=1e-6)
        assert packed.usage.prompt_tokens > 0

    def test_errors(self, client: Any) -> None:
        import openai

        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model=MODEL, messages="none")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20000}])
        with pytest.raises(openai.NotFoundError):
            client.get("/nowhere", cast_to=object)


class TestAnthropic:
    @pytest.fixture
    def client(self, url: str) -> Any:
        from anthropic import Anthropic

        return Anthropic(base_url=url, api_key="any")

    TOOL: ClassVar[dict[str, Any]] = {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": WEATHER["function"]["parameters"],
    }

    def test_messages(self, client: Any) -> None:
        answer = client.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=HELLO)
        assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
        assert answer.usage.output_tokens <= 8

    def test_streaming(self, client: Any) -> None:
        with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO, stop_sequences=["\n\n"]) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text and final.content[0].text == text and final.usage.output_tokens > 0

    def test_tools(self, client: Any) -> None:
        asked = {"model": MODEL, "max_tokens": 200, "tools": [self.TOOL], "tool_choice": {"type": "any"}}
        answer = client.messages.create(messages=ASK_WEATHER, extra_body={"temperature": 0}, **asked)
        use = next(block for block in answer.content if block.type == "tool_use")
        assert answer.stop_reason == "tool_use" and use.name == "get_weather"
        checked(use.input)
        with client.messages.stream(messages=ASK_WEATHER, extra_body={"temperature": 0}, **asked) as stream:
            streamed = stream.get_final_message()
        assert next(block for block in streamed.content if block.type == "tool_use").input == use.input
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        follow = [*ASK_WEATHER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        second = {"messages": follow, **asked, "max_tokens": 8, "tool_choice": {"type": "none"}}
        assert client.messages.create(**second).content[0].text

    def test_count_tokens(self, client: Any) -> None:
        assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 3

    def test_errors(self, client: Any) -> None:
        import anthropic

        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": 5}])


class TestLangChainOpenAI:
    @pytest.fixture
    def llm(self, url: str) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="dummy", temperature=0, max_tokens=200)

    def test_chat(self, llm: Any) -> None:
        from langchain_core.prompts import ChatPromptTemplate

        chain = ChatPromptTemplate.from_messages([("user", "Explain {topic} in one word.")]) | llm
        answer = chain.invoke({"topic": "rain"})
        assert answer.content and answer.usage_metadata["output_tokens"] > 0
        assert "".join(chunk.content for chunk in llm.stream("Say hello.")) == llm.invoke("Say hello.").content

    def test_tools(self, llm: Any) -> None:
        from langchain_core.tools import tool

        @tool
        def multiply(a: int, b: int) -> int:
            """Multiply two numbers."""
            return a * b

        answer = llm.bind_tools([multiply], tool_choice="any").invoke("What is 3 times 4?")
        assert answer.tool_calls[0]["name"] == "multiply"
        assert isinstance(multiply.invoke(answer.tool_calls[0]["args"]), int)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_output(self, llm: Any, method: str) -> None:
        assert isinstance(llm.with_structured_output(Person, method=method).invoke(ABOUT[0]["content"]), Person)

    def test_embeddings(self, embedding_url: str) -> None:
        from langchain_openai import OpenAIEmbeddings

        embeddings = OpenAIEmbeddings(
            model=MODEL, base_url=f"{embedding_url}/v1", api_key="x", check_embedding_ctx_length=False
        )
        assert len(embeddings.embed_documents(["a", "b", "c"])) == 3


class TestLangChainLlamaCpp:
    @pytest.fixture
    def llm(self, url: str) -> Any:
        from langchain_llama_cpp import ChatLlama

        return ChatLlama(model=MODEL, base_url=url, temperature=0, max_tokens=200)

    def test_chat(self, llm: Any) -> None:
        answer = llm.invoke("Say hello.")
        assert answer.content and answer.response_metadata["timings"]["predicted_n"] > 0
        assert "".join(str(chunk.content) for chunk in llm.stream("Say hello.")) == answer.content

    def test_tools_and_structured_output(self, llm: Any) -> None:
        answer = llm.bind_tools([WEATHER], tool_choice="any").invoke("What is the weather in Paris?")
        checked(answer.tool_calls[0]["args"])
        assert isinstance(llm.with_structured_output(Person).invoke(ABOUT[0]["content"]), Person)


class TestLlamaIndex:
    @pytest.fixture
    def llm(self, url: str) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model=MODEL, api_base=f"{url}/v1", api_key="x", is_chat_model=True, is_function_calling_model=True,
            context_window=8192, max_tokens=100, temperature=0,
        )  # fmt: skip

    def test_chat(self, llm: Any) -> None:
        from llama_index.core.llms import ChatMessage

        assert llm.chat([ChatMessage(role="user", content="Say hello.")]).message.content
        whole = llm.complete("Say hello.").text
        assert "".join(part.delta or "" for part in llm.stream_complete("Say hello.")) == whole

    def test_tools(self, llm: Any) -> None:
        from llama_index.core.tools import FunctionTool

        def get_weather(city: str) -> str:
            """The weather of a city."""
            return city

        answer = llm.chat_with_tools(
            [FunctionTool.from_defaults(get_weather)], "What is the weather in Paris?", tool_required=True
        )
        assert llm.get_tool_calls_from_response(answer)[0].tool_name == "get_weather"


class TestLiteLLM:
    def ask(self, url: str, **more: Any) -> Any:
        import litellm

        return litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key="x", max_tokens=200, **more)

    def test_chat(self, url: str) -> None:
        whole = self.ask(url, messages=HELLO, temperature=0).choices[0].message.content
        parts = self.ask(url, messages=HELLO, temperature=0, stream=True)
        assert whole and "".join(part.choices[0].delta.content or "" for part in parts) == whole

    def test_tools_and_structured_output(self, url: str) -> None:
        answer = self.ask(url, messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", temperature=0)
        checked(answer.choices[0].message.tool_calls[0].function.arguments)
        answer = self.ask(url, messages=ABOUT, response_format=Person, temperature=0)
        Person.model_validate_json(answer.choices[0].message.content)

    def test_embeddings(self, embedding_url: str) -> None:
        import litellm

        found = litellm.embedding(
            model=f"openai/{MODEL}", input=["a", "b"], api_base=f"{embedding_url}/v1", api_key="x"
        )
        assert len(found.data) == 2

    def test_as_anthropic(self, url: str) -> None:
        import litellm

        answer = litellm.completion(model=f"anthropic/{MODEL}", api_base=url, api_key="x", messages=HELLO, max_tokens=8)
        assert answer.choices[0].message.content


class TestInstructor:
    # Mode JSON only asks for JSON of the right form, in words; a model this small sends the schema back.
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
    def test_structured_output(self, url: str, mode: str) -> None:
        import instructor
        from openai import OpenAI

        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="x"), mode=getattr(instructor.Mode, mode))
        person = client.chat.completions.create(
            model=MODEL, messages=ABOUT, response_model=Person, max_retries=3, max_tokens=200, temperature=0
        )
        assert isinstance(person, Person)


class TestHaystack:
    """haystack-ai over HTTP; llama-cpp-haystack runs llama.cpp in its own process and asks no server."""

    def test_chat_and_tools(self, url: str) -> None:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.tools import Tool
        from haystack.utils import Secret

        tool = Tool(
            name="get_weather", description="The weather", parameters=WEATHER["function"]["parameters"], function=str
        )
        generator = OpenAIChatGenerator(
            api_key=Secret.from_token("x"), model=MODEL, api_base_url=f"{url}/v1",
            generation_kwargs={"max_tokens": 200, "temperature": 0},
        )  # fmt: skip
        assert generator.run([ChatMessage.from_user("Say hello.")])["replies"][0].text
        parts: list[Any] = []
        generator.run([ChatMessage.from_user("Say hello.")], streaming_callback=parts.append)
        assert parts
        answer = generator.run(
            [ChatMessage.from_user("What is the weather in Paris?")],
            tools=[tool],
            generation_kwargs={"tool_choice": "required"},
        )["replies"][0]
        checked(answer.tool_calls[0].arguments)


class TestLlm:
    """The plugin has port 8080 built in: the test sets the port in its class and changes nothing else."""

    def test_prompt_and_stream(self, url: str) -> None:
        import llm

        model = llm.get_model("llama-server")
        model.api_base = f"{url}/v1"
        answer = model.prompt("Say hello.", stream=True, max_tokens=8)
        assert "".join(answer) and answer.usage().output > 0

    def test_tools_and_schema(self, url: str) -> None:
        import llm

        model = llm.get_model("llama-server-tools")
        model.api_base = f"{url}/v1"

        def get_weather(city: str) -> str:
            """The weather of a city."""
            return f"sunny in {city}"

        answer = model.prompt("What is the weather in Paris?", tools=[get_weather], max_tokens=100, temperature=0)
        # Whether a small model calls is its choice; what it says is understood, as words or as a call.
        said, calls = answer.text(), answer.tool_calls()
        assert said.strip() or calls
        assert all(call.name == "get_weather" and isinstance(call.arguments, dict) for call in calls)
        plain = llm.get_model("llama-server")
        plain.api_base, plain.supports_schema = f"{url}/v1", True
        Person.model_validate_json(plain.prompt(ABOUT[0]["content"], schema=Person, max_tokens=100).text())


CURLS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 8}),
    ("/v1/chat/completions", {"model": "gpt-3.5-turbo", "max_tokens": 8, "messages": [
        {"role": "system", "content": "You are an assistant."}, {"role": "user", "content": "Write a limerick"}]}),
    ("/v1/completions", {"model": "davinci-002", "prompt": "I believe the meaning of life is", "max_tokens": 8}),
    ("/v1/responses", {"model": "gpt-4.1", "instructions": "Help.", "input": "Write a limerick",
                       "max_output_tokens": 8}),
    ("/v1/messages", {"model": "gpt-4", "max_tokens": 8, "system": "You are helpful.", "messages": HELLO}),
    ("/v1/messages/count_tokens", {"model": "gpt-4", "messages": HELLO}),
    ("/v1/chat/completions/input_tokens", {"messages": HELLO}),
    ("/v1/responses/input_tokens", {"input": "Hello"}),
    ("/tokenize", {"content": "Hello world!", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/apply-template", {"messages": HELLO}),
    ("/slots/0?action=erase", {}),
    ("/slots/1?action=save", {"filename": "slot.bin"}),
    ("/slots/1?action=restore", {"filename": "slot.bin"}),
    ("/props", {}),
]  # fmt: skip


def curl(url: str, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        ["curl", "-sS", "-w", "\n%{http_code}", *options, url], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


class TestCurl:
    @pytest.mark.parametrize(("path", "body"), CURLS, ids=[path for path, _ in CURLS])
    def test_post(self, url: str, path: str, body: dict[str, Any]) -> None:
        options = ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer no-key", "-d", json.dumps(body)]
        status, text = curl(url + path, *options)
        assert status == 200, text
        json.loads(text)
        if "max_tokens" in body or "n_predict" in body:
            status, text = curl(url + path, "-N", *options[:-1], json.dumps({**body, "stream": True}))
            assert status == 200 and "data: {" in text

    @pytest.mark.parametrize(
        "path", ["/health", "/v1/health", "/props", "/slots", "/metrics", "/v1/models", "/models", "/lora-adapters"]
    )
    def test_get(self, url: str, path: str) -> None:
        status, text = curl(url + path)
        assert status == 200 and text

    @pytest.mark.parametrize("given", ["hello", ["hello", "world"]])
    def test_embeddings(self, embedding_url: str, given: Any) -> None:
        body = {"input": given, "model": "GPT-4", "encoding_format": "float"}
        status, text = curl(f"{embedding_url}/v1/embeddings", "-d", json.dumps(body))
        assert status == 200 and len(json.loads(text)["data"]) == (1 if given == "hello" else 2)
        status, text = curl(f"{embedding_url}/embedding", "-d", json.dumps({"content": "hello"}))
        assert status == 200, text


def test_waiting_for_health(url: str) -> None:
    """The client that guides to llama.cpp give: poll /health until 200."""
    script = (
        "import sys, time, urllib.request\n"
        "for _ in range(10):\n"
        "    if urllib.request.urlopen(sys.argv[1] + '/health', timeout=5).status == 200:\n"
        "        sys.exit(0)\n"
        "    time.sleep(0.2)\n"
        "sys.exit(1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, url], env={**os.environ}, timeout=60).returncode == 0
