"""Small tokenizers with the pipelines of published ones: theirs in all but their vocabulary."""

from __future__ import annotations

import functools
import inspect
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_LINES = (
    "The quick brown fox doesn't jump over 1234567 lazy dogs, does it? I'LL see; we've seen.",
    "def f(x: int) -> int:\n    return x**2 + 0x1F  # ²³½ ⅷ",
    "naïve café Größe ÉTAT İstanbul ǅ e\u0301 A\u030a ﬁne ﬂag Straße",
    "你好，世界。これは日本語です。한국어도 됩니다 好好好 世界世界",
    "مرحبا بالعالم ١٢٣ שָׁלוֹם עולם Привет, мир! Ελληνικά हिन्दी भाषा ไทยภาษา বাংলা",
    '👩‍👩‍👧‍👦🇫🇷👍🏽 emoji 🦊🦊 {"key": [1.5, true, null]}\t\ttabs\r\n  two  spaces',
)
CORPUS = [*inspect.getsource(inspect).splitlines()[:300], *_LINES * 5]

_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
QWEN2 = CL100K.replace("{1,3}", "")
QWEN3_5 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
O200K = (
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_END}"
)
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PUNCTUATION}|{_END}"
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-Ֆﬀ-ﬆＡ-Ｚａ-ｚ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
)
EXAONE = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", O200K)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@dataclass(frozen=True)
class Family:
    """A pipeline, and what the model's other files say of it."""

    build: Callable[[], Tokenizer]
    config: dict[str, Any] = field(default_factory=dict)
    """The values of tokenizer_config.json."""


def special(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, **({"normalized": False} | flags)) for text in texts]


def plain(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=False, **({"normalized": False} | flags)) for text in texts]


TURNS = special("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOOLS = plain("<tool_call>", "</tool_call>", "<think>", "</think>")


def around(tokenizer: Tokenizer, before: str | None, after: str | None = None) -> Any:
    names = [name for name in (before, after) if name]
    ids = [(name, tokenizer.token_to_id(name)) for name in names]
    head, tail = [before] if before else [], [after] if after else []
    second = [*(f"{each}:1" for each in head), "$B:1", *(f"{each}:1" for each in tail)]
    first = [*head, "$A", *tail]
    return processors.TemplateProcessing(single=first, pair=[*first, *second], special_tokens=ids)


def split(*patterns: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def bytes_of(*cuts: Any, regex: bool = False, prefix: bool = False) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    return pre_tokenizers.Sequence([*cuts, last]) if cuts else last


def byte_level(
    cuts: Any,
    *,
    added: Sequence[AddedToken] = TURNS,
    normalizer: Any = None,
    before: str | None = None,
    after: str | None = None,
    takes_whole_words: bool = False,
) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(ignore_merges=takes_whole_words))
        tokenizer.pre_tokenizer = cuts
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
        add(tokenizer, added)
        parts = [processors.ByteLevel(trim_offsets=False)]
        parts += [around(tokenizer, before, after)] if before or after else []
        tokenizer.post_processor = processors.Sequence(parts)
        return tokenizer

    return build


def add(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    for token in tokens:  # in this order, as the ids of published files are
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def legacy() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def fallback(
    *,
    normalizer: Any = None,
    cuts: Any = None,
    strips: bool = False,
    added: Sequence[AddedToken] = (),
    bos: str = "<s>",
) -> Callable[[], Tokenizer]:
    """Build a BPE with bytes for what is in no piece: Llama 2 and after, Gemma."""

    def build() -> Tokenizer:
        control = ["<unk>", bos, "</s>"]
        trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trained.normalizer = normalizer or normalizers.Replace(" ", "▁")
        trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        lines = [line for line in CORPUS if line.isascii()]
        trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=500, special_tokens=control))
        vocabulary = dict(sorted(trained.get_vocab().items(), key=lambda item: item[1]))
        # the bytes stand behind the control tokens, as in these files
        vocabulary = {
            token: place
            for place, token in enumerate([
                *control,
                *(f"<0x{byte:02X}>" for byte in range(256)),
                *(token for token in vocabulary if token not in control),
            ])
        }  # fmt: skip
        merges = [tuple(merge) for merge in json.loads(trained.model.__getstate__())["merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if cuts is not None:
            tokenizer.pre_tokenizer = cuts
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips)
        add(tokenizer, [*special(*control), *added])
        tokenizer.post_processor = around(tokenizer, bos)
        return tokenizer

    return build


@functools.cache
def charsmap(rule: str) -> bytes:
    """Return the rules of SentencePiece by which characters are normalized."""
    from transformers.utils import sentencepiece_model_pb2_new as protobuf

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=400, model_type="bpe",
        normalization_rule_name=rule, num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    found = protobuf.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap
    assert found
    return bytes(found)


def unigram(
    *,
    normalizer: Callable[[], Any] | None,
    cuts: Any,
    control: Sequence[str],
    before: str | None = None,
    after: str | None = None,
    mask: str | None = None,
) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram())
        if normalizer is not None:
            tokenizer.normalizer = normalizer()
        tokenizer.pre_tokenizer = cuts
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        lines = [line for line in CORPUS if line.isascii()]
        trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=list(control), unk_token="<unk>")
        tokenizer.train_from_iterator(lines, trainer)
        add(tokenizer, special(*control) + (special(mask, lstrip=True) if mask else []))
        tokenizer.post_processor = around(tokenizer, before, after)
        return tokenizer

    return build


def word_pieces(
    *, lower: bool, control: Sequence[str], decoder_cleans: bool = True
) -> Callable[[], Tokenizer]:
    pad, unknown, first, last, mask = control

    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(unk_token=unknown, max_input_chars_per_word=100))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=decoder_cleans)
        lines = [line for line in CORPUS if line.isascii()]
        trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=list(control))
        tokenizer.train_from_iterator(lines, trainer)
        add(tokenizer, special(pad, unknown, first, last) + special(mask, lstrip=mask == "<mask>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A", last],
            pair=[first, "$A", last, "$B:1", f"{last}:1"],
            special_tokens=[(each, tokenizer.token_to_id(each)) for each in (first, last)],
        )
        return tokenizer

    return build


def letters(suffix: str) -> Callable[[], Tokenizer]:
    """Build the first GPT's: the last piece of a word has an end."""

    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix=suffix))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.BPEDecoder(suffix=suffix)
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], end_of_word_suffix=suffix)
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer

    return build


def words(decoder: Any) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(vocab_size=400, special_tokens=["<unk>", "<pad>", "|"])
        tokenizer.train_from_iterator(CORPUS, trainer)
        if decoder is not None:
            tokenizer.decoder = decoder
        return tokenizer

    return build


def metaspace(scheme: str, *, is_split: bool) -> Any:
    return pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=is_split)


BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MPNET = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>")
NFC = normalizers.NFC
SPACES = normalizers.Replace(Regex(" {2,}"), " ")
DIGITS = pre_tokenizers.Digits(individual_digits=True)
QWEN = TURNS + TOOLS
HARMONY = special("<|startoftext|>", "<|return|>", "<|channel|>", "<|message|>", "<|end|>")
PHI3 = special("<|endoftext|>", "<|assistant|>", "<|end|>") + plain("</think>", rstrip=True)
RUNS = plain(*(" " * length for length in range(24, 1, -1)), normalized=True)  # Phi 2 and CodeGen

FAMILIES: dict[str, Family] = {
    "gpt2": Family(byte_level(bytes_of(regex=True), added=special("<|endoftext|>"))),
    "gpt-neox": Family(byte_level(bytes_of(regex=True), normalizer=NFC(), added=TURNS + RUNS[:4])),
    "olmo": Family(byte_level(bytes_of(regex=True), normalizer=NFC(), after="<|endoftext|>")),
    "olmo2": Family(byte_level(bytes_of(*split(CL100K)))),
    "llama3": Family(
        byte_level(
            bytes_of(*split(CL100K)),
            added=special("<|begin_of_text|>", "<|eot_id|>"),
            before="<|begin_of_text|>",
            takes_whole_words=True,
        )
    ),
    "llama4": Family(
        byte_level(
            bytes_of(*split(O200K)), added=special("<|begin_of_text|>", "<|eot|>"), before="<|begin_of_text|>"
        )
    ),
    "qwen2": Family(byte_level(bytes_of(*split(QWEN2)), normalizer=NFC(), added=QWEN)),
    "qwen3.5": Family(byte_level(bytes_of(*split(QWEN3_5)), normalizer=NFC(), added=QWEN)),
    "deepseek-v2": Family(byte_level(bytes_of(*split(*DEEPSEEK_LLM), DIGITS), before="<|im_start|>")),
    "deepseek-v3": Family(
        byte_level(
            bytes_of(*split(*DEEPSEEK_V3)),
            before="<｜begin▁of▁sentence｜>",
            added=special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
            + plain("<｜User｜>", "<think>"),
        )
    ),
    "gemma": Family(
        fallback(
            normalizer=normalizers.Replace(" ", "▁"),
            added=special("<start_of_turn>") + plain("\n\n", "▁▁"),
            cuts=pre_tokenizers.Split(" ", "merged_with_previous"),
            bos="<bos>",
        ),
        {"bos_token": "<bos>"},
    ),
    "gemma4": Family(
        fallback(
            normalizer=normalizers.Replace(" ", "▁"),
            added=special("<|turn>", "<turn|>") + plain("<|tool>"),
            cuts=pre_tokenizers.Split(" ", "merged_with_previous"),
            bos="<bos>",
        ),
        {"bos_token": "<bos>"},
    ),
    "gpt-oss": Family(byte_level(bytes_of(*split(O200K)), added=HARMONY, takes_whole_words=True)),
    "falcon": Family(
        byte_level(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Punctuation("contiguous"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                    pre_tokenizers.Digits(individual_digits=False),
                    *split("[0-9][0-9][0-9]"),
                ]
            ),
            added=special(">>TITLE<<", ">>ABSTRACT<<", "<|endoftext|>"),
        )
    ),
    "falcon-h1": Family(byte_level(bytes_of(*split(CL100K)), before="<|im_start|>")),
    "starcoder": Family(
        byte_level(bytes_of(DIGITS, regex=True), added=special("<|endoftext|>", "<fim_prefix>"))
    ),
    "granite": Family(byte_level(bytes_of(DIGITS, regex=True), added=special("<|start_of_role|>") + TOOLS)),
    "smollm": Family(byte_level(bytes_of(DIGITS, regex=True))),
    "bloom": Family(byte_level(bytes_of(*split(BLOOM)), added=special("<unk>", "<s>", "</s>", "<pad>"))),
    "glm4": Family(
        byte_level(bytes_of(*split(CL100K)), added=special("[gMASK]", "<sop>", "<|user|>"), before="[gMASK]")
    ),
    "command-r": Family(
        byte_level(
            bytes_of(DIGITS, regex=True),
            normalizer=NFC(),
            before="<BOS_TOKEN>",
            added=special("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"),
        )
    ),
    "aya": Family(byte_level(bytes_of(*split(*TINY_AYA)), normalizer=NFC())),
    "minimax-m2": Family(byte_level(bytes_of(*split(O200K)), added=special("]~!b[", "]~b]", "[e~[") + TOOLS)),
    "hunyuan": Family(
        byte_level(bytes_of(*split(*DEEPSEEK_V3)), added=special("<｜hy_begin▁of▁sentence｜>"))
    ),
    "ernie": Family(
        fallback(normalizer=normalizers.Replace(" ", "▁"), added=special("<mask:0>", "<|im_end|>"))
    ),
    "exaone": Family(
        byte_level(bytes_of(*split(EXAONE)), normalizer=NFC(), added=special("[|user|]", "[|endofturn|]"))
    ),
    "bailing": Family(
        byte_level(bytes_of(*split(BAILING)), normalizer=NFC(), added=special("<role>", "</role>"))
    ),
    "phi2": Family(byte_level(bytes_of(regex=True), added=special("<|endoftext|>") + RUNS)),
    "phi3": Family(fallback(normalizer=legacy(), strips=True, added=PHI3)),
    "phi4": Family(
        byte_level(bytes_of(*split(CL100K)), added=special("<|im_sep|>", lstrip=True, rstrip=True))
    ),
    "mpt": Family(byte_level(bytes_of(regex=True), normalizer=NFC(), added=TURNS + RUNS[:6])),
    "stablelm2": Family(byte_level(bytes_of(*split(QWEN2)), normalizer=NFC())),
    "mistral-nemo": Family(
        byte_level(bytes_of(*split(TEKKEN)), added=special("<s>", "[INST]"), before="<s>")
    ),
    "llama2": Family(fallback(normalizer=legacy(), strips=True)),
    "mistral": Family(
        fallback(cuts=metaspace("first", is_split=False), strips=True, added=special("[INST]", "[/INST]"))
    ),
    "yi": Family(fallback(normalizer=normalizers.Replace(" ", "▁"), added=TURNS)),
    "solar": Family(
        fallback(normalizer=legacy(), strips=True, added=plain("<|x|>", lstrip=True, rstrip=True))
    ),
    "jamba": Family(fallback(cuts=metaspace("never", is_split=False), added=special("<|bom|>", "<|eom|>"))),
    "kimi": Family(byte_level(bytes_of(*split(O200K)), added=special("<|im_user|>", "<|im_middle|>"))),
    "lfm2": Family(byte_level(bytes_of(*split(CL100K)), before="<|im_start|>", takes_whole_words=True)),
    "t5": Family(
        unigram(
            normalizer=lambda: normalizers.Precompiled(charsmap("nmt_nfkc")),
            cuts=metaspace("always", is_split=True),
            control=("<pad>", "</s>", "<unk>", "<extra_id_0>"),
            after="</s>",
        ),
        {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"},
    ),
    "xlm-roberta": Family(
        unigram(
            normalizer=lambda: normalizers.Precompiled(charsmap("nmt_nfkc")),
            cuts=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), metaspace("always", is_split=True)]
            ),
            control=ROBERTA,
            before="<s>",
            after="</s>",
            mask="<mask>",
        ),
    ),
    "bge-m3": Family(
        unigram(
            normalizer=lambda: normalizers.Sequence([normalizers.Precompiled(charsmap("nmt_nfkc")), SPACES]),
            cuts=metaspace("always", is_split=True),
            control=ROBERTA,
            before="<s>",
            after="</s>",
            mask="<mask>",
        ),
    ),
    "albert": Family(
        unigram(
            normalizer=lambda: normalizers.Sequence(
                [
                    normalizers.Replace("``", '"'),
                    normalizers.NFKD(),
                    normalizers.StripAccents(),
                    normalizers.Lowercase(),
                    normalizers.Precompiled(charsmap("nmt_nfkc")),
                ]
            ),
            cuts=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), metaspace("always", is_split=True)]
            ),
            control=("<pad>", "<unk>", "[CLS]", "[SEP]"),
            before="[CLS]",
            after="[SEP]",
            mask="[MASK]",
        ),
    ),
    "deberta-v3": Family(
        unigram(
            normalizer=lambda: normalizers.Sequence(
                [normalizers.Strip(), normalizers.Precompiled(charsmap("nfkc")), SPACES]
            ),
            cuts=pre_tokenizers.Sequence([metaspace("always", is_split=True)]),
            control=("[PAD]", "<unk>", "[CLS]", "[SEP]"),
            before="[CLS]",
            after="[SEP]",
            mask="[MASK]",
        ),
    ),
    "bert-uncased": Family(word_pieces(lower=True, control=BERT)),
    "bert-cased": Family(word_pieces(lower=False, control=BERT)),
    "bert-untidied": Family(word_pieces(lower=False, control=BERT, decoder_cleans=False)),
    "mpnet": Family(word_pieces(lower=True, control=MPNET)),
    "roberta": Family(
        byte_level(
            bytes_of(regex=True),
            before="<s>",
            after="</s>",
            added=special("<s>", "</s>") + special("<mask>", lstrip=True),
        )
    ),
    "bart-with-a-space": Family(
        byte_level(bytes_of(regex=True, prefix=True), added=special("<mask>", lstrip=True))
    ),
    "modernbert": Family(
        byte_level(
            bytes_of(regex=True),
            normalizer=NFC(),
            before="[CLS]",
            after="[SEP]",
            added=special("[CLS]", "[SEP]") + special("[MASK]", lstrip=True) + RUNS[:8],
        )
    ),
    "words-of-one-kind": Family(
        byte_level(
            bytes_of(regex=True),
            added=plain("over", "x", single_word=True) + plain("café", "ﬁ", normalized=True),
            normalizer=normalizers.NFKC(),
        )
    ),
    "openai-gpt": Family(letters("</w>")),
    "word-level": Family(words(None)),
    "ctc": Family(words(decoders.CTC(pad_token="<pad>", word_delimiter_token="|", cleanup=False))),
}
"""Name -> pipeline. Source: the tokenizer.json that a model of the family was published with."""
