"""An engine in an asyncio program."""

import asyncio

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        for choice in output.outputs:
            text += choice.text
        if output.finished:
            break
    return text


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="embedded", enforce_eager=True))
    try:
        texts = await asyncio.gather(*(stream(engine, "The future is", str(i)) for i in range(3)))
        assert len(set(texts)) == 1  # of one seed
        print("generated:", texts[0])
    finally:
        engine.shutdown()


asyncio.run(main())
