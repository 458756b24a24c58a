"""Same ids and same text as the real llama.cpp, on its own server, for both real vocabularies."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port

from llamado.gguf.reader import GGUFFile
from llamado.text.template.chat import ChatTemplate
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.interop

PROSE = [
    "The quick brown fox jumps over the lazy dog. It's said they'll've WON'T, I'D and we'RE; isn't 'tis?",
    "Ça va très bien, merci ! L'été dernier, nous étions à Aix-en-Provence — «déjà vu».",
    "Größe und Straße: Der Fußgänger überquerte die Brücke. ẞ",
    "El niño comió piñas y ñandúes; ¿cuándo volverá? ¡Mañana!",
    "Привет, мир! Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Γειά σου Κόσμε· ο ταχύς αλεπούς πηδά. Ὦ ἄνδρες Ἀθηναῖοι",
    "שלום עולם, זה מבחן של עברית עם נִיקּוּד.",
    "مرحبا بالعالم، هذا نصٌّ عربيّ مع تشكيلٍ و أرقام ١٢٣٤٥٦.",
    "नमस्ते दुनिया, यह हिंदी में एक परीक्षण है। १२३४",
    "আমি বাংলায় গান গাই। ১২৩",
    "வணக்கம் உலகம், இது ஒரு சோதனை.",
    "సాహిత్యం మరియు తెలుగు భాష పరీక్ష.",
    "สวัสดีชาวโลก นี่คือการทดสอบภาษาไทย ๑๒๓",
    "你好，世界！这是一个测试。我喜欢编程，数字１２３和〇一二三。",
    "こんにちは世界。これはテストです。カタカナ、ひらがな、漢字ー。",
    "안녕하세요 세계! 이것은 시험입니다. ᄒᆞᆫ글",
    "გამარჯობა მსოფლიო, ეს არის ტესტი.",
    "Բարեւ աշխարհ, սա փորձարկում է։",
    "ሰላም ልዑል፣ ይህ ፈተና ነው። ፩፪፫",
    "សួស្តី​ពិភពលោក នេះជាការសាកល្បង ១២៣",
    "မင်္ဂလာပါ ကမ္ဘာလောက ၁၂၃",
    "བཀྲ་ཤིས་བདེ་ལེགས། ༡༢༣",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ꭰꭱꭲ",
    "Xin chào thế giới, đây là tiếng Việt: Trường Đại học Bách khoa.",
    "İstanbul'da ılık bir gün; IĞDIR, şöğüç.",
    "𐌲𐌿𐍄𐌹𐍃𐌺 𒀭𒂗𒆤 𓂀𓃒 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟏𝟐𝟑 𞤀𞤣𞤤𞤢𞤥",
]
CODE = [
    "def f(x: int) -> str:\n    return f\"{x!r:>10}\" if x else ''\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] << 2 | ~c; }  // comment\r\n#include <vector>\r\n",
    "SELECT * FROM t WHERE a >= 1.5e-10 AND b != 'it''s' ORDER BY c DESC;",
    '{"key": [1, 2.5, -3e4, null, true], "s": "\\u00e9\\n"}',
    "<html><body><p class='x'>Hi&nbsp;there</p><table><tr><td>1</td></tr></table></body></html>",
    'git commit -m "fix: #123" && rm -rf ./build/* || echo $? >&2',
    "\\begin{equation} \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2} \\end{equation}",
    "x = 0xDEADBEEF + 0b1011 - 0o777 + 1_000_000.000_1j",
    "http://user:pa%20ss@example.com:8080/a/b?c=d&e=f#g",
]
MARKS = [
    "e\u0301 n\u0303 a\u0300\u0301\u0302 Z\u0351\u036b\u0343a\u030a\u0329l\u0338g\u0322o\u0489",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇫🇷🇯🇵 ❤️‍🔥 1️⃣ #️⃣ 😀😃😄 ☺️ ✊🏿",
    "\u200b\u200c\u200d\ufeff \u00ad \u2060 \u202e abc \u202c",
    "½ ² ³ Ⅻ ① ㊿ ٣ ೧ 𝟗 ௧ 一 二 〇 ㈠ ⁴₅",
    "\u0085 \u00a0 \u1680 \u2003\u2003 \u2028\u2029 \u202f \u205f \u3000\u3000x \u180e",
    "‘single’ “double” „low“ ‚a‘ …—–‐ ‰ † ‡ • ´ ` ¨ ^ ~ ¬ ¦",
    "ﬁ ﬂ ｆｕｌｌ ＷＩＤＴＨ ｶﾀｶﾅ ㍿ ℡ ™ © ® ℃",
    "\u0378 \u0557 \U000e0001 \U000e0020 \ufdd0 \uffff \U0010ffff \ue000 \U000f0000",
    "\x00 \x01\x02\x03 \x07\x08 \x1b[31m \x1c\x1d\x1e\x1f \x7f",
    "\ufffd\ufffd \u2581 \u2581\u2581x Ġ Ċ ĉ â ▁the ▁",
]
SPECIAL = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> <|im_end|> <|endoftext|><|endoftext|x><|im_end",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk><mask> <s></s> [multimodal] <unused12> <unused6241><unused9999>",
    "<repo_name>a<file_sep>b<filename>c<gh_stars>9<issue_start><jupyter_code><empty_output>",
    "<<|im_start|>> <| im_start|> < |im_start|> <|im_start|><0x0A><0xFF><0x41>",
    "<start_of_image><end_of_image><table><tr></td></h1><b></b><blockquote>",
    "a\n\n\n\nb\n \n\n c \n\t\n\t\t\t\td",
    "<|im_start|>  system \n\n  You are.  <|im_end|>   \n",
    "[INST] <<SYS>>x<</SYS>> [/INST] <|eot_id|><|start_header_id|>",
]
SPACES = [
    *(" " * n for n in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100)),
    *("\n" * n for n in (1, 2, 3, 4, 5, 31, 32, 33, 70)),
    *("\t" * n for n in (1, 2, 3, 16, 31, 32, 40)),
    *(" " * n + "x" for n in (1, 2, 3, 4, 16, 17, 33)),
    *("x" + " " * n for n in (1, 2, 3, 4, 16, 17, 33)),
    *("1" + " " * n + "2" for n in (1, 2, 3, 8)),
    *("a" + " " * n + "\n" + " " * n + "b" for n in (1, 2, 4, 8)),
    "\r\n\r\n",
    "\r\r\n\n",
    " \n \n ",
    "\n\n \n\n",
    "\t \t ",
    "  \u00a0  a",
    "a \u3000\u3000 b",
    " '",
    "  's",
    "x  's y",
    "   !   ?   .",
    "\v\f\r\v",
    "a\u0085b",
    "\u2028\n",
    " \u2003\u2003 1",
]
LONG = [
    "a" * 300, "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 4,
    "ab" * 200, "0123456789" * 30, "日本語" * 100, "😀" * 60, "!?" * 150, "=" * 333, "-" * 128, "hello" * 80, "ß" * 100,
    "กำ" * 80, "aA" * 120, "_x" * 100, "🇫🇷" * 40, "é" * 90, "e\u0301" * 90,
]  # fmt: skip


def strings() -> list[str]:
    """The strings to compare, over a thousand; the same ones every time."""
    rng = random.Random(20240229)
    fixed = ["", *PROSE, *CODE, *MARKS, *SPECIAL, *SPACES, *LONG]
    out = list(fixed)
    out += [f"{n}" for n in (0, 7, 10, 99, 100, 999, 1234, 31415926, 10**20)] + [
        "3.14",
        "1,000,000",
        "-5",
        "1e9",
        "12ab34",
    ]
    # Fragments of all of these, glued at odd places.
    whole = "".join(fixed)
    for _ in range(300):
        a, b = (rng.randrange(len(whole)) for _ in range(2))
        glue = rng.choice(["", " ", "\n", "  ", "'", "\t"])
        out.append(whole[a : a + rng.randrange(1, 60)] + glue + whole[b : b + rng.randrange(1, 60)])
    # Any characters, of every plane.
    planes = [(0x20, 0x7F), (0x80, 0x250), (0x250, 0x2000), (0x2000, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000)]
    planes += [(0x10000, 0x20000), (0x20000, 0x40000), (0x40000, 0x110000)]
    for i in range(450):
        low, high = planes[i % len(planes)]
        points = [
            rng.randrange(low, high) if rng.random() < 0.7 else rng.randrange(0x80) for _ in range(rng.randrange(1, 40))
        ]
        out.append("".join(map(chr, points)))
    # Close to what rules look at.
    alphabet = " \n\t\r'sSdDlLrReE1٣aAéб漢!.,-_<|>▁\u0301\u00a0\u200d😀"
    for _ in range(300):
        out.append("".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 30))))
    return out


class Peer:
    """A running llama-server and the tokenizer made from the same file."""

    def __init__(self, url: str, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.tokenizer = tokenizer
        self.template = template

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def peer(request: pytest.FixtureRequest, peer_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    port = free_port()
    log = tmp_path_factory.mktemp("peer") / "llama-server.log"
    command = [str(peer_bin / "llama-server"), "-m", str(path), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-ngl", "0", "-c", "512", "-np", "1", "-t", "1", "--no-warmup", "--jinja"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 120
            while True:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
                try:
                    if httpx.get(url + "/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            with GGUFFile.open(path) as file:
                tokenizer = load_tokenizer(file.metadata)
                yield Peer(url, tokenizer, ChatTemplate.from_metadata(file.metadata, tokenizer))
        finally:
            process.terminate()


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("add_special", [True, False])
def test_ids(peer: Peer, add_special: bool, parse_special: bool) -> None:
    flags = {"add_special": add_special, "parse_special": parse_special}
    texts = strings()
    wrong = []
    for text in texts:
        theirs = peer.post("/tokenize", {"content": text, **flags})["tokens"]
        if peer.tokenizer.encode(text, **flags) != theirs:
            wrong.append((text, theirs))
    print(f"{len(texts) - len(wrong)} of {len(texts)} equal", file=sys.stderr)
    assert len(texts) >= 600
    assert not wrong, wrong[:5]


def test_text(peer: Peer) -> None:
    tokenizer = peer.tokenizer
    rng = random.Random(5)
    sequences = [tokenizer.encode(text, parse_special=parse) for text in strings() for parse in (True, False)]
    # Ids in no order a text gives: broken characters, control tokens, anything. In llama-server's answer, bytes that
    # are no UTF-8 are replaced, so that is what is compared.
    sequences += [[rng.randrange(tokenizer.n_vocab) for _ in range(rng.randrange(1, 12))] for _ in range(300)]
    wrong = []
    for ids in sequences:
        theirs = peer.post("/detokenize", {"tokens": ids})["content"]
        if tokenizer.join(ids).decode("utf-8", "replace") != theirs:
            wrong.append((ids, theirs))
    print(f"{len(sequences) - len(wrong)} of {len(sequences)} equal", file=sys.stderr)
    assert not wrong, wrong[:5]


def test_pieces(peer: Peer) -> None:
    tokenizer = peer.tokenizer
    ids = sorted(tokenizer.vocabulary.specials.tolist()[:300]) + list(range(0, tokenizer.n_vocab, 97))
    text = [tokenizer.piece(i, special=True) for i in ids]
    theirs = [p["piece"] for p in peer.post("/tokenize", {"content": ids, "with_pieces": True})["tokens"]]
    assert [bytes(p) if isinstance(p, list) else p.encode() for p in theirs] == text


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nthere  "}],
    [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "<|im_end|> 日本語 😀 {{ x }} {% if %}"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": "go"}],
    [{"role": "tool", "content": "42", "tool_call_id": "x"}, {"role": "user", "content": "and?"}],
]


@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
def test_chat_template(peer: Peer, conversation: int) -> None:
    messages = CONVERSATIONS[conversation]
    for generate in (True, False):
        body = {"messages": messages, "add_generation_prompt": generate}
        theirs = peer.post("/apply-template", body)["prompt"]
        assert peer.template.render(messages, add_generation_prompt=generate) == theirs
