"""`Llama` with llama-cpp-python's interface, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from minilm import make_bert
from tiny_models import make_llama

import llamado
from llamado import Llama, LlamadoError, LlamaGrammar
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.library import llama as library
from llamado.library.errors import LibraryError
from llamado.models.keys import RopeOptions

PROMPT = "Hello world"
TOOL = {
    "type": "function",
    "function": {
        "name": "tell",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("library") / "tiny.gguf", n_vocab=320, n_ctx=1024)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Llama]:
    with Llama(model_path=str(model), n_threads=1, embedding=True) as found:
        yield found


@pytest.mark.slow
def test_importing_the_package_loads_no_dependency() -> None:
    code = "import sys, llamado; print(*sys.modules); llamado.Llama.create_completion; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not {name.partition(".")[0] for name in before} & {
        "numpy",
        "llvmlite",
        "jinja2",
        "httpx",
        "regex",
        "asyncio",
    }
    assert [name for name in before if name.startswith("llamado")] == ["llamado"]
    assert "numpy" in after
    assert not [name for name in after if name.startswith(("llamado.server", "llamado.http", "starlette", "uvicorn"))]
    with pytest.raises(AttributeError, match="'Lama'"):
        _ = llamado.Lama  # type: ignore[attr-defined]


# --- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_completion(llm: Llama) -> None:
    found = llm(PROMPT, max_tokens=8, seed=5)
    assert (found["object"], found["model"]) == ("text_completion", llm.model_path)
    assert found["id"].startswith("cmpl-") and found["usage"]["completion_tokens"] <= 8
    assert found["usage"]["prompt_tokens"] == len(llm.tokenize(PROMPT.encode(), special=True))
    (choice,) = found["choices"]
    assert set(choice) == {"text", "index", "logprobs", "finish_reason"} and choice["logprobs"] is None
    assert llm.create_completion(PROMPT, max_tokens=8, seed=5)["choices"] == [choice]
    tokens = llm.tokenize(PROMPT.encode(), special=True)
    assert llm(tokens, max_tokens=8, seed=5)["choices"] == [choice]
    assert llm(PROMPT, max_tokens=8, seed=5, echo=True)["choices"][0]["text"] == PROMPT + choice["text"]
    assert llm(PROMPT, " end", max_tokens=8, seed=5)["choices"][0]["text"] == choice["text"] + " end"
    assert llm(PROMPT, max_tokens=8, seed=6)["choices"] != [choice]
    assert llm(PROMPT, max_tokens=8, seed=5, model="m")["model"] == "m"


def bias(llm: Llama, ends: bool) -> dict[int, float]:
    """Return a bias with which an answer ends within a few tokens, or never."""
    return {token: 5.0 if ends else float("-inf") for token in llm._model.tokenizer.eog}


@pytest.mark.parametrize("ends", [True, False])
def test_a_streamed_completion_is_the_same(llm: Llama, ends: bool) -> None:
    whole = llm(PROMPT, max_tokens=12, seed=3, logprobs=2, logit_bias=bias(llm, ends))
    chunks = list(llm(PROMPT, max_tokens=12, seed=3, logprobs=2, stream=True, logit_bias=bias(llm, ends)))
    assert whole["choices"][0]["finish_reason"] == ("stop" if ends else "length")
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] and not any(reasons[:-1])
    lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    together = {name: [entry for one in lists for entry in one[name]] for name in lists[0]}
    assert together == whole["choices"][0]["logprobs"]


def test_echoed_logprobs(llm: Llama) -> None:
    choice = llm("Q: 1", max_tokens=2, temperature=0.0, logprobs=1, echo=True)["choices"][0]
    found, tokens = choice["logprobs"], llm.tokenize(b"Q: 1")
    assert len(found["tokens"]) == len(tokens) + 2
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    plain = llm("Q: 1", max_tokens=2, temperature=0.0, logprobs=1)["choices"][0]["logprobs"]
    assert found["token_logprobs"][-2:] == plain["token_logprobs"]
    assert found["text_offset"][0] == 0 and found["text_offset"] == sorted(found["text_offset"])


def test_logprobs(llm: Llama) -> None:
    found = llm("Q: 1", max_tokens=6, temperature=0.0, logprobs=3)["choices"][0]["logprobs"]
    assert len({len(entries) for entries in found.values()}) == 1
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [len("Q: 1") + sum(lengths[:i]) for i in range(len(lengths))]
    assert len(set(found["text_offset"])) > 1
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values()) <= 0  # greedy


@pytest.mark.slow
def test_stop_and_length(llm: Llama) -> None:
    text = llm(PROMPT, max_tokens=20, seed=4)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    for given in (stop, [stop]):
        choice = llm(PROMPT, max_tokens=20, seed=4, stop=given)["choices"][0]
        assert choice["finish_reason"] == "stop" and choice["text"] == text[: text.index(stop)]
    endless = bias(llm, False)
    assert llm(PROMPT, max_tokens=7, logit_bias=endless)["usage"]["completion_tokens"] == 7
    for n in (None, 0, -1):
        found = llm(PROMPT, max_tokens=n, seed=4, logit_bias=endless)
        assert found["usage"]["total_tokens"] == llm.n_ctx() and found["choices"][0]["finish_reason"] == "length"


def test_sampling_arguments(llm: Llama) -> None:
    def text(**options: Any) -> str:
        return str(llm(PROMPT, max_tokens=10, seed=9, **options)["choices"][0]["text"])

    greedy = text(temperature=0.0)
    assert greedy == text(top_k=1) == text(top_p=0.0, min_p=0.0, tfs_z=1.0, penalize_nl=True) != text()
    assert text(mirostat_mode=2, mirostat_tau=0.1) != text()
    token = llm.tokenize(b"!", add_bos=False)[0]
    for biases in ({token: 100.0}, {str(token): 100.0}):
        assert text(logit_bias=biases) == "!" * 10
        for penalty in ({"repeat_penalty": 1e3}, {"presence_penalty": 99.0}, {"frequency_penalty": 99.0}):
            assert text(logit_bias=biases, **penalty) != "!" * 10
    with pytest.raises(TypeError, match="temprature"):
        text(temprature=0.5)


def test_requests_draw_their_seeds_from_the_seed_of_the_model(llm: Llama) -> None:
    def texts() -> list[str]:
        return [llm(PROMPT, max_tokens=8)["choices"][0]["text"] for _ in range(3)]

    llm.set_seed(11)
    first = texts()
    assert len(set(first)) == 3
    llm.set_seed(11)
    assert texts() == first
    llm.set_seed(-1)
    assert texts() != first


def test_grammars(llm: Llama, tmp_path: Path) -> None:
    (tmp_path / "g.gbnf").write_text('root ::= "seven" | "eight"')
    for grammar in (
        LlamaGrammar.from_string('root ::= "seven" | "eight"'),
        LlamaGrammar.from_file(tmp_path / "g.gbnf"),
    ):
        assert llm(PROMPT, grammar=grammar)["choices"][0]["text"] in ("seven", "eight")
    schema = LlamaGrammar.from_json_schema(json.dumps(SCHEMA))
    assert json.loads(llm(PROMPT, grammar=schema, max_tokens=64)["choices"][0]["text"])["a"] in ("x", "y")
    with pytest.raises(LlamadoError, match="line 1"):
        llm(PROMPT, grammar=LlamaGrammar.from_string("root ::= ("))


def test_generate_yields_the_tokens_of_a_completion(llm: Llama) -> None:
    tokens = llm.tokenize(PROMPT.encode())
    found = []
    for token in llm.generate(tokens, temp=0.0):
        found.append(token)
        if len(found) == 6:
            break
    text = llm(PROMPT, max_tokens=6, temperature=0.0)["choices"][0]["text"]
    assert llm.detokenize(found).decode("utf-8", "replace") == text


# --- chats ------------------------------------------------------------------------------------------------------------


def chat(llm: Llama, **options: Any) -> Any:
    return llm.create_chat_completion([{"role": "user", "content": "Hi"}], **options)


def test_chat(llm: Llama) -> None:
    found = chat(llm, max_tokens=9, seed=2)
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("length", "stop")
    chunks = list(chat(llm, max_tokens=9, seed=2, stream=True))
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    assert "".join(change.get("content", "") for change in deltas) == choice["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == choice["finish_reason"]


def test_chat_logprobs(llm: Llama) -> None:
    content = chat(llm, max_tokens=4, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert len(content) <= 4 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = list(chat(llm, max_tokens=4, logprobs=True, top_logprobs=2, stream=True))
    assert any(chunk["choices"][0]["logprobs"] for chunk in chunks)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ],
)
def test_response_format_constrains_the_answer(llm: Llama, form: dict[str, Any]) -> None:
    text = chat(llm, response_format=form, max_tokens=100)["choices"][0]["message"]["content"]
    assert json.loads(text)["a"] in ("x", "y")


def test_response_format_without_a_schema_gives_an_object(llm: Llama) -> None:
    choice = chat(llm, response_format={"type": "json_object"}, max_tokens=40, seed=1)["choices"][0]
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_tools(llm: Llama, choice: Any) -> None:
    found = chat(llm, tools=[TOOL], tool_choice=choice, max_tokens=300, seed=1)["choices"][0]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
    for call in found["message"]["tool_calls"]:
        assert call["type"] == "function" and call["function"]["name"] == "tell"
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    chunks = list(chat(llm, tools=[TOOL], tool_choice=choice, max_tokens=300, seed=1, stream=True))
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    said = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert said == found["message"]["tool_calls"][0]["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_messages_and_content_parts(llm: Llama) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "tell", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert llm.create_chat_completion(messages, tools=[TOOL], max_tokens=2)["choices"]
    with pytest.raises(LlamadoError, match="x: it cannot be read"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(LlamadoError, match="load it with its projector file"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "image_url", "image_url": __file__}]}])
    with pytest.raises(LibraryError, match="expected text, image_url or input_audio"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "video"}]}])


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "never"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"response_format": {"type": "xml"}},
        {"functions": [TOOL["function"]]},
        {"function_call": "auto"},
    ],
)
def test_unsupported_chat_arguments_are_rejected(llm: Llama, options: dict[str, Any]) -> None:
    with pytest.raises(LibraryError, match="|".join(options)):
        chat(llm, **options)


# --- tokens, embeddings, state ----------------------------------------------------------------------------------------


def test_tokens(llm: Llama) -> None:
    assert llm.tokenize(b"Hello", add_bos=False) == llm.tokenize("Hello", add_bos=False)
    assert llm.detokenize(llm.tokenize("Grüße, 世界".encode(), add_bos=False)) == "Grüße, 世界".encode()
    assert llm.n_vocab() == 320 and llm.n_ctx() == 512 and llm.n_embd() == 128
    assert llm.token_eos() >= 0 and 0 <= llm.token_bos() < 320
    assert llm.metadata["general.architecture"] == "llama" and llm.metadata["llama.context_length"] == "1024"
    assert all(isinstance(value, str) for value in llm.metadata.values())


def test_embeddings_without_pooling(llm: Llama) -> None:
    """A model without pooling gives one vector per token."""
    found = llm.embed("Hello world")
    assert np.shape(found) == (len(llm.tokenize("Hello world")), 128) and llm.pooling_type() == 0
    assert np.linalg.norm(llm.embed("Hello world", normalize=True), axis=1) == pytest.approx(1, abs=1e-5)
    many, count = llm.embed(["Hello world", "you"], return_count=True)
    assert many[0] == found and count == sum(map(len, many))


def test_embeddings_of_texts(tmp_path: Path) -> None:
    with Llama(str(make_bert(tmp_path / "encoder.gguf")), n_ctx=0, n_threads=1, embedding=True) as encoder:
        whole = encoder.create_embedding(["Hello world", "you"])
        assert [item["index"] for item in whole["data"]] == [0, 1] and whole["usage"]["total_tokens"] > 0
        assert np.shape(encoder.embed("Hello world")) == (64,)
        assert encoder.embed("Hello world") == whole["data"][0]["embedding"]
        with pytest.raises(LlamadoError, match="logits"):
            encoder("Hello")
        with pytest.raises(LibraryError, match="keeps no sequences"):
            encoder.save_state()


@pytest.mark.slow
def test_a_saved_state_is_restored(model: Path) -> None:
    def cached(llm: Llama) -> int:
        """Return the tokens of the prompt that were in the cache."""
        return llm._model.complete(PROMPT * 10, n_predict=2, seed=1).n_cached

    with Llama(str(model), n_threads=1) as one, Llama(str(model), n_threads=1) as other:
        assert cached(one) == 0
        state = one.save_state()
        assert cached(one) > 0
        one.reset()
        assert cached(one) == 0
        other.load_state(state)
        assert cached(other) > 0
        with pytest.raises(LibraryError, match="embedding=True"):
            one.embed("x")


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """Record the options that models are loaded with, without loading any."""
    found: list[EngineOptions] = []

    class Stop(Exception):
        pass

    def load(path: object, options: EngineOptions) -> None:
        found.append(options)
        raise Stop

    monkeypatch.setattr(library.LoadedModel, "load", load)
    return found


def options_of(loaded: list[EngineOptions], **arguments: Any) -> EngineOptions:
    with pytest.raises(Exception) as caught:
        Llama("m.gguf", **arguments)
    if isinstance(caught.value, (LlamadoError, TypeError)):
        raise caught.value
    return loaded[-1]


PLAIN = EngineOptions(n_ctx=512, n_batch=512)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({}, {}),
        ({"n_ctx": 2048, "n_batch": 64}, {"n_ctx": 2048, "n_batch": 64}),
        ({"n_threads": 3, "n_threads_batch": 4}, {"n_threads": 3, "n_threads_batch": 4}),
        ({"use_mmap": False, "use_mlock": True, "numa": True}, {"mmap": False, "mlock": True, "numa": "distribute"}),
        ({"type_k": 8, "type_v": "q8_0"}, {"type_k": "q8_0", "type_v": "q8_0"}),
        ({"chat_format": "llama-2"}, {"chat_template": "llama2-sys"}),
        ({"chat_format": "chatml-function-calling"}, {"chat_template": "chatml"}),
        ({"chat_format": "gemma"}, {"chat_template": "gemma"}),
        ({"embedding": True, "pooling_type": 1}, {"embeddings": True, "pooling": "mean"}),
        ({"lora_path": "a.gguf", "lora_scale": 0.5}, {"lora": (("a.gguf", 0.5),)}),
        (
            {"draft_model": llamado.LlamaPromptLookupDecoding(num_pred_tokens=2)},
            {"drafts": DraftOptions(kinds=("suffix",))},
        ),
        ({"kv_overrides": {"general.name": "x"}}, {"metadata": (("general.name", "x"),)}),
        ({"rope_freq_base": 1e6}, {"rope": RopeOptions(freq_base=1e6)}),
        ({"rope_freq_scale": 0.25}, {"rope": RopeOptions(freq_scale=0.25)}),
        ({"yarn_beta_fast": 16.0, "yarn_orig_ctx": 99}, {"rope": RopeOptions(beta_fast=16.0, n_ctx_orig=99)}),
        ({"rope_scaling_type": 2}, {"rope": RopeOptions(scaling="yarn")}),
        ({"n_gpu_layers": 0, "flash_attn": True, "offload_kqv": True, "logits_all": True, "main_gpu": 0}, {}),
        ({"n_gpu_layers": -1, "main_gpu": 1}, {"split": SplitOptions(gpus=True, joins=False, n_gpu_layers=ALL_LAYERS)}),
        (
            {"n_gpu_layers": 9, "main_gpu": 1, "split_mode": 0, "offload_kqv": False},
            {"split": SplitOptions(gpus=True, joins=False, n_gpu_layers=9, main_gpu=1, mode="none", kv_offload=False)},
        ),
        (
            {"rpc_servers": "h:1,h:2", "n_gpu_layers": -1, "tensor_split": [1, 2, 3]},
            {
                "split": SplitOptions(
                    rpc=("h:1", "h:2"), gpus=True, joins=False, n_gpu_layers=ALL_LAYERS, tensor_split=(1, 2, 3)
                )
            },
        ),
    ],
)
def test_arguments_become_options_of_the_engine(
    loaded: list[EngineOptions], arguments: dict[str, Any], changes: dict[str, Any]
) -> None:
    found = options_of(loaded, **arguments)
    assert {name: getattr(found, name) for name in vars(PLAIN)} == {**vars(PLAIN), **changes}


def test_rotation_is_turned_off_by_the_variable_of_libllama(
    loaded: list[EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_of(loaded).rotated
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert not options_of(loaded).rotated


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"chat_handler": object()}, "chat_handler"),
        ({"tokenizer": object()}, "tokenizer"),
        ({"vocab_only": True}, "vocab_only"),
        ({"rpc_servers": "h:1", "tensor_split": [0, 0]}, "tensor_split: all shares are 0"),
        ({"rpc_servers": "h:1", "tensor_split": [1, -1]}, "tensor_split: the share -1 is less than 0"),
        ({"draft_model": object()}, "draft_model"),
        ({"type_k": 999}, "type_k"),
        ({"rpc_servers": "h:port"}, "port"),
    ],
)
def test_unsupported_arguments_are_rejected(loaded: list[EngineOptions], arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(LlamadoError, match=why):
        options_of(loaded, **arguments)


def test_an_unknown_argument_is_a_type_error(loaded: list[EngineOptions]) -> None:
    with pytest.raises(TypeError, match="n_contxt"):
        options_of(loaded, n_contxt=1)


def test_a_collected_model_stops_its_engine(model: Path) -> None:
    llm = Llama(str(model), n_threads=1)
    engine = llm._model.engine
    thread = engine._thread  # type: ignore[union-attr]
    assert thread.is_alive()
    del llm
    assert not thread.is_alive()


@pytest.mark.slow
def test_verbose_false_logs_no_warnings(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    Llama(str(model), n_threads=1, n_ctx=4096).close()
    assert "trained with no more" in caplog.text
    caplog.clear()
    Llama(str(model), n_threads=1, n_ctx=4096, verbose=False).close()
    assert not caplog.records
