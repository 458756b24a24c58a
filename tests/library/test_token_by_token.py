"""`eval`, `sample`, `generate`, logits processors, stopping criteria and caches, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_llama
from waiting import until

from llamado import (
    Llama,
    LlamaDiskCache,
    LlamadoError,
    LlamaGrammar,
    LlamaRAMCache,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)

PROMPT = "Hello world"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("tokens") / "tiny.gguf", n_vocab=320, n_ctx=256)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[Llama]:
    with Llama(str(path), n_threads=1, n_ctx=256, n_slots=2) as found:
        yield found


@pytest.fixture(scope="module")
def all_logits(path: Path) -> Iterator[Llama]:
    with Llama(str(path), n_threads=1, n_ctx=256, logits_all=True) as found:
        yield found


def by_hand(llm: Llama, n: int, **options: Any) -> str:
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    tokens: list[int] = []
    for _ in range(n):
        token = llm.sample(**options)
        if token in llm._model.tokenizer.eog:
            break
        tokens.append(token)
        llm.eval(tokens[-1:])
    return llm.detokenize(tokens).decode("utf-8", "replace")


def text(llm: Llama, n: int = 8, **options: Any) -> str:
    return str(llm(PROMPT, max_tokens=n, **options)["choices"][0]["text"])


# --- eval and sample --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"temp": 0.0},
        {"temp": 0.9, "seed": 5, "top_k": 20, "repeat_penalty": 1.3},
        {"temp": 0.0, "logit_bias": {70: 3.0, 71: float("-inf")}, "presence_penalty": 1.0},
    ],
    ids=["greedy", "drawn", "biased"],
)
def test_eval_and_sample_give_the_bytes_of_a_completion(llm: Llama, options: dict[str, Any]) -> None:
    rest = {name: value for name, value in options.items() if name != "temp"}
    assert by_hand(llm, 8, **options) == text(llm, temperature=options["temp"], **rest)


def test_each_step_computes_only_new_tokens(llm: Llama) -> None:
    def computed() -> int:
        return llm._engine().snapshot().counters.prompt_tokens_total

    llm.reset()
    tokens = llm.tokenize(PROMPT.encode())
    before = computed()
    llm.eval(tokens)
    assert computed() - before == len(tokens) == llm.n_tokens
    for n in (1, 3):
        before = computed()
        llm.eval(tokens[:n])
        token = llm.sample(temp=0.0)
        assert computed() - before == n
    assert list(llm.eval_tokens) == llm.input_ids[: llm.n_tokens].tolist() == [*tokens, *tokens[:1], *tokens[:3]]
    assert token == llm._scores[-1].argmax() == np.argmax(llm.eval_logits[0])
    llm.reset()
    assert llm.n_tokens == 0 and not llm.eval_tokens


def test_a_sequence_can_be_truncated(llm: Llama) -> None:
    tokens = llm.tokenize(PROMPT.encode())
    llm.reset()
    llm.eval(tokens)
    row = llm.scores[-1].copy()
    llm.eval(tokens[:2])
    assert not np.array_equal(llm.scores[-1], row)
    llm.n_tokens -= 2
    assert np.array_equal(llm.scores[-1], row)
    for n in (-1, len(tokens) + 1):
        with pytest.raises(LlamadoError, match="n_tokens"):
            llm.n_tokens = n


def test_other_requests_do_not_change_the_sequence(llm: Llama) -> None:
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    first = llm.sample(temp=0.0)
    llm("Something else", max_tokens=4)
    llm.eval([first])
    assert llm.detokenize([first, llm.sample(temp=0.0)]).decode("utf-8", "replace") == text(llm, 2, temperature=0.0)


def test_logits_of_all_tokens(llm: Llama, all_logits: Llama) -> None:
    tokens = all_logits.tokenize(PROMPT.encode())
    all_logits(PROMPT, max_tokens=1)  # its cells are cached now, but not their logits
    all_logits.eval(tokens[:5])
    all_logits.eval(tokens[5:])
    assert all_logits.scores.shape == (all_logits.n_ctx(), all_logits.n_vocab()) and all_logits._scores.shape[0] == len(
        tokens
    )
    assert np.array(all_logits.eval_logits).shape == all_logits._scores.shape
    llm.reset()
    for i, token in enumerate(tokens):
        llm.eval([token])
        assert np.array_equal(llm._scores[-1], all_logits.scores[i])
    assert all_logits.sample(temp=0.0, idx=3) == all_logits.scores[3].argmax()


def test_there_are_no_logits_before_evaluation(llm: Llama) -> None:
    llm.reset()
    with pytest.raises(LlamadoError, match="no logits at place -1 of 0"):
        llm.sample()
    llm.eval([])
    assert llm.n_tokens == 0
    with pytest.raises(LlamadoError, match="no logits at place 4 of 0"):
        llm.sample(idx=4)
    with pytest.raises(LlamadoError, match="context"):
        llm.eval([1] * 1000)
    assert llm.n_tokens == 0


def test_a_grammar_begins_where_it_is_first_used(llm: Llama) -> None:
    grammar = LlamaGrammar.from_string('root ::= "a" [bc] "d"')
    assert by_hand(llm, 4, temp=0.0, grammar=grammar)[:3] in ("abd", "acd")


def test_a_saved_state_includes_the_sequence(llm: Llama) -> None:
    tokens = llm.tokenize(PROMPT.encode())
    llm.reset()
    llm.eval(tokens)
    state, token = llm.save_state(), llm.sample(temp=0.0)
    llm.reset()
    llm.load_state(state)
    assert list(llm.eval_tokens) == tokens and llm.sample(temp=0.0) == token


# --- generate ---------------------------------------------------------------------------------------------------------


def test_generate_continues_the_evaluated_sequence(llm: Llama) -> None:
    tokens = llm.tokenize(PROMPT.encode())
    whole = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(5), strict=False)]
    llm.reset()
    llm.eval(tokens[:4])
    answer = llm.generate(tokens[4:], temp=0.0, reset=False)
    assert [next(answer), next(answer)] == whole[:2]
    assert list(llm.eval_tokens) == [*tokens, whole[0]]
    answer.close()
    assert llm.sample(temp=0.0) == whole[1]


def test_tokens_sent_into_generate_are_appended(llm: Llama) -> None:
    tokens, more = llm.tokenize(PROMPT.encode()), llm.tokenize(b"more", add_bos=False)
    answer = llm.generate(tokens, temp=0.0)
    first = next(answer)
    second = answer.send(more)
    assert second == next(iter(llm.generate([*tokens, first, *more], temp=0.0)))
    limited = llm.generate(tokens, temp=0.0, grammar=LlamaGrammar.from_string('root ::= "abc"'))
    next(limited)
    with pytest.raises(LlamadoError, match="grammar"):
        limited.send(more)


# --- functions of the caller ------------------------------------------------------------------------------------------


def test_a_processor_gets_the_sequence_and_changes_the_logits(llm: Llama) -> None:
    prompt = llm.tokenize(PROMPT.encode(), special=True)
    seen: list[list[int]] = []

    def only(input_ids: Any, scores: Any) -> Any:
        assert input_ids.dtype == np.intc and scores.dtype == np.float32 and scores.shape == (llm.n_vocab(),)
        seen.append(input_ids.tolist())
        scores[:] = -np.inf
        scores[70 + len(seen)] = 0
        return scores

    found = llm(PROMPT, max_tokens=3, temperature=0.0, logits_processor=[only])["choices"][0]["text"]
    assert found == llm.detokenize([71, 72, 73]).decode()
    assert seen == [prompt, [*prompt, 71], [*prompt, 71, 72]]
    seen.clear()
    assert by_hand(llm, 3, temp=0.8, logits_processor=only) == found


def test_processors_run_in_order_and_do_not_change_logprobs(llm: Llama) -> None:
    def biased(input_ids: Any, scores: Any) -> Any:
        scores[80] += 5
        return scores

    def doubled(input_ids: Any, scores: Any) -> Any:
        return [2 * score for score in scores.tolist()]

    both = LogitsProcessorList([biased, doubled])
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {"temperature": temperature, "seed": 3}
        assert text(llm, logits_processor=[biased], **options) == text(llm, logit_bias={80: 5.0}, **options)
        assert text(llm, logits_processor=lambda ids, scores: scores, **options) == text(llm, **options)
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    doubly = text(llm, logits_processor=both, temperature=1.6, **options)
    assert doubly == text(llm, logits_processor=[biased], temperature=0.8, **options)
    raw = [llm(PROMPT, max_tokens=1, logprobs=2, temperature=0.0, logits_processor=one) for one in (None, doubled)]
    assert raw[0]["choices"][0]["logprobs"] == raw[1]["choices"][0]["logprobs"]


def test_a_processor_and_a_grammar(llm: Llama) -> None:
    grammar = LlamaGrammar.from_string('root ::= ("x" | "y")')
    x, y = (llm.tokenize(letter, add_bos=False)[-1] for letter in (b"x", b"y"))

    def prefers(input_ids: Any, scores: Any) -> Any:
        scores[y], scores[x] = 50, 40
        return scores

    assert text(llm, temperature=0.0, grammar=grammar, logits_processor=[prefers]) == "y"


def test_a_processor_sets_the_least_length_of_an_answer(llm: Llama) -> None:
    eos = llm.token_eos()
    options: dict[str, Any] = {"temperature": 0.0, "logit_bias": {eos: 100.0}}
    assert llm(PROMPT, max_tokens=9, **options)["usage"]["completion_tokens"] == 1
    least = MinTokensLogitsProcessor(4, eos)
    assert llm(PROMPT, max_tokens=9, logits_processor=[least], **options)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_criteria_end_an_answer(llm: Llama, stream: bool) -> None:
    prompt = llm.tokenize(PROMPT.encode(), special=True)
    endless = {token: float("-inf") for token in llm._model.tokenizer.eog}
    options: dict[str, Any] = {"temperature": 0.0, "logit_bias": endless}
    criteria = StoppingCriteriaList([lambda ids, logits: False, lambda ids, logits: len(ids) == len(prompt) + 3])
    found = llm(PROMPT, max_tokens=9, stopping_criteria=criteria, stream=stream, **options)
    choices = [chunk["choices"][0] for chunk in (found if stream else [found])]
    assert "".join(choice["text"] for choice in choices) == text(llm, 3, **options)
    assert choices[-1]["finish_reason"] == "stop"
    chat = [{"role": "user", "content": "Hi"}]
    answer = llm.create_chat_completion(chat, max_tokens=9, stopping_criteria=[lambda ids, logits: True])
    assert answer["choices"][0]["message"]["content"] == ""
    assert list(llm.generate(prompt, temp=0.0, stopping_criteria=lambda ids, logits: logits[0] < 1e9)) == []


@pytest.mark.parametrize(
    ("name", "function", "error"),
    [
        ("logits_processor", lambda ids, scores: 1 / 0, ZeroDivisionError),
        ("stopping_criteria", lambda ids, scores: 1 / 0, ZeroDivisionError),
        ("logits_processor", lambda ids, scores: scores[:3], LlamadoError),
        ("logits_processor", lambda ids, scores: scores * np.nan, LlamadoError),
        ("logits_processor", 3, LlamadoError),
        ("stopping_criteria", ["x"], LlamadoError),
    ],
)
def test_errors_of_functions_reach_the_caller(llm: Llama, name: str, function: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        text(llm, **{name: function})
    assert text(llm, 2)


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cache_in_memory_keeps_prompts(path: Path) -> None:
    long, other = "A long story begins here. " * 6, "Something entirely different, and long enough, too. " * 3

    def computed() -> int:
        return llm._engine().snapshot().counters.prompt_tokens_total

    with Llama(str(path), n_threads=1, n_ctx=256) as llm:
        n = len(llm.tokenize(long.encode(), special=True))
        assert llm.cache is None
        cache = LlamaRAMCache(capacity_bytes=64 << 20)
        llm.set_cache(cache)
        assert llm.cache is cache and cache.cache_size == 0
        for _ in range(2):
            before = computed()
            answer = llm(long, max_tokens=2, temperature=0.0)["choices"]
            llm(other, max_tokens=2)
        assert computed() - before < n and cache.cache_size > 0
        llm.set_cache(None)
        assert cache.cache_size == 0 and llm.cache is None
        for _ in range(2):
            before = computed()
            assert llm(long, max_tokens=2, temperature=0.0)["choices"] == answer
            llm(other, max_tokens=2)
        assert computed() - before >= n
        with pytest.raises(LlamadoError, match="LlamaRAMCache"):
            llm.set_cache({})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_next_process_uses_a_cache_on_disk(path: Path, tmp_path: Path) -> None:
    long = "A long story begins here. " * 7
    folder = tmp_path / "prompts"
    answers, sizes = [], []
    for _ in range(2):
        with Llama(str(path), n_threads=1, n_ctx=256) as llm:
            llm.set_cache(cache := LlamaDiskCache(str(folder), capacity_bytes=64 << 20))
            # cells are read or computed again, depending on the speed of the disk; the bytes are equal
            until(lambda: cache.cache_size > 0 or not answers)
            sizes.append(cache.cache_size)
            answers.append(llm(long, max_tokens=2, temperature=0.0)["choices"])
    assert answers[0] == answers[1] and sizes[0] == 0 < sizes[1]
    assert any(folder.iterdir())
