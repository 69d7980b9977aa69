"""The tokenizer inside a .gguf file -> tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.checkpoint.sentencepiece import Pieces, PieceType, add_special_pieces, build_sentencepiece
from triptych.checkpoint.tokenizer_files import KIMI_WORDS
from triptych.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TEMPLATE = "tokenizer.chat_template"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = _TEKKEN.replace(f"{_LOWER}+|", f"{_LOWER}+{_CONTRACTION}?|").replace(
    rf"{_LOWER}*|\p{{N}}", rf"{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
)
_EAST_ASIAN = r"[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_ASIAN = "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + (
    "".join(rf"|\s{{{length}}}(?!\S)" for length in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
    + r"|\s{1}"
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have a case, of the scripts that DeepSeek LLM knows, as parts of a character class."""
_YOUTU_SCRIPTS = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _EAST_ASIAN

_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "mellum",
            "exaone4",
            "trillion",
            "granite-docling",
            "gigachat",
            "a.x-4.0",
            "modern-bert",
            "roberta-bpe",
        ),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        (
            *(
                "llama-bpe",
                "llama3",
                "llama-v3",
                "falcon3",
                "falcon-h1",
                "midm-2.0",
                "lfm2",
                "dbrx",
                "smaug-bpe",
            ),
            "pixtral",
        ),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"),
            *("kormo", "f2llmv2"),
        ),
        (_QWEN2,),
    ),
    "ufakzeka": (_QWEN2.removeprefix(f"{_CONTRACTION}|"),),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "jais-2": (_JAIS2,),
    "exaone-moe": (_EXAONE_MOE,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "qwen35": (_QWEN35,),
    "seed-coder": (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), (_GPT4O,)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), (r"\p{N}{1,3}", _EAST_ASIAN, _PUNCTUATED)
    ),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _PUNCTUATED),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    "youtu": (_YOUTU_SCRIPTS, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")),
    "kimi-k2": (KIMI_WORDS,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
}
"""`tokenizer.ggml.pre` -> how a text is cut into words before merging, one cut after the other.

Source: llama.cpp's llama-vocab.cpp, in the form of the models' own tokenizer.json, which it quotes.
"""
_TAKES_WHOLE_WORDS = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "glm4", "glm5", "tekken", "youtu",
    "minicpm5", "pixtral",
)  # fmt: skip
"""Those that take a word that is a token as it is, even where its merges would not lead there."""
_BEGINS_SILENTLY = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "tekken",
    "pixtral",
)  # fmt: skip
"""Those that begin with BOS if the file does not say."""
_NO_WORDS = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.UNUSED)  # which BERT's files spell as they are
_COMPOSED = (
    "qwen2",
    "qwen35",
    "command-r",
    "tiny_aya",
    "olmo",
    "modern-bert",
)  # of which characters are composed first (NFC)


def write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; `metadata` and errors as in `build_tokenizer`."""
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"), pretty=False)
    config = _tokenizer_config(metadata)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the `tokenizer.ggml.*` keys of `metadata` describe.

    Raises:
        ModelError: a kind of tokenizer that is not known here, as a guess would split text differently;
            or a key that is missing or odd.
    """
    model = metadata.get("tokenizer.ggml.model")
    kinds = {
        "gpt2": _byte_level_tokenizer,
        "llama": _sentencepiece_tokenizer,
        "t5": _sentencepiece_tokenizer,
        "gemma4": _merged_pieces_tokenizer,
        "bert": _word_piece_tokenizer,
    }
    if not isinstance(model, str) or model not in kinds:
        raise ModelError(f"gguf: tokenizer.ggml.model: {model!r} is not supported, only {', '.join(kinds)}")
    try:
        tokenizer = kinds[model](metadata)
    except ModelError:
        raise
    except Exception as error:  # the library raises that very class: merges of tokens that there are not
        raise ModelError(f"gguf: tokenizer.ggml: cannot be used: {error}") from error
    _surround(tokenizer, metadata)
    return tokenizer


def stop_token_ids(metadata: dict[str, Any]) -> list[int]:
    """The ids that end an answer: end of text, and end of turn or message where they differ."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return list(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _byte_level_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    words = _WORDS.get(pre) if isinstance(pre, str) else None
    if words is None:
        raise ModelError(
            f"gguf: tokenizer.ggml.pre: {pre!r} is not supported, only "
            f"{', '.join(_WORDS)}; use the model's safetensors directory"
        )
    merges = [_split_merge(merge) for merge in _required(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=pre in _TAKES_WHOLE_WORDS))
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if pattern == words[-1] == _GPT2  # which is built in
        else pre_tokenizers.Split(Regex(pattern), "isolated")
        for pattern in words
    ]
    if words[-1] != _GPT2:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    add_special_pieces(tokenizer, metadata["tokenizer.ggml.tokens"], _token_types(metadata))
    return tokenizer


def _sentencepiece_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """SentencePiece, as llama.cpp reads it: BPE with scores ("llama"), or unigram ("t5")."""
    return build_sentencepiece(
        Pieces(
            list(_vocabulary(metadata)),
            _required(metadata, "tokenizer.ggml.scores"),
            _token_types(metadata),
            is_unigram=metadata["tokenizer.ggml.model"] == "t5",
            prefix="always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never",
            removes_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
            characters=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
        )
    )


def _merged_pieces_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return Gemma 4's: pieces like SentencePiece's, joined by ranked merges and not by their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = metadata["tokenizer.ggml.tokens"], _token_types(metadata)
    merges = [_split_merge(merge) for merge in _required(metadata, "tokenizer.ggml.merges")]
    unknown = _token(metadata, "unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(_vocabulary(metadata), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    add_special_pieces(tokenizer, tokens, types)
    return tokenizer


def _word_piece_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Return BERT's. The file spells `##ing` as `ing`, and `in` as `▁in`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    types = _token_types(metadata)
    tokens = [
        token if kind in _NO_WORDS else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(_vocabulary(metadata), types, strict=True)
    ]
    # Older files do not say whether texts are made lower case. Then no token of a model of lower case has a capital.
    has_capitals = any(
        "A" <= letter <= "Z"
        for token, kind in zip(tokens, types, strict=True)
        if kind not in _NO_WORDS
        for letter in token
    )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _token(metadata, "unknown_token_id") or "[UNK]"
    if unknown not in vocabulary:
        raise ModelError(f"gguf: tokenizer.ggml.unknown_token_id: is missing, and {unknown} is no token")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(metadata.get("tokenizer.ggml.normalizer.lowercase", not has_capitals)),
        strip_accents=metadata.get("tokenizer.ggml.normalizer.strip_accents"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    add_special_pieces(tokenizer, tokens, types)
    return tokenizer


def _surround(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Add the tokens before, behind and between texts that the file asks for, as llama.cpp does."""
    from tokenizers import processors

    kind = metadata["tokenizer.ggml.model"]
    is_bert = kind == "bert"
    bos = _asked_for(metadata, "bos", is_asked_for=is_bert or _adds_bos(metadata))
    ends = metadata.get("tokenizer.ggml.add_eos_token", kind == "t5")
    last = "seperator" if is_bert else "eos"  # which is how the key is spelled
    eos = _asked_for(metadata, last, is_asked_for=is_bert or ends)
    between = not is_bert and metadata.get("tokenizer.ggml.add_sep_token", False)
    separator = _asked_for(metadata, "seperator", is_asked_for=between)
    before, after, middle = ([each] if each else [] for each in (bos, eos, separator))
    if not (before or after or middle):
        return
    if is_bert:  # the second text has a type of its own
        pair = [*before, "$A", *after, "$B:1", *(f"{each}:1" for each in after)]
    elif middle:
        pair = [*before, "$A", *after, *middle, "$B", *after]
    else:
        second = [f"{each}:1" for each in before], [f"{each}:1" for each in after]
        pair = [*before, "$A", *after, *second[0], "$B:1", *second[1]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=pair,
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in {*before, *after, *middle}],
    )


def _asked_for(metadata: dict[str, Any], name: str, *, is_asked_for: bool) -> str | None:
    """Return a token that is added to texts, or None where none is asked for."""
    if not is_asked_for:
        return None
    keys = {"bos": ("bos_token_id", "cls_token_id"), "eos": ("eos_token_id",)}
    found = keys.get(name, (f"{name}_token_id", "eos_token_id"))
    token = next((token for key in found if (token := _token(metadata, key)) is not None), None)
    if token is None:
        raise ModelError(f"gguf: tokenizer.ggml.{found[0]}: is missing, but add_{name}_token asks for it")
    return token


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """Return whether prompts begin with BOS: as the file says, else as llama.cpp does for this kind of tokenizer."""
    silent = metadata["tokenizer.ggml.model"] in ("llama", "gemma4", "bert")
    silent = silent or metadata.get("tokenizer.ggml.pre") in _BEGINS_SILENTLY
    return bool(metadata.get("tokenizer.ggml.add_bos_token", silent))


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
        "bos_token": _token(metadata, "bos_token_id"),
        "eos_token": _token(metadata, "eos_token_id"),
        "unk_token": _token(metadata, "unknown_token_id"),
        "pad_token": _token(metadata, "padding_token_id"),
        "model_max_length": metadata.get("llama.context_length"),
    }
    names = {key.removeprefix(f"{_TEMPLATE}."): key for key in metadata if key.startswith(f"{_TEMPLATE}.")}
    if template := metadata.get(_TEMPLATE):
        config["chat_template"] = template
    if names:
        named = {"default": template} if template else {}
        named |= {name: metadata[key] for name, key in names.items()}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return config


def _token(metadata: dict[str, Any], key: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"gguf: tokenizer.ggml.{key}: {token_id} is outside the {len(tokens)} tokens")
    return str(tokens[token_id])


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(
            f"gguf: tokenizer.ggml.tokens: {len(tokens) - len(vocabulary)} tokens are listed twice"
        )
    return vocabulary


def _token_types(metadata: dict[str, Any]) -> list[int]:
    return list(_required(metadata, "tokenizer.ggml.token_type"))


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or " " in right:
        raise ModelError(f"gguf: tokenizer.ggml.merges: {merge!r} is not two tokens and a space")
    return left, right


def _required(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"gguf: {key}: is missing")
    return metadata[key]
