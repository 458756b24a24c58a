"""Supported architectures, by their name in `general.architecture`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from llamado.models.base import Model

_FOLDER = "llamado.models.architectures"


class Architecture(NamedTuple):
    """Import path of an architecture (`family.module:Class`) and the models that use it.

    `tested` is the real model that the tests run. `variants` maps names to model families whose files configure the
    architecture differently.
    """

    path: str
    models: str
    tested: str = ""
    variants: Mapping[str, str] = MappingProxyType({})

    def load(self) -> type[Model]:
        """Import and return its class."""
        module, name = self.path.split(":")
        found: type[Model] = getattr(import_module(f"{_FOLDER}.{module}"), name)
        return found


ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture("experts.afmoe:AfMoeModel", "Trinity Nano and Mini"),
    "apertus": Architecture("llama.apertus:ApertusModel", "Apertus 8B, 70B"),
    "arcee": Architecture("llama.arcee:ArceeModel", "AFM 4.5B"),
    "arctic": Architecture("experts.arctic:ArcticModel", "Snowflake Arctic"),
    "arwkv7": Architecture("rwkv.arwkv7:Arwkv7Model", "ARWKV 7B"),
    "baichuan": Architecture("others.baichuan:BaichuanModel", "Baichuan 7B and 13B, Baichuan 2"),
    "bailingmoe": Architecture("experts.bailingmoe:BailingMoeModel", "Ling Lite, Plus and Coder"),
    "bailingmoe2": Architecture("experts.dots1:Dots1Model", "Ling 2.0 and Ring 2.0"),
    "bailingmoe3": Architecture("moonshot.bailingmoe3:BailingMoe3Model", "Ling 3.0"),
    "bert": Architecture(
        "encoders.bert:BertModel", "BERT, MiniLM, BGE, E5, GTE; rerankers made of them", "all-MiniLM-L6-v2"
    ),
    "bitnet": Architecture("others.bitnet:BitNetModel", "BitNet b1.58"),
    "bloom": Architecture("gpt.bloom:BloomModel", "BLOOM, BLOOMZ"),
    "chatglm": Architecture("glm.chatglm:ChatGlmModel", "ChatGLM3, GLM-4-9B-Chat, GLM-Edge"),
    "codeshell": Architecture("gpt.starcoder2:StarCoder2Model", "CodeShell 7B"),
    "cogvlm": Architecture("llama.cogvlm:CogVlmModel", "CogVLM 17B: its text"),
    "cohere2": Architecture("cohere.cohere2:Cohere2Model", "Command R7B, Command A"),
    "cohere2moe": Architecture("cohere.cohere2moe:Cohere2MoeModel", "mixtures of experts of Cohere"),
    "command-r": Architecture("cohere.command_r:CommandRModel", "Command R, Command R+, Aya 23, Aya Expanse"),
    "dbrx": Architecture("experts.dbrx:DbrxModel", "DBRX"),
    "deci": Architecture("llama.deci:DeciModel", "Nemotron 51B, Nemotron Super 49B and Ultra 253B, DeciLM 7B"),
    "deepseek": Architecture("deepseek.deepseek:DeepseekModel", "DeepSeek MoE 16B"),
    "deepseek2": Architecture(
        "deepseek.deepseek2:Deepseek2Model",
        "DeepSeek V2, GigaChat 3, Mistral Large 3",
        variants={"v3": "DeepSeek V3 and R1", "kimi-k2": "Kimi K2", "glm-4.7-flash": "GLM-4.7-Flash"},
    ),
    "deepseek2-ocr": Architecture("experts.bailingmoe:Deepseek2OcrModel", "DeepSeek-OCR: its text"),
    "deepseek32": Architecture("deepseek.deepseek32:Deepseek32Model", "DeepSeek V3.2"),
    "dots1": Architecture("experts.dots1:Dots1Model", "dots.llm1"),
    "dots3note": Architecture("deepseek.dots3note:Dots3NoteModel", "dots3 Note 288B-A19B"),
    "ernie4_5": Architecture("ernie.ernie4_5:Ernie45Model", "ERNIE 4.5 0.3B"),
    "ernie4_5-moe": Architecture("ernie.ernie4_5_moe:Ernie45MoeModel", "ERNIE 4.5 21B-A3B, 300B-A47B"),
    "eurobert": Architecture("encoders.eurobert:EuroBertModel", "EuroBERT"),
    "exaone": Architecture("qwen.qwen2:Qwen2Model", "EXAONE 3, 3.5 and Deep"),
    "exaone-moe": Architecture("exaone.exaone_moe:ExaoneMoeModel", "K-EXAONE"),
    "exaone4": Architecture("exaone.exaone4:Exaone4Model", "EXAONE 4.0"),
    "falcon": Architecture("gpt.falcon:FalconModel", "Falcon 7B, 40B, 180B, Falcon 2"),
    "falcon-h1": Architecture("mamba.falcon_h1:FalconH1Model", "Falcon-H1, Falcon-H1R"),
    "gemma": Architecture("gemma.gemma:GemmaModel", "Gemma, CodeGemma"),
    "gemma-embedding": Architecture("gemma.gemma_embedding:GemmaEmbeddingModel", "EmbeddingGemma"),
    "gemma2": Architecture("gemma.gemma2:Gemma2Model", "Gemma 2"),
    "gemma3": Architecture("gemma.gemma3:Gemma3Model", "Gemma 3", "Gemma 3 270M Q4_K_M"),
    "gemma3n": Architecture("gemma.gemma3n:Gemma3nModel", "Gemma 3n E2B, E4B"),
    "gemma4": Architecture("gemma.gemma4:Gemma4Model", "Gemma 4 E2B, E4B, 26B-A4B, 31B"),
    "glm-dsa": Architecture("deepseek.deepseek32:GlmDsaModel", "GLM-5, GLM-5.1, GLM-5.2"),
    "glm4": Architecture("glm.glm4:Glm4Model", "GLM-4-0414, GLM-Z1"),
    "glm4moe": Architecture("glm.glm4moe:Glm4MoeModel", "GLM-4.5, 4.6 and 4.7, their Air models, Solar Open"),
    "glm5-next": Architecture("glm.glm5_next:Glm5NextModel", "GLM-5.3 Flash: its text"),
    "gpt-oss": Architecture("experts.gpt_oss:GptOssModel", "gpt-oss 20B and 120B"),
    "gpt2": Architecture("gpt.gpt2:Gpt2Model", "GPT-2, DistilGPT-2"),
    "gptneox": Architecture("gpt.gptneox:GptNeoxModel", "GPT-NeoX, Pythia, Dolly 2, RedPajama"),
    "granite": Architecture("granite.granite:GraniteModel", "Granite 3 and 4, dense"),
    "granite_swa": Architecture("granite.granite_swa:GraniteSwaModel", "Granite with sliding windows"),
    "granitehybrid": Architecture("granite.granitehybrid:GraniteHybridModel", "Granite 4, hybrid"),
    "granitemoe": Architecture("granite.granitemoe:GraniteMoeModel", "Granite 3 1B-A400M, 3B-A800M"),
    "graniteswitch": Architecture("granite.graniteswitch:GraniteSwitchModel", "Granite Switch"),
    "grok": Architecture("experts.grok:GrokModel", "Grok 1 and 2"),
    "grovemoe": Architecture("qwen.grovemoe:GroveMoeModel", "GroveMoE 33B"),
    "hrm_text": Architecture("others.hrm_text:HrmTextModel", "HRM-Text 1B"),
    "hunyuan-dense": Architecture("hunyuan.hunyuan_dense:HunyuanDenseModel", "Hunyuan 0.5B to 7B"),
    "hunyuan-moe": Architecture("hunyuan.hunyuan_moe:HunyuanMoeModel", "Hunyuan-A13B"),
    "hunyuan_vl": Architecture("hunyuan.hunyuan_dense:HunyuanDenseModel", "HunyuanOCR, Hunyuan-VL: their text"),
    "hy_v3": Architecture("experts.dots1:Dots1Model", "HY 3"),
    "hy_v4": Architecture("hunyuan.hy_v4:HyV4Model", "HY 4"),
    "internlm2": Architecture("llama.internlm2:InternLm2Model", "InternLM2, InternLM2.5"),
    "jais": Architecture("gpt.jais:JaisModel", "Jais 13B, 30B"),
    "jais2": Architecture("gpt.nemotron:NemotronModel", "Jais 2"),
    "jamba": Architecture("mamba.jamba:JambaModel", "Jamba, Jamba 1.5, Jamba Reasoning"),
    "jina-bert-v2": Architecture("encoders.jina_bert_v2:JinaBertV2Model", "jina-embeddings-v2, jina-reranker-v1"),
    "jina-bert-v3": Architecture("encoders.jina_bert_v3:JinaBertV3Model", "jina-embeddings-v3"),
    "kimi-k3": Architecture("moonshot.kimi_k3:KimiK3Model", "Kimi K3: its text"),
    "kimi-linear": Architecture("moonshot.kimi_linear:KimiLinearModel", "Kimi Linear 48B-A3B"),
    "laguna": Architecture("experts.laguna:LagunaModel", "Laguna XS, M"),
    "lfm2": Architecture("liquid.lfm2:Lfm2Model", "LFM2, LFM2.5"),
    "lfm2moe": Architecture("liquid.lfm2moe:Lfm2MoeModel", "LFM2 8B-A1B, 24B-A2B"),
    "llama": Architecture(
        "llama.llama:LlamaModel",
        "Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama, Yi",
        "SmolLM2 135M Instruct Q4_1",
    ),
    "llama-embed": Architecture("encoders.eurobert:LlamaEmbedModel", "llama-embed-nemotron"),
    "llama4": Architecture("llama.llama4:Llama4Model", "Llama 4 Scout and Maverick"),
    "maincoder": Architecture("hunyuan.hunyuan_dense:MaincoderModel", "Maincoder 1B"),
    "mamba": Architecture("mamba.mamba:MambaModel", "Mamba, Falcon Mamba"),
    "mamba2": Architecture("mamba.mamba2:Mamba2Model", "Mamba-2, Codestral Mamba"),
    "maple": Architecture("experts.maple:MapleModel", "Maple"),
    "mellum": Architecture("experts.mellum:MellumModel", "Mellum 2"),
    "mimo2": Architecture("experts.mimo2:MiMo2Model", "MiMo-V2-Flash"),
    "minicpm": Architecture("others.minicpm:MiniCpmModel", "MiniCPM 1B, 2B and MoE, MiniCPM4"),
    "minicpm3": Architecture("others.minicpm3:MiniCpm3Model", "MiniCPM3 4B"),
    "minimax-01": Architecture("minimax.minimax_01:Minimax01Model", "MiniMax-Text-01, MiniMax-M1"),
    "minimax-m2": Architecture("minimax.minimax_m2:MinimaxM2Model", "MiniMax-M2"),
    "minimax-m3": Architecture("minimax.minimax_m3:MinimaxM3Model", "MiniMax-M3: its text"),
    "mistral3": Architecture("llama.mistral3:Mistral3Model", "Ministral 3, Devstral 2"),
    "mistral4": Architecture("deepseek.deepseek2:Mistral4Model", "Mistral Small 4"),
    "modern-bert": Architecture("encoders.modern_bert:ModernBertModel", "ModernBERT, Granite Embedding R2, GTE"),
    "mpt": Architecture("gpt.mpt:MptModel", "MPT 7B, 30B"),
    "muse-glimmer": Architecture("others.muse_glimmer:MuseGlimmerModel", "Muse Glimmer"),
    "nanbeige": Architecture("llama.nanbeige:NanbeigeModel", "Nanbeige with loops"),
    "nemotron": Architecture("gpt.nemotron:NemotronModel", "Nemotron-4, Minitron"),
    "nemotron_h": Architecture("mamba.nemotron_h:NemotronHModel", "Nemotron-H, Nemotron Nano 2"),
    "nemotron_h_moe": Architecture("mamba.nemotron_h_moe:NemotronHMoeModel", "Nemotron 3 Nano and Super"),
    "neo-bert": Architecture("encoders.eurobert:NeoBertModel", "NeoBERT"),
    "nomic-bert": Architecture("encoders.nomic_bert:NomicBertModel", "nomic-embed-text-v1, v1.5"),
    "nomic-bert-moe": Architecture("encoders.nomic_bert_moe:NomicBertMoeModel", "nomic-embed-text-v2-moe"),
    "olmo": Architecture("olmo.olmo:OlmoModel", "OLMo 1B, 7B"),
    "olmo2": Architecture("olmo.olmo2:Olmo2Model", "OLMo 2, OLMo 3"),
    "olmoe": Architecture("olmo.olmoe:OlmoeModel", "OLMoE"),
    "openelm": Architecture("qwen.qwen3:Qwen3Model", "OpenELM 270M to 3B"),
    "orion": Architecture("gpt.orion:OrionModel", "Orion 14B"),
    "paddleocr": Architecture("qwen.qwen2vl:Qwen2VlModel", "PaddleOCR-VL: its text"),
    "pangu-embedded": Architecture("qwen.qwen2:Qwen2Model", "openPangu-Embedded 1B, 7B"),
    "phi2": Architecture("phi.phi2:Phi2Model", "Phi-1, Phi-1.5, Phi-2"),
    "phi3": Architecture("phi.phi3:Phi3Model", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "phimoe": Architecture("phi.phimoe:PhiMoeModel", "Phi-3.5-MoE"),
    "plamo": Architecture("others.plamo:PlamoModel", "PLaMo 13B"),
    "plamo2": Architecture("mamba.plamo2:Plamo2Model", "PLaMo 2"),
    "plamo3": Architecture("others.plamo3:Plamo3Model", "PLaMo 3"),
    "plm": Architecture("others.minicpm3:PlmModel", "PLM 1.8B"),
    "qwen": Architecture("qwen.qwen:QwenModel", "Qwen 1.8B to 72B"),
    "qwen2": Architecture("qwen.qwen2:Qwen2Model", "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen"),
    "qwen2moe": Architecture("qwen.qwen2moe:Qwen2MoeModel", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B"),
    "qwen2vl": Architecture("qwen.qwen2vl:Qwen2VlModel", "Qwen2-VL, Qwen2.5-VL: their text"),
    "qwen3": Architecture("qwen.qwen3:Qwen3Model", "Qwen3, Qwen3-Embedding"),
    "qwen35": Architecture("qwen.qwen35:Qwen35Model", "Qwen3.5 0.8B to 27B"),
    "qwen35moe": Architecture("qwen.qwen35moe:Qwen35MoeModel", "Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B"),
    "qwen3moe": Architecture("qwen.qwen3moe:Qwen3MoeModel", "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder"),
    "qwen3next": Architecture("qwen.qwen3next:Qwen3NextModel", "Qwen3-Next-80B-A3B, Qwen3-Coder-Next"),
    "qwen3vl": Architecture("qwen.qwen3vl:Qwen3VlModel", "Qwen3-VL 2B to 32B: their text"),
    "qwen3vlmoe": Architecture("qwen.qwen3vl:Qwen3VlMoeModel", "Qwen3-VL-30B-A3B, 235B-A22B: their text"),
    "qwen4exp": Architecture("qwen.qwen4exp:Qwen4ExpModel", "Qwen3.8 Flash Next: its text"),
    "refact": Architecture("others.refact:RefactModel", "Refact 1.6B"),
    "rwkv6": Architecture("rwkv.rwkv6:Rwkv6Model", "RWKV-6, Finch"),
    "rwkv6qwen2": Architecture("rwkv.rwkv6qwen2:Rwkv6Qwen2Model", "QRWKV6 32B"),
    "rwkv7": Architecture("rwkv.rwkv7:Rwkv7Model", "RWKV-7, Goose"),
    "seed_oss": Architecture("others.seed_oss:SeedOssModel", "Seed-OSS"),
    "smallthinker": Architecture("experts.smallthinker:SmallThinkerModel", "SmallThinker 4B-A0.6B, 21B-A3B"),
    "smollm3": Architecture("llama.smollm3:SmolLm3Model", "SmolLM3"),
    "spark2_5": Architecture("others.spark2_5:Spark25Model", "Spark 2.5"),
    "stablelm": Architecture("gpt.stablelm:StableLmModel", "StableLM 3B, StableLM 2, Stable Code"),
    "starcoder": Architecture("gpt.gpt2:Gpt2Model", "StarCoder, StarCoderBase, SantaCoder"),
    "starcoder2": Architecture("gpt.starcoder2:StarCoder2Model", "StarCoder2"),
    "step35": Architecture("experts.step35:Step35Model", "Step 3.5 Flash"),
    "t5encoder": Architecture("encoders.t5encoder:T5EncoderModel", "encoders of T5, Flan-T5, T5 v1.1"),
    "talkie": Architecture("others.talkie:TalkieModel", "Talkie"),
    "xverse": Architecture("llama.internlm2:InternLm2Model", "XVERSE 7B, 13B, 65B"),
}


FOREIGN_NAMES = {
    "glm4moelite": "Ollama's name for GLM-4.7-Flash, in a layout of its own: use the file from the Hugging Face hub, "
    "whose architecture is deepseek2 (the name glm, or hf:unsloth/GLM-4.7-Flash-GGUF)",
}
"""Names that no llama.cpp tool writes, and the replacement to use."""

UNSUPPORTED = {
    "t5": "an encoder-decoder model: llama-server has no endpoint that uses both; encoders alone run as t5encoder",
    "chameleon": "llama.cpp aborts with a failed assertion if a batch has no outputs, and masks image tokens only in a "
    "batch's first row (b11434), so there is no reference to compare with",
    **dict.fromkeys(
        ("dream", "llada", "llada-moe", "rnd1"),
        "a diffusion model, which fills in a text in any order over several steps: llama.cpp runs it only in its own "
        "program, llama-diffusion-cli, not in llama-server",
    ),
    "gptj": "llama.cpp has the name but no implementation",
    "clip": "a projector file (mmproj), not a model: pass it with `--mmproj`, beside the model that it belongs to",
    "wavtokenizer-dec": "an audio decoder, which generates no text",
    **dict.fromkeys(("qwen3tts", "pockettts"), "speech models: they generate audio codes for another model, not text"),
    **dict.fromkeys(
        ("eagle3", "dflash"),
        "a draft head for another model (`-md`, `--spec-type`), which cannot run alone",
    ),
    "gemma4-assistant": "a draft head that reads the keys and values of Gemma 4: such heads are not supported",
    "deepseek4": "its attention also reads one compressed row per 4 or 128 tokens, and its first layers select experts "
    "by token: not supported yet",
    "clef": "it computes scores of options for llama-server's /v1/systemone, which is not supported, and no text",
}
"""Architectures of llama.cpp (b11434) that are not supported, and why."""

UNSUPPORTED_VARIANTS = {
    "llama4 without chunked attention (`llama4.attention.sliding_window` 0)": "llama.cpp aborts with a failed "
    "assertion on such a file (`f_attn_temp_scale != 0`, b11434), and accepts none without experts (MobileLLM)",
    "ernie4_5-moe with an `interleave_moe_layer_step` other than 1": "llama.cpp requires experts in each layer of the "
    "file, and computes only an activation in the layers that the step skips; all published models have 1",
    "non-causal lfm2 (`lfm2.attention.causal`)": "embedding models based on LFM2, whose convolution sees the tokens on "
    "both sides",
    "ModernBERT with decision blocks (`modern-bert.decision_block_count`)": "only llama-server's /v1/systemone uses "
    "them, which is not supported",
    "the pre-tokenizers `mmbert` and `whitespace`": "those of mmBERT and jina-embeddings-v2-base-zh; all others of "
    "llama.cpp are supported",
    "minimax-m3 with an `attention.indexer.block_size` that does not divide 256": "sequences, and therefore blocks, "
    "start at multiples of 256 in memory; MiniMax-M3 has 128",
    "mpt with query and key norms (`attn_q_norm`)": "llama.cpp aborts with a failed assertion on such a file "
    "(`ggml_is_contiguous`, b11434)",
}
"""Unsupported variants of supported architectures, and why."""
