// The official packages of OpenAI and Anthropic read streams that are silent for a while: node silent_streams.mjs http://ADDRESS NUM
// Prints, for each API and each stream of it, the text that has come, or what went wrong.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [address, num] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const model = "tiny/fake";
const messages = [{ role: "user", content: "hi" }];

async function completion(stream_options) {
  let text = "";
  const stream = await client.completions.create({ model, prompt: "hi", stream: true, stream_options });
  for await (const chunk of stream) text += chunk.choices[0]?.text ?? "";
  return text;
}

async function chat(stream_options) {
  let text = "";
  const stream = await client.chat.completions.create({ model, messages, stream: true, stream_options });
  for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
  return text;
}

async function response() {
  let text = "";
  const stream = await client.responses.create({ model, input: "hi", stream: true });
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  return text;
}

async function message() {
  return anthropic.messages.stream({ model, max_tokens: 50, messages }).finalText();
}

const ids = { include_event_ids: true };
const kinds = [() => completion(), () => completion(ids), () => chat(), () => chat(ids), () => response(), () => message()];
const streams = kinds.flatMap((read) => Array.from({ length: Number(num) }, read));
for (const result of await Promise.allSettled(streams)) {
  console.log(result.status === "fulfilled" ? result.value : `failed: ${result.reason}`);
}
