"""The tokenizer of a served model, as the server has it: no files are needed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triptych.client.conversation import ChatOptions, Conversation, Tool
from triptych.client.grpc_client import GenerationClient, ServedModel
from triptych.client.loop_thread import LoopThread


class AsyncServedTokenizer:
    """Asks the frontend, so that ids are those which it would generate from. Each call is a round trip."""

    def __init__(self, client: GenerationClient, model: ServedModel) -> None:
        self._client = client
        self.model = model
        """Name, context length, size of the vocabulary, and ids that end a sequence."""

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with what the model wants around it."""
        return (await self._client.tokenize(text, model=self.model.name)).token_ids

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that are no character become U+FFFD."""
        return await self._client.detokenize(
            token_ids, model=self.model.name, skip_special_tokens=skip_special_tokens
        )

    async def apply_chat_template(
        self,
        conversation: Conversation,
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """Return the prompt that a conversation becomes.

        Args:
            tokenize: Return its token ids. False: their text, special tokens spelled out.
            template_kwargs: Extra variables for the template.
        """
        options = ChatOptions(
            tools or (),
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        tokenized = await self._client.tokenize(conversation, model=self.model.name, chat=options)
        return tokenized.token_ids if tokenize else await self.decode(tokenized.token_ids)


class ServedTokenizer:
    """`AsyncServedTokenizer` for plain programs."""

    def __init__(self, tokenizer: AsyncServedTokenizer, loop: LoopThread) -> None:
        self._tokenizer = tokenizer
        self._loop = loop

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self._tokenizer.model.vocab_size

    @property
    def model_max_length(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._tokenizer.model.max_model_len

    @property
    def eos_token_id(self) -> int | None:
        """The first of the ids that end a sequence; None if there is none."""
        return next(iter(self._tokenizer.model.eos_token_ids), None)

    def encode(self, text: str) -> list[int]:
        """See `AsyncServedTokenizer.encode`."""
        return self._loop.run(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `AsyncServedTokenizer.decode`."""
        return self._loop.run(self._tokenizer.decode(token_ids, skip_special_tokens))

    def apply_chat_template(
        self, conversation: Conversation, tools: Sequence[Tool] | None = None, **options: Any
    ) -> list[int] | str:
        """See `AsyncServedTokenizer.apply_chat_template`."""
        return self._loop.run(self._tokenizer.apply_chat_template(conversation, tools, **options))
