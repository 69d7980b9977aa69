"""Routes for text and token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych_services.frontend.http.answers import error_answers, to_json
from triptych_services.frontend.http.document import takes
from triptych_services.frontend.http.errors import json_response
from triptych_services.frontend.http.openai import answers, convert
from triptych_services.frontend.http.openai.schema import DetokenizeRequest, TokenizeRequest
from triptych_services.frontend.http.state import generator_of, reader_of

router = APIRouter(responses=error_answers(400, 404, 413, 429, 503), tags=["tokens"])

_PIECE = 4096  # entries of a list that are written at once, in 0.4 ms


@router.post("/tokenize", responses={200: {"model": answers.TokenizeAnswer}})
@takes(TokenizeRequest)
async def tokenize(request: Request) -> Response:
    """Text or a conversation -> token ids."""
    model, prompt, add_special_tokens, with_texts = await reader_of(request).read(
        request, TokenizeRequest, convert.read_tokenize
    )
    generator = generator_of(request)
    token_ids = await generator.text.tokenize(
        prompt,
        model=model,
        add_special_tokens=add_special_tokens,
        paths={} if isinstance(prompt, str) else convert.CHAT_PATHS,
    )
    facts = {"count": len(token_ids), "max_model_len": generator.find_model(model).max_model_len}
    text = generator.text_model
    body = await text.run(
        len(token_ids), _write_tokens, facts, token_ids, text.tokenizer.token if with_texts else None
    )
    return Response(body, media_type="application/json")


def _write_tokens(
    facts: Mapping[str, int], token_ids: Sequence[int], to_text: Callable[[int], str] | None
) -> str:
    """Return the answer to `/tokenize` as JSON.

    Args:
        to_text: Gives the text of a token; None: texts were not asked for.
    """
    lists: dict[str, Sequence[object]] = {"tokens": token_ids}
    if to_text is not None:
        lists["token_strs"] = [to_text(token_id) for token_id in token_ids]
    fields = [to_json(facts)[1:-1], *(f'"{name}":{_write_list(values)}' for name, values in lists.items())]
    return "{" + ",".join(fields) + "}"


def _write_list(values: Sequence[object]) -> str:
    """Return a list as JSON, written in pieces: each call of the encoder holds the interpreter's lock to its end."""
    pieces = (to_json(values[start : start + _PIECE])[1:-1] for start in range(0, len(values), _PIECE))
    return f"[{','.join(pieces)}]"


@router.post("/detokenize", responses={200: {"model": answers.DetokenizeAnswer}})
@takes(DetokenizeRequest)
async def detokenize(request: Request) -> Response:
    """Token ids -> text."""
    model, token_ids, skip_special_tokens = await reader_of(request).read(
        request, DetokenizeRequest, convert.read_detokenize
    )
    text = await generator_of(request).text.detokenize(
        token_ids, model=model, skip_special_tokens=skip_special_tokens, path="tokens"
    )
    return json_response({"prompt": text})


@router.get("/tokenizer_info", responses={200: {"model": answers.TokenizerInfoAnswer}})
async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template of the model."""
    tokenizer = generator_of(request).text_model.tokenizer
    return json_response(
        {
            "tokenizer_class": tokenizer.class_name,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "unk_token": tokenizer.unk_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
        }
    )
