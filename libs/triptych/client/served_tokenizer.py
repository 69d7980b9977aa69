"""The tokenizer of a served model, in this process: the server sends its files once, and no further call is needed."""

from __future__ import annotations

import asyncio
import copy
import io
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from triptych.client.conversation import Conversation, Tool
from triptych.client.grpc_client import GenerationClient
from triptych.errors import FeatureDisabled, InvalidRequest, ModelError

if TYPE_CHECKING:
    from triptych.text.chat_template import ChatTemplate
    from triptych.text.tokenizer import Tokenizer

Ids: TypeAlias = list[int]
_MAX_FILE_BYTES = 1 << 29  # unpacked; the largest that are known have 40 MB


class ServedTokenizer:
    """Behaves as transformers' tokenizer of the same files, in all that it has.

        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        tokenizer(["a", "b"]).input_ids

    `fetch_tokenizer` makes it. Threads may share it.
    """

    def __init__(self, text: Tokenizer, max_model_len: int) -> None:
        """
        Args:
            max_model_len: Tokens that prompt and output may have together.
        """
        self._text = text
        self.model_max_length = max_model_len
        """Tokens that prompt and output may have together."""
        self.bos_token = text.bos_token
        self.eos_token = text.eos_token
        self.pad_token = text.pad_token
        self.unk_token = text.unk_token
        self.chat_template = text.chat_template
        """Jinja source of the model's chat template; None if it has none."""
        self.all_special_ids = sorted(text.special_ids)
        self.all_special_tokens = [text.token(token_id) for token_id in self.all_special_ids]
        self._templates = lru_cache(maxsize=8)(self._compile)

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._text.vocab_size

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary itself, without those that were added to it."""
        return self._text.num_base_tokens

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence; None if there is none."""
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a sequence; None if there is none."""
        return self._id_of(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        """Id of the token that fills up; None if there is none."""
        return self._id_of(self.pad_token)

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for what is not known; None if there is none."""
        return self._id_of(self.unk_token)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included."""
        return self._text.get_vocab()

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Ids:
        """Return the token ids of a text.

        Args:
            add_special_tokens: Add what the model wants around a plain text.
            truncation: Keep at most `max_length` tokens, or those that the model can take: the first ones.
        """
        if not isinstance(text, str):
            raise InvalidRequest("text", f"expected text, not {text!r:.80}")
        limit = (max_length or self.model_max_length) if truncation else None
        return self._text.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=limit, keeps_beginning=True
        )

    def __call__(self, text: str | Sequence[str], **options: Any) -> TokenizedTexts:
        """Return the `input_ids` and the `attention_mask` of a text, or of each of several.

        Args:
            options: As in `encode`.
        """
        if isinstance(text, str):
            ids = self.encode(text, **options)
            return TokenizedTexts(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(each, **options) for each in text]
        return TokenizedTexts(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def decode(
        self, token_ids: int | Sequence[int] | Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> str | list[str]:
        """Return the text of token ids, or those of several lists of them.

        Bytes that are no character become U+FFFD.
        """
        rows: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # an array or a tensor
        if isinstance(rows, int):
            rows = [rows]
        if len(rows) and not isinstance(rows[0], int):
            return self.batch_decode(rows, skip_special_tokens)
        return self._text.decode(rows, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[int] | Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token ids."""
        rows = sequences.tolist() if hasattr(sequences, "tolist") else sequences
        return [
            self._text.decode([row] if isinstance(row, int) else row, skip_special_tokens=skip_special_tokens)
            for row in rows
        ]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]: ...
    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str]:
        """Return a token, or several, as the vocabulary spells them; empty for an unknown id."""
        if isinstance(ids, int):
            return self._text.token(ids)
        special = self._text.special_ids if skip_special_tokens else ()
        return [self._text.token(int(token_id)) for token_id in ids if token_id not in special]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of several; that of `unk_token`, or None, for an unknown one."""
        if isinstance(tokens, str):
            token_id = self._text.token_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]  # type: ignore[misc]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens that are spelled as in the vocabulary."""
        ids = [token_id for token in tokens if (token_id := self._text.token_id(token)) is not None]
        return self._text.decode(ids, skip_special_tokens=False)

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Return the prompt that a conversation becomes: its token ids, or its text.

        Args:
            chat_template: Name of one of the model's templates, or Jinja source to use in their place.
            tokenize: Return token ids. False: the text, special tokens spelled out.
            return_dict: Return token ids as `__call__` does.
            template_kwargs: Extra variables for the template.

        Raises:
            InvalidRequest: The model has no template, or it refuses the messages.
        """
        name = chat_template if chat_template in self._text.other_templates else None
        try:
            template = self._templates(None if name else chat_template)
        except ModelError as error:
            raise InvalidRequest("chat_template", str(error)) from None
        prompt = template.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template=name or "",
            **template_kwargs,
        )
        if not tokenize:
            return prompt
        tokenized = self(prompt, add_special_tokens=False)  # the template has written them
        return tokenized if return_dict else tokenized.input_ids

    def _compile(self, source: str | None) -> ChatTemplate:
        from triptych.text.chat_template import ChatTemplate

        text = copy.copy(self._text)
        if source:
            text.chat_template, text.other_templates = source, {}
        return ChatTemplate(text)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._text.token_id(token)


class TokenizedTexts(dict[str, Any]):
    """`input_ids` and `attention_mask`, as entries and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


async def fetch_tokenizer(client: GenerationClient, model: str = "") -> ServedTokenizer:
    """Return the tokenizer of a served model.

    Args:
        model: Its name. Empty: the only one.

    Raises:
        FeatureDisabled: Packages for it are missing; names them.
        ModelError: The server's files are none of a tokenizer.
    """
    served = await client.get_model(model)
    return await asyncio.to_thread(_unpack, await client.fetch_tokenizer(), served.max_model_len)


def _unpack(archive: bytes, max_model_len: int) -> ServedTokenizer:
    try:
        import jinja2  # noqa: F401 (for chat templates)

        from triptych.checkpoint.tokenizer_files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
        from triptych.text.tokenizer import CHAT_TEMPLATE_FILE, Tokenizer
    except ImportError as error:
        why = f"needs {error.name}; pip install 'triptych[tokenizer]'"
        raise FeatureDisabled("get_tokenizer", why) from None
    with tempfile.TemporaryDirectory(prefix="triptych-") as directory:
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as packed:
                for name in {TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE} & set(
                    packed.namelist()
                ):
                    if packed.getinfo(name).file_size > _MAX_FILE_BYTES:
                        raise ModelError(f"the server's {name} has more than {_MAX_FILE_BYTES >> 20} MiB")
                    (Path(directory) / name).write_bytes(packed.read(name))
        except zipfile.BadZipFile as error:
            raise ModelError(f"the server's tokenizer cannot be unpacked: {error}") from None
        return ServedTokenizer(Tokenizer.from_directory(Path(directory)), max_model_len)
