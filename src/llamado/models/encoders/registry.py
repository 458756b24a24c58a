"""Supported projectors, by their name in `clip.projector_type`, and the encoders of a projector file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from llamado.gguf.header import ModelFile
from llamado.media.chunks import Piece
from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.encoder import MediaEncoder
from llamado.models.encoders.keys import EncoderKeys, projector_type
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.weights import Weights

log = logging.getLogger(__name__)

_FOLDER = "llamado.models.encoders"


class Projector(NamedTuple):
    """Import path of an encoder (`module:Class`) and the models that use it."""

    path: str
    models: str

    def load(self) -> type[MediaEncoder]:
        """Import and return its class."""
        module, name = self.path.split(":")
        found: type[MediaEncoder] = getattr(import_module(f"{_FOLDER}.{module}"), name)
        return found


PICTURES: dict[str, Projector] = {
    "deepseekocr": Projector("tiled.deepseek_ocr:DeepSeekOcr1Encoder", "DeepSeek-OCR, Unlimited-OCR"),
    "deepseekocr2": Projector("tiled.deepseek_ocr:DeepSeekOcr2Encoder", "DeepSeek-OCR 2"),
    "deepseek4v": Projector("any_size.deepseek4:DeepSeek4Encoder", "DeepSeek V4"),
    "dots3note_v": Projector("any_size.dots3note:Dots3NoteEncoder", "dots3-note"),
    "gemma3nv": Projector("one_size.mobilenet:Gemma3nEncoder", "Gemma 3n"),
    "gemma4uv": Projector("any_size.gemma4:Gemma4UnifiedEncoder", "Gemma 4 unified"),
    "gemma4v": Projector("any_size.gemma4:Gemma4Encoder", "Gemma 4"),
    "kimik25": Projector("any_size.kimi:KimiK25Encoder", "Kimi K2.5, GLM 5.2"),
    "kimivl": Projector("any_size.kimi:KimiVlEncoder", "Kimi-VL"),
    "lightonocr": Projector("any_size.pixtral:LightOnOcrEncoder", "LightOnOCR"),
    "pixtral": Projector("any_size.pixtral:PixtralEncoder", "Pixtral, Mistral Small 3"),
    "step3vl": Projector("tiled.step3:Step3Encoder", "Step3-VL"),
    "yasa2": Projector("one_size.convnext:RekaEncoder", "Reka Edge"),
    "gemma3": Projector("one_size.siglip:Gemma3Encoder", "Gemma 3 4B, 12B, 27B"),
    "qwen2vl_merger": Projector("any_size.qwen_vl:Qwen2VlEncoder", "Qwen2-VL"),
    "qwen2.5vl_merger": Projector("any_size.qwen_vl:Qwen25VlEncoder", "Qwen2.5-VL"),
    "qwen2.5o": Projector("any_size.qwen_vl:Qwen25VlEncoder", "Qwen2.5-Omni"),
    "qwen3vl_merger": Projector("any_size.qwen_vl:Qwen3VlEncoder", "Qwen3-VL"),
    "glm4v": Projector("any_size.glm4v:Glm4vEncoder", "GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR"),
    "glm5v": Projector("any_size.glm4v:Glm5vEncoder", "GLM-5V"),
    "paddleocr": Projector("any_size.paddleocr:PaddleOcrEncoder", "PaddleOCR-VL"),
    "dots_ocr": Projector("any_size.paddleocr:DotsOcrEncoder", "dots.ocr"),
    "ling3vl": Projector("any_size.qwen_vl:Ling3VlEncoder", "Ling 3 VL"),
    "youtuvl": Projector("any_size.qwen_vl:YoutuVlEncoder", "Youtu-VL"),
    "mimovl": Projector("any_size.mimovl:MimoVlEncoder", "MiMo-V2.5"),
    "hunyuanvl": Projector("any_size.hunyuanvl:HunyuanVlEncoder", "HunyuanOCR, Hunyuan-VL"),
    "minimax_m3": Projector("any_size.minimax_m3:MiniMaxM3Encoder", "MiniMax-M3"),
    "muse-glimmer": Projector("any_size.muse_glimmer:MuseGlimmerEncoder", "Muse Glimmer"),
    "exaone4_5": Projector("any_size.qwen_vl:Exaone45Encoder", "EXAONE 4.5"),
    "adapter": Projector("tiled.glm_edge:GlmEdgeEncoder", "GLM-Edge-V"),
    "cogvlm": Projector("tiled.cogvlm:CogVlmEncoder", "CogVLM"),
    "granite4_vision": Projector("tiled.granite4:Granite4VisionEncoder", "Granite Vision 4"),
    "idefics3": Projector("tiled.idefics3:Idefics3Encoder", "SmolVLM, SmolVLM2, Granite Docling"),
    "internvl": Projector("tiled.internvl:InternVlEncoder", "InternVL 2.5, 3, 3.5"),
    "janus_pro": Projector("one_size.janus:JanusProEncoder", "Janus Pro"),
    "ldp": Projector("tiled.mobilevlm:LdpEncoder", "MobileVLM"),
    "ldpv2": Projector("tiled.mobilevlm:LdpV2Encoder", "MobileVLM V2"),
    "lfm2": Projector("tiled.lfm2:Lfm2Encoder", "LFM2-VL, LFM2.5-VL"),
    "llama4": Projector("tiled.llama4:Llama4Encoder", "Llama 4 Scout, Maverick"),
    "minicpmv4_6": Projector("tiled.minicpmv46:MiniCpmV46Encoder", "MiniCPM-V 4.6"),
    "mlp": Projector("tiled.llava:LlavaEncoder", "LLaVA 1.5 and 1.6, BakLLaVA, Yi-VL, Granite Vision 3"),
    "nemotron_v2_vl": Projector("tiled.internvl:NemotronV2VlEncoder", "Nemotron Nano 12B V2 VL"),
    "phi4": Projector("any_size.phi4:Phi4Encoder", "Phi-4 reasoning vision"),
    "resampler": Projector("tiled.minicpmv:MiniCpmVEncoder", "MiniCPM-V 2.5 to 4.5, MiniCPM-o 2.6 and 4.5"),
}
SOUNDS: dict[str, Projector] = {
    "ultravox": Projector("sounds.whisper:UltravoxEncoder", "Ultravox 0.5"),
    "voxtral": Projector("sounds.whisper:VoxtralEncoder", "Voxtral Mini, Small"),
    "qwen2a": Projector("sounds.whisper:Qwen2AudioEncoder", "Qwen2-Audio"),
    "qwen2.5o": Projector("sounds.whisper:Qwen2AudioEncoder", "Qwen2.5-Omni"),
    "qwen3a": Projector("sounds.qwen3:Qwen3AudioEncoder", "Qwen3-ASR, Qwen3-Omni"),
    "gemma4ua": Projector("sounds.gemma4_raw:Gemma4RawAudioEncoder", "Gemma 4 with raw audio"),
    "lfm2a": Projector("sounds.lfm2:Lfm2AudioEncoder", "LFM2-Audio"),
    "parakeet": Projector("sounds.parakeet:ParakeetEncoder", "Nemotron 3 Nano Omni"),
    "granite_speech": Projector("sounds.granite_speech:GraniteSpeechEncoder", "Granite Speech 3.3, 4"),
    "gemma4a": Projector("sounds.gemma4:Gemma4AudioEncoder", "Gemma 4 E2B, E4B"),
    "dots3note_a": Projector("sounds.dots3note:Dots3NoteEncoder", "dots3-note"),
    "mimo_audio": Projector("sounds.mimo:MimoAudioEncoder", "MiMo-V2.5"),
    "glma": Projector("sounds.whisper:GlmEncoder", "GLM-ASR Nano"),
    "meralion": Projector("sounds.whisper:MeralionEncoder", "MERaLiON 2"),
    "musicflamingo": Projector("sounds.whisper:MusicFlamingoEncoder", "Music Flamingo, Audio Flamingo 3"),
}

_SPEECH = "they belong to models that generate speech, which llamado does not"
UNSUPPORTED: dict[str, str] = dict.fromkeys(
    ("qwen3tts_spkenc", "qwen3tts_gen", "pockettts_spkenc", "pockettts_gen"), _SPEECH
) | {"gemma3na": "llama.cpp has the name but no implementation; pictures of Gemma 3n are supported"}
"""llama.cpp's other projectors (clip-impl.h), and the reason why each is not supported."""


class MediaEncoders(NamedTuple):
    """The encoders of a projector file; None for a kind of media that it does not have."""

    image: MediaEncoder | None = None
    audio: MediaEncoder | None = None

    def of(self, kind: MediaKind) -> MediaEncoder:
        """Return the encoder for a kind of media. Raises MediaError if there is none."""
        found = self.image if kind is MediaKind.IMAGE else self.audio
        if found is None:
            raise MediaError(f"this model does not take {kind.value} input")
        return found

    def prepare(self, media: Media) -> list[Piece]:
        """Return the pieces of a prompt for a picture or sound (see MediaEncoder.prepare). Raises MediaError."""
        return self.of(media.kind).prepare(media)

    @property
    def each(self) -> list[MediaEncoder]:
        """Return the encoders that there are."""
        return [encoder for encoder in self if encoder is not None]


def load_encoders(
    file: ModelFile,
    *,
    min_tokens: int = 0,
    max_tokens: int = 0,
    has_token: Callable[[str], bool] = lambda text: False,
) -> MediaEncoders:
    """Return the encoders of a projector file. `min_tokens`, `max_tokens`: the user's limits for a picture; 0: none.
    `has_token` returns True if the text model's vocabulary has a token with a text.

    Raises GgufError, InvalidModel or UnsupportedModel.
    """
    metadata = file.metadata
    if metadata.str_("general.architecture", "") != "clip":
        raise UnsupportedModel(f"{file.source} is no projector file (mmproj): its architecture is not 'clip'")
    found: dict[MediaKind, MediaEncoder] = {}
    for kind, flag, table in (
        (MediaKind.IMAGE, "clip.has_vision_encoder", PICTURES),
        (MediaKind.AUDIO, "clip.has_audio_encoder", SOUNDS),
    ):
        if not metadata.bool_(flag, False):
            continue
        name = projector_type(metadata, kind)
        projector = table.get(name)
        if projector is None and found:
            log.warning(
                "projector: %s input is off, the projector %r is not supported (file=%s)", kind.value, name, file.source
            )
            continue
        if projector is None:
            raise UnsupportedModel(f"{file.source}: the projector '{name}' ({kind.value}) is not supported")
        keys = EncoderKeys(metadata, kind, min_tokens=min_tokens, max_tokens=max_tokens, has_token=has_token)
        found[kind] = projector.load()(keys, Weights(file))
    encoders = MediaEncoders(found.get(MediaKind.IMAGE), found.get(MediaKind.AUDIO))
    if not found:
        raise UnsupportedModel(f"{file.source} has neither a vision nor an audio encoder")
    if len({encoder.n_embd for encoder in encoders.each}) > 1:
        raise InvalidModel(f"{file.source}: the embeddings of pictures and sounds have different widths")
    return encoders
