"""The examples of llama-cpp-python's README run unchanged except for the import."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama

from llamado import Llama

HIGH_LEVEL = """
    from llama_cpp import Llama

    llm = Llama(
          model_path="./models/7B/llama-model.gguf",
          # n_gpu_layers=-1, # Uncomment to use GPU acceleration
          # seed=1337, # Uncomment to set a specific seed
          # n_ctx=2048, # Uncomment to increase the context window
    )
    output = llm(
          "Q: Name the planets in the solar system? A: ", # Prompt
          max_tokens=32, # Generate up to 32 tokens, set to None to generate up to the end of the context window
          stop=["Q:", "\\n"], # Stop generating just before the model would generate a new question
          echo=True # Echo the prompt back in the output
    ) # Generate a completion, can also call create_completion
    print(output)
"""
FROM_PRETRAINED = """
    llm = Llama.from_pretrained(
        repo_id="Qwen/Qwen2-0.5B-Instruct-GGUF",
        filename="*q8_0.gguf",
        verbose=False
    )
"""
CHAT = """
    from llama_cpp import Llama
    llm = Llama(
          model_path="path/to/llama-2/llama-model.gguf",
          chat_format="llama-2"
    )
    llm.create_chat_completion(
          messages = [
              {"role": "system", "content": "You are an assistant who perfectly describes images."},
              {
                  "role": "user",
                  "content": "Describe this image in detail please."
              }
          ]
    )
"""
JSON_MODE = """
    from llama_cpp import Llama
    llm = Llama(model_path="path/to/model.gguf", chat_format="chatml")
    llm.create_chat_completion(
        messages=[
            {
                "role": "system",
                "content": "You are a helpful assistant that outputs in JSON.",
            },
            {"role": "user", "content": "Who won the world series in 2020"},
        ],
        response_format={
            "type": "json_object",
        },
        temperature=0.7,
    )
"""
JSON_SCHEMA_MODE = """
    from llama_cpp import Llama
    llm = Llama(model_path="path/to/model.gguf", chat_format="chatml")
    llm.create_chat_completion(
        messages=[
            {
                "role": "system",
                "content": "You are a helpful assistant that outputs in JSON.",
            },
            {"role": "user", "content": "Who won the world series in 2020"},
        ],
        response_format={
            "type": "json_object",
            "schema": {
                "type": "object",
                "properties": {"team_name": {"type": "string"}},
                "required": ["team_name"],
            },
        },
        temperature=0.7,
    )
"""
FUNCTION_CALLING = """
    from llama_cpp import Llama
    llm = Llama(model_path="path/to/chatml/llama-model.gguf", chat_format="chatml-function-calling")
    llm.create_chat_completion(
          messages = [
            {
              "role": "system",
              "content": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to the user's questions. The assistant calls functions with appropriate input when necessary"

            },
            {
              "role": "user",
              "content": "Extract Jason is 25 years old"
            }
          ],
          tools=[{
            "type": "function",
            "function": {
              "name": "UserDetail",
              "parameters": {
                "type": "object",
                "title": "UserDetail",
                "properties": {
                  "name": {
                    "title": "Name",
                    "type": "string"
                  },
                  "age": {
                    "title": "Age",
                    "type": "integer"
                  }
                },
                "required": [ "name", "age" ]
              }
            }
          }],
          tool_choice={
            "type": "function",
            "function": {
              "name": "UserDetail"
            }
          }
    )
"""  # noqa: E501
SPECULATIVE = """
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    llama = Llama(
        model_path="path/to/model.gguf",
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10) # num_pred_tokens is the number of tokens to predict 10 is the default and generally good for gpu, 2 performs better for cpu-only machines.
    )
"""  # noqa: E501
EMBEDDINGS = """
    import llama_cpp

    llm = llama_cpp.Llama(model_path="path/to/model.gguf", embedding=True)

    embeddings = llm.create_embedding("Hello, world!")

    # or create multiple embeddings at once

    embeddings = llm.create_embedding(["Hello, world!", "Goodbye, world!"])
"""
CONTEXT = """
    llm = Llama(model_path="./models/7B/llama-model.gguf", n_ctx=2048)
"""
# from the docstring of `generate`
GENERATE = """
    from llama_cpp import Llama
    llama = Llama("path/to/model.gguf")
    tokens = llama.tokenize(b"Hello, world!")
    for token in llama.generate(tokens, top_k=40, top_p=0.95, temp=1.0, repeat_penalty=1.0):
        print(llama.detokenize([token]))
"""
IMPORTS = {
    "from llama_cpp import": "from llamado import",
    "from llama_cpp.llama_speculative import": "from llamado import",
    "import llama_cpp\n": "import llamado as llama_cpp\n",
}
PATHS = (
    "models/7B/llama-model.gguf",
    "path/to/llama-2/llama-model.gguf",
    "path/to/chatml/llama-model.gguf",
    "path/to/model.gguf",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("snippets") / "tiny.gguf", n_vocab=320, n_ctx=4096)


def place(model: Path, folder: Path) -> Path:
    """Create the paths of the snippets' models in a folder."""
    for path in PATHS:
        there = folder / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.symlink_to(model)
    return folder


@pytest.fixture
def here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place(tiny, tmp_path))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the results of `create_chat_completion`, which the snippets drop."""
    found: list[Any] = []
    real = Llama.create_chat_completion
    monkeypatch.setattr(
        Llama, "create_chat_completion", lambda *given, **more: found.append(real(*given, **more)) or found[-1]
    )
    yield found


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Run a snippet, close its models, and return its variables."""
    code = textwrap.dedent(snippet)
    for ours in sorted(IMPORTS, key=len, reverse=True):
        code = code.replace(ours, IMPORTS[ours])
    exec(compile(code, "README.md", "exec"), names)
    for value in [*names.values()]:
        if isinstance(value, Llama):
            value.close()
    return names


@pytest.mark.slow
def test_high_level(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(HIGH_LEVEL)["output"]
    assert capsys.readouterr().out == f"{output}\n"
    assert set(output) == {"id", "object", "created", "model", "choices", "usage"}
    assert output["object"] == "text_completion" and output["model"] == "./models/7B/llama-model.gguf"
    (choice,) = output["choices"]
    assert choice["text"].startswith("Q: Name the planets in the solar system? A: ")
    assert set(output["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_from_pretrained(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the requested repository and file are checked; tests of gguf cover downloads."""
    fetched: list[tuple[str, str | None]] = []

    def fetch(repo: str, *, file_name: str | None = None, **_: Any) -> Path:
        fetched.append((repo, file_name))
        return tiny

    monkeypatch.setattr("llamado.library.llama.fetch_hub_model", fetch)
    llm = run(FROM_PRETRAINED, Llama=Llama)["llm"]
    assert fetched == [("Qwen/Qwen2-0.5B-Instruct-GGUF", "*q8_0.gguf")] and llm.model_path == str(tiny)


@pytest.mark.slow
def test_chat_format(here: None, answers: list[Any]) -> None:
    llm = run(CHAT)["llm"]
    assert "[INST]" in llm._model.template.source
    assert answers[0]["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [JSON_MODE, JSON_SCHEMA_MODE])
def test_json(here: None, answers: list[Any], snippet: str) -> None:
    run(snippet)
    (choice,) = answers[0]["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_speculative(here: None) -> None:
    llama = run(SPECULATIVE)["llama"]
    assert llama._model.engine._drafts.cost is not None


@pytest.mark.slow
def test_embeddings(here: None) -> None:
    embeddings = run(EMBEDDINGS)["embeddings"]
    assert [item["index"] for item in embeddings["data"]] == [0, 1]


def test_context(here: None) -> None:
    assert run(CONTEXT, Llama=Llama)["llm"].n_ctx() == 2048


@pytest.mark.slow
def test_generate(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    run(GENERATE)
    assert all(line.startswith("b") for line in capsys.readouterr().out.splitlines())


def seeded(snippet: str) -> str:
    """Add a seed with which the small model's answer is known to be sensible."""
    assert "Llama(model_path" in snippet
    return snippet.replace("Llama(model_path", "Llama(seed=7, model_path")


@pytest.mark.full
def test_snippets_with_a_real_model(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Any]
) -> None:
    monkeypatch.chdir(place(smollm2_path, tmp_path))
    output = run(HIGH_LEVEL.replace("# seed=1337,", "seed=1337, #"))["output"]
    assert "Jupiter" in output["choices"][0]["text"]
    run(seeded(JSON_SCHEMA_MODE))
    assert json.loads(answers[-1]["choices"][0]["message"]["content"])["team_name"]
    run(seeded(FUNCTION_CALLING))
    (choice,) = answers[-1]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "UserDetail"
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"name", "age"} and isinstance(arguments["age"], int)
