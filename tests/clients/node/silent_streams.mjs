// The official openai package reads streams that are silent for a while: node silent_streams.mjs http://ADDRESS/v1 NUM
// Prints, for each API and each stream of it, the text that has come, or what went wrong.

import OpenAI from "openai";

const [baseURL, num] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
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

const ids = { include_event_ids: true };
const kinds = [() => completion(), () => completion(ids), () => chat(), () => chat(ids), () => response()];
const streams = kinds.flatMap((read) => Array.from({ length: Number(num) }, read));
for (const result of await Promise.allSettled(streams)) {
  console.log(result.status === "fulfilled" ? result.value : `failed: ${result.reason}`);
}
